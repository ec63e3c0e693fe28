"""Encode prompts with a store's own text encoders, and write them next to its shards, for the images of a training run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.errors import FingerprintError, SourceError, UsageError
from bucketline.files.regular_file import read_regular, why_unread
from bucketline.ingest.encoders.oom_retry import OomRetry
from bucketline.ingest.encoders.text.registry import load_caption_encoder
from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.ingest.pipeline.batch_encoder import as_caption
from bucketline.store.format.block import IMAGE_AXES
from bucketline.store.format.hashing import caption_digest
from bucketline.store.format.pack_options import PLAIN_FAMILY, pack_options
from bucketline.store.prompts.prompt_file import MAX_PROMPTS, Prompt, encode_prompts
from bucketline.store.prompts.prompt_sets import checked_name, write_set
from bucketline.typed_json import first_difference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.encoders.text_columns import CaptionEncoder
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.text_block import Caption
    from bucketline.store.prompts.prompt_sets import Place
    from bucketline.typed_json import Json

JSON_LINES = (".jsonl", ".json", ".ndjson")
MAX_FILE_BYTES = 16 << 20
BATCH = 8
_FIELDS = {"prompt": str, "negative_prompt": str, "seed": int, "height": int, "width": int, "guidance": (int, float)}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPrompts:
    """The set that was written."""

    name: str
    prompts: int
    num_bytes: int
    cut: tuple[str, ...]  # prompts and negative prompts that the text encoder did not see to their end


def write_prompts(
    file: Path,
    place: Place,
    manifest: Manifest,
    model: ModelFolder,
    device: torch.device,
    name: str,
    size: tuple[int, int] | None,
) -> WrittenPrompts:
    """Encode the prompts of a file into a store's set `name`, which is replaced if it is there.

    `size`: height and width in px of prompts that have none; None: those of the bucket with the most training samples.

    Raises:
        SourceError: if the file cannot be read, or a prompt cannot be drawn or encoded; the message names the line.
        FingerprintError: if the model's text encoders are not the store's; the message names the field.
        UsageError: if the store has no text embeddings or no images, or the name cannot be one.
        ModelError: if the model has no text encoders.
        StoreError: if the set cannot be written.
    """
    checked_name(name)
    stored = manifest.encoders.get("text_encoder")
    if not isinstance(stored, dict) or not stored:
        raise UsageError(f"{_where(place)} has no text embeddings, so no model that is trained on it takes a prompt")
    lines = list(read_prompts(file, size or most_common_size(manifest, _where(place))))
    for number, prompt in lines:
        _refuse_size(manifest, f"{file}, line {number}", prompt)
    encoder = load_caption_encoder(model, device, settings_of(manifest, stored))
    if difference := first_difference(stored, encoder.provenance, "encoders.text_encoder"):
        field, expected, found = difference
        raise FingerprintError(
            f"{model.name} has {field} = {found!s:.200}, {_where(place)} was packed with {expected!s:.200}; "
            "name the model that the store was packed with"
        )
    captions, cut = _encode(encoder, manifest, file, lines)
    data = encode_prompts(manifest, [prompt for _, prompt in lines], captions)
    write_set(place, name, data)
    return WrittenPrompts(name=name, prompts=len(lines), num_bytes=len(data), cut=tuple(cut))


def read_prompts(file: Path, size: tuple[int, int]) -> Iterator[tuple[int, Prompt]]:
    """Yield the prompts of a file, each with the number of its line; empty lines are passed over.

    A line is a prompt, or in a file whose name ends in .jsonl a JSON object of `prompt`, `negative_prompt`, `seed`, `height`,
    `width` and `guidance`. A prompt without a seed has 0, and the second of the same text 1.

    Raises:
        SourceError: if the file cannot be read, has no prompts or too many, or a line is not as described.
    """
    try:
        data = read_regular(file, MAX_FILE_BYTES)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{file} {why_unread(error)}; give a text file with a prompt a line") from error
    if len(data) > MAX_FILE_BYTES:
        raise SourceError(f"{file} has more than {MAX_FILE_BYTES} bytes, expected at most {MAX_PROMPTS} lines of prompts")
    num_same: Counter[str] = Counter()
    num_found = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        item = f"{file}, line {number}"
        is_json = file.suffix.lower() in JSON_LINES
        found: dict[str, Any] = _json_line(item, line) if is_json else {"prompt": line.strip()}
        num_found += 1
        if num_found > MAX_PROMPTS:
            raise SourceError(f"{item}: a set has at most {MAX_PROMPTS} prompts; an image is drawn of each of them every time")
        seed = found.get("seed", num_same[found["prompt"]])
        num_same[found["prompt"]] += 1
        try:
            yield (
                number,
                Prompt(
                    prompt=found["prompt"],
                    negative_prompt=found.get("negative_prompt", ""),
                    seed=seed,
                    height_px=found.get("height", size[0]),
                    width_px=found.get("width", size[1]),
                    guidance=None if found.get("guidance") is None else float(found["guidance"]),
                ),
            )
        except (ValueError, OverflowError) as error:
            raise SourceError(f"{item}: {error}; correct the line") from error
    if not num_found:
        raise SourceError(f"{file} has no prompts, expected one per line; to do without a set, remove its file from the store")


def _json_line(item: str, line: str) -> dict[str, Any]:
    """Return the fields of a line that have a value, checked by type."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SourceError(f'{item} is not JSON: {error}; expected an object such as {{"prompt": "a red barn"}}') from error
    if not isinstance(found, dict) or "prompt" not in found:
        raise SourceError(f"{item} is {line[:80]}, expected an object with a prompt")
    found = {name: value for name, value in found.items() if value is not None}
    if unknown := sorted(found.keys() - _FIELDS.keys()):
        raise SourceError(f"{item} has the field {unknown[0]!r:.80}, expected {', '.join(_FIELDS)}")
    for name, value in found.items():
        kind: Any = _FIELDS[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise SourceError(f"{item}: {name} is {value!r:.80}, expected {'text' if kind is str else 'a number'}")
    if "prompt" not in found or ("height" in found) != ("width" in found):
        raise SourceError(f"{item} needs a prompt, and either height and width or neither of them")
    return found


def most_common_size(manifest: Manifest, where: str) -> tuple[int, int]:
    """Return height and width in px of the bucket with the most training samples, of several the first by name.

    Raises:
        UsageError: if the store has no images.
    """
    rows: Counter[str] = Counter()
    for shard in manifest.shards:
        rows.update({name: group.live for name, group in shard.groups.items()})
    images = [bucket for bucket in manifest.buckets if tuple(axis.name for axis in bucket.axes) == IMAGE_AXES]
    images = [bucket for bucket in images if rows[bucket.name]]
    if not images:
        raise UsageError(f"{where} has no images; prompts are for models of images, which the trainer can draw")
    best = min(images, key=lambda bucket: (bucket.split != "train", -rows[bucket.name], bucket.name))
    height_px, width_px = (axis.size for axis in best.axes)
    return height_px, width_px


def settings_of(manifest: Manifest, text: dict[str, Json]) -> TextSettings:
    """Return the settings with which a store's captions were encoded."""
    options = pack_options({"encoders": manifest.encoders})
    dtypes, lengths = options.get("--encode-dtype", ()), options.get("--max-tokens", ())
    return TextSettings(
        stored_dtype=str(text.get("stored_dtype")),
        encode_dtype=dtypes[0] if dtypes else "F32",
        max_tokens=int(lengths[0]) if lengths else None,
        is_plain=text.get("family") == PLAIN_FAMILY,
    )


def _refuse_size(manifest: Manifest, item: str, prompt: Prompt) -> None:
    vae = manifest.encoders.get("vae")
    factor = vae.get("downscale") if isinstance(vae, dict) else None
    if isinstance(factor, int) and factor > 0 and (prompt.height_px % factor or prompt.width_px % factor):
        raise SourceError(
            f"{item}: the size is {prompt.height_px}x{prompt.width_px} px, height first; expected multiples of {factor} px, "
            "the store's px per latent pixel"
        )


def _encode(
    encoder: CaptionEncoder, manifest: Manifest, file: Path, lines: Sequence[tuple[int, Prompt]]
) -> tuple[list[Caption], list[str]]:
    """Return the embeddings of all texts, each once, and the texts that were cut."""
    wanted = {text: number for number, prompt in reversed(lines) for text in (prompt.negative_prompt, prompt.prompt)}
    texts, spec = sorted(wanted, key=lambda text: wanted[text]), manifest.text.spec()
    encode, captions, cut = OomRetry(encoder.encode, "prompt"), list[Any](), list[str]()
    for at in range(0, len(texts), BATCH):
        part = texts[at : at + BATCH]
        for text, embedding in zip(part, encode(part), strict=True):
            item = f"{file}, line {wanted[text]}: {text[:80]!r}"
            if embedding.refusal is not None:
                raise SourceError(f"{item}: {embedding.refusal}")
            if not embedding.is_finite:
                raise SourceError(f"{item}: its embedding is not finite as {spec.tokens[0].dtype}; change the prompt")
            captions.append(as_caption(spec, caption_digest(text), embedding))
            if embedding.is_truncated or embedding.cuts:
                cut.append(text)
    return captions, cut


def _where(place: Place) -> str:
    return str(place) if isinstance(place, Path) else place.url
