"""`mixture.json`: names the stores of a folder that are read together, each with its repeats.

`ingest pack` writes it for a data set file. The loader and the trainer take such a folder wherever they take a store.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import StoreError
from bucketline.files.atomic_write import write_or_explain
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from pathlib import Path

MIXTURE = "mixture.json"
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStore:
    """A store of the folder, and the number of times that a pass reads its rows."""

    name: str  # of its folder
    repeats: int

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name in (".", ".."):
            raise ValueError(f"name is {self.name!r}, expected the name of a folder next to {MIXTURE}")
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}, expected 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureFile:
    """The content of `mixture.json`."""

    version: int
    stores: tuple[MixedStore, ...]

    def __post_init__(self) -> None:
        if self.version != _VERSION:
            raise ValueError(f"version is {self.version}, expected {_VERSION}; a newer bucketline wrote it")


def write_mixture(folder: Path, stores: tuple[MixedStore, ...]) -> None:
    """Replace the folder's `mixture.json`."""
    text = json.dumps(encode(MixtureFile(version=_VERSION, stores=stores)), indent=1)
    write_or_explain(folder / MIXTURE, f"{text}\n".encode())


def read_mixture(folder: Path) -> tuple[MixedStore, ...] | None:
    """Return the stores that the folder's `mixture.json` names; None if it has none."""
    path = folder / MIXTURE
    try:
        stores = decode(MixtureFile, json.loads(path.read_bytes()), MIXTURE).stores
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged: {error}; run `ingest pack` with the data set file again") from error
    if not stores:
        raise StoreError(f"{path} names no store; run `ingest pack` with the data set file again")
    return stores
