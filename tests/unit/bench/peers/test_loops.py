"""The loops of `docs/other-loaders.md`: what their records mean, the page, and what Bucketline's own loop does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bucketline.bench.peers.loops.facts import begins, compared, facts, merged, on_two, validations
from bucketline.bench.peers.loops.page import LOOPS, num_lines, source, table
from bucketline.bench.peers.loops.run import VALIDATION_ROWS
from bucketline.bench.peers.loops.scenarios import carry_out, tried
from tests.commands import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = ROOT / "docs" / "other-loaders.md"
WHOLE = [[[1], [2], [3], [4]], [[4], [3], [2], [1]]]


def record(*loops: list[list[int]]) -> dict[str, Any]:
    return {"loops": [{"batches": own, "shapes": [[4, 2, 2]] * len(own)} for own in loops]}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ([[[1], [2]]], [[[3], [4]], WHOLE[1]], "exact"),
        (WHOLE[:1], [[], WHOLE[1]], "exact; the first `for` is empty"),
        (WHOLE[:1], [[]], "not exact: 4 rows lost; the first `for` is empty"),
        ([[[1], [2]]], WHOLE, "not exact: 2 rows again"),
        ([[[1], [2]]], [[[4], [3]], WHOLE[1]], "not exact: the same rows in other batches"),
    ],
)
def test_a_resume_is_compared_with_a_run_that_was_not_stopped(
    before: list[list[list[int]]], after: list[list[list[int]]], told: str
) -> None:
    assert compared(WHOLE, before, after) == told


def test_a_break_is_followed_by_what_the_next_for_delivered() -> None:
    broken = WHOLE[0][:3]
    found = [begins(WHOLE, [broken, epoch]) for epoch in (WHOLE[1], WHOLE[0], WHOLE[0][3:], [[2], [1]])]
    expected = ["the next epoch", "the same epoch again", "the next batch of the same epoch", "another order, of 2 rows"]
    assert found == expected


def test_two_ranks_are_one_batch_per_step() -> None:
    ranks = [record([[1], [2]]), record([[3], [4]])]
    assert merged(ranks) == [[[1, 3], [2, 4]]]
    assert on_two([[[3, 1], [4, 2]]], ranks).startswith("the batches of 1 rank; the same shape on both at every step")


def test_a_validation_that_lacks_rows_is_told() -> None:
    rows = [*range(sum(VALIDATION_ROWS.values()))]
    assert validations([rows[:8], rows, rows]) == "the same 22 of 22 rows each time, in the same order"
    assert validations([rows[:8], rows[8:], rows]) == "rows 14, 22 of 22; not all"


def test_the_page_shows_each_loop_and_what_bucketlines_does_now(tmp_path: Path) -> None:
    def launch(loader: str, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [carry_out(loader, task) for task in tasks]

    found = facts(tried("bucketline", str(tmp_path), launch))
    page = PAGE.read_text(encoding="utf-8")
    own = [line.split(" | ")[0:2] for line in table({"bucketline": found}, {"bucketline": ""}).splitlines()[2:]]
    shown = [line.split(" | ")[0:2] for line in page.splitlines() if line.startswith("| ")][2:]
    assert [[cell.removesuffix(" |") for cell in line] for line in own] == shown
    assert all(f"```python\n{source(one)}```\n" in page for one in LOOPS)
    assert [found[question] for question in found if "resumed" in question] == ["exact"] * 6


def test_lines_that_are_not_code_are_not_counted() -> None:
    assert num_lines('"""A module.\n\nOf two lines.\n"""\n\n# why\nx = (\n    1,  # one\n)\n') == 3
