"""Plan batches without reading them, look at them, serve them to other processes, and tell what a run has seen."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bucketline.command_line import commands, run_one_of

if TYPE_CHECKING:
    from collections.abc import Sequence


COMMANDS = commands(
    "loader",
    {
        "plan": "bucketline.loader.commands.plan:PlanCommand",
        "peek": "bucketline.loader.commands.peek:Peek",
        "seen": "bucketline.loader.commands.seen:SeenCommand",
        "serve": "bucketline.loader.commands.serve:Serve",
    },
)


def main(args: Sequence[str] | None = None, prog: str = "loader") -> int:
    """Run the command `loader`."""
    return run_one_of(prog, __doc__ or "", COMMANDS, args)


if __name__ == "__main__":
    sys.exit(main())
