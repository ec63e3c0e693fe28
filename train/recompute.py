"""Recompute activations in the backward pass instead of storing them: of all blocks, or of a share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from bucketline.train.config import TrainConfig


def recompute(model: nn.Module, config: TrainConfig, *, is_compiled: bool) -> None:
    """Have a model recompute the share of its activations that `--recompute` says."""
    share, run = config.recompute or 0.0, drawn_again if config.lora_dropout else recomputed
    if share == 1:
        model.enable_gradient_checkpointing(run)  # type: ignore[operator]
    elif is_compiled:
        import torch._functorch.config as functorch

        # For each block's graph: torch chooses the operations whose recomputation costs least.
        functorch.activation_memory_budget = 1 - share
    elif share:
        model.enable_gradient_checkpointing(SomeRecomputed(share, run))  # type: ignore[operator]


def recomputed(block: nn.Module, *args: Any) -> Any:  # noqa: ANN401 - any block's
    """Run a block, and again in the backward pass; no family draws random numbers, so no generator's state is kept for it."""
    return checkpoint(block.__call__, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


def drawn_again(block: nn.Module, *args: Any) -> Any:  # noqa: ANN401 - likewise
    """Run a block as `recomputed` does, if its adapters drop inputs: they drop the same ones in the backward pass."""
    return checkpoint(block.__call__, *args, use_reentrant=False, preserve_rng_state=True, determinism_check="none")


class SomeRecomputed:
    """Recompute a share of the blocks, evenly spaced in the order in which they run first."""

    def __init__(self, share: float, run: Callable[..., Any] = recomputed) -> None:
        """`share`: of the blocks to recompute, 0 to 1; `run` recomputes one."""
        self._share, self._run = share, run
        self._places: dict[nn.Module, int] = {}

    def __call__(self, block: nn.Module, *args: Any) -> Any:  # noqa: ANN401 - likewise
        """Run a block, and again in the backward pass if it is one of the share."""
        place = self._places.setdefault(block, len(self._places))
        is_one = round((place + 1) * self._share) > round(place * self._share)
        return self._run(block, *args) if is_one else block(*args)
