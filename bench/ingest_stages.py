"""What packing a folder takes beside its stages alone: decoding, encoding, writing."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.bench.harness import Case, Mark, Result, Subject, alternate, run_case, summarise

if TYPE_CHECKING:
    from bucketline.bench.stages import Stages

MARK = Mark(bound=0.9)
DECODE, ENCODE, WRITE, WHOLE = "decode only", "encode only", "write only", "whole pack"
SHARED, SLOWER, ALL_THREE = "limit on shared cores", "the slower stage, limit with a GPU", "limit of all three"


@dataclass(frozen=True, kw_only=True)
class IngestStages(Case):
    """Measure packing a folder of real photographs beside its stages alone, in images/s.

    `decode only` reads and decodes every file; `encode only` gives the encoders the same batches of pixels and captions out of
    memory; `write only` puts encoded rows into a shard and seals it. Decoding and torch have as many threads each as this
    process has cores, alone as in the whole. So each stage alone has the whole machine, and what D and E images/s alone can be
    together on the same cores is 1/(1/D + 1/E): the limit on a CPU. Where the encoders run on a GPU the two can go on side by
    side, and the limit is the slower one, min(D, E). `limit of all three` counts the writing as well.

    `whole pack` goes from the listing to the published store, in this process: Python's start is not in it, and the time of
    loading the model, measured just before, is taken off. The model has real classes, random weights, and a size for which
    encoding costs about what decoding does. Limits are computed from each round's own stages.

    Example: python -m bucketline.bench.ingest_stages --images 1000 --json
    """

    images: int = 240
    """Pictures of the source."""
    sides_px: tuple[int, int] = (384, 1024)
    """Their sides, from, to."""
    grid: str = "area:160:32"
    """The buckets."""
    batch_size: int = 8
    """Pictures that are encoded together."""
    vae_widths: tuple[int, ...] = (8, 8, 16, 16)
    """Channels of the VAE's levels: what encoding costs."""

    def measure(self, folder: Path) -> list[Result]:
        import torch

        from bucketline.bench.photograph_folder import Pieces, kept_photographs
        from bucketline.bench.random_model import ModelShape, kept_model
        from bucketline.bench.stages import Stages

        source = kept_photographs(folder, Pieces(count=self.images, sides_px=self.sides_px))
        model = kept_model(folder, ModelShape(vae_widths=self.vae_widths))
        with tempfile.TemporaryDirectory(dir=folder, prefix="stores-") as stores:
            stages = Stages(source, model, Path(stores), grid=self.grid, batch_size=self.batch_size)
            return _measured(stages, self.repeats, has_gpu=torch.cuda.is_available())


def _measured(stages: Stages, repeats: int, *, has_gpu: bool) -> list[Result]:
    alone = [
        Subject(name=DECODE, measure=stages.decode_only),
        Subject(name=ENCODE, measure=stages.encode_only),
        Subject(name=WRITE, measure=stages.write_only),
    ]
    limit, other = (SLOWER, SHARED) if has_gpu else (SHARED, SLOWER)
    whole = Subject(name=WHOLE, measure=stages.whole, limit=limit, beside=(other, ALL_THREE), mark=MARK)
    figures = alternate([*alone, whole], repeats)
    rounds = list(zip(figures[DECODE], figures[ENCODE], figures[WRITE], strict=True))
    figures[SHARED] = [together(d, e) for d, e, _ in rounds]
    figures[SLOWER] = [min(d, e) for d, e, _ in rounds]
    figures[ALL_THREE] = [together(d, e, w) for d, e, w in rounds]
    limits = [Subject(name=name, measure=_computed) for name in (SHARED, SLOWER, ALL_THREE)]
    return summarise("ingest_stages", "images/s", [*alone, *limits, whole], figures)


def _computed(number: int) -> float:
    raise AssertionError(f"round {number}: a limit is computed from the stages' figures, never measured")


def together(*rates: float) -> float:
    """Give the rate of stages that share the same cores, each alone at its own rate.

    >>> together(300.0, 600.0)
    200.0
    """
    return 1 / sum(1 / rate for rate in rates)


def main() -> int:
    """Make the source and the model, measure, print."""
    return run_case(IngestStages)


if __name__ == "__main__":
    sys.exit(main())
