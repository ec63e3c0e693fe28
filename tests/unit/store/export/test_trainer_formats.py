"""`store export` to other trainers' caches: read back as they read them, and imported again they are what they were."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.store import LatentColumn, RowColumn, Store, StoreWriter, new_record
from tests.commands import call
from tests.unit.ingest.importers.known import Form, Known, assert_as_packed, run_import
from tests.unit.ingest.importers.writers import FORMS


def export(known: Known, kind: str, output: Path, *options: Any) -> dict[str, Any]:
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
    export(own, "kohya", tmp_path / "out")
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


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_what_is_exported_to_mds_and_imported_again_is_the_same(
    known: Callable[[str], Known], family: str, tmp_path: Path
) -> None:
    own = known(family)
    export(own, "mds", tmp_path / "out", "--shard-size", "8KiB")
    assert len(list((tmp_path / "out" / "train").glob("*/*.mds"))) > 2
    run_import("mds", tmp_path / "out", tmp_path / "s.store", own).done()
    assert_as_packed(tmp_path / "s.store", own, FORMS["mds"])


def mds_samples(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return the columns of each sample by its key, read as the shards' own descriptions say."""
    found = {}
    for bucket in sorted((folder / "train").iterdir()):
        (shard,) = json.loads((bucket / "index.json").read_text(encoding="utf-8"))["shards"]
        data = (bucket / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"]
        (number,) = struct.unpack_from("<I", data)
        offsets = struct.unpack_from(f"<{number + 1}I", data, 4)
        described = json.loads(data[4 * (number + 2) : offsets[0]])
        assert described["column_names"] == sorted(described["column_names"]) == shard["column_names"]
        for begin, end in pairwise(offsets):
            sizes, names = described["column_sizes"], described["column_names"]
            at = begin + 4 * sizes.count(None)
            free = iter(struct.unpack_from(f"<{sizes.count(None)}I", data, begin))
            values = {}
            for name, size in zip(names, sizes, strict=True):
                length = next(free) if size is None else size
                values[name], at = data[at : at + length], at + length
            assert at == end
            found[values["key"].decode()] = values
    return found


def test_an_mds_shard_is_as_its_description_says(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    export(own, "mds", tmp_path / "out")
    found = mds_samples(tmp_path / "out")
    for sample in own.samples:
        values, (height, width) = found[sample.id], sample.bucket_hw
        latent = np.frombuffer(values[f"latents_{height}x{width}"], dtype="<f2").reshape(sample.latent.shape)
        np.testing.assert_allclose(latent, own.fed(sample.latent), rtol=2**-10, atol=1e-6)
        assert values["caption"].decode() == sample.caption
        assert np.frombuffer(values["caption_latents"], dtype="<f2").tolist() == sample.tokens.astype("<f2").ravel().tolist()


def test_a_store_of_another_model_is_refused_by_name(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("pixart_sigma")
    refused = call("store", "export", own.images.parent / "packed.store", tmp_path / "out", "--format", "kohya")
    assert refused.code == 1
    assert "text family 'pixart_sigma'; kohya's caches are written for sd, sdxl, sd3, flux" in refused.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["kohya", "mds"])
def test_columns_next_to_the_latents_are_left_out_by_name(kind: str, known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    sample = own.samples[0]
    encoders = Store.open(own.images.parent / "packed.store").manifest.encoders
    mask = RowColumn(role="mask", dtype="U8", shape=(3,))
    latents = [LatentColumn(channels=4, downscale=2, dtype="F32", name=name) for name in ("latent", "latent_flipped")]
    with StoreWriter(tmp_path / "s.store", encoders=encoders, columns=[*latents, mask]) as writer:
        values = {"target": sample.latent, "target/flipped": sample.latent, "mask": np.ones(3, "u1")}
        writer.add(sample.id, "train", values)
    asked = ("store", "export", tmp_path / "s.store", tmp_path / "out", "--format", kind)
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
    own = known("sd")
    export(own, "mds", tmp_path / "mds")
    run_import("mds", tmp_path / "mds", tmp_path / "s.store", own).done()
    call("store", "export", tmp_path / "s.store", tmp_path / "out", "--format", "kohya").fails("was made by `ingest import`")
