"""What commands share: a store's place, a path or a URL with the options that reach it, and progress bars."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from bucketline.command_line import one_line, print_json, progress_bar
from bucketline.errors import UsageError
from bucketline.files.paths import redacted
from bucketline.option_value import ByteSize
from bucketline.options import Arg
from bucketline.store.remote.urls import ObjectArguments, RemoteArguments, is_url, refuse_misspelt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bucketline.store.read.store import Store
    from bucketline.store.remote.objects import ObjectFolder


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
        """Return a path as it is, and of a URL the folder."""
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
