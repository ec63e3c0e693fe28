"""How large a batch is: fixed, or by a budget, the same for a bucket each time; senseless settings are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from bucketline.errors import UsageError
from bucketline.loader import Loader, LoaderConfig, Remainder, make_plan
from bucketline.store import Store

PIXELS = {"train/64x64": 4096, "train/96x64": 6144, "train/64x128": 8192}


@pytest.mark.parametrize(
    ("budget", "rows"),
    [
        ({"batch_pixels": 16_384}, (4, 2, 2)),
        ({"batch_pixels": 24_576, "batch_multiple": 2}, (6, 4, 2)),
        ({"batch_pixels": 1, "batch_multiple": 3}, (3, 3, 3)),
        ({"batch_tokens": 256}, (4, 2, 2)),
        ({"batch_tokens": 1000, "batch_multiple": 4}, (12, 8, 4)),
        ({"batch_size": 5}, (5, 5, 5)),
    ],
)
def test_a_budget_gives_each_bucket_as_many_rows_as_fit_in_multiples_and_one_multiple_at_least(
    store: Store, budget: dict[str, int], rows: tuple[int, int, int]
) -> None:
    config = LoaderConfig(**budget, accumulation=3, epochs=6)  # type: ignore[arg-type]
    expected = dict(zip(PIXELS, rows, strict=True))
    plan = make_plan(store, config, world_size=2)
    assert {bucket.name: bucket.global_batch for bucket in plan.buckets} == {name: 6 * n for name, n in expected.items()}
    with Loader(store, config, rank=1, world_size=2) as loader:
        found = {(batch.bucket, len(batch.latents), len(batch.weight)) for batch in loader.forever()}
    assert found == {(name, n, n) for name, n in expected.items() if any(name == bucket for bucket, *_ in found)}
    assert len(found) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "no batch size given: pass batch_size, batch_pixels or batch_tokens"),
        ({"batch_size": 2, "batch_pixels": 5}, "set by batch_size 2 and batch_pixels 5, expected exactly one"),
        ({"batch_tokens": 2, "batch_pixels": 5}, "set by batch_pixels 5 and batch_tokens 2, expected exactly one"),
        ({"batch_pixels": 0}, "batch_pixels is 0, expected 1 or more"),
        ({"batch_tokens": -1}, "batch_tokens is -1, expected 1 or more"),
        ({"batch_pixels": 5, "batch_multiple": 0}, "batch_multiple is 0, expected 1 or more"),
        ({"batch_size": 5, "batch_multiple": 4}, "batch_multiple is 4 with a batch_size of 5"),
        ({"batch_size": 5, "window": 15}, "window is 15, expected 16 or more, or 0"),
        ({"batch_size": 1, "lanes": 2}, "lanes is 2 with window None"),
        ({"batch_size": 1, "lanes": 2, "window": 0}, "lanes is 2 with window 0"),
        ({"batch_size": 1, "rewind": True, "epochs": 3}, "rewind is set and epochs is 3"),
        *(
            ({"batch_size": 1, name: 0}, f"{name} is 0, exp")
            for name in ("batch_size", "accumulation", "prefetch_bytes", "epochs")
        ),
        *(({"batch_size": 1, "seed": value}, f"seed is {value}, expected") for value in (-1, 1 << 63)),
        *(({"batch_size": 1, "caption_dropout": value}, f"caption_dropout is {value}, expected") for value in (-0.1, 1.1)),
    ],
)
def test_a_senseless_setting_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LoaderConfig(**changes)


def test_plain_words_are_the_choices_of_their_names_and_others_are_refused() -> None:
    for remainder in Remainder:
        assert LoaderConfig(batch_size=1, remainder=str(remainder)).remainder is remainder  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="remainder is 'keep', expected carry or drop or partial"):
        LoaderConfig(batch_size=1, remainder="keep")  # type: ignore[arg-type]
