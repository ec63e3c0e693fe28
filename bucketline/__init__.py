"""Bucketline: a latent cache, a streaming loader and a lean trainer for latent-diffusion models."""

import sys

__version__ = "0.2.0"  # the single source of the version; the package metadata reads it

if sys.platform != "linux":
    raise ImportError(
        f"bucketline runs on Linux only, and this is {sys.platform}: "
        "it needs Linux's file locks, memory files and page cache. Run it on Linux, in a virtual machine or in WSL 2."
    )
