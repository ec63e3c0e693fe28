"""Facts from the records of a loop, in words. Pure."""

from __future__ import annotations

from collections import Counter
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from bucketline.bench.peers.loops.run import BATCH_SIZE, NUM_ROWS, VALIDATION_ROWS
from bucketline.bench.peers.loops.scenarios import BREAK_AT, SAVED_AT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bucketline.bench.peers.loops.scenarios import Record

    Epoch = list[list[int]]  # batches of rows' numbers


def facts(seen: Mapping[str, list[Record]]) -> dict[str, str]:
    """Return what happened in a loop's scenarios, by question."""
    epochs = {name: merged(records) for name, records in seen.items()}
    whole, one_shape = epochs["whole"], epochs["one shape"]
    before = [*whole[:1], epochs["killed"][1][:SAVED_AT]]
    one_before = [*one_shape[:1], epochs["one shape, saved"][1][:SAVED_AT]]

    def told(name: str, what: str) -> str:
        errors = [record["error"] for record in seen[name] if record["error"]]
        return f"error: {errors[0]}" if errors else what

    def resumed(name: str, unbroken: list[Epoch], until: list[Epoch]) -> str:
        return told(name, compared(unbroken, until, epochs[name]))

    return {
        f"rows of the {len(whole)} epochs, of {NUM_ROWS}": told("whole", amounts(whole)),
        "rows in a batch": sizes(whole),
        "shapes in a batch": shapes(seen["whole"]),
        "a new order in each epoch": "yes" if len({str(epoch) for epoch in whole}) == len(whole) else "no",
        "the same order in a second run": "yes" if epochs["killed"][0] == whole[0] else "no",
        f"`break` after {BREAK_AT} batches: the next `for`": told("after a break", begins(whole, epochs["after a break"])),
        "saved in mid-epoch, resumed": resumed("resumed", whole, before),
        "saved after an epoch's last batch, resumed": resumed("resumed from the last batch", whole, whole[:1]),
        "saved after the `for`, resumed": resumed("resumed from the epoch's end", whole, whole[:1]),
        "saved in mid-epoch, resumed on 2 ranks": resumed("resumed on two", whole, before),
        "saved in mid-epoch, resumed; all rows of one shape": resumed("one shape, resumed", one_shape, one_before),
        "the same, resumed on 2 ranks": resumed("one shape, resumed on two", one_shape, one_before),
        "2 ranks from the start": told("on two", on_two(whole, seen["on two"])),
        "validation, after a look at its first batch": validations(seen["whole"][0]["validations"]),
        "all shapes written as one data set": told("in one", "works: " + shapes(seen["in one"]) + " in a batch"),
    }


def merged(ranks: list[Record]) -> list[Epoch]:
    """Return the batches of each `for`, those of all ranks at a step in one."""
    loops = zip_longest(*([loop["batches"] for loop in record["loops"]] for record in ranks), fillvalue=[])
    return [[list(chain.from_iterable(step)) for step in zip_longest(*own, fillvalue=[])] for own in loops]


def amounts(epochs: list[Epoch]) -> str:
    """Return how many rows each epoch had, and how often each row came in all.

    >>> amounts([[[*range(60)]], [[*range(66)]]])
    '60, 66; in all, 6 rows came once, 60 twice'
    """
    totals = Counter(chain.from_iterable(chain.from_iterable(epochs)))
    times = Counter(totals[number] for number in range(NUM_ROWS))
    per_epoch = ", ".join(str(len(_rows(epoch))) for epoch in epochs)
    if len(times) == 1:
        return f"{per_epoch}; in all, each row came {_times(*times)}"
    kinds = [
        f"{many} rows came {_times(often)}" if at == 0 else f"{many} {_times(often)}"
        for at, (often, many) in enumerate(sorted(times.items()))
    ]
    return f"{per_epoch}; in all, " + ", ".join(kinds)


def sizes(epochs: list[Epoch]) -> str:
    """Return how many batches were short.

    >>> sizes([[[1] * 8, [1] * 3], [[1] * 8]])
    '8; fewer in 1 of 3 batches'
    """
    every = [len(batch) for batch in chain.from_iterable(epochs)]
    short = sum(size < BATCH_SIZE for size in every)
    return f"{BATCH_SIZE}; fewer in {short} of {len(every)} batches" if short else f"{BATCH_SIZE}, always"


def shapes(ranks: list[Record]) -> str:
    """Return whether a batch's latents had one shape: a loop gets them as one array, or its process ends."""
    every = {tuple(shape) for record in ranks for loop in record["loops"] for shape in loop["shapes"]}
    return f"1, of {len(every)}" if all(len(shape) == 3 for shape in every) else "arrays of arrays"


def begins(whole: list[Epoch], loops: list[Epoch]) -> str:
    """Return where the `for` after a `break` began.

    >>> begins([[[1], [2], [3], [4]], [[5]]], [[[1], [2], [3]], [[5]]])
    'the next epoch'
    """
    if len(loops) < 2:
        return "no `for` after it"
    known = {
        "the next epoch": whole[1],
        "the same epoch again": whole[0],
        "the next batch of the same epoch": whole[0][BREAK_AT:],
    }
    own = f"another order, of {len(_rows(loops[1]))} rows"
    return next((what for what, epoch in known.items() if epoch == loops[1]), own)


def on_two(whole: list[Epoch], ranks: list[Record]) -> str:
    """Return what two ranks had of the epochs, and whether it is what one had."""
    epochs = merged(ranks)
    same = as_sets(epochs) == as_sets(whole)
    apart = sum(
        first != second
        for loops in zip(*(record["loops"] for record in ranks), strict=True)
        for first, second in zip_longest(*(loop["shapes"] for loop in loops))
    )
    steps = sum(map(len, epochs))
    order = "the batches of 1 rank" if same else "other batches than on 1 rank"
    together = "the same shape on both at every step" if not apart else f"other shapes at {apart} of {steps} steps"
    return f"{order}; {together}; rows {amounts(epochs)}"


def compared(whole: list[Epoch], before: list[Epoch], after: list[Epoch]) -> str:
    """Return whether what came before a checkpoint and after it are all epochs; if not, what was lost or came again.

    `before` ends with the epoch of the checkpoint.

    >>> compared([[[1], [2]], [[2], [1]]], [[[1]]], [[[2]], [[2], [1]]])
    'exact'
    >>> compared([[[1], [2]], [[2], [1]]], [[[1]]], [[[1], [2]], [[2], [1]]])
    'not exact: 1 row again'
    """
    batches = [*chain.from_iterable(before), *chain.from_iterable(after)]
    if as_sets([batches]) == as_sets([[*chain.from_iterable(whole)]]):
        return "exact" if all(after) else "exact; the first `for` is empty"
    found, expected = Counter(_rows(batches)), Counter(_rows([*chain.from_iterable(whole)]))
    lost, again = (found - expected).total(), (expected - found).total()
    told = [f"{_count(many)} {what}" for many, what in ((again, "lost"), (lost, "again")) if many]
    empty = "" if all(after) else "; the first `for` is empty"
    return "not exact: " + (", ".join(told) or "the same rows in other batches") + empty


def as_sets(epochs: list[Epoch]) -> list[list[list[int]]]:
    """Return the batches without the order of their rows."""
    return [[sorted(batch) for batch in epoch] for epoch in epochs]


def validations(seen: list[list[int]]) -> str:
    """Return whether each validation after the broken one had the same rows, all of them."""
    rest, rows = seen[1:], sum(VALIDATION_ROWS.values())
    complete = all(sorted(own) == list(range(rows)) for own in rest)
    if complete and all(own == rest[0] for own in rest):
        return f"the same {rows} of {rows} rows each time, in the same order"
    return "rows " + ", ".join(str(len(set(own))) for own in rest) + f" of {rows}" + ("" if complete else "; not all")


def _rows(batches: Iterable[list[int]]) -> list[int]:
    return [*chain.from_iterable(batches)]


def _times(often: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(often, f"{often} times")


def _count(rows: int) -> str:
    return f"{rows} row" if rows == 1 else f"{rows} rows"
