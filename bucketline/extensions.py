"""Parts that are found by name, ours and those of other packages; and the extra that installs a missing library.

A package declares its own as entry points, such as an importer:

    [project.entry-points."bucketline.importers"]
    mine = "my_package.cache:IMPORTER"
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from bucketline.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


T = TypeVar("T")


class Extensions(Mapping[str, T]):
    """Parts of one kind by name, ours first. Each is imported on first use."""

    def __init__(self, what: str, group: str, ours: Mapping[str, str], is_one: Callable[[object], bool]) -> None:
        """Import nothing yet.

        `what` they are called in messages, `group` is the entry points'. `ours`: `MODULE:NAME` by name. `is_one` returns True
        of an object that can be used as one.
        """
        self._what, self._group, self._ours, self._is_one = what, group, ours, is_one

    def __iter__(self) -> Iterator[str]:
        return iter([*self._ours, *sorted({one.name for one in _declared(self._group)} - self._ours.keys())])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> T:
        """Return the part of a name."""
        found = [one for one in _declared(self._group) if one.name == name]
        owners = [*(["bucketline"] if name in self._ours else []), *map(_package, found)]
        if len(owners) > 1:
            raise UsageError(
                f"{' and '.join(owners)} all have {self._what} {name!r}, expected one; uninstall all packages but one of them"
            )
        if (ours := self.own(name)) is not None:
            return ours
        if not found:
            raise KeyError(name)
        try:
            part: T = found[0].load()
        except Exception as error:
            raise UsageError(
                f"{self._what} {name!r} of {owners[0]} cannot be imported ({type(error).__name__}: {error!s:.200}); install "
                "what that package needs, update it, or uninstall it"
            ) from error
        if not self._is_one(part):
            raise UsageError(
                f"{self._what} {name!r} of {owners[0]} is a {type(part).__name__}, which cannot be one; update or uninstall "
                "that package"
            )
        return part

    def own(self, name: str) -> T | None:
        """Return our part of a name, None if there is none; whether another package has one too is not looked for."""
        return imported(self._ours[name]) if name in self._ours else None


def imported(place: str) -> Any:  # noqa: ANN401 - any function or class
    """Return what `MODULE:NAME` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


@cache
def _declared(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of other packages, looked for once."""
    from importlib.metadata import entry_points  # takes 40 ms

    return tuple(entry_points(group=group))


def _package(point: EntryPoint) -> str:
    return "another package" if point.dist is None else f"{point.dist.name} {point.dist.version}"


# ---------------------------------------------------------------------------------------------------------------------- extras
# Map a missing library to the extra that installs it.

# Import names of the libraries of each extra in pyproject.toml; tests/packaging/test_wheel.py compares the two.
EXTRAS = {
    "loader": ("torch", "prometheus_client"),
    "ingest": ("torch", "diffusers", "accelerate", "transformers", "huggingface_hub", "PIL", "safetensors", "webdataset"),
    "train": ("torch", "diffusers", "accelerate", "peft", "safetensors", "huggingface_hub", "matplotlib", "PIL"),
    "optimizers": ("torchao", "prodigyopt"),
    "tables": ("pyarrow",),
    "datasets": ("datasets",),
    "report": ("jinja2", "PIL"),
    "tensorboard": ("tensorboard",),
    "quantised": ("torchao",),
    "ray": ("ray",),
    "heif": ("pillow_heif", "pillow_jxl"),
}


@contextmanager
def extra_named(command: str) -> Iterator[None]:
    """Turn a failed import into an error that names the extra: the command's own, or else the smallest that has the library."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        having = [extra for extra, libraries in EXTRAS.items() if library in libraries]
        if not having:
            raise
        extra = command if command in having else min(having, key=lambda one: len(EXTRAS[one]))
        raise MissingExtraError(
            f"{command} needs {library}, which is not installed. Install the extra {extra}: pip install 'bucketline[{extra}]'"
        ) from error
