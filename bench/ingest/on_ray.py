"""Two Ray workers compared with two ranks under torchrun, packing the same photographs."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise
from bucketline.errors import BucketlineError

if TYPE_CHECKING:
    from pathlib import Path

MARK = Mark(bound=0.95)
RANKS, WORKERS = "2 ranks under torchrun", "2 Ray workers"
FEW = 16


@dataclass(frozen=True, kw_only=True)
class IngestOnRay(Case):
    """Measure packing by two Ray workers against two ranks, in images/s.

    Both pack a folder of real photographs into a new store on this machine. The time is that of the summary, from the listing
    to the published store. A pack of 16 of the images, just before, is subtracted: starting workers and loading the model costs
    the same for any number. Processes have a thread each for torch and for decoding. The model has real classes and random
    weights, as in `ingest_stages`.

    Example: python -m bucketline.bench.ingest.on_ray --images 240 --json
    """

    images: int = 960
    """Images of the source."""
    sides_px: tuple[int, int] = (384, 1024)
    """Minimum and maximum side in px."""
    grid: str = "area:160:32"
    """Bucket grid."""
    vae_widths: tuple[int, ...] = (8, 8, 16, 16)
    """Channels of the VAE's levels; they set the cost of encoding."""

    def measure(self, folder: Path) -> list[Result]:
        from bucketline.bench.fixtures.photographs import Pieces, kept_photographs
        from bucketline.bench.fixtures.random_model import ModelShape, kept_model

        few, many = (kept_photographs(folder, Pieces(count=count, sides_px=self.sides_px)) for count in (FEW, self.images))
        model = kept_model(folder, ModelShape(vae_widths=self.vae_widths))
        options = ["--model", str(model), "--grid", self.grid, "--decode-threads", "1", "--json"]
        ranks = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

        def rate_of(launcher: list[str], more: list[str]) -> float:
            seconds = []
            for source, count in ((few, FEW), (many, self.images)):
                with tempfile.TemporaryDirectory(dir=folder, prefix="stores-") as stores:
                    command = [*launcher, "-m", "bucketline.ingest", "pack", str(source), f"{stores}/s", *options, *more]
                    seconds.append(_seconds_of(command, count))
            return (self.images - FEW) / (seconds[1] - seconds[0])

        subjects = [
            Subject(name=RANKS, measure=lambda _: rate_of(ranks, [])),
            Subject(
                name=WORKERS,
                measure=lambda _: rate_of([sys.executable, "-P"], ["--engine", "ray", "--workers", "2"]),
                limit=RANKS,
                mark=MARK,
            ),
        ]
        return summarise("ingest_on_ray", "images/s", subjects, alternate(subjects, self.repeats, warm_up=False))


def _seconds_of(command: list[str], num_images: int) -> float:
    """Run a pack; return the seconds of its summary.

    Raises:
        BucketlineError: if it does not pack every image.
    """
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # otherwise Ray keeps one in the home
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, **token, "OMP_NUM_THREADS": "1"}
    )
    summary = json.loads(done.stdout) if done.returncode == 0 else {}
    if summary.get("packed") != num_images:
        raise BucketlineError(f"{' '.join(command)} did not pack {num_images} images: {done.stderr[-2000:]}")
    return float(summary["seconds"])


def main() -> int:
    """Make the source and the model, measure and print."""
    return run_case(IngestOnRay)


if __name__ == "__main__":
    sys.exit(main())
