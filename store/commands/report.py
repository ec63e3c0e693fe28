"""`store report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bucketline.command_line import refuse_below
from bucketline.options import Arg, Positional
from bucketline.store.commands.look import ReadingArguments, StorePlace, show_each


@dataclass(frozen=True, kw_only=True)
class Report(ReadingArguments):
    """Write one HTML page about a store: what is in it and, at the top, what is wrong with it.

    The page needs no network: samples of each bucket with captions and search, sizes, crops, captions, rejects, latents against
    their VAE, near-duplicates, provenance and the plan of an epoch. Samples are drawn by hash, so that the page stays
    small. Latents are shown without a VAE, by published RGB factors if there are any; with --model they are decoded.

    Example: store report photos.store --source photos -o report.html
    """

    store: Positional[StorePlace]
    """Path or URL of the store, or the folder of a data set's stores: a page of each."""
    output: Annotated[Path, Arg(aliases=("-o",), metavar="HTML")] = Path("report.html")
    """HTML file to write; a page of an earlier run is replaced."""
    model: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Decode the shown latents with the VAE of this model, which the store was packed with. Needs the extra ingest."""
    model_config: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Folder or hub model with the configuration of a .safetensors --model, as for `ingest pack`."""
    device: Annotated[str, Arg(metavar="DEVICE", words=("auto", "cpu", "cuda"))] = "auto"
    """Device of the VAE: auto (CUDA if available), cpu, cuda or cuda:N."""
    source: Annotated[str | None, Arg(metavar="SOURCE")] = None
    """Source that the store was packed from: show rejects, and the crops that lose most, from it. Needs the extra ingest."""
    samples: int = 480
    """Samples in the gallery, over all buckets; at most 40 of each."""
    latents: int = 20_000
    """Latents to read for the checks, drawn by hash if the store has more."""
    batch_size: int = 16
    """Batch size of the plan."""
    json: bool = False
    """Print the findings as one JSON object."""

    def __post_init__(self) -> None:
        refuse_below(1, samples=self.samples, latents=self.latents, batch_size=self.batch_size)

    def run(self) -> int:
        return show_each(self)

    def look(self) -> tuple[dict[str, Any], int]:
        from bucketline.pages.page import page_report
        from bucketline.store.report.report import ReportOptions, write_report

        decoder = None
        if self.model is not None:
            decoder = {"model": self.model, "model_config": self.model_config, "device": self.device}
        options = ReportOptions(
            samples=self.samples,
            latents=self.latents,
            batch_size=self.batch_size,
            decoder=decoder,
            source=self.source,
        )
        found = write_report(self.open_store(self.store), self.output, options)
        return page_report(self.output, found), 0

    def show(self, found: dict[str, Any]) -> None:
        from bucketline.pages.page import print_page

        print_page(found)
