"""Stores on a range server, each also in a local folder, and passes over them that are compared with it bit for bit."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bucketline.bench.fixtures.pushed_store import pushed
from bucketline.bench.fixtures.synthetic_store import StoreShape, kept_store
from bucketline.errors import BucketlineError
from bucketline.loader import Batch, Loader, LoaderConfig
from bucketline.loader.config import Remainder
from bucketline.store import Store
from bucketline.store.format.hashing import LINE_BYTES
from bucketline.store.format.layout import shard_paths
from bucketline.store.format.manifest import read_manifest
from bucketline.store.remote.cache.cached_shard import HEADER_BYTES, PRESENT_SUFFIX
from bucketline.store.remote.cache.remote_source import cached_paths
from bucketline.store.remote.urls import RemoteOptions
from tests.fault.forcing import started

WINDOW_ROWS = 128  # that `in_lines` mixes: two windows fit the smallest cache
SLACK_S = 5.0  # beyond the deadline, on a busy machine
IMAGES = StoreShape(num_shards=16, rows_per_shard=20, latent_shape=(4, 64, 80), tokens=(3, 20))
QUANTISED = StoreShape(num_shards=12, rows_per_shard=24, latent_shape=(4, 64, 64), tokens=(3, 20), text_dtype="I8")
LARGE = StoreShape(num_shards=6, rows_per_shard=330, latent_shape=(4, 128, 128), tokens=(3, 20))  # 270 MB in 36 lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A store in a local folder, and in the folder that a server serves."""

    local: Path
    name: str  # in the server's folder
    expected: dict[str, list[str]] = field(default_factory=dict)  # digests of batches, by configuration

    def digests(self, config: LoaderConfig) -> list[str]:
        """Return the digest of each batch of the first epoch, by a loader of the local store."""
        key = f"{config.batch_size} {config.seed} {config.window} {config.text}"
        if key not in self.expected:
            with Loader(Store.open(self.local), config) as loader:
                self.expected[key] = [digest_of(batch) for batch in loader.forever()]
        return self.expected[key]


def served(folder: Path, shape: StoreShape) -> Served:
    """Make a store in `folder`, and its pushed form in `folder/served`."""
    local = kept_store(folder, shape)
    return Served(local=local, name=pushed(local, folder / "served").name)


def digest_of(batch: Batch) -> str:
    """Return a digest of all of a batch's bytes, and of their names and shapes."""
    state = hashlib.blake2b(digest_size=12)
    for name, tensor in batch.by_name().items():
        array = np.ascontiguousarray(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else np.empty(0)
        state.update(f"{name} {tuple(tensor.shape)}".encode())
        state.update(array.data)
    return state.hexdigest()


def in_lines(*, batch_size: int, seed: int, epochs: int = 1) -> LoaderConfig:
    """Return the configuration of a loader that reads from far away: every row, a few mixed at a time."""
    return LoaderConfig(
        batch_size=batch_size,
        seed=seed,
        epochs=epochs,
        remainder=Remainder.PARTIAL,
        window=WINDOW_ROWS,
    )


class WrongPassError(Exception):
    """A pass did not end as it should; `words` begin with the kind of it, as `known.WORDS` has them."""


@dataclass(slots=True)
class Pass:
    """How a pass over a store on a server went."""

    batches: int = 0
    errors: list[str] = field(default_factory=list)  # clean ones, after each of which the iteration was begun again
    longest_s: float = 0.0  # that anything took: opening, a batch, an error


def one_pass(
    url: str, expected: list[str], config: LoaderConfig, options: RemoteOptions, *, service: str | None = None, tries: int = 50
) -> Pass:
    """Open a store on a server and read an epoch; begin again after each clean error. Compare every batch.

    Raises:
        WrongPassError: if a batch has other bytes, is missing or comes twice, an error is none of ours or does not name the
            store, or something took longer than the deadline.
    """
    own = Pass()

    def took(since: float) -> None:
        seconds = time.perf_counter() - since
        own.longest_s = max(own.longest_s, seconds)
        if seconds > options.deadline_s + SLACK_S:
            raise WrongPassError(f"took {seconds:.1f} s, with a deadline of {options.deadline_s:g} s; {own.errors[-1:]}")

    def failed(error: BucketlineError, since: float) -> None:
        took(since)
        own.errors.append(f"{type(error).__name__}: {error}")
        if url not in str(error) and str(options.cache) not in str(error):
            raise WrongPassError(f"the error names neither the store nor the cache: {error}")
        if len(own.errors) > tries:
            raise WrongPassError(f"{len(own.errors)} errors, the last: {error}")

    loader: Loader | None = None
    while loader is None:
        begun = time.perf_counter()
        try:
            loader = Loader(url, reaching(config, options), service=service)
        except BucketlineError as error:
            failed(error, begun)
    with loader:
        for _ in range(tries):
            try:
                started(loader)  # its time is not a wait for the store
                break
            except BucketlineError as error:
                own.errors.append(f"{type(error).__name__}: {error}")
        while own.batches < len(expected):
            begun = time.perf_counter()
            try:
                for batch in loader.forever():
                    took(begun)
                    check_batch(batch, own.batches, expected)
                    own.batches += 1
                    begun = time.perf_counter()
                if own.batches < len(expected):
                    raise WrongPassError(f"missing: the pass ended after {own.batches} of {len(expected)} batches")
            except BucketlineError as error:
                failed(error, begun)
    return own


def reaching(config: LoaderConfig, options: RemoteOptions) -> LoaderConfig:
    """Return a configuration with the options that reach a store."""
    cache_bytes = None if options.cache_bytes is None else str(options.cache_bytes)
    return replace(config, cache=str(options.cache), cache_bytes=cache_bytes, deadline=options.deadline_s)


def check_batch(batch: Batch, step: int, expected: list[str]) -> None:
    """Compare a batch with the local store's.

    Raises:
        WrongPassError: if it is another one, or has other bytes.
    """
    if batch.step != step:
        raise WrongPassError(f"missing: step {batch.step} came, expected {step}")
    if digest_of(batch) != expected[step]:
        raise WrongPassError(f"differs: step {step} has other bytes than the local store's")


def check_cache(cache: Path, store: Path, url: str | None = None) -> int:
    """Compare every line that the cache holds with the local store's file; return how many there are. `url`: only of this one.

    Raises:
        WrongPassError: if one differs.
    """
    count = 0
    folders = [path.parent for path in cache.glob("*/store.json") if url in (None, json.loads(path.read_bytes())["url"])]
    found_in = [(folder, entry) for entry in read_manifest(store).shards for folder in folders]
    for folder, entry in found_in:
        path = cached_paths(folder, entry).lmdb
        if not path.with_suffix(PRESENT_SUFFIX).exists():
            continue
        num_lines = -(-entry.lmdb.num_bytes // LINE_BYTES)
        states = np.fromfile(path.with_suffix(PRESENT_SUFFIX), dtype=np.uint8)[HEADER_BYTES : HEADER_BYTES + num_lines]
        with path.open("rb") as own, shard_paths(store, entry.name).lmdb.open("rb") as original:
            for line in np.flatnonzero(states).tolist():
                count += 1
                found = [_read(file, line * LINE_BYTES) for file in (own, original)]
                if found[0] != found[1]:
                    raise WrongPassError(f"differs: line {line} of {entry.name} in the cache, whose byte is {states[line]}")
    return count


def _read(file: Any, begin: int) -> bytes:
    file.seek(begin)
    data: bytes = file.read(LINE_BYTES)
    return data
