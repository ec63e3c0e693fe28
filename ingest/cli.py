"""Pack images and captions into a store, check a source beforehand, and view what was stored."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bucketline.command_line import commands, run_one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = commands(
    "ingest",
    {
        "pack": "bucketline.ingest.commands.pack:Pack",
        "import": "bucketline.ingest.commands.import_cache:Import",
        "scan": "bucketline.ingest.commands.scan:Scan",
        "prompts": "bucketline.ingest.commands.prompts:Prompts",
        "peek": "bucketline.ingest.commands.peek:Peek",
    },
)


def main(args: Sequence[str] | None = None, prog: str = "ingest") -> int:
    """Run the command `ingest`."""
    return run_one_of(prog, __doc__ or "", COMMANDS, args)


if __name__ == "__main__":
    sys.exit(main())
