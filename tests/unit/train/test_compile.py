"""Before the clock: compiled blocks, every bucket once, and what a step of each takes."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bucketline.errors import TrainError
from bucketline.loader import Loader, LoaderConfig
from bucketline.loader import loader as loader_module
from bucketline.loader.latent_scale import LatentScale
from bucketline.loader.mixture import open_shares
from bucketline.store import Store
from bucketline.train import compile as compile_module
from bucketline.train import data, model
from bucketline.train.compile import compile_blocks, count_flops, example_batches, flops_of_buckets, graphs_compiled, warm_up
from bucketline.train.config import Compile, Objective
from bucketline.train.ema import Average
from bucketline.train.images.pipeline import draw_latents
from bucketline.train.images.prompts import DrawingBatch
from bucketline.train.models.load import load
from bucketline.train.noise import FlowSchedule, NoiseSchedule, Prep, load_schedule, sample_noise
from bucketline.train.parallel import repeated_blocks
from bucketline.train.run import train
from bucketline.train.step import Training, loss_of, train_step
from bucketline.train.validation import validate
from tests.family_models import tiny_vae
from tests.unit.families.forms import EVERY_FORM, batch_of_lengths, facts_for, predicted, write_form
from tests.unit.train.test_step import make_training
from tests.unit.train.tiny_run import ALONE, add_to_store, config, make_batch, make_training_store, samples, write_unet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.loader import Batch


MOST_TOKENS = 70

# Dynamo hides this warning from people; where warnings are errors it fails instead.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def dynamo() -> Iterator[Any]:
    """Dynamo's settings, as they were again afterwards, and nothing compiled left behind."""
    import torch._dynamo as dynamo

    with dynamo.config.patch(
        automatic_dynamic_shapes=True,
        optimize_ddp=True,
        recompile_limit=8,
        accumulated_recompile_limit=256,
        fail_on_recompile_limit_hit=False,
    ):
        yield dynamo.config
    dynamo.reset()


def state_of(training: Training) -> dict[str, Any]:
    with training.averaged() as averaged:
        average = copy.deepcopy(averaged.state_dict())
    return copy.deepcopy(
        {
            "model": training.model.state_dict(),
            "average": average,
            "optimizer": training.optimizer.state_dict()["state"],
            "random": torch.get_rng_state(),
        }
    )


def test_warming_changes_no_weight_no_optimizer_and_no_generator(tmp_path: Path) -> None:
    training = make_training(tmp_path, accumulation=1)
    train_step(training, iter([make_batch()]), 0)
    before = state_of(training)
    warm_up(training, [make_batch(2), make_batch(3, height=12)])
    assert all(parameter.grad is None for parameter in training.model.parameters())
    torch.testing.assert_close(state_of(training), before, rtol=0, atol=0)


def test_warming_makes_the_moments_and_the_first_step_is_the_same(tmp_path: Path) -> None:
    """Memory ends then, and not at the first step."""
    warm, cold = make_training(tmp_path, accumulation=1), make_training(tmp_path, accumulation=1)
    warm_up(warm, [make_batch(2)])
    moments = [entry["exp_avg"] for entry in warm.optimizer.state_dict()["state"].values()]
    assert len(moments) == len(list(warm.model.parameters()))
    assert not any(bool(moment.any()) for moment in moments)
    for training in (warm, cold):
        train_step(training, iter([make_batch(2)]), 0)
    torch.testing.assert_close(state_of(warm), state_of(cold), rtol=0, atol=0)


@pytest.mark.slow
def test_after_the_warm_up_no_bucket_compiles_anything_and_losses_are_the_same(tmp_path: Path, dynamo: object) -> None:
    plain, compiled = make_training(tmp_path, accumulation=1), make_training(tmp_path, accumulation=1)
    compile_blocks(compiled.model, compiled.family, backend="eager")
    batches = [make_batch(2), make_batch(3, height=12)]
    before = graphs_compiled()
    warm_up(compiled, batches)
    warm = graphs_compiled()
    assert warm > before
    for step in range(4):
        batch = dataclasses.replace(batches[step % 2], step=step)
        expected, found = (train_step(training, iter([batch]), step) for training in (plain, compiled))
        torch.testing.assert_close(found.loss, expected.loss)
    assert graphs_compiled() == warm


def test_blocks_that_go_on_compiling_run_uncompiled_from_then_on_and_it_is_said(
    tmp_path: Path, dynamo: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, compiled = make_training(tmp_path, accumulation=1), make_training(tmp_path, accumulation=1)
    compile_blocks(compiled.model, compiled.family, backend="eager")
    monkeypatch.setattr(compile_module, "MOST_OF_BLOCK", 1)
    warm_up(compiled, [make_batch(2)], validated=[make_batch(2)])  # other graphs, since nothing is trained
    said = [one.getMessage() for one in caplog.records if one.name == compile_module.__name__]
    assert said
    assert all("Block" in one and "was compiled 2 times for inputs of" in one and "--compile off" in one for one in said), said
    before = graphs_compiled()
    found, expected = (loss_of(one, make_batch(2)).detach() for one in (compiled, plain))
    torch.testing.assert_close(found, expected)
    assert graphs_compiled() == before


@pytest.mark.slow
@pytest.mark.parametrize("form", EVERY_FORM)
def test_no_form_compiles_anything_for_captions_of_other_lengths(form: str, tmp_path: Path, dynamo: object) -> None:
    """Nor for tokens that are routed to other experts; losses are those without a compiler."""
    plain, compiled = (training_of(write_form(tmp_path, form), tmp_path) for _ in range(2))
    compile_blocks(compiled.model, compiled.family, backend="eager")
    rng, longest = random.Random(0), MOST_TOKENS if not compiled.family.store.shows_padding else 12

    def batch(step: int) -> Batch:
        lengths = [rng.randint(1, longest) if longest == MOST_TOKENS else longest for _ in range(1 + 2 * (step % 2))]
        lengths = lengths if step % 7 else lengths[:1] * len(lengths)
        return batch_of_lengths(compiled.family, lengths, longest, first=3 * step)

    both = [batch(0), batch(1)]
    warm_up(compiled, both, validated=both)
    warm = graphs_compiled()
    assert warm > 0
    for step in range(60):
        one = batch(step)
        found = loss_of(compiled, one)
        found.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if step % 10 == 0:
                torch.testing.assert_close(found, loss_of(plain, one), rtol=1e-4, atol=1e-5)
                with compiled.evaluating():
                    loss_of(compiled, one)
        assert graphs_compiled() == warm, step


def training_of(folder: Path, output: Path) -> Training:
    """Return a form's training at its own objective, without an average."""
    family, model = load(folder, facts_for(folder), seed=0)
    is_flow = "Flow" in str(family.scheduler.get("_class_name"))
    schedule: Any = (
        FlowSchedule(num_timesteps=1000, shift=3.0, patch_size=family.patch_size)
        if is_flow
        else NoiseSchedule.from_alphas_cumprod(torch.linspace(0.999, 0.01, 1000), torch.device("cpu"))
    )
    objective = Objective.FLOW if is_flow else Objective.EPSILON
    return Training(
        config=config(output, accumulation=1),
        family=family,
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        average=Average(model, None),
        prep=Prep(scale=LatentScale(scale=1.0, shift=0.0), schedule=schedule, objective=objective),
        autocast=torch.autocast("cpu", torch.bfloat16, enabled=False),
    )


def test_the_blocks_of_a_unet_are_its_residual_and_its_transformer_blocks(tmp_path: Path) -> None:
    names = {type(block).__name__ for block in repeated_blocks(make_training(tmp_path, accumulation=1).model)}
    assert names == {"ResnetBlock2D", "BasicTransformerBlock"}


@pytest.mark.parametrize("sizes", [{"batch_size": 3}, {"batch_pixels": 100_000, "batch_multiple": 2}])
def test_examples_are_like_what_will_come_of_every_bucket(folder: Path, sizes: dict[str, int]) -> None:
    asked = LoaderConfig(**sizes)  # type: ignore[arg-type]
    store = Store.open(folder / "tiny.store")
    with Loader(store, asked) as loader:
        examples = example_batches(loader, store.buckets("train"))
    assert sorted(examples) == ["train/128x128", "train/192x128"]
    with Loader(store, asked) as loader:
        for _, batch in zip(range(8), loader, strict=False):
            example = examples.pop(batch.bucket, None)
            if example is None:
                continue
            for name, tensor in batch.by_name().items():
                like = example.by_name()[name]
                assert (like.shape, like.dtype, like.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
            assert torch.equal(example.target_size, batch.target_size)
    assert examples == {}


def test_flops_grow_with_the_batch_and_count_weights_only_where_they_are_trained(tmp_path: Path) -> None:
    training = make_training(tmp_path, accumulation=1)
    one, four = (count_flops(training.model, training.family, make_batch(rows)) for rows in (1, 4))
    assert one > 0
    assert four == pytest.approx(4 * one, rel=0.01)
    training.model.requires_grad_(requires_grad=False)
    assert count_flops(training.model, training.family, make_batch(1)) == pytest.approx(one * 2 / 3)


def test_the_flops_of_sizes_between_are_those_that_counting_them_gives(tmp_path: Path) -> None:
    training = make_training(tmp_path, accumulation=1)
    batches = {str(height): make_batch(2, height=height) for height in (8, 16, 24, 32, 40)}
    found = flops_of_buckets(training.model, training.family, batches)
    for height in ("16", "32"):
        assert found[height] == pytest.approx(count_flops(training.model, training.family, batches[height]), rel=1e-6)


@pytest.mark.parametrize("each", [form for form in EVERY_FORM if form != "hidream_image"])
def test_the_flops_of_every_form_are_counted_without_its_weights(each: str, tmp_path: Path) -> None:
    """Some models read the lengths of captions, which tensors without memory do not have."""
    folder = write_form(tmp_path, each)
    family, model = load(folder, facts_for(folder), seed=0)
    batch = batch_of_lengths(family, [5, 9, 2], 9)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        predicted(family, model, batch)
    assert count_flops(model, family, batch) == 3 * counter.get_total_flops() > 0


def test_flops_that_depend_on_values_are_left_out_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_form(tmp_path, "hidream_image")
    family, model = load(folder, facts_for(folder), seed=0)
    assert flops_of_buckets(model, family, {"train/form": batch_of_lengths(family, [9, 9], 9)}) == {}
    assert "no MFU: the FLOPs of a HiDreamImageTransformer2DModel depend on values" in caplog.text


def test_the_flops_of_a_convolution_are_those_of_its_formula() -> None:
    """Two for each multiplication with its addition: out x in x 3 x 3 x h x w, three times over."""
    from diffusers import UNet2DConditionModel

    from bucketline.families.stable_diffusion import StableDiffusion
    from tests.unit.train.tiny_run import UNET, facts

    class Once(StableDiffusion):
        """Runs only the first convolution."""

        def predict(self, model: Any, noisy: torch.Tensor, _timesteps: torch.Tensor, _batch: object) -> torch.Tensor:
            result: torch.Tensor = model.conv_in(noisy)
            return result

    model = UNet2DConditionModel.from_config(UNET)
    assert count_flops(model, Once({}, facts()), make_batch(5)) == 3 * 2 * 5 * (8 * 2 * 9) * 64


@pytest.mark.slow
def test_each_class_and_shape_has_graphs_of_its_own(tmp_path: Path, dynamo: Any) -> None:
    """Many buckets share no list of graphs, so dynamo's limit holds for one of them, and a call searches few."""
    training = make_training(tmp_path, accumulation=1)
    blocks = repeated_blocks(training.model)
    compile_blocks(training.model, training.family, backend="eager")
    dynamo.recompile_limit = max(collections.Counter(type(block) for block in blocks).values())
    before = graphs_compiled()
    warm_up(training, [make_batch(2, height=height) for height in (8, 12, 16, 20)])
    assert graphs_compiled() - before > dynamo.recompile_limit


@pytest.mark.slow
def test_ddp_does_not_cut_the_graphs_of_a_block(tmp_path: Path, dynamo: Any) -> None:
    training, parts = make_training(tmp_path, accumulation=1), []

    def counting(graph: Any, _inputs: object) -> Any:
        parts.append(graph)
        return graph.forward

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        compile_blocks(training.model, training.family, backend=counting)
        wrapped = torch.nn.parallel.DistributedDataParallel(training.model, bucket_cap_mb=0.001)
        before = graphs_compiled()
        warm_up(dataclasses.replace(training, model=wrapped), [make_batch(2)])
    finally:
        dist.destroy_process_group()
    assert len(parts) == graphs_compiled() - before > 0


def test_the_warm_up_says_which_bucket_is_next(tmp_path: Path) -> None:
    said: list[str] = []
    warm_up(make_training(tmp_path, accumulation=1), [make_batch(2), make_batch(3, height=12)], said.append)
    assert said == ["compiling for bucket 1 of 2, train/64x64", "compiling for bucket 2 of 2, train/96x64"]


def test_the_warm_up_leaves_the_average_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --ema on the cpu, an exchange moves all weights between host and device, and changes no graph."""
    exchanged: list[int] = []
    monkeypatch.setattr(Average, "_exchange", lambda *_: exchanged.append(1))
    warm_up(make_training(tmp_path, accumulation=1), [make_batch(2)], validated=[make_batch(2), make_batch(2, height=12)])
    assert exchanged == []


def test_ranks_take_turns_for_each_bucket(tmp_path: Path) -> None:
    """So that no rank waits for another one's whole warm-up, whose time has a limit."""
    said: list[str] = []

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        said.append("begin")
        yield
        said.append("end")

    warm_up(make_training(tmp_path, accumulation=1), [make_batch(2)], validated=[make_batch(2, height=12)], turn=turn)
    assert said == ["begin", "end"] * 2


def compiled_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], list[str]]]:
    """Note the buckets that runs are compiled for, and those of a validation, instead of compiling."""
    found: list[tuple[list[str], list[str]]] = []

    def note(_training: object, batches: list[Batch], _say: object, *, validated: list[Batch], turn: object) -> None:
        found.append(([one.bucket for one in batches], [one.bucket for one in validated]))

    monkeypatch.setattr(model, "warm_up", note)
    monkeypatch.setattr(model, "compile_blocks", lambda *_, **__: None)
    monkeypatch.setattr(Prep, "_arithmetic", property(lambda prep: prep._eager))
    return found


def test_buckets_that_only_the_held_out_samples_have_are_compiled_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_training_store(tmp_path / "tiny.store", {"train/128x128": 6, "val/128x128": 2, "val/192x128": 1})
    write_unet(tmp_path / "model")
    found = compiled_for(monkeypatch)
    train(config(tmp_path, max_steps=1, compile=Compile.ON), ALONE)
    assert found == [(["train/128x128"], ["val/128x128", "val/192x128"])]


def test_a_newer_generation_is_compiled_for_only_where_it_has_other_buckets(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compiled_for(monkeypatch)
    asked = config(folder, max_steps=6, compile=Compile.ON)
    for more in ({"train/128x128": 2}, {"train/128x192": 5, "val/128x192": 1}):
        add_to_store(folder / "tiny.store", samples(more, str(more)))
    opened, due = [Store.open(folder / "tiny.store", generation) for generation in (1, 2, 3)], iter([1, 2, 2, 2, 2, 2])
    monkeypatch.setattr(data, "open_stores", lambda *_: open_shares(opened[0]))
    monkeypatch.setattr(loader_module, "newest_generations", lambda *_: open_shares(opened[next(due)]))
    run = train(dataclasses.replace(asked, max_steps=20, follow=True), ALONE)
    assert run.steps_done == 20
    (first, validated), later = found[0], found[1:]
    assert (sorted(first), sorted(validated)) == (["train/128x128", "train/192x128"], ["val/128x128", "val/192x128"])
    assert later == [(["train/128x192"], ["val/128x192"])]


def test_a_compiler_that_is_missing_is_an_error_that_says_what_to_do(tmp_path: Path, dynamo: object) -> None:
    def failing(_graph: object, _inputs: object) -> Any:
        raise OSError(
            f"C++ compile error\n\nCommand:\n{'g++ ' * 200}\n\nOutput:\nc.cpp:9: fatal error: Python.h: none\nterminated."
        )

    training = make_training(tmp_path, accumulation=1)
    compile_blocks(training.model, training.family, backend=failing)
    with pytest.raises(TrainError, match=r"for train/64x64: c\.cpp:9: fatal error: Python\.h: none; .*--compile off"):
        warm_up(training, [make_batch(2)])


class CountsCalls:
    """A backend that compiles nothing and counts the calls of its graphs."""

    calls = 0

    def __call__(self, graph: Any, _inputs: object) -> Any:
        def run(*given: Any) -> Any:
            self.calls += 1
            return graph(*given)

        return run


@pytest.mark.slow
def test_a_validation_runs_the_graphs_of_the_warm_up(tmp_path: Path, dynamo: object) -> None:
    counting = CountsCalls()
    training = make_training(tmp_path, accumulation=1)
    compile_blocks(training.model, training.family, backend=counting)
    warm_up(training, [make_batch(2)], validated=[make_batch(2)])
    warm, counting.calls = graphs_compiled(), 0
    validate(training, [make_batch(2, first=5)], lambda sums: sums)
    assert graphs_compiled() == warm
    assert counting.calls == len(repeated_blocks(training.model)) * training.config.val_timesteps


@pytest.mark.slow
def test_images_run_the_graphs_of_their_shape_and_compile_none(tmp_path: Path, dynamo: object) -> None:
    counting = CountsCalls()
    made = [make_training(tmp_path, accumulation=1) for _ in range(2)]
    scheduler = load_schedule(tmp_path, torch.device("cpu")).config
    training, plain = (dataclasses.replace(one, scheduler=scheduler) for one in made)
    with torch.no_grad():
        for one in (training, plain):
            next(one.model.parameters()).add_(0.1)  # now the average differs
    compile_blocks(training.model, training.family, backend=counting)
    warm_up(training, [make_batch(2)], validated=[make_batch(2)])
    before = copy.deepcopy(training.model.state_dict())
    warm = graphs_compiled()
    each = len(repeated_blocks(training.model))
    for batch, num_calls in ((make_batch(2), each), (make_batch(1), 0), (make_batch(2, height=12), 0)):
        counting.calls = 0
        drawing = DrawingBatch(batch=batch, negative=None, noise=sample_noise(batch), guidance=1.0, entries=())
        found, expected = (draw_latents(one, tiny_vae(), drawing) for one in (training, plain))
        assert counting.calls == num_calls * training.config.image_steps
        torch.testing.assert_close(found, expected)
    assert graphs_compiled() == warm
    torch.testing.assert_close(training.model.state_dict(), before, rtol=0, atol=0)
