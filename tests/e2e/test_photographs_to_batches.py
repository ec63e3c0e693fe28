"""Real photographs, two ranks that pack, verify, two ranks that read: every training sample once, and rightly encoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from bucketline.ingest.rules import SplitBy, held_out
from bucketline.loader import Loader, LoaderConfig, Remainder
from bucketline.store import Store
from bucketline.store.format.block import sample_digest
from tests.commands import torchrun
from tests.kit import by_id
from tests.photographs import encoded_by_hand

pytestmark = pytest.mark.slow  # two hundred real photographs, packed with the demo's encoders
FRACTION = 0.2
Packed = tuple[Path, dict[str, Any]]  # a store, and what the pack said of it


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, photographs: Path, demo_model: Path) -> Packed:
    store = tmp_path_factory.mktemp("packed") / "photographs.store"
    asked = ["--val-fraction", f"{FRACTION}:folder", "--json"]
    ran = torchrun(2, "-m", "bucketline.ingest", "pack", photographs, store, "--model", demo_model, *asked).done()
    return store, ran.json


def images_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in (".png", ".jpg", ".jpeg"))


def test_two_ranks_account_for_every_photograph(packed: Packed, photographs: Path) -> None:
    store, report = packed
    ids = images_of(photographs)
    assert report["found"] == len(ids) == report["packed"] > 200
    assert (report["unchanged"], report["rejected"], report["without_caption"]) == (0, 0, 0)
    opened = Store.open(store)
    assert len(opened.shards) == 2
    assert min(shard.entry.samples for shard in opened.shards) > 70
    assert sorted(by_id(opened)) == ids


def test_two_ranks_read_every_training_sample_once_and_one_bucket_at_every_step(packed: Packed, photographs: Path) -> None:
    config = LoaderConfig(batch_size=4, epochs=1, seed=1, remainder=Remainder.PARTIAL)
    store = Store.open(packed[0])  # one generation for both: each rank of the pack has made one
    loaders = [Loader(store, config, rank=rank, world_size=2) for rank in range(2)]
    read: list[bytes] = []
    for pair in zip(*loaders, strict=True):
        assert pair[0].bucket == pair[1].bucket
        assert pair[0].latents.shape == pair[1].latents.shape
        for batch in pair:
            assert bool(torch.isfinite(batch.latents.float()).all())
            assert bool(batch.token_mask[:, 0].all())
            read += [bytes(i.tolist()) for i, w in zip(batch.ids, batch.weight.tolist(), strict=True) if w]
    for loader in loaders:
        loader.close()
    train = [i for i in images_of(photographs) if not held_out(i, FRACTION, SplitBy.FOLDER)]
    assert sorted(read) == sorted(map(sample_digest, train))


def upright(path: Path) -> Image.Image:
    with Image.open(path) as opened:
        rgba = ImageOps.exif_transpose(opened).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def test_latents_are_what_diffusers_gives_by_hand(packed: Packed, photographs: Path, demo_model: Path) -> None:
    from diffusers import AutoencoderKL

    kind: Any = AutoencoderKL
    vae = kind.from_pretrained(demo_model / "vae").eval()
    store = Store.open(packed[0])
    compared = 0
    for bucket in store.buckets():
        rows = np.arange(bucket.num_rows)
        ids = bucket.sample_ids(rows)
        for row, sample_id in list(zip(rows, ids, strict=True))[:: max(1, len(ids) // 3)]:
            stored = bucket.read(np.array([row]), "latent")[0].astype(np.float32)
            expected = encoded_by_hand(upright(photographs / sample_id), bucket.height_px, bucket.width_px, vae)
            assert stored.shape == expected.shape
            assert np.abs(stored - expected).max() < 0.01 * np.abs(expected).max(), sample_id
            compared += 1
    assert compared > 15


def test_tokens_are_what_transformers_gives_by_hand(packed: Packed, demo_model: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    tokenizer, encoder = (
        kind.from_pretrained(demo_model / part) for kind, part in ((AutoTokenizer, "tokenizer"), (AutoModel, "text_encoder"))
    )
    store = Store.open(packed[0])
    for bucket in store.buckets()[:4]:
        (sample_id,) = bucket.sample_ids(np.array([0]))
        shard, record = store.sample(sample_id)
        for caption, row in zip(record.captions, record.caption_rows, strict=True):
            with torch.no_grad():
                expected = encoder.eval()(**tokenizer(caption, return_tensors="pt")).last_hidden_state[0].numpy()
            stored = store.read_caption(store.shards.index(shard), row)["tokens"]
            assert stored.shape == expected.shape
            np.testing.assert_allclose(stored.astype(np.float32), expected, atol=5e-3)
