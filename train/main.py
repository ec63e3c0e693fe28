"""`torchrun train/main.py`: the trainer's entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(args: Sequence[str] | None = None, prog: str = "train/main.py") -> None:
    """Parse the command line, train, print a summary; exit with 0, 1 (failure), 2 (usage), 130 or 143 (signal, on one rank)."""
    import contextlib
    import io
    import os
    import signal
    import sys
    import time
    from importlib import metadata

    from bucketline.command_line import guarded, run_one_of, torchrun_ranks
    from bucketline.errors import UsageError
    from bucketline.torch_setup import set_up_torch
    from bucketline.train.commands import COMMANDS, DESCRIPTION
    from bucketline.train.config import parse

    given_args = sys.argv[1:] if args is None else args

    def run() -> int:
        # other packages' commands are looked for only if the first word may be one
        commands = [] if not given_args or given_args[0].startswith("-") else [*COMMANDS, "version"]
        if given_args and given_args[0] in commands:
            sys.exit(run_one_of(prog, DESCRIPTION, COMMANDS, given_args))
        torchruns = torchrun_ranks()
        try:
            with contextlib.redirect_stdout(io.StringIO()) if torchruns["rank"] else contextlib.nullcontext():
                config = parse(given_args, prog, commands)
        except UsageError:
            if torchruns["rank"] == 0:
                raise
            time.sleep(5)  # torchrun ends all ranks as soon as one has failed: the first has to print its message before
            return 2
        set_up_torch(os.environ, metadata.version("torch"))
        from bucketline.loader.ranks import OtherRankFailedError
        from bucketline.train.parallel import TrainRanks
        from bucketline.train.run import train

        ranks = TrainRanks(rank=torchruns["rank"], world_size=torchruns["world_size"])
        try:
            summary = train(config, ranks)
        except OtherRankFailedError:  # the other rank has printed the reason
            return 1
        if ranks.is_main:
            print(summary)
        return 128 + signal.Signals[summary.stopped_by] if summary.stopped_by and "RANK" not in os.environ else 0

    if exit_code := guarded(run, "train"):
        sys.exit(exit_code)


if __name__ == "__main__":
    main()
