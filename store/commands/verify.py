"""`store verify`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bucketline.command_line import counted, one_line, print_json, refuse_below

NAMED = 5  # number of samples printed per damaged caption


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read the store once, verify every checksum and report each fault. Exit 1 if any is found.

    Example: store verify photos.store --threads 4
    """

    store: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="STORE")]
    """Path to the store."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Number of shards to read in parallel. Default: number of CPU cores."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        from bucketline.errors import CorruptError
        from bucketline.store.commands.progress import bar_of_bytes
        from bucketline.store.read.store import Store
        from bucketline.store.verify.verify import Fault, Verified, verify

        refuse_below(1, threads=self.threads)
        try:
            store = Store.open(self.store)
        except CorruptError as error:
            fault = Fault(error=str(error))
            result = Verified(blocks=0, rows=0, corrupt=(fault,))
        else:
            total = sum(shard.lmdb.num_bytes for shard in store.manifest.shards)
            with bar_of_bytes("verify", total) as on_bytes:
                result = verify(store, on_bytes, self.threads)
        if self.json:
            print_json(asdict(result))
        else:
            for fault in result.corrupt:
                fields = {name: value for name, value in asdict(fault).items() if name not in ("error", "samples")}
                named = {name: value for name, value in fields.items() if value is not None}
                place = ", ".join(f"{name} {one_line(str(value))}" for name, value in named.items())
                print(f"corrupt: {place or 'the store'}: {fault.error}{_listed(fault.samples)}")
            for stray in result.strays:
                print(f"not in the store: {one_line(stray.path)}: {stray.what}")
            read = f"{counted(result.blocks, 'block')} and {counted(result.rows, 'row')} read"
            print(f"{read}, {counted(len(result.corrupt), 'fault')}")
        return 1 if result.corrupt else 0


def _listed(samples: tuple[str, ...]) -> str:
    """Return the first sample ids as a suffix for the fault's message."""
    if not samples:
        return ""
    more = f" and {len(samples) - NAMED} more; --json names all" if len(samples) > NAMED else ""
    return f": {', '.join(map(one_line, samples[:NAMED]))}{more}"
