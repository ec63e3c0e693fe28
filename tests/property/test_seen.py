"""`loader seen` tells what a recording of every batch tells: over ranks, resumes, plans, mixtures and generations."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bucketline.errors import PlanError
from bucketline.loader import Loader, LoaderConfig, Remainder, WeightedStore
from bucketline.loader.seen import PLANS, Seen, append_plan, read_run
from bucketline.store import Store
from bucketline.store.change.commit import drop
from tests.conditioned import Form, growing_store, tokens_of

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.loader.batch import Batch
    from tests.kit import Sample

FORM = Form(pooled=False)
TOTAL = 4  # ranks x accumulation: one rank, two or four
Sight = tuple[int, int, int, int, int, str, bytes, tuple[int, int], bool]


@dataclass(kw_only=True)
class Recording:
    """The samples of batches: for each, the batches that had it."""

    rows: dict[bytes, Sample]
    seen: dict[str, list[Sight]] = field(default_factory=lambda: defaultdict(list))

    def note(self, batch: Batch, rank: int, accumulation: int, step: int) -> None:
        size = len(batch.ids)
        for n in np.flatnonzero(batch.weight.numpy() > 0).tolist():
            name = self.rows[batch.ids[n].numpy().tobytes()].record.id
            tokens = batch.tokens[n, : int(batch.token_mask[n].sum())].numpy().tobytes()
            top, left = batch.crop[n].tolist()
            at = (step, batch.epoch, rank, batch.micro_step, (rank * accumulation + batch.micro_step) * size + n)
            self.seen[name].append((*at, batch.bucket, tokens, (top, left), bool(batch.flipped[n])))


@dataclass(frozen=True, kw_only=True)
class Stores:
    """Two stores, of which the first one has grown and lost some rows."""

    paths: tuple[Path, Path]
    generations: tuple[int, ...]  # of the first
    rows: dict[bytes, Sample]

    def some(self, draw: random.Random) -> list[WeightedStore]:
        first = Store.open(self.paths[0], draw.choice(self.generations))
        shares = [WeightedStore(store=first, repeats=draw.choice([1, 1, 2]))]
        if draw.random() < 0.5:
            shares.append(WeightedStore(store=Store.open(self.paths[1]), repeats=draw.choice([1, 3])))
        return shares


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Stores:
    folder = tmp_path_factory.mktemp("seen")
    one, rows = growing_store(folder / "one.store", FORM, [range(14), range(14, 23), range(23, 37)])
    generations = list(range(1, one.manifest.generation + 1))
    drop(one.path, ["3.png", "16.png", "17.png", "30.png"])
    _, others = growing_store(folder / "two.store", FORM, [range(100, 111)])
    newest = Store.open(one.path).manifest.generation
    open_ = [n for n in [*generations, newest] if Store.open(one.path, n).buckets()]
    return Stores(paths=(one.path, folder / "two.store"), generations=tuple(open_), rows={**rows, **others})


def random_options(draw: random.Random) -> dict[str, Any]:
    batch = draw.choice([{"batch_size": 1}, {"batch_size": 2}, {"batch_size": 3}, {"batch_pixels": 2 * 64 * 128}])
    window = draw.choice([None, 16, 20, 4096, 0])
    return {
        **batch,
        "lanes": draw.choice([1, 2, 4]) if window else None,
        "window": window,
        "remainder": draw.choice(list(Remainder)),
        "seed": draw.getrandbits(40),
        "caption_dropout": draw.choice([0.0, 0.3]),
        "flip": draw.choice([0.0, 0.5]),
    }


def record_a_run(draw: random.Random, stores: Stores, folder: Path) -> Recording:
    """Run loaders over up to four stretches, each on other ranks, in a new plan, or after a jump; save the last state."""
    recording = Recording(rows=stores.rows)
    shares, options = stores.some(draw), random_options(draw)
    state: dict[str, object] | None = None
    done = 0
    for _ in range(draw.randint(1, 4)):
        if is_new := state is not None and draw.random() < 0.3:
            shares, options = stores.some(draw), random_options(draw)
        world, accumulation = draw.choice([(1, 4), (2, 2), (4, 1), (1, 4)])
        steps, epoch = draw.randint(0, 14), draw.choice([None, None, 0, 1, 2])
        after: dict[str, object] = {}
        later = shares
        for rank in range(world):
            config = LoaderConfig(**options, accumulation=accumulation)
            with Loader(shares, config, rank=rank, world_size=world) as loader:
                if state is not None:
                    (loader.start_anew if is_new else loader.load_state_dict)(json.loads(json.dumps(state)))
                if epoch is not None:
                    loader.set_epoch(epoch)
                step = done
                for part in (steps // 2, steps - steps // 2):
                    append_plan(folder / PLANS, loader, step)
                    for n, batch in enumerate(islice(loader.forever(), part * accumulation)):
                        recording.note(batch, rank, accumulation, step + n // accumulation)
                    step += part
                after, later = loader.state_dict(), list(loader.stores)
        state, shares, done = after, later, done + steps
    (folder / "state.json").write_text(json.dumps(state))
    return recording


def check(seed: int, stores: Stores, folder: Path) -> int:
    """Compare what is computed with what was recorded in one random run; return how often samples were seen."""
    draw = random.Random(seed)
    while True:
        (folder / PLANS).unlink(missing_ok=True)
        try:
            recording = record_a_run(draw, stores, folder)
            break
        except PlanError:  # `drop`, and no bucket fills a batch
            continue
    seen = Seen(read_run(folder / "state.json"))
    assert not seen.unknown
    counts, known = {name: own for name, *own in seen.every_sample()}, {row.record.id for row in stores.rows.values()}
    assert set(counts) <= known
    for name, recorded in recording.seen.items():
        steps = [one[0] for one in recorded]
        assert counts[name] == [len(recorded), min(steps), max(steps)], (seed, name)
    total = sum(map(len, recording.seen.values()))
    assert sum(count for count, *_ in counts.values()) == total, seed
    assert all((count == 0) == (first == last == -1) for count, first, last in counts.values())
    names = draw.sample(sorted(known), 6)
    for name, (sightings, _) in zip(names, seen.find(names), strict=True):
        found = [
            (
                *(one.step, one.epoch, one.rank, one.micro_step, one.position, one.bucket),
                tokens_of(FORM, one.text or "").tobytes(),
                one.crop,
                one.flipped,
            )
            for one in sightings
        ]
        assert sorted(found) == sorted(recording.seen.get(name, [])), (seed, name)
    return total


@pytest.mark.parametrize("seed", range(4))
def test_what_is_computed_is_what_was_recorded(stores: Stores, tmp_path: Path, seed: int) -> None:
    check(seed, stores, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10, 210, 20))
def test_what_is_computed_is_what_was_recorded_in_two_hundred_runs(stores: Stores, tmp_path: Path, first: int) -> None:
    assert sum(check(seed, stores, tmp_path) for seed in range(first, first + 20)) > 1000
