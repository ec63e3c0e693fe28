"""Commit a change to a store, on a disk or at a URL; and the drop of rows.

`restore` is the commit of an earlier generation's manifest.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import CorruptError, StoreError, UsageError
from bucketline.store.folder import DeniedError, LocalFolder, MissingObjectError
from bucketline.store.format.block import sample_digest
from bucketline.store.format.manifest import finished
from bucketline.store.read.files import NAMED_SHARDS, files_of, list_of, lost_shards
from bucketline.store.read.samples import Selection, live_samples
from bucketline.store.remote.generations import (
    commit,
    complete_first,
    find_newest,
    listed_generations,
    newest_after,
    newest_generation,
    read_generation,
    refuse_without_put_if_absent,
)
from bucketline.store.remote.objects import ObjectFolder, pause_after
from bucketline.store.transfer import Downloader, Uploader, forget_sent, noted, sent_shards, shard_of
from bucketline.store.write.publish import (
    ChangeBase,
    changing,
    existing_manifest,
    next_generation,
    prepare_store,
    publish_shards,
    replaced,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from bucketline.store.format.manifest import Manifest, ShardEntry


FEW_LOOKED_UP = 8  # shards whose objects are looked up by name; of more, all are listed
ATTEMPTS = 50  # of a change that other writers get ahead of each time


@contextmanager
def newest_base(place: Path | ObjectFolder, work: WorkFolder | None = None) -> Iterator[ChangeBase]:
    """Yield the newest generation, to be looked at only. `work`: of a store in object storage, by default a temporary one."""
    if isinstance(place, Path):
        yield _local_base(place, existing_manifest(place))
        return
    with work_folder(work) as held:
        yield _base_there(place, newest_generation(place, lists=True), held, is_cache_kept=work is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFolder:
    """The folders that a change of a store in object storage uses on this disk."""

    made: Path  # folder of the shards that are made, laid out as a store
    cache: Path | None  # of the store's sidecars; None: the usual one


@contextmanager
def work_folder(work: WorkFolder | None = None) -> Iterator[WorkFolder]:
    """Yield `work`, or a temporary one."""
    if work is not None:
        yield work
        return
    with tempfile.TemporaryDirectory(prefix="bucketline-", ignore_cleanup_errors=True) as folder:
        held = WorkFolder(made=Path(folder) / "made", cache=Path(folder) / "cache")
        try:
            yield held
        finally:
            if held.cache is not None and held.cache.exists():  # it was needed
                from bucketline.store.remote.cache.folder import forget_cache

                forget_cache(held.cache)


def _base_there(place: ObjectFolder, newest: Manifest, work: WorkFolder, *, is_cache_kept: bool) -> ChangeBase:
    return ChangeBase(place, newest, newest.generation + 1, work.made, work.cache, is_cache_kept=is_cache_kept)


@contextmanager
def on_this_disk(base: ChangeBase, shards: Iterable[ShardEntry], *, damaged: bool = False) -> Iterator[Path]:
    """Yield a folder on this disk with all files of some shards and the list of dropped rows: the store's, or a temporary one.

    If they are `damaged`, it has what there is of them.
    """
    if not isinstance(base.folder, ObjectFolder):
        yield base.made
        return
    with tempfile.TemporaryDirectory(prefix="bucketline-", ignore_cleanup_errors=True) as folder:
        path, downloader = Path(folder), Downloader(base.folder, takes_any_digest=damaged)
        for name in ("shards", "generations"):
            (path / name).mkdir()
        files = [*list_of(path, base.manifest), *(file for entry in shards for file in files_of(path, entry))]
        if not damaged:
            downloader.get(files)
        for own in files if damaged else ():
            with suppress(MissingObjectError, CorruptError):
                downloader.get_one(*own)
        yield path


def commit_change(
    place: Path | ObjectFolder,
    change: Callable[[ChangeBase], Manifest],
    *,
    adopting: bool = True,
    finish: Callable[[], None] = lambda: None,
    work: WorkFolder | None = None,
    first: Manifest | None = None,
) -> tuple[Manifest, Manifest]:
    """Commit what `change` makes of the newest generation. Return the generation before, and the newest afterwards.

    `change` returns a manifest with other shards or buckets; the same one changes nothing. It is called again if another writer
    has committed first; the shards that it made are still there then. On a disk, what an interrupted run left becomes a
    generation first, if `adopting`. Shards that are no longer listed become retired as long as they have files. `finish` is
    called at the end, on a disk under the lock. Of a store in object storage, `work` may have shards that were made for it,
    and is a temporary folder by default. `first` is the empty generation of a store that is not there yet.
    """
    if isinstance(place, Path):
        with changing(place, adopting=adopting) as manifest:
            base = _local_base(place, manifest)
            changed = change(base)
            if changed is not manifest:
                changed = publish_shards(place, _retiring(manifest, changed), changed.shards, base.number)
            finish()
            return manifest, changed
    place.refuse_read_only()
    found = None if first is not None else newest_generation(place, lists=True, may_be_late=True)  # raises if there is none
    refuse_without_put_if_absent(place, found)
    newest, took_s = found or first or newest_generation(place, lists=True), 0.0
    with work_folder(work) as held:
        prepare_store(held.made)
        sent: dict[str, ShardEntry] = {}  # by all attempts
        for tries in range(ATTEMPTS):
            begun = time.monotonic()
            if tries:
                newest = _newer(place, newest, is_first=newest is first)
            base = _base_there(place, newest, held, is_cache_kept=work is not None)
            changed = change(base)
            after = changed if changed is newest else _committed(place, base, changed, sent, is_first=newest is first)
            if after is not None:
                _remove(place, sent.keys() - {entry.name for entry in after.shards})
                finish()
                return newest, after
            took_s = time.monotonic() - begun if tries else 0.0  # the first one also sends
            time.sleep(pause_after(tries + 1, took_s))
    raise StoreError(f"{place.url}: {ATTEMPTS} times another writer committed first; rerun the command when fewer are at work")


def _newer(place: ObjectFolder, before: Manifest, *, is_first: bool) -> Manifest:
    """Return the newest generation, after another writer's commit; `is_first`: `before` is not in the bucket."""
    if is_first:
        newest = newest_generation(place)
        complete_first(place, newest)
        return newest
    hint = find_newest(place)  # of which the listing may be late
    return hint if hint is not None and hint.generation >= before.generation else newest_after(place, before, lists=False)


def _committed(
    place: ObjectFolder, base: ChangeBase, after: Manifest, sent: dict[str, ShardEntry], *, is_first: bool
) -> Manifest | None:
    """Send the files that a changed manifest lists and commit it; None if another writer has committed first.

    The shards that it sends are added to `sent`, and not sent again. The list of dropped rows has been written.
    """
    before = {entry.name: entry for entry in base.manifest.shards}
    new = [entry for entry in after.shards if entry.name not in before or entry.added != before[entry.name].added]
    new = [entry for entry in new if sent.get(entry.name) != entry]
    earlier = sent_shards(base.made) if new else {}
    with noted(place, "change", {entry.name for entry in new} - earlier.keys()):
        if new:
            own = {entry.name: entry for entry in new if entry.name not in before.keys() | earlier.keys()}
            uploader = Uploader(place)
            if len(new) > FEW_LOOKED_UP:
                uploader.look(None if is_first else base.manifest, {*own, *sent, *earlier})
            else:
                uploader.lacking(base.made, new)
            if lost := [entry.name for entry in new if entry.name in earlier and uploader.lacking(base.made, [entry])]:
                forget_sent(base.made, lost)
                raise StoreError(
                    f"{place.url}: {counted(len(lost), 'shard')} that had been sent is no longer there, {lost[0]} first: "
                    "somebody has removed what no generation listed; nothing was committed: rerun the command, which packs it "
                    "again"
                )
            uploader.send(base.made, new)
            sent |= own
        after, data = finished(_next(place, base.manifest, after), place.url)
        return after if commit(place, after.generation, data, is_first=is_first) else None


def _remove(place: ObjectFolder, shards: set[str]) -> None:
    if shards:
        with suppress(DeniedError):  # garbage collection removes them once they are old
            place.remove([file.name for file in place.names("shards") if shard_of(file.name) in shards])


def _local_base(place: Path, manifest: Manifest) -> ChangeBase:
    return ChangeBase(LocalFolder(place), manifest, next_generation(place, manifest), place)


def _retiring(before: Manifest, after: Manifest) -> Manifest:
    """Return `after` with all shards that it does not list, and any generation may have listed, as retired."""
    gone = (before.known_shards | after.known_shards) - {entry.name for entry in after.shards}
    return dataclasses.replace(after, retired=tuple(sorted(gone)))


def _next(place: ObjectFolder, before: Manifest, after: Manifest) -> Manifest:
    gone = _retiring(before, after).retired
    there = {shard_of(file.name) for file in place.names("shards")} if gone else set[str]()
    try:
        retired = tuple(name for name in gone if name in there)
        return dataclasses.replace(after, generation=before.generation + 1, retired=retired)
    except ValueError as error:
        raise CorruptError(f"{place.place('shards')}: {error}; rerun the command") from error


def restore(place: Path | ObjectFolder, generation: int, *, dry_run: bool = False) -> tuple[Manifest, Manifest]:
    """Publish the rows of an earlier generation as a new, newest one. With `dry_run`, only check.

    Return the generation that was the newest, and the one that has these rows: the same if it has them already.

    What an interrupted run left on a disk is published as a generation first: the rows stay reachable there, and the next pack
    does not add them to what was restored. Shards that only later generations list become retired, so that no run adopts them
    again.
    """

    def restored(base: ChangeBase) -> Manifest:
        newest, earlier = base.manifest, _whole(base, generation)
        is_same = all(getattr(newest, name) == getattr(earlier, name) for name in ("shards", "buckets", "withdrawn"))
        lists = (newest.dropped, earlier.dropped)
        return newest if is_same and len({own and own.digest for own in lists}) == 1 else earlier

    with newest_base(place) as base:  # before anything is adopted
        before, earlier = base.manifest, restored(base)
    return (before, earlier) if dry_run else commit_change(place, restored)


def earlier_generations(place: Path | ObjectFolder) -> list[tuple[Manifest, float]]:
    """Return the generations whose manifests can be read, the newest first, each with its time of publication (Unix)."""
    found = []
    with newest_base(place) as base:
        for number, file in listed_generations(base.folder).items():
            with suppress(StoreError):
                found.append((read_generation(base.folder, number, base.manifest), file.modified_s))
    return found[::-1]


def _whole(base: ChangeBase, generation: int) -> Manifest:
    """Return the manifest of an earlier generation, whose files are all there."""
    folder, newest, place = base.folder, base.manifest, base.folder.place("")
    there = sorted({*listed_generations(folder), newest.generation})
    if generation not in there:
        raise StoreError(
            f"{place} has no generation {generation}: it was removed by `store compact --gc`, or never made; nothing was "
            f"changed; there are {', '.join(map(str, there))}"
        )
    earlier = read_generation(folder, generation, newest)
    if lost := lost_shards(folder, earlier.shards, earlier.dropped):
        more = f", and {counted(len(lost) - NAMED_SHARDS, 'shard')} more" if len(lost) > NAMED_SHARDS else ""
        raise StoreError(
            f"generation {generation} of {place} cannot be restored: files of {counted(len(lost), 'shard')} are gone, "
            f"collected or lost: {'; '.join(map(str, lost[:NAMED_SHARDS]))}{more}; nothing was changed; restore these files, "
            "or choose another generation"
        )
    return earlier


# ------------------------------------------------------------------------------------------------------------------------ drop
# Drop samples: their rows are in the next generation's list of dropped rows; no shard is rewritten.

NAMED_SAMPLES = 5  # ids that an error lists by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Result of a drop or of its dry run."""

    generation: int  # newest generation afterwards
    ids: tuple[str, ...]
    samples: int  # remaining


def drop(place: Path | ObjectFolder, ids: Iterable[str], *, match: str | None = None, dry_run: bool = False) -> Dropped:
    """Publish a generation without the given samples; older generations keep them. With `dry_run`, only check.

    Their ids are withdrawn: a pack leaves their images out until `ingest pack --take-back ID`.
    `match`: a pattern of *, ? and [abc]; the samples whose ids match are dropped, too.
    """
    named = tuple(ids)
    if not named and match is None:
        raise UsageError("there is no id to drop; name samples, a pattern with --match, or a file of ids with --from-file")
    wanted: tuple[str, ...] = ()

    def without(base: ChangeBase, *, is_listed: bool = True) -> Manifest:
        nonlocal wanted
        wanted = tuple(dict.fromkeys((*named, *_matching(base, match))))
        digests = [sample_digest(sample_id) for sample_id in wanted]
        shards, changed, gone = replaced(base, (), digests)
        if unknown := [own for own, digest in zip(wanted, digests, strict=True) if digest not in gone]:
            raise _unknown(base, unknown, len(wanted))
        if not is_listed:
            return base.manifest
        withdrawn = tuple(sorted({*base.manifest.withdrawn, *wanted}))
        return replace(base.manifest, shards=shards, dropped=base.list_dropped(shards, changed), withdrawn=withdrawn)

    if dry_run:
        with newest_base(place) as base:
            without(base, is_listed=False)
        manifest = base.manifest
        return Dropped(generation=manifest.generation, ids=wanted, samples=manifest.samples - len(wanted))
    _, after = commit_change(place, without)
    return Dropped(generation=after.generation, ids=wanted, samples=after.samples)


def _matching(base: ChangeBase, match: str | None) -> list[str]:
    if match is None:
        return []
    base.fetch_indexes()
    found = [listed.record.id for listed in live_samples(base.store, Selection(match=match))]
    if not found:
        raise StoreError(f"{base.folder.place('')} has no sample that matches {match!r:.200}; nothing was dropped")
    return found


def read_ids(path: Path) -> list[str]:
    """Return the ids in a file, one per line; empty lines are skipped."""
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; expected a file with one id per line") from error
    return [line.removesuffix("\r") for line in text.split("\n") if line.removesuffix("\r")]


def _unknown(base: ChangeBase, ids: list[str], num_given: int) -> StoreError:
    what, advice = "has no sample", "ids are paths in the source, with their extension"
    if gone := {*ids} & {*base.manifest.withdrawn}:
        what, advice = "has already withdrawn", "leave out what was dropped before"
        ids = [sample_id for sample_id in ids if sample_id in gone]
    named = ", ".join(map(repr, ids[:NAMED_SAMPLES]))
    return StoreError(
        f"{base.folder.place('')} {what} {named}{' and others' if len(ids) > NAMED_SAMPLES else ''} "
        f"({len(ids)} of {num_given} ids given); nothing was dropped; {advice}"
    )
