"""The bytes of the activations that the backward pass needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from bucketline.loader import Batch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bucketline.families.family import Family

NORMS = (functional.layer_norm, functional.group_norm, functional.rms_norm)
LATENT_SIZE = 128  # of a model whose configuration says none


def kept_activations(model: nn.Module, family: Family, images: int) -> int:
    """Return the bytes that a forward pass in bf16 keeps until the backward pass, without weights, inputs and compiling.

    The batch has so many images of the model's own size. The pass is one on the CPU, whose attention keeps no matrix either,
    with the norms of a GPU. The model's tensors need no memory.
    """
    batch, size = example_batch(family, images), latent_size(family)
    noisy, timesteps = torch.zeros(images, batch.latents.shape[1], size, size), torch.zeros(images)
    own = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers(), *batch.tensors(), noisy, timesteps)}
    saved: dict[Any, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    saving = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with saving, torch.autocast("cpu", torch.bfloat16), NormsIn32Bits():
        output = note(family.predict(model, noisy, timesteps, batch))
    kept = sum(num_bytes for storage, num_bytes in saved.items() if storage not in own and not storage.expired())
    del output  # it holds what was saved
    return kept


class NormsIn32Bits(TorchFunctionMode):
    """Cast the inputs of norms as autocast does on a GPU; on a CPU it leaves them as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        """Call a function of torch."""
        if func in NORMS:
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.float, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> Any:  # noqa: ANN401 - torch has no type for it
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def latent_size(family: Family) -> int:
    """Return the height and width of a model's own latents."""
    size = family.config.get("sample_size")
    return size if isinstance(size, int) else LATENT_SIZE


def example_batch(family: Family, images: int) -> Batch:
    """Return a batch of zeros for a model, with captions of as many tokens as its pipeline's."""
    config: Any = family.config
    size = latent_size(family)
    channels = config["in_channels"] // family.packing**2
    tokens, pooled = family.usual_tokens, family.pooled_width
    number = torch.zeros(images, dtype=torch.int64)
    sizes = torch.full((images, 2), 8 * size, dtype=torch.int32)
    return Batch(
        step=0,
        micro_step=0,
        epoch=0,
        bucket="",
        columns={"target": torch.zeros(images, channels, size, size)},
        tokens=torch.zeros(images, tokens, family.token_width),
        token_mask=torch.ones(images, tokens, dtype=torch.bool),
        original_size=sizes,
        crop=sizes,
        target_size=sizes,
        weight=torch.ones(images),
        keys=number,
        ids=torch.zeros(images, 16, dtype=torch.uint8),
        flipped=torch.zeros(images, dtype=torch.bool),
        text_fixed={"pooled": torch.zeros(images, pooled)} if pooled else {},
        class_labels=number,
    )
