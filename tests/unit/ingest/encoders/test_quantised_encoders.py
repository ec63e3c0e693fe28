"""Text encoders in 8 and 4 bits: how far their embeddings are off, what their weights take, and what a store records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketline.errors import ModelError
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_model import load_text_part
from bucketline.quantised_linear import QuantisedLinear
from tests.commands import call
from tests.family_models import t5_tokenizer
from tests.models import SMALL, write_images, write_model

CPU = torch.device("cpu")
TEXT = "a red house of the green dog and a cat"
# relative errors of the last hidden state of two layers of random weights; the bounds are twice what was measured
MOST_OFF = {"BF16": 0.015, "int8": 0.035, "nf4": 0.45}
WEIGHT_BYTES = {"F32": 4.0, "BF16": 2.0, "int8": 1.05, "nf4": 0.55}  # of a linear layer, with its scales


def write_encoder(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a text encoder of a real class, wide enough that its linear layers are most of it."""
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(1)
    t5_tokenizer().save_pretrained(folder / "tokenizer")
    if kind == "T5":
        sizes: dict[str, Any] = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
        encoder: Any = transformers.T5EncoderModel(transformers.T5Config(**sizes, feed_forward_proj="gated-gelu"))
    else:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=32, vocab_size=64)
        encoder = transformers.Qwen3Model(config)
    encoder.to(dtype).save_pretrained(folder / "text_encoder")
    return folder


@pytest.fixture(scope="module", params=["T5", "Qwen3"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"), request.param)


def loaded(folder: Path, dtype: str) -> Any:
    return load_text_part(open_model(str(folder)), "text_encoder", "tokenizer", device=CPU, dtype=dtype)


@torch.inference_mode()
def hidden(part: Any) -> torch.Tensor:
    state: torch.Tensor = part.encoder(**part.tokenizer(TEXT, return_tensors="pt")).last_hidden_state
    return state.float()


def num_bytes(part: Any) -> int:
    tensors = [*part.encoder.parameters(), *part.encoder.buffers()]
    return sum(tensor.nbytes for tensor in tensors)


def test_the_error_of_an_embedding_is_bounded_and_fewer_bits_are_further_off(encoder: Path) -> None:
    whole = hidden(loaded(encoder, "F32"))
    off = {dtype: float((hidden(loaded(encoder, dtype)) - whole).norm() / whole.norm()) for dtype in MOST_OFF}
    assert 0 < off["BF16"] < off["int8"] < off["nf4"]
    assert all(off[dtype] < most for dtype, most in MOST_OFF.items()), off


def test_the_weights_take_their_bits_and_the_digest_is_that_of_the_weights_before(encoder: Path) -> None:
    whole = loaded(encoder, "F32")
    linear = sum(layer.weight.numel() for layer in whole.encoder.modules() if type(layer) is torch.nn.Linear)
    others = sum(tensor.numel() for tensor in whole.encoder.parameters()) - linear
    for dtype, each in WEIGHT_BYTES.items():
        part = loaded(encoder, dtype)
        most = linear * each + others * (4 if dtype == "F32" else 2) + 1024
        assert 0.8 * most < num_bytes(part) <= most, dtype
        assert part.provenance == {**whole.provenance, "dtype": dtype}
        assert any(isinstance(layer, QuantisedLinear) for layer in part.encoder.modules()) is (dtype in ("int8", "nf4"))


@pytest.mark.parametrize("saved", [torch.float32, torch.float16, torch.bfloat16])
def test_the_digest_does_not_depend_on_the_dtype_that_weights_are_loaded_in(saved: torch.dtype, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "T5", saved)
    by_dtype = {dtype: loaded(folder, dtype).provenance["weights_hash"] for dtype in ("F32", "F16", "BF16", "int8")}
    assert len(set(by_dtype.values())) == 1


def test_rotary_frequencies_keep_their_precision(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "Qwen3")
    whole = loaded(folder, "F32").encoder.rotary_emb.inv_freq
    for dtype in ("BF16", "F16", "nf4"):
        assert torch.equal(loaded(folder, dtype).encoder.rotary_emb.inv_freq, whole)


def test_a_pack_records_the_dtype_and_refuses_another(tmp_path: Path) -> None:
    model, source, store = write_model(tmp_path / "model"), tmp_path / "source", tmp_path / "store"
    write_images(source, 2)
    asked = ("ingest", "pack", source, store, "--model", model, *SMALL, "--json")
    call(*asked, "--encode-dtype", "int8").done()
    manifest = json.loads((store / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["encoders"]["text_encoder"]["dtype"] == "int8"
    assert manifest["encoders"]["vae"]["dtype"] == "F32"
    call(*asked, "--encode-dtype", "nf4").fails("--encode-dtype int8, this run has --encode-dtype nf4")
    assert call(*asked, "--encode-dtype", "int8").json["unchanged"] == 2


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "T5")
    (folder / "text_encoder" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match=r"text_encoder/model\.safetensors cannot be read as safetensors"):
        loaded(folder, "nf4")
