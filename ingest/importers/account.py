"""Records of an import: the plan that rank 0 makes for all ranks, the counts of each rank, and the summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bucketline.ingest.importers.cache import Crops, Scaling  # noqa: TC001 - typed_json reads the types of fields
from bucketline.ingest.importers.columns import ColumnRules  # noqa: TC001 - likewise
from bucketline.ingest.importers.vae.round_trip import RoundTrip  # noqa: TC001 - likewise
from bucketline.ingest.importers.vae.spread import LatentSpread  # noqa: TC001 - likewise
from bucketline.ingest.summary import Reject
from bucketline.typed_json import Json  # noqa: TC001 - likewise

if TYPE_CHECKING:
    from bucketline.ingest.images.rejects import RejectedError
    from bucketline.ingest.importers.cache import Cached
    from bucketline.ingest.importers.rows import ImportedRow


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
    family: str | None
    text: str
    crops: Crops
    columns: ColumnRules
    rules: dict[str, Json]
    shard_names: str = ""


@dataclass(slots=True, kw_only=True)
class ImportAccount:
    """Counts of one rank's samples."""

    imported: int = 0
    without_caption: int = 0
    rejects: list[Reject] = field(default_factory=list)
    buckets: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    sealed: list[str] = field(default_factory=list)

    def count(self, row: ImportedRow, cached: Cached) -> None:
        self.imported += 1
        self.without_caption += not row.record.captions
        self.buckets[row.record.bucket] = self.buckets.get(row.record.bucket, 0) + 1
        for what in (*row.left_out, *([cached.leaves_out] if cached.leaves_out else [])):
            self.left_out[what] = self.left_out.get(what, 0) + 1

    def reject(self, sample_id: str, error: RejectedError) -> None:
        self.rejects.append(Reject(id=sample_id, reason=error.reason.value, detail=error.detail))


def joined_imports(accounts: list[ImportAccount]) -> ImportAccount:
    """Return the counts of all ranks."""
    whole = ImportAccount()
    for one in accounts:
        whole.imported += one.imported
        whole.without_caption += one.without_caption
        whole.rejects += one.rejects
        whole.sealed += one.sealed
        for mine, other in ((whole.buckets, one.buckets), (whole.left_out, one.left_out)):
            for name, count in other.items():
                mine[name] = mine.get(name, 0) + count
    whole.rejects.sort(key=lambda reject: reject.id)
    return whole
