"""`store export`: what comes out is what is in the store, byte for byte, and whole or not at all."""

from __future__ import annotations

import gc
import itertools
import json
import os
import resource
import signal
import tarfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, load_file

from bucketline.errors import CorruptError, LockedError, StoreError, UsageError
from bucketline.files.atomic_write import staged_folder, staging_path
from bucketline.store import LatentColumn, RowColumn, Store, StoreWriter, new_record
from bucketline.store.change.commit import drop
from bucketline.store.export.exporter import ExportRequest, check_samples, export, open_export
from bucketline.store.format.block import sample_digest
from bucketline.store.read.samples import Selection, live_samples, write_sample
from tests.commands import BIN, call, spawn
from tests.fault.apart import How, apart
from tests.kit import Sample, embedding, flip_bit, flip_caption, flip_row, make_sample, make_store, samples_of, tree, untouched
from tests.unit.ingest.importers.known import Form, Known, assert_as_packed, run_import
from tests.unit.ingest.importers.writers import kohya

FORMATS = ("webdataset", "safetensors")  # kohya takes only ids that are paths
ODD = ("two\nlines.png", "../../x", "/etc/passwd", "raw\udcff.png", "l" * 10_000, "back\\slash.png", ".", "")


def request(output: Path, kind: str, shard_bytes: int = 1 << 30, **selection: str) -> ExportRequest:
    return ExportRequest(output=output, format=kind, selection=Selection(**selection), shard_bytes=shard_bytes)


def ignore(*_: object) -> None:
    return None


def run(store: Store, wanted: ExportRequest, on_sample: Callable[[], None] = ignore) -> tuple[int, int]:
    exporter = open_export(store, wanted)
    check_samples(exporter, ignore)
    return export(exporter, on_sample)


def read_by_webdataset(folder: Path) -> list[dict[str, Any]]:
    import webdataset

    tars = sorted(str(path) for path in folder.glob("*.tar"))
    with warnings.catch_warnings():  # its reader leaves open files to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        found = list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))
        gc.collect()
    return found


def assert_is_sample(file: dict[str, Any], sample: Sample) -> None:
    assert file["latent"].tobytes() == sample.latent.tobytes()
    assert file["latent"].dtype == sample.latent.dtype
    assert file["id"].tobytes() == sample_digest(sample.id)
    texts = sample.captions or ("",)
    assert {name for name in file if name.startswith("caption.")} == {f"caption.{n}.tokens" for n in range(len(texts))}
    for n, text in enumerate(texts):
        assert file[f"caption.{n}.tokens"].tobytes() == embedding(text).tobytes()


@pytest.fixture
def small(tmp_path: Path) -> tuple[Store, list[Sample]]:
    odd = [make_sample(sample_id, "val/64x96", ("a \udcfe barn", "snow")[: n % 3]) for n, sample_id in enumerate(ODD)]
    first, second = samples_of({"train/64x64": 11, "train/96x64": 4}), [*odd, *samples_of({"train/64x64": 5}, "b/")]
    store = make_store(tmp_path / "in" / "s", first, second)
    drop(store.path, [first[3].id])
    return Store.open(store.path), [sample for sample in (*first, *second) if sample is not first[3]]


def test_webdataset_reads_back_every_sample_byte_for_byte(small: tuple[Store, list[Sample]], tmp_path: Path) -> None:
    store, samples = small
    by_key = {sample_digest(sample.id).hex(): sample for sample in samples}
    run(store, request(tmp_path / "out", "webdataset", shard_bytes=60_000))
    found = read_by_webdataset(tmp_path / "out")
    assert [one["__key__"] for one in found] == [sample_digest(one.record.id).hex() for one in live_samples(store, Selection())]
    assert len(found) == len(by_key) == 27
    for one in found:
        sample = by_key[one["__key__"]]
        assert_is_sample(load(one["safetensors"]), sample)
        assert one["txt"] == (sample.captions[0] if sample.captions else "").encode("utf-8", "surrogateescape")
        record = json.loads(one["json"])
        assert (record["id"], tuple(record["captions"])) == (sample.id, sample.captions)
        assert record["content"] == sample.record.content.hex()
        assert {name for name in one if not name.startswith("__")} == {"safetensors", "json", "txt"}


@pytest.mark.parametrize(("shard_bytes", "name"), [(60_000, "out"), (1024, "é" * 127)])  # the latter as long as names may be
def test_tars_stay_below_the_size_asked_for_or_have_one_sample_and_are_named_in_order(
    small: tuple[Store, list[Sample]], shard_bytes: int, name: str, tmp_path: Path
) -> None:
    written = run(small[0], request(tmp_path / name, "webdataset", shard_bytes=shard_bytes))
    tars = sorted((tmp_path / name).iterdir())
    assert [tar.name for tar in tars] == [f"{n:06d}.tar" for n in range(len(tars))]
    assert len(tars) == written[0]
    large = sum(tar.stat().st_size > shard_bytes for tar in tars)
    assert (large, 2 < len(tars) < len(small[1])) == ((0, True) if shard_bytes > 1024 else (len(small[1]), False))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in", name])


def test_the_same_store_gives_the_same_tars(small: tuple[Store, list[Sample]], tmp_path: Path) -> None:
    for name in ("one", "other"):
        run(small[0], request(tmp_path / name, "webdataset"))
    assert tree(tmp_path / "one") == tree(tmp_path / "other")
    with tarfile.open(tmp_path / "one" / "000000.tar") as tar:
        members = tar.getmembers()
    assert {(member.mtime, member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, 0, "", "")}


def test_a_folder_of_safetensors_has_a_file_for_each_sample(small: tuple[Store, list[Sample]], tmp_path: Path) -> None:
    store, samples = small
    by_id = {sample.id: sample for sample in samples}
    written = run(store, request(tmp_path / "out", "safetensors"))
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text(encoding="ascii").splitlines()]
    assert [line["id"] for line in lines] == [one.record.id for one in live_samples(store, Selection())]
    for line in lines:
        assert line["file"] == f"{line['bucket']}/{sample_digest(line['id']).hex()}.safetensors"
        assert_is_sample(load_file(tmp_path / "out" / line["file"]), by_id[line["id"]])
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {line["file"] for line in lines} | {"samples.jsonl"}
    assert written[0] == len(files) == 28


def test_get_and_export_give_the_same_file(small: tuple[Store, list[Sample]], tmp_path: Path) -> None:
    run(small[0], request(tmp_path / "out", "safetensors"))
    for sample in small[1]:
        ran = call("store", "get", small[0].path, "-o", tmp_path / "one", "--json", "--", sample.id).done()
        exported = tmp_path / "out" / sample.bucket / f"{sample_digest(sample.id).hex()}.safetensors"
        assert exported.read_bytes() == (tmp_path / "one").read_bytes()
        with safe_open(tmp_path / "one", framework="numpy") as file:
            record = json.loads(file.metadata()["record"])
        assert (record["id"], tuple(record["captions"])) == (sample.id, sample.captions)
        assert all(ran.json[name] == value for name, value in record.items())
        (tmp_path / "one").unlink()


def test_bfloat16_comes_back_from_an_export_as_such(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load as load_torch

    store = make_store(tmp_path / "s", [make_sample("a.png", "train/64x64", dtype="BF16")], dtype="BF16")
    run(store, request(tmp_path / "out", "webdataset"))
    (found,) = read_by_webdataset(tmp_path / "out")
    latent = load_torch(found["safetensors"])["latent"]
    assert latent.dtype is torch.bfloat16
    assert np.array_equal(latent.view(torch.uint16).numpy(), make_sample("a.png", "train/64x64", dtype="BF16").latent)


@pytest.mark.parametrize("kind", FORMATS)
def test_only_what_is_selected_is_written(kind: str, small: tuple[Store, list[Sample]], tmp_path: Path) -> None:
    told: list[None] = []
    run(small[0], request(tmp_path / "val", kind, split="val"), lambda: told.append(None))
    assert len(told) == len(ODD)
    run(small[0], request(tmp_path / "bucket", kind, bucket="train/96x64"), lambda: told.append(None))
    assert len(told) == len(ODD) + 4
    with pytest.raises(StoreError, match="has no sample in that split and bucket"):
        run(small[0], request(tmp_path / "none", kind, bucket="train/96x64", split="val"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bucket", "in", "val"]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("damage", ["row", "caption", "record"])
def test_damage_ends_the_export_with_the_sample_named_and_nothing_left(damage: str, kind: str, tmp_path: Path) -> None:
    captions = ("a red barn in snow",)
    store = make_store(tmp_path / "s", [make_sample(f"{n}.png", "train/64x64", captions if n == 4 else ()) for n in range(9)])
    shard, record = store.sample("4.png")
    if damage == "row":
        flip_row(store, "train/64x64", record.row)
    elif damage == "caption":
        flip_caption(store, record.caption_rows[0])
    else:
        entry = shard.find(sample_digest("4.png"))
        assert entry is not None
        data = shard.read(entry.record_offset, entry.record_bytes)
        flip_bit(shard.paths.lmdb, 8 * (entry.record_offset + data.index(b"barn")))
    with untouched(tmp_path), pytest.raises(CorruptError, match=r"'4\.png'.* run `store verify`"):
        run(store, request(tmp_path / "out", kind))


@pytest.mark.parametrize("kind", FORMATS)
def test_ctrl_c_in_the_middle_leaves_nothing(kind: str, small: tuple[Store, list[Sample]], tmp_path: Path) -> None:
    def interrupt() -> None:
        assert staging_path(tmp_path / "out").is_dir()
        raise KeyboardInterrupt

    with untouched(tmp_path), pytest.raises(KeyboardInterrupt):
        run(small[0], request(tmp_path / "out", kind), interrupt)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_killed_export_leaves_nothing_in_the_way_of_the_next(
    kind: str, small: tuple[Store, list[Sample]], tmp_path: Path
) -> None:
    written = itertools.count()

    def killed() -> None:
        if next(written) == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    assert apart(lambda: run(small[0], request(tmp_path / "out", kind), killed)).how is How.DIED
    assert sorted(path.name for path in tmp_path.iterdir()) == [staging_path(tmp_path / "out").name, "in"]
    run(small[0], request(tmp_path / "out", kind))
    run(small[0], request(tmp_path / "other", kind))
    assert tree(tmp_path / "out") == tree(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "other", "out"]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_write_that_the_system_refuses_leaves_nothing(kind: str, small: tuple[Store, list[Sample]], tmp_path: Path) -> None:
    with untouched(tmp_path):

        def refused() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))  # the system's own refusal of a write
            run(small[0], request(tmp_path / "out", kind))

        ended = apart(refused)
        assert ended.how is How.REFUSED
        assert "was not finished" in ended.said
        assert "File too large" in ended.said


def test_two_exports_to_one_name_do_not_meet(small: tuple[Store, list[Sample]], tmp_path: Path) -> None:
    wanted = request(tmp_path / "out", "safetensors")
    with staged_folder(tmp_path / "out") as folder:
        (folder / "a").write_bytes(b"of the first")
        with pytest.raises(LockedError, match=rf"out is being written by another process \(.*pid: {os.getpid()}"):
            run(small[0], wanted)
    assert tree(tmp_path / "out") == {"a": b"of the first"}
    with pytest.raises(UsageError, match="out exists"):
        run(small[0], wanted)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_command_prints_one_object_and_so_does_a_dry_run(
    kind: str, small: tuple[Store, list[Sample]], tmp_path: Path
) -> None:
    asked = ("store", "export", small[0].path, "--format", kind, tmp_path / "out", "--json")
    dry = call(*asked, "--dry-run").done()
    assert not (tmp_path / "out").exists()
    done = call(*asked).done()
    assert dry.json == {**done.json, "files": None, "bytes": None, "dry_run": True}
    sizes = [path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()]
    about = {"output": str(tmp_path / "out"), "format": kind, "samples": 27, "dry_run": False, "left_out": []}
    assert done.json == {**about, "files": len(sizes), "bytes": sum(sizes)}


def test_the_console_command_exports_a_name_of_raw_bytes(small: tuple[Store, list[Sample]], tmp_path: Path) -> None:
    ran = spawn([BIN / "store", "export", small[0].path, "--format", "webdataset", tmp_path / "out\udcff"]).done()
    assert (tmp_path / "out\udcff" / "000000.tar").is_file()
    assert "out\\udcff: 27 samples, 1 file," in ran.out


# A sample taken out of a store is a safetensors file of a row's shapes.


def test_a_damaged_row_is_not_given_away(copy: Path, tmp_path: Path) -> None:
    name = flip_row(copy, "train/64x64", 0)
    with pytest.raises(CorruptError, match=f"sample '{name}': the row's bytes do not match"):
        write_sample(Store.open(copy), name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# `store export` to other trainers' caches: read back as they read them, and imported again they are what they were.


def export_for_trainer(known: Known, kind: str, output: Path, *options: Any) -> dict[str, Any]:
    """Export the packed store; it takes no more than was estimated."""
    asked = ("store", "export", known.images.parent / "packed.store", output, "--format", kind, "--json", *options)
    planned = call(*asked, "--dry-run")
    ran = call(*asked).done()
    files = [path for path in output.rglob("*") if path.is_file()]
    assert (ran.json["files"], ran.json["bytes"]) == (len(files), sum(path.stat().st_size for path in files))
    assert planned.json == {**ran.json, "files": None, "bytes": None, "dry_run": True}
    return ran.json


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_kohyas_files_are_read_by_numpy_and_imported_again(known: Callable[[str], Known], family: str, tmp_path: Path) -> None:
    own = known(family)
    export_for_trainer(own, "kohya", tmp_path / "out")
    for sample in own.samples:
        width, height = sample.original_wh
        with np.load(tmp_path / "out" / f"{sample.stem}_{width:04d}x{height:04d}_{family}.npz") as found:
            end = f"_{sample.latent.shape[1]}x{sample.latent.shape[2]}" if family in ("sd3", "flux") else ""
            wanted = own.fed(sample.latent) if family == "flux" else sample.latent
            np.testing.assert_allclose(found["latents" + end], wanted, rtol=1e-6, atol=1e-6)
            assert found["latents" + end].dtype == np.float32
            assert found["original_size" + end].tolist() == [width, height]
            top, left, high, wide = sample.record.crop
            assert found["crop_ltrb" + end].tolist() == [left, top, left + wide, top + high]
        assert (tmp_path / "out" / f"{sample.stem}.txt").read_text(encoding="utf-8") == f"{sample.caption}\n"
    ran = run_import("kohya", tmp_path / "out", tmp_path / "s.store", own).done()
    assert ran.json["text"] == "encode"
    form, stems = Form(scaled=family == "flux"), {sample.id: sample.stem for sample in own.samples}
    assert_as_packed(tmp_path / "s.store", own, form, ids=stems)


def test_a_store_of_another_model_is_refused_by_name(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("pixart_sigma")
    call("store", "export", own.images.parent / "packed.store", tmp_path / "out", "--format", "kohya").fails(
        "text family 'pixart_sigma'; kohya's caches are written for sd, sdxl, sd3, flux"
    )
    assert not (tmp_path / "out").exists()


def test_columns_next_to_the_latents_are_left_out_by_name(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    sample = own.samples[0]
    encoders = Store.open(own.images.parent / "packed.store").manifest.encoders
    mask = RowColumn(role="mask", dtype="U8", shape=(3,))
    latents = [LatentColumn(channels=4, downscale=2, dtype="F32", name=name) for name in ("latent", "latent_flipped")]
    with StoreWriter(tmp_path / "s.store", encoders=encoders, columns=[*latents, mask]) as writer:
        values = {"target": sample.latent, "target/flipped": sample.latent, "mask": np.ones(3, "u1")}
        writer.add(sample.id, "train", values)
    asked = ("store", "export", tmp_path / "s.store", tmp_path / "out", "--format", "kohya")
    assert call(*asked, "--dry-run", "--json").json["left_out"] == ["mask"]
    assert "left out, as" in call(*asked).done().out


NAMES: dict[str, tuple[tuple[str, ...], str]] = {
    "two images of one name": (("a.png", "a.jpg"), "'a.jpg' and 'a.png' have one name in kohya's caches"),
    "a size that is unknown": (("unknown.png",), "'unknown.png': the size of its image is unknown"),
    "out of the folder": (("../a.png",), "cannot be a file's name"),
    "nothing before the dot": (("..png",), "cannot be a file's name"),
    "the root": (("/a.png",), "cannot be a file's name"),
    "a name that is too long": (("a" * 201,), "cannot be a file's name"),
}


@pytest.mark.parametrize(("ids", "said"), NAMES.values(), ids=NAMES)
def test_ids_that_kohyas_scripts_would_not_find_are_refused(
    ids: tuple[str, ...], said: str, known: Callable[[str], Known], tmp_path: Path
) -> None:
    own = known("sd")
    encoders = Store.open(own.images.parent / "packed.store").manifest.encoders
    columns = [LatentColumn(channels=4, downscale=2, dtype="F32")]
    with StoreWriter(tmp_path / "s.store", encoders=encoders, columns=columns) as writer:
        for one in ids:
            height, width = own.samples[0].bucket_hw
            record = new_record(one, f"train/{height}x{width}")
            if one.startswith("unknown"):
                record = replace(record, original_size=(0, 0))
            writer.add_record(record, {"latent": own.samples[0].latent}, {})
    call("store", "export", tmp_path / "s.store", tmp_path / "out", "--format", "kohya").fails(said)
    assert not (tmp_path / "out").exists()


def test_a_store_that_was_imported_does_not_go_out_to_kohyas_form(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sdxl")
    run_import("kohya", kohya(tmp_path / "cache", own), tmp_path / "s.store", own).done()
    call("store", "export", tmp_path / "s.store", tmp_path / "out", "--format", "kohya").fails("was made by `ingest import`")
