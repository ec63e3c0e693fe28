"""Stores of quantised text, and files of prompts: what was written is read back, in the form in which it is delivered."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from bucketline.errors import CorruptError, FingerprintError, StoreError, UsageError
from bucketline.store import Store
from bucketline.store.change.commit import drop
from bucketline.store.change.compact import compact
from bucketline.store.change.merge import merge
from bucketline.store.change.repair import repair
from bucketline.store.export.exporter import ExportRequest, export, open_export
from bucketline.store.format.block import caption_digest, sample_digest
from bucketline.store.format.manifest import parse_manifest
from bucketline.store.format.text import TextError, dequantise, encode_text_block, measured_error, quantise, quantised_caption
from bucketline.store.prompt_file import PROMPTS_FORMAT, Prompt, PromptSet, decode_prompts, encode_prompts
from bucketline.store.read.samples import Selection, info
from bucketline.store.shard.sidecar import encode_sidecar
from bucketline.store.verify.verify import verify
from tests.commands import call
from tests.kit import (
    ENCODERS,
    TEXT,
    caption_of,
    embedding,
    faults,
    loud_tokens,
    quantised,
    read_with_safetensors,
    samples_of,
    store_writer,
)

DTYPES = ("I8", "F8_E4M3")
SAMPLES = samples_of({"train/64x64": 24, "train/64x128": 7})
WIDTH = 72
I8 = quantised("I8")


@pytest.fixture(scope="module", params=DTYPES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("quantised") / request.param
    return quantised(request.param).make_store(path, SAMPLES[:20], SAMPLES[20:])


@pytest.fixture
def own(made: Store, tmp_path: Path) -> Store:
    shutil.copytree(made.path, tmp_path / "store")
    return Store.open(tmp_path / "store")


def tokens_of(text: str) -> NDArray[Any]:
    return I8.embed(text)["tokens"]


def pooled_of(text: str) -> NDArray[Any]:
    return I8.embed(text)["pooled"]


def delivered(dtype: str, text: str) -> NDArray[np.float16]:
    return dequantise(quantise(tokens_of(text), dtype))


def assert_captions(own: Store, ids: set[str] | None = None) -> None:
    dtype = own.text.tokens[0].dtype
    for sample in SAMPLES:
        if ids is not None and sample.id not in ids:
            continue
        shard, record = own.sample(sample.id)
        for text, row in zip(sample.captions or ("",), record.caption_rows, strict=True):
            found = own.read_caption(own.shards.index(shard), row)
            assert sorted(found) == ["pooled", "tokens"]
            assert found["tokens"].tobytes() == delivered(dtype, text).tobytes()
            assert found["tokens"].shape == (len(text.split()) + 1, WIDTH)
            assert found["pooled"].tobytes() == pooled_of(text).tobytes()


def test_every_caption_is_read_as_it_is_delivered(made: Store) -> None:
    assert_captions(made)
    assert made.text == quantised(made.text.tokens[0].dtype).text
    assert not faults(made)
    document = json.loads((made.path / "manifest.json").read_bytes())
    assert sorted(document["text"]["tokens"]) == ["tokens", "tokens_scale"]


def test_the_error_of_all_captions_is_in_the_manifest_and_in_store_info(made: Store) -> None:
    dtype = made.text.tokens[0].dtype
    parts = (SAMPLES[:20], SAMPLES[20:])  # of each of its shards
    texts = [text for part in parts for text in sorted({text for sample in part for text in sample.captions} | {""})]
    errors = np.array([measured_error(tokens_of(text), delivered(dtype, text)) for text in texts])
    first = made.manifest.text_error
    assert first is not None
    assert first.captions == len(texts)
    assert first.relative_max == pytest.approx(errors[:, 0].max(), rel=1e-5)
    assert first.cosine_min == pytest.approx(errors[:, 1].min(), rel=1e-5)
    assert first.channel_mean == pytest.approx(errors[:, 2].mean(), rel=1e-5)
    report = info(made)
    num_captions = sum(shard.groups["text"].rows for shard in made.manifest.shards)
    assert report["text_error"]["captions"] == num_captions
    assert report["text"]["tokens"] == {"dtype": dtype, "shape": [WIDTH]}
    shown = call("store", "info", made.path).done()
    assert f"error of the quantised text, {num_captions} captions: relative " in shown.out
    assert json.loads(call("store", "info", made.path, "--json").out)["text_error"] == report["text_error"]


def test_dropped_rows_are_compacted_away_and_the_error_stays_that_of_all_that_was_quantised(own: Store) -> None:
    before = info(own)["text_error"]
    gone = [sample.id for sample in SAMPLES[2:18]]
    drop(own.path, gone)
    compact(own.path, shard_bytes=1 << 30)
    after = Store.open(own.path)
    assert len(after.shards) == 1
    assert_captions(after, {sample.id for sample in SAMPLES} - set(gone))
    assert info(after)["text_error"] == before
    assert not verify(after, lambda _: None, shards_only=True).corrupt


def test_a_shard_that_a_killed_writer_left_is_adopted_with_its_error(tmp_path: Path) -> None:
    whole = I8.make_store(tmp_path / "whole", SAMPLES[:5])
    killed = I8.writer(tmp_path / "killed")
    with suppress(KeyboardInterrupt), killed:
        I8.add(killed, SAMPLES[:5], commit_every=5)
        raise KeyboardInterrupt
    assert not Store.open(tmp_path / "killed").manifest.shards
    with I8.writer(tmp_path / "killed"):
        pass
    adopted = Store.open(tmp_path / "killed")
    assert info(adopted)["text_error"] == info(whole)["text_error"]
    assert info(whole)["text_error"] is not None


def test_merged_stores_keep_columns_and_error(made: Store, tmp_path: Path) -> None:
    dtype = made.text.tokens[0].dtype
    more = samples_of({"train/64x64": 3}, "more/")
    quantised(dtype).make_store(tmp_path / "b", more)
    merge(tmp_path / "out", [made.path, tmp_path / "b"])
    merged = Store.open(tmp_path / "out")
    assert len(merged.shards) == 3
    assert_captions(merged)
    parts = [made.manifest.text_error, Store.open(tmp_path / "b").manifest.text_error]
    assert merged.manifest.text_error == TextError.joined(parts)


def test_stores_of_other_text_are_not_merged_or_continued_and_the_error_says_how_to_pack(made: Store, tmp_path: Path) -> None:
    dtype = made.manifest.text.tokens["tokens"].dtype
    other = next(one for one in DTYPES if one != dtype)
    with pytest.raises(FingerprintError, match="stored_dtype"), quantised(other).writer(made.path):
        pass
    encoders = {**ENCODERS, "text_encoder": {**ENCODERS["text_encoder"], "width": WIDTH, "stored_dtype": "F16"}}
    with store_writer(tmp_path / "F16", encoders=encoders), quantised(other).writer(tmp_path / other):
        pass
    for theirs in ("F16", other):
        advice = "pack one of the sources again with the other's"
        with pytest.raises(FingerprintError, match=rf"stored_dtype = {dtype}, .* with {theirs}; .* {advice}"):
            merge(tmp_path / "out", [made.path, tmp_path / theirs])


def test_a_damaged_scale_is_found_and_repaired(own: Store) -> None:
    """A flipped bit of a scale would change 32 values or a token: the caption's checksum covers it."""
    text = next(text for sample in SAMPLES[:20] for text in sample.captions)
    scale = quantise(tokens_of(text), own.text.tokens[0].dtype)["tokens_scale"].tobytes()
    path = own.shards[0].paths.lmdb
    data = path.read_bytes()
    at = data.index(scale)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert any("caption" in str(fault) for fault in faults(own))
    repair(own.path)
    after = Store.open(own.path)
    users = {sample.id for sample in SAMPLES[:20] if text in sample.captions}
    kept = {sample.id for sample in SAMPLES} - users
    assert all(after.find_digest(sample_digest(sample_id)) is None for sample_id in users)
    assert_captions(after, kept)
    assert not verify(after, lambda _: None, shards_only=True).corrupt


@pytest.mark.parametrize("kind", ["meta"])
def test_lost_sidecars_are_rebuilt_to_the_same_bytes(own: Store, kind: str) -> None:
    path = own.path / f"shards/g0.{kind}"
    before = path.read_bytes()
    path.unlink()
    repair(own.path)
    assert path.read_bytes() == before


def test_exported_tokens_are_f16_and_have_no_scales(made: Store, tmp_path: Path) -> None:
    exporter = open_export(made, ExportRequest(output=tmp_path / "out", format="safetensors", selection=Selection()))
    export(exporter, lambda: None)
    lines = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    dtype = made.text.tokens[0].dtype
    for line in lines[:8]:
        file = load_file(tmp_path / "out" / line["file"])
        for n, text in enumerate(line["captions"] or [""]):
            assert file[f"caption.{n}.tokens"].dtype == np.float16
            assert np.array_equal(file[f"caption.{n}.tokens"], delivered(dtype, text))
        assert not any("scale" in name or "error" in name for name in file)


def test_a_writer_takes_tokens_in_16_or_32_bits_or_quantised(tmp_path: Path) -> None:
    columns = {**quantise(tokens_of("a"), "I8"), "pooled": pooled_of("a")}
    latent = {"latent": SAMPLES[0].latent}
    with I8.writer(tmp_path) as writer:
        writer.add("1", "train/64x64", latent, {"a": columns})
        writer.add("2", "train/64x64", latent, {"b": {"tokens": tokens_of("b").astype("<f2"), "pooled": pooled_of("b")}})
        refused: tuple[tuple[dict[str, NDArray[Any]], str], ...] = (
            ({"tokens": tokens_of("c") * np.nan, "pooled": pooled_of("c")}, "NaN"),
            ({"tokens": tokens_of("c") * 1e9, "pooled": pooled_of("c")}, "beyond ±65504"),
            ({"tokens": loud_tokens("c", 40), "pooled": pooled_of("c")}, r"tokens to be quantised are F16 or F32 \[T, 72\]"),
            ({"tokens": tokens_of("c").astype("<i1"), "pooled": pooled_of("c")}, "tokens to be quantised are F16 or F32"),
            ({"tokens": tokens_of("c")}, "expected .'pooled', 'tokens'."),
        )
        for wrong, message in refused:
            with pytest.raises(UsageError, match=message):
                writer.add("3", "train/64x64", latent, {"c": wrong})
    own = Store.open(tmp_path)
    found = [own.read_caption(0, row)["tokens"] for row in (1, 2)]
    assert found[0].tobytes() == delivered("I8", "a").tobytes()
    assert found[1].tobytes() == dequantise(quantise(tokens_of("b").astype("<f2").astype("<f4"), "I8")).tobytes()


def test_an_impossible_error_is_refused(made: Store) -> None:
    document = json.loads((made.path / "manifest.json").read_bytes())
    document["text_error"] = {**document["text_error"], "relative_max": float("nan")}
    with pytest.raises(CorruptError, match="have the cosines"):
        parse_manifest(json.dumps(document).encode(), "m")


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
    assert set(file) == {"checksum", "prompts", "text"}
    assert json.loads(bytes(file["prompts"]["data"]).decode())[0] == dataclasses.asdict(FIRST)
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
        with pytest.raises(CorruptError, match=r"^prompts\.safetensors"):
            read(store, cut)


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
        read(store, encode_sidecar(tensors, metadata))
    with pytest.raises(StoreError):
        read(store, encode_sidecar(tensors[:1], metadata))
