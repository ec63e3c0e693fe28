"""How long saving a checkpoint stops the training loop, next to the time of a step."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from bucketline.bench.harness import Case, Mark, Result, quartiles, run_case

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class CheckpointPause(Case):
    """Train a randomly initialised model, save at every few steps, and compare the steps after a save with the others.

    A step with a save lasts from the end of the step before the save to the end of the step after it, and so has the whole time
    that the loop is stopped. Twice the median of the other steps means that saving takes as long as a step. A checkpoint
    that is still being written slows the steps after it, which are among the others. The first save is reported separately.

    Example: python -m bucketline.bench train --saves --steps 24 --json
    """

    model: Literal["tiny", "dit-b-8", "sdxl", "dit-xl-2"] = "dit-b-8"
    """tiny: to test the benchmark; dit-b-8: 98 million weights, 1.6 GB of state; sdxl and dit-xl-2: for a GPU."""
    rows: int = 64
    """Rows per bucket."""
    batch_size: int = 8
    """Images per batch."""
    save_every: int = 6
    """Steps between checkpoints."""
    lora_rank: int | None = None
    """Train adapters of this rank. Default: the whole model."""

    def measure(self, folder: Path) -> list[Result]:
        import shutil

        import torch

        from bucketline.bench.fixtures.trained_model import kept_model, kept_store
        from bucketline.train.config import Precision, TrainConfig
        from bucketline.train.outputs.progress import ProgressLine
        from bucketline.train.outputs.run_dir import find_start, take
        from bucketline.train.parallel import StopRequest, TrainRanks
        from bucketline.train.setup import start_processes
        from bucketline.train.trainer import Trainer

        class Ends(ProgressLine):
            """When each step ended."""

            def __init__(self) -> None:
                super().__init__(max_steps=0, talks=False)
                self.ends: list[float] = []

            def step(self, steps_done: int) -> None:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                self.ends.append(time.perf_counter())
                print(f"step {steps_done} of {asked.max_steps}", file=sys.stderr)

        run = folder / "checkpoint-pause.run"
        shutil.rmtree(run, ignore_errors=True)
        saves = self.repeats + 1
        asked = TrainConfig(
            store=(kept_store(folder, self.model, self.rows),),
            model=kept_model(folder, self.model),
            output_dir=run,
            batch_size=self.batch_size,
            max_steps=self.save_every * (saves + 1),
            checkpoint_every=self.save_every,
            checkpoint_minutes=None,
            keep_checkpoints=1,
            num_images=0,
            log_every=1000,
            lora_rank=self.lora_rank,
            prefetch_bytes=1 << 20,
            precision=Precision.BF16 if torch.cuda.is_available() else Precision.FP32,
        )
        ranks = TrainRanks(rank=0, world_size=1)
        accelerator = start_processes(asked)
        start = find_start(asked)
        take(asked, start)
        times, stop = Ends(), StopRequest(ranks)
        trainer = Trainer(asked, ranks, accelerator, start, times)
        try:
            trainer.run(stop)
        finally:
            stop.close()
            times.close()
            trainer.close()
            shutil.rmtree(run, ignore_errors=True)
        return results_of(self.model, times.ends, self.save_every)


def results_of(model: str, ends: Sequence[float], save_every: int) -> list[Result]:
    """Return the figures of a run whose steps ended at these times; it saved every `save_every` steps, and at the end."""
    took = [end - begin for begin, end in itertools.pairwise(ends)]  # took[n]: of the step after n + 1 steps
    saved = [seconds for number, seconds in enumerate(took, 1) if number % save_every == 0]
    steps = [seconds for number, seconds in enumerate(took, 1) if number % save_every]
    usual = statistics.median(steps)

    def result(subject: str, values: Sequence[float], ratio: float, mark: Mark | None = None) -> Result:
        return Result(
            case=f"checkpoint pause {model}",
            subject=subject,
            unit="s",
            median=statistics.median(values),
            q1=quartiles(values)[0],
            q3=quartiles(values)[1],
            repeats=len(values),
            limit_ratio=ratio,
            mark=mark,
        )

    first, *later = saved
    return [
        result("a step", steps, 1.0),
        result("the first step with a save", [first], first / usual),
        result("a step with a save", later, statistics.median(later) / usual, Mark(bound=2.0, is_at_most=True)),
    ]


def main() -> int:
    """Run the case."""
    return run_case(CheckpointPause)


if __name__ == "__main__":
    sys.exit(main())
