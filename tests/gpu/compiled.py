"""Checks of compiled blocks: that they compute what eager ones do, and what choosing among them costs the host."""

from __future__ import annotations

import time
from typing import Any

import torch

from bucketline.train.compile import compile_blocks
from bucketline.train.parallel import repeated_blocks
from bucketline.train.step import loss_of
from tests.gpu.material import tell, tiny_batch, tiny_training


def dispatch() -> None:
    """What choosing among compiled graphs costs the host: blocks whose graphs compute nothing, few buckets against many."""

    def canned(graph: Any, _inputs: object) -> Any:
        results: list[object] = []

        def run(*arguments: object) -> object:
            if not results:
                results.append(graph(*arguments))
            return results[0]

        return run

    costs = {}
    for count in (2, 24):
        torch._dynamo.reset()
        plain, own = (tiny_training("sdxl", bf16=False) for _ in range(2))
        calls: list[tuple[int, Any, Any]] = []
        for number, block in enumerate(repeated_blocks(plain.model)):
            block.register_forward_pre_hook(lambda _, a, k, n=number, to=calls: to.append((n, a, k)), with_kwargs=True)
        with torch.no_grad():
            for n in range(count):
                loss_of(plain, tiny_batch("sdxl", 8 + 2 * (n % 6), 8 + 2 * (n // 6)))
        compile_blocks(own.model, num_buckets=count, backend=canned)
        blocks, best = repeated_blocks(own.model), 1e9
        for _ in range(6):
            begin = time.thread_time()
            for number, arguments, named in calls:
                blocks[number](*arguments, **named)
            best = min(best, (time.thread_time() - begin) / len(calls))
        costs[count] = round(best * 1e6)
    tell("dispatch: many buckets cost little more than few", ok=costs[24] < 1.5 * costs[2], us_of_a_block_call=costs)
