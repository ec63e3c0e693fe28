"""Pairs on a disk, and what each column of their rows should hold, worked out without the code that packs them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.vae import VaeEncoder
from bucketline.store import Store
from tests.commands import Ran, call
from tests.kit import by_id
from tests.models import colour_image, encoded

GRID = "32x48,48x32"
SIZE = (64, 96)  # of every target: its bucket is half as large, so that nothing is cropped
OWN_SIZE = (48, 40)  # of a reference that is no aligned pair; its sides are multiples of 16 but for one


def picture(seed: int, size: tuple[int, int] = SIZE) -> bytes:
    return encoded(Image.fromarray(colour_image(*size, seed)), "PNG")


def mask(seed: int, size: tuple[int, int] = SIZE) -> bytes:
    return encoded(Image.fromarray(colour_image(*size, seed)[..., 0]), "PNG")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A sample's files: its target, its references in order, and its mask."""

    target: bytes
    references: Sequence[bytes] = ()
    mask: bytes | None = None
    captions: Sequence[str] = ()
    columns: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)


def data_file(path: Path, source: str, **fields: object) -> Path:
    lines = ["[source]", f"path = {json.dumps(source)}", *(f"{name} = {json.dumps(value)}" for name, value in fields.items())]
    lines += ["[rules]", f"grid = {json.dumps(GRID)}", "min_size_px = 8"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def packed(file: Path, store: Path, model: Path, *more: object) -> Ran:
    return call("ingest", "pack", file, store, "--model", model, "--json", *more)


def check(store: Path, model: Path, expected: Mapping[str, Expected], *, flip: bool = False) -> None:
    """Compare every row with the VAE called for one image at a time, and with masks averaged by torch."""
    vae = VaeEncoder(open_model(str(model)), torch.device("cpu"), "F16")
    rows = by_id(Store.open(store))
    assert rows.keys() == expected.keys()
    for name, own in expected.items():
        target, held = Image.open(io.BytesIO(own.target)).convert("RGB"), rows[name]
        bucket = (SIZE[0] // 2, SIZE[1] // 2)
        images, sizes = [_resized(target, bucket)], [bucket]
        for data in own.references:
            image = Image.open(io.BytesIO(data)).convert("RGB")
            is_pair = image.size == target.size
            images.append(_resized(image, bucket) if is_pair else _cut(image))
            sizes.append(images[-1].shape[:2])
        roles = ["latent", *(f"reference/{n}" for n in range(len(own.references)))]
        for role, pixels, size in zip(roles, images, sizes, strict=True):
            shape = (4, size[0] // 2, size[1] // 2)
            names = {role: pixels} | ({mirrored(role): pixels[:, ::-1]} if flip else {})
            for column, given in names.items():
                latent = vae.encode(np.array(given)[None])[0][0].numpy()
                found = np.frombuffer(held.columns[column], dtype="<f2").reshape(shape)
                np.testing.assert_allclose(found, latent, atol=4e-3, err_msg=f"{name}, {column}")
        if own.mask is not None:
            values = np.asarray(Image.open(io.BytesIO(own.mask)).convert("L"), dtype=np.float64)
            grid = torch.nn.functional.interpolate(torch.from_numpy(values)[None, None], size=(16, 24), mode="area")[0, 0]
            stored = np.frombuffer(held.columns["mask"], dtype="u1").reshape(16, 24)
            np.testing.assert_array_equal(stored, np.rint(grid.numpy()).astype("u1"), err_msg=name)
            if flip:
                assert held.columns["mask/flipped"] == stored[:, ::-1].tobytes()
        if own.captions:
            assert held.record.captions == tuple(own.captions)


def mirrored(role: str) -> str:
    return "latent_flipped" if role == "latent" else f"{role}/flipped"


def _resized(image: Image.Image, size: tuple[int, int]) -> NDArray[np.uint8]:
    return np.asarray(image.resize(size[::-1], Image.Resampling.LANCZOS), dtype=np.uint8)


def _cut(image: Image.Image) -> NDArray[np.uint8]:
    """Cut an image around its middle to sides of a multiple of 16 px, as Flux.2's pipeline does."""
    height, width = image.height // 16 * 16, image.width // 16 * 16
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return np.asarray(image.crop((left, top, left + width, top + height)), dtype=np.uint8)
