"""The output and exit codes of `ingest pack`: others script them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import FingerprintError
from bucketline.ingest.config import PackConfig
from bucketline.ingest.pack import pack_images
from bucketline.store import Store, read_manifest
from tests.commands import call
from tests.kit import rewrite_manifest, tree, untouched
from tests.models import in_file, write_model
from tests.unit.command_line.conftest import pack


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


def test_the_summary_for_people_says_what_the_object_says(source: Path, tmp_path: Path, model: Path) -> None:
    (source / "broken.jpg").write_bytes(b"")
    ran = pack(source, tmp_path / "s", model)
    assert "15 images found = 14 packed + 0 unchanged + 1 rejected" in ran.out
    assert "rejected: 1 empty file" in ran.out
    assert "4 images without a caption" in ran.out
    assert "; bottleneck: " in ran.out
    assert ran.err == ""  # a short run's progress is only for a terminal


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
    "a model without a text encoder": (without("text_encoder"), 1, ["lacks the part text_encoder/", "diffusers' layout"]),
    "a model without a tokenizer": (without("tokenizer"), 1, ["lacks the part tokenizer/", "diffusers' layout"]),
    "a vae cut short": (broken_weights, 1, ["vae/ cannot be loaded"]),
    "a broken metadata.jsonl": (broken_table, 1, ["metadata.jsonl, line 2", "nonsense", "file_name"]),
    "a grid that does not suit the vae": (lambda *_: ["--grid", "17x24"], 2, ["17x24", "multiples of 2 px"]),
    "a crop that is none": (lambda *_: ["--crop", "left"], 2, ["--crop", "center", "random"]),
    "a token grid for a model without tokens": (lambda *_: ["--grid", "tokens:16"], 2, ["no transformer", "tokens:16:16"]),
    "no such device": (lambda *_: ["--device", "abacus"], 2, ["'abacus' is not a device", "cuda:N"]),
    "a batch of none": (lambda *_: ["--batch-size", "0"], 2, ["--batch-size is 0", "1 or more"]),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_to_pack_is_refused_by_name_and_leaves_nothing(case: str, source: Path, tmp_path: Path, model: Path) -> None:
    own = tmp_path / "model"
    shutil.copytree(model, own)
    prepare, code, words = BAD_INPUTS[case]
    more = prepare(source, own)
    with untouched(tmp_path):
        ran = pack(source, tmp_path / "s", own, *more, "--json")
        assert (ran.code, ran.out) == (code, "")
        for word in words:
            assert word in " ".join(ran.err.split())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--val-fraction", "0.5"], "--val-fraction 0.2, this run has --val-fraction 0.5"),
        (["--val-fraction", "0.2:folder"], "--val-fraction 0.2, this run has --val-fraction 0.2:folder"),
        (["--val-fraction", "0.2", "--grid", "16x16"], "--grid 16x24,24x16, this run has --grid 16x16"),
        (["--val-fraction", "0.2", "--crop", "random"], "--crop center, this run has --crop random"),
        (["--val-fraction", "0.2", "--max-crop", "0.5"], "--max-crop 0.75, this run has --max-crop 0.5"),
        (["--val-fraction", "0.2", "--max-crop", "1"], "--max-crop 0.75, this run has --max-crop 1.0"),
        (["--val-fraction", "0.2", "--min-size-px", "9"], "--min-size-px 8, this run has --min-size-px 9"),
        (["--val-fraction", "0.2", "--flip"], "no --flip, this run has --flip"),
        (["--val-fraction", "0.2", "--dtype", "BF16"], "--dtype fp16, this run has --dtype bf16"),
        (["--val-fraction", "0.2", "--text-dtype", "I8"], "no --text-dtype, this run has --text-dtype int8"),
    ],
)
def test_a_store_made_with_other_settings_is_refused_with_option_and_both_values(
    more: list[str], words: str, packed: tuple[Path, Path], model: Path
) -> None:
    with untouched(packed[1]):
        ran = pack(*packed, model, *more, "--json")
        assert (ran.code, ran.out) == (1, "")
        first, *others = ran.err.splitlines()
        assert first == f"error: {packed[1]} was made with other options than this run has:"
        assert others[0] == f"  {words}"
        assert others[-1].endswith("or pack into a new store")


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


def test_a_folder_with_something_else_in_it_is_never_made_a_store(source: Path, tmp_path: Path, model: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("years of work", encoding="ascii")
    with untouched(tmp_path / "s"):
        pack(source, tmp_path / "s", model).fails("not a store and not empty (it has 'thesis.tex')")
    pack(source, tmp_path / "s" / "thesis.tex", model).fails("is a file")


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
