"""The optimizers that `--optimizer` names: AdamW and Muon of torch, AdamW in 8 bits of torchao, Prodigy of prodigyopt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import AdamW, Muon, Optimizer

from bucketline.train.config import WeightDtype
from bucketline.train.parallel import repeated_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from bucketline.train.config import TrainConfig

Groups = list[dict[str, Any]]

EVERY_VALUE = 11  # Prodigy finds the rate from every 11th value of a weight: its authors' choice where memory is short


def make_named(name: str, model: nn.Module, groups: Groups, config: TrainConfig, *, compiled: bool) -> Optimizer:
    """Return an optimizer of a model's groups of trained weights; `compiled`: the run compiles."""
    assert config.learning_rate is not None
    match name:
        case "adamw":
            return AdamW(groups, lr=config.learning_rate, **_moments(config), fused=True)
        case "adamw-8bit":
            return make_8bit(groups, config, compiled=compiled)
        case "muon":
            return make_muon(model, groups, config.learning_rate)
    assert name == "prodigy"
    return make_prodigy(groups, config.learning_rate)


def _moments(config: TrainConfig) -> dict[str, Any]:
    return {"betas": (config.betas.beta1, config.betas.beta2), "eps": config.betas.eps}


def make_8bit(groups: Groups, config: TrainConfig, *, compiled: bool) -> Optimizer:
    """Return AdamW with block-wise quantised moments (Dettmers et al. 2021, arXiv 2110.02861).

    Weights in bf16 are rounded stochastically, by torch's own random numbers. In a checkpoint its state is plain tensors.
    torchao compiles its step for each shape of weight: here if the run is `compiled`, else never.
    """
    from torchao.optim import AdamW8bit

    def made(of: Groups) -> Any:  # noqa: ANN401 - torchao has no types
        rounds = config.weights is WeightDtype.BF16
        return AdamW8bit(of, lr=config.learning_rate, **_moments(config), bf16_stochastic_round=rounds)

    optimizer = made(groups)
    optimizer.register_state_dict_post_hook(_flatten_moments)
    if not compiled:
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)
        return optimizer  # type: ignore[no-any-return]
    unlike = {(one.shape, one.stride(), group["weight_decay"]): one for group in groups for one in group["params"]}
    for (*_, weight_decay), one in unlike.items():
        scratch = torch.zeros_like(one).requires_grad_()
        scratch.grad = torch.zeros_like(one)
        made([{"params": [scratch], "weight_decay": weight_decay}]).step()
    return optimizer  # type: ignore[no-any-return]


def _flatten_moments(_optimizer: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    """Return a state with a quantised moment as its tensors, such as `exp_avg.codes`."""
    from torchao.optim.subclass_8bit import OptimState8bit

    def flat(entry: dict[str, Any]) -> dict[str, Any]:
        parts = {
            f"{name}.{part}": getattr(value, part)
            for name, value in entry.items()
            if isinstance(value, OptimState8bit)
            for part in ("codes", "scale", "qmap")
        }
        return {name: value for name, value in entry.items() if not isinstance(value, OptimState8bit)} | parts

    return {**found, "state": {number: flat(entry) for number, entry in found["state"].items()}}


def make_muon(model: nn.Module, groups: Groups, learning_rate: float) -> Optimizer:
    """Return Muon (Jordan 2024; Liu et al. 2025, arXiv 2502.16982) for the blocks' matrices, and AdamW for other weights.

    Muon's updates are scaled to the size of AdamW's, so that both share a learning rate and decay.
    """
    inside = {id(one) for block in repeated_blocks(model) for one in block.parameters() if one.ndim == 2}
    (group,) = groups
    matrices, rest = ([one for one in group["params"] if (id(one) in inside) is of_muon] for of_muon in (True, False))
    return MuonWithAdamW({**group, "params": matrices}, {**group, "params": rest}, learning_rate)


class MuonWithAdamW(Optimizer):
    """Two optimizers with one state and one list of groups."""

    def __init__(self, matrices: dict[str, Any], rest: dict[str, Any], learning_rate: float) -> None:
        """Make Muon for one group and AdamW for the other, unless it is empty."""
        super().__init__([group for group in (matrices, rest) if group["params"]], {"lr": learning_rate})
        self._parts: list[Optimizer] = []
        if matrices["params"]:
            self._parts.append(Muon([matrices], lr=learning_rate, adjust_lr_fn="match_rms_adamw"))
        if rest["params"]:
            self._parts.append(AdamW([rest], lr=learning_rate, fused=True))
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self._parts:
            part.step()


def make_prodigy(groups: Groups, learning_rate: float) -> Optimizer:
    """Return Prodigy (Mishchenko and Defazio 2023, arXiv 2306.06101), AdamW that finds its learning rate.

    It is as its authors set it for diffusion; `learning_rate` multiplies the rate that it finds.
    """
    from prodigyopt import Prodigy

    rate = learning_rate or 1.0  # it takes no 0; each step sets the rate
    prodigy: Optimizer = Prodigy(groups, lr=rate, use_bias_correction=True, safeguard_warmup=True, slice_p=EVERY_VALUE)
    return prodigy
