"""Validation died on mixed devices.

With latent caching on, OneTrainer's validation met CPU and CUDA tensors in its text encoder. Here a mode lets no operation
see tensors of two devices, while a training step and a whole validation run with the meta device as the second one:
with only the meta device, many such meetings would pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bucketline.loader.batch import as_fields
from bucketline.train.step import Training, train_step, validate
from tests.unit.train.tiny_run import facts, load, make_batch, make_training, write_unet

BATCHES = [make_batch(device="meta"), make_batch(2, device="meta", height=12)]


class OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets no operation see tensors of two devices, nor move one to another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._check(func, (args, kwargs))
        result = func(*args, **(kwargs or {}))
        self._check(func, (args, kwargs, result))
        self.num_operations += 1
        return result

    def _check(self, func: Any, seen: object) -> None:
        devices = {leaf.device for leaf in tree_leaves(seen) if isinstance(leaf, torch.Tensor)}
        if len(devices) > 1:
            raise AssertionError(f"{func} saw tensors on {sorted(map(str, devices))}")


class Unfused(torch.optim.AdamW):
    """The fused step does not run on the meta device, and no other takes `found_inf`."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:
        parameter = self.param_groups[0]["params"][0]
        assert self.__dict__.pop("found_inf").device == parameter.device
        return super().step(closure)


def training_on(folder: Path, device: str) -> Training:
    family, model = load(write_unet(folder), facts(), seed=0)
    return make_training(
        folder, loaded=(family, model.to(device)), optimizer_of=lambda one: Unfused(one.parameters(), foreach=True)
    )


def run_validation(training: Training) -> None:
    # What is reduced is read by the host; the meta device has nothing to read.
    validate(training, BATCHES, lambda sums: torch.ones(sums.shape, dtype=sums.dtype))


def test_a_training_step_and_a_validation_run_on_one_device(tmp_path: Path) -> None:
    training = training_on(tmp_path, "meta")
    with OneDevice() as mode:
        outcome = train_step(training, iter(BATCHES), 0)
        assert mode.num_operations > 100
        run_validation(training)
    assert outcome.loss.device == outcome.grad_norm.device == torch.device("meta")


def test_the_mode_catches_a_model_on_another_device_and_what_the_meta_device_lets_pass(tmp_path: Path) -> None:
    training = training_on(tmp_path, "cpu")
    with OneDevice(), pytest.raises(AssertionError, match=r"saw tensors on \['cpu', 'meta'\]"):
        run_validation(training)
    on_meta, on_cpu = torch.ones(3, device="meta"), torch.ones(())
    assert (on_meta * on_cpu).device.type == "meta"
    with OneDevice(), pytest.raises(AssertionError, match=r"mul.* saw tensors on \['cpu', 'meta'\]"):
        _ = on_meta * on_cpu


@pytest.mark.parametrize("field", ["tokens", "latents", "token_mask", "keys", "weight"])
def test_a_batch_of_two_devices_cannot_be_made(field: str) -> None:
    batch = make_batch()
    with pytest.raises(AssertionError, match="must share one device"):
        dataclasses.replace(batch, **as_fields({**batch.by_name(), field: batch.by_name()[field].to("meta")}))
