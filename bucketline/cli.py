"""The command `bucketline`: `ingest`, `store` and `loader` under one name, for those whose path already has a `store`."""

from __future__ import annotations

import importlib
import sys

from bucketline import __version__

_USAGE = """usage: bucketline {ingest,store,loader} …

  ingest   pack images and captions into a store
  store    look into a store, check it, take samples out of it
  loader   print what would be read, without reading it; read for all ranks of a machine

Training is `torchrun train/main.py`. `bucketline NAME --help` says more.
"""


def main() -> int:
    """Hand the arguments to the command that the first of them names."""
    name, rest = (sys.argv[1] if len(sys.argv) > 1 else ""), sys.argv[2:]
    if name in ("ingest", "store", "loader"):
        module = importlib.import_module(f"bucketline.{name}.cli")
        return int(module.main(rest, prog=f"bucketline {name}"))
    if name == "--version":
        print(__version__)
        return 0
    print(_USAGE, end="", file=sys.stdout if name in ("-h", "--help") else sys.stderr)
    return 0 if name in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
