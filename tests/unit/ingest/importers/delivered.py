"""The rows of an imported store as a loader delivers them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.format.hashing import sample_digest


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """A row of a batch."""

    bucket: str
    latent: Tensor
    columns: dict[str, Tensor]  # by role, without those that the row lacks
    tokens: Tensor  # [T, D]


def delivered(path: Path, *roles: str, split: str = "train") -> dict[str, Delivered]:
    """Return every row as a loader delivers it, with the columns of these roles."""
    store, found = Store.open(path), {}
    asked: dict[str, Any] = {"batch_size": 1, "epochs": 1, "window": 0, "remainder": "partial"}
    options = LoaderConfig(split=split, columns=("target", *roles), **asked)
    ids = {sample_digest(name): name for bucket in store.buckets() for name in bucket.sample_ids(np.arange(bucket.num_rows))}
    with Loader(store, options) as loader:
        for batch in loader:
            there = {role: role not in batch.present or bool(batch.present[role][0]) for role in roles}
            found[ids[batch.ids[0].numpy().tobytes()]] = Delivered(
                bucket=batch.bucket,
                latent=batch.latents[0].clone(),
                columns={role: batch.columns[role][0].clone() for role in roles if there[role]},
                tokens=batch.tokens[0][batch.token_mask[0]].clone(),
            )
    return found
