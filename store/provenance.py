"""Digests that say which encoder made a store's columns, so that another one is noticed."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# what changes from one version of a library, or from one machine, to the next
_VOLATILE = ("_name_or_path", "_diffusers_version", "transformers_version", "torch_dtype", "dtype", "_commit_hash")


def config_hash(config: Mapping[str, Any]) -> str:
    """Give the digest of an encoder's configuration, 32 hexadecimal digits."""
    kept = {key: value for key, value in config.items() if key not in _VOLATILE}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def weights_hash(tensors: Iterable[tuple[str, memoryview]]) -> str:
    """Give the digest of an encoder's weights, 32 hexadecimal digits: names and bytes, in order of the names."""
    state = xxhash.xxh3_128()
    for name, values in sorted(tensors, key=lambda named: named[0]):
        state.update(name.encode())
        state.update(values)
    return state.hexdigest()
