"""Digests of what files and arrays hold, whatever the files are called."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import deserialize

SHOWN = 24  # characters


def of_bytes(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:SHOWN]


def of_safetensors(folder: Path) -> str:
    parts = list[bytes]()
    for path in sorted(folder.rglob("*.safetensors")):
        tensors = sorted(deserialize(path.read_bytes()), key=lambda one: one[0])  # type: ignore[no-untyped-call]
        parts.append(str(path.relative_to(folder)).encode())
        for name, tensor in tensors:
            parts += [name.encode(), f"{tensor['dtype']} {tensor['shape']}".encode(), bytes(tensor["data"])]
    return f"{(len(parts)) // 3} tensors {of_bytes(*parts)}"
