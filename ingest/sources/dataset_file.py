"""A data set file: a TOML file that lists sources, each with its repeats, captions and split.

```toml
[[source]]
path = "photos"                  # relative to the file; anything that SOURCE can be
repeats = 10                     # how often a pass reads the images; default: 1
caption = "a photo of sks dog"   # for images without a caption
```
"""

from __future__ import annotations

import itertools
import re
import tomllib
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bucketline.errors import SourceError, UsageError
from bucketline.files.paths import Overlap, overlap, why_not_there
from bucketline.files.regular_file import why_unread
from bucketline.ingest.sources.folder import FolderSource
from bucketline.ingest.sources.kohya_folders import is_regularization, repeats_and_subject
from bucketline.ingest.sources.open_source import is_pattern, open_source
from bucketline.ingest.sources.options import SourceOptions
from bucketline.ingest.sources.tar.tar_source import has_scheme
from bucketline.typed_json import TypedJsonError, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator

_SUFFIX = ".toml"
MAX_REPEATS = 1_000_000
_NAME = re.compile(r"[^./\x00-\x1f\x7f][^/\x00-\x1f\x7f]*")
_INSTEAD = {
    "image_dir": "it is `path` here",
    "num_repeats": "it is `repeats` here",
    "class_tokens": "it is `caption` here",
    "weight": "it is `repeats` here, a whole number",
    "is_reg": "pack regularization images into a store of their own, and train with --store-weight",
}
_EXPECTED = "expected tables that begin with [[source]] and have a path"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetEntry:
    """A `[[source]]` of the file. All fields but `path` have defaults."""

    path: str
    name: str | None = None  # of its store, without .store; None: the last part of the path
    repeats: int = 1
    split: str | None = None  # train or val, for all its images; None: as --val-fraction says
    caption: str | None = None  # of images without a caption
    caption_column: str | None = None  # this and the following: as the options of `ingest pack`; None: as given there
    caption_extension: str | None = None
    dataset_splits: tuple[str, ...] = ()
    kohya_folders: bool = False  # the folders `N_name` in `path` are sources of their own, with N repeats

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is an empty text, expected a folder, a table, tars or a saved dataset")
        if not 1 <= self.repeats <= MAX_REPEATS:
            raise ValueError(f"repeats is {self.repeats}, expected 1 to {MAX_REPEATS}; remove a source to leave it out")
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ValueError(f"name is {self.name!r}, expected the name of a folder that does not begin with a dot")
        if self.split not in (None, "train", "val"):
            raise ValueError(f"split is {self.split!r}, expected 'train' or 'val'")
        if self.kohya_folders and (self.repeats != 1 or self.name is not None):
            raise ValueError("kohya_folders takes repeats and names from the folders; leave `repeats` and `name` out")
        try:
            self.options(SourceOptions())
        except UsageError as error:
            raise ValueError(str(error)) from error

    @property
    def store_name(self) -> str:
        """Name of its store's folder."""
        assert self.name is not None, self.path
        return f"{self.name}.store"

    def options(self, given: SourceOptions) -> SourceOptions:
        """Return the options of the command line, except those that this entry sets."""
        return replace(given, **self.overrides())

    def overrides(self) -> dict[str, Any]:
        """Return the source options that this entry sets."""
        own: dict[str, Any] = {
            "default_caption": self.caption,
            "caption_column": self.caption_column,
            "caption_extension": self.caption_extension,
            "split": self.dataset_splits or None,
        }
        return {name: value for name, value in own.items() if value is not None}

    def val_fraction(self, given: float) -> float:
        """Return the share of its images to hold out."""
        return given if self.split is None else float(self.split == "val")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFile:
    """The sources of a data set file: paths resolved, named, folders of kohya's naming expanded."""

    sources: tuple[DatasetEntry, ...]
    notes: tuple[str, ...]  # about folders that are left out


def is_dataset_file(source: str) -> bool:
    """Return True if SOURCE names a data set file."""
    return source.lower().endswith(_SUFFIX) and not has_scheme(source) and not Path(source).is_dir()


def read_dataset_file(path: Path, options: SourceOptions) -> DatasetFile:
    """Read a data set file and check that each source is there, none twice. Lists no images.

    Raises:
        SourceError: if the file or a source is invalid; the message has the file, the key, and what is expected.
        UsageError: if an option of the command line does not suit a source.
    """
    entries, notes = list[DatasetEntry](), list[str]()
    for at, entry in _parsed(path):
        here = entry.path if has_scheme(entry.path) else str(path.parent / entry.path)
        found = replace(entry, path=here)
        entries += _kohya_folders(at, found, notes) if entry.kohya_folders else [_named(at, found)]
    for one, other in itertools.combinations(entries, 2):
        if one.store_name == other.store_name:
            raise SourceError(
                f"{path}: {one.path} and {other.path} would both become {one.store_name}; give one of them another `name`"
            )
    _refuse_nested(path, entries, options)
    return DatasetFile(sources=tuple(entries), notes=tuple(notes))


@contextmanager
def naming_source(path: Path | str, entry: DatasetEntry | None) -> Iterator[None]:
    """Name the file and the entry in errors about a source, if it is one of a file."""
    try:
        yield
    except (SourceError, UsageError) as error:
        if entry is None:
            raise
        raise type(error)(f"{path}, source {entry.name}: {error}") from error


def _parsed(path: Path) -> Iterator[tuple[str, DatasetEntry]]:
    """Yield each entry with its place for messages."""
    try:
        content = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise SourceError(f"{path} is not there: {why_not_there(path)}; expected a data set file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} {why_unread(error)}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not TOML: {error}") from error
    if unknown := next((key for key in content if key != "source"), None):
        what = " (as in a file for kohya's trainers)" if unknown in ("general", "datasets") else ""
        raise SourceError(f"{path}: unknown key {unknown!r}{what}, {_EXPECTED}")
    tables = content.get("source")
    if not isinstance(tables, list) or not tables:
        found = "missing" if not tables else "one table" if isinstance(tables, dict) else repr(tables)[:60]
        raise SourceError(f"{path}: source is {found}, {_EXPECTED}")
    defaults = {one.name: encode(one.default) for one in fields(DatasetEntry) if one.default is not MISSING}
    names = [one.name for one in fields(DatasetEntry)]
    for number, table in enumerate(tables):
        at = f"source[{number}]"
        if not isinstance(table, dict):
            raise SourceError(f"{path}: {at} is {table!r:.60}, {_EXPECTED}")
        if unknown := next((key for key in table if key not in names), None):
            expected = _INSTEAD.get(unknown, f"expected {', '.join(names)}")
            raise SourceError(f"{path}: {at} has an unknown field {unknown!r}: {expected}")
        try:
            entry = decode(DatasetEntry, {**defaults, **table}, at)
        except TypedJsonError as error:
            raise SourceError(f"{path}: {error}") from error
        yield f"{path}: {at}", entry


def _named(at: str, entry: DatasetEntry) -> DatasetEntry:
    if entry.name is not None:
        return entry
    name = "" if has_scheme(entry.path) or (is_pattern(entry.path) and not Path(entry.path).exists()) else Path(entry.path).name
    if not _NAME.fullmatch(name):
        raise SourceError(f'{at}.path {entry.path!r} gives its store no name; add one, such as name = "photos"')
    return replace(entry, name=name)


def _kohya_folders(at: str, entry: DatasetEntry, notes: list[str]) -> Iterator[DatasetEntry]:
    """Yield an entry per folder `N_name`; `name` captions images without a caption, as it does there."""
    folder, found = Path(entry.path), 0
    try:
        names = sorted(child.name for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    except OSError as error:
        raise SourceError(f"{at}.path {folder} cannot be listed ({error.strerror}); expected a folder of folders") from error
    for name in names:
        if is_regularization(name):
            notes.append(
                f"{folder / name} is left out: a [[source]] of its own trains on regularization images like on others; "
                "pack them into a store of their own, and train with --store-weight"
            )
        elif parts := repeats_and_subject(name):
            found += 1
            repeats, subject = parts
            yield replace(
                entry,
                path=str(folder / name),
                name=name,
                repeats=repeats,
                caption=entry.caption or subject,
                kohya_folders=False,
            )
        else:
            notes.append(f"{folder / name} is left out: its name does not begin with repeats, as 10_dog does")
    if not found:
        raise SourceError(f"{at}.path {folder} has no folder named such as 10_dog; leave kohya_folders out")


def _refuse_nested(path: Path, entries: list[DatasetEntry], options: SourceOptions) -> None:
    """Open every source, to fail early, and check that no folder contains another source."""
    folders = []
    for entry in entries:
        with naming_source(path, entry):
            folders.append(isinstance(open_source(entry.path, entry.options(options)), FolderSource))
    for one, other in itertools.permutations(range(len(entries)), 2):
        place, inside = entries[one].path, entries[other].path
        if folders[one] and Path(inside).exists() and overlap(Path(inside), Path(place)) in (Overlap.INSIDE, Overlap.SAME):
            raise SourceError(f"{path}: {inside} is in {place}: its images would be packed twice; name separate folders")
