"""Checks of compiled blocks: that they compute what eager ones do, and what choosing among them costs the host."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from bucketline.loader import Batch
from bucketline.train.compile import compile_blocks, warm_up
from bucketline.train.config import Compile
from bucketline.train.log import graphs_compiled
from bucketline.train.lowbit import PRODUCTS_CAPABILITY
from bucketline.train.parallel import repeated_blocks
from bucketline.train.step import Training, loss_of, train_step
from tests.gpu.material import DEVICE, NAMES, ON_GPU, sync, tell, tiny_batch, tiny_training


def families(*names: str) -> None:
    """Compiled bf16 agrees roughly with eager fp32, compiles nothing new after the warm-up, and never makes the host wait."""
    for name in names or tuple(NAMES):
        sizes = [(8, 8)] if name == "dit" else [(8, 8), (8, 12)]
        batches = [tiny_batch(name, *size) for size in sizes]
        for lora, checkpointing in ((False, True), (True, False)):
            begin = time.perf_counter()
            torch._dynamo.reset()
            exact = tiny_training(name, bf16=False, lora=lora)
            fast = tiny_training(name, compiled=Compile.ON, bf16=True, checkpointing=checkpointing, lora=lora)
            warm_up(fast, batches, validated=batches)
            warm, off, problem = graphs_compiled(), [], None
            if ON_GPU:
                train_step(fast, iter([batches[0]]), 0), train_step(exact, iter([batches[0]]), 0)
            try:
                for step in range(1, 7):
                    batch = dataclasses.replace(batches[step % len(batches)], step=step)
                    wanted = train_step(exact, iter([batch]), step)
                    if ON_GPU:
                        torch.cuda.set_sync_debug_mode("error")
                    found = train_step(fast, iter([batch]), step)
                    if ON_GPU:
                        torch.cuda.set_sync_debug_mode("default")
                    off.append(abs(float(found.loss) - float(wanted.loss)) / float(wanted.loss))
                with torch.no_grad(), fast.averaged():
                    loss_of(fast, batches[0])
            except RuntimeError as error:
                problem = f"{error!s:.300}"
            finally:
                if ON_GPU:
                    torch.cuda.set_sync_debug_mode("default")
            tell(
                "families: compiled as eager",
                ok=problem is None and max(off) < 3e-2 and graphs_compiled() == warm,
                family=name,
                lora=lora,
                checkpointing=checkpointing,
                off=max(off, default=None),
                graphs=warm,
                new=graphs_compiled() - warm,
                problem=problem,
                seconds=round(time.perf_counter() - begin),
            )


def dispatch() -> None:
    """Cost of choosing among compiled graphs on the host: blocks whose graphs compute nothing, few buckets against many."""

    def canned(graph: Any, _inputs: object) -> Any:
        results: list[object] = []

        def run(*arguments: object) -> object:
            if not results:
                results.append(graph(*arguments))
            return results[0]

        return run

    costs, many = {}, 24 if ON_GPU else 8
    for count in (2, many):
        torch._dynamo.reset()
        plain, own = (tiny_training("sdxl", bf16=False) for _ in range(2))
        calls: list[tuple[int, Any, Any]] = []
        for number, block in enumerate(repeated_blocks(plain.model)):
            block.register_forward_pre_hook(lambda _, a, k, n=number, to=calls: to.append((n, a, k)), with_kwargs=True)
        with torch.no_grad():
            for n in range(count):
                loss_of(plain, tiny_batch("sdxl", 8 + 2 * (n % 6), 8 + 2 * (n // 6)))
        compile_blocks(own.model, own.family, backend=canned)
        blocks, best = repeated_blocks(own.model), 1e9
        for _ in range(6):
            begin = time.thread_time()
            for number, arguments, named in calls:
                blocks[number](*arguments, **named)
            best = min(best, (time.thread_time() - begin) / len(calls))
        costs[count] = round(best * 1e6)
    tell("dispatch: many buckets cost little more than few", ok=costs[many] < 1.5 * costs[2], us_of_a_block_call=costs)


def _losses(training: Training, batches: list[Batch], steps: int) -> list[torch.Tensor]:
    count = training.config.accumulation
    found = []
    for step in range(steps):
        batch = batches[step % len(batches)]
        keys = [batch.keys + step * count + number for number in range(count)]
        micro_steps = [dataclasses.replace(batch, step=step, micro_step=n, keys=key) for n, key in enumerate(keys)]
        found.append(train_step(training, iter(micro_steps), step).loss)
    return found


def _ms_per_step(training: Training, batches: list[Batch]) -> float:
    steps = 40 if ON_GPU else 2
    sync()
    begin = time.perf_counter()
    _losses(training, batches, steps)
    sync()
    return round((time.perf_counter() - begin) / steps * 1e3, 2)


def fp8() -> None:
    """Training in 8-bit floats follows bf16, compiles nothing after the warm-up; ms per step of both."""
    if ON_GPU and torch.cuda.get_device_capability(DEVICE) < PRODUCTS_CAPABILITY:
        tell("fp8: needs an H100 or later", device=torch.cuda.get_device_name(DEVICE))
        return
    sizes: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 4, "axes_dims_rope": (4, 6, 6)}
    batches = [tiny_batch("flux", 8, 8), tiny_batch("flux", 8, 12)]
    if ON_GPU:
        sizes = {"attention_head_dim": 128, "num_attention_heads": 16, "axes_dims_rope": (16, 56, 56)}
        batches = [tiny_batch("flux", *size, rows=8) for size in ((64, 64), (64, 96))]
    found, times, new, layers = {}, {}, 0, 0
    for float8 in (False, True):
        torch._dynamo.reset()
        own = tiny_training("flux", compiled=Compile.ON, bf16=True, float8=float8, **sizes)
        layers = sum(type(module).__name__ == "Float8Linear" for module in own.model.modules())
        warm_up(own, batches, validated=batches)
        warm = graphs_compiled()
        found[float8] = _losses(own, batches, 8)
        times["fp8" if float8 else "bf16"] = _ms_per_step(own, batches)
        new += graphs_compiled() - warm
    off = max(float(abs(one - other) / one) for one, other in zip(*found.values(), strict=True))
    tell("fp8: as bf16", ok=off < 5e-2 and new == 0 < layers, layers=layers, off=off, new=new, ms_per_step=times)
