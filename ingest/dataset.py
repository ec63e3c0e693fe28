"""`ingest pack` and `ingest scan` of a data set file: each source in turn, into a store of its own."""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import UsageError
from bucketline.files.paths import refuse_overlap
from bucketline.ingest.dry_run import DryRun, dry_run
from bucketline.ingest.pack import pack_session, pack_source, ray_workers
from bucketline.ingest.parallel.signals import Stopped, exit_code_of
from bucketline.ingest.scan import ScanReport, scan_source
from bucketline.ingest.sources.dataset_file import DatasetEntry, DatasetFile, naming_source, read_dataset_file
from bucketline.ingest.sources.open_source import open_source
from bucketline.store.format.manifest import MANIFEST
from bucketline.store.format.mixture_file import MixedStore, write_mixture
from bucketline.typed_json import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from bucketline.ingest.config import PackConfig, ScanConfig
    from bucketline.ingest.packing.finish import PackResult
    from bucketline.pages.page import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetResult:
    """Result of packing a data set file."""

    sources: dict[str, PackResult]  # by the name of the source
    repeats: dict[str, int]
    notes: list[str]  # folders that were left out, stores that belong to no source
    why_not_readable: str | None  # why the folder was not made readable as one; None if it was

    @property
    def is_good(self) -> bool:
        beyond = any(result.too_many_rejects or result.not_pruned_beyond_limit for result in self.sources.values())
        return self.why_not_readable is None and not beyond


def pack_dataset(
    config: PackConfig,
    on_result: Callable[[DatasetEntry, PackConfig, PackResult], None],
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int = 1,
) -> DatasetResult | None:
    """Pack each source of the file into `NAME.store` in the folder `config.store`; return the result on rank 0.

    Sources are packed in the file's order. `on_result` is called on rank 0 after each. When all are packed, the folder's
    `mixture.json` is replaced, which names their stores and repeats; a run that was interrupted leaves it as it was.

    Raises:
        SourceError: if the file or a source is invalid.
        UsageError, BucketlineError, KeyboardInterrupt, SystemExit: as `pack`.
    """
    results: dict[str, PackResult] = {}
    workers = ray_workers(config, world_size)
    with pack_session(config, rank, world_size, local_rank, local_world_size, workers) as session:
        try:
            file = session.ranks.from_first(lambda: _checked(config), encode, lambda value: decode(DatasetFile, value))
            for entry in file.sources:
                own = _pack_config(config, entry)
                with naming_source(config.source, entry):
                    result = pack_source(own, session, is_last=entry is file.sources[-1])
                if result is not None:
                    results[str(entry.name)] = result
                    with redirect_stdout(session.stdout):
                        on_result(entry, own, result)
        except KeyboardInterrupt as stop:
            if isinstance(stop, Stopped) or not session.num_packed:
                raise
            raise Stopped(exit_code_of(stop), session.num_packed) from stop
        return _finish(config, file, results) if session.ranks.is_first else None


def dry_run_dataset(config: PackConfig) -> tuple[DatasetFile, list[tuple[DatasetEntry, DryRun]]]:
    """Compare each source of a data set file with its store, in the file's order.

    Raises:
        BucketlineError: as `dry_run`; or if the file is invalid.
    """
    file = _checked(config)
    found = []
    for entry in file.sources:
        with naming_source(config.source, entry):
            found.append((entry, dry_run(_pack_config(config, entry))))
    return file, found


def scan_dataset(config: ScanConfig) -> tuple[DatasetFile, list[tuple[DatasetEntry, ScanReport]]]:
    """Scan each source of a data set file, in the file's order. The sheet shows all of them.

    Raises:
        SourceError, ModelError, UsageError, StoreError: as `scan`; or if the file is invalid.
    """
    file = read_dataset_file(Path(config.source), config.alone())
    if config.output is not None:
        from bucketline.ingest.sheet.crops import refuse_sheet

        for entry in file.sources:
            refuse_sheet(config.output, open_source(entry.path, entry.options(config.alone())).local_paths)
    reports: list[tuple[DatasetEntry, ScanReport]] = []
    sections: list[Section] = []
    for entry in file.sources:
        with naming_source(config.source, entry):
            own = replace(config, source=entry.path, val_fraction=entry.val_fraction(config.val_fraction), **entry.overrides())
            report, own_sections = scan_source(own, len(file.sources))
        reports.append((entry, report))
        sections += own_sections
    if config.output is not None:
        from bucketline.ingest.sheet.crops import write_sheet

        write_sheet(config.output, config.source, sections)
    return file, reports


def _checked(config: PackConfig) -> DatasetFile:
    """Read the file, and check that no source overlaps with the folder of the stores. Rank 0 only."""
    if not isinstance(config.place, Path):
        raise UsageError(
            f"{config.source} has several sources, which need a store each: pack them into a folder, and `store push` each of "
            "its stores, or pack each source into a URL of its own"
        )
    if (config.store / MANIFEST).exists():
        raise UsageError(
            f"{config.store} is a store; {config.source} has several sources, which need a folder for a store each: "
            "choose another path"
        )
    file = read_dataset_file(Path(config.source), config.alone())
    for entry in file.sources:
        for path in open_source(entry.path, entry.options(config.alone())).local_paths:
            refuse_overlap(path, config.store)
    return file


def _pack_config(config: PackConfig, entry: DatasetEntry) -> PackConfig:
    return replace(
        config,
        source=entry.path,
        place=config.store / entry.store_name,
        val_fraction=entry.val_fraction(config.val_fraction),
        **entry.overrides(),
    )


def _finish(config: PackConfig, file: DatasetFile, results: dict[str, PackResult]) -> DatasetResult:
    """Write `mixture.json`, unless a store is empty. Rank 0 only."""
    stores = tuple(MixedStore(name=entry.store_name, repeats=entry.repeats) for entry in file.sources)
    names = {store.name for store in stores}
    empty = next((name for name, result in results.items() if not result.packed + result.unchanged), None)
    if empty is None:
        write_mixture(config.store, stores)
        why = None
    else:
        why = f"not one image of {empty} could be packed; fix the source, or remove it from {config.source}"
    strange = sorted(path.name for path in config.store.glob("*.store") if path.name not in names)
    left = [f"{config.store / name} belongs to no source of {config.source}; it is kept, and not read" for name in strange]
    return DatasetResult(
        sources=results,
        repeats={str(entry.name): entry.repeats for entry in file.sources},
        notes=[*file.notes, *left],
        why_not_readable=why,
    )
