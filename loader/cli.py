"""Plan batches without reading them, look at them, serve them to other processes, and tell what a run has seen."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bucketline.command_line import run_one_of
from bucketline.loader.commands.peek import Peek
from bucketline.loader.commands.plan import PlanCommand
from bucketline.loader.commands.seen import SeenCommand
from bucketline.loader.commands.serve import Serve
from bucketline.loader.commands.stats import Stats
from bucketline.loader.commands.top import Top

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(args: Sequence[str] | None = None, prog: str = "loader") -> int:
    """Run the command `loader`."""
    commands = {"plan": PlanCommand, "peek": Peek, "seen": SeenCommand, "serve": Serve, "stats": Stats, "top": Top}
    return run_one_of(prog, __doc__ or "", commands, args)


if __name__ == "__main__":
    sys.exit(main())
