"""Images whose latents and embeddings are known: packed by `ingest pack`, as what every importer's result is held against."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bucketline.store import SampleRecord, Store
from bucketline.store.format.text import TEXT_GROUP
from bucketline.store.read.samples import Selection, checked_captions, checked_row, live_samples
from tests.commands import Ran, call
from tests.family_models import tiny_vae, write_pipeline
from tests.models import png

GRID = "32x48,48x32"
TEXTS = ("a red cat", "a blue dog", "the house", "a green house of the dog")
PACKED = ("--min-size-px", 8, "--dtype", "F32")
SIZES = ((40, 60), (60, 40), (32, 48), (70, 50), (45, 66), (48, 32))  # height and width


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One image, as `ingest pack` stored it."""

    id: str
    caption: str
    latent: NDArray[np.float32]  # [C, h, w], unscaled
    record: SampleRecord
    tokens: NDArray[np.float32]  # [T, D]

    @property
    def stem(self) -> str:
        return self.id.removesuffix(".png")

    @property
    def original_wh(self) -> tuple[int, int]:
        height, width = self.record.original_size
        return width, height

    @property
    def bucket_hw(self) -> tuple[int, int]:
        return self.record.crop[2], self.record.crop[3]


@dataclass(frozen=True, kw_only=True)
class Known:
    """Images, the model that encoded them, and what it made of them."""

    family: str
    images: Path
    model: Path
    samples: tuple[Sample, ...]
    scale: float
    shift: float
    dtype: torch.dtype = torch.float32  # in which a cache stores its latents, if its format leaves that open

    def fed(self, latent: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale a latent as its model sees it, as trainers do that store it so."""
        return ((latent.astype("f8") - self.shift) * self.scale).astype("f4")

    def cached(self, latent: NDArray[np.float32], *, scaled: bool = True) -> torch.Tensor:
        return torch.from_numpy(np.array(self.fed(latent) if scaled else latent)).to(self.dtype)


def make_known(folder: Path, name: str, count: int = 6) -> Known:
    """Write images and captions, pack them with a tiny pipeline of the family, and read back what was stored.

    `name` is a family, or `FAMILY at 256 px`: with a VAE that makes an eighth of the size, and squares.
    """
    family, _, square = name.partition(" at ")
    images = folder / "images"
    for n in range(count):
        path = images / ("cats" if n % 2 else "dogs") / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(*SIZES[n % len(SIZES)], seed=n))
        path.with_suffix(".txt").write_text(TEXTS[n % len(TEXTS)], encoding="utf-8")
    model = write_pipeline(folder / "model", family)
    if square:
        blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
        tiny_vae(block_out_channels=(4,) * 4, **blocks).save_pretrained(model / "vae")
    grid = "square:256" if square else GRID
    scale = shift = 0.0
    read: list[Sample] = []
    for step in ("measured.store", "packed.store"):  # by the second, the VAE is described as its latents are
        if step == "packed.store":
            scale, shift = describe_vae(model, [one.latent for one in read], has_shift=family in ("flux", "sd3"))
        packed = folder / step
        call("ingest", "pack", images, packed, "--model", model, "--grid", grid, *PACKED).done()
        read = read_store(packed)
    return Known(family=family, images=images, model=model, samples=tuple(read), scale=scale, shift=shift)


def describe_vae(model: Path, latents: list[NDArray[np.float32]], *, has_shift: bool) -> tuple[float, float]:
    """Write the scale of its latents into the VAE's configuration, as published ones have it; return scale and shift."""
    values = np.concatenate([latent.reshape(-1) for latent in latents])
    shift = float(values.mean()) if has_shift else 0.0
    scale = 1.0 / float(np.sqrt(np.mean((values - shift) ** 2)))
    path = model / "vae" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "scaling_factor": scale, "shift_factor": shift or None}), encoding="utf-8")
    return scale, shift


def read_store(path: Path) -> list[Sample]:
    store = Store.open(path)
    found = []
    for listed in live_samples(store, Selection()):
        number, record = listed.shard, listed.record
        column = store.manifest.specs[record.bucket].column("latent")
        latent = as_floats(checked_row(store, number, record)["latent"], column.dtype).reshape(column.shape)
        captions = [own[TEXT_GROUP] for own in checked_captions(store, number, record)]
        tokens = store.text.delivered.tokens[0]
        first = captions[0]
        found.append(
            Sample(
                id=record.id,
                caption=record.captions[0] if record.captions else "",
                latent=latent,
                record=record,
                tokens=as_floats(first.tokens[tokens.name], tokens.dtype).reshape(-1, *tokens.shape),
            )
        )
    return sorted(found, key=lambda sample: sample.id)


def as_floats(data: bytes, dtype: str) -> NDArray[np.float32]:
    torch_dtype: Any = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}[dtype]
    array: NDArray[np.float32] = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch_dtype).float().numpy()
    return array if len(data) else array[:0]


def run_import(kind: str, source: Path, store: Path, known: Known | None, *options: Any) -> Ran:
    named = () if known is None else ("--model", known.model)
    return call("ingest", "import", kind, source, store, *named, "--json", *options)


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form that a cache's format gives to what was packed, and what it does not record."""

    scaled: bool = True  # latents are as the model is fed
    dtype: torch.dtype | None = None  # of latents, if the format says it, whatever the VAE computes in
    has_size: bool = True  # of the original
    has_resized: bool = True  # of the image that was cropped, if the original's size is unknown
    has_crop: bool = False
    has_text: bool = True  # captions were encoded


def assert_as_packed(
    store: Path, known: Known, form: Form, *, crops: str = "unknown", ids: dict[str, str] | None = None
) -> None:
    """Compare every sample of an imported store with the packed one, to the bit: latent, embedding, caption, sizes and crop."""
    manifest = Store.open(store).manifest
    imported = {sample.id: sample for sample in read_store(store)}
    assert len(imported) == len(known.samples)
    for sample in known.samples:
        own, record = imported[(ids or {}).get(sample.id, sample.id)], sample.record
        dtype = manifest.specs[own.record.bucket].column("latent").dtype
        assert_same_bits(own.latent, undone(known, sample.latent, form), dtype)
        assert own.record.bucket == record.bucket
        original = record.original_size if form.has_size else record.resized if form.has_resized else (0, 0)
        assert own.record.original_size == original
        assert own.record.resized == (record.resized if form.has_size or form.has_resized else (0, 0))
        if crops == "unknown":
            assert own.record.crop[:2] == (-1, -1)
            assert own.record.crop_in_source == (-1, -1, -1, -1)
        else:
            assert own.record.crop == record.crop
            assert not form.has_size or own.record.crop_in_source == record.crop_in_source
        assert own.caption == sample.caption
        if form.has_text:
            assert_same_bits(own.tokens, sample.tokens, dtype)
    assert call("store", "verify", store).code == 0


def undone(known: Known, latent: NDArray[np.float32], form: Form) -> NDArray[Any]:
    """Return what the VAE made, computed in 64 bits from the values that the cache stores; not by the importer's code."""
    stored: NDArray[Any] = known.cached(latent, scaled=form.scaled).to(form.dtype or known.dtype).float().numpy()
    return stored.astype("<f8") / known.scale + known.shift if form.scaled else stored


def assert_same_bits(found: NDArray[np.float32], expected: NDArray[Any], dtype: str) -> None:
    """Compare values with what is expected of a column of this dtype: of 64 bits rounded to F32, and by F16 once more."""
    wanted = expected.astype("<f4").astype({"F32": "<f4", "F16": "<f2"}[dtype]).astype("<f4")
    assert found.shape == wanted.shape
    differ = int((found.view("<u4") != wanted.view("<u4")).sum())
    assert differ == 0, f"{differ} of {wanted.size} values differ, at most by {np.abs(found - wanted).max():.3g}"
