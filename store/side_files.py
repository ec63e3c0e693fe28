"""Files next to a store's shards that no generation lists, such as prompts: whoever writes them says how they go with a store.

Plans and checkpoints do not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from bucketline.extensions import Extensions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bucketline.store.folder import Folder
    from bucketline.store.format.manifest import Manifest

Place: TypeAlias = "Path | Folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFiles:
    """A kind of such files."""

    copy: Callable[[Place, Place, Manifest], int]  # from a store to another place that has it, and return the bytes
    merge: Callable[[list[tuple[Place, Manifest]], Path], None]  # of several stores, into the store that is made of them
    check: Callable[[Place, Manifest], Iterator[tuple[str, str | None]]]  # each file's name, and the fault and remedy if any


SIDE_FILES: Extensions[SideFiles] = Extensions(
    "files next to shards called",
    "bucketline.side_files",
    {"prompts": "bucketline.store.prompts.prompt_sets:PROMPT_SETS"},
    lambda found: isinstance(found, SideFiles),
)


def copy_side_files(source: Place, target: Place, manifest: Manifest) -> None:
    """Copy the files of every kind that the target does not have in the same form. `manifest`: of the source.

    Raises:
        CorruptError: if one is damaged; those before it are there.
        StoreError: if one cannot be read or written.
    """
    for kind in SIDE_FILES.values():
        kind.copy(source, target, manifest)
