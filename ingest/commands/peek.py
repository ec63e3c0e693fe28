"""`ingest peek`: look at samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bucketline.command_line import one_line, print_json
from bucketline.store.commands.place import ReadingArguments, StorePlace


@dataclass(frozen=True, kw_only=True)
class Peek(ReadingArguments):
    """Decode the stored latent of one sample to an image.

    The model must have the same VAE that the store was packed with.

    Example: ingest peek photos.store coffee/whole.png --model stable-diffusion-v1-5 -o coffee.png
    """

    store: tyro.conf.Positional[StorePlace]
    """Folder or URL of the store."""
    id: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ID")]
    """Sample id: the path in the source, with extension."""
    model: Annotated[str, tyro.conf.arg(metavar="MODEL")]
    """Folder in diffusers layout (only vae/ is used), one .safetensors checkpoint, or the name of a model on a hub."""
    model_config: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None
    """Folder or hub model with the configuration of a .safetensors --model, as for `ingest pack`."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="PNG")]
    """PNG file to write; must not exist yet."""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """Device of the VAE: auto (CUDA if available), cpu, cuda or cuda:N."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from bucketline.ingest.encoders.model_folder import open_model
        from bucketline.ingest.peek import peek
        from bucketline.ingest.pipeline.device import chosen_device

        model, device = open_model(self.model, self.model_config), chosen_device(self.device, 0)
        peeked = peek(self.open_store(self.store), self.id, model, self.output, device)
        if self.json:
            print_json(asdict(peeked))
        else:
            size = f"{peeked.height_px}x{peeked.width_px}"
            print(f"{self.output}: {one_line(peeked.id)} of {peeked.bucket}, {size} px, height first")
        return 0
