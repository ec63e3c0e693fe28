"""Prompts as a user writes them: a text file with a prompt a line, or JSON lines."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from bucketline.errors import SourceError, UsageError
from bucketline.files.regular_file import read_regular, why_unread
from bucketline.store.format.block import IMAGE_AXES
from bucketline.store.prompts.prompt_file import MAX_PROMPTS, Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.store.format.manifest import Manifest

JSON_LINES = (".jsonl", ".json", ".ndjson")
_MAX_FILE_BYTES = 16 << 20
_FIELDS = {"prompt": str, "negative_prompt": str, "seed": int, "height": int, "width": int, "guidance": (int, float)}


def read_prompts(file: Path, size: tuple[int, int]) -> Iterator[tuple[int, Prompt]]:
    """Yield the prompts of a file, each with the number of its line; empty lines are passed over.

    A line is a prompt, or in a file whose name ends in .jsonl a JSON object of `prompt`, `negative_prompt`, `seed`, `height`,
    `width` and `guidance`. A prompt without a seed has 0, and the second of the same text 1.

    Raises:
        SourceError: if the file cannot be read, has no prompts or too many, or a line is not as described.
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


def refuse_size(manifest: Manifest, item: str, prompt: Prompt) -> None:
    """Check that a prompt's size is one of the store's latents.

    Raises:
        SourceError: if a side is not a multiple of the store's px per latent pixel; the message names `item`.
    """
    vae = manifest.encoders.get("vae")
    factor = vae.get("downscale") if isinstance(vae, dict) else None
    if isinstance(factor, int) and factor > 0 and (prompt.height_px % factor or prompt.width_px % factor):
        raise SourceError(
            f"{item}: the size is {prompt.height_px}x{prompt.width_px} px, height first; expected multiples of {factor} px, "
            "the store's px per latent pixel"
        )
