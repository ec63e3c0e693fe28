"""Bucketline."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from bucketline.bench.peers.loops.run import EPOCHS
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import LatentColumn, RowColumn, StoreWriter

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.bench.peers.loops.run import Row, Run

COLUMNS = [LatentColumn(channels=4), RowColumn(role="features/number", dtype="I64", shape=())]
ROLES = ("target", "features/number")


def write(folder: Path, train: dict[str, list[Row]], val: dict[str, list[Row]]) -> None:
    """Write the data set."""
    with StoreWriter(folder / "rows.store", columns=COLUMNS) as writer:
        for split, rows in (("train", train), ("val", val)):
            for row in chain.from_iterable(rows.values()):
                number = np.int64(row.number)
                writer.add(f"{split}/{row.number}", split, {"target": row.latent, "features/number": number})


def train(run: Run) -> None:
    """Train for `EPOCHS` epochs, from a checkpoint if there is one."""
    config = LoaderConfig(batch_size=run.batch_size, columns=ROLES, epochs=EPOCHS)
    held_out = LoaderConfig(batch_size=run.batch_size, columns=ROLES, split="val", remainder="partial", rewind=True)
    loader = Loader(run.folder / "rows.store", config, rank=run.rank, world_size=run.ranks)
    validation = Loader(run.folder / "rows.store", held_out, rank=run.rank, world_size=run.ranks)
    if run.checkpoint:
        loader.load_state_dict(run.checkpoint)

    for batch in run.validation(validation):  # a look at one batch, before training
        run.validate(batch.columns["features/number"][batch.weight > 0])
        break
    for _ in range(loader.epoch, EPOCHS):
        for batch in run.training(loader):
            run.step(batch.columns["features/number"][batch.weight > 0], batch.latents)
            if run.must_save():
                run.save(loader.state_dict())
            if run.must_break():
                break
        if run.must_save_at_end():
            run.save(loader.state_dict())
        for batch in run.validation(validation):
            run.validate(batch.columns["features/number"][batch.weight > 0])
