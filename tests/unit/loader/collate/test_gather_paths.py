"""Each way that a row can take out of a store into a batch gives the same bytes: the map, and plain reads."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from bucketline.errors import CorruptError, StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.collate.gather import MAX_CHUNK_ITEMS, _chunk_items, _item_bytes
from bucketline.store import Store
from tests.commands import spawn
from tests.kit import flip_bit, make_store, samples_of

REFUSED = """
import resource, sys, warnings
import numpy as np
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.collate import gather
from bucketline.store import Store
store = Store.open(sys.argv[1])
bucket = store.bucket("train/64x64")
rows = np.arange(bucket.num_rows)
real = gather.AddressRange  # as if the shards were too large for the addresses that are left
gather.AddressRange = lambda sizes, opened: real([1 << 40] * len(sizes), opened)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loader = Loader(store, LoaderConfig(batch_size=len(rows), epochs=1, window=0, remainder="partial"))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
(batch,) = (batch for batch in loader.forever() if batch.bucket == bucket.name)
assert batch.latents.numpy().tobytes() == bucket.read(rows, "latent").tobytes()
print([str(w.message) for w in caught if "plain reads" in str(w.message)])
"""


@pytest.mark.slow
def test_where_the_system_refuses_the_addresses_rows_come_by_plain_reads_with_a_warning(store: Store) -> None:
    ran = spawn([sys.executable, "-c", REFUSED, store.path]).done()
    assert "is read with plain reads, which are slower: " in ran.out
    assert "bytes of addresses cannot be mapped" in ran.out


@pytest.mark.parametrize(
    ("row_items", "chunk"),
    [
        (1, 1),
        (100, 100),
        (MAX_CHUNK_ITEMS, MAX_CHUNK_ITEMS),
        (65536, 16384),
        (3 * MAX_CHUNK_ITEMS, MAX_CHUNK_ITEMS),
        (65537, 65537),
    ],
)
def test_rows_are_copied_in_chunks_that_divide_them(row_items: int, chunk: int) -> None:
    assert _chunk_items(row_items) == chunk
    assert row_items % chunk == 0


def test_items_are_as_wide_as_every_address_allows() -> None:
    assert [_item_bytes(bits) for bits in (16, 32, 8, 24, 4, 6, 1, 0x1004)] == [16, 16, 8, 8, 4, 2, 1, 4]


def test_verify_in_the_loader_ends_the_iteration_at_the_bad_row_and_names_its_sample(tmp_path: Path) -> None:
    samples = samples_of({"train/64x64": 30})
    store = make_store(tmp_path, samples)
    bucket = store.bucket("train/64x64")
    at = int(bucket.locate(np.array([7])).offsets(bucket.spec, "latent")[0])
    flip_bit(store.shards[0].paths.lmdb, 8 * at)
    with Loader(Store.open(tmp_path), LoaderConfig(batch_size=5, epochs=1)) as loader:
        assert len(list(loader.forever())) == 6
    with (
        Loader(Store.open(tmp_path), LoaderConfig(batch_size=5, epochs=1, verify=True)) as loader,
        pytest.raises(CorruptError, match=rf"step \d, bucket train/64x64: sample '{samples[7].id}', row 7 of train/64x64"),
    ):
        list(loader.forever())


def test_verify_in_the_loader_finds_a_bad_caption(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples_of({"train/64x64": 30}))
    located = store.locate_captions(np.array([0]), np.array([1]))
    first = np.frombuffer(store.shards[0].read(int(located.starts_offsets()[0]), 8), "<i8")
    flip_bit(store.shards[0].paths.lmdb, 8 * int(store.token_offsets(located, "tokens", first)[0]))
    with (
        Loader(Store.open(tmp_path), LoaderConfig(batch_size=5, epochs=3, verify=True)) as loader,
        pytest.raises(
            StoreError,
            match=r"step \d+, bucket train/64x64: sample 'train/64x64/.*', row \d+ in shard g0: shard g0, caption 1: its bytes",
        ),
    ):
        list(loader.forever())
