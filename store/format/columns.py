"""Names and roles of the columns that encoders fill, which writers write and the loader and trainer read."""

from __future__ import annotations

import re
from enum import StrEnum

LATENT = "latent"  # of an image, [C, h, w]
FLIPPED = "latent_flipped"  # of the horizontally mirrored image
TOKENS = "tokens"  # of a caption, [T, D]
TOKENS_SCALE = "tokens_scale"  # of a caption with quantised tokens, [T, S]; see `text_codec`
POOLED = "pooled"  # the pooled embedding of a caption, [D]
PLAIN_FAMILY = "transformers"  # of captions that are stored as the last hidden state of a model's only text encoder
CLASS_LABELS = "class_labels"  # the token column of a class-conditional store: one token per caption, its class

TARGET = "target"  # the role of what a model learns to make; its column is stored as `latent`
AUDIO = "audio"
FLIPPED_SUFFIX = "/flipped"  # of a role: the same of the horizontally mirrored image
ROLE = re.compile(r"(target|mask|audio|(control|reference|features)/(?!flipped\b)[A-Za-z0-9_-]{1,64})(/flipped)?")
PRESENT_PREFIX = "present/"  # of an optional column's name: the column that says which rows have a value
RAGGED_PREFIX = "ragged/"  # of a ragged group's name: its blocks, and the column with the entry of each row
SAME = "same"  # the `mirrored` of a ragged group whose entries hold for a row and for its mirror image
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")  # of a ragged group, and of its columns
_STORED = {TARGET: LATENT, TARGET + FLIPPED_SUFFIX: FLIPPED}  # the other roles are the names of their columns
_ROLES = {name: role for role, name in _STORED.items()}


def stored_name(role: str) -> str:
    """Return the name of a role's column in the blocks; a column's name is returned unchanged.

    >>> stored_name("target"), stored_name("control/depth")
    ('latent', 'control/depth')
    """
    return _STORED.get(role, role)


def role_of(name: str) -> str:
    """Return a column's role from its name in the blocks; the inverse of `stored_name`."""
    return _ROLES.get(name, name)


def flipped_role(role: str) -> str:
    """Return the role of the mirrored counterpart, with which a row's column is replaced if the row is flipped."""
    return role + FLIPPED_SUFFIX


class EntriesOf(StrEnum):
    """The owners of a ragged group's entries."""

    CAPTIONS = "captions"  # entry n belongs to caption n of the shard
    ROWS = "rows"  # a row's column `ragged/NAME` has the number of its entry


class LatentKind(StrEnum):
    """The output of the VAE that a store holds."""

    MODE = "mode"  # the most likely latent, or the latent of a VAE without a distribution
    SAMPLE = "sample"  # one draw, fixed at packing
    MOMENTS = "moments"  # C means, then C log-variances; the trainer draws from them at every step
