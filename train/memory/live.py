"""The bytes of tensors that are alive, counted while operations of torch run; also of tensors without memory."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the storages that operations make, from each one's making until nothing refers to it."""

    def __init__(self, trained: Iterable[torch.nn.Parameter] = ()) -> None:
        """`trained`: weights whose gradients are counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = self.gradients = self.most_without_gradients = 0
        self._known: set[int] = set()
        self._hooks: list[Any] = [one.register_post_accumulate_grad_hook(self._add_gradient) for one in trained]  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _add_gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.gradients += parameter.grad.nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        """Run an operation, and count what it made."""
        found = func(*args, **(kwargs or {}))
        made = [one.untyped_storage() for one in _tensors(found)]
        new = [storage for storage in made if id(storage) not in self._known]
        if new:
            given = {id(one.untyped_storage()) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
            for storage in new:
                if id(storage) not in given | self._known:
                    self._add(storage)
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        self._known.add(key)
        weakref.finalize(storage, self._free, key, num_bytes)
        self.now += num_bytes
        self.most = max(self.most, self.now)
        self.most_without_gradients = max(self.most_without_gradients, self.now - self.gradients)

    def _free(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def _tensors(found: object) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    return [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
