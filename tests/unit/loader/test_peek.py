"""`loader peek`: the sheet has what a loader delivers at that step, row by row, with the captions that it chose."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pytest

from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.seen import PLANS, append_plan
from tests.commands import Ran, call
from tests.kit import make_store, samples_of
from tests.pages import parsed

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.store import Store

OPTIONS = ("--batch-size", 3, "--accumulation", 2, "--caption-dropout", 0.3, "--seed", 5)
CONFIG = LoaderConfig(batch_size=3, accumulation=2, caption_dropout=0.3, seed=5)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("peek") / "s", samples_of({"train/64x96": 25, "train/64x64": 14}))


def peek(store: Store, page: Path, *more: object) -> Ran:
    return call("loader", "peek", store.path, "-o", page, *OPTIONS, *more)


@pytest.mark.parametrize("step", [0, 4, 11])
def test_the_sheet_has_the_rows_and_captions_of_that_step(store: Store, step: int, tmp_path: Path) -> None:
    ran = peek(store, tmp_path / "step.html", "--step", step, "--world-size", 2, "--json").done()
    told = ran.json
    assert [(one["rank"], one["micro_step"]) for one in told["batches"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank in range(2):
        with Loader(store.path, CONFIG, rank=rank, world_size=2) as loader:
            batches = loader.forever()
            for _ in range(2 * step):
                next(batches)
            for micro_step in range(2):
                batch, own = next(batches), told["batches"][2 * rank + micro_step]
                assert (batch.step, batch.bucket, batch.epoch) == (step, told["bucket"], told["epoch"])
                assert loader.names(batch) == [row["id"] for row in own["rows"]]
                texts = [row["caption"] for row in own["rows"]]
                for n, text in enumerate(texts):
                    stored = store.read_caption(0, _row_of(store, loader.names(batch)[n], text))
                    tokens = batch.tokens[n][batch.token_mask[n]].numpy()
                    assert np.array_equal(tokens, stored["tokens"])
    found = parsed(tmp_path / "step.html")
    for batch_told in told["batches"]:
        for row in batch_told["rows"]:
            assert row["id"] in found.text
            assert (row["caption"] or "(the empty caption)") in found.text
    assert found.tags.count("img") == 12


def _row_of(store: Store, sample_id: str, text: str) -> int:
    record = store.sample(sample_id)[1]
    return record.caption_rows[record.captions.index(text)] if text else 0  # the first one of a shard is the empty caption


def test_a_step_below_0_and_a_page_that_cannot_be_written_are_refused(store: Store, tmp_path: Path) -> None:
    peek(store, tmp_path / "step.html", "--step", -1).fails("--step is -1, expected 0 or more", code=2)
    (tmp_path / "step.html").write_text("mine", encoding="ascii")
    assert "step.html exists" in peek(store, tmp_path / "step.html", "--step", 0).err
    assert "name a file that ends in .html" in peek(store, tmp_path / "step.png", "--step", 0).err


def test_the_sheet_of_a_run_has_what_its_steps_had(tmp_path: Path) -> None:
    samples = samples_of({"train/64x64": 600})
    store = make_store(tmp_path / "s", samples[:200], samples[200:400], samples[400:])
    state = tmp_path / "state.json"
    config = LoaderConfig(batch_size=4, accumulation=2, window=64, seed=3, caption_dropout=0.5)
    expected: dict[int, list[str]] = {}
    with Loader(store.path, config) as loader:
        append_plan(tmp_path / PLANS, loader)
        for batch in islice(loader.forever(), 6):
            expected.setdefault(batch.step, []).extend(loader.names(batch))
        saved = loader.state_dict()
    with Loader(store.path, replace(config, window=None, seed=9, accumulation=1)) as loader:
        loader.start_anew(saved)
        append_plan(tmp_path / PLANS, loader)
        for batch in islice(loader.forever(), 2):
            expected.setdefault(batch.step, []).extend(loader.names(batch))
        state.write_text(json.dumps(loader.state_dict()), encoding="utf-8")
    asked = ("loader", "peek", store.path, "-o", tmp_path / "step.html", "--run", state, "--json")
    assert [*expected] == [0, 1, 2, 3, 4]
    for step, names in expected.items():
        batches = call(*asked, "--step", step).done().json["batches"]
        assert [row["id"] for batch in batches for row in batch["rows"]] == names
    refused = call(*asked, "--step", 3, "--window", 0).fails(code=2)
    assert f"--window is 0 with --run {state}, which decides it; leave out one of them" in refused.err
    (tmp_path / PLANS).write_text("[1]\n", encoding="utf-8")
    call(*asked, "--step", 9).fails(f"--run {state}: {tmp_path / PLANS}, line 1, is not the line of a plan")
