"""A batch has the columns that were requested, each row's own or all of its mirror image's, and says which rows lack one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bucketline.errors import CorruptError, UsageError
from bucketline.loader import Batch, Loader, LoaderConfig
from bucketline.loader.collate.window import Window
from bucketline.loader.plan.order import Purpose, uniform_on_host
from bucketline.loader.prefetch.ahead import ColdDetector
from bucketline.store import RowColumn, Store
from bucketline.store.format.block import sample_digest
from bucketline.torch_dtypes import as_stored
from tests.kit import ANY, FRAMES, HEIGHT, WIDTH, Form, Sample, flip_bit
from tests.serving import serving_here

ROWS = {"train/64x64": 23, "train/64x96": 10, "val/64x64": 3}
ASKED = ("target", "control/depth", "features/dino", "audio")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return ANY.make_store(tmp_path_factory.mktemp("requested") / "s", ANY.samples(ROWS), shard_bytes=60_000)


def check(batches: Iterable[Batch], items: list[Sample], config: LoaderConfig) -> int:
    by_digest = {sample_digest(item.id): item for item in items}
    num_rows = 0
    for batch in batches:
        assert tuple(batch.columns) == config.columns
        flipped = uniform_on_host(batch.keys.numpy(), Purpose.FLIP) < config.flip
        assert batch.flipped.tolist() == flipped.tolist()
        for n, digest in enumerate(batch.ids.numpy()):
            item = by_digest[digest.tobytes()]
            assert item.bucket == batch.bucket
            for role, values in batch.columns.items():
                stored = f"{role}/flipped" if flipped[n] and role != "audio" else role
                own = item.columns.get(stored)
                if role in batch.present:
                    assert bool(batch.present[role][n]) == (own is not None)
                expected = bytes(values[n].numel() * values.element_size()) if own is None else own.tobytes()
                assert as_stored(values[n].contiguous()).tobytes() == expected, (item.id, stored)
        num_rows += len(batch.ids)
    return num_rows


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_every_value_that_was_requested_is_what_was_put_in(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, cold: bool, verify: bool
) -> None:
    monkeypatch.setattr(ColdDetector, "is_cold", property(lambda _: cold))
    for plain_reads in (False, True):
        config = LoaderConfig(batch_size=4, epochs=2, columns=ASKED, verify=verify, plain_reads=plain_reads)
        with Loader(store, config) as loader:
            assert check(loader.forever(), ANY.samples(ROWS), config) == 68


def test_a_flipped_row_has_all_of_its_mirror_image(store: Store) -> None:
    config = LoaderConfig(batch_size=4, epochs=2, columns=("audio", "control/depth", "target"), flip=0.5, verify=True)
    with Loader(store, config) as loader:
        assert check(loader.forever(), ANY.samples(ROWS), config) == 68
        loader.set_epoch(0)
        present = torch.cat([batch.present["control/depth"] for batch in loader.forever()])
    assert 0 < int(present.sum()) < len(present)


def test_what_is_requested_of_a_service_is_what_was_put_in(store: Store, tmp_path: Path) -> None:
    config = LoaderConfig(batch_size=4, epochs=2, columns=("audio", "control/depth", "target"), flip=0.5)
    with serving_here(tmp_path, store.path) as served:
        for stores, where in ((store, served.socket), (None, served.tcp)):
            with Loader(stores, config, service=where) as loader:
                assert check(loader.forever(), ANY.samples(ROWS), config) == 68


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown role": (
        {"columns": ("control/pose",)},
        r"columns has 'control/pose', .* has \['audio', 'control/depth', 'features/dino', 'mask', 'target'\] in train/64x64",
    ),
    "a mirror image": ({"columns": ("target/flipped",)}, "columns has 'target/flipped'"),
    "a stored name": ({"columns": ("latent",)}, "columns has 'latent'"),
    "a role twice": ({"columns": ("target", "target")}, "expected each role once"),
    "a mask that has no mirror image": (
        {"columns": ("target", "mask"), "flip": 0.1},
        r"flip is 0\.1, and .* has no mask/flipped in train/64x64: its mask would not be that of a flipped row; expected 0, or",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_store_does_not_have_is_refused_by_name(case: str, store: Store) -> None:
    options, words = REFUSED[case]
    with pytest.raises(UsageError, match=words):
        Loader(store, LoaderConfig(batch_size=2, **options))


def test_only_what_was_requested_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    offsets = Window._offsets

    def noted(window: Window, column: str) -> Any:
        read.add(column)
        return offsets(window, column)

    monkeypatch.setattr(Window, "_offsets", noted)
    for columns, own in (
        (("audio",), {"audio"}),
        (("mask",), {"mask", "present/mask"}),
        (("target", "features/dino"), {"latent", "features/dino"}),
    ):
        read.clear()
        with Loader(store, LoaderConfig(batch_size=4, epochs=1, columns=columns)) as loader:
            for batch in loader.forever():
                assert tuple(batch.columns) == columns
        assert read == {"captions", "original_size", "crop", "id"} | own


def test_a_batch_without_a_target_says_so(store: Store) -> None:
    with Loader(store, LoaderConfig(batch_size=4, columns=("mask",))) as loader:
        batch = next(loader.forever())
    assert batch.columns["mask"].dtype is torch.uint8
    with pytest.raises(UsageError, match=r"has the columns \['mask'\], no target; request it in LoaderConfig.columns"):
        batch.latents.sum()


def test_a_state_resumes_with_other_columns_at_the_same_rows(store: Store) -> None:
    config = LoaderConfig(batch_size=4, columns=ASKED)
    with Loader(store, config) as loader:
        batches = loader.forever()
        next(batches)
        state = loader.state_dict()
        expected = next(batches).ids.clone()
    with Loader(store, replace(config, columns=("target",))) as loader:
        loader.load_state_dict(state)
        assert torch.equal(next(loader.forever()).ids, expected)


def test_a_damaged_value_is_found_whether_it_is_requested_or_not(tmp_path: Path) -> None:
    items = ANY.samples({"train/64x64": 6})
    store = ANY.make_store(tmp_path / "s", items)
    located = store.bucket("train/64x64").locate(np.arange(6))
    spec = store.manifest.specs["train/64x64"]
    flip_bit(store.shards[0].paths.lmdb, 8 * int(located.offsets(spec, "mask")[3]))
    for columns in (("target",), ("mask",)):
        config = LoaderConfig(batch_size=6, epochs=1, columns=columns, verify=True)
        with Loader(store, config) as loader, pytest.raises(CorruptError, match="'train/64x64/3'"):
            next(loader.forever())


def test_the_budgets_count_frames_and_lengths(tmp_path: Path) -> None:
    form = Form(columns=[RowColumn(role="target", dtype="F16", shape=(2, FRAMES, HEIGHT, WIDTH))])
    items = form.samples({"train/9x16x16": 6, "train/1x16x16": 6})
    store = form.make_store(tmp_path / "s", items)
    budgets = {"batch_pixels": LoaderConfig(batch_pixels=9 * 16 * 16), "batch_tokens": LoaderConfig(batch_tokens=12)}
    sizes = {
        size: {name: config.rows_of(store.bucket(name)) for name in ("train/9x16x16", "train/1x16x16")}
        for size, config in budgets.items()
    }
    assert sizes["batch_pixels"] == {"train/9x16x16": 1, "train/1x16x16": 9}
    assert sizes["batch_tokens"] == {"train/9x16x16": 1, "train/1x16x16": 3}


def test_rows_without_a_size_are_flipped_without_a_crop(tmp_path: Path) -> None:
    form = Form(columns=[RowColumn(role=role, dtype="F32", shape=(2, "length")) for role in ("target", "target/flipped")])
    items = form.samples({"train/5": 8})
    store = form.make_store(tmp_path / "s", items)
    config = LoaderConfig(batch_size=4, epochs=1, columns=("target",), flip=0.5)
    with Loader(store, config) as loader:
        batches = [batch for batch in loader.forever() if check([batch], items, config)]
    assert not any(batch.crop.any() or batch.target_size.any() for batch in batches)
