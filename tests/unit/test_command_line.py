"""The output and exit codes of the commands: others script them."""

from __future__ import annotations

import json
import shlex
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bucketline.store import Store, read_manifest
from tests.building import make_store, samples_of, tree
from tests.commands import BIN, Ran, call, spawn
from tests.models import SMALL, write_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def pack(source: Path, store: Path, model: Path, *more: object) -> Ran:
    return call("ingest", "pack", source, store, "--model", model, *SMALL, *more)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Path]:
    """A source and the store that was packed from it, only to be read."""
    from tests.models import write_images

    folder = tmp_path_factory.mktemp("packed")
    write_images(folder / "photos", 14)
    ran = pack(folder / "photos", folder / "s", model, "--val-fraction", "0.2", "--split-by", "id")
    assert ran.code == 0, ran.err
    return folder / "photos", folder / "s"


def test_a_command_whose_stderr_is_no_terminal_writes_nothing_there(packed: tuple[Path, Path], tmp_path: Path) -> None:
    for asked in (
        ("verify", packed[1]),
        ("export", packed[1], tmp_path / "out", "--format", "safetensors"),
        ("compact", packed[1], "--dry-run"),
        ("merge", tmp_path / "all", packed[1]),
    ):
        ran = spawn([BIN / "store", *asked])
        assert (ran.code, ran.err) == (0, ""), asked


def test_pack_prints_one_object_with_the_account(source: Path, tmp_path: Path, model: Path) -> None:
    (source / "broken.jpg").write_bytes(b"no image")
    (source / "lost.txt").write_text("a caption without an image\n", encoding="ascii")
    ran = pack(source, tmp_path / "s", model, "--json")
    assert ran.code == 0, ran.err
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


def test_the_summary_for_people_says_what_the_object_says(source: Path, tmp_path: Path, model: Path) -> None:
    (source / "broken.jpg").write_bytes(b"")
    ran = pack(source, tmp_path / "s", model)
    assert "15 images found = 14 packed + 0 unchanged + 1 rejected" in ran.out
    assert "rejected: 1 empty file" in ran.out
    assert "4 images without a caption" in ran.out
    assert "; slowest: " in ran.out
    assert ran.err == ""  # a short run's progress is only for a terminal


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


def test_info_for_people_names_every_bucket(packed: tuple[Path, Path]) -> None:
    ran = call("store", "info", packed[1])
    assert ran.code == 0
    assert "14 samples" in ran.out
    assert "train/16x24" in ran.out


def test_verify_prints_one_object_and_ends_with_zero_where_all_is_well(packed: tuple[Path, Path]) -> None:
    ran = call("store", "verify", packed[1], "--json")
    assert ran.code == 0
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


def test_get_writes_a_file_that_safetensors_opens(packed: tuple[Path, Path], tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file

    out = tmp_path / "sample.safetensors"
    ran = call("store", "get", packed[1], "a/002.png", "-o", out, "--json")
    assert ran.code == 0, ran.err
    assert (ran.json["id"], len(ran.json["captions"])) == ("a/002.png", 2)
    found = load_file(out)
    store = Store.open(packed[1])
    record = store.sample("a/002.png")[1]
    bucket = store.bucket(record.bucket)
    row = bucket.sample_ids(np.arange(bucket.num_rows)).index("a/002.png")
    assert np.array_equal(found["latent"], bucket.read(np.array([row]), "latent")[0])
    for n, caption_row in enumerate(record.caption_rows):
        assert np.array_equal(found[f"caption.{n}.tokens"], store.read_caption(0, caption_row)["tokens"])
    with safe_open(out, framework="numpy") as file:
        assert json.loads(file.metadata()["record"])["captions"] == list(record.captions)


def test_plan_prints_one_object_with_buckets_and_with_list_every_step(packed: tuple[Path, Path]) -> None:
    asked = ("plan", packed[1], "--batch-size", 2, "--world-size", 2, "--epochs", 3, "--seed", 5, "--json")
    brief = call("loader", *asked).json
    assert {"steps", "rows", "buckets"} <= set(brief)
    assert "batches" not in brief
    for bucket in brief["buckets"]:
        assert set(bucket) == {"name", "split", "rows", "global_batch", "batches", "carried", "repeats"}
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
    from bucketline.loader import Loader, LoaderConfig
    from bucketline.store.format.hashing import sample_digest

    listed = call("loader", "plan", packed[1], "--batch-size", 2, "--accumulation", 2, "--epochs", 2, "--list", "--json").json
    with Loader(packed[1], LoaderConfig(batch_size=2, accumulation=2, epochs=2)) as loader:
        read = [bytes(row.tolist()) for batch in loader for row in batch.ids]
    assert read == [sample_digest(i) for batch in listed["batches"] for ids in batch["ranks"] for i in ids]


@pytest.mark.parametrize("shuffle", ["full", "blocks", "lines", "none"])
def test_plan_of_several_stores_by_a_budget_lists_what_a_loader_reads(
    packed: tuple[Path, Path], tmp_path: Path, shuffle: str
) -> None:
    from bucketline.loader import Loader, LoaderConfig, Shuffle
    from bucketline.store.format.hashing import sample_digest

    one = make_store(tmp_path / "one.store", samples_of({"train/64x64": 9, "train/64x128": 5}, "one/")).path
    two = make_store(tmp_path / "two.store", samples_of({"train/64x64": 4}, "two/")).path
    asked = ("plan", one, f"{two}:3", "--batch-pixels", 17_000, "--batch-multiple", 2, "--world-size", 2, "--shuffle", shuffle)
    listed = call("loader", *asked, "--shuffle-window", 32, "--list", "--json").json
    assert {bucket["name"]: (bucket["rows"], bucket["global_batch"]) for bucket in listed["buckets"]} == {
        "train/64x64": (9 + 3 * 4, 8),
        "train/64x128": (5, 4),
    }
    assert [(store["path"], store["repeats"]) for store in listed["stores"]] == [(str(one), 1), (str(two), 3)]
    assert f"{two} x 3" in call("loader", *asked).out
    config = LoaderConfig(batch_pixels=17_000, batch_multiple=2, shuffle=Shuffle(shuffle), shuffle_window=32, epochs=1)
    for rank in range(2):
        with Loader([one, f"{two}:3"], config, rank=rank, world_size=2) as loader:
            read = [bytes(row.tolist()) for batch in loader for row in batch.ids]
        assert read == [sample_digest(i) for batch in listed["batches"] for i in batch["ranks"][rank]]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "error: no batch size given: pass --batch-size, --batch-pixels or --batch-tokens\n"),
        (("--batch-size", 0), "--batch-size is 0, expected 1 or more"),
        (("--batch-pixels", -1), "--batch-pixels is -1, expected 1 or more"),
        (("--batch-size", 1, "--shuffle", "all"), "invalid choice 'all'"),
        (("--batch-size", 1, "--batch-tokens", 9), "set by --batch-size 1 and --batch-tokens 9"),
    ],
)
def test_a_plan_that_makes_no_sense_ends_with_2_naming_what(
    packed: tuple[Path, Path], more: tuple[object], message: str
) -> None:
    ran = call("loader", "plan", packed[1], *more)
    assert ran.code == 2
    assert message in ran.err


def test_a_bucket_smaller_than_a_batch_is_no_error(tmp_path: Path) -> None:
    make_store(tmp_path, samples_of({"train/64x64": 9, "train/96x64": 1}))
    report = call("loader", "plan", tmp_path, "--batch-size", 4, "--json")
    assert report.code == 0
    assert {bucket["name"]: bucket["batches"] for bucket in report.json["buckets"]} == {"train/64x64": 2, "train/96x64": 0}


SMALL_BUCKETS = {f"train/{64 * (n + 1)}x64": n for n in range(1, 6)} | {"train/64x64": 99, "train/64x128": 6}


@pytest.mark.parametrize(
    ("remainder", "words"),
    [
        ("carry", "fills a batch of 12 once in 12 passes (with copies), train/192x64 (2 images) fills"),
        ("partial", "leaves 11 of a batch's 12 rows at weight 0, train/192x64 (2 images) leaves"),
        ("drop", "never fills a batch of 12 and is not read, train/192x64 (2 images) never"),
    ],
)
def test_plan_warns_of_buckets_too_small_for_their_batch(tmp_path: Path, remainder: str, words: str) -> None:
    make_store(tmp_path, samples_of(SMALL_BUCKETS))
    asked = ("loader", "plan", tmp_path, "--batch-size", 6, "--world-size", 2, "--remainder", remainder)
    ran = call(*asked)
    assert ran.err.startswith(f"warning: train/128x64 (1 image) {words}")
    assert ran.err.count("\n") == 1
    assert f", and {len(SMALL_BUCKETS) - 1 - 3} more such buckets; use a smaller batch or fewer ranks" in ran.err
    assert ("--remainder drop" in ran.err) is (remainder != "drop")
    assert call(*asked, "--json").err == ran.err


@pytest.mark.parametrize("remainder", ["carry", "partial", "drop"])
def test_plan_does_not_warn_of_ordinary_buckets(tmp_path: Path, remainder: str) -> None:
    make_store(tmp_path, samples_of({"train/64x64": 99, "train/64x128": 6}))
    assert call("loader", "plan", tmp_path, "--batch-size", 5, "--remainder", remainder).err == ""


def bad_plan(store: Path, *more: object) -> Ran:
    return call("loader", "plan", store, "--batch-size", 4, *more, "--json")


BAD_REQUESTS: dict[str, tuple[Callable[[Path], Ran], int, list[str]]] = {
    "a plan without a step": (
        lambda s: call("loader", "plan", s, "--batch-size", 64),
        1,
        ["no step", "train/16x24 has", "takes 64", "smaller batch"],
    ),
    "a split without rows": (lambda s: bad_plan(s, "--split", "test"), 1, ["'test'", "splits with rows: train, val"]),
    "no such store": (lambda s: bad_plan(s / "nowhere"), 1, ["nowhere is not a store", "ingest pack"]),
    "a store that is a file": (
        lambda s: call("store", "info", s / "manifest.json"),
        1,
        ["is in the store", "name that folder"],
    ),
    "batches of none": (lambda s: bad_plan(s, "--epochs", 0), 2, ["--epochs is 0", "1 or more"]),
    "an unknown remainder": (lambda s: bad_plan(s, "--remainder", "keep"), 2, ["keep", "carry"]),
    "no such sample": (
        lambda s: call("store", "get", s, "no.png", "-o", s.parent / "o"),
        1,
        ["'no.png'", "paths in the source"],
    ),
    "a file that exists": (
        lambda s: call("store", "get", s, "a/000.png", "-o", s / "manifest.json"),
        2,
        ["manifest.json exists", "name a file that does not"],
    ),
    "a folder that does not": (
        lambda s: call("store", "get", s, "a/000.png", "-o", s / "no" / "o"),
        2,
        ["no is not a folder; make it first"],
    ),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_refused_by_name_and_changes_nothing(case: str, packed: tuple[Path, Path]) -> None:
    ask, code, words = BAD_REQUESTS[case]
    before = tree(packed[1].parent)
    ran = ask(packed[1])
    assert (ran.code, ran.out) == (code, "")
    for word in words:
        assert word in ran.err
    assert tree(packed[1].parent) == before


def no_images(source: Path, model: Path) -> list[object]:
    shutil.rmtree(source)
    source.mkdir()
    (source / "notes.txt").write_text("no image", encoding="ascii")
    return []


def without(part: str) -> Callable[[Path, Path], list[object]]:
    def remove(source: Path, model: Path) -> list[object]:
        shutil.rmtree(model / part)
        return []

    return remove


def broken_table(source: Path, model: Path) -> list[object]:
    (source / "metadata.jsonl").write_text('{"file_name": "a/000.png", "text": "x"}\nnonsense\n', encoding="ascii")
    return []


def broken_weights(source: Path, model: Path) -> list[object]:
    path = model / "vae" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    return []


BAD_INPUTS: dict[str, tuple[Callable[[Path, Path], list[object]], int, list[str]]] = {
    "no images": (no_images, 1, ["photos has no images", ".png"]),
    "a model without a vae": (without("vae"), 1, ["lacks the part vae/", "text_encoder, tokenizer", "diffusers' layout"]),
    "a model without a text encoder": (without("text_encoder"), 1, ["lacks the part text_encoder/", "diffusers' layout"]),
    "a model without a tokenizer": (without("tokenizer"), 1, ["lacks the part tokenizer/", "diffusers' layout"]),
    "a vae cut short": (broken_weights, 1, ["vae/ cannot be loaded"]),
    "a broken metadata.jsonl": (broken_table, 1, ["metadata.jsonl, line 2", "nonsense", "file_name"]),
    "a grid that does not suit the vae": (lambda *_: ["--grid", "17x24"], 2, ["17x24", "multiples of 2 px"]),
    "a grid that is none": (lambda *_: ["--grid", "big"], 2, ["'big' is not a grid", "square:N"]),
    "a limit on enlarging of nothing": (lambda *_: ["--max-upscale", "0"], 2, ["--max-upscale is 0", "above 0"]),
    "a colour that is none": (lambda *_: ["--background", "pink"], 2, ["'pink' is not a colour", "#RRGGBB"]),
    "a crop that is none": (lambda *_: ["--crop", "left"], 2, ["--crop", "center", "random"]),
    "a token grid for a model without tokens": (lambda *_: ["--grid", "tokens:16"], 2, ["no transformer", "tokens:16:16"]),
    "a fraction above one": (lambda *_: ["--val-fraction", "1.5"], 2, ["--val-fraction is 1.5", "expected 0 to 1"]),
    "no such device": (lambda *_: ["--device", "abacus"], 2, ["'abacus' is not a device", "cuda:N"]),
    "a batch of none": (lambda *_: ["--batch-size", "0"], 2, ["--batch-size is 0", "1 or more"]),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_to_pack_is_refused_by_name_and_leaves_nothing(case: str, source: Path, tmp_path: Path, model: Path) -> None:
    own = tmp_path / "model"
    shutil.copytree(model, own)
    prepare, code, words = BAD_INPUTS[case]
    more = prepare(source, own)
    before = tree(tmp_path)
    ran = pack(source, tmp_path / "s", own, *more, "--json")
    assert (ran.code, ran.out) == (code, "")
    for word in words:
        assert word in " ".join(ran.err.split())
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("source_name", "model_name", "words"),
    [
        ("nowhere", "model", ["nowhere does not exist", "expected a folder of images"]),
        ("photos/a/000.png", "model", ["000.png is an image; expected its folder"]),
        ("photos", "./nothing", ["nothing is not a folder", "vae/, text_encoder/, tokenizer/"]),
    ],
)
def test_paths_that_lead_nowhere_are_named(
    source_name: str, model_name: str, words: list[str], source: Path, tmp_path: Path, model: Path
) -> None:
    shutil.copytree(model, tmp_path / "model")
    before = tree(tmp_path)
    ran = pack(tmp_path / source_name, tmp_path / "s", tmp_path / model_name, "--json")
    assert (ran.code, ran.out) == (1, "")
    for word in words:
        assert word in ran.err
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--val-fraction", "0.5"], "--val-fraction 0.2, this run has --val-fraction 0.5"),
        (["--val-fraction", "0.2", "--split-by", "folder"], "--split-by id, this run has --split-by folder"),
        (["--val-fraction", "0.2", "--grid", "16x16"], "--grid 16x24,24x16, this run has --grid 16x16"),
        (["--val-fraction", "0.2", "--crop", "random"], "--crop center, this run has --crop random"),
        (["--val-fraction", "0.2", "--max-upscale", "2"], "no --max-upscale, this run has --max-upscale 2.0"),
        (["--val-fraction", "0.2", "--max-crop", "0.5"], "--max-crop 0.75, this run has --max-crop 0.5"),
        (["--val-fraction", "0.2", "--max-crop", "1"], "--max-crop 0.75, this run has --max-crop 1"),
        (["--val-fraction", "0.2", "--background", "black"], "--background '#ffffff', this run has --background '#000000'"),
        (["--val-fraction", "0.2", "--min-size-px", "9"], "--min-size-px 8, this run has --min-size-px 9"),
        (["--val-fraction", "0.2", "--flip"], "no --flip, this run has --flip"),
        (["--val-fraction", "0.2", "--max-captions", "3"], "--max-captions 8, this run has --max-captions 3"),
        (["--val-fraction", "0.2", "--dtype", "BF16"], "--dtype F16, this run has --dtype BF16"),
        (["--val-fraction", "0.2", "--text-dtype", "I8"], "no --text-dtype, this run has --text-dtype I8"),
    ],
)
def test_a_store_made_with_other_settings_is_refused_with_option_and_both_values(
    more: list[str], words: str, packed: tuple[Path, Path], model: Path
) -> None:
    before = tree(packed[1])
    ran = pack(*packed, model, *more, "--json")
    assert (ran.code, ran.out) == (1, "")
    first, *others, _ = ran.err.splitlines() if words.startswith("--") else [*ran.err.splitlines(), ""]
    assert first == f"error: {packed[1]} was made with other options than this run has:"
    assert others[0] == f"  {words}"
    assert others[-1].endswith("or pack into a new store")
    assert tree(packed[1]) == before


def test_all_that_differs_is_named_with_the_options_that_restore_it(
    packed: tuple[Path, Path], model: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", seed=1)
    ran = pack(*packed, other, "--flip", "--crop", "random", "--dtype", "F32", "--trigger-word", "ohwx")
    assert ran.code == 1
    lines = ran.err.splitlines()
    assert lines[1:6] == [
        "  --crop center, this run has --crop random",
        "  no --flip, this run has --flip",
        "  --val-fraction 0.2, this run has --val-fraction 0.0",
        "  --dtype F16, this run has --dtype F32",
        "  no --trigger-word, this run has --trigger-word ohwx",
    ]
    others = [line.partition(" = ")[0] for line in lines[6:8]]
    assert others == ["  encoders.text_encoder.weights_hash", "  encoders.vae.weights_hash"]
    assert lines[8] == (
        "Name the model that the store was made with (no option changes the VAE or the text encoder), leave out --flip "
        "--trigger-word, add the options below, or add --recaption to encode the captions again (the stored latents are kept), "
        "or pack into a new store"
    )
    assert lines[9:] == ["  --crop center --val-fraction 0.2 --dtype F16"]


def test_info_shows_the_options_that_a_pack_of_the_same_store_takes(packed: tuple[Path, Path], model: Path) -> None:
    options = call("store", "info", packed[1], "--json").json["pack_options"]
    assert options[:4] == ["--grid", "16x24,24x16", "--crop", "center"]
    assert {"--val-fraction", "--latents", "--encode-dtype", "--max-tokens"} <= set(options)
    assert f"options: {shlex.join(options)}\n" in call("store", "info", packed[1]).out
    before = tree(packed[1])
    again = call("ingest", "pack", *packed, "--model", model, *options, "--json")
    assert (again.code, again.json["packed"]) == (0, 0), again.err
    after = tree(packed[1])
    for files in (before, after):  # it also records how the options were given
        files.pop("packed_model.json", None)
    assert after == before


def test_a_folder_with_something_else_in_it_is_never_made_a_store(source: Path, tmp_path: Path, model: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("years of work", encoding="ascii")
    before = tree(tmp_path / "s")
    ran = pack(source, tmp_path / "s", model)
    assert ran.code == 1
    assert "not a store and not empty (it has 'thesis.tex')" in ran.err
    assert tree(tmp_path / "s") == before
    ran = pack(source, tmp_path / "s" / "thesis.tex", model)
    assert ran.code == 1
    assert "is a file" in ran.err


def test_too_little_disk_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    ran = pack(source, tmp_path / "new" / "s", model)
    assert ran.code == 1
    assert "14 new images" in ran.err
    assert "0 MiB are free; make room" in ran.err
    assert not (tmp_path / "new").exists()


def test_a_source_of_rejects_alone_ends_with_one_and_says_so(tmp_path: Path, model: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"no image")
    ran = pack(tmp_path / "photos", tmp_path / "s", model)
    assert ran.code == 1
    assert "not one of 1 image could be packed" in ran.err
    assert read_manifest(tmp_path / "s").samples == 0


def test_a_second_writer_is_refused_with_the_first_one_named(source: Path, tmp_path: Path, model: Path) -> None:
    from bucketline.store.write.publish import lock_store, prepare_store

    prepare_store(tmp_path / "s")
    with lock_store(tmp_path / "s"):
        ran = pack(source, tmp_path / "s", model)
    import os

    assert ran.code == 1
    assert f'"pid": {os.getpid()}' in ran.err
    assert "wait until it has finished" in ran.err


def test_a_pipe_that_closes_early_is_no_traceback(packed: tuple[Path, Path]) -> None:
    import subprocess

    with subprocess.Popen(
        [BIN / "store", "info", packed[1], "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
