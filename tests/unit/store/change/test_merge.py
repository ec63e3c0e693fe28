"""Merging: every sample of every store once, or nothing under the new store's name."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bucketline.errors import CorruptError, FingerprintError, LockedError, StoreError, UsageError
from bucketline.files.atomic_folder import staging_path
from bucketline.store import Store, read_manifest
from bucketline.store.change.compact import compact
from bucketline.store.change.drop import drop
from bucketline.store.change.merge import merge
from bucketline.store.verify.verify import verify
from bucketline.store.write.publish import adopt, lock_store, publish
from tests.commands import call, spawn
from tests.kit import (
    IMAGES,
    Sample,
    contents,
    flip_bit,
    make_sample,
    make_store,
    rewrite_manifest,
    samples_of,
    spec_of,
    tree,
    write_shard,
)

BUCKET = "train/64x64"


def expect(store: Path, samples: list[Sample]) -> None:
    """Compare a whole store with what should be in it."""
    opened = Store.open(store)
    IMAGES.expect(opened, samples)
    assert verify(opened, lambda _: None).corrupt == ()


@pytest.fixture
def first(tmp_path: Path) -> list[Sample]:
    """A store `a` with two shards, of which some rows are dropped; give what is live."""
    samples = samples_of({BUCKET: 9, "val/64x64": 3}, "a/")
    more = samples_of({BUCKET: 4}, "a/more/")
    make_store(tmp_path / "a", samples, more)
    gone = [samples[2].id, samples[11].id, more[0].id]
    drop(tmp_path / "a", gone)
    return [sample for sample in (*samples, *more) if sample.id not in gone]


@pytest.fixture
def second(tmp_path: Path) -> list[Sample]:
    """A store `b` of one shard, whose name is that of another in `a`."""
    samples = samples_of({BUCKET: 5, "train/96x64": 2}, "b/")
    make_store(tmp_path / "b", samples)
    return samples


def test_a_merged_store_holds_the_samples_of_all_and_its_sources_are_as_they_were(
    tmp_path: Path, first: list[Sample], second: list[Sample]
) -> None:
    before = tree(tmp_path)
    seen: list[tuple[int, int]] = []
    done = merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"], on_bytes=lambda *at: seen.append(at))
    assert (done.samples, done.shards) == (len(first) + len(second), 3)
    assert seen[-1] == (done.num_bytes, done.num_bytes)
    expect(tmp_path / "out", [*first, *second])
    assert {name: data for name, data in tree(tmp_path).items() if not name.startswith("out/")} == before
    manifests = [read_manifest(tmp_path / name) for name in ("out", "a", "b")]
    assert len({manifest.store_id for manifest in manifests}) == 3
    assert manifests[0].generation == 1
    assert [s.shard_id for s in manifests[0].shards] == [s.shard_id for m in manifests[1:] for s in m.shards]
    assert [s.name for s in manifests[0].shards] == ["g0", "g1", f"g0-{manifests[2].shards[0].shard_id[:8]}"]
    assert manifests[0].payload_bytes == sum(manifest.payload_bytes for manifest in manifests[1:])
    for name in ("lmdb", "extents", "index"):
        assert (tmp_path / "out" / "shards" / f"g1.{name}").read_bytes() == (tmp_path / f"a/shards/g1.{name}").read_bytes()


def test_a_merged_store_is_changed_and_merged_like_any_other(tmp_path: Path, first: list[Sample], second: list[Sample]) -> None:
    merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])
    drop(tmp_path / "out", [first[0].id])
    compact(tmp_path / "out", shard_bytes=1 << 30, gc_older_than_s=0)
    expect(tmp_path / "out", [*first[1:], *second])
    with lock_store(tmp_path / "out"):
        assert adopt(tmp_path / "out", read_manifest(tmp_path / "out")) == []
    more = samples_of({BUCKET: 2}, "more/")
    write_shard(tmp_path / "out", "new", more)
    with lock_store(tmp_path / "out"):
        publish(tmp_path / "out", read_manifest(tmp_path / "out"), ["new"], [])
    make_store(tmp_path / "c", samples_of({BUCKET: 1}, "c/"))
    merge(tmp_path / "again", [tmp_path / "c", tmp_path / "out"])
    expect(tmp_path / "again", [*first[1:], *second, *more, *samples_of({BUCKET: 1}, "c/")])


def test_one_store_alone_is_copied_without_its_past(tmp_path: Path, first: list[Sample]) -> None:
    merge(tmp_path / "out", [tmp_path / "a"])
    expect(tmp_path / "out", first)
    assert [path.name for path in (tmp_path / "out" / "generations").iterdir()] == ["1.json"]


def test_equal_ids_in_two_stores_are_refused_by_name(tmp_path: Path, first: list[Sample]) -> None:
    make_store(tmp_path / "b", [make_sample(sample.id, BUCKET, version=1) for sample in first[:7]])
    before = tree(tmp_path)
    expected = (
        r"7 samples are in two stores: '.*' is in .*/a and in .*/b; .*, and 2 more; `store drop` them from one of the stores"
    )
    with pytest.raises(StoreError, match=expected):
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])
    assert tree(tmp_path) == before


def test_stores_that_were_copied_from_one_another_are_refused_whatever_is_live(tmp_path: Path, first: list[Sample]) -> None:
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    drop(tmp_path / "b", [sample.id for sample in first])
    with pytest.raises(StoreError, match=r"/a and .*/b both have the shard g0, as copies of one store do"):
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])


def test_a_shard_without_live_rows_is_left_out(tmp_path: Path) -> None:
    samples, more = samples_of({BUCKET: 3}), samples_of({BUCKET: 2}, "more/")
    make_store(tmp_path / "a", samples, more)
    drop(tmp_path / "a", [sample.id for sample in samples])
    assert merge(tmp_path / "out", [tmp_path / "a"]).shards == 1
    expect(tmp_path / "out", more)


def other_encoder(path: Path) -> None:
    given = contents({"vae": {"scaling_factor": 0.13}, "text_encoder": {"width": 5}})
    rewrite_manifest(path, encoders=given.encoders)


def other_column(path: Path) -> None:
    shutil.rmtree(path)
    make_store(path, [make_sample("x", BUCKET, dtype="F32")], dtype="F32")


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "encoders": (other_encoder, r"encoders.vae.scaling_factor = 0.18215, .*/b with 0.13; only stores with the same settings"),
    "rules": (lambda path: rewrite_manifest(path, rules={"grid": "other"}), "rules.grid = made by hand, .*/b with other"),
    "columns of a bucket": (other_column, rf"buckets.{BUCKET}.columns.latent.dtype = F16, .*/b with F32"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_stores_that_were_not_made_alike_are_refused_naming_the_field(
    case: str, tmp_path: Path, first: list[Sample], second: list[Sample]
) -> None:
    change, message = OTHERS[case]
    change(tmp_path / "b")
    before = tree(tmp_path)
    with pytest.raises(FingerprintError, match=rf"{tmp_path}/a was made with {message}"):
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])
    assert tree(tmp_path) == before


def test_a_number_of_captions_that_differs_is_a_difference(tmp_path: Path) -> None:
    for name, number in (("a", 3), ("b", 2)):
        make_store(tmp_path / name)
        rewrite_manifest(tmp_path / name, max_captions=number)
    with pytest.raises(FingerprintError, match=r"max_captions = 3, .*/b with 2"):
        merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize("kind", ["lmdb", "extents", "index"])
def test_a_damaged_file_is_named_and_leaves_nothing(kind: str, tmp_path: Path, first: list[Sample]) -> None:
    path = tmp_path / "a" / "shards" / f"g1.{kind}"
    flip_bit(path, 8 * path.stat().st_size // 2)
    before = tree(tmp_path)
    with pytest.raises(CorruptError, match=rf"g1.{kind}"):
        merge(tmp_path / "out", [tmp_path / "a"])
    assert tree(tmp_path) == before


@pytest.mark.parametrize("change", ["missing", "truncated", "longer"])
def test_a_file_that_is_missing_or_of_another_length_is_named_and_leaves_nothing(
    change: str, tmp_path: Path, first: list[Sample]
) -> None:
    path = tmp_path / "a" / "shards" / "g1.lmdb"
    data = path.read_bytes()
    path.unlink()
    if change != "missing":
        path.write_bytes(data[:-100] if change == "truncated" else data + b"more")
    before = tree(tmp_path)
    with pytest.raises(StoreError, match=r"g1.lmdb (is missing|has \d+ bytes, the manifest says \d+)"):
        merge(tmp_path / "out", [tmp_path / "a"])
    assert tree(tmp_path) == before


def test_places_that_make_no_sense_are_refused(tmp_path: Path, first: list[Sample], second: list[Sample]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    (tmp_path / "link").symlink_to(a)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = tree(tmp_path / "a")
    cases: list[tuple[Path, list[Path], str]] = [
        (b, [a], "b exists; name a path"),
        (tmp_path / "dangling", [a], "dangling exists"),
        (a / "out", [a, b], "out is inside the store .*/a;"),
        (tmp_path / "link" / "shards" / "out", [b, a], "is inside the store .*/a;"),
        (tmp_path / "out", [a, b, tmp_path / "link"], "link is named twice"),
        (tmp_path / "out", [], "nothing to merge"),
        (tmp_path / "no" / "out", [a], "no is not a folder"),
    ]
    for out, sources, message in cases:
        with pytest.raises(UsageError, match=message):
            merge(out, sources)
    with pytest.raises(StoreError, match="nowhere is not a store"):
        merge(tmp_path / "out", [a, tmp_path / "nowhere"])
    assert tree(tmp_path / "a") == before
    assert not (tmp_path / "out").exists()


def test_a_dry_run_checks_everything_and_writes_nothing(tmp_path: Path, first: list[Sample], second: list[Sample]) -> None:
    before = tree(tmp_path)
    planned = merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"], dry_run=True)
    assert tree(tmp_path) == before
    assert planned == merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])


KILLED = """
import os, signal, sys
from pathlib import Path
from bucketline.store.change import merge
call, left = merge._copy_file, [4]
def killed(*args):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    call(*args)
merge._copy_file = killed
merge.merge(Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
"""


def test_what_a_killed_merge_leaves_is_hidden_and_in_nobodys_way(
    tmp_path: Path, first: list[Sample], second: list[Sample]
) -> None:
    before = tree(tmp_path)
    assert spawn([sys.executable, "-c", KILLED, tmp_path / "out", tmp_path / "a", tmp_path / "b"]).code == -9
    assert {name.partition("/")[0] for name in set(tree(tmp_path)) - set(before)} == {staging_path(tmp_path / "out").name}
    merge(tmp_path / "out", [tmp_path / "b"])
    expect(tmp_path / "out", second)
    assert {name.partition("/")[0] for name in set(tree(tmp_path)) - set(before)} == {"out"}


def test_ctrl_c_leaves_nothing(tmp_path: Path, first: list[Sample]) -> None:
    before = tree(tmp_path)

    def interrupt(done: int, total: int) -> None:
        if 2 * done > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(tmp_path / "out", [tmp_path / "a"], on_bytes=interrupt)
    assert tree(tmp_path) == before


def test_two_merges_into_one_name_at_once_are_refused(tmp_path: Path, first: list[Sample]) -> None:
    def another(done: int, total: int) -> None:
        with pytest.raises(LockedError, match=r"/out is being written by another process"):
            merge(tmp_path / "out", [tmp_path / "a"])

    merge(tmp_path / "out", [tmp_path / "a"], on_bytes=another)
    expect(tmp_path / "out", first)


def test_a_bucket_that_one_store_alone_has_comes_along(tmp_path: Path, first: list[Sample], second: list[Sample]) -> None:
    merge(tmp_path / "out", [tmp_path / "a", tmp_path / "b"])
    assert [bucket.name for bucket in Store.open(tmp_path / "out").buckets()] == [BUCKET, "train/96x64", "val/64x64"]
    assert Store.open(tmp_path / "out").bucket("train/96x64").spec == spec_of("train/96x64")


def test_the_command_reports_what_it_merged(tmp_path: Path, first: list[Sample], second: list[Sample]) -> None:
    asked = ("merge", tmp_path / "out", tmp_path / "a", tmp_path / "b")
    assert f"would get {len(first) + len(second)} samples in 3 shards" in call("store", *asked, "--dry-run").out
    ran = call("store", *asked, "--json").done()
    assert (ran.json["samples"], ran.json["shards"]) == (len(first) + len(second), 3)
    again = call("store", *asked)
    assert (again.code, again.out) == (2, "")
    assert "out exists" in again.err
