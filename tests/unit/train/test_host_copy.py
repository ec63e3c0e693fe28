"""Copies in host memory, which is used again, and through chunks that are smaller than the tensors."""

from __future__ import annotations

import pytest
import torch

from bucketline.train.outputs.saver import HostMemory, copy_through

SHAPES = ((), (0, 3), (7,), (5, 3, 2, 2), (1000,))


def tensors_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randint(-9, 9, shape, generator=generator).to(dtype) for shape in SHAPES]
    tensors.append(tensors[3].contiguous(memory_format=torch.channels_last))
    return {str(number): tensor for number, tensor in enumerate(tensors)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_copies_are_the_tensors_and_every_save_takes_the_same_memory(dtype: torch.dtype) -> None:
    memory, tensors = HostMemory(), tensors_of(dtype)
    places = []
    for _ in range(2):
        found = memory.copies("a", tensors.items())
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.add_(1)
        for name, copy in found.items():
            assert copy.is_contiguous()
            assert (copy.dtype, copy.shape) == (before[name].dtype, before[name].shape)
            assert torch.equal(copy, before[name])
        places.append([copy.data_ptr() for copy in found.values()])
    assert places[0] == places[1]


def test_a_tensor_of_another_shape_gets_memory_of_its_own() -> None:
    memory = HostMemory()
    memory.copies("a", [("a", torch.zeros(3))])
    assert torch.equal(memory.copies("a", [("a", torch.ones(2, 2))])["a"], torch.ones(2, 2))
    assert memory.copies("a", [("a", torch.zeros(2, 2))], keeps=False) == {}


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_two_chunks_carry_tensors_of_any_size(dtype: torch.dtype, chunk_bytes: int) -> None:
    chunks = [torch.empty(chunk_bytes, dtype=torch.uint8) for _ in range(2)]
    pairs = [(tensor, torch.empty(tensor.shape, dtype=dtype)) for tensor in tensors_of(dtype).values()]
    copy_through(chunks, pairs)
    for source, target in pairs:
        assert torch.equal(source, target)
