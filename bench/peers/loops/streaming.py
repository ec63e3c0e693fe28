"""MosaicML Streaming."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset

from bucketline.bench.peers.loops.run import EPOCHS

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.bench.peers.loops.run import Row, Run

COLUMNS = {"number": "int", "latent": "ndarray:float16"}


def write(folder: Path, train: dict[str, list[Row]], val: dict[str, list[Row]]) -> None:
    """Write the data set: a folder for each shape."""
    for split, shapes in (("train", train), ("val", val)):
        for shape, rows in shapes.items():
            with MDSWriter(out=str(folder / split / shape), columns=COLUMNS) as out:
                for row in rows:
                    out.write({"number": row.number, "latent": row.latent})


def open_train(run: Run) -> StreamingDataLoader:
    """Return a loader whose batches have one shape each."""
    streams = [Stream(local=str(folder)) for folder in sorted((run.folder / "train").iterdir())]
    options = {"batching_method": "per_stream", "shuffle": True, "num_canonical_nodes": 1}
    dataset = StreamingDataset(streams=streams, batch_size=run.batch_size, **options)
    return StreamingDataLoader(dataset, batch_size=run.batch_size)


def open_validation(run: Run) -> list[StreamingDataLoader]:
    """Return a loader for each shape: `per_stream` leaves out what does not fill a batch."""
    folders = sorted((run.folder / "val").iterdir())
    sets = [StreamingDataset(local=str(folder), batch_size=run.batch_size) for folder in folders]
    return [StreamingDataLoader(one, batch_size=run.batch_size) for one in sets]


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
