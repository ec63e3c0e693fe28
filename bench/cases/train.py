"""Cost of the loader in a training run, and of saving in it."""

from __future__ import annotations

import itertools
import random
import shutil
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path  # noqa: TC003 - a command's annotations are read
from typing import TYPE_CHECKING, Any, Literal

from bucketline.bench.harness import Case, Mark, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bucketline.loader import Batch
    from bucketline.train.config import TrainConfig
    from bucketline.train.log import ProgressLine
    from bucketline.train.run import Run

RESAMPLES = 10_000


def _asked(folder: Path, model: str, rows: int, /, **more: Any) -> TrainConfig:  # noqa: ANN401 - of its fields
    """Return the configuration of a run of a benchmark's model on a store of its own."""
    import torch

    from bucketline.bench.fixtures.trained_model import kept_model, kept_store
    from bucketline.train.config import Precision, TrainConfig

    made = {} if "store" in more else {"store": (kept_store(folder, model, rows),), "model": kept_model(folder, model)}
    own: dict[str, Any] = {
        **made,
        "output_dir": folder / "train.run",
        "prefetch_bytes": 1 << 20,
        "precision": Precision.BF16 if torch.cuda.is_available() else Precision.FP32,
    }
    return TrainConfig(**{**own, **more})


def _trainer(asked: TrainConfig, progress: ProgressLine | None = None) -> Run:
    from bucketline.train.parallel import TrainRanks
    from bucketline.train.run import Run

    asked.output_dir.mkdir(parents=True, exist_ok=True)
    return Run(asked, TrainRanks(rank=0, world_size=1), progress=progress)


@dataclass(frozen=True, kw_only=True)
class Train(Case):
    """Train a randomly initialised model in alternating windows: loader batches, or the same shapes resident on the device.

    A pair of windows takes the same buckets in the same order, and pairs start with either kind in turn. Only two batches are
    filled ahead, so that a window cannot consume batches filled during the previous one. The interval is a bootstrap interval
    of the mean of the pairs' ratios. If the model has several buckets, windows of each single bucket follow.

    Example: python -m bucketline.bench train --model tiny --steps 4 --repeats 3 --json
    """

    model: Literal["tiny", "sdxl", "dit-xl-2"] = "tiny"
    """tiny: to test the benchmark on a CPU; sdxl: its UNet at 1024 px; dit-xl-2: at 256 px."""
    rows: int = 256
    """Rows per bucket."""
    batch_size: int | None = None
    """Images per batch. Default: 2 for tiny and sdxl, 64 for dit-xl-2."""
    steps: int = 24
    """Steps per window."""
    discard_s: float | None = None
    """Seconds of training before the first counted window. Default: 70 on a GPU, 0 on a CPU."""
    service: str = "none"
    """Loader service: none, auto, or the socket of a running one."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.trained_model import MODELS

        size = self.batch_size or MODELS[self.model].batch_size
        trainer = _trainer(
            _asked(folder, self.model, self.rows, batch_size=str(size), max_steps=1, learning_rate=1e-5, service=self.service)
        )
        try:
            return self._alternate(Windows(trainer, self.steps))
        finally:
            trainer.close()

    def _alternate(self, windows: Windows) -> list[Result]:
        from bucketline.train.log import graphs_compiled
        from bucketline.train.run import rare_collection

        on_gpu = windows.device.type == "cuda"
        discard_s = self.discard_s if self.discard_s is not None else 70.0 if on_gpu else 0.0
        with rare_collection():
            begin, before = time.monotonic(), graphs_compiled()
            for number in range(sys.maxsize):
                windows.pair(number)
                if time.monotonic() - begin >= discard_s:
                    break
            pairs = []
            for number in range(self.repeats):
                pairs.append(windows.pair(number))
                print(f"pair {number + 1} of {self.repeats}: {pairs[-1][0].rate / pairs[-1][1].rate:.4f}", file=sys.stderr)
            compiled = graphs_compiled() - before
            alone = {name: [windows.resident([name] * self.steps) for _ in range(3)] for name in windows.buckets}
        return results_of(self.model, pairs, compiled, alone if len(alone) > 1 else {}, windows.peak_flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One window's figures."""

    images: int
    seconds: float
    wait_s: float  # in the loader's `next()`
    flops: float

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / self.seconds


class Windows:
    """Trains windows of steps on the loader's batches or on resident ones."""

    def __init__(self, trainer: Run, steps: int) -> None:
        from bucketline.train.compile import example_batches, flops_of

        self._training, self._loader, self._steps = trainer.training, trainer.loader, steps
        self._batches, self._taken = trainer.loader.forever(), 0
        self.device = trainer.loader.device
        buckets = trainer.loader.rows.buckets("train")
        self._examples = example_batches(trainer.ranks, trainer.loader, buckets)
        counted = trainer.work
        self._flops = counted.flops or {name: flops_of(self._training, batch) for name, batch in self._examples.items()}
        self._images = counted.samples
        self.peak_flops = counted.peak_flops
        self.buckets = sorted(self._examples)

    def pair(self, number: int) -> tuple[Window, Window]:
        """Train (loader, resident) windows on the same buckets and return them; the order alternates between pairs."""
        buckets = [self._loader.plan.at(self._taken + step).bucket for step in range(self._steps)]
        if number % 2:
            resident = self.resident(buckets)
            return self.loaded(buckets), resident
        return self.loaded(buckets), self.resident(buckets)

    def loaded(self, buckets: Sequence[str]) -> Window:
        """Train on the loader's next batches."""
        waited = [0.0]

        def batches() -> Iterator[Batch]:
            while True:
                asked = time.perf_counter()
                batch = next(self._batches)
                waited[0] += time.perf_counter() - asked
                yield batch

        window = self._timed(buckets, batches(), self._taken)
        self._taken += len(buckets)
        return replace(window, wait_s=waited[0])

    def resident(self, buckets: Sequence[str]) -> Window:
        batches = (replace(self._examples[bucket], step=step, micro_step=0) for step, bucket in enumerate(buckets))
        return self._timed(buckets, batches, 0)

    def _timed(self, buckets: Sequence[str], batches: Iterator[Batch], first_step: int) -> Window:
        from bucketline.train.step import train_step

        self._wait()
        begin = time.perf_counter()
        for step in range(first_step, first_step + len(buckets)):
            train_step(self._training, batches, step)
        self._wait()
        return Window(
            images=sum(self._images[bucket] for bucket in buckets),
            seconds=time.perf_counter() - begin,
            wait_s=0.0,
            flops=sum(self._flops[bucket] for bucket in buckets),
        )

    def _wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def results_of(
    model: str,
    pairs: Sequence[tuple[Window, Window]],
    compiled: int,
    alone: dict[str, list[Window]],
    peak_flops: float | None,
) -> list[Result]:
    """Return the figures of (loader, resident) pairs of windows, and of windows of each single bucket."""
    case = f"train {model}"
    loaded, resident = ([pair[which] for pair in pairs] for which in (0, 1))
    ratios = [one.rate / other.rate for one, other in pairs]
    low, high = interval(ratios)
    speed = statistics.median(window.flops / window.seconds for window in loaded)

    def result(
        subject: str, unit: str, values: Sequence[float], ratio: float | None = None, mark: Mark | None = None
    ) -> Result:
        return Result.of(case, subject, unit, values, ratio=ratio, mark=mark)

    waits = [window.wait_s / window.seconds for window in loaded]
    results = [
        result("resident batches", "images/s", [window.rate for window in resident], 1.0),
        result("the loader's", "images/s", [window.rate for window in loaded], statistics.fmean(ratios), Mark(bound=0.99)),
        result("the pairs' mean ratio, 95 % from", "", [low]),
        result("the pairs' mean ratio, 95 % to", "", [high]),
        result("data wait", "of the time", waits, mark=Mark(bound=0.005, is_at_most=True)),
        result("compiled after the warm-up", "graphs", [compiled], mark=Mark(bound=0, is_at_most=True)),
        result("model FLOPs", "TFLOP/s", [speed / 1e12]),
    ]
    if peak_flops is not None:
        results.append(result("MFU", "", [speed / peak_flops]))
    if alone:
        speeds = [(own[0].flops, statistics.median(window.seconds for window in own)) for own in alone.values()]
        best, each = max(f / s for f, s in speeds), sum(f for f, _ in speeds) / sum(s for _, s in speeds)  # each equally often
        mixed = statistics.median(window.flops / window.seconds for window in resident)
        results.append(result("buckets alone ÷ the best one, a FLOP", "", [each / best]))
        results.append(result("mixed buckets ÷ the buckets alone, a FLOP", "", [mixed / each], mark=Mark(bound=0.97)))
    return results


def interval(values: Sequence[float], mean: Callable[[Sequence[float]], float] = statistics.fmean) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean: the middle 95 % of many draws with replacement.

    >>> interval([1.0, 1.0, 1.0])
    (1.0, 1.0)
    """
    draw = random.Random(0)  # noqa: S311 - a draw of figures, no secret
    means = sorted(mean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]


@dataclass(frozen=True, kw_only=True)
class TrainSaves(Case):
    """Train a randomly initialised model, save at every few steps, and compare the steps after a save with the others.

    A step with a save lasts from the end of the step before the save to the end of the step after it, and so has the whole time
    that the loop is stopped. Twice the median of the other steps means that saving takes as long as a step. A checkpoint
    that is still being written slows the steps after it, which are among the others. The first save is reported separately.

    Example: python -m bucketline.bench train --saves --save-every 6 --json
    """

    model: Literal["tiny", "dit-b-8", "sdxl", "dit-xl-2"] = "dit-b-8"
    """tiny: to test the benchmark; dit-b-8: 98 million weights, 1.6 GB of state; sdxl and dit-xl-2: for a GPU."""
    rows: int = 64
    """Rows per bucket."""
    batch_size: int = 8
    """Images per batch."""
    save_every: int = 24
    """Steps between checkpoints, enough for one to be written: a save waits for the one before it."""

    def measure(self, folder: Path) -> list[Result]:
        import torch

        from bucketline.train.log import ProgressLine
        from bucketline.train.parallel import StopRequest, TrainRanks

        class Ends(ProgressLine):
            """When each step ended."""

            def __init__(self) -> None:
                super().__init__(talks=False)
                self.ends: list[float] = []

            def step(self, steps_done: int) -> None:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                self.ends.append(time.perf_counter())
                print(f"step {steps_done} of {asked.max_steps}", file=sys.stderr)

        run = folder / "checkpoint-pause.run"
        shutil.rmtree(run, ignore_errors=True)
        saves = self.repeats + 1
        asked = _asked(
            folder,
            self.model,
            self.rows,
            output_dir=run,
            batch_size=str(self.batch_size),
            max_steps=self.save_every * (saves + 1),
            save_every=self.save_every,
            keep=1,
            num_images=0,
            log_every=1000,
        )
        times, stop = Ends(), StopRequest(TrainRanks(rank=0, world_size=1))
        trainer = _trainer(asked, times)
        try:
            trainer.train(stop)
        finally:
            stop.close()
            times.close()
            trainer.close()
            shutil.rmtree(run, ignore_errors=True)
        return results_of_saves(self.model, times.ends, self.save_every)


def results_of_saves(model: str, ends: Sequence[float], save_every: int) -> list[Result]:
    """Return the figures of a run whose steps ended at these times; it saved every `save_every` steps, and at the end."""
    took = [end - begin for begin, end in itertools.pairwise(ends)]  # took[n]: of the step after n + 1 steps
    saved = [seconds for number, seconds in enumerate(took, 1) if number % save_every == 0]
    steps = [seconds for number, seconds in enumerate(took, 1) if number % save_every]
    usual = statistics.median(steps)

    first, *later = saved
    case, mark = f"train, saves {model}", Mark(bound=2.0, is_at_most=True)
    return [
        Result.of(case, "a step", "s", steps, ratio=1.0),
        Result.of(case, "the first step with a save", "s", [first], ratio=first / usual),
        Result.of(case, "a step with a save", "s", later, ratio=statistics.median(later) / usual, mark=mark),
    ]
