"""One flipped bit in a store's files is found, wherever it is. Many more, at random: the family `flips`."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.store import Store
from bucketline.store.verify.verify import verify
from tests.kit import flip_bit, make_store, rewrite_manifest, samples_of


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with several blocks, two shards and superseded rows."""
    path = tmp_path_factory.mktemp("flips") / "s"
    samples = samples_of({"train/64x64": 25, "train/8x8": 3, "val/64x64": 2})
    make_store(path, samples, samples[3:9])
    return path


def is_found(store: Path) -> bool:
    try:
        return bool(verify(Store.open(store), lambda _: None).corrupt)
    except CorruptError:
        return True


def files(store: Path) -> list[Path]:
    return sorted(path.relative_to(store) for path in store.rglob("*") if path.is_file() and path.stat().st_size)


def test_a_flip_that_only_changes_how_a_number_is_spelt_is_found(sound: Path, tmp_path: Path) -> None:
    """1e-05 and 1E-05 are one number: such a manifest has the right digest."""
    shutil.copytree(sound, tmp_path / "s")
    rewrite_manifest(tmp_path / "s", rules={"val_fraction": 1e-05})
    path = tmp_path / "s" / "manifest.json"
    flip_bit(path, 8 * path.read_bytes().index(b"1e-05") + 8 + 5)
    assert b"1E-05" in path.read_bytes()
    (fault,) = verify(Store.open(tmp_path / "s"), lambda _: None).corrupt
    assert "manifest.json differs in its bytes from what was written, though its content is the same" in fault.error


def test_every_file_of_a_shard_is_covered_to_its_last_byte(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "s")
    for name in files(sound):
        if name.parts[0] == "shards":
            for byte in (0, 9, (sound / name).stat().st_size // 2, (sound / name).stat().st_size - 1):
                flip_bit(tmp_path / "s" / name, 8 * byte + 3)
                assert is_found(tmp_path / "s"), f"byte {byte} of {name}"
                flip_bit(tmp_path / "s" / name, 8 * byte + 3)
    assert not is_found(tmp_path / "s")


@pytest.mark.parametrize("kind", ["extents", "index", "dropped-2"])
def test_a_sidecar_with_any_bit_of_its_head_flipped_is_refused_or_read_rightly(sound: Path, tmp_path: Path, kind: str) -> None:
    """Readers that are not verifying do not compare a sidecar's digest; what they use of it is checked all the same."""
    shutil.copytree(sound, tmp_path / "s")
    path = tmp_path / "s" / "shards" / f"g0.{kind}"
    expected = contents_of(sound)
    head = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    refused = 0
    bits = range(0, head * 8, head * 8 // 250 | 1)
    for bit in bits:
        flip_bit(path, bit)
        try:
            assert contents_of(tmp_path / "s") == expected, f"bit {bit} of {path.name}"
        except StoreError:
            refused += 1
        flip_bit(path, bit)
    assert refused > len(bits) // 4


def contents_of(path: Path) -> list[tuple[str, bytes]]:
    store = Store.open(path)
    found = []
    for bucket in store.buckets():
        rows = np.arange(bucket.num_rows)
        latents = bucket.read(rows, "latent")
        found += [(i, latent.tobytes()) for i, latent in zip(bucket.sample_ids(rows), latents, strict=True)]
    return found


@pytest.mark.parametrize("kind", ["extents", "index", "dropped-2"])
def test_verify_never_falls_over_a_damaged_sidecar(sound: Path, tmp_path: Path, kind: str) -> None:
    """With a damaged row as well, so that verify looks its sample up in the damaged sidecar."""
    shutil.copytree(sound, tmp_path / "s")
    store = Store.open(sound)
    bucket = store.bucket("train/64x64")
    located = bucket.locate(np.array([0]))
    flip_bit(tmp_path / "s" / "shards" / "g0.lmdb", 8 * int(located.offsets(bucket.spec, "latent")[0]))
    path = tmp_path / "s" / "shards" / f"g0.{kind}"
    head = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for bit in range(1, head * 8, head * 8 // 100 | 1):
        flip_bit(path, bit)
        assert is_found(tmp_path / "s")
        flip_bit(path, bit)
