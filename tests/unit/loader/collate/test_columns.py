"""The columns of rows: every column that a store can have, drawn by the rows' keys, the same on any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bucketline.errors import CorruptError, StateError, StoreError, UsageError
from bucketline.ingest.images.crop import bucket_placement, parse_grid
from bucketline.loader import Batch, LatentKind, Loader, LoaderConfig
from bucketline.loader.collate.buffers import EMPTY, choose_captions, mirrored_left
from bucketline.loader.collate.window import CopyPlanner, PendingBatch, Window
from bucketline.loader.plan.order import Purpose, keys_of_rows, uniform_on_host
from bucketline.loader.prefetch.ahead import ColdDetector
from bucketline.store import LatentColumn, Store, StoreWriter, new_record
from tests.conditioned import NUM_CLASSES, Form, conditioned_store, pooled_of, tokens_of
from tests.kit import Sample, rewrite_manifest

FORMS = {
    "F16": Form(),
    "F32 of full captions": Form(dtype="F32", length=7),
    "BF16 moments": Form(dtype="BF16", latents="moments"),
    "large": Form(large=True),
    "classes": Form(classes=True, pooled=False),
    "I8": Form(quantised="I8"),
    "F8 of full captions": Form(quantised="F8_E4M3", length=7, pooled=False),
    "plain": Form(flip=False, pooled=False, latents=None),
}
Made = tuple[Store, dict[bytes, Sample], Form]


@pytest.fixture(scope="module", params=FORMS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    form = FORMS[request.param]
    return (*conditioned_store(tmp_path_factory.mktemp("made") / "s", form), form)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store of one kind, for what does not depend on it."""
    return conditioned_store(tmp_path_factory.mktemp("flat") / "s", Form())[0]


def read(store: Store, config: LoaderConfig, rank: int = 0, world_size: int = 1) -> list[Batch]:
    with Loader(store, config, rank=rank, world_size=world_size) as loader:
        return list(loader.forever())


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array.view("<u2") if tensor.dtype is torch.bfloat16 else array


def check(batches: Sequence[Batch], rows: dict[bytes, Sample], form: Form, config: LoaderConfig) -> None:
    for batch in batches:
        keys = batch.keys.numpy()
        flipped = uniform_on_host(keys, Purpose.FLIP) < config.flip
        assert batch.flipped.tolist() == flipped.tolist()
        for n in range(len(keys)):
            row = rows[batch.ids[n].numpy().tobytes()]
            assert row.record.bucket == batch.bucket
            own = row.columns["target/flipped" if flipped[n] else "target"]
            assert np.array_equal(bits(batch.latents[n]), own)
            top, left, height, width = row.record.crop
            if flipped[n]:
                left = row.record.resized[1] - left - width
            assert batch.crop[n].tolist() == [top, left]
            assert batch.original_size[n].tolist() == list(row.record.original_size)
            assert batch.target_size[n].tolist() == [height, width]
            texts = row.record.captions
            chosen = int(choose_captions(np.array([len(texts)]), keys[n : n + 1], config.caption_dropout)[0])
            text = "" if chosen == EMPTY else texts[chosen]
            expected = tokens_of(form, text)
            assert batch.token_mask[n].tolist() == [k < len(expected) for k in range(batch.tokens.shape[1])]
            tokens = bits(batch.tokens[n])
            assert np.array_equal(tokens[: len(expected)], expected)
            assert not tokens[len(expected) :].any()
            if form.text.delivered.fixed:
                assert batch.pooled is not None
                assert np.array_equal(bits(batch.pooled[n]), pooled_of(form, text))
            if form.classes:
                assert batch.class_labels is not None
                assert int(batch.class_labels[n]) == (int(text) if text else NUM_CLASSES)


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_every_column_of_every_row_is_what_was_put_in(
    made: Made, monkeypatch: pytest.MonkeyPatch, *, cold: bool, verify: bool
) -> None:
    monkeypatch.setattr(ColdDetector, "is_cold", property(lambda _: cold))
    store, rows, form = made
    config = LoaderConfig(batch_size=3, epochs=3, seed=4, caption_dropout=0.3, flip=0.5 if form.flip else 0.0, verify=verify)
    batches = read(store, config)
    check(batches, rows, form, config)
    assert len({batch.bucket for batch in batches}) == 3
    for batch in batches:
        assert batch.latent_kind is LatentKind(form.latents or "mode")
        assert (batch.pooled is not None) == bool(form.text.delivered.fixed)
        assert (batch.class_labels is not None) == form.classes
        assert batch.tokens.shape[1] == store.max_tokens
    if form.flip:
        assert {bool(one) for batch in batches for one in batch.flipped} == {True, False}


@pytest.mark.parametrize("pad_multiple", [None, 2])
def test_two_ranks_draw_what_one_draws(made: Made, pad_multiple: int | None) -> None:
    store, _, form = made
    if form.classes and pad_multiple:
        with pytest.raises(UsageError, match=r"pad_multiple is 2, and .* has classes, not captions; leave it out"):
            Loader(store, LoaderConfig(batch_size=1, pad_multiple=2))
        return
    own = {"epochs": 2, "seed": 9, "caption_dropout": 0.4, "flip": 0.5 if form.flip else 0.0, "pad_multiple": pad_multiple}
    alone = read(store, LoaderConfig(batch_size=2, accumulation=2, **own))  # type: ignore[arg-type]
    ranks = [read(store, LoaderConfig(batch_size=2, **own), rank, 2) for rank in range(2)]  # type: ignore[arg-type]
    assert len(alone) == 2 * len(ranks[0]) > 0
    for n, batch in enumerate(alone):
        other = ranks[n % 2][n // 2]
        for name, tensor in batch.by_name().items():
            assert torch.equal(tensor, other.by_name()[name]), name


def test_captions_are_padded_to_a_given_length_and_never_cut(flat: Store) -> None:
    longest = flat.max_tokens
    with pytest.raises(UsageError, match=rf"pad_to is 2, and the longest caption of .* has {longest} tokens, .*--max-tokens 2"):
        Loader(flat, LoaderConfig(batch_size=3, pad_to=2))
    for length in (longest, 11):
        for batch in read(flat, LoaderConfig(batch_size=3, epochs=1, pad_to=length)):
            assert batch.tokens.shape[1] == batch.token_mask.shape[1] == length
            assert not batch.tokens[~batch.token_mask].any()


def test_captions_are_padded_to_a_multiple_of_the_batchs_longest(tmp_path: Path) -> None:
    form = Form()
    store, rows = conditioned_store(tmp_path / "s", form)
    for multiple in (1, 2, 3, 8):
        config = LoaderConfig(batch_size=2, epochs=2, caption_dropout=0.5, flip=0.5, pad_multiple=multiple)
        batches = read(store, config)
        check(batches, rows, form, config)
        for batch in batches:
            longest = int(batch.token_mask.sum(dim=1).max())
            assert batch.tokens.shape[1] == -(-longest // multiple) * multiple
        if multiple < 3:
            assert len({batch.tokens.shape[1] for batch in batches}) > 1


def test_a_cold_micro_batch_makes_a_window_of_its_own_once(flat: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ColdDetector, "is_cold", property(lambda _: True))
    alone: Counter[int] = Counter()
    begin = Window.__init__

    def counted(window: Window, planner: CopyPlanner, batches: Sequence[PendingBatch]) -> None:
        begin(window, planner, batches)
        if len(batches) == 1:
            alone[batches[0].step] += 1

    monkeypatch.setattr(Window, "__init__", counted)
    batches = read(flat, LoaderConfig(batch_size=2, flip=0.5, epochs=1))
    assert alone == dict.fromkeys((batch.step for batch in batches), 1)


def test_flipping_needs_a_store_with_mirror_images(made: Made) -> None:
    store, _, form = made
    if form.flip:
        assert all(bool(batch.flipped.all()) for batch in read(store, LoaderConfig(batch_size=2, epochs=1, flip=1.0)))
    else:
        with pytest.raises(UsageError, match=r"flip is 0.5, and .* has no latent_flipped in train/\d+x\d+; expected 0"):
            Loader(store, LoaderConfig(batch_size=2, flip=0.5))


def test_a_state_goes_on_only_with_the_same_flips(flat: Store) -> None:
    with Loader(flat, LoaderConfig(batch_size=2, flip=0.5)) as loader:
        state = loader.state_dict()
    with (
        Loader(flat, LoaderConfig(batch_size=2)) as loader,
        pytest.raises(StateError, match=r"the loader's flip was 0\.5 .* and is 0\.0 now"),
    ):
        loader.load_state_dict(state)


def test_latents_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    store, _ = conditioned_store(tmp_path / "s", Form(num_rows=3))
    rewrite_manifest(store.path, encoders={"vae": {"latents": "cumulants"}})
    with pytest.raises(StoreError, match=r"encoders\.vae\.latents 'cumulants', expected one of mode, sample, moments"):
        Loader(store.path, LoaderConfig(batch_size=1))


def test_a_crop_that_fits_no_resized_image_is_an_error_when_it_is_flipped(tmp_path: Path) -> None:
    """The record's `resized` is the rule's; a store of another rule would give wrong crops without a word."""
    made, _ = conditioned_store(tmp_path / "s", Form(num_rows=30))
    bucket = made.buckets()[0]
    at = bucket.locate(np.arange(bucket.num_rows)).offsets(bucket.spec, "crop")
    with made.shards[0].paths.lmdb.open("r+b") as file:
        for offset in at.tolist():
            file.seek(offset + 4)
            file.write((9999).to_bytes(4, "little"))
    config = LoaderConfig(batch_size=1, flip=1.0, epochs=1)
    with pytest.raises(CorruptError, match=rf"bucket {bucket.name}: shard g0: a crop at \[\d+, 9999\] .* is outside"):
        read(Store.open(made.path), config)
    assert read(Store.open(made.path), LoaderConfig(batch_size=1, epochs=1))


def test_mirrored_crops_are_those_of_the_records_over_many_images() -> None:
    random, grid = np.random.default_rng(0), parse_grid("64x64,64x128,128x64,192x64,1024x1024", step_px=64, align_px=8)
    placed = [
        bucket_placement(int(h), int(w), grid, draw=int(d))
        for h, w, d in zip(*random.integers(1, 9000, (2, 4000)), random.integers(0, 1 << 63, 4000), strict=True)
    ]
    left = mirrored_left(
        np.array([p.left for p in placed]),
        np.array([p.source for p in placed]),
        np.array([[p.bucket.height_px, p.bucket.width_px] for p in placed]),
    )
    assert left.tolist() == [p.resized[1] - p.left - p.bucket.width_px for p in placed]


def test_captions_flips_and_dropout_are_drawn_as_often_as_they_should_be_and_independently() -> None:
    num = 200_000
    keys = keys_of_rows(3, np.repeat(np.arange(num // 50), 50), np.tile(np.arange(50), num // 50))
    assert len(np.unique(keys)) == num
    choice = choose_captions(np.full(num, 5), keys, 0.0)
    counts = np.bincount(choice, minlength=5)
    assert ((counts - num / 5) ** 2 / (num / 5)).sum() < 18.5  # chi-squared of 4 degrees: 1 in 1000
    dropped = choose_captions(np.full(num, 5), keys, 0.1) == EMPTY
    flipped = uniform_on_host(keys, Purpose.FLIP) < 0.5
    assert abs(dropped.mean() - 0.1) < 4 * (0.09 / num) ** 0.5
    assert abs(flipped.mean() - 0.5) < 4 * (0.25 / num) ** 0.5
    timestep = uniform_on_host(keys, Purpose.TIMESTEP)
    found = np.corrcoef([choice, dropped, flipped, timestep])
    assert abs(found - np.eye(4)).max() < 4.5 / num**0.5
    table = np.histogram2d(flipped, choice, bins=[2, 5])[0]
    assert ((table - num / 10) ** 2 / (num / 10)).sum() < 30


def test_a_batch_moves_to_a_device_with_everything_that_it_has(made: Made) -> None:
    batch = read(made[0], LoaderConfig(batch_size=2, epochs=1))[0]
    assert batch.to("cpu") is batch
    moved = batch.to("meta")
    assert {tensor.device.type for tensor in moved.tensors()} == {"meta"}
    assert list(moved.by_name()) == list(batch.by_name())
    assert (moved.step, moved.bucket, moved.latent_kind) == (batch.step, batch.bucket, batch.latent_kind)


@pytest.mark.parametrize("cold", [True, False])
def test_a_caption_that_cannot_be_read_fails_its_own_batch_after_all_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, cold: bool
) -> None:
    """Batches are worked out many at a time; what one of them fails at must not reach the others."""
    monkeypatch.setattr(ColdDetector, "is_cold", property(lambda _: cold))
    made, rows = conditioned_store(tmp_path / "s", Form(pooled=False))
    config = LoaderConfig(batch_size=1, epochs=1, seed=6)
    expected = read(made, config)
    bad = 20
    row = rows[expected[bad].ids[0].numpy().tobytes()]
    assert not any(torch.equal(expected[bad].ids, batch.ids) for batch in expected[:bad])
    caption = made.sample(row.record.id)[1].caption_rows
    located = made.locate_entries(made.text, np.zeros(len(caption), dtype=np.int64), np.array(caption, dtype=np.int64))
    with made.shards[0].paths.lmdb.open("r+b") as file:
        for at in located.starts_offsets().tolist():
            file.seek(at)
            file.write((1 << 60).to_bytes(8, "little"))
    found: list[Batch] = []
    with (
        Loader(Store.open(made.path), config) as loader,
        pytest.raises(CorruptError, match=r"step \d+, bucket .* has the `starts` ") as failure,
    ):
        found.extend(loader)
    assert f"step {len(found)}," in str(failure.value)
    assert 0 < len(found) <= bad
    for batch, wanted in zip(found, expected, strict=False):
        assert all(torch.equal(tensor, wanted.by_name()[name]) for name, tensor in batch.by_name().items())


# Rows whose crop is unknown, as imported ones may be: delivered as unknown, mirrored or not.

BUCKET, SIZES = "train/64x96", ((128, 192), (0, 0), (80, 96))


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_an_unknown_crop_stays_unknown(tmp_path: Path, flip: float) -> None:
    latent = np.zeros((4, 8, 12), dtype="f2")
    columns = [LatentColumn(channels=4), LatentColumn(channels=4, name="latent_flipped")]
    with StoreWriter(
        tmp_path / "s", columns=columns, encoders={"vae": {"scaling_factor": 1.0, "latent_channels": 4}}
    ) as writer:
        for number, original in enumerate(SIZES):
            record = new_record(f"{number}.png", BUCKET)
            unknown = replace(record, original_size=original, crop=(-1, -1, 64, 96), crop_in_source=(-1, -1, -1, -1))
            writer.add_record(unknown, {"latent": latent, "latent_flipped": latent}, {})
        known = replace(new_record("known.png", BUCKET), original_size=(64, 100), resized=(64, 100), crop=(0, 1, 64, 96))
        writer.add_record(known, {"latent": latent, "latent_flipped": latent}, {})
    with Loader(Store.open(tmp_path / "s"), LoaderConfig(batch_size=4, epochs=1, flip=flip)) as loader:
        (batch,) = list(loader)
    crops = dict(zip(map(tuple, batch.original_size.tolist()), batch.crop.tolist(), strict=True))
    assert [crops[size] for size in SIZES] == [[-1, -1]] * 3
    assert crops[64, 100] == [0, 3 if flip else 1]
