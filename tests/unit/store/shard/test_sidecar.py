"""Sidecars: opening reads a header, and a value is used only after its page has been compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.store.shard.sidecar import PAGE_BYTES, PagedFile, encode_paged

KIND = "bucketline.test/1"
LARGE = np.arange(3000, dtype="<u8") * 7
SMALL = np.arange(999 * 3, dtype="u1").reshape(999, 3)


def written(path: Path) -> Path:
    data = encode_paged([("large", "U64", LARGE), ("small", "U8", SMALL)], {"format": KIND, "groups": {"a": 1}})
    path.write_bytes(data)
    return path


def opened(path: Path) -> PagedFile:
    return PagedFile(path, path.stat().st_size, KIND)


def flip(path: Path, offset_from_end: int) -> None:
    data = bytearray(path.read_bytes())
    data[-offset_from_end] ^= 1
    path.write_bytes(data)


def body_bytes() -> int:
    return LARGE.nbytes + SMALL.nbytes


def test_what_was_written_is_read_entry_by_entry_and_in_ranges(tmp_path: Path) -> None:
    file = opened(written(tmp_path / "x"))
    assert file.metadata == {"format": KIND, "groups": {"a": 1}}
    at = np.array([2999, 0, 511, 512, 512, 1500])
    assert np.array_equal(file.take("large", at), LARGE[at])
    assert np.array_equal(file.take("small", at % 999), SMALL[at % 999])
    assert np.array_equal(file.slice("small", 900, 999), SMALL[900:])
    assert len(file.take("large", np.array([], dtype=np.int64))) == 0
    assert len(file.slice("large", 5, 5)) == 0


@pytest.mark.parametrize("page", range(-(-body_bytes() // PAGE_BYTES)))
def test_a_damaged_page_is_noticed_at_its_first_touch_and_no_other_page_is_blamed(tmp_path: Path, page: int) -> None:
    path = written(tmp_path / "x")
    flip(path, body_bytes() - page * PAGE_BYTES - 5)
    file = opened(path)
    for at in range(0, 3000, 50):
        touched = at * 8 // PAGE_BYTES
        if touched == page:
            with pytest.raises(CorruptError, match=rf"x: page {page} does not match its checksum; run `store verify`"):
                file.take("large", np.array([at]))
        else:
            assert file.take("large", np.array([at]))[0] == LARGE[at]


def test_an_entry_that_lies_across_two_pages_has_both_compared(tmp_path: Path) -> None:
    values = np.arange(4096, dtype="u1").repeat(3).reshape(4096, 3)  # entry 1365 spans bytes 4095 to 4097
    path = tmp_path / "x"
    path.write_bytes(encode_paged([("values", "U8", values)], {"format": KIND}))
    flip(path, values.nbytes - PAGE_BYTES - 9)
    with pytest.raises(CorruptError, match=r"page 1"):
        opened(path).take("values", np.array([1365]))


def test_a_damaged_page_checksum_is_noticed_too(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    flip(path, body_bytes() + 1)
    last = len(LARGE) - 1
    assert opened(path).take("large", np.array([0]))[0] == 0
    assert opened(path).take("large", np.array([last]))[0] == LARGE[last]
    with pytest.raises(CorruptError, match=r"does not match its checksum"):
        opened(path).slice("small", 0, 999)


def test_opening_compares_no_page(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    flip(path, 1)
    assert opened(path).metadata["groups"] == {"a": 1}


def test_a_length_other_than_the_manifests_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    with pytest.raises(CorruptError, match=r"has \d+ bytes, the manifest says 17"):
        PagedFile(path, 17, KIND)


def test_a_missing_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nothing is missing, the manifest lists it; restore it"):
        PagedFile(tmp_path / "nothing", 1, KIND)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x")
    with pytest.raises(CorruptError, match=r"is not a bucketline.index/1 file"):
        PagedFile(path, path.stat().st_size, "bucketline.index/1")


@pytest.mark.parametrize("content", [b"", b"x", b"\x02\0\0\0\0\0\0\0{}", bytes(1000)])
def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(CorruptError):
        opened(path)


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"lacks the tensor 'middle'"):
        opened(written(tmp_path / "x")).take("middle", np.array([0]))
