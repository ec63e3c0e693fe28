"""The parsers of files, on their fuzzer's seeds and on small changes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bucketline.ingest.importers.registry import IMPORTERS
from tests.fault import fuzz
from tests.fault.corpus import inputs, mutated, read_cache
from tests.fault.parsers import PARSERS
from tests.process_memory import forget_highest, in_memory


@pytest.mark.parametrize("parser", PARSERS)
def test_a_changed_file_is_read_or_is_an_error_of_ours(parser: str, tmp_path: Path) -> None:
    count, changed = 0, 100 if parser.startswith(fuzz.IMPORT) else 400
    forget_highest()
    peak = in_memory("VmRSS")
    for data in mutated(parser, changed, seed=5):
        PARSERS[parser](data, tmp_path)
        count += 1
    assert count == changed + len(inputs(parser))
    assert in_memory("VmHWM") - peak < 1 << 30


@pytest.mark.parametrize("kind", IMPORTERS)
def test_a_sound_cache_of_the_corpus_is_imported(kind: str, tmp_path: Path) -> None:
    (data,) = inputs(fuzz.IMPORT + kind)
    assert read_cache(kind, data, tmp_path) == 2


def test_every_parser_is_fuzzed_and_its_seeds_are_small() -> None:
    assert tuple(PARSERS) == fuzz.PARSERS
    assert all(1 <= len(inputs(parser)) <= 40 for parser in PARSERS)
    assert sum(len(data) for parser in PARSERS for data in inputs(parser)) < 1 << 18
