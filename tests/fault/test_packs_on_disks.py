"""The whole of `ingest pack` on disks that fail or are too small, and of images of odd dates: a little of each."""

from __future__ import annotations

from tests.fault.record import Outcome, Record
from tests.fault.torture import run_family


def expect_good(records: list[Record]) -> None:
    for record in records:
        assert record.bad == 0, record.said
        assert record.trials or "no C compiler" in str(record.not_run), record


def test_a_pack_on_a_disk_that_fails_ends_in_words_and_loses_nothing() -> None:
    records = run_family("pack-disks", 3, is_quick=True)
    expect_good(records)
    assert any("then room" in record.fault and record.counts[Outcome.RECOVERED] for record in records), records


def test_images_of_odd_dates_are_packed_and_shards_that_one_had_poisoned_are_adopted() -> None:
    records = run_family("dates", 3, is_quick=True)
    assert len(records) == 4  # and what was left outside
    expect_good(records)
