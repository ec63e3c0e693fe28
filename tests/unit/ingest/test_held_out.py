"""The held-out split is a pure function of the id: it never moves, and crops of one photograph stay together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketline.ingest.held_out import SplitBy, held_out

IDS = [f"photo{n % 97}/{n}.png" for n in range(20_000)]


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.9])
def test_about_the_fraction_asked_for_is_held_out(fraction: float) -> None:
    share = sum(held_out(i, fraction, SplitBy.ID) for i in IDS) / len(IDS)
    assert abs(share - fraction) < 0.015


def test_nothing_is_held_out_where_nothing_is_asked_for() -> None:
    assert not any(held_out(i, 0.0, by) for i in IDS for by in SplitBy)


def test_a_larger_fraction_holds_out_what_a_smaller_one_does_and_more() -> None:
    small, large = ({i for i in IDS if held_out(i, fraction, SplitBy.ID)} for fraction in (0.1, 0.2))
    assert small < large


@given(folder=st.text("abc/é", max_size=8), names=st.lists(st.text("xyz", min_size=1, max_size=5), min_size=2, max_size=5))
def test_by_folder_all_images_of_a_folder_share_one_split(folder: str, names: list[str]) -> None:
    ids = [f"{folder}/{name}.png".lstrip("/") for name in names]
    assert len({held_out(i, 0.5, SplitBy.FOLDER) for i in ids}) == 1


def test_the_split_of_a_given_id_never_changes() -> None:
    """A literal: what was held out last year is held out today."""
    assert [held_out(f"{n}.png", 0.3, SplitBy.ID) for n in range(12)] == GOLDEN


GOLDEN = [False, False, False, True, False, False, False, False, False, True, False, True]
