"""`torchrun train/main.py`: the trainer's entry point, and the only part of it that reads the environment."""

from __future__ import annotations


def main() -> None:
    """Parse the command line, train, print what came of it; exit 0, 1 (failed) or 2 (asked for something senseless)."""
    import os
    import sys

    import tyro

    from bucketline.errors import BucketlineError, UsageError
    from bucketline.train.config import TrainConfig
    from bucketline.train.presets import expand

    try:
        settings = (tyro.conf.FlagCreatePairsOff, tyro.conf.EnumChoicesFromValues, tyro.conf.UseAppendAction)
        config = tyro.cli(TrainConfig, args=expand(sys.argv[1:]), prog="train/main.py", config=settings)
        from bucketline.train.ranks import OtherRankFailedError, Ranks
        from bucketline.train.run import train

        ranks = Ranks(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )
        try:
            summary = train(config, ranks)
        except OtherRankFailedError:  # that rank has said why
            sys.exit(1)
    except BucketlineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    if ranks.is_main:
        print(summary)


if __name__ == "__main__":
    main()
