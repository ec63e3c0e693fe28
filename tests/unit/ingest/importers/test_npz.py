"""npz files are read in place: what numpy writes, what else a zip may be, and what is damaged or hostile."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers.reading.npz import Npz

if TYPE_CHECKING:
    from collections.abc import Callable

ARRAYS: dict[str, Any] = {
    "latents": np.arange(24, dtype="f4").reshape(2, 3, 4),
    "half": np.arange(5, dtype="f2"),
    "columns": np.asfortranarray(np.arange(6, dtype="i8").reshape(2, 3)),
    "scalar": np.array(7),
    "flag": np.array(True),
    "swapped": np.arange(3, dtype=">i4"),
    "none": np.zeros((0, 4), dtype="u1"),
}


def written(save: Callable[..., None] = np.savez, **arrays: Any) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **arrays)
    return buffer.getvalue()


def with_comment(data: bytes) -> bytes:
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as file:
        file.comment = b"made by a trainer"
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [written(**ARRAYS), written(np.savez_compressed, **ARRAYS), with_comment(written(**ARRAYS))],
    ids=["stored", "compressed", "with a comment"],
)
def test_every_array_is_what_numpy_reads(data: bytes) -> None:
    found = Npz(data, "a.npz")
    assert set(found) == set(ARRAYS)
    for name, expected in ARRAYS.items():
        own = found[name]
        assert (own.dtype, own.shape) == (expected.dtype, expected.shape)
        assert own.flags.writeable
        np.testing.assert_array_equal(own, expected)
    with pytest.raises(KeyError):
        found["other"]


def test_pickles_fields_and_other_files_are_rejected() -> None:
    objects = np.empty(2, dtype=object)
    for array in (objects, np.zeros(2, dtype=[("a", "f4"), ("b", "i4")])):
        with pytest.raises(RejectedError, match="holds a pickle"):
            Npz(written(latents=array), "a.npz")["latents"]
    with pytest.raises(RejectedError, match="is not an npz file"):
        Npz(b"\x93NUMPY", "a.npz")


def test_each_cut_and_each_flipped_byte_is_rejected_or_changes_nothing() -> None:
    """The checksum covers values and headers; what it does not cover is either unused, or names, sizes and places."""
    data = written(latents=ARRAYS["latents"], size=np.array([3, 4]))
    for length in range(0, len(data), 7):
        with pytest.raises(RejectedError):
            _ = [Npz(data[:length], "a.npz")[name] for name in ("latents", "size")]
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x41
        try:
            found = Npz(bytes(changed), "a.npz")
            own = found["latents"]
        except (RejectedError, KeyError):
            continue
        np.testing.assert_array_equal(own, ARRAYS["latents"])


def test_a_directory_that_lies_about_places_is_rejected() -> None:
    data = bytearray(written(latents=ARRAYS["latents"]))
    entry = data.index(b"PK\x01\x02")
    for offset, value in ((42, 0x7FFFFFF0), (42, 9), (24, 0x7FFFFFF0), (16, 1 << 20)):
        changed = bytearray(data)
        struct.pack_into("<I", changed, entry + offset, value)
        with pytest.raises(RejectedError):
            Npz(bytes(changed), "a.npz")["latents"]
