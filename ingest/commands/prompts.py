"""`ingest prompts`: encode prompts into a store, for the images that a training run draws."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from bucketline.command_line import counted, human_bytes, one_line, print_json
from bucketline.errors import UsageError
from bucketline.store.commands.place import ChangingArguments, StorePlace, shown

if TYPE_CHECKING:
    from bucketline.store.prompts.prompt_sets import Place

NAMED = 3  # prompts that were cut


@dataclass(frozen=True, kw_only=True)
class Prompts(ChangingArguments):
    """Encode prompts into a store, so that training draws them without loading a text encoder.

    FILE is a text file with a prompt a line, or JSON lines (.jsonl) with prompt and, as needed, negative_prompt, seed, height,
    width and guidance. The prompts stay with the store: push, pull and merge take them along. Run the command again to
    replace them.

    Example: ingest prompts prompts.txt photos.store --model stable-diffusion-v1-5
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """Text file with a prompt a line, or JSON lines."""
    store: tyro.conf.Positional[StorePlace]
    """Path or URL of the store."""
    model: Annotated[str, tyro.conf.arg(metavar="MODEL")]
    """Model that the store was packed with, as for `ingest pack`; only its text encoders and tokenizers are used."""
    model_config: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None
    """Folder or hub model with the configuration of a .safetensors --model, as for `ingest pack`."""
    name: Annotated[str, tyro.conf.arg(metavar="NAME")] = "default"
    """Name of the set of prompts. `train` draws `default`, or the sets that its --image-prompts names."""
    size: Annotated[str | None, tyro.conf.arg(metavar="HEIGHTxWIDTH")] = None
    """Size in px of prompts without one. Default: that of the bucket with the most training samples."""
    device: Annotated[str, tyro.conf.arg(metavar="DEVICE")] = "auto"
    """Device of the encoders: auto (CUDA if available), cpu, cuda or cuda:N."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        size = self._size()
        from bucketline.ingest.encoders.model_folder import open_model
        from bucketline.ingest.pipeline.model.device import chosen_device
        from bucketline.ingest.prompts import write_prompts
        from bucketline.store.format.manifest import read_manifest
        from bucketline.store.remote.generations import newest_generation

        place: Place
        if isinstance(self.store, Path):
            place, manifest = self.store, read_manifest(self.store)
        else:
            place = objects = self.objects(self.store)
            objects.refuse_read_only()
            manifest = newest_generation(objects)
        model, device = open_model(self.model, self.model_config), chosen_device(self.device, 0)
        written = write_prompts(self.file, place, manifest, model, device, self.name, size)
        if self.json:
            print_json(asdict(written))
            return 0
        print(
            f"{shown(self.store)}: {counted(written.prompts, 'prompt')} as the set {written.name!r}, "
            f"{human_bytes(written.num_bytes)}"
        )
        if written.cut:
            named = "; ".join(one_line(text)[:80] for text in written.cut[:NAMED])
            print(f"  {counted(len(written.cut), 'text')} longer than the text encoder accepts (truncated): {named}")
        return 0

    def _size(self) -> tuple[int, int] | None:
        if self.size is None:
            return None
        if not (match := re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", self.size)):
            raise UsageError(f"--size is {self.size!r}, expected HEIGHTxWIDTH in px, such as 768x512")
        return int(match[1]), int(match[2])
