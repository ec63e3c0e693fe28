"""Commands that look at a store; the place that a command is given, and its progress."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from bucketline.command_line import (
    counted,
    human_bytes,
    human_number,
    one_line,
    print_json,
    print_json_line,
    printable,
    progress_bar,
    refuse_below,
    say,
)
from bucketline.errors import UsageError
from bucketline.files.paths import redacted
from bucketline.option_value import ByteSize
from bucketline.options import Arg, Positional
from bucketline.store.format.block import LATENT
from bucketline.store.remote.urls import ObjectArguments, RemoteArguments, is_url, refuse_misspelt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bucketline.store.folder import Folder
    from bucketline.store.read.files import LostShard
    from bucketline.store.read.samples import Listed
    from bucketline.store.read.store import Store
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.verify.verify import Verified


# ----------------------------------------------------------------------------------------------------------------------- place
# What commands share: a store's place, a path or a URL with the options that reach it, and progress bars.


def store_place(text: str) -> Path | str:
    """Return a store's place as a user typed it: a path, or a URL as text."""
    refuse_misspelt(text)
    return text if is_url(text) else Path(text)


def local_place(text: str) -> Path:
    """Return a path that a user typed for a command that needs the store on a disk."""
    if is_url(text):
        raise UsageError(
            f"{redacted(text)} is a URL, and this needs a store on a disk: `store pull` it, then `store push` it back"
        )
    refuse_misspelt(text)
    return Path(text)


LocalStore = Annotated[Path, Arg(metavar="STORE", read=local_place)]
NewStore = Annotated[Path, Arg(metavar="OUT", read=local_place)]
StorePlace = Annotated[Path | str, Arg(metavar="STORE", read=store_place)]
StoreUrl = Annotated[Path | str, Arg(metavar="URL", read=store_place)]
USUAL_SHARD = ByteSize(num_bytes=2 << 30)


@dataclass(frozen=True, kw_only=True)
class StorageArguments(ObjectArguments):
    """Options that reach object storage, as every command shows them."""

    def objects(self, url: Path | str) -> ObjectFolder:
        from bucketline.store.remote.objects import ObjectFolder

        return ObjectFolder.open(str(url), self.remote())


@dataclass(frozen=True, kw_only=True)
class ChangingArguments(StorageArguments):
    """Options of commands that write a store, or read all of it."""

    def path_or_objects(self, store: Path | str) -> Path | ObjectFolder:
        return store if isinstance(store, Path) else self.objects(store)


@dataclass(frozen=True, kw_only=True)
class ReadingArguments(StorageArguments, RemoteArguments):
    """Options that reach a store in object storage, and say where to keep what is read of it."""

    def open_store(self, place: Path | str) -> Store:
        """Return the store at a path or URL, at its newest generation; raises what `Store.open` does."""
        from bucketline.store.read.store import Store

        return Store.open(place, remote=self.remote())


class AboutStore(Protocol):
    """A command that shows something of a store, or of each store of a data set's folder."""

    @property
    def store(self) -> Path | str: ...
    @property
    def json(self) -> bool: ...

    def look(self) -> tuple[dict[str, Any], int]:
        """Return what there is to show, as JSON values, and the exit code."""

    def show(self, found: dict[str, Any]) -> None:
        """Print it as text."""


def show_each(command: AboutStore) -> int:
    """Run a command for its store, or for all stores of a data set's folder; return the worst exit code."""
    from bucketline.store.format.manifest import read_mixture

    members = read_mixture(command.store) if isinstance(command.store, Path) else None
    if members is None:
        found, code = command.look()
        if command.json:
            print_json(found)
        else:
            command.show(found)
        return code
    assert isinstance(command.store, Path)
    reports: dict[str, dict[str, Any]] = {}
    codes: list[int] = []
    for member in members:
        changes: dict[str, Any] = {"store": command.store / member.name}
        if isinstance(output := getattr(command, "output", None), Path):  # a page of each
            changes["output"] = output.with_stem(f"{output.stem}-{member.name}")
        one: Any = replace(command, **changes)  # type: ignore[type-var]
        reports[member.name], code = one.look()
        codes.append(code)
        if not command.json:
            print(f"{one_line(member.name)}:")
            one.show(reports[member.name])
    if command.json:
        print_json({"stores": reports})
    return max(codes)


def shown(place: Path | str) -> str:
    """Return a store's place for the terminal, on one line: a URL without user and password."""
    return one_line(redacted(place) if isinstance(place, str) else str(place))


@contextmanager
def bar_of_bytes(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show bytes done, rate and time left. Yield a callback that takes each number of bytes processed."""
    with _bytes(what, total) as update:
        yield lambda num_bytes: update(advance=num_bytes)


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show bytes done, rate and time left. Yield a callback that takes the bytes done so far and the total."""
    with _bytes(what, None) as update:
        yield lambda done, total: update(completed=done, total=total)


class Tally:
    """Adds up bytes from several threads for `byte_progress`, once the total is known."""

    def __init__(self, on_bytes: Callable[[int, int], None]) -> None:
        self._on_bytes, self._lock, self._done, self._total = on_bytes, threading.Lock(), 0, 0

    def expect(self, total: int) -> None:
        self._total = total

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._on_bytes(self._done, max(self._done, self._total))


@contextmanager
def bar_of_samples(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show samples done and time left. Yield a callback to call once per sample."""
    from rich.progress import MofNCompleteColumn

    with progress_bar(what, total, MofNCompleteColumn()) as update:
        yield lambda: update(advance=1)


@contextmanager
def _bytes(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with progress_bar(what, total, DownloadColumn(binary_units=True), TransferSpeedColumn()) as update:
        yield update


# ------------------------------------------------------------------------------------------------------------------------ look

MAX_SHOWN = 100  # beyond this disk-to-payload ratio, the number is not informative


@dataclass(frozen=True, kw_only=True)
class Info(ReadingArguments):
    """Show what a store holds: samples, buckets, columns, sizes, encoders, and the options that made it.

    Exit 1 if a shard file is missing or has the wrong length.

    Example: store info photos.store --json
    """

    store: Positional[StorePlace]
    """Path or URL of the store, or the folder of a data set's stores."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        return show_each(self)

    def look(self) -> tuple[dict[str, Any], int]:
        from bucketline.store.read.files import lost_shards
        from bucketline.store.read.samples import info
        from bucketline.store.write.publish import Unpublished, unpublished

        store = self.open_store(self.store)
        lost = lost_shards(store.folder, store.manifest.shards, store.manifest.dropped)
        if lost:
            _print_lost(shown(self.store), lost)
        is_here = store.source is None
        left = unpublished(store.path, store.manifest) if is_here else Unpublished(rows=0, is_being_written=False)
        return {**info(store, lost), "unpublished": asdict(left)}, 1 if lost else 0

    def show(self, found: dict[str, Any]) -> None:
        _print_info(found, shown(self.store))


def _print_lost(store: str, lost: Sequence[LostShard]) -> None:
    for shard in lost:
        print(f"lost: {printable(str(shard))}", file=sys.stderr)
    if lost:
        samples = counted(sum(shard.samples for shard in lost), "sample")
        advice = f"`store repair {store}` keeps the samples that can still be read and drops the others"
        if is_url(store):
            advice = f"push the store again from a copy that has them, or {advice}"
        print(
            f"error: files of {counted(len(lost), 'shard')} with {samples} are lost; {advice}; the same `ingest pack` then "
            "packs these again",
            file=sys.stderr,
        )


def _print_samples(report: dict[str, Any], place: str) -> None:
    disk, payload = report["disk_bytes"], report["payload_bytes"]
    share = f"{human_number(disk / payload)} times the payload of" if 0 < disk < MAX_SHOWN * payload else "payload"
    shards = counted(report["shards"], "shard")
    if report["generation"]:
        say(
            f"{counted(report['samples'], 'sample')}, generation {report['generation']}, {shards}, "
            f"{human_bytes(disk)} on disk, {share} {human_bytes(payload)}"
        )
    else:
        print(f"no generation is published yet, so readers see no samples; {human_bytes(disk)} on disk")
    if report["unpublished"]["is_being_written"]:
        print("a process is writing to it now")
    elif rows := report["unpublished"]["rows"]:
        told = f"`ingest pack SOURCE {place}`"
        print(f"an interrupted run committed {counted(rows, 'row')}; the same command continues it ({told})")
    if report["withdrawn"]:
        print(f"{counted(report['withdrawn'], 'sample')} withdrawn (store drop): packs leave them out")
    for encoder, count in report["captions_cut"].items():
        print(printable(f"{counted(count, 'caption')} cut by {encoder}; `store report` shows them"))


def _shown_rule(rule: object) -> str:
    """Return a rule without JSON's marks.

    >>> _shown_rule({"orders": 8, "keep": 1}), _shown_rule(["a photo of {caption}", "sks"])
    ('orders 8 keep 1', 'a photo of {caption} | sks')
    """
    if isinstance(rule, dict):
        return " ".join(f"{name} {_shown_rule(value)}" for name, value in rule.items())
    return " | ".join(map(_shown_rule, rule)) if isinstance(rule, list) else str(rule)


def _print_info(report: dict[str, Any], place: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from bucketline.store.format.text import TextError

    _print_samples(report, place)
    for name, encoder in report["encoders"].items():
        shown = {key: " + ".join(value) if isinstance(value, dict) else value for key, value in encoder.items()}
        about = ", ".join(f"{key} {value}" for key, value in shown.items() if value is not None and not key.endswith("hash"))
        say(printable(f"{name}: {about}"))
    if isinstance(imported := report["rules"].get("import"), dict):
        about = ", ".join(f"{key} {value}" for key, value in imported.items() if key != "val_fraction")
        say(printable(f"imported: {about}"))
    elif rules := {name: rule for name, rule in report["rules"].items() if rule not in (None, False, [])}:
        about = ", ".join(f"{name} {_shown_rule(rule)}" for name, rule in rules.items())
        say(printable(f"rules: {about}"))
    if report["text_error"] is not None:
        error = TextError(**report["text_error"])
        about = f"error of the quantised text, {counted(error.captions, 'caption')}: {error}"
        say(about)
    for name, group in report["ragged"].items():
        columns = [
            *(f"{column} {own['dtype']} {['T', *own['shape']]}" for column, own in group["tokens"].items()),
            *(f"{column} {own['dtype']} {list(own['shape'])}" for column, own in group["fixed"].items()),
        ]
        about = (
            f"ragged {name}: {group['entries']} entries of {group['of']}, {', '.join(columns)}, T at most {group['max_tokens']}"
        )
        say(printable(about.replace("'", "")))
    for name, column in report["added"].items():
        about = f"added {name}: {column['rows']} of {counted(report['samples'], 'row')}"
        lacking = "" if column["rows"] == report["samples"] else "; `add_column` gives it to the others"
        say(printable(f"{about}{lacking}"))
    table = Table("bucket", "rows", "column", "shape", "dtype")
    for bucket in report["buckets"]:
        first = [bucket["name"], str(bucket["rows"])]
        for name, column in sorted(bucket["columns"].items()):
            if "role" in column or name == LATENT:
                role = column.get("role", name) + (" (optional)" if column.get("optional") else "")
                table.add_row(*first, role, "x".join(map(str, column["shape"])), column["dtype"])
                first = ["", ""]
    if report["buckets"]:
        Console().print(table)


@dataclass(frozen=True, kw_only=True)
class Ls(ReadingArguments):
    r"""List samples: id, tab, bucket, in shard, bucket and row order.

    Unprintable characters and backslashes are printed as Python escapes; --json prints ids unchanged.

    Example: store ls photos.store --split train --match 'coffee/*'
    """

    store: Positional[StorePlace]
    """Path or URL of the store."""
    split: Literal["train", "val"] | None = None
    """List only this split. Default: both."""
    bucket: Annotated[str | None, Arg(metavar="NAME")] = None
    """List only this bucket, such as train/256x192. Default: all."""
    match: Annotated[str | None, Arg(metavar="GLOB")] = None
    """List only ids that match a pattern of *, ? and [abc]; * also matches slashes."""
    json: bool = False
    """Print JSON Lines: one object per sample with its row (in the store's bucket), shard, captions and source."""

    def run(self) -> int:
        from bucketline.store.read.samples import Selection, live_samples

        store, num_listed = self.open_store(self.store), 0
        for listed in live_samples(store, Selection(split=self.split, bucket=self.bucket, match=self.match)):
            num_listed += 1
            if self.json:
                print_json_line(_report(store, listed))
            else:
                print(f"{one_line(listed.record.id)}\t{listed.record.bucket}")
        if num_listed == 0:
            asked = {"--split": self.split, "--bucket": self.bucket, "--match": self.match}
            given = " ".join(f"{option} {value!r}" for option, value in asked.items() if value is not None)
            print(f"no sample matches {given}" if given else f"{shown(self.store)} has no sample", file=sys.stderr)
        return 0


def _report(store: Store, listed: Listed) -> dict[str, Any]:
    record = listed.record
    return {
        "id": record.id,
        "bucket": record.bucket,
        "row": listed.row,
        "shard": store.shards[listed.shard].name,
        "captions": record.captions,
        "cuts": record.cuts,
        "original_size": record.original_size,
        "source": record.source,
        "source_bytes": record.source_bytes,
    }


@dataclass(frozen=True, kw_only=True)
class Get(ReadingArguments):
    """Write one sample to a safetensors file: its columns and caption embeddings.

    Example: store get photos.store coffee/whole.png -o coffee.safetensors
    """

    store: Positional[StorePlace]
    """Path or URL of the store."""
    id: Annotated[Positional[str], Arg(metavar="ID")]
    """Sample id: the path in the source, including the extension."""
    output: Annotated[Path, Arg(aliases=("-o",), metavar="FILE")]
    """Output file; must not exist yet."""
    json: bool = False
    """Print the sample's record as one JSON object."""

    def run(self) -> int:
        from bucketline.files.atomic_write import refuse_existing
        from bucketline.store.read.samples import write_sample

        refuse_existing(self.output, "file")
        report = write_sample(self.open_store(self.store), self.id, self.output)
        if self.json:
            print_json(report)
        else:
            captions = counted(len(report["captions"]), "caption")
            print(f"{shown(self.output)}: {one_line(report['id'])} of {report['bucket']}, {captions}")
        return 0


_NAMED = 5  # number of samples printed per damaged caption


@dataclass(frozen=True, kw_only=True)
class Verify(ChangingArguments):
    """Read a store, verify every checksum, report each fault. Exit 1 if any is found.

    Of a store's URL, one shard at a time is kept in a temporary folder while it is read.

    Example: store verify photos.store --threads 4
    """

    store: Positional[StorePlace]
    """Path or URL of the store, or the folder of a data set's stores."""
    threads: Annotated[int | None, Arg(metavar="INT")] = None
    """Number of shards to read in parallel. Default: number of CPU cores."""
    json: bool = False
    """Print the result as one JSON object."""

    def run(self) -> int:
        refuse_below(1, threads=self.threads)
        return show_each(self)

    def look(self) -> tuple[dict[str, Any], int]:
        from bucketline.errors import CorruptError
        from bucketline.store.verify.shard import Fault
        from bucketline.store.verify.verify import Verified

        try:
            result = self._verified()
        except CorruptError as error:  # of the manifest
            result = Verified(blocks=0, rows=0, corrupt=(Fault(error=str(error)),))
        return asdict(result), 1 if result.corrupt else 0

    def _verified(self) -> Verified:
        from bucketline.store.read.store import Store
        from bucketline.store.remote.generations import newest_generation
        from bucketline.store.verify.verify import verify_folder

        if isinstance(self.store, str):
            folder: Folder = self.objects(self.store)
            manifest = newest_generation(folder)
        else:
            store = Store.open(self.store)
            folder, manifest = store.folder, store.manifest
        with bar_of_bytes("verify", sum(shard.data_bytes for shard in manifest.shards)) as on_bytes:
            return verify_folder(folder, on_bytes, self.threads, manifest)

    def show(self, found: dict[str, Any]) -> None:
        for fault in found["corrupt"]:
            named = {name: value for name, value in fault.items() if name not in ("error", "samples") and value is not None}
            place = ", ".join(f"{name} {one_line(str(value))}" for name, value in named.items())
            print(f"corrupt: {place or 'the store'}: {printable(fault['error'])}{_listed(fault['samples'])}")
        for stray in found["strays"]:
            print(f"not in the store: {one_line(stray['path'])}: {printable(stray['what'])}")
        read = f"{counted(found['blocks'], 'block')} and {counted(found['rows'], 'row')} read"
        print(f"{read}, {counted(len(found['corrupt']), 'fault')}")


def _listed(samples: tuple[str, ...]) -> str:
    """Return the first sample ids as a suffix for the fault's message."""
    if not samples:
        return ""
    more = f" and {len(samples) - _NAMED} more; --json names all" if len(samples) > _NAMED else ""
    return f": {', '.join(map(one_line, samples[:_NAMED]))}{more}"
