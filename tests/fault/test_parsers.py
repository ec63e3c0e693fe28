"""The parsers of files, on their fuzzer's seeds and on small changes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fault import fuzz
from tests.fault.corpus import inputs, mutated, sound
from tests.fault.parsers import PARSERS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("parser", PARSERS)
def test_a_changed_file_is_read_or_is_an_error_of_ours(parser: str, tmp_path: Path) -> None:
    count = 0
    for data in mutated(parser, 400, seed=5):
        PARSERS[parser](data, tmp_path)
        count += 1
    assert count == 400 + len(inputs(parser))


def test_every_parser_is_fuzzed_and_its_seeds_are_small() -> None:
    assert tuple(PARSERS) == fuzz.PARSERS
    assert all(1 <= len(inputs(parser)) <= 40 for parser in PARSERS)
    assert sum(len(data) for parser in PARSERS for data in inputs(parser)) < 1 << 18
    assert {name.partition("/")[0] for name, _ in sound()} == set(PARSERS)
