"""`ingest peek`: decode one sample of a store."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from bucketline.command_line import one_line, print_json
from bucketline.options import Arg, Positional
from bucketline.store.commands.look import ReadingArguments, StorePlace, shown


@dataclass(frozen=True, kw_only=True)
class Peek(ReadingArguments):
    """Decode the stored latent of one sample to an image.

    The model must have the VAE that the store was packed with.

    Example: ingest peek photos.store coffee/whole.png -o coffee.png
    """

    FIRST = ("model", "device", "json")

    place: Positional[StorePlace]
    """Folder or URL of the store."""
    id: Annotated[Positional[str], Arg(metavar="ID")]
    """Sample id: the path in the source, with extension."""
    model: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Folder in diffusers layout (only vae/ is used), one .safetensors checkpoint, or the name of a model on a hub. Default:
    the one that the store was last packed with on this machine."""
    model_config: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Folder or hub model with the configuration of a .safetensors --model, as for `ingest pack`."""
    output: Annotated[Path, Arg(aliases=("-o",), metavar="PNG")]
    """PNG file to write, which must not exist yet."""
    device: Annotated[str, Arg(metavar="DEVICE", words=("auto", "cpu", "cuda"))] = "auto"
    """Device of the VAE: auto (CUDA if available), cpu, cuda or cuda:N."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from bucketline.ingest.packing.packed_model import known_model
        from bucketline.ingest.peek import peek

        store = self.open_store(self.place)
        model = known_model(self.place, self.model, self.model_config, is_quiet=self.json)
        peeked = peek(store, self.id, model, self.output, self.device)
        if self.json:
            print_json(asdict(peeked))
        else:
            size = f"{peeked.height_px}x{peeked.width_px}"
            print(f"{shown(self.output)}: {one_line(peeked.id)} of {peeked.bucket}, {size} px, height first")
        return 0
