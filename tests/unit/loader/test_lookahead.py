"""What is located and asked for before it is filled: the order, the stages, and what a failure leaves untouched."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from bucketline.errors import StoreError
from bucketline.loader import lookahead
from bucketline.loader.lookahead import WARM_AFTER, Heat, Lookahead

if TYPE_CHECKING:
    from bucketline.loader.filler import Filler

Pair = tuple[int, int]


class Recorder:
    """Stands where a filler stands, and notes what it is asked to do, in order."""

    slab_bytes = lookahead.AHEAD_BYTES // 2  # two batches between stages

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad
        self.done: list[tuple[str, object]] = []

    def locate(self, pairs: list[Pair]) -> list[Pair]:
        if self.bad in [step for step, _ in pairs]:
            raise StoreError(f"step {self.bad} cannot be located")
        self.done.append(("locate", tuple(pairs)))
        return list(pairs)

    def ask_rows(self, coming: Pair) -> None:
        self.done.append(("rows", coming))

    def ask_starts(self, coming: Pair) -> None:
        self.done.append(("starts", coming))

    def ask_tokens(self, coming: Pair) -> None:
        self.done.append(("tokens", coming))


def run(recorder: Recorder, steps: int) -> list[Pair]:
    delivered: list[Pair] = []
    for coming in Lookahead(cast("Filler", recorder), iter([(step, 0) for step in range(steps)])):
        pair = cast("Pair", coming)
        recorder.done.append(("fill", pair))
        delivered.append(pair)
    return delivered


@pytest.fixture(params=[True, False])
def cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(Heat, "is_cold", property(lambda _: request.param))
    return bool(request.param)


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 33, 100, 201])
def test_every_batch_is_given_once_in_order_and_located_once(*, cold: bool, steps: int) -> None:
    recorder = Recorder()
    assert run(recorder, steps) == [(step, 0) for step in range(steps)]
    located = [pair for kind, pairs in recorder.done if kind == "locate" for pair in cast("tuple[Pair, ...]", pairs)]
    assert located == [(step, 0) for step in range(steps)]
    assert any(kind == "rows" for kind, _ in recorder.done) == (cold and steps > 0)


def test_each_stage_is_asked_once_a_batch_in_order_and_two_batches_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heat, "is_cold", property(lambda _: True))
    recorder = Recorder()
    run(recorder, 150)
    when = {what: number for number, what in enumerate(recorder.done)}
    assert len([what for what in recorder.done if what[0] != "locate"]) == 4 * 150
    for step in range(150):
        rows, starts, tokens, fill = (when[kind, (step, 0)] for kind in ("rows", "starts", "tokens", "fill"))
        assert rows < starts < tokens < fill
        if step >= 100:  # the pipeline is full
            assert when["rows", (step, 0)] < when["fill", (step - 5, 0)]
            assert when["starts", (step, 0)] < when["fill", (step - 3, 0)]
            assert when["tokens", (step, 0)] < when["fill", (step - 1, 0)]


@pytest.mark.usefixtures("cold")
def test_a_batch_that_cannot_be_located_fails_in_its_turn_after_all_before_it() -> None:
    recorder = Recorder(bad=70)
    with pytest.raises(StoreError, match="step 70 cannot be located"):
        run(recorder, 100)
    assert [what for kind, what in recorder.done if kind == "fill"] == [(step, 0) for step in range(70)]


def test_heat_ends_after_a_while_without_reads_and_begins_again_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    monkeypatch.setattr(lookahead, "_reads", lambda: count)
    heat = Heat()
    for _ in range(WARM_AFTER):
        assert heat.is_cold
        heat.note()
    assert not heat.is_cold
    heat.note()
    assert not heat.is_cold
    count = 1
    heat.note()
    assert heat.is_cold
