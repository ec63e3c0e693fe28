"""Digests that identify the encoder of a store's columns, so that a different one is detected."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

# fields that differ between library versions or machines
_VOLATILE = ("transformers_version", "torch_dtype", "dtype")


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the digest of an encoder's `config.json`, 32 hexadecimal digits.

    Pass the file's own content, not a library's parsed config, which adds the library's defaults and bookkeeping. Names that
    begin with an underscore are ignored.
    """
    return json_hash({key: value for key, value in config.items() if key not in _VOLATILE and not key.startswith("_")})


def json_hash(value: object) -> str:
    """Return the digest of a value as JSON, 32 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def weights_hash(module: nn.Module, but: frozenset[str] = frozenset()) -> str:
    """Return the digest of an encoder's weights, 32 hexadecimal digits: names and bytes, without those in `but`.

    Floats are taken in 32 bits, one tensor at a time, so that weights have the same digest in any dtype that they are saved in.
    """
    import torch

    tensors, state = module.state_dict(), xxhash.xxh3_128()
    for name in sorted(tensors.keys() - but):
        tensor = tensors[name].detach().cpu()
        wide = tensor.float() if tensor.is_floating_point() else tensor
        state.update(name.encode())
        state.update(wide.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
