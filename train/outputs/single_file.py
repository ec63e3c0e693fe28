"""Trained weights in the original key layout of `.safetensors` checkpoints: diffusers' conversion from it, inverted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bucketline.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

OLD_AVERAGE = "model_ema."  # a file's own moving average, which some tools would prefer to the trained weights


def in_original_layout(
    trained: Mapping[str, Tensor],
    template: Mapping[str, Tensor],
    convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    *,
    item: str,
) -> dict[str, Tensor]:
    """Return the tensors of a `template` in the original layout, with those of the trained part replaced.

    `convert` turns all tensors of such a file into the part's, by diffusers' names: it renames tensors, and splits and
    reorders their rows. It is called with numbered rows, whose places in its result say where each row comes from.
    """
    numbers: dict[str, Tensor] = {}
    names, starts, num_rows = list(template), [], 0
    for name, tensor in template.items():
        rows = tensor.shape[0] if tensor.ndim else 1
        numbers[name] = torch.arange(num_rows, num_rows + rows).reshape(tensor.shape[:1] + (1,) * (tensor.ndim - 1))
        starts.append(num_rows)
        num_rows += rows
    try:
        converted = {name: tensor.flatten() for name, tensor in convert(numbers).items()}
    except (KeyError, IndexError) as error:
        raise ModelError(f"{item} holds no such model ({error!r}); name a file of the same architecture") from error
    if different := converted.keys() ^ trained.keys():
        raise ModelError(
            f"{item} holds another model: only one of the two has {min(different)}; name a file of the same architecture"
        )
    result = {name: tensor for name, tensor in template.items() if not name.startswith(OLD_AVERAGE)}
    for name, places in converted.items():
        values = trained[name].reshape(len(places), -1)
        owners = torch.searchsorted(torch.tensor(starts), places, right=True) - 1
        for owner in owners.unique().tolist():  # type: ignore[no-untyped-call, unused-ignore]
            own, mine = names[owner], owners == owner
            if result[own] is template[own]:
                result[own] = template[own].to(values.dtype, copy=True)
            try:
                result[own].view(numbers[own].numel(), -1)[places[mine] - starts[owner]] = values[mine]
            except (RuntimeError, IndexError) as error:
                raise ModelError(
                    f"{item}: {own} has the shape {tuple(template[own].shape)}, and the trained tensors "
                    f"{tuple(trained[name].shape)} do not fit into it; name a file of the same architecture"
                ) from error
    if not all(torch.equal(tensor, trained[name]) for name, tensor in convert(result).items()):
        raise ModelError(f"{item}: diffusers does not read back what would be written; report this with its version")
    return result
