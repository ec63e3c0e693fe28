"""Packing on Ray: what one process packs, also when workers, nodes or drivers are lost; at random moments in `make torture`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bucketline.store import Store
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import pull
from tests.commands import call
from tests.fault.same_store import compare
from tests.kit import by_id
from tests.models import SMALL, write_images
from tests.ray_ground import LONGEST_S, Cluster, RayGround, command_of, kill, packing_workers

pytestmark = pytest.mark.slow
NUM_IMAGES = 400


@pytest.fixture(scope="module")
def ground() -> Iterator[RayGround]:
    with RayGround() as ground:
        yield ground


@pytest.fixture(scope="module")
def cluster(ground: RayGround) -> Cluster:
    return Cluster(ground, 1, 1)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_images(folder, NUM_IMAGES)
    (folder / "broken.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, images: Path, model: Path) -> Path:
    store = tmp_path_factory.mktemp("whole") / "s"
    assert call("ingest", "pack", images, store, "--model", model, *SMALL).code == 0
    return store


def on_ray(images: Path, store: Path | str, model: Path, cluster: Cluster) -> list[object]:
    options = ["--engine", f"ray:{cluster.address}", "--workers", 2, "--batch-size", 2, "--publish-every", "0.2s", "--json"]
    return ["pack", images, store, "--model", model, *SMALL, *options]


def wait_for_shards(store: Path, number: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + LONGEST_S
    while len(list((store / "shards").glob("*.lmdb"))) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.002)


def test_a_lost_worker_and_a_lost_node_cost_nothing_and_the_store_is_that_of_one_process(
    tmp_path: Path, ground: RayGround, cluster: Cluster, images: Path, model: Path, whole: Path
) -> None:
    process = ground.ingest(*on_ray(images, tmp_path / "s", model, cluster))
    wait_for_shards(tmp_path / "s", 1, process)
    assert kill(packing_workers(cluster.process)[0])
    wait_for_shards(tmp_path / "s", 3, process)
    cluster.lose(1)
    ran = ground.ended(process)
    cluster.add(1)
    assert ran.code == 0, ran.err
    # what a lost worker had committed is unchanged for the one that packs its share again
    assert (ran.json["packed"] + ran.json["unchanged"], ran.json["rejected"]) == (NUM_IMAGES, 1)
    compared = compare(tmp_path / "s", whole)
    assert (compared.samples, compared.faults) == (NUM_IMAGES, [])
    for name in ("rejects.jsonl", "without_caption.jsonl"):
        assert (tmp_path / "s" / name).read_bytes() == (whole / name).read_bytes()


def test_the_same_command_goes_on_after_its_driver_was_killed_and_after_ctrl_c_also_into_a_url(
    tmp_path: Path, ground: RayGround, cluster: Cluster, images: Path, model: Path, whole: Path
) -> None:
    ground.environment["BUCKETLINE_CACHE"] = str(tmp_path / "cache")
    bucket = tmp_path / "bucket"
    asked = [*on_ray(images, f"file://{bucket}", model, cluster), "--work", tmp_path / "work"]
    committed = 0
    for number, said in ((signal.SIGKILL, ""), (signal.SIGINT, "interrupted: all encoded images are committed")):
        process = ground.ingest(*asked)
        wait_for_shards(bucket, len(list((bucket / "shards").glob("*.lmdb"))) + 2, process)
        driver = command_of(process)
        assert driver is not None
        os.kill(driver, number)
        ran = ground.ended(process)
        assert ran.code == 128 + number, ran.err
        assert said in ran.err
        committed = int(re.findall(r"committed \((\d+) images\)", ran.err)[0]) if said else committed
    again = ground.run(*asked).done()
    assert again.json["unchanged"] >= committed > 0
    assert again.json["packed"] + again.json["unchanged"] == NUM_IMAGES
    pull(ObjectFolder.open(f"file://{bucket}"), tmp_path / "s")
    compared = compare(tmp_path / "s", whole)
    assert (compared.samples, compared.faults) == (NUM_IMAGES, [])


TIMES = ("seconds", "generations_meanwhile", "stage_seconds", "slowest_stage", "disk_bytes", "payload_bytes", "generation")


def test_two_ray_workers_pack_what_one_process_packs(tmp_path: Path, photographs: Path, demo_model: Path) -> None:
    """Real photographs, by a cluster that the command starts itself."""
    source = tmp_path / "photos"
    for folder in sorted(photographs.iterdir())[::3]:
        shutil.copytree(folder, source / folder.name)
    for number in range(3):
        (source / f"broken-{number}.jpg").write_bytes(b"no image")
    options = ["--model", demo_model, "--val-fraction", "0.2:folder", "--json"]
    with RayGround() as own_ground:
        workers = own_ground.run("pack", source, tmp_path / "workers", *options, "--engine", "ray", "--workers", 2)
    one = call("ingest", "pack", source, tmp_path / "one", *options)
    assert (workers.code, one.code) == (0, 0), workers.err
    assert workers.json["found"] == workers.json["packed"] + 3 > 60
    summaries = [{name: value for name, value in ran.json.items() if name not in TIMES} for ran in (workers, one)]
    assert summaries[0] == summaries[1]
    compared = compare(tmp_path / "workers", tmp_path / "one")
    assert (compared.samples, compared.faults) == (workers.json["packed"], [])
    records = [{name: held.record for name, held in by_id(Store.open(tmp_path / name)).items()} for name in ("workers", "one")]
    assert records[0] == records[1]
    for file in ("rejects.jsonl", "without_caption.jsonl"):
        assert (tmp_path / "workers" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()
