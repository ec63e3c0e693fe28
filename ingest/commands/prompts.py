"""`ingest prompts`: encode prompts for the images that a training run draws, into a file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bucketline.command_line import counted, human_bytes, one_line, print_json
from bucketline.errors import UsageError
from bucketline.options import Arg, Positional
from bucketline.store.commands.look import ChangingArguments, StorePlace, shown

_NAMED = 3  # prompts that were cut


@dataclass(frozen=True, kw_only=True)
class Prompts(ChangingArguments):
    """Encode prompts into a file. Training draws them without loading a text encoder.

    FILE is a text file with a prompt a line, or JSON lines (.jsonl) with prompt and, as needed, negative_prompt, seed, height,
    width and guidance. They are encoded as the captions of the store are, which stays as it is; `train --image-prompts` takes
    the file that is written.

    Example: ingest prompts prompts.txt photos.store
    """

    file: Annotated[Positional[Path], Arg(metavar="FILE")]
    """Text file with a prompt a line, or JSON lines."""
    store: Positional[StorePlace]
    """Path or URL of the store."""
    model: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Model that the store was packed with, as for `ingest pack`; only its text encoders and tokenizers are used. Default: the
    one that the store was last packed with on this machine."""
    model_config: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Folder or hub model with the configuration of a .safetensors --model, as for `ingest pack`."""
    output: Annotated[Path | None, Arg(aliases=("-o",), metavar="FILE")] = None
    """File to write, NAME.safetensors. Default: FILE with that suffix."""
    size: Annotated[str | None, Arg(metavar="HEIGHTxWIDTH")] = None
    """Size in px of prompts without one. Default: that of the bucket with the most training samples."""
    device: Annotated[str, Arg(metavar="DEVICE", words=("auto", "cpu", "cuda"))] = "auto"
    """Device of the encoders: auto (CUDA if available), cpu, cuda or cuda:N."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        output = self.output or self.file.with_suffix(".safetensors")
        if output.suffix != ".safetensors" or output == self.file:
            raise UsageError(f"--output {output}: expected a name in .safetensors, by which `train` tells it from texts")
        size = self._size()
        from bucketline.files.atomic_write import write_or_explain
        from bucketline.ingest.packing.packed_model import known_model
        from bucketline.ingest.prompts import encoded_prompts
        from bucketline.store.format.manifest import read_manifest
        from bucketline.store.remote.generations import newest_generation

        manifest = read_manifest(self.store) if isinstance(self.store, Path) else newest_generation(self.objects(self.store))
        model = known_model(self.store, self.model, self.model_config, is_quiet=self.json)
        data, number, cut = encoded_prompts(self.file, manifest, shown(self.store), model, self.device, size)
        write_or_explain(output, data)
        if self.json:
            print_json({"file": str(output), "prompts": number, "num_bytes": len(data), "cut": cut})
            return 0
        print(f"{shown(output)}: {counted(number, 'prompt')}, {human_bytes(len(data))}")
        if cut:
            named = "; ".join(one_line(text)[:80] for text in cut[:_NAMED])
            print(f"  {counted(len(cut), 'text')} longer than the text encoder takes, and cut: {named}")
        return 0

    def _size(self) -> tuple[int, int] | None:
        if self.size is None:
            return None
        if not (match := re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", self.size)):
            raise UsageError(f"--size is {self.size!r}, expected HEIGHTxWIDTH in px, such as 768x512")
        return int(match[1]), int(match[2])
