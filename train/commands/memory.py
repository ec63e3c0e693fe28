"""`bucketline train memory`: the GPU memory that a model needs, by the choices of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bucketline.option_value import ByteSize, parse_values
from bucketline.options import Arg, Positional

if TYPE_CHECKING:
    from collections.abc import Sequence


DOCUMENTED_RANK = 16
COMMON_NAMES = ("model", "transformer", "unet")  # of folders, which say nothing of the model


@dataclass(frozen=True, kw_only=True)
class TrainMemory:
    """Print the memory that training takes on each GPU: weights, gradients, optimizer state and EMA; and the activations.

    It is counted on a model's shapes, without its weights. A row is a choice of options, a column is a model. Activations are
    in bf16, without --compile, and of one image of the model's own size.

    Example: bucketline train memory path/to/sdxl
    """

    models: Annotated[Positional[tuple[Path, ...]], Arg(metavar="[MODEL …]")] = ()
    """Model folders in diffusers' layout; none: published models."""
    lora_rank: int = DOCUMENTED_RANK
    """Rank of the adapters."""
    memory: ByteSize | None = None
    """Print instead what a run with this --memory chooses, such as 24GiB, and what it needs then."""
    images: int = 1
    """Images of a micro-batch, with --memory."""

    def __post_init__(self) -> None:
        parse_values(self)

    def run(self) -> int:
        from bucketline.extras import extra_named
        from bucketline.train.refusals import refuse_no_model

        for folder in self.models:
            refuse_no_model(folder)
        with extra_named("train"):
            from bucketline.train.memory.dial import as_table
            from bucketline.train.memory.published import PUBLISHED_MODELS
            from bucketline.train.memory.table import as_tables
            from bucketline.train.models.load import read_model_config

            configs = {name: read_model_config(folder)[1] for name, folder in _names(self.models).items()}
            if self.memory is not None:
                print(as_table(configs or PUBLISHED_MODELS, self.memory, self.lora_rank, self.images))
                return 0
            print(as_tables(configs or PUBLISHED_MODELS, self.lora_rank))
        return 0


def _names(folders: Sequence[Path]) -> dict[str, Path]:
    """Return folders by the ends of their paths: as much as tells them apart, and more than a word that any model has.

    >>> list(_names([Path("a/tiny/model"), Path("sdxl")]))
    ['tiny/model', 'sdxl']
    """
    paths = list(dict.fromkeys(folder.resolve() for folder in folders))
    named: dict[str, Path] = {}
    for path in paths:
        length = 2 if path.name in COMMON_NAMES else 1
        others = [other for other in paths if other != path]
        while any(other.parts[-length:] == path.parts[-length:] for other in others):
            length += 1
        named["/".join(path.parts[-length:])] = path
    return named
