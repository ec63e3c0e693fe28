"""LitData."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, optimize

from bucketline.bench.peers.loops.run import EPOCHS

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.bench.peers.loops.run import Row, Run


def as_dict(row: Row) -> dict[str, object]:
    """Return a row as it is stored."""
    return {"number": row.number, "latent": row.latent}


def write(folder: Path, train: dict[str, list[Row]], val: dict[str, list[Row]]) -> None:
    """Write the data set: a folder for each shape."""
    for split, shapes in (("train", train), ("val", val)):
        for shape, rows in shapes.items():
            optimize(as_dict, rows, str(folder / split / shape), chunk_size=8, num_workers=1)


def open_train(run: Run) -> StreamingDataLoader:
    """Return a loader whose batches have one shape each."""
    folders = sorted((run.folder / "train").iterdir())
    sets = [StreamingDataset(str(folder), shuffle=True, drop_last=True) for folder in folders]
    one = CombinedStreamingDataset(sets, iterate_over_all=True, batching_method="per_stream") if len(sets) > 1 else sets[0]
    return StreamingDataLoader(one, batch_size=run.batch_size)


def open_validation(run: Run) -> list[StreamingDataLoader]:
    """Return a loader for each shape: `per_stream` puts what remains of several shapes into one batch."""
    folders = sorted((run.folder / "val").iterdir())
    return [StreamingDataLoader(StreamingDataset(str(folder)), batch_size=run.batch_size) for folder in folders]


def train(run: Run) -> None:
    """Train for `EPOCHS` epochs, from a checkpoint if there is one."""
    loader, validation = open_train(run), open_validation(run)
    first = 0
    if run.checkpoint:
        first = run.checkpoint["epoch"]
        loader.load_state_dict(run.checkpoint["loader"])

    for batch in run.validation(chain.from_iterable(validation)):  # a look at one batch, before training
        run.validate(batch["number"])
        break
    for epoch in range(first, EPOCHS):
        for batch in run.training(loader):
            run.step(batch["number"], batch["latent"])
            if run.must_save():
                run.save({"epoch": epoch, "loader": loader.state_dict()})
            if run.must_break():
                break
        if run.must_save_at_end():
            run.save({"epoch": epoch + 1, "loader": loader.state_dict()})
        for batch in run.validation(chain.from_iterable(validation)):
            run.validate(batch["number"])
