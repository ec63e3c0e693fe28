"""`ingest peek`: decode one sample of a store, or show some images of a source as packing would store them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from bucketline.command_line import counted, one_line, print_json, refuse_below
from bucketline.errors import UsageError
from bucketline.ingest.config import FILE_TABLES, SourceArguments
from bucketline.ingest.images.crop import DEFAULT_MAX_CROP, Crop, Framing, crop_limit
from bucketline.options import Arg, Positional
from bucketline.store.commands.place import ReadingArguments, shown, store_place


@dataclass(frozen=True, kw_only=True)
class PeekSource(SourceArguments, ReadingArguments):
    """Show one sample decoded, or images of a source: the stored latent as an image, or the source's with captions and crops.

    With an ID, the place is a store, and the model must have the same VAE that the store was packed with. Without one, it is
    a source as for `ingest pack`, and -o is a contact sheet: some of its images, drawn by hash, with the crops that packing
    would make and the captions that it would store. That needs no model.

    Example: ingest peek photos.store coffee/whole.png --model stable-diffusion-v1-5 -o coffee.png

    Example: ingest peek photos --grid area:512:64 -o sheet.html
    """

    SECTION = "peek: crops, sizes, the VAE's device"
    FIRST = ("model", "samples", "grid", "crop", "device", "json")

    place: Annotated[Positional[str], Arg(metavar="STORE|SOURCE")]
    """Folder or URL of the store; or a source, as for `ingest pack`."""
    id: Annotated[Positional[str | None], Arg(metavar="ID")] = None
    """Sample id: the path in the source, with extension. Without it, a contact sheet of a source is written."""
    model: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Folder in diffusers layout (only vae/ is used), one .safetensors checkpoint, or the name of a model on a hub."""
    model_config: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Folder or hub model with the configuration of a .safetensors --model, as for `ingest pack`."""
    output: Annotated[Path, Arg(aliases=("-o",), metavar="PNG|HTML")]
    """PNG file to write, which must not exist yet, or HTML file of a source's sheet."""
    samples: int = 60
    """Images of a source to show."""
    grid: Annotated[str | None, Arg(metavar="GRID")] = None
    """Bucket sizes for a source, as for `ingest pack`. Default: area:512:64."""
    crop: Crop = Crop.CENTER
    """Crop position in images of a source, as for `ingest pack`."""
    max_captions: int = 8
    """Maximum number of captions per sample of a source."""
    min_size_px: int = 64
    """Reject images of a source whose shorter side has fewer pixels."""
    device: Annotated[str, Arg(metavar="DEVICE")] = "auto"
    """Device of the VAE: auto (CUDA if available), cpu, cuda or cuda:N."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        SourceArguments.__post_init__(self)
        refuse_below(1, samples=self.samples, max_captions=self.max_captions, min_size_px=self.min_size_px)
        self.caption_rules.refuse_too_many(self.max_captions)

    @classmethod
    def complete(cls, options: PeekSource, given: frozenset[str]) -> PeekSource:
        """Return the options of a command line that gave these fields, with those of a data set file of one source."""
        from bucketline.ingest.sources.dataset_file import with_dataset_file

        return with_dataset_file(options, options.place, given, FILE_TABLES)[0]

    def run(self) -> int:
        return self._sheet() if self.id is None else self._decoded(self.id)

    def _decoded(self, sample_id: str) -> int:
        if self.model is None:
            raise UsageError(f"{self.place} {one_line(sample_id)}: set --model, whose VAE decodes the latent")
        from bucketline.ingest.encoders.model_folder import open_model
        from bucketline.ingest.peek import peek

        store, model = self.open_store(store_place(self.place)), open_model(self.model, self.model_config)
        peeked = peek(store, sample_id, model, self.output, self.device)
        if self.json:
            print_json(asdict(peeked))
        else:
            size = f"{peeked.height_px}x{peeked.width_px}"
            print(f"{shown(self.output)}: {one_line(peeked.id)} of {peeked.bucket}, {size} px, height first")
        return 0

    def _sheet(self) -> int:
        from bucketline.ingest.images.bucket_grid import parse_grid
        from bucketline.ingest.sheet.source_sheet import source_sheet
        from bucketline.store.format.manifest import MANIFEST

        if (Path(self.place) / MANIFEST).is_file():
            raise UsageError(
                f"{self.place} is a store: give a sample's ID and --model to decode it, or see it all by `store report`"
            )
        if self.model is not None:
            raise UsageError(f"--model {self.model}: it decodes one sample of a store; give its ID, or leave the option out")
        framing = Framing(
            grid=parse_grid(self.grid or "area:512:64", step_px=64, align_px=8),
            crop=self.crop,
            max_crop=crop_limit(DEFAULT_MAX_CROP),
            min_size_px=self.min_size_px,
        )
        found = source_sheet(self.place, self, framing, self.output, samples=self.samples, max_captions=self.max_captions)
        if self.json:
            print_json(asdict(found))
        else:
            print(f"{shown(self.output)}: {found.shown} of {counted(found.found, 'image')}, {found.rejected} of them rejected")
        return 0
