"""The output and exit codes of `ingest pack`, `store` and `loader plan`: others script them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import FingerprintError
from bucketline.ingest.config import PackConfig
from bucketline.ingest.pack import pack_images
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store, read_manifest
from tests.commands import BIN, Ran, call, spawn
from tests.kit import Held, by_id, make_store, rewrite_manifest, samples_of, tree
from tests.models import SMALL, in_file, write_images, write_model


def pack(source: Path, store: Path, model: Path, *more: object) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, *more)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("packed")
    write_images(folder / "photos", 14)
    pack(folder / "photos", folder / "s", model, "--val-fraction", "0.2:id").done()
    return folder / "photos", folder / "s"


def test_pack_prints_one_object_with_the_account(source: Path, tmp_path: Path, model: Path) -> None:
    (source / "broken.jpg").write_bytes(b"no image")
    (source / "lost.txt").write_text("a caption without an image\n", encoding="ascii")
    ran = pack(source, tmp_path / "s", model, "--json").done()
    report = ran.json
    wanted = {"found", "packed", "unchanged", "rejected", "without_caption", "payload_bytes", "disk_bytes", "seconds"}
    assert wanted <= set(report)
    assert (report["found"], report["packed"], report["unchanged"], report["rejected"]) == (15, 14, 0, 1)
    assert report["without_caption"] == 4
    assert report["captions_without_image"] == ["lost.txt"]
    assert report["rejected_by_reason"] == {"not an image": 1}
    store = Store.open(tmp_path / "s")
    assert report["payload_bytes"] == store.manifest.payload_bytes
    assert report["disk_bytes"] == sum(p.lstat().st_blocks * 512 for p in store.path.rglob("*") if p.is_file())
    (line,) = (tmp_path / "s" / "rejects.jsonl").read_text(encoding="ascii").splitlines()
    assert {key: json.loads(line)[key] for key in ("id", "reason")} == {"id": "broken.jpg", "reason": "not an image"}


def test_a_second_run_packs_what_is_new_or_changed_and_leaves_the_rest(source: Path, tmp_path: Path, model: Path) -> None:
    from tests.models import png

    assert pack(source, tmp_path / "s", model).code == 0
    (source / "new.png").write_bytes(png(20, 30, 99))
    (source / "a" / "000.png").write_bytes(png(22, 31, 98))
    (source / "b" / "001.txt").write_text("another caption\n", encoding="ascii")
    (source / "a" / "002.png").write_bytes(b"broken now")
    report = pack(source, tmp_path / "s", model, "--json").json
    assert (report["found"], report["packed"], report["unchanged"], report["rejected"]) == (15, 3, 11, 1)
    store = Store.open(tmp_path / "s")
    ids = [i for bucket in store.buckets() for i in bucket.sample_ids(np.arange(bucket.num_rows))]
    assert len(ids) == len(set(ids)) == 14
    assert "a/002.png" not in ids
    assert store.sample("b/001.png")[1].captions == ("another caption",)
    assert call("store", "verify", tmp_path / "s").code == 0
    before = tree(tmp_path / "s")
    report = pack(source, tmp_path / "s", model, "--json").json
    assert (report["packed"], report["unchanged"], report["rejected"]) == (0, 14, 1)
    assert {k: v for k, v in tree(tmp_path / "s").items() if "lock" not in k} == {
        k: v for k, v in before.items() if "lock" not in k
    }


def test_the_same_rules_in_other_words_are_no_difference(packed: tuple[Path, Path], model: Path, tmp_path: Path) -> None:
    shutil.copytree(packed[1], tmp_path / "s")
    file = in_file(tmp_path / "d.toml", packed[0], background="white", max_crop=0.750)
    ran = pack(file, tmp_path / "s", model, "--val-fraction", "0.20", "--text-dtype", "fp16", "--json").done()
    assert (ran.json["unchanged"], ran.json["packed"]) == (14, 0)


def test_rules_of_a_data_set_file_that_differ_are_named_as_it_has_them(
    packed: tuple[Path, Path], model: Path, tmp_path: Path
) -> None:
    file = in_file(tmp_path / "d.toml", packed[0], max_upscale=2.0, background="black", max_captions=3)
    ran = pack(file, packed[1], model)
    assert ran.code == 1
    assert ran.err.splitlines()[1:] == [
        "  no max_upscale, this run has max_upscale = 2.0",
        '  background = "#ffffff", this run has background = "#000000"',
        "  max_captions = 8, this run has max_captions = 3",
        "Leave these options out, so that the store's are taken, or pack into a new store",
    ]


def test_all_that_differs_is_named_with_the_options_that_restore_it(
    packed: tuple[Path, Path], model: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", seed=1)
    for name in ("vae", "text_encoder"):
        path = other / name / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "its": "own"}), encoding="utf-8")
    ran = pack(*packed, other, "--flip", "--crop", "random", "--dtype", "F32", "--caption-template", "ohwx")
    assert ran.code == 1
    lines = ran.err.splitlines()
    assert lines[1:5] == [
        "  --crop center, this run has --crop random",
        "  --dtype fp16, this run has --dtype fp32",
        "  no --flip, this run has --flip",
        "  no --caption-template, this run has --caption-template ohwx",
    ]
    others = [line.partition(" = ")[0] for line in lines[5:7]]
    assert others == ["  encoders.text_encoder.config_hash", "  encoders.vae.config_hash"]
    (advice,) = lines[7:]
    assert "add --recaption" in advice
    assert f"in place of {other}, or pack" in advice
    (of_model,) = pack(*packed, other).err.splitlines()[3:]
    assert of_model == f"Name the store's model in place of {other}, or pack into a new store"


def test_a_program_that_gives_other_options_is_told_those_of_the_store(packed: tuple[Path, Path], model: Path) -> None:
    """A configuration that was not made of a command line has left nothing out."""
    config = PackConfig(source=str(packed[0]), place=packed[1], model=str(model), grid="16x24,24x16", text="plain")
    with pytest.raises(FingerprintError) as refused:
        pack_images(replace(config, min_size_px=8), rank=0, world_size=1, local_rank=0)
    assert refused.value.args[1] == "  --val-fraction 0.2, this run has --val-fraction 0"


def test_a_second_pack_takes_the_rules_of_the_store(tmp_path: Path, source: Path, model: Path) -> None:
    rules = ["--crop", "random", "--flip", "--val-fraction", "0.3:folder", "--shuffle-tags", "2:1"]
    rules += ["--dtype", "BF16", "--text-dtype", "I8", "--caption-template", "ohwx", "--latents", "moments"]
    rules += ["--caption-template", "a {caption}", "--caption-template", "the {caption}"]
    file = in_file(tmp_path / "d.toml", source, background="black", max_captions=5, max_upscale=3.0)
    first = pack(file, tmp_path / "s", model, *rules, "--json").done().json
    before = tree(tmp_path / "s")
    again = call("ingest", "pack", source, tmp_path / "s", "--model", model, "--json").done().json
    assert (again["unchanged"], again["packed"]) == (first["packed"], 0)
    assert tree(tmp_path / "s").keys() == before.keys()
    image = next(path for path in source.rglob("*.png"))
    image.with_stem("another").write_bytes(image.read_bytes())
    ran = call("ingest", "pack", source, tmp_path / "s", "--model", model).done()
    assert "from the store: " in ran.out
    taken = ran.out.splitlines()[0].removeprefix("from the store: ").split(", ")
    assert {"--flip", "--val-fraction 0.3:folder", "--shuffle-tags 2:1", "max_upscale = 3.0", "max_captions = 5"} <= {*taken}
    assert read_manifest(tmp_path / "s").rules == read_manifest(tmp_path / "s", 1).rules
    captions = [
        record["captions"] for record in map(json.loads, call("store", "ls", tmp_path / "s", "--json").out.splitlines())
    ]
    assert all("ohwx" in caption for own in captions for caption in own)
    other = pack(source, tmp_path / "s", model, "--crop", "center")
    assert other.code == 1
    assert "  --crop random, this run has --crop center" in other.err.splitlines()


def test_a_store_of_rules_that_are_no_options_is_refused_with_what_differs(
    packed: tuple[Path, Path], tmp_path: Path, model: Path
) -> None:
    shutil.copytree(packed[1], tmp_path / "s")
    for name, value in (("grid", "another"), ("crop", "left"), ("min-size-px", [8])):
        rewrite_manifest(tmp_path / "s", rules={"grid": "16x24,24x16", name.replace("-", "_"): value})
        ran = call("ingest", "pack", packed[0], tmp_path / "s", "--model", model)
        ran.fails("was made with other options", "no --val-fraction, this run has --val-fraction 0", f"--{name} ")


def test_too_little_disk_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    pack(source, tmp_path / "new" / "s", model).fails("14 new images", "0 MiB are free; make room")
    assert not (tmp_path / "new").exists()


def test_a_source_of_rejects_alone_ends_with_one_and_says_so(tmp_path: Path, model: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"no image")
    pack(tmp_path / "photos", tmp_path / "s", model).fails("not one of 1 image could be packed")
    assert read_manifest(tmp_path / "s").samples == 0


@pytest.mark.usefixtures("no_wait")
def test_a_second_writer_is_refused_with_the_first_one_named(source: Path, tmp_path: Path, model: Path) -> None:
    from bucketline.store.write.publish import lock_store, prepare_store

    prepare_store(tmp_path / "s")
    with lock_store(tmp_path / "s"):
        ran = pack(source, tmp_path / "s", model)
    assert ran.code == 1
    assert f"pid: {os.getpid()}" in ran.err
    assert "wait until it has finished" in ran.err


def test_a_command_whose_stderr_is_no_terminal_writes_nothing_there(packed: tuple[Path, Path], tmp_path: Path) -> None:
    for asked in (
        ("verify", packed[1]),
        ("export", packed[1], tmp_path / "out", "--format", "safetensors"),
        ("compact", packed[1], "--dry-run"),
        ("merge", tmp_path / "all", packed[1]),
    ):
        ran = spawn([BIN / "store", *asked])
        assert (ran.code, ran.err) == (0, ""), asked


def test_info_prints_one_object_with_buckets_and_columns(packed: tuple[Path, Path]) -> None:
    report = call("store", "info", packed[1], "--json").json
    wanted = {"format_version", "generation", "samples", "payload_bytes", "disk_bytes", "shards", "encoders", "buckets"}
    assert wanted <= set(report)
    assert (report["format_version"], report["generation"], report["samples"], report["shards"]) == (1, 1, 14, 1)
    assert set(report["encoders"]) == {"vae", "text_encoder"}
    assert sum(bucket["rows"] for bucket in report["buckets"]) == 14
    for bucket in report["buckets"]:
        assert set(bucket) == {"name", "axes", "height_px", "width_px", "split", "rows", "columns"}
        assert bucket["name"] == f"{bucket['split']}/{bucket['height_px']}x{bucket['width_px']}"
        latent = bucket["columns"]["latent"]
        assert latent == {"dtype": "F16", "shape": [4, bucket["height_px"] // 2, bucket["width_px"] // 2]}
    assert {bucket["split"] for bucket in report["buckets"]} == {"train", "val"}


def test_info_shows_the_options_that_a_pack_of_the_same_store_takes(packed: tuple[Path, Path], model: Path) -> None:
    rules = call("store", "info", packed[1], "--json").json["rules"]
    assert {"grid": "16x24,24x16", "crop": "center", "val_fraction": "0.2", "max_tokens": None}.items() <= rules.items()
    assert {"latents", "encode_dtype", "shuffle_tags"} <= rules.keys()
    (shown,) = [line for line in call("store", "info", packed[1]).out.splitlines() if line.startswith("rules: ")]
    assert "grid 16x24,24x16" in shown
    assert "max_tokens" not in shown


def rows_of(place: Path) -> dict[str, Held]:
    return by_id(Store.open(place))


def test_verify_prints_one_object_and_ends_with_zero_where_all_is_well(packed: tuple[Path, Path]) -> None:
    ran = call("store", "verify", packed[1], "--json").done()
    assert set(ran.json) == {"blocks", "rows", "corrupt", "strays"}
    assert (ran.json["rows"], ran.json["corrupt"]) == (14, [])
    assert "14 rows read, 0 faults" in call("store", "verify", packed[1]).out


def test_verify_ends_with_one_and_names_the_place_where_a_row_is_damaged(packed: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(packed[1], tmp_path / "s")
    store = Store.open(tmp_path / "s")
    bucket = store.buckets()[0]
    located = bucket.locate(np.array([1]))
    path = store.shards[0].paths.lmdb
    data = bytearray(path.read_bytes())
    data[int(located.offsets(bucket.spec, "latent")[0]) + 3] ^= 4
    path.write_bytes(data)
    ran = call("store", "verify", tmp_path / "s", "--json")
    assert ran.code == 1
    named = [fault for fault in ran.json["corrupt"] if fault["row"] is not None]
    assert [(f["shard"], f["bucket"], f["block"], f["row"], f["sample"]) for f in named] == [
        (store.shards[0].name, bucket.name, 0, 1, bucket.sample_ids(np.array([1]))[0])
    ]
    assert bucket.name in call("store", "verify", tmp_path / "s").out


def test_verify_ends_with_one_where_the_manifest_itself_is_what_is_wrong(packed: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(packed[1], tmp_path / "s")
    manifest = tmp_path / "s" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"lanczos", b"bicubic"))
    ran = call("store", "verify", tmp_path / "s", "--json")
    assert ran.code == 1
    (fault,) = ran.json["corrupt"]
    assert (fault["shard"], fault["bucket"], fault["block"]) == (None, None, None)
    assert "edited by hand" in fault["error"]


def test_plan_prints_one_object_with_buckets_and_with_list_every_step(packed: tuple[Path, Path]) -> None:
    asked = ("plan", packed[1], "--batch-size", 2, "--world-size", 2, "--epochs", 3, "--seed", 5, "--json")
    brief = call("loader", *asked).json
    assert {"steps", "rows", "buckets"} <= set(brief)
    assert "batches" not in brief
    for bucket in brief["buckets"]:
        assert set(bucket) == {"name", "split", "rows", "global_batch", "batches", "carried"}
        assert bucket["carried"] == 3 * bucket["rows"] - bucket["batches"] * bucket["global_batch"]
    assert brief["rows"] == sum(bucket["batches"] * bucket["global_batch"] for bucket in brief["buckets"])
    assert brief["steps"] == sum(bucket["batches"] for bucket in brief["buckets"])
    listed = call("loader", *asked, "--list").json
    assert {key: listed[key] for key in brief} == brief
    assert [batch["step"] for batch in listed["batches"]] == list(range(brief["steps"]))
    for batch in listed["batches"]:
        assert set(batch) == {"step", "epoch", "bucket", "ranks"}
        assert [len(ids) for ids in batch["ranks"]] == [2, 2]


def test_plan_lists_what_a_loader_reads(packed: tuple[Path, Path]) -> None:
    from bucketline.store.format.block import sample_digest

    listed = call("loader", "plan", packed[1], "--batch-size", 2, "--accumulation", 2, "--epochs", 2, "--list", "--json").json
    with Loader(packed[1], LoaderConfig(batch_size=2, accumulation=2)) as loader:
        read = [bytes(row.tolist()) for _ in range(2) for batch in loader for row in batch.ids]
    assert read == [sample_digest(i) for batch in listed["batches"] for ids in batch["ranks"] for i in ids]


@pytest.mark.parametrize("window", [None, 32, 0])
def test_plan_of_several_stores_by_a_budget_lists_what_a_loader_reads(
    packed: tuple[Path, Path], tmp_path: Path, window: int | None
) -> None:
    from bucketline.store.format.block import sample_digest

    one = make_store(tmp_path / "one.store", samples_of({"train/64x64": 9, "train/64x128": 5}, "one/")).path
    two = make_store(tmp_path / "two.store", samples_of({"train/64x64": 4}, "two/")).path
    asked = ("plan", one, f"{two}:3", "--batch-size", "17000px/2", "--world-size", 2)
    order = () if window is None else ("--window", window)
    listed = call("loader", *asked, *order, "--list", "--json").json
    assert {bucket["name"]: (bucket["rows"], bucket["global_batch"]) for bucket in listed["buckets"]} == {
        "train/64x64": (9 + 3 * 4, 8),
        "train/64x128": (5, 4),
    }
    assert [(store["path"], store["repeats"]) for store in listed["stores"]] == [(str(one), 1), (str(two), 3)]
    assert f"{two} x 3" in call("loader", *asked).out
    config = LoaderConfig(batch_pixels=17_000, batch_multiple=2, window=window)
    for rank in range(2):
        with Loader([one, f"{two}:3"], config, rank=rank, world_size=2) as loader:
            read = [bytes(row.tolist()) for batch in loader for row in batch.ids]
        assert read == [sample_digest(i) for batch in listed["batches"] for i in batch["ranks"][rank]]


def test_a_bucket_smaller_than_a_batch_is_no_error(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of({"train/64x64": 9, "train/96x64": 1}))
    report = call("loader", "plan", tmp_path, "--batch-size", 4, "--json").done()
    assert {bucket["name"]: bucket["batches"] for bucket in report.json["buckets"]} == {"train/64x64": 2, "train/96x64": 0}


SMALL_BUCKETS = {f"train/{64 * (n + 1)}x64": n for n in range(1, 6)} | {"train/64x64": 99, "train/64x128": 6}


@pytest.mark.parametrize(
    ("remainder", "words"),
    [
        ("carry", "images repeat within them"),
        ("partial", "rows of weight 0 fill them"),
        ("drop", "these images are never read"),
    ],
)
def test_plan_warns_of_buckets_too_small_for_their_batch(tmp_path: Path, remainder: str, words: str) -> None:
    make_store(tmp_path, samples_of(SMALL_BUCKETS))
    asked = ("loader", "plan", tmp_path, "--batch-size", 6, "--world-size", 2, "--split", f"train:{remainder}")
    ran = call(*asked)
    assert ran.err.startswith("warning: train/128x64 has 1 image, train/192x64 has 2 images, train/256x64 has 3 images, ")
    assert ran.err.count("\n") == 1
    others = f", {len(SMALL_BUCKETS) - 1 - 3} more such buckets, and batches take 12"
    assert f"{others}, so {words}; use a smaller batch or fewer GPUs" in ran.err
    assert ("--split train:drop" in ran.err) is (remainder != "drop")
    assert call(*asked, "--json").err == ran.err


@pytest.mark.parametrize("remainder", ["carry", "partial", "drop"])
def test_plan_does_not_warn_of_ordinary_buckets(tmp_path: Path, remainder: str) -> None:
    make_store(tmp_path, samples_of({"train/64x64": 99, "train/64x128": 6}))
    assert call("loader", "plan", tmp_path, "--batch-size", 5, "--split", f"train:{remainder}").err == ""


def test_the_plan_of_a_run_is_the_one_that_its_state_was_made_by(packed: tuple[Path, Path], tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    with Loader(packed[1], LoaderConfig(batch_size=2, seed=7, accumulation=2), world_size=2) as loader:
        state.write_text(json.dumps(loader.state_dict()), encoding="utf-8")
        digest = loader.plan.digest
    found = call("loader", "plan", packed[1], "--run", state, "--list", "--json").done().json
    asked = ("--batch-size", 2, "--seed", 7, "--accumulation", 2, "--world-size", 2)
    assert found["plan"] == digest
    assert found == call("loader", "plan", packed[1], *asked, "--list", "--json").done().json
    call("loader", "plan", "--run", tmp_path / "no").fails(f"--run {tmp_path}/no: {tmp_path}/no cannot be read: No such file")
