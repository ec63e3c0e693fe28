"""An added column is delivered as if it had been written with the rows: by every way of reading, and checked likewise."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bucketline.errors import CorruptError, FingerprintError, UsageError
from bucketline.loader import Batch, Loader, LoaderConfig
from bucketline.store import RowColumn, Store, add_column, read_manifest
from bucketline.store.change.commit import drop
from tests.added_columns import mask_of
from tests.kit import HEIGHT, WIDTH, Form, add_samples, make_store, samples_of, store_writer
from tests.loading import loaders_of, rows_of
from tests.serving import serving_here

ROWS = {"train/64x64": 19, "train/64x96": 8, "val/64x96": 3}
MASKED = ("target", "mask")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    make_store(tmp_path / "s", samples_of(ROWS, "a/"), samples_of(ROWS, "b/"))
    drop(tmp_path / "s", ["a/train/64x64/3.png", "b/train/64x96/0.png"])
    add_column(tmp_path / "s", "mask", mask_of)
    return Store.open(tmp_path / "s")


def id_of(store: Store, digest: Any) -> str:
    found = store.find_digest(digest.tobytes())
    assert found is not None
    return found[1].id


def expect_masked(store: Store, batch: Batch) -> None:
    for digest, mask in zip(batch.ids.numpy(), batch.columns["mask"].numpy(), strict=True):
        assert np.array_equal(mask, mask_of(id_of(store, digest)))


WAYS: dict[str, dict[str, Any]] = {
    "a map": {},
    "plain reads": {"plain_reads": True},
    "verified": {"verify": True},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_every_way_of_reading_delivers_each_rows_own_value(options: dict[str, Any], store: Store) -> None:
    loaders = loaders_of(store, columns=MASKED, window=None, **options)
    found = rows_of(loaders)
    for own in found.values():
        for digest, mask in zip(own["ids"], own["columns.mask"], strict=True):
            assert np.array_equal(mask, mask_of(id_of(store, digest)))
    assert sum(len(own["ids"]) for own in found.values()) == 58
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("where", ["a service", "a network"])
def test_batches_from_another_process_are_those_of_this_one(where: str, store: Store, tmp_path: Path) -> None:
    config = LoaderConfig(batch_size=5, epochs=1, columns=MASKED, seed=3)
    with ExitStack() as opened:
        own = opened.enter_context(Loader(store, config))
        if where == "a network":
            found = opened.enter_context(serving_here(tmp_path, store.path))
            other = opened.enter_context(Loader(None, config, service=found.tcp))
        else:
            other = opened.enter_context(Loader(store.path, config, service="auto"))
        for mine, theirs in zip(own.forever(), other.forever(), strict=True):
            expect_masked(store, theirs)
            assert torch.equal(mine.columns["mask"], theirs.columns["mask"])
            assert torch.equal(mine.ids, theirs.ids)


def test_the_rest_of_a_batch_is_as_without_it(store: Store) -> None:
    with_it, without = (rows_of(loaders_of(store, columns=columns, window=None)) for columns in (MASKED, ("target",)))
    for bucket, own in without.items():
        assert all(np.array_equal(values, with_it[bucket][name]) for name, values in own.items())


def test_a_latent_of_the_mirror_image_that_is_added_lets_a_loader_flip(tmp_path: Path) -> None:
    form = Form(columns=[RowColumn(role="target", dtype="F16", shape=(2, HEIGHT, WIDTH), encoder="vae")])
    items = form.samples({"train/64x64": 17, "train/64x96": 5})
    latents = {item.id: item.columns["target"] for item in items}
    place = form.make_store(tmp_path / "s", items[:9], items[9:]).path
    with pytest.raises(UsageError, match="has no latent_flipped"):
        Loader(place, LoaderConfig(batch_size=4, flip=0.5))
    add_column(place, "target/flipped", lambda one: latents[one][..., ::-1])
    add_column(place, "mask", lambda one: latents[one][0])
    with pytest.raises(UsageError, match="has no mask/flipped"):
        Loader(place, LoaderConfig(batch_size=4, flip=0.5, columns=MASKED))
    add_column(place, "mask/flipped", lambda one: latents[one][0, :, ::-1])
    store = Store.open(place)
    found = rows_of(loaders_of(store, columns=MASKED, flip=0.5, verify=True))
    assert 0 < sum(int(own["flipped"].sum()) for own in found.values()) < len(items)
    for own in found.values():
        for digest, is_flipped, latent, mask in zip(
            own["ids"], own["flipped"], own["latents"], own["columns.mask"], strict=True
        ):
            expected = latents[id_of(store, digest)]
            assert np.array_equal(latent, expected[..., ::-1] if is_flipped else expected)
            assert np.array_equal(mask, latent[0])


def test_rows_that_lack_it_are_refused_only_if_it_is_requested(store: Store) -> None:
    with store_writer(store.path) as writer:
        add_samples(writer, samples_of({"train/64x64": 4}, "c/"))
    said = r"columns has 'mask': 4 of 41 rows of train/64x64 .* have no 'mask'.*`add_column` .*; or leave it out of columns"
    with pytest.raises(UsageError, match=said):
        Loader(store.path, LoaderConfig(batch_size=4))
    assert sum(len(own["ids"]) for own in rows_of(loaders_of(Store.open(store.path), columns=("target",))).values()) == 62
    Loader(store.path, LoaderConfig(batch_size=4, columns=MASKED, split="val")).close()  # all of its rows have one
    add_column(store.path, "mask", mask_of)
    with Loader(store.path, LoaderConfig(batch_size=4, columns=MASKED, verify=True)) as loader:
        expect_masked(Store.open(store.path), next(iter(loader)))


def test_damage_is_named_by_sample_and_column(store: Store) -> None:
    bucket = store.bucket("train/64x64")
    located = bucket.locate(np.arange(bucket.num_rows), ["mask"]).added["mask"]
    assert located.spec is not None
    at = int(located.offsets(located.spec, "mask")[7])
    file = store.path / "shards" / f"{read_manifest(store.path).shards[0].column_shard('mask').name}.lmdb"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    (name,) = bucket.sample_ids(np.array([7]))
    with pytest.raises(CorruptError, match=rf"sample '{name}'.*: the bytes of its mask do not match"):
        rows_of(loaders_of(Store.open(store.path), columns=MASKED, verify=True))
    rows_of(loaders_of(Store.open(store.path), columns=("target",), verify=True))


def test_a_mixture_reads_the_added_columns_of_its_stores(store: Store, tmp_path: Path) -> None:
    make_store(tmp_path / "o", samples_of({"train/64x64": 5, "train/96x64": 2}, "o/"))
    with pytest.raises(UsageError, match=r"5 of 42 rows of train/64x64 .* have no 'mask'"):
        Loader([store.path, tmp_path / "o"], LoaderConfig(batch_size=4, columns=MASKED))
    add_column(tmp_path / "o", "mask", mask_of)
    stores = [Store.open(store.path), Store.open(tmp_path / "o")]
    with Loader([store.path, tmp_path / "o"], LoaderConfig(batch_size=6, columns=MASKED, verify=True)) as loader:
        for _, batch in zip(range(12), loader, strict=False):
            for digest, mask in zip(batch.ids.numpy(), batch.columns["mask"].numpy(), strict=True):
                own = next(one for one in stores if one.find_digest(digest.tobytes()))
                assert np.array_equal(mask, mask_of(id_of(own, digest)))


def test_stores_with_it_in_two_forms_are_not_mixed(store: Store, tmp_path: Path) -> None:
    make_store(tmp_path / "o", samples_of({"train/64x64": 5}, "o/"))
    add_column(tmp_path / "o", "mask", lambda one: mask_of(one)[0])
    with pytest.raises(FingerprintError, match=r"added\.mask\.buckets\.train/64x64"):
        Loader([store.path, tmp_path / "o"], LoaderConfig(batch_size=4, columns=MASKED))
