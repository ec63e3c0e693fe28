"""The examples of `examples/` run as they stand, in a process of their own, over a store of 33 rows."""

from __future__ import annotations

import ast
import re
import sys
import time
from pathlib import Path

import pytest

from bucketline.store import Store
from bucketline.store.remote.generations import find_newest
from bucketline.store.verify.verify import verify, verify_folder
from tests.commands import ROOT, Ran, spawn, torchrun
from tests.object_storage import S3Bucket
from tests.ray_ground import LONGEST_S, RayGround, command_of, kill

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: object) -> Ran:
    return spawn([sys.executable, EXAMPLES / name, *arguments]).done()


def test_torchs_dataloader_stops_and_goes_on(store: Store) -> None:
    found = re.fullmatch(
        r"(\d+) batches, stopped after (\d+), resumed with (\d+) to (\d+)\n", run("torch_dataloader.py", store.path).out
    )
    assert found is not None
    total, stopped, first, last = map(int, found.groups())
    assert (stopped, first, last) == (total // 2, total // 2, total - 1)
    assert total == 9 + 3 + 1  # of 35, 11 and fewer than 4 rows: the last epoch pads what is left over


WRITERS = [
    ("two_writers.py", "60 samples added, 60 in 2 shards", "0 samples added, 60 in 2 shards"),
    ("parallel_write.py", "59 written, 0 there before, 1 left out", "0 written, 59 there before, 1 left out"),
]


@pytest.mark.parametrize(("name", "first", "again"), WRITERS)
def test_two_processes_write_one_store_and_a_rerun_adds_nothing(name: str, first: str, again: str, tmp_path: Path) -> None:
    for said in (first, again):
        assert run(name, tmp_path / "s").out == f"{said}\n"
    assert not verify(Store.open(tmp_path / "s"), lambda _: None, 1).corrupt


def test_numpy_batches_are_printed(store: Store) -> None:
    lines = run("numpy_loop.py", store.path).out.splitlines()
    assert len(lines) == 9 + 3 + 1
    assert all(
        re.fullmatch(r"train/(64x64|96x64|64x128) \(4, 2, (8|12), (8|16)\) -?\d\.\d{4}, \d+ tokens", line) for line in lines
    )


def test_lightning_goes_on_from_its_checkpoint_at_the_next_step(store: Store, tmp_path: Path) -> None:
    lines = run("lightning_loop.py", store.path, tmp_path).out.splitlines()
    trained = [ast.literal_eval(line.removeprefix("trained the steps ")) for line in lines if line.startswith("trained")]
    assert trained == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_accelerate_trains_on_one_rank_and_on_two(store: Store, tmp_path: Path) -> None:
    (alone,) = run("accelerate_loop.py", store.path, tmp_path / "alone").out.splitlines()
    assert re.fullmatch(r"rank 0: step 8, weights -?\d\.\d{9}", alone)
    two = torchrun(2, EXAMPLES / "accelerate_loop.py", store.path, tmp_path / "two").done()
    # Two processes share the pipe, and gloo writes there too: what matters is what is said, not how its lines fall.
    said = sorted(re.findall(r"rank (\d): step (\d+), weights (-?\d\.\d{9})", two.out))
    assert [(rank, step) for rank, step, _ in said] == [("0", "8"), ("1", "8")], two.out
    weights = {own for _, _, own in said}
    assert len(weights) == 1  # both ranks have the same model
    assert weights != {alone.rpartition(" ")[2]}  # of twice as large a global batch


def test_a_store_written_from_arrays_is_continued_and_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.store"
    assert run("write_store.py", path).out == "64 samples added, 64 in generation 1\n"
    assert run("write_store.py", path).out == "0 samples added, 64 in generation 1\n"
    assert not verify(Store.open(path), lambda _: None, 1).corrupt
    assert len(run("numpy_loop.py", path).out.splitlines()) == -(-22 // 4) - (-42 // 4)


def test_pairs_with_masks_are_written_from_arrays_and_read(tmp_path: Path) -> None:
    said = sorted(run("write_pairs.py", tmp_path / "s").out.splitlines())
    target, one, mask = "target [4, 4, 8, 12]", "[4, 4, 8, 12]", "mask 0.67"
    assert said == [
        f"train/64x96x64x96x0x0: {target}, references [{one}], {mask}",
        f"train/64x96x64x96x128x64: {target}, references [{one}, [4, 4, 16, 8]], {mask}",
    ]
    assert not verify(Store.open(tmp_path / "s"), lambda _: None, 1).corrupt


def test_an_own_encoders_columns_are_packed_and_read(tmp_path: Path) -> None:
    packed, found = run("own_encoder.py", tmp_path / "s").out.splitlines()
    assert packed == "48 recordings packed"
    assert found == "42 read by the loader, 42 by numpy, 42 by torch's DataLoader"


def test_ray_data_encodes_and_writes_a_store(tmp_path: Path) -> None:
    with RayGround() as ground:
        ran = ground.ended(ground.start([sys.executable, EXAMPLES / "ray_data.py", tmp_path / "s"]))
    assert ran.code == 0, ran.err
    assert re.fullmatch(r"200 rows in generation \d+\n", ran.out)  # each task that writes commits its own
    assert not verify(Store.open(tmp_path / "s"), lambda _: None, 1).corrupt


# The example, with an encoder that never ends with the last rows.
STUCK = """
import sys, time
import ray_data

class Stuck(ray_data.Encoder):
    def __call__(self, batch):
        while 199 in batch["id"]:
            time.sleep(1)
        return super().__call__(batch)

ray_data.Encoder = Stuck
ray_data.main(sys.argv[1])
"""


def test_ray_data_writes_to_a_bucket_and_a_killed_driver_leaves_what_its_tasks_have_committed(
    s3: S3Bucket, tmp_path: Path
) -> None:
    place = s3.folder("features.store")
    with RayGround() as ground:
        ground.environment |= {
            "AWS_ENDPOINT_URL": s3.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "BUCKETLINE_CACHE": str(tmp_path / "cache"),
            "PYTHONPATH": str(EXAMPLES),
        }
        process = ground.start([sys.executable, "-c", STUCK, place.url])
        end = time.monotonic() + LONGEST_S
        while not list(place.names("shards")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)
        driver = command_of(process)
        assert driver is not None
        assert kill(driver)
        ground.ended(process)
        if find_newest(place) is not None:
            assert not verify_folder(place, lambda _: None, 1).corrupt
        ran = ground.ended(ground.start([sys.executable, EXAMPLES / "ray_data.py", place.url]))
    assert ran.code == 0, ran.err
    assert re.fullmatch(r"200 rows in generation \d+\n", ran.out)
    assert not verify_folder(place, lambda _: None, 1).corrupt
