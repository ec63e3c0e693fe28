"""Failures forced on loaders: a new store for each, and how each reached the caller."""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bucketline.errors import BucketlineError
from bucketline.loader import Batch, Loader, LoaderConfig
from bucketline.loader.service.child import ChildLink
from bucketline.loader.service.client import ServiceBackend
from tests.kit import Sample, make_store, samples_of

WITHIN_S = 10.0  # the time that an answer has, also on a busy machine; it takes milliseconds
ROWS = {"train/64x64": 40, "train/96x64": 12}


class WrongEndError(Exception):
    """A failure did not end as it should."""


@dataclass(slots=True)
class Bench:
    """A place to force failures: a new store for each, and what is drawn for it."""

    folder: Path
    random: random.Random
    number: int = 0
    samples: list[Sample] = field(default_factory=list)

    def store(self) -> Path:
        """Make a fresh copy of the store."""
        whole = self.folder / "whole"
        if not whole.exists():
            self.samples = samples_of(ROWS, "first/")
            make_store(whole, self.samples, samples_of(ROWS, "second/"))
        self.number += 1
        path = self.folder / f"{self.number}.store"
        shutil.copytree(whole, path)
        return path

    def config(self, **more: object) -> LoaderConfig:
        """Draw a configuration."""
        drawn = {
            "batch_size": self.random.randint(1, 5),
            "seed": self.random.randint(0, 1 << 30),
            "prefetch_bytes": self.random.choice([1, 1 << 20]),
            "threads": self.random.choice([1, 2]),
        }
        return LoaderConfig(**{**drawn, **more})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a failure ended."""

    seconds: float
    how: str  # the error's class, or `clean end`


def until_error(batches: Iterator[Batch], first: int, kind: type[BucketlineError], words: str) -> Ended:
    """Take batches until the error that is expected; the clock runs while the caller waits, not over batches that come."""
    expected = first
    started_at = begun = time.perf_counter()
    try:
        for batch in batches:
            if batch.step != expected:
                raise WrongEndError(f"step {batch.step} came, expected {expected}")
            expected += 1
            begun = time.perf_counter()
            if expected > first + 2000 and begun > started_at + WITHIN_S:
                raise WrongEndError(f"{expected - first} batches came in {begun - started_at:.1f} s and no error")
    except BucketlineError as error:
        if not isinstance(error, kind) or not re.search(words, str(error)):
            raise WrongEndError(f"{type(error).__name__}: {error}; expected {kind.__name__} with {words!r}") from error
        return Ended(seconds=time.perf_counter() - begun, how=f"{type(error).__name__}")
    raise WrongEndError("the iteration ended without an error")


def started(loader: Loader) -> Loader:
    """Start a private service, which takes seconds, so that the clock only runs from the failure."""
    if isinstance(loader._backend, ServiceBackend) and isinstance(loader._backend.link, ChildLink):
        loader._backend.link.start()
    return loader


def goes_on(loader: Loader) -> None:
    """A new iteration begins with the batch after the last that was taken."""
    wanted = loader.state_dict()["step"]
    found = next(loader.forever()).step
    if found != wanted:
        raise WrongEndError(f"after the failure came step {found}, expected {wanted}")
