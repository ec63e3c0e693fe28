"""`loader peek`: a contact sheet of what one step delivers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bucketline.command_line import counted, print_json
from bucketline.loader.commands.batch_options import BatchOptions
from bucketline.loader.config import Remainder
from bucketline.store.commands.place import shown


@dataclass(frozen=True, kw_only=True)
class Peek(BatchOptions):
    """Show what a step delivers, on one HTML page: latents without a VAE, and the captions that were chosen.

    The rows are read by a loader that begins at the step. With the options and the seed of a training run, the page shows
    exactly what that run's step has: its rows, captions, dropped captions and flips. A run may have chosen its
    window by its machines and caches: name its checkpoint with --state, or give the same --cache-bytes.

    Example: loader peek photos.store --step 1000 --batch 16 -o step.html
    """

    SECTION = "peek: what the page shows"
    FIRST = ("batch", "world_size", "seed", "split", "state", "caption_dropout", "flip", "json")

    stores: tyro.conf.Positional[tuple[str, ...]]
    """Folders or URLs of the stores, with repeats, as for `loader plan`."""
    step: int
    """Optimizer step, from 0."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="HTML")]
    """HTML file to write; a page of an earlier run is replaced."""
    world_size: int = 1
    """Number of training ranks; the page has the micro-batches of each."""
    split: str = "train"
    """Split to read: train or val."""
    remainder: Remainder = Remainder.CARRY
    """How to handle rows that do not fill a global batch: carry, drop or partial."""
    state: Annotated[Path | None, tyro.conf.arg(metavar="STATE")] = None
    """Checkpoint, folder of a run, or loader state as JSON: take the window from it, and the machines that it was made for."""
    caption_dropout: float = 0.0
    """Probability of replacing a caption with the empty one."""
    flip: float = 0.0
    """Probability of a horizontal flip; requires a store packed with --flip."""
    preview_factors: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """RGB factors that `ingest previews --save-factors` wrote, for a VAE that has no published ones."""
    store_option: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """KEY=VALUE for the client of object storage, such as region=eu-central-1; may be repeated. Secrets: by the environment."""
    json: bool = False
    """Print the ids and captions as one JSON object."""

    def __post_init__(self) -> None:
        BatchOptions.__post_init__(self)
        self._expect_at_least(0, "step")
        self._expect_at_least(1, "world_size")
        self._expect_share("caption_dropout", "flip")

    def run(self) -> int:
        from bucketline.files.atomic_write import write_or_explain
        from bucketline.loader.mixture import open_shares
        from bucketline.loader.peek import peek_page, read_step, with_choices
        from bucketline.loader.seen import read_loader_state
        from bucketline.pages.page import refuse_page
        from bucketline.store.report.latent_rgb import read_factors
        from bucketline.store.report.latents import vae_of

        refuse_page(self.output)
        factors = None if self.preview_factors is None else read_factors(self.preview_factors)
        config = self.for_loader()
        if self.state is not None:
            config = with_choices(config, read_loader_state(self.state))
        batches = read_step(self.stores, config, self.step, self.world_size)
        vae = dict(vae_of(open_shares(self.stores, self.remote())[0].store))
        write_or_explain(self.output, peek_page(self.stores, self.step, batches, vae, factors))
        rows = sum(len(batch.rows) for batch in batches)
        if self.json:
            print_json(
                {
                    "page": str(self.output),
                    "step": self.step,
                    "epoch": batches[0].epoch,
                    "bucket": batches[0].bucket,
                    "batches": [
                        {"rank": one.rank, "micro_step": one.micro_step, "rows": [asdict(row) for row in one.rows]}
                        for one in batches
                    ],
                }
            )
        else:
            print(f"{shown(self.output)}: step {self.step}, {batches[0].bucket}, {counted(rows, 'row')}")
        return 0
