"""The steady step does not wait for the device, collect garbage or compile."""

from __future__ import annotations

import gc
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bucketline.train import run as run_module
from bucketline.train.log import read_metrics
from bucketline.train.parallel import StopRequest
from bucketline.train.run import train
from bucketline.train.step import train_step, validate
from tests.unit.train.tiny_run import ALONE, config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# Operations whose result the host has to read before it can continue; on a GPU each of them waits for all that came before.
READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim")


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that make the host wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.num_operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.num_operations += 1
        name = func.overloadpacket.__name__
        if name in READS or (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_steps_and_windows_make_the_host_read_nothing(folder: Path) -> None:
    """The host reads of a run (weights checked before the checkpoint, validations) do not grow with its steps."""
    found = {}
    for steps in (2, 6):
        with HostReads() as mode:
            train(config(folder, output_dir=folder / str(steps), max_steps=steps, log_every=2), ALONE)
        found[steps] = mode
    assert found[6].num_operations > found[2].num_operations + 1000
    assert found[6].counts == found[2].counts
    assert found[2].counts["_local_scalar_dense"] > 0


def test_the_mode_counts_a_read() -> None:
    with HostReads() as mode:
        assert float(torch.ones(())) == 1
        _ = torch.ones(3)[torch.ones(3, dtype=torch.bool)]
    assert mode.counts == {"_local_scalar_dense": 1, "index": 1}


def test_garbage_is_collected_between_steps_only_and_as_before_after_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_on = []
    real = train_step

    def step(*args: Any) -> object:
        was_on.append(gc.isenabled())
        return real(*args)

    monkeypatch.setattr(run_module, "train_step", step)
    thawed: list[bool] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(gc.isenabled()))
    train(config(folder, max_steps=2), ALONE)
    assert was_on == [False, False]
    assert thawed == [False]
    assert gc.isenabled()


def test_what_lies_between_two_steps_counts_and_a_pause_does_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only a step (0.25 s), the agreement after it (1 s) and a validation (100 s) advance."""
    now = [0.0]

    def lasting(seconds: float, plain: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            now[0] += seconds
            return plain(*given, **named)

        return run

    monkeypatch.setattr(run_module, "mark", lambda _: now[0])
    monkeypatch.setattr(run_module, "train_step", lasting(0.25, train_step))
    monkeypatch.setattr(run_module, "validate", lasting(100.0, validate))
    monkeypatch.setattr(StopRequest, "agreed", lasting(1.0, StopRequest.agreed))
    train(config(folder, max_steps=6, log_every=6, validate_every=3, num_images=0), ALONE)
    (line,) = (line for line in read_metrics(folder / "run") if "loss" in line)
    # 0.25 for the first step and the one after the pause, 1.25 for the others
    assert (line["step_s_p50"], line["step_s_p99"]) == (1.25, 1.25)
    assert line["samples_per_s"] == pytest.approx(6 * 4 / (2 * 0.25 + 4 * 1.25))
