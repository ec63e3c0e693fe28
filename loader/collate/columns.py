"""The columns of a batch: those requested, captions chosen by keyed draws, flips and crops; checks that the store has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import StoreError, UsageError
from bucketline.loader.batch import COLUMN_PREFIX, LATENTS
from bucketline.loader.collate.buffer_layout import RequestedGroup, is_class_conditional
from bucketline.loader.config import TextForm
from bucketline.loader.plan.rng import Purpose, uniform_on_host
from bucketline.store.format.block import fixed_columns
from bucketline.store.format.columns import (
    AUDIO,
    FLIPPED_SUFFIX,
    PRESENT_PREFIX,
    SAME,
    TARGET,
    EntriesOf,
    LatentKind,
    flipped_role,
    role_of,
    stored_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from bucketline.loader.batch import Batch
    from bucketline.loader.config import LoaderConfig
    from bucketline.store import Bucket, Store
    from bucketline.store.read.store import OpenShards


_FIXED = {column.name for column in fixed_columns(1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedColumn:
    """A column that is delivered."""

    role: str
    field: str  # of the buffer
    name: str  # in the blocks
    mirrored: str  # the name of the column that replaces it in a flipped row, or its own
    present: str | None  # the name of the column that says which rows have it; None if all do


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """A loader's settings for columns, captions, ragged groups, flips and padding."""

    columns: tuple[RequestedColumn, ...]
    caption_dropout: float
    flip: float
    pad_multiple: int | None  # None: every batch has the longest L
    groups: tuple[RequestedGroup, ...]  # the captions, then ragged groups

    def padded(self, group: RequestedGroup, longest: int) -> int:
        """Return L of a group in a batch whose longest entry has `longest` tokens."""
        return group.longest if self.pad_multiple is None else _rounded(longest, self.pad_multiple)

    def flips(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows are delivered as their mirror image, `[B]`."""
        if self.flip == 0.0:
            return np.zeros(len(keys), dtype=bool)
        return uniform_on_host(keys, Purpose.FLIP) < self.flip


def make_conditioning(store: OpenShards, buckets: Iterable[Bucket], config: LoaderConfig) -> Conditioning:
    """Return the conditioning of a configuration after comparing it with the store."""
    columns = _requested_columns(store, list(buckets), config)
    if is_class_conditional(store.text) and (config.pad_to or config.pad_multiple):
        name = "pad_to" if config.pad_to else "pad_multiple"
        raise UsageError(
            f"{name} is {config.pad_to or config.pad_multiple}, and {store.where} has classes, not captions; leave it out"
        )
    if config.pad_to is not None and config.pad_to < store.max_tokens:
        raise UsageError(
            f"pad_to is {config.pad_to}, and the longest caption of {store.where} has {store.max_tokens} tokens, which would "
            f"be cut; expected {store.max_tokens} or more (or pack with --max-tokens {config.pad_to})"
        )
    longest = config.pad_to or store.max_tokens
    if config.pad_multiple is not None:
        longest = _rounded(longest, config.pad_multiple)
    shown = store.text if TextForm(config.text) is TextForm.STORED else store.text.delivered
    text = RequestedGroup(spec=store.text, shown=shown, number=None, optional=False, longest=longest)
    return Conditioning(
        columns=columns,
        caption_dropout=config.caption_dropout,
        flip=config.flip,
        pad_multiple=config.pad_multiple,
        groups=(text, *_requested_groups(store, config)),
    )


def _rounded(longest: int, multiple: int) -> int:
    return max(1, -(-longest // multiple)) * multiple


def _requested_groups(store: OpenShards, config: LoaderConfig) -> tuple[RequestedGroup, ...]:
    requested = []
    for name in config.ragged:
        if name not in store.ragged or config.ragged.count(name) > 1:
            raise UsageError(
                f"ragged is {list(config.ragged)!s:.200}, and {store.where} has {list(store.ragged)}; expected some of these, "
                "each once"
            )
        group, spec = store.ragged[name], store.ragged_spec(name)
        is_of_rows = group.of is EntriesOf.ROWS
        if config.flip and is_of_rows and group.mirrored != SAME:
            raise UsageError(
                f"flip is {config.flip}, and the ragged group {name!r} of {store.where} has no entries of mirror images; "
                f"expected 0, or a store that was written with mirrored={SAME!r} for it"
            )
        requested.append(
            RequestedGroup(
                spec=spec,
                shown=spec,
                number=spec.group if is_of_rows else None,
                optional=group.optional,
                longest=store.max_entry_tokens[name],
            )
        )
    return tuple(requested)


def _requested_columns(store: OpenShards, buckets: Sequence[Bucket], config: LoaderConfig) -> tuple[RequestedColumn, ...]:
    if len(set(config.columns)) != len(config.columns):
        raise UsageError(f"columns is {list(config.columns)}; expected each role once")
    names = {bucket.name: {column.name for column in bucket.columns} for bucket in buckets}
    requested = []
    for role in config.columns:
        name = stored_name(role)
        mirrored = stored_name(flipped_role(role)) if config.flip and role != AUDIO else name
        for bucket, own in names.items():
            _refuse_lacking(store, [name, mirrored], bucket)
            if name not in own or role_of(name) != role or role.endswith(FLIPPED_SUFFIX):
                known = sorted(map(role_of, own - _FIXED))
                roles = [one for one in known if not one.endswith(FLIPPED_SUFFIX) and not one.startswith(PRESENT_PREFIX)]
                raise UsageError(f"columns has {role!r:.80}, and {store.where} has {roles} in {bucket}; expected some of these")
            if mirrored not in own:
                together = "" if role == TARGET else f": its {role} would not be that of a flipped row"
                raise UsageError(
                    f"flip is {config.flip}, and {store.where} has no {mirrored} in {bucket}{together}; expected 0, "
                    "or a store that was packed with --flip"
                )
        present = PRESENT_PREFIX + name
        requested.append(
            RequestedColumn(
                role=role,
                field=LATENTS if role == TARGET else COLUMN_PREFIX + role,
                name=name,
                mirrored=mirrored,
                present=present if any(present in own for own in names.values()) else None,
            )
        )
    return tuple(requested)


def _refuse_lacking(store: OpenShards, names: Sequence[str], bucket: str) -> None:
    """Check that all rows of a bucket have those of some columns that were added."""
    for name in names:
        if name in store.added:
            try:
                store.bucket(bucket).column(name)
            except StoreError as error:
                raise UsageError(f"columns has {role_of(name)!r:.80}: {error}; or leave it out of columns") from error


def latent_kind(store: OpenShards) -> LatentKind:
    """Return the kind of a store's latents from its manifest; `MODE` if the manifest does not name one."""
    vae = store.encoders.get("vae")
    said = vae.get("latents") if isinstance(vae, dict) else None
    if said is None:
        return LatentKind.MODE
    if said not in set(LatentKind):
        raise StoreError(
            f"{store.where}: its manifest has encoders.vae.latents {said!r:.40}, expected one of {', '.join(LatentKind)}; "
            "update bucketline"
        )
    return LatentKind(str(said))


EMPTY = -1


def choose_captions(num_captions: NDArray[np.int64], keys: NDArray[np.int64], dropout: float = 0.0) -> NDArray[np.int64]:
    """Draw a caption index for each row, `[B]`; EMPTY if the caption is dropped or the sample has none.

    `num_captions`: `[B]`, stored captions. `keys`: `[B]`, as in `Batch.keys`. `dropout`: probability of the empty caption.
    """
    chosen = (uniform_on_host(keys, Purpose.CAPTION) * num_captions).astype(np.int64)
    dropped = uniform_on_host(keys, Purpose.CAPTION_DROPOUT) < dropout
    return np.where(dropped | (num_captions == 0), EMPTY, chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenCaption:
    """A row's sample and the caption that was chosen for it."""

    id: str
    text: str  # "" if it was dropped, or the sample has none
    num_captions: int  # of the sample


def captions_of(stores: Sequence[Store], batch: Batch, dropout: float = 0.0) -> list[ChosenCaption]:
    """Return the captions of a batch's rows, `[B]`, by repeating the loader's draw; `dropout` as the loader had it."""
    records = [_record(stores, digest.tobytes()) for digest in batch.ids.cpu().numpy()]
    chosen = choose_captions(np.array([len(texts) for _, texts in records]), batch.keys.cpu().numpy(), dropout)
    return [
        ChosenCaption(id=name, text="" if n == EMPTY else texts[n], num_captions=len(texts))
        for (name, texts), n in zip(records, chosen.tolist(), strict=True)
    ]


def _record(stores: Sequence[Store], digest: bytes) -> tuple[str, tuple[str, ...]]:
    for store in stores:
        if found := store.find_digest(digest):
            return found[1].id, found[1].captions[: store.manifest.max_captions]
    raise AssertionError(f"no sample has the digest {digest.hex()} of a batch's row")


def resized_width(source: NDArray[np.int64], bucket: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the widths of the resized images, `[B]`, from source and bucket sizes, `[B, 2]` each, height first.

    >>> resized_width(np.array([[300, 500], [500, 300]]), np.array([[192, 256], [192, 256]])).tolist()
    [320, 256]
    """
    height, width = source.T
    bucket_height, bucket_width = bucket.T
    scaled = (2 * width * bucket_height + height) // (2 * height)  # rounded half up
    wide: NDArray[np.int64] = np.where(bucket_height * width >= bucket_width * height, scaled, bucket_width)
    return wide


def mirrored_left(left: NDArray[np.int64], source: NDArray[np.int64], bucket: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the left edges of the same crops in the mirrored images, `[B]`; below 0 if an image is not wide enough."""
    return resized_width(source, bucket) - left - bucket[:, 1]
