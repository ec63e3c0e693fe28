"""Schedules, targets and weights against diffusers' own functions, and draws that depend only on a sample's key."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3, compute_snr
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bucketline.errors import UsageError
from bucketline.loader import Batch, Loader, LoaderConfig, WeightedStore
from bucketline.loader.batch import LatentScale, as_fields
from bucketline.loader.plan.order import Purpose, normal
from bucketline.store import Store
from bucketline.store.format.block import LatentKind
from bucketline.train.config import LossWeight, Objective, ObjectiveOptions, TimestepRange, Timesteps
from bucketline.train.noise import (
    FlowSchedule,
    Mixing,
    Noised,
    NoiseSchedule,
    Prep,
    add_noise,
    draw_timesteps,
    sample_noise,
    squared_error,
    target,
    weights_of_errors,
)
from bucketline.train.run import train
from bucketline.train.step import Training, loss_of, mean_weight, train_step, validate
from tests.unit.train.tiny_run import (
    ALONE,
    add_to_store,
    config,
    facts,
    load,
    losses,
    make_batch,
    make_training,
    samples,
    train_in_two_parts,
    write_unet,
)

CPU = torch.device("cpu")
SCALE = LatentScale(scale=0.5, shift=0.25)
ALPHAS = torch.linspace(0.999, 0.01, 1000)
SCHEDULER: Any = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")


def flow(shift: Any = 3.0, patch_size: int = 2) -> FlowSchedule:
    return FlowSchedule(num_timesteps=1000, shift=shift, patch_size=patch_size)


def drawn(num: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(num, 2, 3, 5, generator=generator) for _ in range(2)]


def test_noise_is_added_and_v_is_predicted_as_in_diffusers_and_the_paper() -> None:
    timesteps, (clean, noise) = torch.tensor([0, 1, 500, 999]), drawn(4)
    mixing = NoiseSchedule.from_alphas_cumprod(SCHEDULER.alphas_cumprod, CPU).at(timesteps, 3, 5)
    noisy, v = add_noise(clean, noise, mixing), target(Objective.V_PREDICTION, clean, noise, mixing)
    torch.testing.assert_close(noisy, SCHEDULER.add_noise(clean, noise, timesteps))
    torch.testing.assert_close(v, SCHEDULER.get_velocity(clean, noise, timesteps))
    torch.testing.assert_close(mixing.signal * noisy - mixing.noise * v, clean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixing.noise * noisy + mixing.signal * v, noise, atol=1e-5, rtol=1e-5)
    assert target(Objective.EPSILON, clean, noise, mixing) is noise


def test_a_flows_target_is_the_velocity_from_image_to_noise() -> None:
    """Along the straight path, x_t changes by it per unit of the noise's share."""
    clean, noise = drawn()
    early, late = (flow(1.0).at(torch.full((2,), index), 3, 5) for index in (299, 799))
    moved = add_noise(clean, noise, late) - add_noise(clean, noise, early)
    torch.testing.assert_close(moved, 0.5 * target(Objective.FLOW, clean, noise, early), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_flows_timesteps_are_those_that_diffusers_scheduler_has(shift: float) -> None:
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=shift)
    found = flow(shift).at(torch.arange(1000), 8, 8)
    torch.testing.assert_close(found.noise.flatten(), scheduler.sigmas.flip(0))
    torch.testing.assert_close(found.timesteps, scheduler.timesteps.flip(0), rtol=1e-5, atol=1e-3)
    clean, noise = drawn()
    told = scheduler.timesteps.flip(0)[[10, 700]]
    mixing = flow(shift).at(torch.tensor([10, 700]), 3, 5)
    torch.testing.assert_close(add_noise(clean, noise, mixing), scheduler.scale_noise(clean, told, noise))


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize("size", [(32, 32), (64, 96), (128, 128)])
def test_a_flows_shift_by_size_is_that_of_flux_and_sd3_in_diffusers(kind: str, size: tuple[int, int]) -> None:
    scheduler: Any = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type=kind)
    wanted = scheduler.time_shift(calculate_shift((size[0] // 2) * (size[1] // 2)), 1.0, scheduler.sigmas.flip(0))
    by_size = {"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256, "max_image_seq_len": 4096}
    found = flow({**by_size, "time_shift_type": kind}).at(torch.arange(1000), *size)
    torch.testing.assert_close(found.noise.flatten(), wanted)
    torch.testing.assert_close(found.timesteps, wanted * 1000, rtol=1e-5, atol=1e-3)


def min_snr(objective: Objective, mixing: Mixing, gamma: float) -> torch.Tensor:
    found = weights_of_errors(LossWeight(name="min-snr", gamma=gamma), objective, mixing)
    assert found is not None
    return found


@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_min_snr_weights_are_those_of_diffusers_training_scripts(gamma: float) -> None:
    timesteps = torch.arange(1000)
    snr = compute_snr(SCHEDULER, timesteps)
    mixing = NoiseSchedule.from_alphas_cumprod(SCHEDULER.alphas_cumprod, CPU).at(timesteps, 8, 8)
    torch.testing.assert_close(min_snr(Objective.EPSILON, mixing, gamma), snr.clamp(max=gamma) / snr)
    torch.testing.assert_close(min_snr(Objective.V_PREDICTION, mixing, gamma), snr.clamp(max=gamma) / (snr + 1))
    only_noise = NoiseSchedule.from_alphas_cumprod(torch.tensor([0.0]), CPU).at(torch.arange(1), 8, 8)
    assert min_snr(Objective.EPSILON, only_noise, gamma).tolist() == [1.0]
    assert min_snr(Objective.V_PREDICTION, only_noise, gamma).tolist() == [0.0]


@pytest.mark.parametrize("weighting", ["cosmap", "sigma-sqrt"])
def test_a_flows_weights_are_those_of_diffusers_training_scripts(weighting: Any) -> None:
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    found = weights_of_errors(LossWeight(name=weighting), Objective.FLOW, flow().at(torch.arange(1000), 8, 8))
    torch.testing.assert_close(found, compute_loss_weighting_for_sd3(weighting.replace("-", "_"), scheduler.sigmas.flip(0)))


def test_squared_error_is_a_mean_per_sample_in_32_bits() -> None:
    prediction = torch.tensor([[[[1.0, 3.0]]], [[[0.0, 0.0]]]], dtype=torch.bfloat16)
    found = squared_error(prediction, torch.tensor([[[[0.0, 1.0]]], [[[2.0, 0.0]]]]))
    assert found.dtype == torch.float32
    assert found.tolist() == [pytest.approx(2.5), pytest.approx(2.0)]


# Draws.


def make_prep(schedule: Any = None, **options: Any) -> Prep:
    schedule = schedule or NoiseSchedule.from_alphas_cumprod(ALPHAS, CPU)
    return Prep(scale=SCALE, schedule=schedule, options=ObjectiveOptions(**options))


def of_moments(num: int, *, first: int = 0) -> Batch:
    return dataclasses.replace(make_batch(num, first=first), latent_kind=LatentKind.MOMENTS)


@pytest.mark.parametrize("make", [make_batch, of_moments])
def test_two_ranks_draw_what_one_rank_draws_and_leave_the_process_generators_alone(make: Any) -> None:
    def joined(parts: list[Noised]) -> list[torch.Tensor]:
        return [torch.cat([getattr(part, name) for part in parts]) for name in ("noisy", "timesteps", "target")]

    prep, before = make_prep(), torch.get_rng_state()
    ranks = joined([prep.for_training(make(2, first=first)) for first in (0, 2)])
    for found, expected in zip(ranks, joined([prep.for_training(make(4))]), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("density", "theirs"),
    [
        (
            Timesteps(name="logit-normal", mean=0.5, std=1.5),
            {"weighting_scheme": "logit_normal", "logit_mean": 0.5, "logit_std": 1.5},
        ),
        (Timesteps(name="mode", scale=1.29), {"weighting_scheme": "mode", "mode_scale": 1.29}),
        (Timesteps(name="mode", scale=-0.8), {"weighting_scheme": "mode", "mode_scale": -0.8}),
        (Timesteps(), {"weighting_scheme": "none"}),
    ],
    ids=["logit_normal", "mode", "mode towards the ends", "uniform"],
)
def test_timesteps_are_spread_as_diffusers_draws_them(density: Timesteps, theirs: dict[str, Any]) -> None:
    """Held by the deciles of both, over 40,000 draws."""
    found = draw_timesteps(ObjectiveOptions(timesteps=density), torch.arange(40_000) * 7919, 1000)
    generator = torch.Generator().manual_seed(0)
    expected = compute_density_for_timestep_sampling(batch_size=40_000, generator=generator, **theirs)
    deciles = torch.linspace(0.1, 0.9, 9)
    difference = found.float().quantile(deciles) / 1000 - expected.quantile(deciles)
    assert float(difference.abs().max()) < 0.02
    assert int(found.min()) >= 0
    assert int(found.max()) <= 999


def test_latents_are_shifted_and_scaled_before_noise_as_the_model_sees_them() -> None:
    batch = make_batch()
    noise = sample_noise(batch)
    noised = make_prep().for_validation(batch, noise, 500)
    clean = (batch.latents.float() - 0.25) * 0.5
    torch.testing.assert_close(noised.noisy, ALPHAS[500].sqrt() * clean + (1 - ALPHAS[500]).sqrt() * noise)
    torch.testing.assert_close(SCALE.invert(SCALE.apply(batch.latents)), batch.latents.float())


@pytest.mark.parametrize("make", [make_batch, of_moments])
def test_a_held_out_samples_noise_and_latent_do_not_depend_on_its_batch_and_step(make: Any) -> None:
    batch, alone, prep = make(4), make(1, first=2), make_prep()
    elsewhere = dataclasses.replace(alone, keys=alone.keys + 99, step=5)
    first, second = (prep.for_validation(one, sample_noise(one), 300).noisy for one in (batch, elsewhere))
    assert torch.equal(first[2:3], second)


def test_a_latent_is_drawn_from_its_moments_as_diffusers_draws_it_and_anew_at_each_step() -> None:
    batch = of_moments(3)
    posterior: Any = DiagonalGaussianDistribution(batch.latents.float())
    own = normal(batch.keys, Purpose.POSTERIOR, shape=(1, 8, 8))
    clean = (posterior.mean + posterior.std * own - 0.25) * 0.5
    noise = normal(batch.keys, Purpose.NOISE, shape=(1, 8, 8))
    found = make_prep().for_training(batch)
    share = ALPHAS[found.timesteps].view(-1, 1, 1, 1)
    torch.testing.assert_close(found.noisy, share.sqrt() * clean + (1 - share).sqrt() * noise)
    assert not torch.equal(normal(batch.keys + 1, Purpose.POSTERIOR, shape=(1, 8, 8)), own)


def test_errors_are_weighted_by_the_noise_that_was_drawn_if_that_is_asked_for() -> None:
    weight, batch = LossWeight(name="min-snr", gamma=5.0), make_batch(8)
    noised = make_prep(loss_weight=weight).for_training(batch)
    mixing = NoiseSchedule.from_alphas_cumprod(ALPHAS, CPU).at(noised.timesteps, 8, 8)
    torch.testing.assert_close(noised.weight, weights_of_errors(weight, Objective.EPSILON, mixing), rtol=0, atol=0)
    noised = make_prep(flow(), loss_weight=LossWeight(name="cosmap")).for_training(batch)
    torch.testing.assert_close(noised.weight, compute_loss_weighting_for_sd3("cosmap", noised.timesteps / 1000))
    assert make_prep().for_training(batch).weight is None


# Rows and timesteps that are learned from, and their weights.


KEYS = torch.arange(4000) * 7919 + 1


@pytest.mark.parametrize("sampling", ["uniform", "logit-normal", "mode"])
def test_timesteps_stay_in_their_range_and_fill_it(sampling: Any) -> None:
    timesteps = Timesteps(name=sampling)
    drawn = draw_timesteps(ObjectiveOptions(timesteps=timesteps, timestep_range=TimestepRange(low=0.25, high=0.75)), KEYS, 1000)
    assert (int(drawn.min()), int(drawn.max())) >= (250, 700)
    assert int(drawn.min()) < 300
    assert int(drawn.max()) < 750
    whole = draw_timesteps(ObjectiveOptions(timesteps=timesteps), KEYS, 1000)
    for low, wanted in ((0.0, whole), (0.5, 500 + whole // 2)):
        ranged = ObjectiveOptions(timesteps=timesteps, timestep_range=TimestepRange(low=low, high=1.0))
        assert torch.equal(draw_timesteps(ranged, KEYS, 1000), wanted)


def test_each_stores_rows_have_its_weight(folder: Path) -> None:
    add_to_store(folder / "other.store", samples({"train/128x128": 6}, prefix="other "))
    stores = (folder / "tiny.store", folder / "other.store")
    with Loader(stores, LoaderConfig(batch_size=2, epochs=1, row_weights=(1.0, 0.25))) as loader:
        found = torch.cat([batch.weight for batch in loader if batch.bucket == "train/128x128"])
    found = found[found > 0]  # the last batch is padded
    assert sorted(found.tolist()) == [0.25] * 6 + [1.0] * (len(found) - 6)
    with pytest.raises(UsageError, match="row_weights has 1 numbers, expected one for each of 2 stores"):
        Loader(stores, LoaderConfig(batch_size=2, row_weights=(1.0,)))


@pytest.mark.parametrize("prior", [1.0, 0.25, 0.0])
def test_the_loss_is_the_weighted_mean_of_the_errors(tmp_path: Path, prior: float) -> None:
    """As diffusers' scripts add two means, of as many instances as priors, but on the scale of a run without weights."""
    training = make_training(tmp_path)
    batch = dataclasses.replace(make_batch(4), weight=torch.tensor([1.0, 1.0, prior, prior]))
    noised = training.prep.for_training(batch)
    weighing = dataclasses.replace(training, mean_weight=(1.0 + prior) / 2)
    with torch.no_grad():
        errors = squared_error(training.predict(training.model, noised.noisy, noised.timesteps, batch), noised.target)
        assert torch.equal(loss_of(training, batch), errors.mean())
        weighted = float(loss_of(weighing, batch))
    diffusers = float(errors[:2].mean() + prior * errors[2:].mean())
    assert weighted == pytest.approx(diffusers / (1 + prior), rel=1e-6)
    assert weighted == pytest.approx(float((errors * batch.weight).sum() / batch.weight.sum()), rel=1e-6)


def test_a_row_that_is_a_batch_of_its_own_keeps_its_weight(tmp_path: Path) -> None:
    """So does one in a bucket that only one store has, on any rank."""
    training = make_training(tmp_path)
    weighing = dataclasses.replace(training, mean_weight=0.5)
    batch = dataclasses.replace(make_batch(1), weight=torch.tensor([0.25]))
    with torch.no_grad():
        assert float(loss_of(weighing, batch)) == pytest.approx(float(loss_of(training, batch)) / 2, rel=1e-6)


def test_weights_count_by_the_rows_that_a_pass_reads(folder: Path) -> None:
    add_to_store(folder / "other.store", samples({"train/128x128": 6}, prefix="other "))
    mine, other = (Store.open(folder / f"{name}.store") for name in ("tiny", "other"))
    rows = sum(bucket.num_rows for bucket in mine.buckets("train"))
    shares = (WeightedStore(store=mine, repeats=3), WeightedStore(store=other))
    asked = config(folder, store=(folder / "tiny.store", f"{folder}/other.store@0.25"))
    assert mean_weight(asked, shares) == pytest.approx((3 * rows + 6 * 0.25) / (3 * rows + 6))
    assert mean_weight(config(folder), shares) is None
    with pytest.raises(UsageError, match="the weight of every --store that has rows is 0, expected one above 0"):
        mean_weight(config(folder, store=(f"{folder}/tiny.store@0", f"{folder}/other.store@0")), shares)
    paths, short = (f"{folder}/tiny.store", f"{folder}/other.store"), {"max_steps": 2, "log_every": 1}
    train(config(folder, **short, store=[f"{path}@2" for path in paths], output_dir=folder / "twos"), ALONE)
    train(config(folder, **short, store=paths, output_dir=folder / "none"), ALONE)
    assert losses(folder / "twos") == losses(folder / "none")


def test_a_run_with_weights_resumes_to_the_bit_and_records_them(folder: Path) -> None:
    add_to_store(folder / "other.store", samples({"train/128x128": 6}, prefix="other "))
    stores = (folder / "tiny.store", f"{folder}/other.store@0.25")
    whole = config(folder, store=stores, output_dir=folder / "whole", max_steps=4, timestep_range="0:0.5")
    train_in_two_parts(whole, 2)
    recorded = json.loads((whole.output_dir / "config.json").read_text(encoding="utf-8"))["config"]
    assert recorded["store"] == list(map(str, stores))


# Validation died on mixed devices.
#
# With latent caching on, OneTrainer's validation met CPU and CUDA tensors in its text encoder. Here a mode lets no operation
# see tensors of two devices, while a training step and a whole validation run with the meta device as the second one:
# with only the meta device, many such meetings would pass.


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
