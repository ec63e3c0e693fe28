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
    """Stands in for libcudart: a failed call leaves an error, which the next launch that torch checks raises."""

    def __init__(self, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code, self.pending = code, 0
        self.registered, self.unregistered, self.num_bounced = list[int](), list[int](), 0
        cudart = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.unregistered.append)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(ctypes, "CDLL", lambda _: self)

        def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
            assert not self.pending
            self.num_bounced += 1
            return tensor.clone()

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)

    def _register(self, address: int, *_: int) -> int:
        self.registered.append(address)
        self.pending = self.code
        return self.code

    def cudaGetLastError(self) -> int:  # noqa: N802 - as it is called there
        found, self.pending = self.pending, 0
        return found


@pytest.mark.parametrize("code", [0, REFUSED])
def test_batches_are_the_same_and_one_warning_says_why_they_are_copied_twice(
    store: Store, socket_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def stream(answer: Answer, _: object) -> ring.RingStream:
        copier: Any = HostCopier()
        return ring.RingStream(answer, copier)

    runtime = Runtime(code, monkeypatch)
    monkeypatch.setattr(client, "RingStream", stream)
    config = LoaderConfig(batch_size=4, epochs=2)
    with Loader(store, config) as own, Loader(store, config, service=socket_path) as loader, caplog.at_level(logging.WARNING):
        expected = [values(batch) for batch in own.forever()]
        assert [values(batch) for batch in loader.forever()] == expected
    num_warned = sum("refuses to register" in record.message for record in caplog.records)
    if code:
        assert (len(runtime.registered), runtime.num_bounced, num_warned) == (1, len(expected), 1)
    else:
        assert sorted(runtime.registered) == sorted(runtime.unregistered) != []
        assert (runtime.num_bounced, num_warned) == (0, 0)


def test_a_refusal_leaves_no_error_in_the_runtime(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(REFUSED, monkeypatch)
    assert not ring.register(np.zeros(8, np.uint8))
    assert not runtime.pending
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())  # a runtime that is linked statically
    assert not ring.register(np.zeros(8, np.uint8))
    assert "the next CUDA call may report error 801 once more" in caplog.text
