"""Each mistake of `tests/data/mistakes.toml` has an answer with its four parts, and the page shows it."""

from __future__ import annotations

import pytest

from bucketline import errors
from tests.mistakes import PAGE, answers, mistakes, page_of

pytestmark = pytest.mark.slow


def test_every_answer_names_item_found_expected_and_remedy_and_the_page_is_the_one_it_makes() -> None:
    every = list(answers())
    assert len(every) >= 65
    assert not [(answer.mistake.code, answer.message, answer.missing) for answer in every if answer.missing]
    assert PAGE.read_text(encoding="utf-8") == page_of(every), "run `python -m tests.mistakes --write`"


def test_every_error_is_of_our_tree() -> None:
    assert all(issubclass(getattr(errors, mistake.error), errors.BucketlineError) for mistake in mistakes())
