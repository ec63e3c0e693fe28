"""Quantised tokens as they are stored: the same batches as the dequantised ones, at half the bytes, on every way."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bucketline.errors import CorruptError, UsageError
from bucketline.loader import Batch, Loader, LoaderConfig, TextForm
from bucketline.loader.batch import dequantised
from bucketline.loader.collate import buffers as dequantise_module
from bucketline.store import Store
from bucketline.store.format.text import dequantise, quantise
from tests.kit import POOLED_WIDTH, loud_tokens, make_store, quantised, samples_of
from tests.serving import serving

BITS = {"I8": torch.int8, "F8_E4M3": torch.uint8}


@pytest.fixture(scope="module", params=[("I8", 64), ("I8", 40), ("F8_E4M3", 64)], ids=str)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    dtype, width = request.param
    return quantised(dtype, width).make_store(tmp_path_factory.mktemp("stored") / "s", samples_of({"train/64x64": 9}))


def batches(store: Store | Path, *, service: Path | None = None, **options: Any) -> list[Batch]:
    config = LoaderConfig(**{"batch_size": 4, "epochs": 2, "caption_dropout": 0.3, **options})
    with Loader(store, config, service=service) as loader:
        return list(loader.forever())


def same(one: list[Batch], two: list[Batch]) -> Iterator[bool]:
    for first, second in zip(one, two, strict=True):
        own, other = first.by_name(), second.by_name()
        yield own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize(
    "options", [{}, {"verify": True, "threads": 2}, {"plain_reads": True}, {"pad_multiple": 4}, {"pad_to": 11}], ids=str
)
def test_what_is_dequantised_on_the_device_is_what_the_loader_dequantises(store: Store, options: dict[str, Any]) -> None:
    expected = batches(store, **options)
    stored = batches(store, text="stored", **options)
    dtype, width = store.text.tokens[0].dtype, store.text.tokens[0].shape[0]
    for batch in stored:
        assert batch.tokens_scale is not None
        assert (batch.tokens.dtype, batch.tokens.shape[2]) == (BITS[dtype], width)
        assert batch.tokens_scale.shape == (*batch.tokens.shape[:2], store.text.tokens[1].shape[0])
        assert not batch.tokens[~batch.token_mask].any()
    for batch in expected:
        assert (batch.tokens.dtype, batch.tokens_scale) == (torch.float16, None)
        assert batch.dequantised() is batch
        assert batch.pooled is not None
        assert batch.pooled.shape == (len(batch.keys), POOLED_WIDTH)
        assert list(batch.text_fixed) == ["pooled"]
    assert all(same(expected, [batch.dequantised() for batch in stored]))
    assert len({batch.tokens.shape[1] for batch in expected}) == (1 if "pad_multiple" not in options else 2)


@pytest.mark.slow
def test_a_service_delivers_both_forms(store: Store, tmp_path: Path) -> None:
    with serving(tmp_path / "socket", store.path):
        for form in TextForm:
            assert all(same(batches(store, text=form), batches(store.path, text=form, service=tmp_path / "socket")))


def test_the_form_decides_nothing_else_so_a_state_of_one_resumes_the_other(store: Store) -> None:
    whole = batches(store)
    with Loader(store, LoaderConfig(batch_size=4, epochs=2, caption_dropout=0.3, text=TextForm.STORED)) as one:
        rows = iter(one)
        first = [next(rows).dequantised() for _ in range(2)]
        state = one.state_dict()
    with Loader(store, LoaderConfig(batch_size=4, epochs=2, caption_dropout=0.3)) as two:
        two.load_state_dict(state)
        assert all(same(whole, [*first, *two]))


def test_tokens_that_are_not_quantised_are_delivered_as_stored_in_both_forms(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples_of({"train/64x64": 6}))
    assert all(same(batches(store), batches(store, text="stored")))
    with pytest.raises(UsageError, match="text is 'raw', expected dequantised or stored"):
        LoaderConfig(batch_size=1, text="raw")  # type: ignore[arg-type]


@pytest.mark.parametrize("form", list(TextForm))
def test_a_flipped_bit_of_a_scale_is_found_by_verify(store: Store, tmp_path: Path, form: TextForm) -> None:
    shutil.copytree(store.path, tmp_path / "s")
    dtype, width = store.text.tokens[0].dtype, store.text.tokens[0].shape[0]
    text = next(text for sample in samples_of({"train/64x64": 9}) for text in sample.captions)
    scale = quantise(loud_tokens(text, width), dtype)["tokens_scale"].tobytes()
    path = tmp_path / "s/shards/g0.lmdb"
    data = path.read_bytes()
    at = data.index(scale)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(CorruptError, match="its bytes do not match their checksum"):
        batches(tmp_path / "s", text=form, verify=True, caption_dropout=0.0, epochs=8)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_numpy_and_torch_give_the_same_bits_for_every_code_and_scale(dtype: str) -> None:
    random = np.random.default_rng(0)
    magnitudes = 10.0 ** random.uniform(-9, 4.7, (300, 1))
    tokens = (random.uniform(-1, 1, (300, 256)) * magnitudes).astype("<f4")
    stored = quantise(tokens, dtype)
    found = dequantised(torch.from_numpy(stored["tokens"]), torch.from_numpy(stored["tokens_scale"]))
    assert found.numpy().tobytes() == dequantise(stored).tobytes()
    assert len(np.unique(stored["tokens"])) > 190


def test_the_expression_is_traced_as_one_graph() -> None:
    """The compiled noising step needs this: no break, for either dtype."""
    for tokens, num_scales in ((torch.ones(2, 3, 64, dtype=torch.int8), 2), (torch.ones(2, 3, 64, dtype=torch.uint8), 1)):
        scale = torch.full((2, 3, num_scales), 0.5)
        compiled = torch.compile(dequantised, backend="eager", fullgraph=True, dynamic=False)
        assert torch.equal(compiled(tokens, scale), dequantised(tokens, scale))


def test_a_batch_of_many_chunks_is_dequantised_in_its_own_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stored values are in the upper half of what they become."""
    expected = batches(store)
    for items in (store.text.tokens[0].shape[0], 200, 7):
        monkeypatch.setattr(dequantise_module, "CHUNK_ITEMS", items)
        monkeypatch.setattr(dequantise_module, "_scratch", dequantise_module._Scratch())
        assert all(same(expected, batches(store)))
