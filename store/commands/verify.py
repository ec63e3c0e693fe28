"""`store verify`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from bucketline.command_line import counted, one_line, printable, refuse_below
from bucketline.options import Arg, Positional
from bucketline.store.commands.place import ChangingArguments, StorePlace, show_each

if TYPE_CHECKING:
    from bucketline.store.folder import Folder
    from bucketline.store.verify.verify import Verified

_NAMED = 5  # number of samples printed per damaged caption


@dataclass(frozen=True, kw_only=True)
class Verify(ChangingArguments):
    """Read a store, verify every checksum, report each fault. Exit 1 if any is found.

    Of a store's URL, one shard at a time is kept in a temporary folder while it is read.

    Example: store verify photos.store --threads 4
    """

    store: Positional[StorePlace]
    """Path or URL of the store, or the folder of a data set's stores."""
    threads: Annotated[int | None, Arg(metavar="INT")] = None
    """Number of shards to read in parallel. Default: number of CPU cores."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        refuse_below(1, threads=self.threads)
        return show_each(self)

    def look(self) -> tuple[dict[str, Any], int]:
        from bucketline.errors import CorruptError
        from bucketline.store.verify.verify import Fault, Verified

        try:
            result = self._verified()
        except CorruptError as error:  # of the manifest
            result = Verified(blocks=0, rows=0, corrupt=(Fault(error=str(error)),))
        return asdict(result), 1 if result.corrupt else 0

    def _verified(self) -> Verified:
        from bucketline.store.commands.progress import bar_of_bytes
        from bucketline.store.read.store import Store
        from bucketline.store.remote.generations import newest_generation
        from bucketline.store.verify.verify import verify_folder

        if isinstance(self.store, str):
            folder: Folder = self.objects(self.store)
            manifest = newest_generation(folder)
        else:
            store = Store.open(self.store)
            folder, manifest = store.folder, store.manifest
        with bar_of_bytes("verify", sum(shard.data_bytes for shard in manifest.shards)) as on_bytes:
            return verify_folder(folder, on_bytes, self.threads, manifest)

    def show(self, found: dict[str, Any]) -> None:
        for fault in found["corrupt"]:
            named = {name: value for name, value in fault.items() if name not in ("error", "samples") and value is not None}
            place = ", ".join(f"{name} {one_line(str(value))}" for name, value in named.items())
            print(f"corrupt: {place or 'the store'}: {printable(fault['error'])}{_listed(fault['samples'])}")
        for stray in found["strays"]:
            print(f"not in the store: {one_line(stray['path'])}: {printable(stray['what'])}")
        read = f"{counted(found['blocks'], 'block')} and {counted(found['rows'], 'row')} read"
        print(f"{read}, {counted(len(found['corrupt']), 'fault')}")


def _listed(samples: tuple[str, ...]) -> str:
    """Return the first sample ids as a suffix for the fault's message."""
    if not samples:
        return ""
    more = f" and {len(samples) - _NAMED} more; --json names all" if len(samples) > _NAMED else ""
    return f": {', '.join(map(one_line, samples[:_NAMED]))}{more}"
