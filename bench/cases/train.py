"""Cost of the loader in a training run: images/s with its batches ÷ images/s with batches resident on the device."""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from bucketline.bench.harness import Case, Mark, Result, quartiles, run_case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bucketline.loader import Batch
    from bucketline.train.trainer import Trainer

RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class Training(Case):
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
        import torch

        from bucketline.bench.fixtures.trained_model import MODELS, kept_model, kept_store
        from bucketline.train.config import Precision, TrainConfig
        from bucketline.train.outputs.checkpoint import Start
        from bucketline.train.parallel import TrainRanks
        from bucketline.train.setup import start_processes
        from bucketline.train.trainer import Trainer

        asked = TrainConfig(
            store=(kept_store(folder, self.model, self.rows),),
            model=kept_model(folder, self.model),
            output_dir=folder / "never-made",
            batch_size=self.batch_size or MODELS[self.model].batch_size,
            max_steps=1,
            learning_rate=1e-5,
            prefetch_bytes=1 << 20,
            service=self.service,
            precision=Precision.BF16 if torch.cuda.is_available() else Precision.FP32,
        )
        ranks = TrainRanks(rank=0, world_size=1)
        trainer = Trainer(asked, ranks, start_processes(asked), Start(checkpoint=None, state=None))
        try:
            return self._alternate(Windows(trainer, self.steps))
        finally:
            trainer.close()

    def _alternate(self, windows: Windows) -> list[Result]:
        from bucketline.train.compile import graphs_compiled
        from bucketline.train.trainer import rare_collection

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

    def __init__(self, trainer: Trainer, steps: int) -> None:
        from bucketline.train.compile import example_batches, flops_of_buckets
        from bucketline.train.data import open_loader

        self._training, self._loader, self._steps = trainer.training, trainer.loader, steps
        self._batches, self._taken = trainer.loader.forever(), 0
        self.device = trainer.loader.device
        in_process = replace(trainer.config, service="none")
        with open_loader(in_process, trainer.ranks, trainer.loader.shares, self.device) as one:
            self._examples = example_batches(one, trainer.loader.rows.buckets("train"))
        counted = trainer.scale
        self._flops = counted.flops or flops_of_buckets(trainer.training.bare_model, trainer.training.family, self._examples)
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
        """Train on batches that are resident on the device."""
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
    case = f"training {model}"
    loaded, resident = ([pair[which] for pair in pairs] for which in (0, 1))
    ratios = [one.rate / other.rate for one, other in pairs]
    low, high = interval(ratios)
    # FLOP/s of the loader's windows, with one bucket or several.
    speed = statistics.median(window.flops / window.seconds for window in loaded)

    def result(subject: str, unit: str, values: Sequence[float], ratio: float | None, mark: Mark | None = None) -> Result:
        median = statistics.median(values)
        return Result(
            case=case,
            subject=subject,
            unit=unit,
            median=median,
            q1=quartiles(values)[0],
            q3=quartiles(values)[1],
            repeats=len(values),
            limit_ratio=median if ratio is None else ratio,
            mark=mark,
        )

    waits = [window.wait_s / window.seconds for window in loaded]
    results = [
        result("resident batches", "images/s", [window.rate for window in resident], 1.0),
        result("the loader's", "images/s", [window.rate for window in loaded], statistics.fmean(ratios), Mark(bound=0.99)),
        result("the pairs' mean ratio, 95 % from", "", [low], None),
        result("the pairs' mean ratio, 95 % to", "", [high], None),
        result("data wait", "of the time", waits, None, Mark(bound=0.005, is_at_most=True)),
        result("compiled after the warm-up", "graphs", [compiled], None, Mark(bound=0, is_at_most=True)),
        result("model FLOPs", "TFLOP/s", [speed / 1e12], None),
    ]
    if peak_flops is not None:
        results.append(result("MFU", "", [speed / peak_flops], None))
    if alone:
        best = max(statistics.median(window.flops / window.seconds for window in own) for own in alone.values())
        mixed = statistics.median(window.flops / window.seconds for window in resident)
        results.append(result("mixed buckets ÷ the best one, a FLOP", "", [mixed / best], None, Mark(bound=0.97)))
    return results


def interval(values: Sequence[float], mean: Callable[[Sequence[float]], float] = statistics.fmean) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean: the middle 95 % of many draws with replacement.

    >>> interval([1.0, 1.0, 1.0])
    (1.0, 1.0)
    """
    draw = random.Random(0)  # noqa: S311 - a draw of figures, no secret
    means = sorted(mean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]


def main() -> int:
    """Run the case."""
    return run_case(Training)


if __name__ == "__main__":
    sys.exit(main())
