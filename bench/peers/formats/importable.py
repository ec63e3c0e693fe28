"""Import what peers' packages import although nothing here uses it, or leave it out."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

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


def without_init(*packages: str) -> None:
    """Let modules of these packages be imported without running the packages' `__init__`, which may import every model."""
    for name in packages:
        outer, _, own = name.rpartition(".")
        spec = None if outer else importlib.util.find_spec(name)
        found = spec.submodule_search_locations if spec is not None else None
        folders = list(found) if found else [f"{path}/{own}" for path in sys.modules[outer].__path__]
        module = ModuleType(name)
        module.__path__ = folders
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module


def left_out(module: str, *names: str) -> None:
    """Stand in for a module that is not needed, whose own needs are not installed; its names cannot be called."""
    own = ModuleType(module)
    own.__dict__.update(dict.fromkeys(names))
    sys.modules[module] = own
