"""A dataset saved on disk by Hugging Face `datasets` as a source, and the splits of any source."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path  # noqa: TC003 - decoded by its annotation
from typing import TYPE_CHECKING, Any, NamedTuple

from bucketline.command_line import counted
from bucketline.errors import SourceError
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.sources.captions.files import CaptionNames, as_texts, stripped, unusable
from bucketline.ingest.sources.captions.table import SPLIT, as_split
from bucketline.ingest.sources.partner_names import REFERENCE, MaskForm, Partner
from bucketline.ingest.sources.source import (
    Listing,
    Source,
    SourceItem,
    SourceOptions,
    Stamp,
    note_place,
    refuse_too_large,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bucketline.ingest.sources.partner_names import Found


# ---------------------------------------------------------------------------------------------------------------------- splits
# Splits of a source: which images are trained on, held out, or left out.
#
# A split is in a column `split`, in the path (a folder of it, then a word of a table's, tar's or Parquet file's name), or in a
# saved dataset. Train stays train, validation becomes val, test is left out unless requested.

TRAIN, VAL = "train", "val"
_TARGETS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), VAL),
    **dict.fromkeys(("test", "testing"), None),
}
_LETTERS = re.compile(r"[^\W\d_]+")
_PART = re.compile(r"(.+?)-\d+-of-\d+(-[0-9a-f]+)?(\.[^/]*)?")  # train-00000-of-00004, as on the hub; formerly with a hash
_NAMED = 3
_MAX_SAID = 10  # splits with one target


def split_in_folders(path: str) -> str:
    """Return the split that the outermost folder of a path is called, with or without digits; empty if none is.

    >>> split_in_folders("default/test/a.png"), split_in_folders("val2017/a.png"), split_in_folders("test shots/test.png")
    ('test', 'val', '')
    """
    return _split_of_folder(path.rpartition("/")[0])


def split_in_path(path: str) -> str:
    """Return the split of a file with many images: as `split_in_folders`, else by a word of its own name.

    >>> list(map(split_in_path, ("validation/0.tar", "test-00000-of-00001-5e67.parquet", "my_test_0.csv", "latest.tar")))
    ['validation', 'test', 'test', '']
    """
    name = path.rpartition("/")[2]
    if split := split_in_folders(path):
        return split
    if part := _PART.fullmatch(name):
        return part[1]
    return next(_splits_in(name), "")


def split_of_image(path: str, image: str) -> str:
    """Return the split of an image in a file with many, or in a table: that by which the file is called, else of its folders.

    >>> split_of_image("val.jsonl", "train/a.png"), split_of_image("photos-00000-of-00004.tar", "test/a.png")
    ('val', 'test')
    """
    own, inside = split_in_path(path), split_in_folders(image)
    return inside if inside and not any(_splits_in(own)) else own


@lru_cache(maxsize=1024)
def _split_of_folder(folder: str) -> str:
    for part in folder.split("/"):
        words = _LETTERS.findall(part.lower())
        if words[:1] == ["partial"]:  # partial-train, of what the hub converts only in part
            del words[0]
        if len(words) == 1 and words[0] in _TARGETS:
            return str(words[0])
    return ""


def _splits_in(name: str) -> Iterator[str]:
    return (word for word in _LETTERS.findall(name.lower()) if word in _TARGETS)


class Splits:
    """Decides by its split where an image goes in the store, and counts the images of each split.

    `asked` has the requested splits (`NAME`, `NAME=train`, `NAME=val`); without any, all but test are packed. A test split that
    is requested without a target is held out, so that nobody trains on it by accident. Images in no split are trained on, and
    are requested as `train`.
    """

    def __init__(self, asked: Sequence[str]) -> None:
        self._asked = {name: target for name, _, target in (one.partition("=") for one in asked)}
        self._num_images: Counter[str] = Counter()
        self._num_misleading = 0  # images that are trained on although their names say another split
        self._misleading: list[str] = []  # the first of them

    def target(self, split: str) -> str | None:
        """Return where the images of a split are packed: train, val, or None if they are left out."""
        usual = _TARGETS.get(next(_splits_in(split), ""), TRAIN)
        if not self._asked:
            return usual
        name = split or TRAIN
        return (self._asked[name] or usual or VAL) if name in self._asked else None

    def take(self, split: str, path: str, number: int = 1) -> str | None:
        """Count images of a split; return where they are packed, as `target`. `path` names the image, or its file."""
        self._num_images[split] += number
        target = self.target(split)
        is_chosen = target != TRAIN or split in self._asked
        if not is_chosen and any(_TARGETS[word] != TRAIN for word in _splits_in(split or path)):
            self._num_misleading += number
            if len(self._misleading) < _NAMED and path not in self._misleading:
                self._misleading.append(path)
        return target

    def finish(self, place: str, root: str, notes: list[str]) -> None:
        """Add notes that say how each split is packed, and which images are trained on although a name says another split.

        `place` is the source in messages, `root` its folder, in which paths begin.
        """
        there = list(dict.fromkeys(split or TRAIN for split in self._num_images))
        is_split = any(self._num_images)
        if self._asked and not is_split:
            raise SourceError(f"{place} has no splits, but dataset_splits has {next(iter(self._asked))!r}")
        if unknown := next((name for name in self._asked if name not in there), None):
            raise SourceError(f"{place} has no split {unknown!r} (dataset_splits); it has {', '.join(there)}")
        if is_split and all(self.target(split) is None for split in self._num_images):
            raise SourceError(
                f"{place} has only the split {', '.join(there)}, which is left out by default: "
                f"pack it by {_in_file([f'{there[0]}={VAL}'])} (or ={TRAIN})"
            )
        if is_split:
            notes += self._in_words()
        if self._num_misleading:
            more = ", …" if self._num_misleading > len(self._misleading) else ""
            notes.append(
                f"{counted(self._num_misleading, 'image')} packed as training data although a name says test or validation: "
                f"{', '.join(self._misleading)}{more}; a folder that is called only test is left out, one called validation "
                "held out"
            )
        name = os.path.basename(os.path.abspath(root))  # noqa: PTH100, PTH119 - a URL as well
        if self._num_images[""] and self.target("") == TRAIN and self.target(split_in_folders(f"{name}/")) != TRAIN:
            notes.append(
                f"the source's folder is called {name}, and its images are in no split, because splits are looked for inside "
                "the source; --val-fraction 1 holds all of them out"
            )

    def _in_words(self) -> Iterator[str]:
        by_target: dict[str | None, list[str]] = {}
        for split in self._num_images:
            by_target.setdefault(self.target(split), []).append(split)
        said = {split for splits in by_target.values() for split in splits[:_MAX_SAID]}  # a column `split` may have anything
        taken = [f"{split or TRAIN}={target}" for split in self._num_images if (target := self.target(split)) is not None]
        for split in (split for split in self._num_images if split in said):
            images = counted(self._num_images[split], "image")
            what = f"split {split} ({images})" if split else f"what is in no split ({images})"
            if (target := self.target(split)) is None:
                asked = _in_file(list(dict.fromkeys([*taken[:_MAX_SAID], f"{split or TRAIN}={VAL}"])))
                yield f"{what} is left out; to include it: {asked} (or ={TRAIN})"
            else:
                yield f"{what} becomes {target}"
        for target, splits in by_target.items():
            if more := splits[_MAX_SAID:]:
                images = counted(sum(self._num_images[split] for split in more), "image")
                become = "are left out" if target is None else f"become {target}"
                yield f"{counted(len(more), 'more split')} ({images}) {become}"


class SplitRow(NamedTuple):
    """A row of a dataset, without its image."""

    split: str  # empty if it is in none
    path: str  # of its file in the source
    name: str | None  # of its image, if the dataset has it
    number: str  # in the id, if the name is not unique
    column: str | None  # of its caption
    caption: object
    place: str  # in messages
    at: tuple[int, ...]  # as of `SourceItem`
    partners: tuple[Partner, ...] = ()
    partner_error: str | None = None


def add_rows(listing: Listing, splits: Splits, rows: Sequence[SplitRow]) -> None:
    """Add the rows of a dataset to a listing, except those of splits that are left out; all are counted in `splits`."""
    counts, seen = Counter((row.split, row.name) for row in rows), dict[str, str]()
    for row in rows:
        target = splits.take(row.split, row.path)
        if target is None:
            continue
        captions = as_texts(row.caption)
        if captions is None:
            kind = type(row.caption).__name__
            raise SourceError(f"{row.place}: {row.column} is a {kind}, expected a string or a list of strings")
        own = row.name if row.name and counts[row.split, row.name] == 1 else row.number
        sample_id = f"{row.split}/{own}" if row.split else own
        note_place(seen, sample_id, row.place)
        if kept := stripped(captions):
            listing.captions_from[f"column {row.column}"] += 1
        error = unusable(f"the column {row.column}", kept)
        listing.items.append(
            SourceItem(
                id=sample_id,
                captions=kept,
                caption_error=error,
                held_out=target == VAL,
                at=row.at,
                partners=row.partners,
                partner_error=row.partner_error,
            )
        )


def image_column(place: str, images: Sequence[str], there: Sequence[str]) -> str:
    """Return the column of the images: the only one of `images`, or the one that is called so; `there` are all columns."""
    if "image" in images or len(images) == 1:
        return "image" if "image" in images else images[0]
    raise SourceError(
        f"{place}: expected one column of images, or one named image; found {', '.join(images) or 'none'} among "
        f"{', '.join(there)}"
    )


def _in_file(splits: Sequence[str]) -> str:
    return f"dataset_splits = {json.dumps(splits)} under [source] of a data set file"


_LABEL = re.compile(r"-(?:masklabel|condlabel)[^/]*$")  # of OneTrainer: NAME-masklabel.png next to NAME.png
_CONTROLS = "/_controls/"  # of ai-toolkit


def side_files(images: Sequence[str]) -> dict[str, str]:
    """Return the images (paths in a source) that belong to other images, each with what tells it.

    >>> side_files(["a.jpg", "a-masklabel.png", "b-masklabel.png", "_controls/a.depth.jpg"])
    {'a-masklabel.png': 'NAME-masklabel', '_controls/a.depth.jpg': '_controls/'}
    """
    labels = {image: found for image in images if (found := _LABEL.search(image))}
    stems = {image.rpartition(".")[0] for image in images} if labels else set()
    sides = {image: f"NAME{found[0][:10]}" for image, found in labels.items() if image[: found.start()] in stems}
    return sides | {image: _CONTROLS[1:] for image in images if _CONTROLS in f"/{image}"}


def side_notes(kinds: Iterable[str]) -> list[str]:
    """Return a note that counts side files by what tells them; none if there are none."""
    counts = Counter(kinds).most_common()
    if not counts:
        return []
    named = ", ".join(f"{kind} ({counted(number, 'image')})" for kind, number in counts)
    what = f"left out as masks and control images of other trainers: {named}"
    return [f"{what}; to pack such images, rename them, or name them in a table"]


# ------------------------------------------------------------------------------------------------------------------ hf dataset

MARKS = ("dataset_dict.json", "dataset_info.json")  # written by `save_to_disk`; the folder of a split also has state.json
_ROWS = 1000  # rows per batch


def is_saved_dataset(folder: Path) -> bool:
    """Return True if `save_to_disk` wrote this folder."""
    return (folder / MARKS[0]).is_file() or ((folder / MARKS[1]).is_file() and (folder / "state.json").is_file())


@dataclass(frozen=True, kw_only=True)
class DatasetSource(Source):
    """The rows of a saved dataset, split by split; a sample's id is `SPLIT/NAME`.

    NAME is the image's path in the dataset if it has a unique one, else its row number. Ids of rows in no split have no
    `SPLIT/`. An item's `at` is its split, row, size, and the dataset's mtime.
    """

    path: Path
    options: SourceOptions = field(default_factory=SourceOptions)

    @property
    def local_paths(self) -> tuple[Path, ...]:
        return (self.path,)

    @cached_property
    def _loaded(self) -> dict[str, Any]:
        """The rows of each split by name; the name of a dataset that is not a split is empty."""
        try:
            import datasets
        except ImportError as error:
            raise SourceError(
                f"{self.path} is a dataset saved on disk; reading it needs datasets; "
                "install the extra datasets: pip install 'bucketline[datasets]'"
            ) from error
        try:
            loaded = datasets.load_from_disk(str(self.path))
        except Exception as error:
            raise SourceError(f"{self.path} cannot be read as a dataset saved on disk: {error}") from error
        is_split = isinstance(loaded, datasets.DatasetDict)
        return {str(name): rows for name, rows in loaded.items()} if is_split else {str(loaded.split or ""): loaded}

    @cached_property
    def _splits(self) -> list[tuple[str, Any, str]]:
        """For each split with rows to pack: its name, its rows with undecoded images, and the name of the image column."""
        self.options.partner_rules.refuse_other_than_columns("a saved dataset")
        loaded = self._loaded
        import datasets  # installed, since loading has imported it

        found, splits = [], Splits(self.options.dataset_splits)
        for split, rows in loaded.items():
            if splits.target(split) is None and SPLIT not in rows.column_names:
                continue
            beside = self._partner_columns(rows, self._place(split))
            images = [name for name, one in rows.features.items() if isinstance(one, datasets.Image) and name not in beside]
            column = image_column(self._place(split), images, rows.column_names)
            found.append((split, rows.cast_column(column, datasets.Image(decode=False)), column))
        return found

    def _partner_columns(self, rows: Any, place: str) -> tuple[str, ...]:  # noqa: ANN401
        """Return the columns of references, then that of masks if `mask` names one."""
        rules = self.options.partner_rules
        references = rules.reference_columns(rows.column_names, place if rules.columns else None)
        if not rules.columns:
            references = tuple(one for one in references if _has_images(rows.features[one]))
        mask = rules.mask_column(rows.column_names, place)
        return (*references, mask) if mask else references

    def _partners(self, rows: Any, place: str, mtime_ns: int, number: int) -> Iterator[Found]:  # noqa: ANN401
        """Yield the partners of each row; their `at` is the row's, then the numbers of the column, and in a list plus 1."""
        rules, columns = self.options.partner_rules, self._partner_columns(rows, place)
        has_mask = rules.mask is MaskForm.COLUMN
        cells = zip(*(_lengths(rows, one) for one in columns), strict=True) if columns else ((),) * rows.num_rows
        for row, own in enumerate(cells):

            def partner(column: int, n: int, row: int = row) -> Partner:
                name = f"{place}, row {row}, {columns[column]}{'' if n < 0 else f'[{n}]'}"
                return Partner(kind=REFERENCE, name=name, at=(number, row, 0, mtime_ns, column, n + 1))

            references = list(own[:-1] if has_mask else own)
            yield rules.found_in(references, own[-1] if has_mask else None, partner)

    def _place(self, split: str) -> str:
        return f"{self.path}, split {split}" if split else str(self.path)

    def listing(self) -> Listing:
        listing, tried, splits = Listing(), CaptionNames.of(self.options), Splits(self.options.dataset_splits)
        found: list[SplitRow] = []
        for number, (split, rows, column) in enumerate(self._splits):
            place = self._place(split)
            mtime_ns = max((os.stat(file["filename"]).st_mtime_ns for file in rows.cache_files), default=0)  # noqa: PTH116
            text = tried.column_in(rows.column_names, place, listing.notes)
            self.options.partner_rules.note_unused(rows.column_names, self._partner_columns(rows, place), listing.notes)
            names, sizes = _names_and_sizes(rows, column)
            found += (
                SplitRow(
                    split=as_split(cell) or split,
                    path=place,
                    name=own,
                    number=f"{row:08d}",
                    column=text,
                    caption=value,
                    place=f"{place}, row {row}",
                    at=(number, row, size, mtime_ns),
                    partners=partners,
                    partner_error=error,
                )
                for row, (own, size, value, cell, (partners, error)) in enumerate(
                    zip(
                        names,
                        sizes,
                        _values(rows, text),
                        _values(rows, SPLIT),
                        self._partners(rows, place, mtime_ns, number),
                        strict=True,
                    )
                )
            )
        add_rows(listing, splits, found)
        listed = {split for split, _, _ in self._splits}
        for split, rows in self._loaded.items():
            if split not in listed:
                splits.take(split, split, rows.num_rows)
        splits.finish(str(self.path), str(self.path), listing.notes)
        if not listing.items:
            raise SourceError(f"{self.path} is a dataset without rows")
        return listing

    def stamp(self, item: SourceItem) -> Stamp:
        return Stamp(num_bytes=item.at[2], mtime_ns=item.at[3])

    def read(self, item: SourceItem) -> tuple[bytes, Stamp]:
        _, rows, column = self._splits[item.at[0]]
        stamp = self.stamp(item)
        refuse_too_large(stamp.num_bytes)
        if len(item.at) > 4:  # of a partner
            column = self._partner_columns(rows, "")[item.at[4]]
            value = rows.select_columns([column]).with_format("arrow")[item.at[1]][column][0].as_py()
            value = value[item.at[5] - 1] if item.at[5] else value
        else:
            value = rows[item.at[1]][column]
        if value is None:
            raise RejectedError(Reason.UNREADABLE, f"its {column} is null")
        if value["bytes"] is None:
            raise RejectedError(
                Reason.UNREADABLE,
                f"the dataset holds the path {value['path']!r} and no bytes; save it with the images embedded",
            )
        return value["bytes"], stamp


def _names_and_sizes(rows: Any, column: str) -> tuple[list[str | None], list[int]]:  # noqa: ANN401
    """Return the paths and sizes in bytes of the images in the dataset, without reading the images."""
    import pyarrow.compute as pc

    names: list[str | None] = []
    sizes: list[int] = []
    for part in rows.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS):
        images = part[column]
        names += pc.struct_field(images, "path").to_pylist()
        sizes += [size or 0 for size in pc.binary_length(pc.struct_field(images, "bytes")).to_pylist()]
    return names, sizes


def _has_images(feature: Any) -> bool:  # noqa: ANN401 - of `datasets`
    import datasets

    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
    return isinstance(inner, datasets.Image)


def _lengths(rows: Any, column: str) -> Iterator[object]:  # noqa: ANN401
    """Yield for each row of a column of images None, a value, or of lists a list of as many."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for part in rows.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS):
        kind = part.schema.field(column).type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            yield from (None if length is None else [0] * length for length in pc.list_value_length(part[column]).to_pylist())
        else:
            yield from (0 if is_there else None for is_there in pc.is_valid(part[column]).to_pylist())


def _values(rows: Any, column: str | None) -> Iterator[object]:  # noqa: ANN401
    """Yield the values of a column, None for each row if there is no such column."""
    if column not in rows.column_names:
        yield from [None] * rows.num_rows
        return
    for part in rows.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS):
        yield from part[column].to_pylist()
