"""A data set file: a TOML file that lists sources, each with its repeats, captions and split, and the rules of their stores.

```toml
[[source]]
path = "photos"                  # relative to the file; anything that SOURCE can be
repeats = 10                     # how often a pass reads the images; default: 1
caption = "a photo of sks dog"   # for images without a caption

[rules]
grid = "sdxl"                    # as --grid; the command line overrides it
background = "black"             # what only a file sets
```

One `[source]` instead is packed into the store itself, like SOURCE on the command line; several are a store each, in a folder.
"""

from __future__ import annotations

import itertools
import os
import re
import tomllib
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bucketline import coming_from
from bucketline.dtype_names import choice_of
from bucketline.errors import SourceError, UsageError
from bucketline.files.paths import IMAGE_SUFFIXES, Overlap, overlap, redacted, why_not_there, why_unread
from bucketline.ingest.rules import HeldOut
from bucketline.ingest.sources.captions.files import CaptionRules
from bucketline.ingest.sources.captions.table import TABLE_SUFFIXES
from bucketline.ingest.sources.folder import FolderSource, is_regularization, repeats_and_subject
from bucketline.ingest.sources.hf_dataset import DatasetSource, is_saved_dataset
from bucketline.ingest.sources.object_place import is_object_url
from bucketline.ingest.sources.objects import ObjectFolderSource, ObjectTableSource
from bucketline.ingest.sources.parquet import ParquetSource, TableSource, has_images
from bucketline.ingest.sources.partner_names import in_file
from bucketline.ingest.sources.source import CaptionPer, SourceOptions
from bucketline.ingest.sources.tar import TAR, Shard, TarSource, expand, has_scheme, local_path
from bucketline.option_value import value_fields
from bucketline.options import options_of, suggestion
from bucketline.store.remote.urls import parse_url, refuse_misspelt
from bucketline.typed_json import TypedJsonError, decode, decode_field, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from bucketline.ingest.sources.source import Source
    from bucketline.typed_json import Json


# ----------------------------------------------------------------------------------------------------------------- open source

_EXPECTED_KINDS = (
    "a folder of images, of tars or of Parquet files with images, a table (.jsonl, .csv, .parquet), WebDataset tars (a file, "
    "a pattern or a URL), the URL of a folder, table or tars in object storage, or a dataset saved on disk"
)
_PARQUET = ".parquet"
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (FolderSource, TableSource, DatasetSource, ParquetSource, TarSource, ObjectFolderSource, ObjectTableSource)
}


def open_source(text: str, options: SourceOptions | None = None) -> Source:
    """Open a folder, saved dataset, table or tars, depending on what `text` names. Does not list or read images yet."""
    options = (options or SourceOptions()).alone()
    if not text:  # such as an unset shell variable: the current folder is not what was meant
        raise UsageError(f"the source is empty; expected {_EXPECTED_KINDS}")
    if re.match(r"(s3|gs|az):/(?!/)", text):
        refuse_misspelt(text)
    if is_object_url(text):
        return _in_objects(text, options)
    path = local_path(text)
    if path is not None and path.is_dir():
        if is_saved_dataset(path):
            return DatasetSource(path=path, options=options)
        return _without_images(path, options) or FolderSource(path=path, options=options)
    if path is not None and path.suffix.lower() in TABLE_SUFFIXES and not is_pattern(text):
        if not path.is_file():
            raise SourceError(f"{text} does not exist: {why_not_there(path)}; expected a table with file_name and text")
        if path.suffix.lower() == _PARQUET and has_images(path):
            return ParquetSource(root=path.parent, files=(path,), options=options)
        return TableSource(path=path, options=options)
    if has_scheme(text) or is_pattern(text) or TAR.search(text):
        return expand(text, options)
    path = Path(text)
    if not path.exists():
        raise SourceError(f"{redacted(text)} does not exist: {redacted(why_not_there(path))}; expected {_EXPECTED_KINDS}")
    if path.suffix.lower() in IMAGE_SUFFIXES:
        raise SourceError(f"{text} is an image; expected its folder, or a table (.jsonl) that lists only this image")
    raise SourceError(f"{text} is not a known kind of source; expected {_EXPECTED_KINDS}")


def _without_images(folder: Path, options: SourceOptions) -> Source | None:
    """Open the tars, or the Parquet files with images, of a folder that has no image files; None if it has neither."""
    tars, parquet = list[Path](), list[Path]()
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = sorted(name for name in files if not name.startswith("."))
        if any(os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES for name in names):  # noqa: PTH122 - as in a listing
            return None
        tars += [Path(at, name) for name in names if TAR.search(name)]
        parquet += [Path(at, name) for name in names if name.lower().endswith(_PARQUET)]
    parquet = [path for path in parquet if has_images(path)]
    if tars and parquet:
        raise SourceError(
            f"{folder} has no image files, but tars ({tars[0].relative_to(folder)}) and Parquet files with images "
            f"({parquet[0].relative_to(folder)}); pack the tars by '{folder}/**/*.tar', and move the Parquet files to "
            "a folder of their own"
        )
    if parquet:
        return ParquetSource(root=folder, files=tuple(parquet), options=options)
    shards = tuple(Shard(url=str(path), path=path) for path in tars)
    return TarSource(root=str(folder), shards=shards, options=options) if tars else None


def _in_objects(url: str, options: SourceOptions) -> Source:
    """Open a source in object storage. What is a folder there shows when it is listed."""
    suffix = f".{url.rpartition('.')[2].lower()}"
    if "?" in url or not is_pattern(url):
        parse_url(url)
    if is_pattern(url) or TAR.search(url):
        return expand(url, options)
    if suffix in TABLE_SUFFIXES:
        return ObjectTableSource(url=url, options=options)
    if suffix in IMAGE_SUFFIXES:
        raise SourceError(f"{url} is an image; expected its folder, or a table (.jsonl) that lists only this image")
    return ObjectFolderSource(url=url.rstrip("/"), options=options)


def is_pattern(text: str) -> bool:
    """Return True if a text is a pattern for several files."""
    return any(letter in text for letter in "{*?[") or "::" in text


def source_as_json(source: Source) -> Json:
    """Return a source's kind, path or tars, and options."""
    return {"kind": type(source).__name__, "source": encode(source)}


def source_from_json(value: Json) -> Source:
    """Parse the output of `source_as_json`."""
    match value:
        case {"kind": str(kind), "source": fields} if kind in _KINDS:
            source: Source = decode(_KINDS[kind], fields)
            return source
    raise ValueError(f"not a source: {value!r:.200}")


# ---------------------------------------------------------------------------------------------------------------- dataset file

_SUFFIX = ".toml"
MAX_REPEATS = 1_000_000
_NAME = re.compile(r"[^./\x00-\x1f\x7f][^/\x00-\x1f\x7f]*")
_INSTEAD = {
    "image_dir": "it is `path` here",
    "num_repeats": "it is `repeats` here",
    "class_tokens": "it is `caption` here",
    "weight": "it is `repeats` here, a whole number",
    "is_reg": "pack regularization images into a store of their own, and train with a weight (--store NAME@0.5)",
    "caption_column": "it is `captions_from`",
    "caption_extension": "it is `captions_from`, with a dot",
    **dict.fromkeys(
        ("control_directory", "control_path", "control_path_1", "control_data_dirs"),
        "it is `references` here, a folder or several",
    ),
    **dict.fromkeys(("mask_path", "conditioning_data_dir"), "it is `mask` here, a folder"),
    "alpha_mask": 'it is `mask = "alpha"` here',
}
_EXPECTED = "expected tables that begin with [[source]], or one [source], and have a path"
_SOURCE = "source"
_TABLES = ("rules", "encoding")
"""The tables with options for all sources, called as their sections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetEntry:
    """A `[[source]]` of the file. All fields but `path` have defaults."""

    path: str
    name: str | None = None  # of its store, without .store; None: the last part of the path
    repeats: int = 1
    split: str | None = None  # train or val, for all its images; None: as --val-fraction says
    caption: str | None = None  # of images without a caption
    captions_from: tuple[str, ...] = ()  # this and the following: as the options of `ingest pack`; empty: as given there
    dataset_splits: tuple[str, ...] = ()
    caption_template: tuple[str, ...] = ()
    shuffle_tags: str | None = None
    caption_per: CaptionPer | None = None
    follow_links: bool | None = None
    kohya_folders: bool = False  # the folders `N_name` in `path` are sources of their own, with N repeats
    references: tuple[str, ...] = ()  # folders with the images' names; or same:{stem}_{n}; or column:NAME each; or none
    references_optional: bool | None = None
    references_area: int | None = None
    mask: str | None = None  # a folder, a suffix, alpha, whole, column:NAME or none

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
        if self.kohya_folders and (self.references or self.mask not in (None, "alpha", "whole", "none")):
            raise ValueError(
                "kohya_folders takes no references and masks, which belong to one folder; name a source for each folder"
            )
        try:
            self.options(SourceOptions())
            CaptionRules.parse(self.caption_template, self.shuffle_tags)
        except UsageError as error:
            raise ValueError(str(error)) from error

    def resolved(self, file: Path) -> DatasetEntry:
        """Return the entry with its paths relative to the current folder, not to the file."""
        references, mask = in_file(self.references, self.mask, lambda path: _resolved(file, path))
        return replace(self, path=_resolved(file, self.path), references=references, mask=mask)

    @property
    def store_name(self) -> str:
        assert self.name is not None, self.path
        return f"{self.name}.store"

    def options(self, given: SourceOptions) -> SourceOptions:
        """Return how the source is read: by the options of the command line, except those that this entry sets."""
        known = {field.name for field in fields(SourceOptions)}
        return replace(given, **{name: value for name, value in self._own().items() if name in known})

    def overrides(self, val_fraction: str) -> dict[str, Any]:
        """Return the options of a command that this entry sets; `val_fraction` is the command's."""
        if self.split is None:
            return self._own()
        by = HeldOut.parse(val_fraction, "--val-fraction").by
        return {**self._own(), "val_fraction": str(HeldOut(fraction=float(self.split == "val"), by=by))}

    def _own(self) -> dict[str, Any]:
        names = ("caption_template", "shuffle_tags", *(one.name for one in fields(SourceOptions)))
        return {name: value for name in names if (value := getattr(self, name, None)) not in (None, ())}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFile:
    """The sources of a data set file: paths resolved, named, folders of kohya's naming expanded."""

    sources: tuple[DatasetEntry, ...]
    notes: tuple[str, ...]  # about folders that are left out


_O = TypeVar("_O", bound=SourceOptions)


def with_dataset_file(options: _O, source: str, given: frozenset[str], tables: Mapping[str, type]) -> tuple[_O, frozenset[str]]:
    """Return a command's options with those of a data set file, if SOURCE is one, and all fields that were given.

    The file's tables have options by name, as the dataclasses of `tables` declare them; the command line (`given`) overrides
    them. What a command does not have is left out. One `[source]` becomes SOURCE itself; several are left to the command.
    """
    if not is_dataset_file(source):
        return options, given
    path = Path(source)
    content = _content(path, tables)
    own: dict[str, Any] = {}
    for table, declared in tables.items():
        own |= _settings(path, table, content.get(table, {}), declared)
    known = {field.name for field in fields(options)}
    own = {name: value for name, value in own.items() if name in known}
    if isinstance(content.get(_SOURCE), dict):
        entry = _entry(path, _SOURCE, content[_SOURCE]).resolved(path)
        if unsuited := next((name for name in ("name", "repeats", "kohya_folders") if name in content[_SOURCE]), None):
            raise SourceError(f"{path}: {_SOURCE}.{unsuited} is for several sources, in tables that begin with [[source]]")
        held_out = str(own.get("val_fraction", getattr(options, "val_fraction", "0")))
        own |= {name: value for name, value in entry.overrides(held_out).items() if name in known}
        own[_SOURCE] = entry.path
        given -= {_SOURCE}
    taken = {name: value for name, value in own.items() if name not in given}
    with _naming_file(path):
        return replace(options, **taken), given | taken.keys()


def is_dataset_file(source: str) -> bool:
    """Return True if SOURCE names a data set file."""
    return source.lower().endswith(_SUFFIX) and not has_scheme(source) and not Path(source).is_dir()


def read_dataset_file(path: Path, options: SourceOptions) -> DatasetFile:
    """Read a data set file and check that each source is there, none twice. Lists no images."""
    entries, notes = list[DatasetEntry](), list[str]()
    for at, entry in _parsed(path):
        found = entry.resolved(path)
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


def _resolved(file: Path, path: str) -> str:
    return path if has_scheme(path) else str(file.parent / path)


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _content(path: Path, tables: Collection[str]) -> dict[str, Any]:
    """Return a file's tables, of which only `source` and `tables` are known."""
    try:
        content = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise SourceError(f"{path} is not there: {why_not_there(path)}; expected a data set file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} {why_unread(error)}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not TOML: {error}") from error
    if unknown := next((key for key in content if key not in (_SOURCE, *tables)), None):
        what = " (as in a file for kohya's trainers)" if unknown in ("general", "datasets") else ""
        raise SourceError(f"{path}: unknown key {unknown!r}{what}, {_EXPECTED}")
    return content


def _settings(path: Path, table: str, values: object, declared: type) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise SourceError(f"{path}: {table} is {values!r:.60}, expected a table [{table}]")
    names = [field.name for field in fields(declared)]
    if unknown := next((name for name in values if name not in names), None):
        answer = coming_from.answer("ingest", unknown)
        better = f"; {answer}" if answer else suggestion(unknown, names)
        raise SourceError(f"{path}: [{table}] has an unknown option {unknown!r}{better}")
    choices = {one.field: one.choices for one in options_of(declared)}
    given = {
        name: choice_of(value, choices[name]) or value if isinstance(value, str) else value for name, value in values.items()
    }
    try:
        return {
            name: value  # which the command's options parse
            if name in value_fields(declared)
            else decode_field(declared, name, _as_text(name, value), f"{table}.{name}")
            for name, value in given.items()
        }
    except TypedJsonError as error:
        raise SourceError(f"{path}: {error}") from error


def _as_text(name: str, value: object) -> object:
    """Return a number as text where the option takes text that may be only a number, and one text as a list of it."""
    if name in ("val_fraction", "shuffle_tags") and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if name in ("captions_from", "dataset_splits", "caption_template", "references") and isinstance(value, str):
        return [value]
    return value


def _parsed(path: Path) -> Iterator[tuple[str, DatasetEntry]]:
    tables = _content(path, _TABLES).get(_SOURCE)
    if not isinstance(tables, list) or not tables:
        found = "missing" if not tables else repr(tables)[:60]
        raise SourceError(f"{path}: source is {found}, {_EXPECTED}")
    for number, table in enumerate(tables):
        at = f"source[{number}]"
        yield f"{path}: {at}", _entry(path, at, table)


def _entry(path: Path, at: str, table: object) -> DatasetEntry:
    defaults = {one.name: encode(one.default) for one in fields(DatasetEntry) if one.default is not MISSING}
    names = [one.name for one in fields(DatasetEntry)]
    if not isinstance(table, dict):
        raise SourceError(f"{path}: {at} is {table!r:.60}, {_EXPECTED}")
    if unknown := next((key for key in table if key not in names), None):
        expected = _INSTEAD.get(unknown, f"expected {', '.join(names)}")
        raise SourceError(f"{path}: {at} has an unknown field {unknown!r}: {expected}")
    try:
        return decode(DatasetEntry, {**defaults, **{name: _as_text(name, value) for name, value in table.items()}}, at)
    except TypedJsonError as error:
        raise SourceError(f"{path}: {error}") from error


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
                "pack them into a store of their own, and train with a weight (--store NAME@0.5)"
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
