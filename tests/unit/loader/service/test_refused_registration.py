"""A driver that registers no shared memory, as in some containers, costs a copy and a warning, not the training."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.service import client, ring
from bucketline.loader.service.wire import Answer
from bucketline.store import Store
from tests.contract.test_backends import values

REFUSED = 801  # cudaErrorNotSupported


class HostCopier:
    """Copies as `CudaCopier` does, in host memory; lets go of a buffer two copies later."""

    def __init__(self) -> None:
        self._in_flight: list[Callable[[], None]] = []

    def copy(self, buffer: torch.Tensor, num_bytes: int, let_go: Callable[[], None]) -> tuple[torch.Tensor, None]:
        self._in_flight.append(let_go)
        if len(self._in_flight) > 2:
            self._in_flight.pop(0)()
        return buffer[:num_bytes].clone(), None

    def receive(self, flat: torch.Tensor, _event: None) -> torch.Tensor:
        return flat

    def finish(self) -> None:
        for let_go in self._in_flight:
            let_go()


class Runtime:
    """Stands in for libcudart's last error: a failed call leaves it, the next launch that torch checks raises it."""

    def __init__(self, code: int) -> None:
        self._code, self._pending = code, 0

    def fail(self) -> int:
        self._pending = self._code
        return self._code

    def cudaGetLastError(self) -> int:  # noqa: N802 - as it is called there
        found, self._pending = self._pending, 0
        return found

    def check(self) -> None:
        if self.cudaGetLastError():
            raise RuntimeError("CUDA error: operation not supported")


@pytest.mark.parametrize("code", [0, REFUSED])
def test_batches_are_the_same_and_one_warning_says_why_they_are_copied_twice(
    store: Store, socket_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    calls: dict[str, list[int]] = {"register": [], "unregister": [], "bounced": []}

    def register(address: int, *_: int) -> int:
        calls["register"].append(address)
        return runtime.fail()

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=calls["unregister"].append)
    runtime = Runtime(code)

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        runtime.check()
        calls["bounced"].append(tensor.data_ptr())
        return tensor.clone()

    def pinned_stream(answer: Answer, _: object) -> ring.RingStream:
        copier: Any = HostCopier()
        return ring.RingStream(answer, copier)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: runtime)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(client, "RingStream", pinned_stream)
    config = LoaderConfig(batch_size=4, epochs=2)
    with Loader(store, config) as own, Loader(store, config, service=socket_path) as loader, caplog.at_level(logging.WARNING):
        num_batches = 0
        for one, other in zip(own.forever(), loader.forever(), strict=True):
            assert values(one) == values(other)
            num_batches += 1
    warned = [record for record in caplog.records if "refuses to register" in record.message]
    if code:
        assert (len(calls["register"]), len(calls["unregister"]), len(calls["bounced"]), len(warned)) == (1, 0, num_batches, 1)
    else:
        assert sorted(calls["register"]) == sorted(calls["unregister"])
        assert (calls["bounced"], warned) == ([], [])


def test_a_refusal_leaves_no_error_in_the_runtime(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(REFUSED)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: runtime.fail()))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: runtime)
    assert not ring.register(np.zeros(8, np.uint8))
    runtime.check()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())  # a runtime that is linked statically
    assert not ring.register(np.zeros(8, np.uint8))
    assert "the next CUDA call may report error 801 once more" in caplog.text
