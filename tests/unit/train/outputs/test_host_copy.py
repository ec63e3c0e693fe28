"""A checkpoint's copies in host memory, through chunks that are smaller than the tensors."""

from __future__ import annotations

import pytest
import torch

from bucketline.train.outputs.host_copy import HostCopies

SHAPES = ((), (0, 3), (7,), (5, 3, 2, 2), (1000,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("chunk_bytes", [64, 1 << 16])
def test_copies_are_the_tensors_and_share_no_memory(dtype: torch.dtype, chunk_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randint(-9, 9, shape, generator=generator).to(dtype) for shape in SHAPES]
    tensors.append(tensors[3].contiguous(memory_format=torch.channels_last))
    copies = HostCopies(is_pinned=False, chunk_bytes=chunk_bytes)
    found = [copies.copy(tensor) for tensor in tensors]
    before = [tensor.clone() for tensor in tensors]
    copies.finish()
    for tensor in tensors:
        tensor.zero_()
    for copy, tensor in zip(found, before, strict=True):
        assert copy.is_contiguous()
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(copy, tensor)
