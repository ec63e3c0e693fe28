"""Forks at random moments, and sidecars truncated while they are read: a little of what the long run tries."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.fault import forked_loaders
from tests.fault.forcing import Bench

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("seed", range(4))
def test_a_process_forked_at_a_random_moment_never_hangs(tmp_path: Path, seed: int) -> None:
    assert forked_loaders.fork_while_read(Bench(tmp_path, random.Random(seed)), None).how == "clean end"


@pytest.mark.parametrize("seed", range(3))
def test_sidecars_truncated_under_plain_reads_are_no_end_of_the_process(tmp_path: Path, seed: int) -> None:
    ended = forked_loaders.truncate_sidecars_read_plainly(Bench(tmp_path, random.Random(seed)), None)
    assert ended.how in ("clean end", "CorruptError", "StoreError")


def test_sidecars_truncated_under_the_map_end_as_documented(tmp_path: Path) -> None:
    assert forked_loaders.truncate_sidecars_mapped(Bench(tmp_path, random.Random(1)), None).how == "clean end"
