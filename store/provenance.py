"""Digests that say which encoder made a store's columns, so that another one is noticed."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

# what changes from one version of a library, or from one machine, to the next
_VOLATILE = ("transformers_version", "torch_dtype", "dtype")


def config_hash(config: Mapping[str, Any]) -> str:
    """Give the digest of an encoder's `config.json`, 32 hexadecimal digits.

    Take what the file says, not what a library makes of it: that has the library's own defaults in it, and some of its own
    bookkeeping. Names that begin with an underscore are left out.
    """
    kept = {key: value for key, value in config.items() if key not in _VOLATILE and not key.startswith("_")}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()


def weights_hash(names: Iterable[str], read: Callable[[str], memoryview]) -> str:
    """Give the digest of an encoder's weights, 32 hexadecimal digits: names and bytes, one at a time, in order of the names."""
    state = xxhash.xxh3_128()
    for name in sorted(names):
        state.update(name.encode())
        state.update(read(name))
    return state.hexdigest()
