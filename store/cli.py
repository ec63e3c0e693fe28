"""The command `store`: look into a store, check it, take samples out of it, change it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bucketline.commands import run_one_of
from bucketline.store.commands.compact import Compact
from bucketline.store.commands.drop import Drop
from bucketline.store.commands.export import Export
from bucketline.store.commands.get import Get
from bucketline.store.commands.info import Info
from bucketline.store.commands.ls import Ls
from bucketline.store.commands.merge import Merge
from bucketline.store.commands.verify import Verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.commands import Command

COMMANDS: dict[str, type[Command]] = {
    "info": Info,
    "ls": Ls,
    "verify": Verify,
    "get": Get,
    "export": Export,
    "drop": Drop,
    "compact": Compact,
    "merge": Merge,
}


def main(args: Sequence[str] | None = None, prog: str = "store") -> int:
    """Run the command `store`."""
    return run_one_of(prog, __doc__ or "", COMMANDS, args)


if __name__ == "__main__":
    sys.exit(main())
