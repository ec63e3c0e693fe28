"""Names of the columns that encoders fill, which ingest writes and the loader and trainer read."""

from __future__ import annotations

from enum import StrEnum

LATENT = "latent"  # of an image, [C, h, w]
FLIPPED = "latent_flipped"  # of the horizontally mirrored image
TOKENS = "tokens"  # of a caption, [T, D]
TOKENS_SCALE = "tokens_scale"  # of a caption with quantised tokens, [T, S]; see `quantised_text`
TOKENS_ERROR = "tokens_error"  # what quantising a caption's tokens cost, [3]
POOLED = "pooled"  # the pooled embedding of a caption, [D]
CLASS_LABELS = "class_labels"  # the token column of a class-conditional store: one token per caption, its class


class LatentKind(StrEnum):
    """The output of the VAE that a store holds."""

    MODE = "mode"  # the most likely latent, or the latent of a VAE without a distribution
    SAMPLE = "sample"  # one draw, fixed at packing
    MOMENTS = "moments"  # C means, then C log-variances; the trainer draws from them at every step
