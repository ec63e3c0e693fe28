"""The `bucketline` command: every command under one name, even if PATH has another `store`."""

from __future__ import annotations

import importlib
import sys

from bucketline import __version__
from bucketline.command_line import commands, guarded, run_one_of

_NAMES = ("ingest", "store", "loader", "train", "export-model", "completion")
_USAGE = """usage: bucketline {ingest,store,loader,train,export-model,completion} …

  ingest        pack images and captions into a store
  store         inspect, verify, export and change a store
  loader        plan and look at batches; serve them; tell what a run has seen
  train         train a model; train presets, train report
  export-model  write a run's weights as a file, a folder, or a whole pipeline
  completion    make a shell complete commands and options

Run `bucketline NAME --help` for the options of a command.
"""
COMMANDS = commands(
    "bucketline",
    {"export-model": "bucketline.train.commands.export_model:ExportModel", "completion": "bucketline.options:Completion"},
)


def main() -> int:
    """Dispatch the arguments to the subcommand named first."""
    return guarded(_run)


def _run() -> int:
    name, rest = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if name in ("ingest", "store", "loader"):
        module = importlib.import_module(f"bucketline.{name}.cli")
        return int(module.main(rest, prog=f"bucketline {name}"))
    if name == "train":
        from bucketline.train.main import main as train

        train(rest, prog="bucketline train")
        return 0
    if name in COMMANDS:
        return run_one_of("bucketline", "", COMMANDS, [name, *rest])
    if name in ("--version", "-h", "--help"):
        print(f"{__version__}\n" if name == "--version" else _USAGE, end="")
        return 0
    from bucketline.options import suggestion

    problem = f"there is no command {name!r}{suggestion(name, _NAMES)}" if name else "no command is given"
    print(f"error: {problem}\n\n{_USAGE}", end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
