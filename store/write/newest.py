"""Find a store's newest generation, which writers continue from, whatever `manifest.json` contains.

`generations/G.json` is written before `manifest.json` is replaced, so a crash between the two leaves an older `manifest.json`;
so does restoring one by hand. Continuing from it would treat the newer generations' shards as unlisted and restore samples
that were dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.files.regular_file import read_regular
from bucketline.store.folder import LocalFolder
from bucketline.store.format.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    generation_path,
    generations,
    read_manifest,
)
from bucketline.store.remote.generations import find_newest

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest


def newest_manifest(store: Path) -> Manifest | None:
    """Return the manifest of a store's newest generation; None if there is no store yet.

    If a crash left generations but no `manifest.json`, it is the newest intact one.
    """
    return find_newest(LocalFolder(store), lists=True)


def existing_manifest(store: Path) -> Manifest:
    """Return the manifest of a store's newest generation."""
    return newest_manifest(store) or read_manifest(store)  # which raises the precise error


def is_published(store: Path, manifest: Manifest) -> bool:
    """Return whether `manifest.json` is this manifest, by digest."""
    try:
        return manifest.digest.encode("ascii") in read_regular(store / MANIFEST, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return False


def listed_by_any(store: Path, names: Collection[str]) -> set[str]:
    """Return those of some shards' names that any existing generation lists, including damaged ones."""
    found: set[str] = set()
    for generation in generations(store) if names else ():
        try:
            data = read_regular(generation_path(store, generation), MAX_MANIFEST_BYTES)
        except OSError:
            continue  # just collected, or not a file: it lists nothing
        found |= {name for name in names if any(form % name.encode("ascii", "replace") in data for form in _NAMED)}
    return found


_NAMED = (b'"name": "%b"', b'"name":"%b"')
