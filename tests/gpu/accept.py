"""Checks that need a GPU: `python -m tests.gpu.accept [CHECK[:ARGUMENT…] …]` from the repository's root, or `make gpu`.

A line of JSON for each check; exit 1 if one fails. A line with "ok": "report" has figures that nothing is asked of.
`ACCEPT_DEVICE=cpu` tries what needs no GPU, so that a slip in these files costs no device time.
"""

from __future__ import annotations

import sys
import traceback

from bucketline.torch_setup import avoid_cudnn_attention
from tests.gpu.compiled import dispatch, families, fp8
from tests.gpu.loading import contexts, copies, draws, env, loader, memory, services
from tests.gpu.material import ON_GPU, failed, tell
from tests.gpu.optimizers import optimizers
from tests.gpu.runs import cli, ema, resume, shared
from tests.gpu.speed import bench, encoding, kernels, pause, stall
from tests.gpu.trial import trial

CHECKS = {
    check.__name__: check
    for check in (
        *(env, draws, loader, contexts, copies, services, memory),
        *(families, fp8, trial, resume, optimizers, ema, cli, shared, encoding, dispatch, stall, pause, bench, kernels),
    )
}
ALL = (*CHECKS, "cli:sd-lora", "bench:dit-xl-2", "bench:sdxl") if ON_GPU else tuple(CHECKS)


def main(asked: list[str]) -> int:
    avoid_cudnn_attention()
    for one in asked or ALL:
        name, *arguments = one.split(":")
        try:
            CHECKS[name](*arguments)
        except Exception as error:  # noqa: BLE001 - the other checks still run
            traceback.print_exc()
            tell(name, ok=False, problem=f"{type(error).__name__}: {error!s:.300}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
