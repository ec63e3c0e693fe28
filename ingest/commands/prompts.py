"""`ingest prompts`: encode prompts into a store, for the images that a training run draws."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bucketline.command_line import counted, human_bytes, one_line, print_json
from bucketline.errors import FingerprintError, SourceError, UsageError
from bucketline.options import Arg, Positional
from bucketline.pack_options import pack_options
from bucketline.store.commands.place import ChangingArguments, StorePlace, shown
from bucketline.typed_json import first_difference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bucketline.ingest.encoders.text_columns import CaptionEncoder, TextSettings
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.text_block import Caption
    from bucketline.store.prompts.prompt_file import Prompt
    from bucketline.store.side_files import Place
    from bucketline.typed_json import Json

BATCH = 8
_NAMED = 3  # prompts that were cut


@dataclass(frozen=True, kw_only=True)
class Prompts(ChangingArguments):
    """Encode prompts into a store. Training draws them without loading a text encoder.

    FILE is a text file with a prompt a line, or JSON lines (.jsonl) with prompt and, as needed, negative_prompt, seed, height,
    width and guidance. The prompts stay with the store: push, pull and merge take them along. Run the command again to
    replace them.

    Example: ingest prompts prompts.txt photos.store --model stable-diffusion-v1-5
    """

    file: Annotated[Positional[Path], Arg(metavar="FILE")]
    """Text file with a prompt a line, or JSON lines."""
    store: Positional[StorePlace]
    """Path or URL of the store."""
    model: Annotated[str, Arg(metavar="MODEL")]
    """Model that the store was packed with, as for `ingest pack`; only its text encoders and tokenizers are used."""
    model_config: Annotated[str | None, Arg(metavar="MODEL")] = None
    """Folder or hub model with the configuration of a .safetensors --model, as for `ingest pack`."""
    name: Annotated[str, Arg(metavar="NAME")] = "default"
    """Name of the set of prompts. `train` draws `default`, or the sets that its --image-prompts names."""
    size: Annotated[str | None, Arg(metavar="HEIGHTxWIDTH")] = None
    """Size in px of prompts without one. Default: that of the bucket with the most training samples."""
    device: Annotated[str, Arg(metavar="DEVICE")] = "auto"
    """Device of the encoders: auto (CUDA if available), cpu, cuda or cuda:N."""
    output: Annotated[Path | None, Arg(aliases=("-o",), metavar="FILE")] = None
    """Write the set to this file, and leave the store as it is. `train` does so for what its --image-prompts gives as text."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        size = self._size()
        from bucketline.files.atomic_write import write_or_explain
        from bucketline.ingest.encoders.model_folder import open_model
        from bucketline.ingest.pipeline.model.device import chosen_device, refuse_no_cuda
        from bucketline.store.format.manifest import read_manifest
        from bucketline.store.prompts.prompt_file import encode_prompts
        from bucketline.store.prompts.prompt_lines import most_common_size, read_prompts, refuse_size
        from bucketline.store.prompts.prompt_sets import checked_name, write_set
        from bucketline.store.remote.generations import newest_generation

        place: Place
        if isinstance(self.store, Path):
            place, manifest = self.store, read_manifest(self.store)
        else:
            place = objects = self.objects(self.store)
            if self.output is None:
                objects.refuse_read_only()
            manifest = newest_generation(objects)
        model = open_model(self.model, self.model_config)
        checked_name(self.name)
        if not isinstance(text := manifest.encoders.get("text_encoder"), dict) or not text:
            raise UsageError(f"{self._where} has no text embeddings, so no model that is trained on it takes a prompt")
        lines = list(read_prompts(self.file, size or most_common_size(manifest, self._where)))
        for number, prompt in lines:
            refuse_size(manifest, f"{self.file}, line {number}", prompt)
        refuse_no_cuda(self.device)
        from bucketline.ingest.encoders.text.registry import load_caption_encoder  # imports torch

        encoder = load_caption_encoder(model, chosen_device(self.device, 0), _settings(manifest, text))
        self._refuse_other_model(manifest, encoder, model.name)
        captions, cut = _encoded(encoder, manifest, self.file, lines)
        data = encode_prompts(manifest, [prompt for _, prompt in lines], captions)
        if self.output is None:
            write_set(place, self.name, data)
        else:
            write_or_explain(self.output, data)
        self._print(len(lines), len(data), cut)
        return 0

    @property
    def _where(self) -> str:
        return shown(self.store)

    def _refuse_other_model(self, manifest: Manifest, encoder: CaptionEncoder, model: str) -> None:
        if difference := first_difference(manifest.encoders["text_encoder"], encoder.provenance, "encoders.text_encoder"):
            field, expected, found = difference
            raise FingerprintError(
                f"{model} has {field} = {found!s:.200}, {self._where} was packed with {expected!s:.200}; "
                "name the model that the store was packed with"
            )

    def _print(self, num_prompts: int, num_bytes: int, cut: list[str]) -> None:
        if self.json:
            print_json({"name": self.name, "prompts": num_prompts, "num_bytes": num_bytes, "cut": cut})
            return
        what = (
            f"{counted(num_prompts, 'prompt')}{'' if self.output else f' as the set {self.name!r}'}, {human_bytes(num_bytes)}"
        )
        print(f"{self._where if self.output is None else shown(self.output)}: {what}")
        if cut:
            named = "; ".join(one_line(text)[:80] for text in cut[:_NAMED])
            print(f"  {counted(len(cut), 'text')} longer than the text encoder accepts (truncated): {named}")

    def _size(self) -> tuple[int, int] | None:
        if self.size is None:
            return None
        if not (match := re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", self.size)):
            raise UsageError(f"--size is {self.size!r}, expected HEIGHTxWIDTH in px, such as 768x512")
        return int(match[1]), int(match[2])


def _settings(manifest: Manifest, text: dict[str, Json]) -> TextSettings:
    """Return the settings with which a store's captions were encoded."""
    from bucketline.ingest.encoders.text_columns import TextSettings

    options = pack_options({"encoders": manifest.encoders})
    length = options.get("--max-tokens")
    return TextSettings(
        stored_dtype=str(text.get("stored_dtype")),
        encode_dtype=str(options.get("--encode-dtype") or "F32"),
        max_tokens=length if isinstance(length, int) else None,
        is_plain=options.get("--text") is not None,
    )


def _encoded(
    encoder: CaptionEncoder, manifest: Manifest, file: Path, lines: Sequence[tuple[int, Prompt]]
) -> tuple[list[Caption], list[str]]:
    """Return the embeddings of all texts, each once, and the prompts and negative prompts that were cut."""
    from bucketline.ingest.images.rejects import RejectedError
    from bucketline.ingest.pipeline.captions import FreshCaptions

    wanted = {text: number for number, prompt in reversed(lines) for text in (prompt.negative_prompt, prompt.prompt)}
    texts, captions, cut = sorted(wanted, key=lambda text: wanted[text]), list[Any](), list[str]()
    for text, found in zip(texts, FreshCaptions(encoder, manifest.text.spec(), BATCH).of(texts), strict=True):
        if isinstance(found, RejectedError):
            raise SourceError(f"{file}, line {wanted[text]}: {text[:80]!r}: {found}; change the prompt")
        captions.append(found.caption)
        if found.is_truncated or found.cuts:
            cut.append(text)
    return captions, cut
