"""Plan batches without reading them, and serve them to other processes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bucketline.command_line import run_one_of
from bucketline.loader.commands.plan import PlanCommand
from bucketline.loader.commands.serve import Serve
from bucketline.loader.commands.stats import Stats
from bucketline.loader.commands.top import Top

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(args: Sequence[str] | None = None, prog: str = "loader") -> int:
    """Run the command `loader`."""
    return run_one_of(prog, __doc__ or "", {"plan": PlanCommand, "serve": Serve, "stats": Stats, "top": Top}, args)


if __name__ == "__main__":
    sys.exit(main())
