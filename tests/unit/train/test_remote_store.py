"""Training on a store in object storage: the losses of the local store, to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import push
from bucketline.train.run import train
from tests.forked_ranks import ForkedRanks
from tests.unit.train.tiny_run import ALONE, as_arguments, config, losses

if TYPE_CHECKING:
    from pathlib import Path

    from tests.object_storage import S3Bucket

pytestmark = pytest.mark.slow


def test_a_run_continues_on_the_pushed_copy_and_back(folder: Path) -> None:
    """A checkpoint knows the store by its id, generation and digest, wherever that is."""
    (folder / "bucket" / "tiny.store").mkdir(parents=True)
    url = f"file://{folder}/bucket/tiny.store"
    push(folder / "tiny.store", ObjectFolder.open(url))
    local = config(folder, output_dir=folder / "local")
    mixed = config(folder, output_dir=folder / "mixed", cache=str(folder / "cache"))
    for max_steps, store in ((3, url), (5, folder / "tiny.store"), (7, url)):
        train(replace(local, max_steps=max_steps, resume=max_steps > 3), ALONE)
        train(replace(mixed, max_steps=max_steps, resume=max_steps > 3, store=(store,)), ALONE)
    assert losses(mixed.output_dir) == losses(local.output_dir)
    assert json.loads((mixed.output_dir / "config.json").read_bytes())["stores"][0]["path"] == url


def test_two_ranks_that_stop_and_resume_on_a_bucket_train_as_on_a_folder(folder: Path, s3: S3Bucket) -> None:
    push(folder / "tiny.store", s3.folder("tiny.store"))
    where = {"endpoint": s3.endpoint, "cache": str(folder / "cache"), "deadline": 20.0}
    local = config(folder, output_dir=folder / "local", validate_every=3, **where)
    remote = replace(local, store=(s3.url("tiny.store"),), output_dir=folder / "remote")
    with ForkedRanks() as ranks:
        for asked in (local, replace(remote, max_steps=4), replace(remote, resume=True)):
            ranks.run(2, as_arguments(asked)).done()
    assert len(losses(remote.output_dir)) > 2
    assert losses(remote.output_dir) == losses(local.output_dir)
