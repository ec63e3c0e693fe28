"""`store cache`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from bucketline.command_line import counted, default_cache, human_bytes, print_json
from bucketline.options import Arg, Positional
from bucketline.store.commands.place import shown

if TYPE_CHECKING:
    from bucketline.store.remote.cache.folder import CachedStore


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Show or clear the cache of stores in object storage: what it holds (info), or remove what no process has open (clear).

    Example: store cache info
    """

    action: Annotated[Positional[Literal["info", "clear"]], Arg(metavar="{info,clear}")]
    """info or clear."""
    cache: Path | None = None
    """Folder of the cache; None: BUCKETLINE_CACHE, or bucketline in the user's cache directory."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        from bucketline.store.remote.cache.folder import cache_folder, is_cache

        path = self.cache or default_cache()
        removed: list[CachedStore] = []
        kept: list[CachedStore] = []
        if is_cache(path):
            folder = cache_folder(path)
            if self.action == "clear":
                removed, kept = folder.clear()
            else:
                kept = list(folder.stores())
        if self.json:
            print_json({"cache": str(path), "stores": list(map(asdict, kept)), "removed": list(map(asdict, removed))})
            return 0
        for store in removed:
            print(f"removed {shown(store.url)} ({shown(store.folder)}): {human_bytes(store.num_bytes)}")
        for store in kept:
            use = "open" if store.is_open else "not open"
            pinned, ring = human_bytes(store.pinned_bytes), human_bytes(store.ring_bytes)
            about = f"{human_bytes(store.num_bytes)}, {pinned} pinned, {ring} in the ring, {use}"
            print(f"{shown(store.url)} ({shown(store.folder)}): {about}")
        print(f"{shown(path)}: {counted(len(kept), 'store')}, {human_bytes(sum(store.num_bytes for store in kept))}")
        return 0
