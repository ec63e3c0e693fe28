"""Check the output folder of a run: a separate folder, never among images, in a store, or with foreign files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import UsageError
from bucketline.files.paths import Overlap, overlap
from bucketline.files.run_marker import is_run
from bucketline.loader.mixture import parse_stores
from bucketline.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bucketline.train.config import TrainConfig

IDS_OF_A_BUCKET = 4
BESIDE_A_RUN = (".log", ".out", ".err", ".tmp")
"""Suffixes allowed in a folder before its run starts: logs of a shell or scheduler, temporary files that a full disk left."""


def refuse_place(config: TrainConfig) -> None:
    """Reject an output folder inside or around a store, in the source folder of a store, or with foreign files.

    Raises:
        UsageError: if the folder is unsuitable; the message names the conflict.
        StoreError: if a store cannot be opened.
    """
    output = config.output_dir
    # a store in object storage has no folder here, and its ids would have to be fetched
    paths = [store.path for store in parse_stores(config.store) if isinstance(store.path, Path)]
    for path in paths:
        found = {
            Overlap.SAME: f"--output-dir {output} is the store {path}",
            Overlap.INSIDE: f"--output-dir {output} is inside the store {path}",
            Overlap.AROUND: f"--output-dir {output} contains the store {path}",
        }
        if how := overlap(output, path):
            raise UsageError(f"{found[how]}; choose a separate folder for the run")
    for store in map(Store.open, paths):
        _refuse_source(output, store)
    _refuse_foreign(output)


def _refuse_source(output: Path, store: Store) -> None:
    """Reject a store's source folder, found by sample ids: a store has no source path, but ids are image paths in it."""
    for ids in _first_ids(store):
        for folder in (output, *Path(os.path.realpath(output)).parents):
            if all(os.path.isfile(folder / name) for name in ids):  # noqa: PTH113 - an id may be no name of a file at all
                raise UsageError(
                    f"--output-dir {output} is in {folder}, where the store's samples came from (it has {ids[0]!r}); the "
                    f"run's images would become samples of {store.path}: choose a folder outside it"
                )


def _first_ids(store: Store) -> Iterator[list[str]]:
    """Yield a few ids per bucket, for buckets whose ids can be paths in a folder."""
    for bucket in store.buckets():
        ids = bucket.sample_ids(np.arange(min(IDS_OF_A_BUCKET, bucket.num_rows)))
        if not any(Path(name).is_absolute() or ".." in Path(name).parts for name in ids):
            yield ids


def _refuse_foreign(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output-dir {output} is a file; choose a path that does not exist")
    if not output.is_dir() or is_run(output):
        return
    strange = sorted(p.name for p in output.iterdir() if not p.name.startswith(".") and p.suffix not in BESIDE_A_RUN)
    if strange:
        raise UsageError(
            f"--output-dir {output} is not empty (it has {strange[0]!r}) and not a run of this trainer; "
            "choose a path that does not exist"
        )
