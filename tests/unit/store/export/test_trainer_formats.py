"""`store export` to other trainers' caches: read back as they read them, and imported again they are what they were."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.commands import call
from tests.unit.ingest.importers.known import assert_as_packed, make_known, run_import

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.ingest.importers.known import Known


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Known]:
    made: dict[str, Known] = {}

    def of(family: str) -> Known:
        if family not in made:
            made[family] = make_known(tmp_path_factory.mktemp(family), family)
        return made[family]

    return of


def export(known: Known, kind: str, output: Path, *options: Any) -> dict[str, Any]:
    """Export the packed store; the plan's numbers are those of what was written."""
    asked = ("store", "export", known.images.parent / "packed.store", output, "--format", kind, "--json", *options)
    planned = call(*asked, "--dry-run")
    ran = call(*asked)
    assert ran.code == 0, ran.err
    files = [path for path in output.rglob("*") if path.is_file()]
    assert (ran.json["files"], ran.json["bytes"]) == (len(files), sum(path.stat().st_size for path in files))
    assert {**planned.json, "dry_run": False} == ran.json
    return ran.json


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_kohyas_files_are_read_by_numpy_and_named_after_the_images(
    known: Callable[[str], Known], family: str, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_what_is_exported_to_kohyas_form_and_imported_again_is_the_same(
    known: Callable[[str], Known], family: str, tmp_path: Path
) -> None:
    own = known(family)
    export(own, "kohya", tmp_path / "out")
    ran = run_import("auto", tmp_path / "out", tmp_path / "s.store", own)
    assert ran.code == 0, ran.err
    assert ran.json["text"] == ("encode" if family == "sd" else "source")
    assert_as_packed(tmp_path / "s.store", own, has_text=True, ids={sample.id: sample.stem for sample in own.samples})


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_what_is_exported_to_mds_and_imported_again_is_the_same(
    known: Callable[[str], Known], family: str, tmp_path: Path
) -> None:
    own = known(family)
    export(own, "mds", tmp_path / "out", "--shard-size", "8KiB")
    assert len(list((tmp_path / "out" / "train").glob("*/*.mds"))) > 2
    ran = run_import("auto", tmp_path / "out", tmp_path / "s.store", own)
    assert ran.code == 0, ran.err
    assert_as_packed(tmp_path / "s.store", own, has_text=True, is_half=True)


def test_an_mds_shard_is_as_its_description_says(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    export(own, "mds", tmp_path / "out")
    found = {}
    for folder in sorted((tmp_path / "out" / "train").iterdir()):
        (shard,) = json.loads((folder / "index.json").read_text(encoding="utf-8"))["shards"]
        data = (folder / shard["raw_data"]["basename"]).read_bytes()
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
