"""Edit pairs and masks: each row has its own references, mask and conditioning, in every epoch, on any ranks, resumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bucketline.errors import FingerprintError, UsageError
from bucketline.loader import Batch, Loader, LoaderConfig
from bucketline.loader.collate.buffers import captions_of
from bucketline.loader.plan.order import Purpose, uniform_on_host
from bucketline.loader.prefetch.ahead import ColdDetector
from bucketline.store import LatentColumn, MaskColumn, RowColumn, Store, quantised_spec
from bucketline.store.change.repair import repair
from bucketline.store.format.block import sample_digest
from bucketline.store.format.text import dequantise, quantise
from bucketline.store.read.samples import write_sample
from bucketline.store.remote.objects import ObjectFolder
from bucketline.store.sync.push_pull import pull, push
from tests.kit import (
    HEIGHT,
    PAIR_ROWS,
    PAIRS,
    SEEING,
    TOKEN_WIDTH,
    WIDTH,
    Form,
    Sample,
    embedding,
    expect_independently,
    faults,
    flip_row,
    loud_tokens,
    make_store,
    read_with_safetensors,
    samples_of,
)
from tests.loading import conditioning, expect_loaded

SIZES = {  # of each bucket's references, in latent positions
    "train/64x64x0x0x0x0x0x0": (),
    "train/64x96x64x64x0x0x0x0": ((8, 8),),
    "train/64x96x64x64x72x32x8x8": ((8, 8), (9, 4), (1, 1)),
    "train/64x64": (),
}


@cache
def samples() -> tuple[Sample, ...]:
    return tuple(SEEING.samples(PAIR_ROWS))


@pytest.fixture
def seeing(tmp_path: Path) -> Store:
    return SEEING.make_store(tmp_path / "s", samples()[:8], samples()[8:])


def expect_rows(
    batches: Iterable[Batch], form: Form, items: Sequence[Sample], stores: list[Store], config: LoaderConfig
) -> int:
    """Compare each row with its sample, read one by one; return how many rows there were."""
    by_digest, num_rows = {sample_digest(item.id): item for item in items}, 0
    for batch in batches:
        flipped = uniform_on_host(batch.keys.numpy(), Purpose.FLIP) < config.flip
        assert batch.flipped.tolist() == flipped.tolist()
        assert tuple(tuple(one.shape[2:]) for one in batch.references) == SIZES[batch.bucket]
        for scaled, one in zip(batch.scaled_references(), batch.references, strict=True):
            assert torch.equal(scaled, one.float() * 0.18215)
        for n, chosen in enumerate(captions_of(stores, batch, config.caption_dropout)):
            item = by_digest[batch.ids[n].numpy().tobytes()]
            assert item.id == chosen.id
            suffix = "/flipped" if flipped[n] else ""
            delivered: dict[str, torch.Tensor] = {"target": batch.latents}
            delivered |= {f"reference/{k}": one for k, one in enumerate(batch.references)}
            for role, one in delivered.items():
                assert one[n].numpy().tobytes() == item.columns[role + suffix].tobytes(), (item.id, role)
            if "mask" in item.columns:
                assert batch.mask is not None
                assert batch.mask[n].tolist() == (item.columns["mask" + suffix].astype("<f4") / np.float32(255)).tolist()
            own, is_image = conditioning(form, item, chosen.text)
            assert batch.tokens[n, : len(own)].numpy().tobytes() == own.tobytes()
            assert not batch.tokens[n, len(own) :].any()
            assert batch.token_mask[n].nonzero().flatten().tolist() == [*range(len(own))]
            if batch.image_tokens is not None:
                assert batch.image_tokens[n].nonzero().flatten().tolist() == np.flatnonzero(is_image).tolist()
            num_rows += 1
    return num_rows


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("more", [{}, {"pad_multiple": 4}, {"plain_reads": True, "verify": True}, {"pad_to": 30}])
def test_every_row_has_its_own_references_mask_and_conditioning_in_every_epoch(
    seeing: Store, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, cold: bool
) -> None:
    monkeypatch.setattr(ColdDetector, "is_cold", property(lambda _: cold))
    config = LoaderConfig(batch_size=2, epochs=3, caption_dropout=0.4, **more)
    with Loader(seeing, config) as loader:
        assert expect_rows(loader.forever(), SEEING, samples(), [seeing], config) == 48  # 15 rows, 3 times, and padding
        loader.set_epoch(0)
        lengths = {batch.tokens.shape[1] for batch in loader.forever()}
    longest = [max(len(conditioning(SEEING, item, text)[0]) for text in ("", *item.captions)) for item in samples()]
    assert max(lengths) >= max(longest)
    assert len(lengths) > 1 if more.get("pad_multiple") else lengths <= {30, max(lengths)}
    assert not more.get("pad_to") or lengths == {30}


def test_a_dropped_caption_leaves_the_images_and_takes_the_row_s_own_empty_caption(seeing: Store) -> None:
    for dropout in (0.0, 1.0):
        assert expect_loaded(seeing, SEEING, samples(), caption_dropout=dropout, verify=True) == 15


def test_two_ranks_and_a_resume_deliver_the_rows_of_one_process(seeing: Store) -> None:
    config = LoaderConfig(batch_size=2, epochs=2, caption_dropout=0.4, accumulation=2)

    def rows(batches: Iterable[Batch]) -> dict[int, tuple[Any, ...]]:
        return {
            int(batch.keys[n]): (*(one[n].tolist() for one in (batch.latents, *batch.references, batch.tokens)), batch.bucket)
            for batch in batches
            for n in range(len(batch.keys))
        }

    with Loader(seeing, replace(config, batch_size=4)) as loader:
        expected = rows(loader.forever())
    found = dict[int, tuple[Any, ...]]()
    for rank in range(2):
        with Loader(seeing, config, rank=rank, world_size=2, generation=2) as loader:
            begun = loader.forever()
            found |= rows(next(begun) for _ in range(4))
            with Loader(seeing, config, rank=rank, world_size=2, generation=2) as again:
                again.load_state_dict(loader.state_dict())
                found |= rows(again.forever())
    assert found == expected
    assert len(expected) > 30


def test_mirrored_rows_have_mirrored_references_and_masks(tmp_path: Path) -> None:
    items = PAIRS.samples(PAIR_ROWS)
    store = PAIRS.make_store(tmp_path / "s", items)
    config = LoaderConfig(batch_size=2, epochs=4, flip=0.5, verify=True)
    with Loader(store, config) as loader:
        assert expect_rows(loader.forever(), PAIRS, items, [store], config) >= 60


def test_pairs_are_read_beside_images_and_never_in_one_batch(tmp_path: Path) -> None:
    items, plain = PAIRS.samples(PAIR_ROWS, "p"), samples_of({"train/64x64": 7}, "i/")
    stores = [make_store(tmp_path / "i", plain), PAIRS.make_store(tmp_path / "p", items)]
    config = LoaderConfig(batch_size=2, epochs=2)
    for own in (stores, stores[::-1]):
        with Loader(own, config) as loader:
            batches = [*loader.forever()]
        assert expect_rows(batches, PAIRS, [*items, *plain], own, config) >= 44
        assert {bucket: bucket == "train/64x64" for bucket in SIZES} == {batch.bucket: batch.mask is None for batch in batches}


def test_rows_without_an_optional_mask_count_in_full(tmp_path: Path) -> None:
    form = Form(columns=[LatentColumn(channels=2), replace(MaskColumn(), optional=True)])
    items = [form.sample(f"{n}", "train/64x64", without=["mask"] if n % 2 else []) for n in range(4)]
    with Loader(form.make_store(tmp_path / "s", items), LoaderConfig(batch_size=4, window=0)) as loader:
        batch = next(loader.forever())
    assert batch.mask is not None
    for n, item in enumerate(items):
        assert batch.mask[n].tolist() == (item.columns["mask"] / np.float32(255) if n % 2 == 0 else np.ones((8, 8))).tolist()


def test_a_bucket_with_masks_and_without_is_refused_with_its_remedy(tmp_path: Path) -> None:
    plain = make_store(tmp_path / "i", samples_of({"train/64x64": 7}, "i/"))
    form = replace(PAIRS, columns=[PAIRS.columns[0], next(column for column in PAIRS.columns if column.role == "mask")])
    masked = form.make_store(tmp_path / "m", form.samples({"train/64x64": 7}))
    for own in ([plain, masked], [masked, plain]):
        with pytest.raises(FingerprintError, match=rf'{tmp_path}/i and .*/m .*train/64x64 have a mask only .*`mask = "whole"`'):
            Loader(own, LoaderConfig(batch_size=2))
    video = Form(columns=[RowColumn(role="target", dtype="F16", shape=(2, "frames", HEIGHT, WIDTH))], encoders=PAIRS.encoders)
    with pytest.raises(FingerprintError, match="columns"):
        Loader([plain, video.make_store(tmp_path / "v", video.samples({"train/3x64x64": 2}))], LoaderConfig(batch_size=2))


def test_text_that_sees_images_is_mixed_with_its_like_only_and_never_mirrored(seeing: Store, tmp_path: Path) -> None:
    other = PAIRS.make_store(tmp_path / "p", PAIRS.samples(PAIR_ROWS, "p"))
    with pytest.raises(FingerprintError, match="ragged"):
        Loader([seeing, other], LoaderConfig(batch_size=2))
    with pytest.raises(UsageError, match=r"flip is 0\.5, and the text of .*encoded with the images .* expected 0"):
        Loader(seeing, LoaderConfig(batch_size=2, flip=0.5))
    with pytest.raises(UsageError, match=r"'seen_images', which is a part of batch\.tokens; leave it out"):
        Loader(seeing, LoaderConfig(batch_size=2, ragged=("seen_images",)))
    with pytest.raises(UsageError, match=r"pad_to is 5, .* images and caption of .* have \d+ tokens together"):
        Loader(seeing, LoaderConfig(batch_size=2, pad_to=5))
    more = SEEING.make_store(tmp_path / "o", items := SEEING.samples(PAIR_ROWS, "o"))
    config = LoaderConfig(batch_size=2, epochs=1, caption_dropout=0.3)
    with Loader([seeing, more], config) as loader:
        assert expect_rows(loader.forever(), SEEING, [*samples(), *items], [seeing, more], config) >= 30


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_quantised_captions_are_joined_as_float16(tmp_path: Path, dtype: str) -> None:
    def embed(text: str) -> dict[str, NDArray[Any]]:
        return {"tokens": loud_tokens(text, TOKEN_WIDTH) if text else np.zeros((0, TOKEN_WIDTH), "<f4")}

    def delivered(text: str) -> dict[str, NDArray[Any]]:
        return {"tokens": dequantise(quantise(embed(text)["tokens"], dtype))}

    form = replace(SEEING, text=quantised_spec(dtype, TOKEN_WIDTH), embed=embed)
    store = form.make_store(tmp_path / "s", samples())
    for more in ({}, {"text": "stored"}):
        config = LoaderConfig(batch_size=3, epochs=1, caption_dropout=0.3, verify=True, **more)  # type: ignore[arg-type]
        with Loader(store, config) as loader:
            batches = list(loader)
        assert batches[0].tokens.dtype is torch.float16
        assert expect_rows(batches, replace(form, embed=delivered), samples(), [store], config) >= 15


def test_batches_by_pixels_and_by_positions_count_the_references(seeing: Store) -> None:
    for size, unit in (("batch_pixels", 64), ("batch_tokens", 1)):
        config = LoaderConfig(**{size: 200 * unit})  # type: ignore[arg-type]
        found = {bucket.name: config.rows_of(bucket) for bucket in seeing.buckets()}
        assert found == {  # 64, 96 + 64 and 96 + 64 + 36 + 1 positions
            "train/64x64x0x0x0x0x0x0": 3,
            "train/64x96x64x64x0x0x0x0": 1,
            "train/64x96x64x64x72x32x8x8": 1,
        }


def test_equal_captions_of_two_samples_are_each_sample_s_own(tmp_path: Path) -> None:
    items = [SEEING.sample(f"{n}", "train/64x64x0x0x0x0x0x0", captions=("a", "a cat", "")) for n in range(3)]
    store = SEEING.make_store(tmp_path / "s", items)
    assert store.shards[0].entry.groups["text"].rows == 1 + 3 * 2  # the empty caption is the shard's
    assert expect_loaded(store, SEEING, items) == 3
    assert faults(store) == ()


def test_a_store_is_pushed_pulled_and_repaired_with_its_pairs(seeing: Store, tmp_path: Path) -> None:
    place = ObjectFolder.open(f"file://{tmp_path}/bucket/s")
    push(seeing.path, place)
    pull(place, tmp_path / "again")
    expect_independently(tmp_path / "again", SEEING, samples())
    lost = flip_row(seeing, "train/64x96x64x64x72x32x8x8", 2, "reference/1")
    assert len(faults(seeing.path)) > 0
    repair(seeing.path)
    left = [item for item in samples() if item.id != lost]
    assert len(left) == 14
    expect_independently(seeing.path, SEEING, left)
    assert expect_loaded(Store.open(seeing.path), SEEING, left, verify=True) == 14


def test_the_empty_caption_of_text_that_sees_images_has_no_tokens(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"empty_caption has 1 tokens, expected none: .*'seen_empty'; leave empty_caption out"):
        replace(SEEING, embed=PAIRS.embed).writer(tmp_path / "s")
    groups = {**SEEING.groups, "seen_empty": replace(SEEING.groups["seen_empty"], optional=True)}
    with pytest.raises(UsageError, match=r"'seen_empty' is of a store whose text sees the images; expected an entry of"):
        replace(SEEING, groups=groups).writer(tmp_path / "s")


@pytest.mark.parametrize("pad_multiple", [None, 4])
def test_a_store_that_sees_images_may_have_none(tmp_path: Path, pad_multiple: int | None) -> None:
    items = [SEEING.sample(f"{n}", "train/64x64x0x0x0x0x0x0", captions=("a",) if n else ()) for n in range(4)]
    with SEEING.writer(tmp_path / "s") as writer:
        for item in items:
            none = {name: own[:0] for name, own in SEEING.entries(item)["seen_images"].items()}  # type: ignore[union-attr]
            entries = {"seen_images": none, "seen_empty": embedding(item.id)}
            writer.add(item.id, "train", item.columns, {text: SEEING.caption(text) for text in item.captions}, entries)
    config = LoaderConfig(batch_size=4, caption_dropout=0.5, pad_multiple=pad_multiple, epochs=3, verify=True)
    store = Store.open(tmp_path / "s")
    with Loader(store, config) as loader:
        for batch in loader.forever():
            assert batch.image_tokens is not None
            assert not batch.image_tokens.any()
            for n, chosen in enumerate(captions_of([store], batch, config.caption_dropout)):
                own = embedding(chosen.text or chosen.id)
                assert batch.tokens[n, : len(own)].numpy().tobytes() == own.tobytes()
                assert int(batch.token_mask[n].sum()) == len(own)
            assert batch.tokens.shape[1] == (pad_multiple or 2)


def test_a_pair_leaves_the_store_as_a_file_of_its_arrays(seeing: Store, tmp_path: Path) -> None:
    item = samples()[-1]
    write_sample(seeing, item.id, tmp_path / "a.safetensors")
    found = read_with_safetensors((tmp_path / "a.safetensors").read_bytes())
    found = {name: {**own, "data": bytes(own["data"])} for name, own in found.items()}
    for role in ("reference/0", "reference/2", "reference/2/flipped", "mask"):
        assert found[role]["data"] == item.columns[role].tobytes()
    none = samples()[0]
    write_sample(seeing, none.id, tmp_path / "b.safetensors")
    assert read_with_safetensors((tmp_path / "b.safetensors").read_bytes())["reference/0"]["shape"] == [2, 0, 0]


def test_moments_are_drawn_and_references_are_not(tmp_path: Path) -> None:
    vae = {"scaling_factor": 0.5, "latents": "moments"}
    columns = (LatentColumn(channels=4), *(column for column in PAIRS.columns if column.role == "reference/0"))
    form = replace(PAIRS, columns=columns, encoders={"vae": vae})
    items = form.samples({"train/64x64x64x64": 4})
    with Loader(form.make_store(tmp_path / "s", items), LoaderConfig(batch_size=4)) as loader:
        batch = next(loader.forever())
    assert batch.scaled().shape == (4, 2, 8, 8)
    assert torch.equal(batch.scaled_references()[0], batch.references[0].float() * 0.5)
    assert batch.mask is None
