"""The section of `store report` about an epoch, found by its name: the store's folder imports no loader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.loader.config import LoaderConfig
from bucketline.loader.plan.make_plan import make_plan, plan_counts
from bucketline.pages.page import Finding, Section, parts

if TYPE_CHECKING:
    from bucketline.store.read.store import Store
    from bucketline.store.report.report import ReportOptions


def plan_section(store: Store, options: ReportOptions) -> Section:
    """Return the steps and batches of an epoch of the split train, as `loader plan` prints them, and what is wrong."""
    plan = make_plan(store, LoaderConfig(batch_size=options.batch_size))
    counts = plan_counts(plan, 1, "train")
    head = ("bucket", "rows", "global batch", "batches", "carried to the next epoch")
    rows = [[bucket[name] for name in ("name", "rows", "global_batch", "batches", "carried")] for bucket in counts["buckets"]]
    small = plan.small_buckets(can_drop=False)  # who reads the report may have no --split
    return Section(
        anchor="plan",
        title="Plan",
        note=f"One epoch of the split train by loader plan --batch {options.batch_size}: "
        f"{counted(counts['steps'], 'step')}, {counted(counts['rows'], 'row')} delivered.",
        body=parts.table(head, rows),
        findings=[Finding(level="warning", title="Small buckets", detail=small, anchor="plan")] if small else [],
    )
