"""The places of a zip's members, if all are stored as they are: found in a fraction of the time that `zipfile` takes."""

from __future__ import annotations

import struct
import zipfile

_END, _ENTRY, _LOCAL = b"PK\x05\x06", b"PK\x01\x02", b"PK\x03\x04"
_END_BYTES, _ENTRY_BYTES, _LOCAL_BYTES = 22, 46, 30
_ENCRYPTED, _IN_ZIP64 = 1, 0xFFFFFFFF


def stored_members(data: bytes) -> dict[str, tuple[int, int, int]] | None:
    """Return offset, length and CRC-32 of each member of a zip; None if `zipfile` has to read it.

    Raises:
        ValueError: if a member is not where the zip's directory says.
    """
    end = len(data) - _END_BYTES
    if end < 0 or data[end : end + 4] != _END:
        return None  # it has a comment, or is damaged
    number, size, at = struct.unpack_from("<10xHII", data, end)
    if at + size > end:
        return None
    found: dict[str, tuple[int, int, int]] = {}
    for _ in range(number):
        if data[at : at + 4] != _ENTRY:
            raise ValueError(f"its directory has no entry at {at}")
        flags, method, crc, packed, length, name_bytes, extra_bytes, note_bytes, local = struct.unpack_from(
            "<8xHH4xIIIHHH8xI", data, at
        )
        if method != zipfile.ZIP_STORED or flags & _ENCRYPTED or packed != length or _IN_ZIP64 in (length, local):
            return None
        name = data[at + _ENTRY_BYTES : at + _ENTRY_BYTES + name_bytes].decode("utf-8")
        at += _ENTRY_BYTES + name_bytes + extra_bytes + note_bytes
        if data[local : local + 4] != _LOCAL:
            raise ValueError(f"{name:.80} is not at {local}")
        begin = local + _LOCAL_BYTES + sum(struct.unpack_from("<26xHH", data, local))
        if begin + length > end or name in found:
            raise ValueError(f"{name:.80} ends at {begin + length} of {end} bytes, or is there twice")
        found[name] = begin, length, crc
    return found
