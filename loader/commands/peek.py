"""`loader peek`: a contact sheet of what one step delivers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bucketline.command_line import counted, one_line, print_json
from bucketline.loader.commands.batch_options import PlannedOptions
from bucketline.options import Arg


@dataclass(frozen=True, kw_only=True)
class Peek(PlannedOptions):
    """Show what a step delivers, on one HTML page: latents without a VAE, and the captions that were chosen.

    The rows are read by a loader that begins at the step. With --run, the page shows exactly what that run's step had, or will
    have: its rows, captions, dropped captions and flips.

    Example: loader peek photos.store --step 1000 --batch-size 16 -o step.html
    """

    SECTION = "peek: what the page shows"
    FIRST = ("of_run", "batch_size", "world_size", "seed", "split", "caption_dropout", "flip", "json")

    step: int
    """Optimizer step, from 0."""
    output: Annotated[Path, Arg(aliases=("-o",), metavar="HTML")]
    """HTML file to write; a page of an earlier run is replaced."""
    caption_dropout: float = 0.0
    """Probability of replacing a caption with the empty one."""
    flip: float = 0.0
    """Probability of a horizontal flip; requires a store packed with --flip."""
    json: bool = False
    """Print the ids and captions as one JSON object."""

    def __post_init__(self) -> None:
        PlannedOptions.__post_init__(self)
        self._expect_at_least(0, "step")
        self._expect_share("caption_dropout", "flip")

    def run(self) -> int:
        from bucketline.files.atomic_write import write_or_explain
        from bucketline.pages.page import refuse_page
        from bucketline.store.report.facts import vae_of

        refuse_page(self.output)
        stores, config, world_size, number = self.planned(self.step)
        from bucketline.loader.peek import peek_page, read_step

        batches = read_step(stores, config, number, world_size)
        names = self.stores or tuple(str(weighted.store.place) for weighted in stores)
        write_or_explain(self.output, peek_page(names, self.step, batches, dict(vae_of(stores[0].store))))
        _, first, _ = batches[0]
        if self.json:
            print_json(
                {
                    "page": str(self.output),
                    "step": self.step,
                    "epoch": first.epoch,
                    "bucket": first.bucket,
                    "batches": [{"rank": rank, "micro_step": batch.micro_step, "rows": rows} for rank, batch, rows in batches],
                }
            )
        else:
            num_rows = sum(len(rows) for _, _, rows in batches)
            print(f"{one_line(str(self.output))}: step {self.step}, {first.bucket}, {counted(num_rows, 'row')}")
        return 0
