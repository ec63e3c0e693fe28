"""What rows come with, as the configuration and the store together decide it: which latent, how many tokens.

Checked once, when the loader is made. Letters: B rows, L tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import StoreError, UsageError
from bucketline.loader.batch import LatentKind
from bucketline.loader.draws import Purpose, uniform_on_host
from bucketline.loader.layout import is_class_conditional

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from bucketline.loader.config import LoaderConfig
    from bucketline.store import Bucket
    from bucketline.store.reader import OpenShards

FLIPPED = "latent_flipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """How a loader's rows are conditioned."""

    caption_dropout: float
    flip: float
    pad_multiple: int | None  # None: every batch has `max_tokens`
    max_tokens: int  # L at most

    def padded(self, longest: int) -> int:
        """Give L of a batch whose longest caption has so many tokens."""
        if self.pad_multiple is None:
            return self.max_tokens
        return max(1, -(-longest // self.pad_multiple)) * self.pad_multiple

    def flips(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say which rows are given as their mirror image, `[B]`."""
        if self.flip == 0.0:
            return np.zeros(len(keys), dtype=bool)
        return uniform_on_host(keys, Purpose.FLIP) < self.flip


def make_conditioning(store: OpenShards, buckets: Iterable[Bucket], config: LoaderConfig) -> Conditioning:
    """Hold what is asked for against what the store has.

    Raises:
        UsageError: where rows are to be flipped and a bucket has no flipped latents, where the store's longest caption is
            longer than `pad_to`, or where classes are to be padded.
    """
    if config.flip:
        for bucket in buckets:
            if FLIPPED not in {column.name for column in bucket.columns}:
                raise UsageError(
                    f"flip is {config.flip}, and {store.where} has no {FLIPPED} in {bucket.name}; expected 0, "
                    "or a store that was packed with --flip"
                )
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
        longest = max(1, -(-longest // config.pad_multiple)) * config.pad_multiple
    return Conditioning(
        caption_dropout=config.caption_dropout, flip=config.flip, pad_multiple=config.pad_multiple, max_tokens=longest
    )


def latent_kind(store: OpenShards) -> LatentKind:
    """Read what the store says that its latents are; where it says nothing, one latent a picture.

    Raises:
        StoreError: where it says something that this reader does not know.
    """
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
