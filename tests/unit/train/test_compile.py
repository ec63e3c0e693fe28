"""Before the clock: compiled blocks, every bucket once, and what a step of each takes."""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.utils.flop_counter import FlopCounterMode

from bucketline.errors import TrainError
from bucketline.loader import loader as loader_module
from bucketline.loader.mixture import open_weighted
from bucketline.store import Store
from bucketline.train import compile as compile_module
from bucketline.train import data, run
from bucketline.train.checkpoint import Start
from bucketline.train.compile import compile_blocks, example_batches, flops_of, peak_flops, warm_up
from bucketline.train.config import Compile, Objective
from bucketline.train.images import DrawingBatch, draw_latents
from bucketline.train.log import graphs_compiled
from bucketline.train.noise import Prep, sample_noise
from bucketline.train.optim import Average
from bucketline.train.parallel import TrainRanks, repeated_blocks
from bucketline.train.run import train
from bucketline.train.step import Training, loss_of, train_step, validate
from tests.family_models import tiny_vae
from tests.unit.families.forms import EVERY_FORM, batch_of_lengths, facts_for, write_form
from tests.unit.train.forked import fork_ranks
from tests.unit.train.test_parallel import sharded
from tests.unit.train.tiny_run import (
    ALONE,
    add_to_store,
    config,
    load,
    make_batch,
    make_training,
    make_training_store,
    samples,
    write_unet,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bucketline.loader import Batch


CPU = torch.device("cpu")
MOST_TOKENS = 70
ODD_TOKENS = (1, 2, 7, 8, 9, 64, MOST_TOKENS)  # where kernels and dynamo's guards change, if anywhere
STEPS = 22
START = Start(checkpoint=None, state=None)

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


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return make_training(tmp_path)


@pytest.fixture
def compiled(training: Training, dynamo: object) -> Training:
    compile_blocks(training.model, training.family, backend="eager")
    return training


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


def test_warming_says_which_bucket_is_next_and_changes_no_weight_average_optimizer_and_generator(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --ema on the cpu, an exchange with the averages would move all weights between host and device."""
    train_step(training, iter([make_batch()]), 0)
    before, said = state_of(training), list[str]()
    with monkeypatch.context() as patched:
        patched.setattr(Average, "_exchange", None)
        warm_up(training, [make_batch(2), make_batch(3, height=12)], said.append, validated=[make_batch(2)])
    assert said == [f"compiling for bucket {n} of 3, train/{size}x64" for n, size in ((1, 64), (2, 96), (3, 64))]
    assert all(parameter.grad is None for parameter in training.model.parameters())
    torch.testing.assert_close(state_of(training), before, rtol=0, atol=0)


def test_warming_makes_the_moments_and_the_first_step_is_the_same(tmp_path: Path) -> None:
    """Memory ends then, and not at the first step."""
    warm, cold = make_training(tmp_path), make_training(tmp_path)
    warm_up(warm, [make_batch(2)])
    moments = [entry["exp_avg"] for entry in warm.optimizer.state_dict()["state"].values()]
    assert len(moments) == len(list(warm.model.parameters()))
    assert not any(bool(moment.any()) for moment in moments)
    for training in (warm, cold):
        train_step(training, iter([make_batch(2)]), 0)
    torch.testing.assert_close(state_of(warm), state_of(cold), rtol=0, atol=0)


@pytest.mark.slow
def test_after_the_warm_up_no_bucket_compiles_anything_and_losses_are_the_same(tmp_path: Path, compiled: Training) -> None:
    plain, batches = make_training(tmp_path), [make_batch(2), make_batch(3, height=12)]
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
    tmp_path: Path, compiled: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_module, "MOST_OF_BLOCK", 1)
    warm_up(compiled, [make_batch(2)], validated=[make_batch(2)])  # other graphs, since nothing is trained
    said = [one.getMessage() for one in caplog.records if one.name == compile_module.__name__]
    assert said
    assert all("Block" in one and "was compiled 2 times for inputs of" in one and "--compile off" in one for one in said), said
    before = graphs_compiled()
    found, expected = (loss_of(one, make_batch(2)).detach() for one in (compiled, make_training(tmp_path)))
    torch.testing.assert_close(found, expected)
    assert graphs_compiled() == before


@pytest.mark.slow
@pytest.mark.parametrize("form", EVERY_FORM)
def test_no_form_compiles_anything_for_captions_of_other_lengths(form: str, tmp_path: Path, dynamo: object) -> None:
    """Nor for tokens that are routed to other experts; losses are those without a compiler."""
    plain, compiled = (training_of(write_form(tmp_path, form)) for _ in range(2))
    compile_blocks(compiled.model, compiled.family, backend="eager")
    rng, longest = random.Random(0), MOST_TOKENS if not compiled.family.store.shows_padding else 12

    def batch(step: int) -> Batch:
        odd = ODD_TOKENS[step // 2 : step // 2 + 1]  # in a batch of one row and in one of three
        count = 1 + 2 * (step % 2)
        lengths = (
            [*odd, *(rng.randint(1, longest) for _ in range(count))][:count] if longest == MOST_TOKENS else [longest] * count
        )
        lengths = lengths if step % 7 else lengths[:1] * len(lengths)
        return batch_of_lengths(compiled.family, lengths, longest, first=3 * step)

    both = [batch(0), batch(1)]
    warm_up(compiled, both, validated=both)
    warm = graphs_compiled()
    assert warm > 0
    for step in range(STEPS):
        one = batch(step)
        found = loss_of(compiled, one)
        found.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if step % 10 == 0:
                torch.testing.assert_close(found, loss_of(plain, one), rtol=1e-4, atol=1e-5)
                with compiled.evaluating():
                    loss_of(compiled, one)
        assert graphs_compiled() == warm, step


def training_of(folder: Path) -> Training:
    loaded = load(folder, facts_for(folder), seed=0)
    objective = Objective.FLOW if "Flow" in str(loaded[0].scheduler.get("_class_name")) else Objective.EPSILON
    return make_training(folder, loaded=loaded, decay=None, objective=objective)


@pytest.mark.parametrize("batch", ["3", "0.1MP"])
def test_examples_are_like_what_will_come_of_every_bucket(folder: Path, batch: str) -> None:
    asked = config(folder, batch_size=batch)
    with data.open_loader(asked, ALONE, data.open_stores(asked, ALONE, START), CPU) as loader:
        examples = example_batches(ALONE, loader, loader.rows.buckets("train"))
        assert sorted(examples) == ["train/128x128", "train/192x128"]
        for _, own in zip(range(8), loader.forever(), strict=False):
            example = examples.pop(own.bucket, None)
            if example is None:
                continue
            for name, tensor in own.by_name().items():
                like = example.by_name()[name]
                assert (like.shape, like.dtype, like.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
            assert torch.equal(example.target_size, own.target_size)
    assert examples == {}


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_the_flops_of_a_step_are_those_of_both_passes_also_of_compiled_blocks(
    compiled: Training, lora_rank: int | None
) -> None:
    """The backward pass needs no gradient of the first layers' input, so it has a little less."""
    plain = dataclasses.replace(compiled, config=dataclasses.replace(compiled.config, lora_rank=lora_rank))
    before = graphs_compiled()
    one, four = (flops_of(plain, make_batch(rows)) for rows in (1, 4))
    assert graphs_compiled() == before
    assert four == pytest.approx(4 * one, rel=0.01)
    with FlopCounterMode(display=False) as counter, torch.compiler.set_stance("force_eager"):
        loss_of(plain, make_batch(1)).backward()  # type: ignore[no-untyped-call]
    assert counter.get_total_flops() < one * (1.0 if lora_rank is None else 1.5) < 1.1 * counter.get_total_flops()


def test_the_flops_of_a_sharded_model_are_those_of_the_whole_one(tmp_path: Path, training: Training) -> None:
    expected = flops_of(training, make_batch(2))

    def body(ranks: TrainRanks) -> None:
        own = make_training(tmp_path, loaded=sharded(tmp_path / "model", ranks), is_bf16=True)
        assert flops_of(own, make_batch(2)) == expected
        train_step(own, iter([make_batch(2)]), 0)

    write_unet(tmp_path / "model")
    fork_ranks(tmp_path, body)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA RTX 6000 Ada Generation", 364),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX 5000 Ada Generation", None),
    ],
)
def test_the_peak_is_that_of_the_whole_name(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)


@pytest.mark.slow
def test_each_class_and_shape_has_graphs_of_its_own(compiled: Training, dynamo: Any) -> None:
    """Many buckets share no list of graphs, so dynamo's limit holds for one of them, and a call searches few."""
    counts = collections.Counter(type(block).__name__ for block in repeated_blocks(compiled.model))
    assert set(counts) == {"ResnetBlock2D", "BasicTransformerBlock"}
    dynamo.recompile_limit = max(counts.values())
    before = graphs_compiled()
    warm_up(compiled, [make_batch(2, height=height) for height in (8, 12, 16, 20)])
    assert graphs_compiled() - before > dynamo.recompile_limit


@pytest.mark.slow
def test_ddp_does_not_cut_the_graphs_of_a_block(training: Training, dynamo: object) -> None:
    counting = CountsCalls()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        compile_blocks(training.model, training.family, backend=counting)
        wrapped = torch.nn.parallel.DistributedDataParallel(training.model, bucket_cap_mb=0.001)
        before = graphs_compiled()
        warm_up(dataclasses.replace(training, model=wrapped), [make_batch(2)])
    finally:
        dist.destroy_process_group()
    assert counting.graphs == graphs_compiled() - before > 0


@pytest.fixture
def compiled_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], list[str]]]:
    """The buckets that a run is compiled for, and those of a validation; nothing is compiled."""
    found: list[tuple[list[str], list[str]]] = []

    def note(_training: object, batches: list[Batch], _say: object, *, validated: list[Batch]) -> None:
        found.append(([one.bucket for one in batches], [one.bucket for one in validated]))

    monkeypatch.setattr(compile_module, "warm_up", note)
    monkeypatch.setattr(compile_module, "compile_blocks", lambda *_, **__: None)
    monkeypatch.setattr(Prep, "_in_training", property(lambda prep: prep._noised))
    return found


def test_buckets_that_only_the_held_out_samples_have_are_compiled_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_for: list[tuple[list[str], list[str]]]
) -> None:
    """By this rank's share of the machine's cores."""
    make_training_store(tmp_path / "tiny.store", {"train/128x128": 6, "val/128x128": 2, "val/192x128": 1})
    write_unet(tmp_path / "model")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "16")
    with inductor.patch(compile_threads=1):
        train(config(tmp_path, max_steps=1, compile=Compile.ON), ALONE)
        assert inductor.compile_threads == 2
    assert compiled_for == [(["train/128x128"], ["val/128x128", "val/192x128"])]


def test_a_newer_generation_is_compiled_for_only_where_it_has_other_buckets(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiled_for: list[tuple[list[str], list[str]]]
) -> None:
    asked = config(folder, max_steps=20, follow=True, compile=Compile.ON)
    for more in ({"train/128x128": 2}, {"train/128x192": 5, "val/128x192": 1}):
        add_to_store(folder / "tiny.store", samples(more, str(more)))
    opened, due = [Store.open(folder / "tiny.store", generation) for generation in (1, 2, 3)], iter([1, 2, 2, 2, 2, 2])
    monkeypatch.setattr(run, "open_stores", lambda *_: open_weighted(opened[0]))
    monkeypatch.setattr(loader_module, "newest_generations", lambda *_: open_weighted(opened[next(due)]))
    assert train(asked, ALONE).steps_done == 20
    (first, validated), later = compiled_for[0], compiled_for[1:]
    assert (sorted(first), sorted(validated)) == (["train/128x128", "train/192x128"], ["val/128x128", "val/192x128"])
    assert later == [(["train/128x192"], ["val/128x192"])]


def test_a_compiler_that_is_missing_is_an_error_that_says_what_to_do(training: Training, dynamo: object) -> None:
    def failing(_graph: object, _inputs: object) -> Any:
        raise OSError(
            f"C++ compile error\n\nCommand:\n{'g++ ' * 200}\n\nOutput:\nc.cpp:9: fatal error: Python.h: none\nterminated."
        )

    compile_blocks(training.model, training.family, backend=failing)
    with pytest.raises(TrainError, match=r"for train/64x64: c\.cpp:9: fatal error: Python\.h: none; .*--compile off"):
        warm_up(training, [make_batch(2)])


class CountsCalls:
    """A backend that compiles nothing and counts its graphs and their calls."""

    graphs = calls = 0

    def __call__(self, graph: Any, _inputs: object) -> Any:
        self.graphs += 1

        def run(*given: Any) -> Any:
            self.calls += 1
            return graph(*given)

        return run


@pytest.mark.slow
def test_validations_and_images_run_the_graphs_of_their_shape_and_compile_none(tmp_path: Path, dynamo: object) -> None:
    counting = CountsCalls()
    training, plain = (make_training(tmp_path) for _ in range(2))
    with torch.no_grad():
        for one in (training, plain):
            next(one.model.parameters()).add_(0.1)  # now the average differs
    compile_blocks(training.model, training.family, backend=counting)
    warm_up(training, [make_batch(2)], validated=[make_batch(2)])
    warm, each, counting.calls = graphs_compiled(), len(repeated_blocks(training.model)), 0
    validate(training, [make_batch(2, first=5)], lambda sums: sums)
    assert counting.calls == each * training.config.val_timesteps
    for batch, num_calls in ((make_batch(2), each), (make_batch(1), 0), (make_batch(2, height=12), 0)):
        counting.calls = 0
        drawing = DrawingBatch(batch=batch, negative=None, noise=sample_noise(batch), guidance=1.0, entries=())
        found, expected = (draw_latents(one, tiny_vae(), drawing) for one in (training, plain))
        assert counting.calls == num_calls * training.config.image_steps
        torch.testing.assert_close(found, expected)
    assert graphs_compiled() == warm
