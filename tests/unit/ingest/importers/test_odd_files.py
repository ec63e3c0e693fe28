"""Files that no trainer writes: each is a reject by name, takes little memory, and the others are imported."""

from __future__ import annotations

import io
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.ingest.importers.known import Known, read_store, run_import
from tests.unit.ingest.importers.writers import kohya, kohya_latent, onetrainer, simpletuner


def squeezed_npz(arrays: dict[str, Any], method: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, array in arrays.items():
            held = io.BytesIO()
            np.save(held, array)
            archive.writestr(f"{name}.npy", held.getvalue())
    return buffer.getvalue()


def damaged_lzma(arrays: dict[str, Any]) -> bytes:
    """Return an npz whose LZMA streams end in something else: the damage is found while they are decompressed."""
    data = bytearray(squeezed_npz(arrays, zipfile.ZIP_LZMA))
    at = data.index(b".npy") + 4
    data[at + 12 : at + 60] = bytes(range(48))
    return bytes(data)


def saved(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


ODD_NPZ: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "latents of float128": lambda found: saved(**{**found, "latents": found["latents"].astype(np.longdouble)}),
    "latents of dates": lambda found: saved(**{**found, "latents": np.zeros(found["latents"].shape, "M8[s]")}),
    "damaged LZMA": damaged_lzma,
    "a size of text": lambda found: saved(**{**found, "original_size": np.array(["wide", "high"])}),
    "a size of a million numbers": lambda found: saved(**{**found, "original_size": np.ones(1 << 20)}),
    "complex latents": lambda found: saved(**{**found, "latents": found["latents"].astype("c8")}),
}


@pytest.mark.parametrize("how", ODD_NPZ)
def test_an_odd_npz_file_is_a_reject(how: str, known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sdxl")
    source = kohya(tmp_path / "cache", own)
    path = max(source.rglob("*_sdxl.npz"))
    with np.load(path) as found:
        path.write_bytes(ODD_NPZ[how](dict(found)))
    ran = run_import("kohya", source, tmp_path / "s.store", own, "--text", "none").done()
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 1)
    assert ran.json["rejects"][0]["reason"] == "unusable cache entry"
    assert len(read_store(tmp_path / "s.store")) == 5


def test_mirrored_latents_of_text_are_a_reject(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    for n, sample in enumerate(own.samples):
        mirrored = np.full(sample.latent.shape, "x") if n == 5 else sample.latent[:, :, ::-1].copy()
        kohya_latent(tmp_path / "cache", sample, "sd", sample.latent, latents_flipped=mirrored)
    ran = run_import("kohya", tmp_path / "cache", tmp_path / "s.store", own, "--text", "none").done()
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 1)
    assert "latents_flipped" in ran.json["rejects"][0]["detail"]


ODD_TORCH: dict[str, Callable[[torch.Tensor], Any]] = {
    "meta": lambda latent: latent.to("meta"),
    "sparse": lambda latent: latent.to_sparse(),
    "quantised": lambda latent: torch.quantize_per_tensor(latent, 0.1, 0, torch.qint8),
    "complex": lambda latent: latent.to(torch.complex64),
    "nested": lambda latent: torch.nested.as_nested_tensor(list(latent)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of prototypes and of what it will no longer quantise
@pytest.mark.parametrize("how", ODD_TORCH)
def test_an_odd_tensor_is_a_reject(how: str, known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sdxl")
    source = simpletuner(tmp_path / "cache", own, hashed=False)
    path = source / "cache" / "vae" / f"{own.samples[-1].stem}.pt"
    torch.save(ODD_TORCH[how](torch.load(path, weights_only=True)), path)
    ran = run_import("simpletuner", source, tmp_path / "s.store", own, "--text", "none").done()
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 1)
    assert ran.json["rejects"][0]["reason"] == "unusable cache entry"
    assert len(read_store(tmp_path / "s.store")) == 5


def test_a_small_file_of_gigabytes_by_its_strides_is_a_reject(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sd")
    source = onetrainer(tmp_path / "cache", own)
    path = max(source.glob("image/*/*/[0-9].pt"))
    found = torch.load(path, weights_only=True)
    found["latent_image"] = torch.ones(1, dtype=torch.float16).as_strided((4, 1 << 15, 1 << 14), (0, 0, 0))  # 8 GiB as float32
    torch.save(found, path)
    assert path.stat().st_size < 4096
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + (1 << 30), limits[1]))
    try:
        ran = run_import("onetrainer", source, tmp_path / "s.store", own)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert ran.code == 0, ran.err
    assert (ran.json["imported"], ran.json["rejected"]) == (5, 1)
    assert "has the shape [4, 32768, 16384], 4294967296 bytes, and its file" in ran.json["rejects"][0]["detail"]


def data_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))


def test_a_tensor_that_was_saved_as_a_parameter_is_imported(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sdxl")
    source = simpletuner(tmp_path / "cache", own, hashed=False)
    path = source / "cache" / "vae" / f"{own.samples[-1].stem}.pt"
    torch.save(torch.nn.Parameter(torch.load(path, weights_only=True)), path)
    ran = run_import("simpletuner", source, tmp_path / "s.store", own, "--text", "none").done()
    assert (ran.json["imported"], ran.json["rejected"]) == (6, 0)


def test_a_compressed_torch_file_that_claims_gigabytes_is_not_unpacked(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sdxl")
    source = simpletuner(tmp_path / "cache", own, hashed=False)
    path = source / "cache" / "vae" / f"{own.samples[-1].stem}.pt"
    torch.save(torch.zeros(4, 1 << 12, 1 << 12), tmp_path / "large.pt")
    with zipfile.ZipFile(tmp_path / "large.pt") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    ran = run_import("simpletuner", source, tmp_path / "s.store", own, "--text", "none").done()
    assert "has more bytes unpacked" in ran.json["rejects"][0]["detail"]


def test_one_odd_image_among_what_is_new_does_not_refuse_a_later_run(known: Callable[[str], Known], tmp_path: Path) -> None:
    own = known("sdxl")
    source, store = tmp_path / "cache", tmp_path / "s.store"
    for sample in own.samples[1:]:
        kohya_latent(source, sample, "sdxl", sample.latent)
    assert run_import("kohya", source, store, own, "--text", "none").json["imported"] == 5
    for factor, imported, reasons in ((0.25, 1, {}), (50, 0, {"wrongly scaled latent": 1})):
        kohya_latent(source, own.samples[0], "sdxl", own.samples[0].latent * np.float32(factor))
        ran = run_import("kohya", source, store, own, "--text", "none").done()
        assert (ran.json["imported"], ran.json["unchanged"], ran.json["rejected_by_reason"]) == (imported, 5, reasons)
