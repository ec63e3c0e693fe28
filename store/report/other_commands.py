"""Results of other commands that a report shows, each in its own process: the store imports neither torch nor a loader."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.typed_json import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The model whose VAE decodes latents, as `ingest pack` takes it."""

    model: str
    model_config: str | None
    device: str


def decoded(latents: Sequence[NDArray[np.float32]], vae: Mapping[str, Json], decoder: Decoder) -> list[bytes]:
    """Return stored latents, each `[C, h, w]`, decoded, as JPEG thumbnails.

    Raises:
        StoreError: if they cannot be decoded; the message is that of `ingest`.
    """
    job = {
        "vae": vae,
        "model": decoder.model,
        "model_config": decoder.model_config,
        "device": decoder.device,
        "shapes": [latent.shape for latent in latents],
    }
    data = b"".join(np.ascontiguousarray(latent, dtype="<f4").tobytes() for latent in latents)
    out = _run("bucketline.ingest.sheet.decoded", json.dumps(job).encode("ascii") + b"\n" + data)
    return [base64.b64decode(image) for image in json.loads(out)]


def spawn_source_images(source: str, boxes: Mapping[str, Sequence[int] | None]) -> dict[str, bytes | str]:
    """Return thumbnails of images of a source by id, with their crop drawn in, or why there is none.

    `boxes`: of each id the crop in the source image (top, left, height, width), or None.

    Raises:
        StoreError: if the source cannot be read; the message is that of `ingest`.
    """
    job = {"source": source, "boxes": boxes}
    found = json.loads(_run("bucketline.ingest.sheet.source_images", json.dumps(job).encode("ascii")))
    return {
        name: base64.b64decode(one["jpeg"]) if one["problem"] is None else str(one["problem"]) for name, one in found.items()
    }


def _run(module: str, stdin: bytes) -> bytes:
    command = [sys.executable, "-P", "-m", module]  # -P: ignore the current folder
    done = subprocess.run(command, input=stdin, capture_output=True, check=False)
    if done.returncode:
        raise StoreError(_last_line(done.stderr.decode("utf-8", "replace")))
    return done.stdout


def _last_line(messages: str) -> str:
    """Return the error of a command, which is its last line."""
    lines = [line for line in messages.splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "it ended without a message"
