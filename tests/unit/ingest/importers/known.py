"""Images whose latents and embeddings are known: packed by `ingest pack`, as what every importer's result is held against."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.store import Store
from bucketline.store.read.iter_samples import Selection, live_samples
from bucketline.store.read.verified_sample import checked_captions, checked_row
from tests.commands import Ran, call
from tests.family_models import tiny_vae, write_pipeline
from tests.models import png

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from bucketline.store import SampleRecord

GRID = "32x48,48x32"
TEXTS = ("a red cat", "a blue dog", "the house", "a green house of the dog")
SIZES = ((40, 60), (60, 40), (32, 48), (70, 50), (45, 66), (48, 32))  # height and width


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One image, as `ingest pack` stored it."""

    id: str
    caption: str
    latent: NDArray[np.float32]  # [C, h, w], unscaled
    record: SampleRecord
    tokens: NDArray[np.float32]  # [T, D]
    pooled: NDArray[np.float32] | None  # [D']

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

    def fed(self, latent: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale a latent as its model sees it, as trainers do that store it so."""
        return ((latent - np.float32(self.shift)) * np.float32(self.scale)).astype(np.float32)


def make_known(folder: Path, name: str, count: int = 6) -> Known:
    """Write images and captions, pack them with a tiny pipeline of the family, and read back what was stored.

    `name` is a family, or `FAMILY at 256 px`: with a VAE that makes an eighth of the size, and squares; or `t5`: PixArt's
    transformer with a pipeline of no known family, whose text is its only encoder's last hidden state.
    """
    family, _, square = name.partition(" at ")
    images = folder / "images"
    for n in range(count):
        path = images / ("cats" if n % 2 else "dogs") / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(*SIZES[n % len(SIZES)], seed=n))
        path.with_suffix(".txt").write_text(TEXTS[n % len(TEXTS)], encoding="utf-8")
    model = write_pipeline(folder / "model", "pixart_sigma" if family == "t5" else family)
    if family == "t5":
        index = model / "model_index.json"
        described = {**json.loads(index.read_text(encoding="utf-8")), "_class_name": "WanPipeline"}
        index.write_text(json.dumps(described), encoding="utf-8")
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
        asked = (
            "--model",
            model,
            "--grid",
            grid,
            "--min-size-px",
            8,
            "--dtype",
            "F32",
            *(("--text", "plain") if family == "t5" else ()),
        )
        ran = call("ingest", "pack", images, packed, *asked)
        assert ran.code == 0, ran.err
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
    """Read every sample of a store, checksums compared, sorted by id."""
    store = Store.open(path)
    found = []
    for listed in live_samples(store, Selection()):
        number, record = listed.shard, listed.record
        column = store.manifest.specs[record.bucket].column("latent")
        latent = as_floats(checked_row(store, number, record)["latent"], column.dtype).reshape(column.shape)
        captions = checked_captions(store, number, record)
        fixed = {c.name: (c.dtype, c.shape) for c in store.text.delivered.fixed}
        tokens = store.text.delivered.tokens[0]
        first = captions[0]
        found.append(
            Sample(
                id=record.id,
                caption=record.captions[0] if record.captions else "",
                latent=latent,
                record=record,
                tokens=as_floats(first.tokens[tokens.name], tokens.dtype).reshape(-1, *tokens.shape),
                pooled=as_floats(first.fixed["pooled"], fixed["pooled"][0]) if "pooled" in fixed else None,
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


def assert_as_packed(
    store: Path,
    known: Known,
    *,
    has_text: bool,
    crops: str = "unknown",
    ids: dict[str, str] | None = None,
    has_size: bool = True,
    is_half: bool = False,
) -> None:
    """Compare every sample of an imported store with the packed one: latent, embedding, size, bucket and crop."""
    imported = {sample.id: sample for sample in read_store(store)}
    atol = 2**-10 / known.scale if is_half else 1e-6  # of a cache in 16 bits whose values are below 4 as the model is fed
    assert len(imported) == len(known.samples)
    for sample in known.samples:
        own = imported[(ids or {}).get(sample.id, sample.id)]
        np.testing.assert_allclose(own.latent, sample.latent, rtol=2**-10, atol=atol)
        assert own.record.bucket == sample.record.bucket
        assert own.record.original_size == (sample.record.original_size if has_size else (0, 0))
        assert own.record.resized == (sample.record.resized if has_size else (0, 0))
        if crops == "unknown":
            assert own.record.crop[:2] == (-1, -1)
            assert own.record.crop_in_source == (-1, -1, -1, -1)
        else:
            assert (own.record.crop, own.record.crop_in_source) == (sample.record.crop, sample.record.crop_in_source)
        assert own.caption == sample.caption
        if has_text:
            np.testing.assert_allclose(own.tokens, sample.tokens, rtol=2**-9, atol=1e-5)
            if sample.pooled is not None:
                assert own.pooled is not None
                np.testing.assert_allclose(own.pooled, sample.pooled, rtol=2**-9, atol=1e-5)
    assert call("store", "verify", store).code == 0
