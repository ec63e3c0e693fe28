"""A buffer is used again only when the last tensor over it is gone; whoever holds many batches is never made to wait."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bucketline.errors import CorruptError, StoreError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.collate.buffers import ALIGN_BYTES, HUGE_PAGE_BYTES, BufferPool, buffer_offsets, carve
from bucketline.loader.collate.gather import MAX_CHUNK_ITEMS, _chunk_items, _item_bytes
from bucketline.loader.prefetch.ahead import at_once
from bucketline.loader.prefetch.stream import FIRST_DEPTH
from bucketline.store import Store
from tests.commands import spawn
from tests.kit import flip_bit, make_store, samples_of
from tests.leftovers import wait_until


def test_a_buffer_comes_back_when_the_last_tensor_over_it_is_gone_and_not_before() -> None:
    pool = BufferPool(256, 2, pinned=False)
    buffer = pool.acquire()
    address = buffer.data_ptr()
    fields, _ = buffer_offsets([("a", torch.int32, (4,)), ("b", torch.float16, (8,))])
    tensors = carve(pool.lend(buffer), fields)
    del buffer
    view = tensors["b"][2:4].view(torch.uint8)
    del tensors["a"]
    gc.collect()
    assert pool.acquire().data_ptr() != address
    tensors.clear()
    gc.collect()
    assert pool._free.qsize() == 0  # a view of a view still holds it
    del view
    assert pool._free.qsize() == 1
    assert pool.acquire().data_ptr() == address


def test_taking_never_waits_and_what_is_too_much_is_let_go() -> None:
    pool = BufferPool(64, 2, pinned=False)
    held = [pool.lend(pool.acquire()) for _ in range(20)]
    assert len({tensor.data_ptr() for tensor in held}) == 20
    held.clear()
    assert pool._free.qsize() == 20
    pool.acquire()
    assert pool._free.qsize() <= 2


@given(
    fields=st.lists(
        st.tuples(
            st.sampled_from([torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.int64]),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=6,
    )
)
def test_fields_lie_apart_aligned_and_hold_what_is_put_into_them(fields: list[tuple[torch.dtype, list[int]]]) -> None:
    asked = [(str(n), dtype, tuple(shape)) for n, (dtype, shape) in enumerate(fields)]
    placed, num_bytes = buffer_offsets(asked)
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    tensors = carve(flat, placed)
    for n, (name, dtype, shape) in enumerate(asked):
        assert (tensors[name].dtype, tuple(tensors[name].shape)) == (dtype, shape)
        assert (tensors[name].data_ptr() - flat.data_ptr()) % ALIGN_BYTES == 0 or not tensors[name].numel()
        tensors[name].copy_(torch.full(shape, n % 2, dtype=torch.float32).to(dtype))
    for n, (name, _, _) in enumerate(asked):
        assert bool((tensors[name].float() == n % 2).all())


def test_one_tensor_of_a_batch_is_enough_to_keep_it_valid(store: Store) -> None:
    config = LoaderConfig(batch_size=4, epochs=6, prefetch_bytes=1)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    with Loader(store, config) as loader:
        for batch in loader.forever():
            kept.append((batch.latents[1:2], batch.latents.clone()))
            del batch
    assert all(torch.equal(view[0], copy[1]) for view, copy in kept)


def test_buffers_that_were_filled_and_not_taken_come_back_when_the_loop_is_left(store: Store) -> None:
    with Loader(store, LoaderConfig(batch_size=4, prefetch_bytes=1, threads=2)) as loader:
        for _ in range(30):
            for _batch in loader.forever():
                break
            del _batch
        assert loader.stats().buffers <= 8


def test_large_buffers_begin_at_a_huge_page_and_are_as_long_as_asked_for() -> None:
    for num_bytes in (100, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES - 5, 5 * HUGE_PAGE_BYTES // 2):
        buffer = BufferPool(num_bytes, 2, pinned=False).acquire()
        buffer.fill_(7)
        assert (len(buffer), int(buffer[-1])) == (num_bytes, 7)
        assert num_bytes < HUGE_PAGE_BYTES or buffer.data_ptr() % HUGE_PAGE_BYTES == 0


def test_a_caller_that_never_waits_is_given_few_buffers_however_much_may_be_filled_ahead(store: Store) -> None:
    # of several threads, others may have filled every buffer while one is late with the first batch
    with Loader(store, LoaderConfig(batch_size=2, epochs=20, threads=1)) as loader:
        batches = loader.forever()
        next(batches)
        depth = FIRST_DEPTH * at_once(loader._builder.buffer_bytes)
        assert wait_until(lambda: loader.stats().ready == depth)
        for _ in range(3 * depth):
            assert wait_until(lambda: loader.stats().ready >= depth // 2)
            next(batches)
        assert loader.stats().depth == depth
        assert loader.stats().buffers <= depth + 3


# Each way that a row can take out of a store into a batch gives the same bytes: the map, and plain reads.


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
    located = store.locate_entries(store.text, np.array([0]), np.array([1]))
    first = np.frombuffer(store.shards[0].read(int(located.starts_offsets()[0]), 8), "<i8")
    flip_bit(store.shards[0].paths.lmdb, 8 * int(located.token_offsets("tokens", first)[0]))
    with (
        Loader(Store.open(tmp_path), LoaderConfig(batch_size=5, epochs=3, verify=True)) as loader,
        pytest.raises(
            StoreError,
            match=r"step \d+, bucket train/64x64: sample 'train/64x64/.*', row \d+ in shard g0: shard g0, caption 1: its bytes",
        ),
    ):
        list(loader.forever())
