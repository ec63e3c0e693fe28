"""Inspect, verify, export and change a store, on a disk or in object storage."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bucketline.command_line import run_one_of
from bucketline.store.commands.change.compact import Compact
from bucketline.store.commands.change.drop import Drop
from bucketline.store.commands.change.merge import Merge
from bucketline.store.commands.change.repair import Repair
from bucketline.store.commands.change.restore import Restore
from bucketline.store.commands.export import Export
from bucketline.store.commands.get import Get
from bucketline.store.commands.info import Info
from bucketline.store.commands.ls import Ls
from bucketline.store.commands.remote.cache import Cache
from bucketline.store.commands.remote.pull import Pull
from bucketline.store.commands.remote.push import Push
from bucketline.store.commands.report import Report
from bucketline.store.commands.verify import Verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.command_line import Command

COMMANDS: dict[str, type[Command]] = {
    "info": Info,
    "report": Report,
    "ls": Ls,
    "verify": Verify,
    "get": Get,
    "export": Export,
    "drop": Drop,
    "compact": Compact,
    "merge": Merge,
    "repair": Repair,
    "restore": Restore,
    "cache": Cache,
    "push": Push,
    "pull": Pull,
}


def main(args: Sequence[str] | None = None, prog: str = "store") -> int:
    """Parse the arguments and run a `store` subcommand."""
    return run_one_of(prog, __doc__ or "", COMMANDS, args)


if __name__ == "__main__":
    sys.exit(main())
