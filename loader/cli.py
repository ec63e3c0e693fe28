"""Plan batches without reading them, look at them, and serve them to other processes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bucketline.command_line import run_one_of
from bucketline.loader.commands.peek import Peek
from bucketline.loader.commands.plan import PlanCommand
from bucketline.loader.commands.serve import Serve
from bucketline.loader.commands.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(args: Sequence[str] | None = None, prog: str = "loader") -> int:
    """Run the command `loader`."""
    return run_one_of(prog, __doc__ or "", {"plan": PlanCommand, "peek": Peek, "serve": Serve, "stats": Stats}, args)


if __name__ == "__main__":
    sys.exit(main())
