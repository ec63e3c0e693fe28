"""Each mistake of `tests/data` has its answer, which the pages show; a wrong command line costs little and leaves nothing."""

from __future__ import annotations

import pytest

from bucketline import errors
from tests.mistakes import PAGE, answers, mistakes, page_of
from tests.wrong_commands import COMMANDS_PAGE, MOST_CPU_S, line_answers, lines_page, without_seconds

pytestmark = pytest.mark.slow


def test_every_answer_names_item_found_expected_and_remedy_and_the_page_is_the_one_it_makes() -> None:
    every = list(answers())
    assert len(every) >= 65
    assert not [(answer.mistake.code, answer.message, answer.missing) for answer in every if answer.missing]
    assert PAGE.read_text(encoding="utf-8") == page_of(every), "run `python -m tests.mistakes --write`"


def test_every_error_is_of_our_tree() -> None:
    assert all(issubclass(getattr(errors, mistake.error), errors.BucketlineError) for mistake in mistakes())


def test_every_wrong_command_line_is_refused_at_once_leaves_nothing_and_has_the_answer_of_the_page() -> None:
    every = list(line_answers())
    assert len(every) >= 60
    assert not [(one.wrong.line, one.code) for one in every if one.code not in (1, 2)]
    assert not [(one.wrong.line, one.left) for one in every if one.left]
    assert not [(one.wrong.line, one.message) for one in every if "Traceback" in one.message]
    assert not [(one.wrong.line, one.cpu_s) for one in every if one.cpu_s > MOST_CPU_S]
    found, expected = without_seconds(lines_page(every)), without_seconds(COMMANDS_PAGE.read_text(encoding="utf-8"))
    assert found == expected, "run `python -m tests.mistakes --write`"
