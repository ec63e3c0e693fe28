"""Captions: encoded in batches of equal length, and kept for the rows that have them."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import LockedError, StoreError
from bucketline.files.atomic_write import FILE_MODE, explaining
from bucketline.ingest.encoders.text_columns import Cut
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.model_file import json_hash
from bucketline.store import Store
from bucketline.store.format.block import IS_IMAGE, RAGGED_PREFIX, SEEN_EMPTY, SEEN_IMAGES, TOKENS, caption_digest
from bucketline.store.format.text import Caption, as_arrays, make_caption, quantised_caption
from bucketline.store.read.samples import checked_row
from bucketline.store.write.publish import KEPT_CAPTIONS, LocalTarget, newest_manifest
from bucketline.store.write.row_form import RowColumn
from bucketline.store.write.store_writer import StoreWriter
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from PIL.Image import Image

    from bucketline.ingest.encoders.text_columns import CaptionEncoder, Embedding, SeeingEncoder, Seen
    from bucketline.ingest.parallel.items import Share
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.schema import Schema
    from bucketline.store.format.text import Entry, TextSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedCaption:
    """A caption in its stored form, with what there is to report of it."""

    caption: Caption
    is_truncated: bool = False
    cuts: tuple[Cut, ...] = ()


def as_caption(spec: TextSpec, digest: bytes, embedding: Embedding) -> Caption:
    """Return an encoded caption in its stored form; quantises its tokens if its columns are of quantised text."""
    from bucketline.torch_dtypes import as_stored  # imports torch

    fixed = {name: as_stored(value) for name, value in embedding.fixed.items()}
    if not spec.is_quantised:
        return make_caption(spec, digest, {spec.tokens[0].name: as_stored(embedding.tokens)}, fixed)
    return quantised_caption(spec, digest, as_stored(embedding.tokens), fixed)


def problem_of(spec: TextSpec, text: str, embedding: Embedding) -> RejectedError | None:
    """Return why a caption cannot be stored; None if it can."""
    if embedding.refusal is not None:
        return RejectedError(Reason.REFUSED, embedding.refusal)
    if not embedding.is_finite:
        return RejectedError(Reason.TOKENS, f"of the caption {text[:80]!r} as {spec.tokens[0].dtype}")
    return None


class FreshCaptions:
    """Encodes captions.

    A caption's embedding does not depend on what is encoded with it: only captions that are padded to the same length make a
    batch, and one that is not full is filled up. So a caption has the same bits in every shard, with phases one and two.
    """

    def __init__(self, encoder: CaptionEncoder, spec: TextSpec, batch_size: int) -> None:
        """`spec`: the store's text columns."""
        from bucketline.ingest.encoders.vae import OomRetry  # imports torch

        self._encoder, self._spec, self._batch_size = encoder, spec, batch_size
        self._encode = OomRetry(encoder.encode, "caption")
        (self.empty_embedding,) = self.embeddings([""])
        empty = self._stored("", self.empty_embedding)
        assert isinstance(empty, EncodedCaption), empty  # or the model would have been refused
        self.empty = empty.caption

    def of(self, texts: Sequence[str]) -> list[EncodedCaption | RejectedError]:
        """Return captions in order; of one that cannot be stored, why."""
        return [self._stored(text, embedding) for text, embedding in zip(texts, self.embeddings(texts), strict=True)]

    def embeddings(self, texts: Sequence[str]) -> list[Embedding]:
        """Encode captions in full batches of one padded length each, whether they can be stored or not; see `problem`."""
        by_length: dict[int, list[int]] = {}
        for n, length in enumerate(self._encoder.padded_lengths(texts)):
            by_length.setdefault(length, []).append(n)
        found: dict[int, Embedding] = {}
        for own in by_length.values():
            for at in range(0, len(own), self._batch_size):
                part = own[at : at + self._batch_size]
                filled = [texts[n] for n in (*part, *part[:1] * (self._batch_size - len(part)))]
                found.update(zip(part, self._encode(filled), strict=False))
        return [found[n] for n in range(len(texts))]

    def _stored(self, text: str, embedding: Embedding) -> EncodedCaption | RejectedError:
        if (problem := self.problem(text, embedding)) is not None:
            return problem
        caption = as_caption(self._spec, caption_digest(text), embedding)
        return EncodedCaption(caption=caption, is_truncated=embedding.is_truncated, cuts=embedding.cuts)

    def problem(self, text: str, embedding: Embedding) -> RejectedError | None:
        """Return why a caption cannot be stored; None if it can."""
        return problem_of(self._spec, text, embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSample:
    """The captions of a sample, encoded with its images, and the entries of its row."""

    captions: tuple[Embedding, ...]
    entries: Mapping[str, Entry]  # by ragged group


class SeenCaptions:
    """Encodes captions with the images of their sample, for an encoder that sees these."""

    def __init__(self, encoder: SeeingEncoder, schema: Schema) -> None:
        from bucketline.ingest.encoders.vae import OomRetry  # imports torch

        self._encoder, self._schema, self._spec = encoder, schema, schema.text.spec()
        self._encode = OomRetry(self._encode_each, "caption with its images")
        nothing = {column.name: np.zeros((0, *column.shape), dtype=column.numpy_dtype) for column in self._spec.tokens}
        self.empty = make_caption(self._spec, caption_digest(""), nothing, {})  # of a shard: each sample has one of its own

    def of(self, texts: Sequence[str], images: Sequence[Image]) -> SeenSample | RejectedError:
        """Encode the captions of one sample with its images; return why it cannot be stored if it cannot."""
        from bucketline.torch_dtypes import as_stored  # imports torch

        (seen,) = self._encode([(texts, images)])
        if seen.empty.refusal is not None:
            return RejectedError(Reason.PARTNER, f"of its references, {seen.empty.refusal}")
        if not seen.empty.is_finite:
            return RejectedError(Reason.TOKENS, f"of its images, as {self._spec.delivered.tokens[0].dtype}")
        groups = self._schema.groups
        columns = {
            SEEN_IMAGES: {TOKENS: as_stored(seen.images), IS_IMAGE: seen.is_image.numpy().astype("u1")},
            SEEN_EMPTY: {TOKENS: as_stored(seen.empty.tokens)},
        }
        entries = {
            RAGGED_PREFIX + name: make_caption(groups[RAGGED_PREFIX + name], None, own, {}) for name, own in columns.items()
        }
        return SeenSample(captions=seen.captions, entries=entries)

    def stored(self, text: str, digest: bytes, embedding: Embedding) -> EncodedCaption | RejectedError:
        """Return a caption in its stored form, or why it cannot be stored."""
        if (problem := problem_of(self._spec, text, embedding)) is not None:
            return problem
        caption = as_caption(self._spec, digest, embedding)
        return EncodedCaption(caption=caption, is_truncated=embedding.is_truncated, cuts=embedding.cuts)

    def _encode_each(self, samples: Sequence[tuple[Sequence[str], Sequence[Image]]]) -> list[Seen]:
        return [self._encoder.encode_seen(texts, images) for texts, images in samples]


# --------------------------------------------------------------------------------------------------------------- kept captions
# Embeddings of captions that are kept on the disk until the rows with them are written: what phases = "two" encodes first.
#
# They are stores of their own in `pending/captions/`, with a row for each caption by the digest of its text, so that commits,
# kills and checksums are those of any store. Each process writes into one of its own, and reads all. Another pack may read
# them at the same time: each shares a lock as long as it does, and who ends last removes them.

# JSON: whether the caption is truncated, its cuts, and what quantising it cost
_NOTE = RowColumn(role="features/note", dtype="U8", shape=("length",))
_NOTE_BYTES = 256  # notes are filled up with spaces, so that few lengths make few buckets


class KeptCaptions:
    """The captions that are kept next to a store's shards, of which one process adds some."""

    def __init__(self, folder: Path, manifest: Manifest, share: Share) -> None:
        """Read what is kept in a store's `folder`, after adopting what killed processes committed."""
        made = {"text_encoder": manifest.encoders["text_encoder"]}
        self._encoders, self._spec = made, manifest.text.spec()
        self._root = folder / "pending" / KEPT_CAPTIONS / json_hash([made, encode(manifest.text)])
        self._share, self._lock = share, _lock(folder, fcntl.LOCK_SH)
        for path in self._root.glob("*"):
            if int(path.name) % share.world_size == share.rank and (left := newest_manifest(path)) is not None:
                with suppress(LockedError), LocalTarget(path).writing(left):  # unless another pack writes it
                    pass
        self._stores: list[Store] = []
        self._bad: dict[str, RejectedError] = {}
        self.reopen()

    def close(self) -> None:
        """Let another process remove what is kept."""
        os.close(self._lock)

    def reopen(self) -> None:
        """Open the newest generation of all that is kept."""
        found = ((path, newest_manifest(path)) for path in sorted(self._root.glob("*")))
        self._stores = [Store(path, manifest) for path, manifest in found if manifest is not None]

    def missing(self, texts: Iterable[str]) -> list[str]:
        """Return those of some captions that are not kept, each once."""
        wanted = {_name(text): text for text in texts if text not in self._bad}
        return [text for name, text in wanted.items() if not any(store.find_digest(_key(name)) for store in self._stores)]

    def writer(self, held: ExitStack, empty: Caption, shard_bytes: int) -> CaptionWriter:
        """Return what adds captions until `held` is closed, in a store that no other pack writes; `reopen` afterwards."""
        for number in itertools.count(self._share.rank, self._share.world_size):
            writer = CaptionWriter(self._root / str(number), self._encoders, self._spec, empty, shard_bytes)
            with suppress(LockedError):
                held.enter_context(writer)
                return writer
        raise AssertionError("there is always another number")

    def refuse(self, text: str, error: RejectedError) -> None:
        """Note that a caption cannot be stored."""
        self._bad[text] = error

    @property
    def empty(self) -> Caption:
        (found,) = self.of([""])
        assert isinstance(found, EncodedCaption)
        return found.caption

    def of(self, texts: Sequence[str]) -> list[EncodedCaption | RejectedError]:
        """Return kept captions in order; of one that cannot be stored, why."""
        return [self._bad.get(text) or self._read(text) for text in texts]

    def _read(self, text: str) -> EncodedCaption:
        for store in self._stores:
            if (found := store.find_digest(_key(_name(text)))) is None:
                continue
            shard, record = found
            try:
                ordinal = store.shards.index(shard)
                is_truncated, cuts, *measured = json.loads(checked_row(store, ordinal, record)[_NOTE.name])
                caption = store.caption(ordinal, record.caption_rows[0])
            except StoreError as error:
                raise StoreError(
                    f"{self._root}: a kept caption cannot be read: {error}; remove that folder and rerun the command"
                ) from error
            if measured:
                caption = replace(caption, error=np.array(measured, dtype=np.float32))
            return EncodedCaption(caption=caption, is_truncated=is_truncated, cuts=tuple(decode(Cut, one) for one in cuts))
        raise StoreError(
            f"the caption {text[:80]!r} was not encoded in the first phase, since its image changed; rerun the command"
        )


class CaptionWriter(StoreWriter):
    """Adds captions to those that are kept; after an error in its block, what was committed stays for the next run."""

    def __init__(self, path: Path, encoders: Mapping[str, object], spec: TextSpec, empty: Caption, shard_bytes: int) -> None:
        self._text_spec = spec
        super().__init__(
            path,
            columns=[_NOTE],
            encoders=encoders,
            text=spec,
            empty_caption=as_arrays(spec, empty),
            max_captions=1,
            shard_bytes=shard_bytes,
        )

    def add_caption(self, text: str, found: EncodedCaption) -> None:
        """Add a caption; `commit` makes it durable."""
        error = [] if found.caption.error is None else found.caption.error.tolist()
        note = json.dumps([found.is_truncated, [encode(cut) for cut in found.cuts], *error]).encode("ascii")
        note += b" " * (-len(note) % _NOTE_BYTES)
        columns = {_NOTE.role: np.frombuffer(note, dtype="u1")}
        self.add(_name(text), "train", columns, {text: as_arrays(self._text_spec, found.caption)})

    def has_caption(self, text: str) -> bool:
        """Return whether a caption was added, by this run or one before."""
        return _name(text) in self


def remove_kept_captions(store: Path) -> None:
    """Remove all kept captions of a store, whose rows are published, unless another pack uses them."""
    if not (folder := store / "pending" / KEPT_CAPTIONS).exists():
        return
    with explaining(store), suppress(BlockingIOError):
        lock = _lock(store, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".lock").unlink()
        os.close(lock)


def _lock(store: Path, how: int) -> int:
    """Lock a store's kept captions, and return the descriptor that holds the lock; BlockingIOError if it is another's."""
    path = store / "pending" / f"{KEPT_CAPTIONS}.lock"
    with ExitStack() as opened:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        opened.callback(os.close, fd)
        fcntl.flock(fd, how)
        if os.fstat(fd).st_nlink:
            opened.pop_all()
            return fd
    return _lock(store, how)  # they were removed just now


def _name(text: str) -> str:
    return caption_digest(text).hex()


def _key(name: str) -> bytes:
    from bucketline.store.format.block import sample_digest

    return sample_digest(name)
