"""The size of a command's batches as one value: `8` rows, `4MP` of pixels, `16ktok` of latent positions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, ClassVar

from bucketline.errors import UsageError
from bucketline.loader.config import SIZES, LoaderConfig, OrderOptions
from bucketline.option_value import ONE_OR_MORE, OptionValue, in_units


@dataclass(frozen=True, kw_only=True)
class BatchSize(OptionValue):
    """The size of a batch, by the fields of `LoaderConfig` that set it.

    >>> BatchSize.parse("1.5MP/8", "--batch").sizes(), str(BatchSize(batch_tokens=16384))
    ({'batch_pixels': 1572864, 'batch_multiple': 8}, '16ktok')
    """

    FORMS = ("BATCH_SIZE", "BATCH_PIXELS[/BATCH_MULTIPLE]", "BATCH_TOKENS[/BATCH_MULTIPLE]")
    METAVAR = "8|4MP|16ktok"
    EXPECTED = "rows, such as 8, or as many as fit 4MP (of 1024 x 1024 px) or 16ktok (of 1024); in multiples of 8 rows: 4MP/8"
    LIMITS: ClassVar = dict.fromkeys((*SIZES, "batch_multiple"), ONE_OR_MORE)

    batch_size: int | None = None
    batch_pixels: Annotated[int | None, in_units({"px": 1, "MP": 1 << 20})] = None
    batch_tokens: Annotated[int | None, in_units({"tok": 1, "ktok": 1 << 10})] = None
    batch_multiple: int = 1

    def sizes(self) -> dict[str, int]:
        """Return the fields of `LoaderConfig` that it sets."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}


@dataclass(frozen=True, kw_only=True)
class BatchOptions(OrderOptions):
    """Size and order of the batches: the options that `loader plan`, `loader peek` and the trainer share."""

    SECTION = OrderOptions.SECTION

    batch: BatchSize | None = None
    """Size of a rank's micro-batch: rows; or as many rows of a bucket as fit 4MP (megapixels of 1024 x 1024 px) or 16ktok (1024
    latent positions, h x w, each), at least one. 4MP/8: in multiples of 8 rows. The global batch is ranks x this x
    --accumulation."""

    def __post_init__(self) -> None:
        OrderOptions.__post_init__(self)
        self._expect_batch()

    def _expect_batch(self) -> None:
        if self.batch is None:
            raise UsageError(f"no batch size given: pass --batch: {BatchSize.EXPECTED}")

    def sizes(self) -> dict[str, int]:
        """Return the size as the fields of `LoaderConfig`."""
        assert self.batch is not None
        return self.batch.sizes()

    def for_loader(self, **others: object) -> LoaderConfig:
        """Return a loader's configuration with the options that both have, and with the `others`."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name in LoaderConfig.__dataclass_fields__}
        return LoaderConfig(**{**own, **self.sizes(), **others})
