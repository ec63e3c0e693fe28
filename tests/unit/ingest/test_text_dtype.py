"""`ingest pack --text-dtype`: tokens quantised or in another dtype than the latents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_columns import TextSettings, text_spec
from bucketline.ingest.encoders.text_encoders import TextEncoder, load_caption_encoder
from bucketline.store import Store
from bucketline.store.format.text import dequantise, quantise
from bucketline.typed_json import encode
from tests.commands import call
from tests.models import SMALL, in_file, pack, write_model

CPU = torch.device("cpu")


def captions(store: Store) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield each sample's captions with their tokens as they are delivered."""
    for bucket in store.buckets():
        for sample_id in bucket.sample_ids(np.arange(bucket.num_rows)):
            shard, record = store.sample(sample_id)
            for text, row in zip(record.captions or ("",), record.caption_rows, strict=True):
                yield text, store.read_caption(store.shards.index(shard), row)["tokens"]


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_tokens_are_quantised_from_what_the_encoder_computed(source: Path, tmp_path: Path, model: Path, dtype: str) -> None:
    done = pack(source, tmp_path / "s", model, "--text-dtype", dtype).json
    store = Store.open(tmp_path / "s")
    said = store.encoders["text_encoder"]
    assert isinstance(said, dict)
    assert (said["stored_dtype"], said["dtype"]) == (dtype, "F32")
    assert {column.dtype for bucket in store.buckets() for column in bucket.columns if column.name == "latent"} == {"F16"}
    text = TextEncoder(open_model(str(model)), CPU, TextSettings(stored_dtype="F32"))
    found = list(captions(store))
    assert len({caption for caption, _ in found}) > 3
    for caption, tokens in found[:12]:
        computed = text.encode([caption])[0].tokens.numpy()
        assert np.abs(tokens - dequantise(quantise(computed, dtype))).max() < 0.02  # a batch is computed in another order
    error = store.manifest.text_error
    assert error is not None
    assert 0 < error.relative_mean < 0.05
    assert done["text_error"] == encode(error)
    again = pack(source, tmp_path / "s", model, "--text-dtype", dtype).json
    assert (again["packed"], again["unchanged"]) == (0, done["packed"])


def test_captions_of_two_phases_have_the_error_of_when_they_were_encoded(source: Path, tmp_path: Path, model: Path) -> None:
    one, two = (
        pack(in_file(tmp_path / "d.toml", source, phases=n), tmp_path / n, model, "--text-dtype", "I8").json["text_error"]
        for n in ("one", "two")
    )
    assert one == two
    assert one["captions"] > 3


def test_tokens_may_have_another_dtype_than_latents(source: Path, tmp_path: Path, model: Path) -> None:
    pack(source, tmp_path / "s", model, "--text-dtype", "BF16").done()
    store = Store.open(tmp_path / "s")
    assert [(column.name, column.dtype) for column in store.text.tokens] == [("tokens", "BF16")]
    assert store.buckets()[0].spec.column("latent").dtype == "F16"


def test_new_captions_of_a_quantised_store_are_quantised_too(source: Path, tmp_path: Path, model: Path) -> None:
    pack(source, tmp_path / "s", model, "--text-dtype", "I8").done()
    done = pack(source, tmp_path / "s", model, "--text-dtype", "I8", "--caption-template", "red", "--recaption").json
    assert done["latents_kept"] == done["packed"] > 0
    store = Store.open(tmp_path / "s")
    assert {text[:3] for text, _ in captions(store)} == {"red"}
    assert call("store", "verify", tmp_path / "s").code == 0


def test_pooled_embeddings_stay_in_16_bits() -> None:
    for dtype, pooled in (("I8", "F16"), ("F8_E4M3", "F16"), ("BF16", "BF16"), ("F32", "F32")):
        fixed = {column.name: column.dtype for column in text_spec(dtype, 64, {"pooled": 5}).fixed}
        assert fixed["pooled"] == pooled
        assert set(fixed) == {"pooled"}


@pytest.fixture(scope="module")
def loud_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose tokens are beyond the range of F16, though not of F32."""
    folder = write_model(tmp_path_factory.mktemp("loud"))
    (path,) = (folder / "text_encoder").glob("*.safetensors")
    weights = load_file(path)
    (name,) = (name for name in weights if name.endswith("layer.0.output.LayerNorm.weight"))
    save_file({**weights, name: weights[name] * 1e7}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_tokens_beyond_the_range_are_refused_with_a_remedy(loud_model: Path, source: Path, tmp_path: Path, dtype: str) -> None:
    ran = call("ingest", "pack", source, tmp_path / "s", "--model", loud_model, *SMALL, "--text-dtype", dtype)
    assert ran.code == 1
    assert f"the empty caption's tokens are not finite as {dtype}" in ran.err
    assert "Try --text-dtype bf16 or fp32" in ran.err
    loaded = load_caption_encoder(open_model(str(loud_model)), CPU, TextSettings(stored_dtype="BF16"))
    assert loaded.encode(["a red cat"])[0].is_finite
