"""Muon (Jordan 2024; Liu et al. 2025, arXiv 2502.16982) for the blocks' matrices, AdamW for other weights, of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bucketline.train.parallel import repeated_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from bucketline.train.config import TrainConfig

MATRICES = "of_muon"  # a group's entry


def make_muon(model: nn.Module, groups: list[dict[str, Any]], config: TrainConfig, *, compiled: bool) -> torch.optim.Optimizer:
    """Return both as one; Muon's updates are scaled to the size of AdamW's, so that they share a learning rate and decay."""
    del compiled
    assert config.learning_rate is not None
    inside = {id(parameter) for block in repeated_blocks(model) for parameter in block.parameters() if parameter.ndim == 2}
    split = [
        {**group, MATRICES: of_muon, "params": [one for one in group["params"] if (id(one) in inside) is of_muon]}
        for group in groups
        for of_muon in (True, False)
    ]
    return MuonWithAdamW([group for group in split if group["params"]], config.learning_rate)


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers with one state and one list of groups."""

    def __init__(self, groups: list[dict[str, Any]], learning_rate: float) -> None:
        """Make Muon for the groups marked with `MATRICES` and AdamW for the others."""
        self._parts: list[torch.optim.Optimizer] = []
        super().__init__(groups, {"lr": learning_rate})
        for of_muon in (True, False):
            own = [group for group in self.param_groups if group[MATRICES] is of_muon]
            if own and of_muon:
                self._parts.append(torch.optim.Muon(own, lr=learning_rate, adjust_lr_fn="match_rms_adamw"))
            elif own:
                self._parts.append(torch.optim.AdamW(own, lr=learning_rate, fused=True))
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step both."""
        assert closure is None
        for part in self._parts:
            part.step()

    def _share(self) -> None:
        """Set both parts to this one's state and groups, which torch replaces when it loads a state."""
        for part in self._parts:
            of_muon = isinstance(part, torch.optim.Muon)
            part.param_groups = [group for group in self.param_groups if group[MATRICES] is of_muon]
            part.state = self.state
