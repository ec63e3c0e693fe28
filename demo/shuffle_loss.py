"""The loss of a short training run by order: all rows shuffled, a few at a time, or not at all."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Result, Subject, alternate, run_case, summarise
from bucketline.errors import BucketlineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

LAST = 0.25  # of the steps, whose losses are averaged


@dataclass(frozen=True, kw_only=True)
class ShuffleLoss(Case):
    """Train the demo's model by each order, with a new seed per round, and compare the losses at the end.

    The photographs are packed folder by folder, so that each shard has one subject, the hardest case for an order that reads
    shards from front to back. A window of 0 shows what no shuffling at all does to the same run. The seed also draws the
    weights, noise and captions, the same for each order. Figures are the mean training loss of the last quarter, and the last
    validation loss.

    Example: python demo/shuffle_loss.py --demo build/demo --repeats 3
    """

    demo: Path = Path("build/demo")
    """The folder of `make demo`: its photographs and its model are used."""
    steps: int = 200
    """Steps of a run."""
    batch_size: int = 16
    """Images per batch."""
    windows: tuple[str, ...] = ("all", "16", "0")
    """Windows to compare; the first one is the limit of the others. 4096 would be all of the demo's rows."""

    def measure(self, folder: Path) -> list[Result]:
        if not (self.demo / "photos").is_dir():
            raise UsageError(f"{self.demo} has no folder of photographs; run `make demo`, or name its folder with --demo")
        runs = Runs(case=self, folder=folder, store=self._packed(folder))
        results = []
        for figure in ("train_loss", "val_loss"):
            subjects = [
                Subject(
                    name=f"window {order}",
                    measure=partial(runs.figure, figure, order),
                    limit=None if order == self.windows[0] else f"window {self.windows[0]}",
                )
                for order in self.windows
            ]
            results += summarise(f"shuffle_loss, {figure}", "", subjects, alternate(subjects, self.repeats, warm_up=False))
        return results

    @property
    def model(self) -> Path:
        return self.demo / "model"

    def _packed(self, folder: Path) -> Path:
        """Pack the folders one after the other, so that each has a shard of its own."""
        store, source = folder / "by-subject.store", folder / "by-subject"
        if store.exists():
            return store
        source.mkdir(parents=True, exist_ok=True)
        for subject in sorted(path for path in (self.demo / "photos").iterdir() if path.is_dir()):
            shutil.copytree(subject, source / subject.name, dirs_exist_ok=True)
            _run("ingest", "pack", source, store, "--model", self.model, "--val-fraction", "0.2:folder")
        return store


@dataclass(slots=True, kw_only=True)
class Runs:
    """Training runs; one of each order and round has all of their figures."""

    case: ShuffleLoss
    folder: Path
    store: Path
    _found: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)

    def figure(self, name: str, order: str, number: int) -> float:
        """Return a figure of the run of an order and a round."""
        if (order, number) not in self._found:
            self._found[order, number] = self._train(order, number)
        return self._found[order, number][name]

    def _train(self, order: str, seed: int) -> dict[str, float]:
        case, out = self.case, self.folder / f"run-{order}-{seed}"
        shutil.rmtree(out, ignore_errors=True)
        window = () if order == "all" else ("--window", order)
        given = ("--store", self.store, "--model", case.model, "--output-dir", out, "--seed", seed, *window)
        sizes = ("--batch-size", case.batch_size, "--max-steps", case.steps, "--validate-every", case.steps)
        rates = ("--learning-rate", 1e-3, "--warmup-steps", 20, "--ema", 0.995, "--caption-dropout", 0.1)
        _run("train", *given, *sizes, *rates, "--log-every", max(1, case.steps // 20), "--save-every", case.steps)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        found = {
            "train_loss": statistics.mean(losses[-max(1, int(LAST * len(losses))) :]),
            "val_loss": next(line["val_loss"] for line in reversed(lines) if "val_loss" in line),
        }
        print(f"window {order}, seed {seed}: {found}", file=sys.stderr, flush=True)
        return found


def _run(command: str, *arguments: object) -> None:
    whole: Sequence[str] = [sys.executable, "-P", "-m", f"bucketline.{command}", *map(str, arguments)]
    done = subprocess.run(whole, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BucketlineError(f"`{command} {' '.join(map(str, arguments))}` ended with {done.returncode}: {reason}")


def main() -> int:
    """Train and print."""
    return run_case(ShuffleLoss)


if __name__ == "__main__":
    sys.exit(main())
