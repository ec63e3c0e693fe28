"""Calls in forked processes, off one that has imported torch and the libraries of models: a call costs no imports."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.commands import ROOT, kept_port

IMPORTED_ONCE = (
    *("bucketline.train.main", "bucketline.train.commands.export_model", "bucketline.ingest.cli", "bucketline.loader"),
    *("diffusers.models.autoencoders.autoencoder_kl", "diffusers.models.unets.unet_2d_condition", "diffusers.schedulers"),
    *("peft", "transformers", "matplotlib.figure", "torchao.optim", "torch.distributed.fsdp"),
    *("torch.distributed.checkpoint.state_dict", "cyclopts"),
)


class CallFailedError(Exception):
    """A forked call has failed; the message is the end of what it wrote."""


def import_once() -> None:
    """Import what the calls need; with one thread, so that sums are in one order and forks are safe.

    Processes that a call starts import this checkout, whichever one is installed.
    """
    import torch

    os.environ["PYTHONPATH"] = str(ROOT / "src")

    torch.set_num_threads(1)
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else the first collection of each child copies every page


def forked(call: Callable[[], object], log: Path, *, processes: int = 1, stdout_only: bool = False) -> str:
    """Run a call in so many ranks, their output in a file, and return the output; or only what is on stdout."""
    errors = log.with_suffix(".stderr") if stdout_only else log
    for path in {log, errors}:
        path.unlink(missing_ok=True)
    with kept_port() as port:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        environments: list[dict[str, Any]] = [{}]
        if processes > 1:
            environments = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(processes)]
        pids = [_fork(call, (log, errors), environment) for environment in environments]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    written = log.read_text(encoding="utf-8", errors="replace")
    if any(codes):
        written = errors.read_text(encoding="utf-8", errors="replace")
        raise CallFailedError(f"exit codes {codes}: {' | '.join(written.strip().splitlines()[-3:])}")
    return written


def program(place: str, arguments: Sequence[object]) -> Callable[[], object]:
    """Return a call of a `main`, `MODULE:NAME`, with the words of a command line."""
    module, _, name = place.partition(":")
    words = [str(one) for one in arguments]
    return lambda: getattr(importlib.import_module(module), name)(words)


def _fork(call: Callable[[], object], files: tuple[Path, Path], environment: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    code: object = 1
    try:
        for fd, path in enumerate(files, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), fd)
        os.environ |= {name: str(value) for name, value in environment.items()}
        code = call()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - a forked process must not continue from here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
