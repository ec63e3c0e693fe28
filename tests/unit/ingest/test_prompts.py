"""`ingest prompts`: a file is what the store's own encoders make of a file's lines, and other encoders make none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bucketline.store import Store
from bucketline.store.prompt_file import PromptSet, decode_prompts
from tests.commands import Ran, call
from tests.kit import add_samples, empty_store, samples_of, store_writer, untouched
from tests.models import pack, write_images, write_model
from tests.object_storage import S3Bucket


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Store]:
    folder = tmp_path_factory.mktemp("prompts")
    write_images(folder / "photos", 6)
    for dtype in ("F16", "I8"):
        pack(folder / "photos", folder / dtype, model, "--text-dtype", dtype, "--max-tokens", 10, "--val-fraction", 0).done()
    return {dtype: Store.open(folder / dtype) for dtype in ("F16", "I8")}


@pytest.fixture
def packed(stores: dict[str, Store]) -> Store:
    return stores["F16"]


def prompts(tmp_path: Path, store: Path | str, model: Path, text: str, *more: object, name: str = "p.txt") -> Ran:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return call("ingest", "prompts", tmp_path / name, store, "--model", model, *more)


def read(store: Store, path: Path) -> PromptSet:
    return decode_prompts(store.manifest, path.read_bytes(), str(path))


@pytest.mark.parametrize("dtype", ["F16", "I8"])
def test_a_prompt_has_its_captions_embedding(dtype: str, stores: dict[str, Store], model: Path, tmp_path: Path) -> None:
    packed = stores[dtype]
    record = next(record for _, record in map(packed.sample, ("a/002.png", "b/003.png")) if record.captions)
    stored = packed.read_caption(0, record.caption_rows[0])
    ran = prompts(tmp_path, packed.path, model, f"\ufeff{record.captions[0]}\r\n\n  the cat  \nthe cat\n").done()
    assert ran.out.startswith(f"{tmp_path / 'p.safetensors'}: 3 prompts, ")
    found = read(packed, tmp_path / "p.safetensors")
    own = found.embedding(record.captions[0])
    assert own.keys() == stored.keys()
    assert all(np.array_equal(own[name], stored[name]) for name in stored)
    assert np.array_equal(found.embedding("")["tokens"], packed.read_caption(0, 0)["tokens"])
    rows = {bucket.num_rows: bucket for bucket in packed.buckets("train")}
    most = rows[max(rows)]
    assert [
        (one.prompt, one.negative_prompt, one.seed, one.height_px, one.width_px, one.guidance) for one in found.prompts
    ] == [
        (record.captions[0], "", 0, most.height_px, most.width_px, None),
        ("the cat", "", 0, most.height_px, most.width_px, None),
        ("the cat", "", 1, most.height_px, most.width_px, None),
    ]


def test_a_file_is_replaced_and_the_store_stays_as_it_is(packed: Store, model: Path, tmp_path: Path) -> None:
    with untouched(packed.path):
        prompts(tmp_path, packed.path, model, "the cat").done()
        line = {"prompt": "red", "negative_prompt": "blue house", "seed": 9, "height": 32, "width": 16, "guidance": 2}
        lines = "\n".join(map(json.dumps, (line, {"prompt": "", "seed": None})))
        ran = prompts(tmp_path, packed.path, model, lines, "--json", "--size", "8x24", name="p.jsonl").done()
        assert (ran.json["file"], ran.json["prompts"], ran.json["cut"]) == (str(tmp_path / "p.safetensors"), 2, [])
        first, second = read(packed, tmp_path / "p.safetensors").prompts
        assert (first.prompt, first.negative_prompt, first.seed, first.guidance) == ("red", "blue house", 9, 2.0)
        assert (first.height_px, first.width_px, second.height_px, second.width_px) == (32, 16, 8, 24)
        long = tmp_path / "long.safetensors"
        assert (
            prompts(tmp_path, packed.path, model, "a " * 30, "-o", long).out.count(
                "1 text longer than the text encoder takes, and cut: "
            )
            == 1
        )
        assert len(read(packed, long).embedding(("a " * 30).strip())["tokens"]) == 10


def test_other_encoders_are_refused_by_name(packed: Store, tmp_path: Path) -> None:
    with untouched(packed.path):
        other = write_model(tmp_path / "other", seed=1)
        prompts(tmp_path, packed.path, other, "the cat").fails(
            f"{other} has encoders.text_encoder.weights_hash = ", "name the model that the store was packed with"
        )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.txt", "\n \n", "has no prompts"),
        ("p.txt", "a\n" * 257, "line 257: at most 256 prompts"),
        ("p.jsonl", '{"prompt": "a"}\na cat', "line 2 is not JSON"),
        ("p.jsonl", '["a"]', "line 1 is .*expected an object with a prompt"),
        ("p.jsonl", '{"prompt": "a", "sed": 1}', "line 1 has the field 'sed'"),
        ("p.jsonl", '{"prompt": "a", "seed": true}', "line 1: seed is True, expected a number"),
        ("p.jsonl", '{"prompt": 3}', "line 1: prompt is 3, expected text"),
        ("p.jsonl", '{"prompt": "a", "seed": -3}', "line 1: the seed is -3"),
        ("p.jsonl", '{"prompt": "a", "height": 16}', "line 1 needs a prompt, and either height and width or neither"),
        ("p.jsonl", '{"prompt": "a", "height": 16, "width": 17}', "line 1: the size is 16x17 px, .*multiples of 2 px"),
        ("p.jsonl", '{"prompt": "a", "guidance": NaN}', "line 1: the guidance is nan"),
        ("p.jsonl", '{"prompt": "\\ud800"}', "line 1: .*surrogates not allowed"),
    ],
)
def test_a_line_that_cannot_be_is_named(packed: Store, model: Path, tmp_path: Path, name: str, text: str, said: str) -> None:
    with untouched(packed.path):
        ran = prompts(tmp_path, packed.path, model, text, name=name)
        assert ran.code == 1
        assert re.search(said, ran.err), ran.err


def test_a_store_without_text_or_images_takes_no_prompts(model: Path, tmp_path: Path) -> None:
    with store_writer(tmp_path / "none.store", encoders={"vae": {}}) as writer:
        add_samples(writer, samples_of({"train/64x64": 1}))
    prompts(tmp_path, tmp_path / "none.store", model, "the cat").fails("none.store has no text embeddings", code=2)
    with store_writer(tmp_path / "edit.store", encoders={"vae": {}, "text_encoder": {"family": "qwenimage_edit"}}) as writer:
        add_samples(writer, samples_of({"train/64x64": 1}))
    wanted = "QwenImageEditPipeline, which draws from a reference image, and a prompt has none; leave prompts out"
    prompts(tmp_path, tmp_path / "edit.store", model, "the cat").fails(wanted, code=2)
    empty_store(tmp_path / "empty.store")
    prompts(tmp_path, tmp_path / "empty.store", model, "the cat").fails("empty.store has no images", code=2)


def test_a_store_in_a_bucket(packed: Store, model: Path, s3: S3Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    url = s3.url("photos.store")
    assert call("store", "push", packed.path, url).code == 0
    prompts(tmp_path, url, model, "the cat\na red house").done()
    assert [one.prompt for one in read(packed, tmp_path / "p.safetensors").prompts] == ["the cat", "a red house"]
