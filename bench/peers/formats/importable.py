"""Import what peers' packages import although nothing here uses it."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

_DECLARED: list[object] = []  # an operator stays registered as long as its library is kept


def make_torchvision_importable() -> None:
    """Declare torchvision's operators if they cannot be loaded.

    In most registries they are linked to CUDA's libraries. With a CPU build of torch, the import of torchvision then fails
    when it describes some of them.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _DECLARED:
        return
    import torch

    folder = Path(spec.origin).parent
    try:
        for library in folder.glob("_C*.so"):
            ctypes.CDLL(str(library))
    except OSError:
        described = (folder / "_meta_registrations.py").read_text(encoding="utf-8")
        own = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in sorted(set(re.findall(r"torchvision::(\w+)", described))):
            own.define(f"{name}(Tensor first) -> Tensor")  # type: ignore[no-untyped-call]
        _DECLARED.append(own)
