"""Encode prompts for the images that a training run draws, as a store has its captions, into a file beside the store.

A prompt is a line of a text file, or of JSON lines.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from bucketline.errors import FingerprintError, SourceError, UsageError
from bucketline.families.registry import family_named
from bucketline.files.paths import read_regular, why_unread
from bucketline.store.format.block import IMAGE_AXES, PLAIN_FAMILY, REFERENCE_AXIS
from bucketline.store.prompt_file import MAX_PROMPTS, Prompt, encode_prompts
from bucketline.typed_json import first_difference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.encoders.text_columns import CaptionEncoder, TextSettings
    from bucketline.store.format.manifest import Manifest
    from bucketline.store.format.text import Caption
    from bucketline.typed_json import Json

_BATCH = 8
_JSON_LINES = (".jsonl", ".json", ".ndjson")
_MAX_FILE_BYTES = 16 << 20
_FIELDS = {"prompt": str, "negative_prompt": str, "seed": int, "height": int, "width": int, "guidance": (int, float)}


def encoded_prompts(
    file: Path, manifest: Manifest, where: str, model: ModelFolder, device: str, size: tuple[int, int] | None = None
) -> tuple[bytes, int, list[str]]:
    """Return a file of the prompts in a text file, how many they are, and the texts that were cut.

    `manifest`, `where`: of the store whose text encoders, those of `model`, make the embeddings. `size`: height and width in px
    of prompts without one, by default of the store's bucket with the most training samples. Prompts have no reference images.
    """
    if not isinstance(text := manifest.encoders.get("text_encoder"), dict) or not text:
        raise UsageError(f"{where} has no text embeddings, so no model that is trained on it takes a prompt")
    family = family_named(str(text.get("family")))
    if family is not None and family.references is not None and family.references.least:
        raise UsageError(
            f"{where} is for {family.pipelines[0]}, which draws from a reference image, and a prompt has none; "
            "leave prompts out: images are drawn from the captions and references of the store's own samples"
        )
    lines = list(_lines(file, size or _most_common_size(manifest, where)))
    for number, prompt in lines:
        _refuse_size(manifest, f"{file}, line {number}", prompt)
    from bucketline.ingest.encoders.text_encoders import load_caption_encoder  # imports torch
    from bucketline.ingest.pipeline.model import chosen_device, refuse_no_cuda

    refuse_no_cuda(device)
    encoder = load_caption_encoder(model, chosen_device(device, 0), _settings(manifest, text))
    if difference := first_difference(text, encoder.provenance, "encoders.text_encoder"):
        field, expected, found = difference
        raise FingerprintError(
            f"{model.name} has {field} = {found!s:.200}, {where} was packed with {expected!s:.200}; name the model that the "
            "store was packed with"
        )
    captions, cut = _encoded(encoder, manifest, file, lines)
    return encode_prompts(manifest, [prompt for _, prompt in lines], captions), len(lines), cut


def _settings(manifest: Manifest, text: dict[str, Json]) -> TextSettings:
    from bucketline.ingest.encoders.text_columns import TextSettings

    imported = manifest.rules.get("import")
    rules = imported if isinstance(imported, dict) else manifest.rules
    length = rules.get("max_tokens")
    return TextSettings(
        stored_dtype=str(text.get("stored_dtype")),
        encode_dtype=str(rules.get("encode_dtype") or "F32"),
        max_tokens=length if isinstance(length, int) else None,
        sees_images=manifest.sees_images,
        is_plain=text.get("family") == PLAIN_FAMILY,
    )


def _encoded(
    encoder: CaptionEncoder, manifest: Manifest, file: Path, lines: Sequence[tuple[int, Prompt]]
) -> tuple[list[Caption], list[str]]:
    """Return the embeddings of all texts, each once, and the prompts and negative prompts that were cut."""
    from bucketline.ingest.images.crop import RejectedError
    from bucketline.ingest.pipeline.captions import FreshCaptions

    wanted = {text: number for number, prompt in reversed(lines) for text in (prompt.negative_prompt, prompt.prompt)}
    texts, captions, cut = sorted(wanted, key=lambda text: wanted[text]), list[Any](), list[str]()
    for text, found in zip(texts, FreshCaptions(encoder, manifest.text.spec(), _BATCH).of(texts), strict=True):
        if isinstance(found, RejectedError):
            raise SourceError(f"{file}, line {wanted[text]}: {text[:80]!r}: {found}; change the prompt")
        captions.append(found.caption)
        if found.is_truncated or found.cuts:
            cut.append(text)
    return captions, cut


def _lines(file: Path, size: tuple[int, int]) -> Iterator[tuple[int, Prompt]]:
    """Yield the prompts of a file, each with the number of its line; empty lines are passed over.

    A line is a prompt, or in a file whose name ends in .jsonl a JSON object of `prompt`, `negative_prompt`, `seed`, `height`,
    `width` and `guidance`. A prompt without a seed has 0, and the second of the same text 1.
    """
    try:
        data = read_regular(file, _MAX_FILE_BYTES)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{file} {why_unread(error)}; give a text file with a prompt a line") from error
    if len(data) > _MAX_FILE_BYTES:
        raise SourceError(f"{file} has more than {_MAX_FILE_BYTES} bytes, expected at most {MAX_PROMPTS} lines of prompts")
    num_same: Counter[str] = Counter()
    num_found = 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        item = f"{file}, line {number}"
        is_json = file.suffix.lower() in _JSON_LINES
        found: dict[str, Any] = _json_line(item, line) if is_json else {"prompt": line.strip()}
        num_found += 1
        if num_found > MAX_PROMPTS:
            raise SourceError(f"{item}: at most {MAX_PROMPTS} prompts are drawn")
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
        raise SourceError(f"{file} has no prompts, expected one per line")


def _json_line(item: str, line: str) -> dict[str, Any]:
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


def _most_common_size(manifest: Manifest, where: str) -> tuple[int, int]:
    """Return height and width in px of the bucket with the most training samples, of several the first by name."""
    rows: Counter[str] = Counter()
    for shard in manifest.shards:
        rows.update({name: group.live for name, group in shard.groups.items()})
    sizes = {  # without those of references
        bucket.name: {axis.name: axis.size for axis in bucket.axes if not REFERENCE_AXIS.fullmatch(axis.name)}
        for bucket in manifest.buckets
    }
    images = [bucket for bucket in manifest.buckets if tuple(sizes[bucket.name]) == IMAGE_AXES and rows[bucket.name]]
    if not images:
        raise UsageError(f"{where} has no images; prompts are for models of images, which the trainer can draw")
    best = min(images, key=lambda bucket: (bucket.split != "train", -rows[bucket.name], bucket.name))
    height_px, width_px = sizes[best.name].values()
    return height_px, width_px


def _refuse_size(manifest: Manifest, item: str, prompt: Prompt) -> None:
    vae = manifest.encoders.get("vae")
    factor = vae.get("downscale") if isinstance(vae, dict) else None
    if isinstance(factor, int) and factor > 0 and (prompt.height_px % factor or prompt.width_px % factor):
        raise SourceError(
            f"{item}: the size is {prompt.height_px}x{prompt.width_px} px, height first; expected multiples of {factor} px, "
            "the store's px per latent pixel"
        )
