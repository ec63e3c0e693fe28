"""The demo with its store on S3: two ranks pack, verify, two ranks train, stop and resume, as on a disk to the last bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bucketline.store import Store
from bucketline.store.sync.push_pull import pull
from tests.commands import call, torchrun
from tests.forked_ranks import ForkedRanks
from tests.models import SMALL, write_images
from tests.object_storage import S3Bucket
from tests.unit.train.tiny_run import as_arguments, config, losses, write_unet

pytestmark = pytest.mark.slow


def test_a_demo_on_a_bucket_is_that_of_a_disk(
    s3: S3Bucket, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUCKETLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    own = write_unet(shutil.copytree(model, tmp_path / "model"), in_channels=4, out_channels=4, cross_attention_dim=8)
    write_images(tmp_path / "photos", 40)
    place, url = s3.folder("photos.store"), s3.url("photos.store")
    packing = ("pack", tmp_path / "photos", url, "--model", own, *SMALL, "--val-fraction", "0.2")
    packed = torchrun(2, "-m", "bucketline.ingest", *packing).done()
    assert "40 images found = 40 packed" in packed.out
    verified = call("store", "verify", url, "--json")
    assert (verified.code, verified.json["corrupt"], verified.json["rows"]) == (0, [], 40)

    pull(place, tmp_path / "pulled.store")
    assert len(Store.open(tmp_path / "pulled.store").shards) == 2
    local = config(
        tmp_path, model=own, store=(tmp_path / "pulled.store",), output_dir=tmp_path / "local", max_steps=6, validate_every=3
    )
    remote = replace(local, store=(url,), output_dir=tmp_path / "remote", cache=str(tmp_path / "cache"))
    with ForkedRanks() as ranks:
        for asked in (
            local,
            replace(remote, max_steps=4),
            replace(remote, resume=True),
        ):  # one run; one that stops, and resumes
            ranks.run(2, as_arguments(asked)).done()
    assert len(losses(remote.output_dir)) > 2
    assert losses(remote.output_dir) == losses(local.output_dir)
