"""A slab is used again only when the last tensor over it is gone; whoever holds many batches is never made to wait."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.ring import ALIGN_BYTES, Ring, carve, lay_out

if TYPE_CHECKING:
    from bucketline.store import Store


def test_a_slab_comes_back_when_the_last_tensor_over_it_is_gone_and_not_before() -> None:
    ring = Ring(256, 2, pinned=False)
    slab = ring.take()
    address = slab.data_ptr()
    fields, _ = lay_out([("a", torch.int32, (4,)), ("b", torch.float16, (8,))])
    tensors = carve(ring.lend(slab), fields)
    del slab
    view = tensors["b"][2:4].view(torch.uint8)
    del tensors["a"]
    gc.collect()
    assert ring.take().data_ptr() != address
    tensors.clear()
    gc.collect()
    assert ring._free.qsize() == 0  # a view of a view still holds it
    del view
    assert ring._free.qsize() == 1
    assert ring.take().data_ptr() == address


def test_a_numpy_array_made_of_a_batch_holds_its_slab_too() -> None:
    ring = Ring(64, 1, pinned=False)
    array = ring.lend(ring.take())[:8].numpy()
    gc.collect()
    assert ring._free.qsize() == 0
    del array
    assert ring._free.qsize() == 1


def test_taking_never_waits_and_what_is_too_much_is_let_go() -> None:
    ring = Ring(64, 2, pinned=False)
    held = [ring.lend(ring.take()) for _ in range(20)]
    assert len({tensor.data_ptr() for tensor in held}) == 20
    held.clear()
    assert ring._free.qsize() == 20
    ring.take()
    assert ring._free.qsize() <= 2


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
    placed, num_bytes = lay_out(asked)
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    tensors = carve(flat, placed)
    for n, (name, dtype, shape) in enumerate(asked):
        assert (tensors[name].dtype, tuple(tensors[name].shape)) == (dtype, shape)
        assert (tensors[name].data_ptr() - flat.data_ptr()) % ALIGN_BYTES == 0 or not tensors[name].numel()
        tensors[name].copy_(torch.full(shape, n % 2, dtype=torch.float32).to(dtype))
    for n, (name, _, _) in enumerate(asked):
        assert bool((tensors[name].float() == n % 2).all())


def test_every_batch_stays_what_it_was_however_many_are_held(store: Store) -> None:
    config = LoaderConfig(batch_size=4, epochs=8, prefetch_bytes=1)
    with Loader(store, config) as loader:
        held = list(loader)
    assert len(held) > 30
    with Loader(store, config) as again:
        for batch, fresh in zip(held, again, strict=True):
            assert (batch.step, batch.bucket) == (fresh.step, fresh.bucket)
            for one, other in zip(batch.tensors(), fresh.tensors(), strict=True):
                assert torch.equal(one, other)


def test_one_tensor_of_a_batch_is_enough_to_keep_it_valid(store: Store) -> None:
    config = LoaderConfig(batch_size=4, epochs=6, prefetch_bytes=1)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    with Loader(store, config) as loader:
        for batch in loader:
            kept.append((batch.latents[1:2], batch.latents.clone()))
            del batch
    assert all(torch.equal(view[0], copy[1]) for view, copy in kept)


def test_a_loop_that_holds_one_batch_at_a_time_uses_a_few_slabs(store: Store) -> None:
    config = LoaderConfig(batch_size=4, epochs=40, prefetch_bytes=1)
    with Loader(store, config) as loader:
        addresses = [batch.latents.data_ptr() for batch in loader]
    assert len(addresses) > 100
    assert len(np.unique(addresses)) <= 8


def test_slabs_that_were_filled_and_not_taken_come_back_when_the_loop_is_left(store: Store) -> None:
    with Loader(store, LoaderConfig(batch_size=4, prefetch_bytes=1, threads=2)) as loader:
        for _ in range(30):
            for _batch in loader:
                break
            del _batch
        assert loader.stats().slabs <= 8
