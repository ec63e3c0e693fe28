"""WebDataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import webdataset

from bucketline.bench.peers.loops.run import BATCH_SIZE, EPOCHS, NUM_ROWS

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.bench.peers.loops.run import Row, Run


def write(folder: Path, train: dict[str, list[Row]], val: dict[str, list[Row]]) -> None:
    """Write the data set: tar files for each shape."""
    for split, shapes in (("train", train), ("val", val)):
        for shape, rows in shapes.items():
            (folder / split / shape).mkdir(parents=True)
            with webdataset.ShardWriter(str(folder / split / shape / "%06d.tar"), maxcount=8, verbose=0) as out:
                for row in rows:
                    out.write({"__key__": f"{row.number:06d}", "number.cls": row.number, "latent.npy": row.latent})


def pipeline(folder: Path, run: Run, *, shuffle: bool, resampled: bool) -> webdataset.WebDataset:
    """Return the batches of one shape."""
    options = {"resampled": True} if resampled else {"shardshuffle": 100 if shuffle else False, "detshuffle": True, "seed": 0}
    splitter = None if resampled else webdataset.split_by_node
    rows = webdataset.WebDataset(sorted(map(str, folder.glob("*.tar"))), nodesplitter=splitter, empty_check=False, **options)
    if shuffle:
        rows = rows.shuffle(1000) if resampled else rows.compose(webdataset.detshuffle(1000, seed=0))
    return rows.decode().to_tuple("number.cls", "latent.npy").batched(run.batch_size)


def open_loader(run: Run, split: str, *, shuffle: bool) -> webdataset.WebLoader:
    """Return a loader whose batches have one shape each; on several ranks, as documented, of shards drawn again and again."""
    resampled = shuffle and run.ranks > 1
    folders = sorted((run.folder / split).iterdir())
    shapes = [pipeline(folder, run, shuffle=shuffle, resampled=resampled) for folder in folders]
    mixed = webdataset.RandomMix(shapes, longest=True) if shuffle else webdataset.RoundRobin(shapes, longest=True)
    loader = webdataset.WebLoader(mixed, batch_size=None)
    return loader.with_epoch(NUM_ROWS // BATCH_SIZE) if resampled else loader


def train(run: Run) -> None:
    """Train for `EPOCHS` epochs, from the epoch of a checkpoint if there is one."""
    loader, validation = open_loader(run, "train", shuffle=True), open_loader(run, "val", shuffle=False)
    first = run.checkpoint["epoch"] if run.checkpoint else 0

    for numbers, _ in run.validation(validation):  # a look at one batch, before training
        run.validate(numbers)
        break
    for epoch in range(first, EPOCHS):
        for numbers, latents in run.training(loader):
            run.step(numbers, latents)
            if run.must_save():
                run.save({"epoch": epoch})
            if run.must_break():
                break
        if run.must_save_at_end():
            run.save({"epoch": epoch + 1})
        for numbers, _ in run.validation(validation):
            run.validate(numbers)
