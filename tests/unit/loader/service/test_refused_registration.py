"""A driver that registers no shared memory, as in some containers, costs a copy and a warning, not the training."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bucketline.loader import Loader, LoaderConfig
from bucketline.loader.service import client
from tests.unit.loader.service.test_service import assert_same

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from bucketline.loader.service.protocol import Request
    from bucketline.store import Store

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


@pytest.mark.parametrize("code", [0, REFUSED])
def test_batches_are_the_same_and_one_warning_says_why_they_are_copied_twice(
    store: Store, socket_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    calls: dict[str, list[int]] = {"register": [], "unregister": [], "bounced": []}

    def register(address: int, *_: int) -> int:
        calls["register"].append(address)
        return code

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=calls["unregister"].append)

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        calls["bounced"].append(tensor.data_ptr())
        return tensor.clone()

    def served(_: object, sock: socket.socket, name: str, request: Request) -> client.ServiceStream:
        copier: Any = HostCopier()
        return client.ServiceStream(sock, name, replace(request, is_pinned=True), copier)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(client.ServiceBackend, "_served", served)
    config = LoaderConfig(batch_size=4, epochs=2)
    with Loader(store, config) as own, Loader(store, config, service=socket_path) as loader, caplog.at_level(logging.WARNING):
        num_batches = 0
        for one, other in zip(own.forever(), loader.forever(), strict=True):
            assert_same(one, other)
            num_batches += 1
    warned = [record for record in caplog.records if "refuses to register" in record.message]
    if code:
        assert (len(calls["register"]), len(calls["unregister"]), len(calls["bounced"]), len(warned)) == (1, 0, num_batches, 1)
    else:
        assert sorted(calls["register"]) == sorted(calls["unregister"])
        assert (calls["bounced"], warned) == ([], [])
