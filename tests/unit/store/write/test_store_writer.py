"""A store from arrays: every bit comes back, nothing that was committed is lost, and what does not fit is refused."""

from __future__ import annotations

import os
import pickle
import re
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.errors import BucketlineError, FingerprintError, LockedError, StoreError, UsageError
from bucketline.files.atomic_write import write_or_explain
from bucketline.store import Column, LatentColumn, PartWriter, SampleRecord, Store, StoreWriter, TextSpec, new_record
from bucketline.store.change.compact import compact
from bucketline.store.format.block import caption_digest
from bucketline.store.format.manifest import generations
from bucketline.store.write.publish import lock_store
from tests.constrained import SmallDisk
from tests.fault.apart import How, apart
from tests.kit import (
    ANY,
    CAPTIONS,
    ENCODERS,
    IMAGES,
    TEXT,
    TOKEN_WIDTH,
    Form,
    Sample,
    add_samples,
    embedding,
    faults,
    images,
    make_sample,
    make_store,
    samples_of,
    store_writer,
    tree,
    untouched,
)

BUCKET = "train/64x64"
ROWS = {BUCKET: 20, "val/64x96": 9}


def check(path: Path, samples: Iterable[Sample], form: Form = IMAGES) -> Store:
    """See that the newest generation holds exactly these samples, bit for bit, and is sound."""
    store = Store.open(path)
    assert not faults(store)
    form.expect(store, samples)
    return store


def left_pending(path: Path) -> list[str]:
    return sorted(file.name for file in (path / "pending").glob("*.lmdb"))


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_what_was_added_comes_back_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    samples = samples_of(ROWS, dtype=dtype)
    with store_writer(tmp_path / "s", dtype=dtype) as writer:
        add_samples(writer, samples)
    check(tmp_path / "s", samples, images(dtype))
    assert (writer.manifest.generation, writer.manifest.samples) == (1, len(samples))
    assert left_pending(tmp_path / "s") == []


def test_the_short_form_stores_a_row_of_exactly_its_buckets_size(tmp_path: Path) -> None:
    text = TextSpec(
        tokens=(Column(name="tokens", dtype="F16", shape=(TOKEN_WIDTH,)),),
        fixed=(Column(name="pooled", dtype="F32", shape=(3,)),),
    )
    pooled = np.arange(3, dtype=np.float32)
    latent, mirrored = np.arange(48, dtype=np.float32).reshape(4, 3, 4), -np.arange(48, dtype=np.float32).reshape(4, 3, 4)
    with StoreWriter(
        str(tmp_path / "s"),
        encoders={"vae": {"sizes": (1, 2)}},
        columns=[LatentColumn(channels=4, downscale=16, dtype="F32", name=name) for name in ("latent", "latent_flipped")],
        text=text,
        empty_caption={"tokens": embedding(""), "pooled": pooled},
    ) as writer:
        columns = {"latent": latent, "latent_flipped": mirrored[:, :, ::-1]}
        writer.add("a.png", "train/48x64", columns, {"snow": {"tokens": embedding("snow"), "pooled": pooled + 1}})
        writer.add("b.png", "train/48x64", columns)
    store = Store.open(tmp_path / "s")
    assert store.manifest.encoders == {"vae": {"sizes": [1, 2]}}
    assert store.sample("a.png")[1] == replace(new_record("a.png", "train/48x64", ("snow",)), caption_rows=(1,))
    assert store.sample("b.png")[1] == replace(new_record("b.png", "train/48x64"), row=1, caption_rows=(0,))
    both = store.bucket("train/48x64").read(np.arange(2), "latent_flipped", verify=True)
    assert (both == mirrored[:, :, ::-1]).all()
    assert store.read_caption(0, 1)["pooled"].tolist() == [1, 2, 3]
    assert store.read_caption(0, 0)["pooled"].tolist() == [0, 1, 2]


def killed(path: Path, form: Form, samples: list[Sample], shard_bytes: int, moment: str) -> int:
    committed = path.with_name("committed")

    def write() -> None:
        with form.writer(path, shard_bytes=shard_bytes) as writer:
            for n, sample in enumerate(samples, 1):
                form.add(writer, [sample])
                if n % 5 == 0:
                    writer.commit()
                    committed.write_text(str(n), encoding="ascii")
                if n == 13 and moment == "between commits":
                    os.kill(os.getpid(), signal.SIGKILL)
            writer.seal()
            os.kill(os.getpid(), signal.SIGKILL)

    assert apart(write, 60).how is How.DIED
    return int(committed.read_text(encoding="ascii"))


@pytest.mark.parametrize(
    ("form", "samples", "shard_bytes"),
    [
        (form, samples, shard_bytes)
        for form, samples, small in ((IMAGES, samples_of(ROWS), 3000), (ANY, ANY.samples(ROWS), 20_000))
        for shard_bytes in (1 << 24, small)
    ],
    ids=["images", "images, small shards", "columns", "columns, small shards"],
)
@pytest.mark.parametrize("moment", ["between commits", "before publishing"])
def test_a_kill_loses_nothing_committed(
    moment: str, form: Form, samples: list[Sample], shard_bytes: int, tmp_path: Path
) -> None:
    num_committed = killed(tmp_path / "s", form, samples, shard_bytes, moment)
    assert num_committed == (10 if moment == "between commits" else 25)
    with form.writer(tmp_path / "s", shard_bytes=shard_bytes) as writer:
        adopted = [sample for sample in samples if sample.id in writer]
        assert adopted[:num_committed] == samples[:num_committed]
        check(tmp_path / "s", adopted, form)
        form.add(writer, (sample for sample in samples if sample.id not in writer))
    check(tmp_path / "s", samples, form)


def test_an_error_publishes_nothing_and_the_next_writer_adopts_what_was_committed(tmp_path: Path) -> None:
    first, second, third = (samples_of({BUCKET: 3}, f"{name}/") for name in ("first", "second", "third"))
    make_store(tmp_path / "s", first)

    def fail() -> None:
        with store_writer(tmp_path / "s") as writer:
            add_samples(writer, second)
            writer.commit()
            add_samples(writer, third)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    check(tmp_path / "s", first)
    assert len(left_pending(tmp_path / "s")) == 1
    with store_writer(tmp_path / "s") as writer:
        assert second[0].id in writer
        assert third[0].id not in writer
    check(tmp_path / "s", [*first, *second])


def test_there_is_one_writer_at_a_time(tmp_path: Path) -> None:
    with store_writer(tmp_path / "s") as writer:
        add_samples(writer, samples_of(ROWS))
        with (
            pytest.raises(LockedError, match=rf"is being written by another process .*pid: {os.getpid()}"),
            store_writer(tmp_path / "s"),
        ):
            raise AssertionError
    check(tmp_path / "s", samples_of(ROWS))
    with store_writer(tmp_path / "s") as writer:
        add_samples(writer, samples_of({BUCKET: 2}, "more/"))
    check(tmp_path / "s", [*samples_of(ROWS), *samples_of({BUCKET: 2}, "more/")])


def write_part(part: PartWriter, samples: list[Sample], *, is_killed: bool) -> list[str]:
    with part:
        add_samples(part, samples)
        part.commit()
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
    return part.sealed


def test_parts_in_other_processes_are_published_together_and_a_killed_one_is_adopted(tmp_path: Path) -> None:
    path, own = tmp_path / "s", samples_of({BUCKET: 4}, "own/")
    theirs = [samples_of(ROWS, f"part{n}/") for n in range(3)]
    unsealed = pytest.warns(UserWarning, match=r"1 shard of its parts, the first is \S+-r2-\d+, has not been sealed")
    with unsealed, store_writer(path, shard_bytes=5000) as writer:
        add_samples(writer, own)
        sealed: list[str] = []
        for n, samples in enumerate(theirs):
            sent = pickle.dumps(writer.part(f"r{n}"))
            ended = apart(lambda: write_part(pickle.loads(sent), samples, is_killed=n == 2), 60)  # noqa: B023 - run at once
            assert ended.how is (How.DIED if n == 2 else How.DONE), ended.said
            sealed += ended.gave or []
        assert len(sealed) > 2
        writer.publish(sealed)
        known = [sample for sample in theirs[2] if sample.id in writer]  # of the shards that the killed part had sealed
        assert 0 < len(known) < len(theirs[2])
        check(path, [*own, *theirs[0], *theirs[1], *known])
    assert left_pending(path)
    with store_writer(path) as writer:
        assert writer.manifest.generation == 2
    check(path, [*own, *theirs[0], *theirs[1], *theirs[2]])


def test_a_part_knows_what_its_store_has(tmp_path: Path) -> None:
    first, second = samples_of({BUCKET: 2}, "first/"), samples_of({BUCKET: 2}, "second/")
    make_store(tmp_path / "s", first)
    with store_writer(tmp_path / "s") as writer:
        part = writer.part("r0")
        assert first[0].id in part
        with pickle.loads(pickle.dumps(part)) as elsewhere:
            assert first[1].id in elsewhere
            assert second[0].id not in elsewhere
            add_samples(elsewhere, second[:1])
            assert second[0].id in elsewhere


def test_a_store_is_continued_and_a_later_sample_replaces_an_older_one(tmp_path: Path) -> None:
    path, first = tmp_path / "s", samples_of(ROWS)
    make_store(path, first)
    newer = [make_sample(sample.id, sample.bucket, ("another",), version=1) for sample in first[:4]]
    with store_writer(path) as writer:
        assert first[0].id in writer
        add_samples(writer, newer)
    check(path, [*first[4:], *newer])
    with untouched(path):
        with store_writer(path) as writer:
            assert "nothing.png" not in writer
        assert writer.manifest.generation == 2


def test_publishing_within_the_block_shows_readers_what_there_is(tmp_path: Path) -> None:
    samples = samples_of(ROWS)
    with store_writer(tmp_path / "s") as writer:
        add_samples(writer, samples[:10])
        assert Store.open(tmp_path / "s").manifest.samples == 0
        assert writer.publish().generation == 1
        check(tmp_path / "s", samples[:10])
        assert writer.publish().generation == 1
        add_samples(writer, samples[10:])
    check(tmp_path / "s", samples)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "encoders": ({"encoders": {**ENCODERS, "vae": {}}}, r"encoders\.vae\.scaling_factor = 0\.18215, this run has None"),
    "rules": ({"rules": {}}, r"rules\.grid = made by hand"),
    "more rules": ({"rules": {"grid": "made by hand", "crop": "center"}}, "not record its rules.crop, this run has center"),
    "captions": ({"max_captions": 7}, "max_captions = 3, this run has 7"),
    "dtype": ({"columns": [LatentColumn(channels=2, dtype="F32")]}, r"buckets\.train/64x64\.latent\.dtype = F16, .* F32"),
    "channels": ({"columns": [LatentColumn(channels=4)]}, r"latent\.shape = \[2, 8, 8\], .* \[4, 8, 8\]"),
    "more columns": (
        {"columns": [LatentColumn(channels=2), LatentColumn(channels=2, name="latent_flipped")]},
        r"the store has no buckets\.train/64x64\.latent_flipped, this writer has .* write a new store with all of them",
    ),
    "text": (
        {"text": [Column(name="tokens", dtype="F16", shape=(3,))], "empty_caption": {"tokens": np.zeros((1, 3), "f2")}},
        r"text\.tokens\.tokens\.shape = \[5\], this run has \[3\]",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_store_of_other_contents_is_refused_and_left_as_it_is(name: str, tmp_path: Path) -> None:
    changes, words = OTHERS[name]
    make_store(tmp_path / "s", samples_of({BUCKET: 2}))
    with untouched(tmp_path / "s"):
        asked = {
            "encoders": ENCODERS,
            "rules": {"grid": "made by hand"},
            "columns": [LatentColumn(channels=2)],
            "text": TEXT,
            "empty_caption": {"tokens": embedding("")},
            "max_captions": 3,
            **changes,
        }
        with pytest.raises(FingerprintError, match=words), StoreWriter(tmp_path / "s", **asked):
            raise AssertionError


LATENT, TOKENS = np.zeros((2, 8, 8), dtype="<f2"), {"tokens": embedding("snow")}


def spoilt(value: float) -> np.ndarray[Any, Any]:
    latent = LATENT.copy()
    latent[1, 2, 3] = value
    return latent


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtype": (("x", BUCKET, {"latent": LATENT.astype("f4")}), r"'x': column 'latent' .* takes F16 \[2, 8, 8\], got float32"),
    "byte order": (("x", BUCKET, {"latent": LATENT.astype(">f2")}), r"takes F16 \[2, 8, 8\], got >f2"),
    "shape": (("x", BUCKET, {"latent": LATENT[:, :7]}), r"got float16 \[2, 7, 8\]; convert it"),
    "size": (("x", "train/64x96", {"latent": LATENT}), r"bucket train/64x96 takes F16 \[2, 8, 12\], got float16 \[2, 8, 8\]"),
    "no column": (("x", BUCKET, {}), r"'x' has the columns \[\], expected \['latent'\]"),
    "a strange column": (("x", BUCKET, {"latent": LATENT, "mask": LATENT}), r"\['latent', 'mask'\], expected \['latent'\]"),
    "no array": (("x", BUCKET, {"latent": [[1], [1, 2]]}), r"'x': a column is not an array \(.*\); give numpy arrays"),
    "NaN": (("x", BUCKET, {"latent": spoilt(np.nan)}), "'x': column 'latent' is NaN or infinite"),
    "infinite": (("x", BUCKET, {"latent": spoilt(-np.inf)}), "'x': column 'latent' is NaN or infinite"),
    "a bucket of no split": (("x", "64x64", {"latent": LATENT}), "'64x64' is not a bucket; expected train or val"),
    "an odd bucket": (("x", "train/60x64", {"latent": LATENT}), "train/60x64: expected a height_px that is a multiple of 8"),
    "twice": (("there.png", BUCKET, {"latent": LATENT}), "'there.png' was added before; ids must be unique"),
    "tokens": (
        ("x", BUCKET, {"latent": LATENT}, {"snow": {"tokens": np.zeros((3, 4), "f2")}}),
        r"'snow': .* F16 \[3, 5\], got float16 \[3, 4\]",
    ),
    "a scalar": (("x", BUCKET, {"latent": LATENT}, {"snow": {"tokens": np.float16(1)}}), "'x', caption 'snow': .*unsized"),
    "NaN tokens": (
        ("x", BUCKET, {"latent": LATENT}, {"snow": {"tokens": np.full((3, 5), np.nan, "f2")}}),
        "'snow': .*'tokens' is NaN",
    ),
    "no tokens": (("x", BUCKET, {"latent": LATENT}, {"snow": {}}), r"'snow' has the columns \[\], expected \['tokens'\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name_and_the_writer_continues(name: str, tmp_path: Path) -> None:
    given, words = REFUSED[name]
    with store_writer(tmp_path / "s") as writer:
        writer.add("there.png", BUCKET, {"latent": LATENT}, {CAPTIONS[0]: {"tokens": embedding(CAPTIONS[0])}})
        with pytest.raises(UsageError, match=words):
            writer.add(*given)
        writer.add("x.png", BUCKET, {"latent": LATENT + 1}, {"snow": TOKENS})
    store = Store.open(tmp_path / "s")
    assert not faults(store)
    assert store.bucket(BUCKET).sample_ids(np.arange(2)) == ["there.png", "x.png"]
    assert store.manifest.samples == 2


def test_a_caption_is_stored_once_a_shard_and_those_beyond_the_most_only_in_the_record(tmp_path: Path) -> None:
    samples = [make_sample(f"{n}.png", BUCKET, ("a", "b", "c", "d")) for n in range(5)]
    with store_writer(tmp_path / "s") as writer:
        add_samples(writer, samples)
    check(tmp_path / "s", samples)
    (shard,) = Store.open(tmp_path / "s").shards
    assert sorted(shard.caption_digests().tobytes()[at : at + 16] for at in range(0, 80, 16)) == sorted(
        caption_digest(text) for text in ("", "a", "b", "c", "d")
    )


def test_a_shard_of_many_rows_is_full_whatever_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketline.store.write.shard_writer.MAX_ROWS", 3)
    with StoreWriter(tmp_path / "s", columns=[LatentColumn(channels=4)]) as writer:
        for number in range(7):
            writer.add(f"{number}.png", "train/64x64", {"latent": np.zeros((4, 8, 8), "<f2")})
            writer.commit()
    assert [shard.samples for shard in writer.manifest.shards] == [3, 3, 1]


@pytest.mark.parametrize("at", [0, 1])
def test_a_failed_publication_is_repeated_and_loses_nothing(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generations/1.json` may be there already, and counts."""
    path, samples, write, calls = tmp_path / "s", samples_of(ROWS), write_or_explain, list[int]()

    def fail(*given: Any) -> None:
        calls.append(1)
        if len(calls) == at + 1:
            raise StoreError("the disk is full")
        write(*given)

    with store_writer(path) as writer:
        add_samples(writer, samples)
        with monkeypatch.context() as patch:
            patch.setattr("bucketline.store.format.manifest.write_or_explain", fail)
            with pytest.raises(StoreError, match="the disk is full"):
                writer.publish()
    assert generations(path)[: at + 1] == list(range(at + 1))
    with store_writer(path):
        pass
    check(path, samples)


def test_the_names_of_shards_are_new_each_time_or_as_asked(tmp_path: Path) -> None:
    for number in range(3):
        with store_writer(tmp_path / "s", shard_names="mine-{:03d}") as writer:
            add_samples(writer, samples_of({BUCKET: 1}, f"{number}/"))
    assert [shard.name for shard in Store.open(tmp_path / "s").manifest.shards] == ["mine-000", "mine-001", "mine-002"]
    with store_writer(tmp_path / "s") as writer:
        add_samples(writer, samples_of({BUCKET: 1}, "3/"))
    assert writer.manifest.shards[-1].name.startswith("g000004-")
    for pattern in ("same", "{}/{}", "{name}", "copy-{}", "two words {}"):
        with pytest.raises(UsageError, match="is not a pattern of shards' names"):
            store_writer(tmp_path / "s", shard_names=pattern)
    with store_writer(tmp_path / "s") as writer, pytest.raises(UsageError, match="is not a pattern of shards' names"):
        writer.part("../r0")


@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_was_committed_under_the_pattern_of_collected_shards_is_not_lost(tmp_path: Path, *, is_sealed: bool) -> None:
    samples = [samples_of({BUCKET: 2}, f"{number}/") for number in range(4)]
    for own in samples[:2]:
        with store_writer(tmp_path, shard_names="mine-{}") as writer:
            add_samples(writer, own)
    assert compact(tmp_path, shard_bytes=1 << 30, gc_older_than_s=-60.0).collected is not None
    assert not list((tmp_path / "shards").glob("mine-*"))
    with suppress(KeyboardInterrupt), store_writer(tmp_path, shard_names="mine-{}") as writer:
        with writer.part("r0") as part:
            add_samples(part, samples[2])
        add_samples(writer, samples[3])
        (writer.seal if is_sealed else writer.commit)()
        raise KeyboardInterrupt
    with store_writer(tmp_path):
        pass
    check(tmp_path, [sample for own in samples for sample in own])


OUTSIDE: dict[str, Callable[[StoreWriter], object]] = {
    "add": lambda writer: add_samples(writer, samples_of({BUCKET: 1})),
    "publish": StoreWriter.publish,
    "part": lambda writer: writer.part("r0"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_is_done_outside_of_the_block(name: str, tmp_path: Path) -> None:
    writer = store_writer(tmp_path / "s")
    with pytest.raises(UsageError, match="is not being written; use its StoreWriter inside"):
        OUTSIDE[name](writer)
    with pytest.raises(UsageError, match="is not being written; use its StoreWriter inside"):
        _ = "a.png" in writer
    assert not (tmp_path / "s").exists()
    with writer:
        add_samples(writer, samples_of({BUCKET: 2}))
    with pytest.raises(UsageError, match="is not being written"):
        OUTSIDE[name](writer)
    check(tmp_path / "s", samples_of({BUCKET: 2}))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"")
    with pytest.raises(StoreError, match="is not a store and not empty"), store_writer(tmp_path / "photos"):
        raise AssertionError
    with pytest.raises(StoreError, match="is a file"), store_writer(tmp_path / "photos" / "a.png"):
        raise AssertionError
    assert list(tree(tmp_path)) == ["photos/", "photos/a.png"]
    with pytest.raises(UsageError, match="max_captions is 0"):
        StoreWriter(tmp_path / "s", encoders={}, columns=(), text=TEXT, empty_caption={"tokens": embedding("")}, max_captions=0)
    with pytest.raises(UsageError, match=r"shard_bytes 0, expected .* 1 or more"):
        store_writer(tmp_path / "s", shard_bytes=0)


@pytest.mark.parametrize("names", [("tokens", "digest"), ("tokens", "starts"), ("tokens", "tokens"), ("checksum",)])
def test_text_columns_whose_blocks_could_not_be_read_are_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    columns = [Column(name=name, dtype="F16", shape=(3,)) for name in names]
    empty = {name: np.zeros((2, 3), "<f2") for name in names}
    for text in (columns, TextSpec(tokens=tuple(columns[:1]), fixed=tuple(columns[1:]))):
        with pytest.raises(UsageError, match="each name once, and none of starts, checksum, digest"):
            StoreWriter(tmp_path / "s", columns=[LatentColumn(channels=2)], text=text, empty_caption=empty)


SAMPLES = samples_of({BUCKET: 240, "val/8x8": 40})


@pytest.mark.parametrize("kind", ["store", "part"])
def test_what_several_threads_add_is_all_stored(tmp_path: Path, kind: str) -> None:
    with store_writer(tmp_path / "s", shard_bytes=1 << 14) as writer:
        used: PartWriter = writer if kind == "store" else writer.part("p")

        def add(samples: list[Sample]) -> None:
            add_samples(used, samples, commit_every=5)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(add, [SAMPLES[n::8] for n in range(8)]))
            if kind == "store":
                list(pool.map(lambda _: writer.publish(), range(3)))
        used.seal()
    store = check(tmp_path / "s", SAMPLES)
    assert len(store.shards) > 1


def test_the_same_id_from_two_threads_is_refused_once(tmp_path: Path) -> None:
    refused = []
    with store_writer(tmp_path / "s") as writer:

        def add(sample: Sample) -> None:
            try:
                add_samples(writer, [sample])
            except UsageError as error:
                refused.append(str(error))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(add, [sample for sample in SAMPLES[:50] for _ in range(2)]))
    assert len(refused) == 50
    check(tmp_path / "s", SAMPLES[:50])


@pytest.mark.parametrize("use", ["add", "commit", "seal", "publish", "part", "leave"])
def test_a_forked_child_of_a_writer_is_refused_and_changes_nothing(tmp_path: Path, use: str) -> None:
    with store_writer(tmp_path / "s") as writer:
        add_samples(writer, SAMPLES[:9])
        uses: dict[str, Callable[[], object]] = {
            "add": lambda: add_samples(writer, SAMPLES[9:10]),
            "commit": writer.commit,
            "seal": writer.seal,
            "publish": writer.publish,
            "part": lambda: writer.part("p"),
            "leave": lambda: writer.__exit__(None, None, None),
        }
        child = apart(lambda: uses[use]() and None)
        assert child.how is How.REFUSED
        assert f"process {os.getpid()} writes" in child.said
        assert "StoreWriter.part" in child.said
        with pytest.raises(LockedError, match=f"pid: {os.getpid()}"):
            lock_store(tmp_path / "s")
        assert apart(lambda: writer.__exit__(ValueError, ValueError("x"), None)).how is How.DONE
        assert list((tmp_path / "s" / "pending").glob("g*.lock"))
        add_samples(writer, SAMPLES[10:20])
    check(tmp_path / "s", [*SAMPLES[:9], *SAMPLES[10:20]])


def test_a_part_is_for_whichever_process_uses_it_first(tmp_path: Path) -> None:
    def fill(part: PartWriter, samples: list[Sample]) -> list[str]:
        with part:
            add_samples(part, samples)
        return part.sealed

    with store_writer(tmp_path / "s") as writer:
        inherited, own, sent = (writer.part(name) for name in ("inherited", "own", "sent"))
        assert apart(lambda: fill(inherited, SAMPLES[:5])).how is How.DONE
        add_samples(own, SAMPLES[5:7])
        refused = apart(lambda: fill(own, SAMPLES[7:9]))
        assert refused.how is How.REFUSED
        assert apart(lambda: fill(pickle.loads(pickle.dumps(sent)), SAMPLES[9:12])).how is How.DONE
        assert sent.sealed == [], "the copy sealed it"
        assert writer.publish(sent.sealed).samples == 8
        assert SAMPLES[9].id in writer
        own.seal()
    check(tmp_path / "s", [*SAMPLES[:7], *SAMPLES[9:12]])


def test_a_refused_record_leaves_nothing_in_its_shard(tmp_path: Path) -> None:
    sample, other = SAMPLES[3], SAMPLES[4]
    texts = {"a good caption": {"tokens": embedding("a good caption")}, "another": {"tokens": np.zeros((2, 3), dtype="<f2")}}
    good, bad = texts
    own, record = {good: texts[good]}, replace(sample.record, captions=(good,))
    refused: tuple[tuple[SampleRecord, Any, str], ...] = (
        (replace(record, captions=(good, bad)), own, "has the caption 'another' without an embedding"),
        (replace(record, captions=(good, bad)), texts, "caption 'another'"),
        (replace(record, source_bytes=1 << 64), own, "source_bytes"),
        (replace(record, source_bytes=-1), own, "source_bytes"),
        (replace(record, source_mtime_ns=-1), own, "source_mtime_ns -1, expected 0"),
        (replace(record, source_mtime_ns=1 << 63), own, "source_mtime_ns"),
        (replace(record, content=b""), own, "content"),
        (replace(record, split="val"), own, "has the split 'val', expected that of its bucket, train/64x64"),
    )
    with store_writer(tmp_path / "s") as writer:
        add_samples(writer, [other])
        for wrong, captions, words in refused:
            with pytest.raises(BucketlineError, match=f"{sample.id}.*{words}"):
                writer.add_record(wrong, {"latent": sample.latent}, captions)
    (entry,) = check(tmp_path / "s", [other]).manifest.shards
    assert entry.groups["text"].rows == 1 + len(set(other.captions) - {""})


@pytest.mark.parametrize("more_bytes", [1 << 14, 1 << 17])
def test_a_full_disk_is_named_and_what_was_committed_is_adopted_later(more_bytes: int, tmp_path: Path) -> None:
    """It fills up while blocks are written, or while shards are sealed."""
    path, samples = tmp_path / "disk" / "s", samples_of({BUCKET: 90})
    path.parent.mkdir()

    def write() -> tuple[list[str], str]:
        disk, committed, said = SmallDisk(path.parent, 1 << 22), list[str](), ""
        with store_writer(path, shard_bytes=1 << 15):
            pass
        disk.leave(more_bytes)
        try:
            with store_writer(path, shard_bytes=1 << 15) as writer:
                for n in range(0, len(samples), 5):
                    add_samples(writer, samples[n : n + 5])
                    writer.commit()
                    committed = [sample.id for sample in samples[: n + 5]]
        except StoreError as error:
            said = str(error)
        disk.resize(1 << 24)
        with store_writer(path) as writer:
            kept = [sample for sample in samples if sample.id in writer]
            assert [sample.id for sample in kept][: len(committed)] == committed
        check(path, kept)
        with store_writer(path) as writer:
            add_samples(writer, (sample for sample in samples if sample not in kept))
        check(path, samples)
        return committed, said

    ended = apart(write, 60)
    assert ended.how is How.DONE, ended.said
    committed, said = ended.gave
    assert len(committed) < len(samples)
    assert re.search(r"full|No space left|File too large", said), said
