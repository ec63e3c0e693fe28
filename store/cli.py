"""Inspect, verify, export and change a store, on a disk or in object storage."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bucketline.command_line import commands, run_one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = commands(
    "store",
    {
        "info": "bucketline.store.commands.look:Info",
        "report": "bucketline.store.commands.report:Report",
        "ls": "bucketline.store.commands.look:Ls",
        "verify": "bucketline.store.commands.look:Verify",
        "get": "bucketline.store.commands.look:Get",
        "export": "bucketline.store.commands.export:Export",
        "drop": "bucketline.store.commands.change:Drop",
        "compact": "bucketline.store.commands.change:Compact",
        "merge": "bucketline.store.commands.change:Merge",
        "repair": "bucketline.store.commands.change:Repair",
        "restore": "bucketline.store.commands.change:Restore",
        "cache": "bucketline.store.commands.change:Cache",
        "push": "bucketline.store.commands.change:Push",
        "pull": "bucketline.store.commands.change:Pull",
    },
)


def main(args: Sequence[str] | None = None, prog: str = "store") -> int:
    return run_one_of(prog, __doc__ or "", COMMANDS, args)


if __name__ == "__main__":
    sys.exit(main())
