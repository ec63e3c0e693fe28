"""A file of prompts: what was written is read back, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucketline.errors import CorruptError, FingerprintError, StoreError
from bucketline.store import Store
from bucketline.store.format.hashing import caption_digest
from bucketline.store.format.text_block import encode_text_block, quantised_caption
from bucketline.store.prompt_file import PROMPTS_FORMAT, Prompt, PromptSet, decode_prompts, encode_prompts
from bucketline.store.shard.sidecar import encode_paged
from tests.kit import TEXT, caption_of, embedding, quantised, read_with_safetensors, samples_of

FIRST = Prompt(prompt="a red barn", negative_prompt="snow", seed=7, height_px=64, width_px=128, guidance=4.5)
SECOND = Prompt(prompt="zwei Boote 船", negative_prompt="", seed=2**63 - 1, height_px=8, width_px=8, guidance=None)
TEXTS = ("a red barn", "snow", "zwei Boote 船", "")


@pytest.fixture(scope="module")
def data(store: Store) -> bytes:
    return encode_prompts(store.manifest, [FIRST, SECOND], [caption_of(text) for text in TEXTS])


def read(store: Store, data: bytes) -> PromptSet:
    return decode_prompts(store.manifest, data, "prompts.safetensors")


def test_prompts_and_embeddings_are_read_as_they_were_written(store: Store, data: bytes) -> None:
    found = read(store, data)
    assert found.prompts == (FIRST, SECOND)
    for text in TEXTS:
        own = found.embedding(text)
        assert list(own) == ["tokens"]
        assert np.array_equal(own["tokens"], embedding(text))


def test_the_safetensors_package_reads_a_file_as_the_format_describes_it(data: bytes) -> None:
    file = read_with_safetensors(data)
    assert set(file) == {"page_checksum", "prompts", "text"}
    assert json.loads(bytes(file["prompts"]["data"]).decode())[0] == {
        "prompt": "a red barn",
        "negative_prompt": "snow",
        "seed": 7,
        "height_px": 64,
        "width_px": 128,
        "guidance": 4.5,
    }
    block = read_with_safetensors(bytes(file["text"]["data"]))
    digests = np.frombuffer(bytes(block["digest"]["data"]), "S16")
    starts = np.frombuffer(bytes(block["starts"]["data"]), "<i8")
    tokens = np.frombuffer(bytes(block["tokens"]["data"]), "<f2").reshape(block["tokens"]["shape"])
    at = digests.tolist().index(hashlib.blake2b(b"snow", digest_size=16).digest())
    assert np.array_equal(tokens[starts[at] : starts[at + 1]], embedding("snow"))


def test_quantised_embeddings_are_read_as_a_stores_captions(tmp_path: Path) -> None:
    samples = samples_of({"train/64x64": 3})
    form = quantised("I8")
    store = form.make_store(tmp_path / "s", samples)
    text = samples[2].captions[0]
    spec = store.manifest.text.spec()
    caption = quantised_caption(spec, caption_digest(text), form.embed(text)["tokens"], form.embed(text))
    prompt = dataclasses.replace(FIRST, prompt=text, negative_prompt=text)
    own = read(store, encode_prompts(store.manifest, [prompt], [caption])).embedding(text)
    stored = store.read_caption(0, store.sample(samples[2].id)[1].caption_rows[0])
    assert list(own) == ["tokens", "pooled"]
    for name, values in stored.items():
        assert values.dtype == own[name].dtype
        assert np.array_equal(values, own[name])


def test_every_flipped_bit_is_found(store: Store, data: bytes) -> None:
    for bit in range(0, 8 * len(data), 8 * len(data) // 150 + 1):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            read(store, bytes(changed))
    for cut in (b"", data[:5], data[:-1], data + b"\0"):
        with pytest.raises(CorruptError):
            read(store, cut)


def test_damage_of_an_object_is_named_with_its_url(store: Store, data: bytes) -> None:
    url = "s3://bucket/a.store/prompts/default.safetensors"
    with pytest.raises(CorruptError, match=f"^{url}"):
        decode_prompts(store.manifest, data[:-1] + bytes([data[-1] ^ 1]), url)


def test_embeddings_of_other_encoders_are_refused_by_name(store: Store, data: bytes) -> None:
    encoders: dict[str, Any] = {**store.manifest.encoders, "text_encoder": {"width": 5, "weights_hash": "another"}}
    other = dataclasses.replace(store.manifest, encoders=encoders)
    with pytest.raises(FingerprintError, match=r"with encoders\.text_encoder\.weights_hash = None, the store has another"):
        decode_prompts(other, data, "prompts.safetensors")


WELL: dict[str, Any] = {"prompt": "snow", "negative_prompt": "", "seed": 0, "height_px": 8, "width_px": 8, "guidance": None}


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (b"[]", "expected a list of 1 to 256 prompts"),
        (b"{", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"\xff", "cannot be read"),
        ([{**WELL, "seed": -1}], r"prompt 1\.seed is -1"),
        ([WELL, {**WELL, "height_px": 0}], "prompt 2: the size is 0x8 px"),
        ([{**WELL, "guidance": float("nan")}], "guidance is nan"),
        ([{**WELL, "more": 1}], "unknown field 'more'"),
        ([{**WELL, "prompt": "another"}], "lacks the embedding of prompt 1"),
        ([{**WELL, "negative_prompt": "\ud800"}], "prompt 1"),
    ],
)
def test_what_has_right_checksums_is_checked_all_the_same(store: Store, listed: Any, said: str) -> None:
    text = listed if isinstance(listed, bytes) else json.dumps(listed).encode()
    block = encode_text_block(TEXT, [caption_of("snow"), caption_of("")], first_row=0)
    tensors = [("prompts", "U8", np.frombuffer(text, "u1")), ("text", "U8", np.frombuffer(block, "u1"))]
    metadata = {"format": PROMPTS_FORMAT, "text_encoder": store.manifest.encoders["text_encoder"]}
    with pytest.raises(CorruptError, match=said):
        read(store, encode_paged(tensors, metadata))
    with pytest.raises(StoreError):
        read(store, encode_paged(tensors[:1], metadata))
