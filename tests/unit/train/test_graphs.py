"""`--compile graphs`: whatever a captured pass returns is in memory that the next one overwrites, gradients too.

No GPU is needed: a backend that returns its results in the same memory each time stands for CUDA graphs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from bucketline.errors import UsageError
from bucketline.train.compile import compile_blocks, expect_graphs, graphs_compiled, warm_up
from bucketline.train.config import Compile, Sharding
from bucketline.train.evaluation.pipeline import draw_latents
from bucketline.train.evaluation.prompts import DrawingBatch
from bucketline.train.noise_schedule import load_schedule
from bucketline.train.noising import sample_noise
from bucketline.train.parallel import repeated_blocks
from bucketline.train.step import train_step
from bucketline.train.trainer import train
from tests.family_models import tiny_vae
from tests.unit.train.test_compile import dynamo  # noqa: F401 - a fixture
from tests.unit.train.test_step import make_training
from tests.unit.train.tiny_run import ALONE, config, make_batch

if TYPE_CHECKING:
    from pathlib import Path

    from bucketline.train.step import Training


def in_a_pool(calls: list[int]) -> Any:
    """Return a backend whose graphs write their results to the same memory each time; `calls` counts their runs."""

    def compiled(graph: Any, _inputs: object) -> Any:
        pool: dict[int, torch.Tensor] = {}

        def run(*given: Any) -> list[Any]:
            calls[0] += 1
            results = list(graph(*given))
            for place, result in enumerate(results):
                if isinstance(result, torch.Tensor):
                    own = pool.setdefault(place, torch.empty_like(result))
                    results[place] = own.copy_(result).detach()
            return results

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compiled, bw_compiler=compiled)


def captured(training: Training, backend: Any) -> Training:
    compile_blocks(training.model, backend, graphs=True)
    return dataclasses.replace(training, config=dataclasses.replace(training.config, compile=Compile.GRAPHS))


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:.torch.jit.script")
def test_accumulated_gradients_and_guided_images_survive_the_next_pass(tmp_path: Path) -> None:
    plain, calls = make_training(tmp_path, accumulation=2), [0]
    own = captured(make_training(tmp_path, accumulation=2), in_a_pool(calls))
    before = graphs_compiled()
    warm_up(own, [make_batch(2)], validated=[make_batch(2)])
    assert graphs_compiled() == before + 2  # the full model, in training and in evaluation
    addresses = [parameter.grad.data_ptr() for parameter in own.model.parameters() if parameter.grad is not None]
    assert len(addresses) == len(list(own.model.parameters()))

    def expect_same_steps(training: Training, *steps: int) -> None:
        for step in steps:
            micro_steps = [dataclasses.replace(make_batch(2, first=7 * n), step=step, micro_step=n) for n in range(2)]
            expected, found = (train_step(one, iter(micro_steps), step) for one in (plain, training))
            torch.testing.assert_close(found.loss, expected.loss)
            torch.testing.assert_close(found.grad_norm, expected.grad_norm)
        for one, other in zip(own.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

    expect_same_steps(own, 0, 1)
    assert [parameter.grad.data_ptr() for parameter in own.model.parameters() if parameter.grad is not None] == addresses
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(own.model, gradient_as_bucket_view=True)
        expect_same_steps(dataclasses.replace(own, model=wrapped), 2, 3)
    finally:
        dist.destroy_process_group()

    schedule, batch, dropped = load_schedule(tmp_path, torch.device("cpu")), make_batch(2), make_batch(2, first=3)
    calls[0] = 0
    drawing = DrawingBatch(batch=batch, negative=dropped, noise=sample_noise(batch), guidance=3.0, entries=())
    images = [draw_latents(one, schedule, tiny_vae(), drawing) for one in (plain, own)]
    torch.testing.assert_close(images[1], images[0], rtol=1e-3, atol=1e-3)
    assert calls[0] == 0  # the pipeline calls the model in another way than training does
    assert graphs_compiled() == before + 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("graphs", [False, True])
def test_inductor_is_told_to_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, graphs: bool) -> None:
    training, told = make_training(tmp_path, accumulation=1), []

    def noting(plain: Any, **options: Any) -> Any:
        told.append(options)
        return plain

    monkeypatch.setattr(torch, "compile", noting)
    compile_blocks(training.model, graphs=graphs)
    batch = make_batch(1)
    result = training.family.predict(training.model, batch.latents.float(), batch.keys % 1000, batch)
    assert result.shape == batch.latents.shape
    assert all(one.pop("options", None) == ({"triton.cudagraphs": True} if graphs else None) for one in told)
    assert all(one == {"dynamic": False, "backend": "inductor"} for one in told)
    assert len(told) == 1 if graphs else 1 < len(told) <= len(repeated_blocks(training.model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"sharding": Sharding.FSDP}, "--sharding is fsdp"),
        ({"offload_blocks": 1, "lora_rank": 4, "gradient_checkpointing": True}, "--offload-blocks copies"),
        ({"optimizer_in_backward": True, "accumulation": 1, "clip_norm": None}, "--optimizer-in-backward saves nothing"),
    ],
)
def test_what_cannot_be_captured_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    asked = config(tmp_path, compile=Compile.GRAPHS, **changes)
    shards, cuda = asked.sharding is not Sharding.DDP, torch.device("cuda")
    if not message:
        expect_graphs(asked, cuda, shards=shards)
        return
    with pytest.raises(UsageError, match=rf"--compile is graphs, and {message}.*; use --compile on"):
        expect_graphs(asked, cuda, shards=shards)


def test_a_run_without_a_gpu_is_refused_before_it_reads_weights(folder: Path) -> None:
    with pytest.raises(UsageError, match="--compile is graphs, and the device is the CPU, expected a GPU"):
        train(config(folder, compile=Compile.GRAPHS), ALONE)
