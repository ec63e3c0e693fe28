"""`store verify`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bucketline.commands import counted, one_line, print_json


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read everything once and name every fault. Exit 1 if there is any.

    Example: store verify photos.store --threads 4
    """

    store: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="STORE")]
    """The store's folder."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Shards that are read at the same time; as many as there are cores, unless given."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from bucketline.errors import CorruptError, UsageError
        from bucketline.store.commands.progress import bar_of_bytes
        from bucketline.store.reader import Store
        from bucketline.store.verify import Fault, Verified, verify

        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads is {self.threads}, expected 1 or more")
        try:
            store = Store.open(self.store)
        except CorruptError as error:
            fault = Fault(shard=None, bucket=None, block=None, row=None, sample=None, error=str(error))
            result = Verified(blocks=0, rows=0, corrupt=(fault,))
        else:
            total = sum(shard.lmdb.num_bytes for shard in store.manifest.shards)
            with bar_of_bytes("verify", total) as on_bytes:
                result = verify(store, on_bytes, self.threads)
        if self.json:
            print_json(asdict(result))
        else:
            for fault in result.corrupt:
                named = {name: value for name, value in asdict(fault).items() if name != "error" and value is not None}
                place = ", ".join(f"{name} {one_line(str(value))}" for name, value in named.items())
                print(f"corrupt: {place or 'the store'}: {fault.error}")
            for stray in result.strays:
                print(f"not in the store: {one_line(stray.path)}: {stray.what}")
            read = f"{counted(result.blocks, 'block')} and {counted(result.rows, 'row')} read"
            print(f"{read}, {counted(len(result.corrupt), 'fault')}")
        return 1 if result.corrupt else 0
