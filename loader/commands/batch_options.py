"""The size of a command's batches as one value: `8` rows, `4MP` of pixels, `16ktok` of latent positions."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import tyro

from bucketline.errors import UsageError
from bucketline.loader.config import SIZES, LoaderConfig, OrderOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXPECTED = "rows, such as 8, or as many as fit 4MP (of 1024 x 1024 px) or 16ktok (of 1024); in multiples of 8 rows: 4MP/8"
_BATCH = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)(?:/([1-9][0-9]*))?", re.IGNORECASE)
_UNITS = {
    "": ("batch_size", 1),
    "px": ("batch_pixels", 1),
    "mp": ("batch_pixels", 1 << 20),
    "tok": ("batch_tokens", 1),
    "ktok": ("batch_tokens", 1 << 10),
}
"""Field of `LoaderConfig` that a unit sets, and what one unit counts of it."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions(OrderOptions):
    """Size and order of the batches: the options that `loader plan`, `loader peek` and the trainer share."""

    SECTION = OrderOptions.SECTION

    batch: Annotated[str | None, tyro.conf.arg(metavar="8|4MP|16ktok")] = None
    """Size of a rank's micro-batch: rows; or as many rows of a bucket as fit 4MP (megapixels of 1024 x 1024 px) or 16ktok (1024
    latent positions, h x w, each), at least one. 4MP/8: in multiples of 8 rows. The global batch is ranks x this x
    --accumulation."""

    def __post_init__(self) -> None:
        OrderOptions.__post_init__(self)
        self._expect_batch()

    def _expect_batch(self) -> None:
        """Check the size and spell it in one way.

        Raises:
            UsageError: if it is none.
        """
        if self.batch is None:
            raise UsageError(f"no batch size given: pass --batch: {_EXPECTED}")
        object.__setattr__(self, "batch", batch_as_text(batch_sizes(str(self.batch))))

    def sizes(self) -> dict[str, int]:
        """Return the size as the fields of `LoaderConfig`."""
        return batch_sizes(str(self.batch))

    def for_loader(self, **others: object) -> LoaderConfig:
        """Return a loader's configuration with the options that both have, and with the `others`."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name in LoaderConfig.__dataclass_fields__}
        return LoaderConfig(**{**own, **self.sizes(), **others})


def batch_sizes(text: str) -> dict[str, int]:
    """Return the fields of `LoaderConfig` that a batch's size sets.

    Raises:
        UsageError: if the text is not a size.

    >>> batch_sizes("8"), batch_sizes("1.5MP/8"), batch_sizes("16ktok")
    ({'batch_size': 8}, {'batch_pixels': 1572864, 'batch_multiple': 8}, {'batch_tokens': 16384})
    """
    match = _BATCH.fullmatch(text.strip())
    name, unit = _UNITS.get(match[2].lower(), ("", 0)) if match else ("", 0)
    size = float(match[1]) * unit if match else 0
    if match is None or not name or size < 1 or size % 1 or (match[3] and name == "batch_size"):
        raise UsageError(f"--batch is {text:.80}, expected {_EXPECTED}")
    return {name: int(size)} | ({"batch_multiple": int(match[3])} if match[3] and int(match[3]) > 1 else {})


def batch_as_text(sizes: Mapping[str, object]) -> str:
    """Return the size of a batch as `--batch` takes it, from the fields of `LoaderConfig`.

    >>> batch_as_text({"batch_size": 8}), batch_as_text({"batch_pixels": 1 << 22, "batch_multiple": 8})
    ('8', '4MP/8')
    """
    name, size = next((name, size) for name in SIZES if isinstance(size := sizes.get(name), int))
    count, unit = max((count, unit) for unit, (own, count) in _UNITS.items() if own == name and size % count == 0)
    multiple = sizes.get("batch_multiple") or 1
    return f"{size // count}{unit.replace('mp', 'MP')}{'' if multiple == 1 else f'/{multiple}'}"
