"""Copies to a CUDA device, with a stand-in for the driver's state: which device a thread is at, and which it has touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bucketline.loader.prefetch.cuda_copy import CudaCopier


class Driver:
    """A thread's current device, and the devices with a context. `stream` returns to where it was, as torch's does."""

    def __init__(self) -> None:
        self.current, self.contexts = 0, set[int]()

    def device(self, _device: torch.device) -> Any:
        return _At(self, 1, makes_context=False)  # `_maybe_exchange_device` makes none

    def stream(self, _stream: object) -> Any:
        return _At(self, 1, makes_context=True)  # `set_stream` sets the device, which makes its context


class _At:
    def __init__(self, driver: Driver, device: int, *, makes_context: bool) -> None:
        self._driver, self._device, self._makes_context = driver, device, makes_context

    def __enter__(self) -> None:
        self._before = self._driver.current
        self._go(self._device)

    def __exit__(self, *_: object) -> None:
        self._go(self._before)

    def _go(self, device: int) -> None:
        self._driver.current = device
        if self._makes_context:
            self._driver.contexts.add(device)


class _Event:
    def record(self, _stream: object) -> None: ...

    def query(self) -> bool:
        return True


def test_a_copy_to_the_second_gpu_leaves_the_first_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    for name, stand_in in {"Stream": lambda _: None, "Event": _Event, "device": driver.device, "stream": driver.stream}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    copied, _ = CudaCopier(torch.device("cpu")).copy(torch.arange(9, dtype=torch.uint8), 4, lambda: None)
    assert copied.tolist() == [0, 1, 2, 3]
    assert (driver.contexts, driver.current) == ({1}, 0)
