"""Captions as a store has them: encoded when they are needed, or kept from before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.store.format.hashing import caption_digest
from bucketline.store.format.text_block import Caption, make_caption, quantised_caption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.ingest.encoders.text_columns import CaptionEncoder, Cut, Embedding
    from bucketline.store.format.text_block import TextSpec


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


class FreshCaptions:
    """Encodes captions.

    A caption's embedding does not depend on what is encoded with it: only captions that are padded to the same length make a
    batch, and one that is not full is filled up. So a caption has the same bits in every shard, with phases one and two.
    """

    def __init__(self, encoder: CaptionEncoder, spec: TextSpec, batch_size: int) -> None:
        """`spec`: the store's text columns."""
        from bucketline.ingest.encoders.oom_retry import OomRetry  # imports torch

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
        if embedding.refusal is not None:
            return RejectedError(Reason.REFUSED, embedding.refusal)
        if not embedding.is_finite:
            return RejectedError(Reason.TOKENS, f"of the caption {text[:80]!r} as {self._spec.tokens[0].dtype}")
        return None
