"""The choice of PyTorch's kernels for attention."""

from __future__ import annotations


def avoid_cudnn_attention() -> None:
    """Let this process compute attention by PyTorch's flash and memory-efficient kernels, not by cuDNN's.

    cuDNN's are PyTorch's first choice on Hopper and later. On an H200 with torch 2.11 and cuDNN 9.19 their backward pass fails
    for a Flux of 1,029 tokens ("mha_graph.execute … is_good()", an illegal memory access): `make gpu CHECKS=fp8`. Others report
    gradients of NaN if there is a mask and the length is 64 beyond a multiple of 128, also with torch 2.13 (pytorch's issue
    196678), and wrong outputs on Blackwell if there are fewer than eight key heads (its issue 193893). Nothing changes
    without a GPU.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
