"""Records of an import: the plan that rank 0 makes for all ranks, and the summary."""

from __future__ import annotations

from dataclasses import dataclass

from bucketline.ingest.importers.cache import Crops, Scaling  # noqa: TC001 - typed_json reads the types of fields
from bucketline.ingest.importers.columns import ColumnRules  # noqa: TC001 - likewise
from bucketline.ingest.importers.vae.round_trip import RoundTrip  # noqa: TC001 - likewise
from bucketline.ingest.importers.vae.spread import LatentSpread  # noqa: TC001 - likewise
from bucketline.ingest.summary import Reject  # noqa: TC001 - likewise
from bucketline.typed_json import Json  # noqa: TC001 - likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """Summary of an import, or of what it would be."""

    kind: str
    variant: str
    found: int
    imported: int
    replaced: int  # of those, samples that the store had, with other values or captions
    unchanged: int
    rejected: int
    rejected_by_reason: dict[str, int]
    rejects: list[Reject]  # the first 20
    buckets: dict[str, int]  # of what is imported
    without_caption: int  # imported samples
    text: str  # source, encode or none
    crop: str
    scaling_undone: str
    vae: str
    captions_from: str
    columns: list[str]  # roles of what is stored next to the latents
    spread: LatentSpread | None  # None: nothing new, or the check was declined
    round_trip: RoundTrip | None  # likewise, or the VAE's weights are not there
    left_out: dict[str, int]  # what samples have that a store does not take
    kept: int  # samples of the store whose cache is rejected now; their rows stay
    not_in_source: int  # samples of the store that the cache no longer has; their rows stay
    notes: list[str]
    too_many_rejects: bool
    dry_run: bool
    generation: int
    disk_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """The decisions of rank 0, for all ranks."""

    kind: str
    variant: str
    scaling: Scaling
    latents: str
    text: str
    crops: Crops
    columns: ColumnRules
    rules: dict[str, Json]
    is_written: bool  # there is something new, and it is not a dry run
