"""`ingest previews`: show latents without a VAE next to decoded ones, and fit factors for a VAE that has none."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from bucketline.command_line import counted, print_json, refuse_below
from bucketline.options import Arg, Positional
from bucketline.store.commands.place import ReadingArguments, StorePlace, shown


@dataclass(frozen=True, kw_only=True)
class PreviewsCommand(ReadingArguments):
    """Compare quick previews of latents with decoded ones: linear RGB factors next to the VAE, on one HTML page.

    Factors are published for the VAEs of Stable Diffusion 1 to 3, SDXL and Flux. For any other VAE, factors are fitted by least
    squares to half of the samples; the page shows the other half. `store report --preview-factors` takes the saved factors.

    Example: ingest previews photos.store --model stable-diffusion-v1-5 -o previews.html --save-factors factors.json
    """

    store: Positional[StorePlace]
    """Folder or URL of the store."""
    model: Annotated[str, Arg(metavar="MODEL")]
    """Model that the store was packed with, as for `ingest pack`; only vae/ is used."""
    model_config: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Folder or hub model with the configuration of a .safetensors --model, as for `ingest pack`."""
    output: Annotated[Path, Arg(aliases=("-o",), metavar="HTML")]
    """HTML file to write; a page of an earlier run is replaced."""
    save_factors: Annotated[Path | None, Arg(metavar="FILE")] = None
    """JSON file to write the fitted factors to; must not exist yet."""
    samples: int = 48
    """Samples to decode, drawn by hash."""
    device: Annotated[str, Arg(metavar="DEVICE")] = "auto"
    """Device of the VAE: auto (CUDA if available), cpu, cuda or cuda:N."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        refuse_below(1, samples=self.samples)
        from bucketline.ingest.encoders.model_folder import open_model
        from bucketline.ingest.pipeline.model.device import chosen_device, refuse_no_cuda

        store, model = self.open_store(self.store), open_model(self.model, self.model_config)
        refuse_no_cuda(self.device)
        model.part("vae")
        from bucketline.ingest.sheet.previews import previews  # imports torch

        found = previews(
            store,
            model,
            self.output,
            chosen_device(self.device, 0),
            count=self.samples,
            save_factors=self.save_factors,
        )
        if self.json:
            print_json(asdict(found))
            return 0
        print(f"{shown(self.output)}: {counted(found.samples, 'sample')} next to their decoded images")
        published = "no factors are published for this VAE"
        if found.published_rms is not None:
            published = f"published factors of {found.published}: error {found.published_rms:.1f}"
        fitted = f"fitted on {found.fitted_on} others: {found.fitted_rms:.1f}"
        print(f"  {published}; {fitted}; the mean colour: {found.gray_rms:.1f} (root mean square, of 0 to 255)")
        return 0
