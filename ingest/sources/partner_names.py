"""How the partners of an image are found: in folders by its name, next to it, in a table's columns, or in its container."""

from __future__ import annotations

import itertools
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from bucketline.command_line import counted
from bucketline.errors import SourceError, UsageError
from bucketline.files.paths import IMAGE_SUFFIXES, why_not_there

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import PurePath

REFERENCE, MASK = "reference", "mask"
REFERENCE_COLUMNS = ("control_path", "edit_image", "cond_image", "original_image", "kontext_images")
"""Columns that are taken for references if `references` is not set; `NAME_0`, `NAME_1` … as well."""
MASK_SUFFIX = "-masklabel"  # OneTrainer's
NONE = "none"
_SAME, _COLUMN, _SUFFIX = "same:", "column:", "suffix:"
_MEMBER = "ref"  # NAME.ref0.png, NAME.ref1.png … in a tar


@dataclass(frozen=True, slots=True, kw_only=True)
class Partner:
    """An image that belongs to a sample's image."""

    kind: str  # `reference` or `mask`
    name: str  # path in its place, or as messages have it
    place: int = 0  # 0: in the sample's own source; N: in the N-th of the folders that `references` and `mask` name
    at: tuple[int, ...] = ()  # as of `SourceItem`
    held: bytes | None = field(default=None, repr=False)


Found = tuple[tuple[Partner, ...], str | None]  # the partners of an image, references first, and why it cannot be used


class MaskForm(StrEnum):
    """Where masks are."""

    FOLDER = "folder"
    SUFFIX = "suffix"
    COLUMN = "column"
    ALPHA = "alpha"  # the image's own alpha channel
    WHOLE = "whole"  # everything counts


class Cells(NamedTuple):
    """The partners in a table's row."""

    references: tuple[str, ...] | None  # None: the table has no column of them
    mask: str | None

    def at(self, inside: Callable[[str], str | PurePath]) -> Cells:
        """Return the paths as `inside` gives them, normalised."""
        own = None if self.references is None else tuple(os.path.normpath(inside(name)) for name in self.references)
        return Cells(own, None if self.mask is None else os.path.normpath(inside(self.mask)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartnerRules:
    """The fields `references`, `references_optional` and `mask` of a source."""

    folders: tuple[str, ...] = ()  # paths or URLs
    pattern: str | None = None  # of the names of references next to the image
    columns: tuple[str, ...] = ()
    finds_columns: bool = True  # the usual columns are taken, since `references` is not set
    optional: bool = False
    mask: MaskForm | None = None
    mask_at: str = ""  # the folder, suffix or column

    @classmethod
    def of(cls, given: Sequence[str], mask: str | None, *, optional: bool) -> PartnerRules:
        """Parse `references`, `mask` and `references_optional`."""
        columns = tuple(one.removeprefix(_COLUMN) for one in given if one.startswith(_COLUMN))
        same = [one for one in given if one.startswith(_SAME)]
        folders = tuple(one for one in given if not one.startswith((_COLUMN, _SAME)) and one != NONE)
        if sum(map(bool, (columns, same, folders, NONE in given))) > 1 or len(same) > 1 or not all((*folders, *columns)):
            raise UsageError(
                f"references is {list(given)!r:.200}, expected folders, or one same:PATTERN, or column:NAME each, or {NONE!r}"
            )
        pattern = same[0].removeprefix(_SAME) if same else None
        parts = None if pattern is None else sorted(re.findall(r"\{.*?\}", pattern))
        if pattern is not None and (parts not in (["{stem}"], ["{n}", "{stem}"]) or "/" in pattern):
            raise UsageError(f"references is {same[0]!r}, expected a file's name with {{stem}} and {{n}}: same:{{stem}}_{{n}}")
        form, at = _mask_rules(mask)
        return cls(
            folders=folders,
            pattern=pattern,
            columns=columns,
            finds_columns=not given,
            optional=optional,
            mask=form,
            mask_at=at,
        )

    @property
    def has_references(self) -> bool:
        """True if the user named references."""
        return bool(self.folders or self.pattern or self.columns)

    @property
    def places(self) -> tuple[str, ...]:
        """Paths or URLs of the folders with partners."""
        return (*self.folders, *((self.mask_at,) if self.mask is MaskForm.FOLDER else ()))

    @property
    def mask_source(self) -> str | None:
        """What a store records: `file`, `alpha` or `whole`; None without masks."""
        return None if self.mask is None else self.mask.value if self.mask in (MaskForm.ALPHA, MaskForm.WHOLE) else "file"

    def reference_columns(self, there: Collection[str], name: str | None = None) -> tuple[str, ...]:
        """Return the columns of references among those `there`, in order; those that the user named must be in `name`."""
        if self.columns:
            return tuple(column for one in self.columns for column in _numbered(one, there, name))
        if not self.finds_columns:
            return ()
        found = {one: columns for one in REFERENCE_COLUMNS if (columns := _numbered(one, there))}
        if len(found) > 1:
            raise SourceError(
                f"{name or 'a table'} has the columns {' and '.join(found)}; name those of references: references = column:NAME"
            )
        return next(iter(found.values()), ())

    def note_unused(self, there: Collection[str], with_images: Collection[str], notes: list[str]) -> None:
        """Name the usual columns of references that have paths or other values instead of images."""
        unused = [one for one in REFERENCE_COLUMNS if self.finds_columns and one in there and one not in with_images]
        note = f"no references: {', '.join(unused)} has no images inside; write them into it, or pack a table of files"
        if unused and note not in notes:
            notes.append(note)

    def mask_column(self, there: Collection[str], name: str | None = None) -> str | None:
        """Return the column of masks; None without one. `name` as of `reference_columns`."""
        return next(iter(_numbered(self.mask_at, there, name)), None) if self.mask is MaskForm.COLUMN else None

    def refuse_other_than_columns(self, what: str) -> None:
        """Check that a source without files has partners in its columns only."""
        if self.folders or self.pattern or self.mask in (MaskForm.FOLDER, MaskForm.SUFFIX):
            raise UsageError(f"{what} has its references and masks inside; name them by column:NAME")

    def found_in(self, values: Sequence[object], mask: object, at: Callable[[int, int], Partner]) -> Found:
        """Return the partners in a row: `values` of its columns of references, and `mask`.

        Each is an image, a list of them or None. `at` returns a partner by the number of its column, and its number in the
        list; -1 if it is not a list.
        """
        found = [
            at(column, n)
            for column, value in enumerate(values)
            for n in (range(len(value)) if isinstance(value, list) else (-1,) * (value is not None))
        ]
        error = self.missing(len(found), "in its row") if values else None
        if self.mask is not MaskForm.COLUMN:
            return tuple(found), error
        masks = () if mask is None else (replace(at(len(values), -1), kind=MASK),)
        return (*found, *masks), error or (None if masks else f"it has no mask in its column {self.mask_at}")

    def missing(self, number: int, where: str) -> str | None:
        """Return why an image with `number` references is rejected; None if it is not. `where` they are looked for."""
        if number or self.optional:
            return None
        return f"it has no reference {where}; add one, or set references_optional = true"


NO_PARTNERS = PartnerRules(finds_columns=False)


def _mask_rules(mask: str | None) -> tuple[MaskForm | None, str]:
    if mask is None or mask == NONE:
        return None, ""
    if mask in (MaskForm.ALPHA, MaskForm.WHOLE):
        return MaskForm(mask), ""
    form = next((form for form in (MaskForm.SUFFIX, MaskForm.COLUMN) if mask.startswith(f"{form}:")), MaskForm.FOLDER)
    at = mask if form is MaskForm.FOLDER else mask.partition(":")[2]
    if not at:
        raise UsageError(f"mask is {mask!r}, expected a folder, alpha, whole, a suffix such as {MASK_SUFFIX}, or column:NAME")
    return form, at


def _numbered(stem: str, there: Collection[str], name: str | None = None) -> tuple[str, ...]:
    """Return the columns called `stem`, `stem_0`, `stem_1` …; if there are none, name the table in an error if it is given."""
    numbers = {one: int(found[1] or -1) for one in there if (found := re.fullmatch(rf"{re.escape(stem)}(?:_?([0-9]+))?", one))}
    if not numbers and name is not None:
        raise SourceError(f"{name} has no column {stem!r}; it has {', '.join(there) or 'none'}")
    return tuple(sorted(numbers, key=lambda one: numbers[one]))


def in_file(references: Sequence[str], mask: str | None, resolved: Callable[[str], str]) -> tuple[tuple[str, ...], str | None]:
    """Return `references` and `mask` of a data set file with its paths `resolved`."""
    own = tuple(one if one.startswith((_SAME, _COLUMN)) or one == NONE else resolved(one) for one in references)
    if mask is None or mask in (NONE, MaskForm.ALPHA, MaskForm.WHOLE) or mask.startswith((_COLUMN, _SUFFIX)):
        return own, mask
    is_suffix = mask.startswith(("-", "_", ".")) and "/" not in mask and not os.path.isdir(resolved(mask))  # noqa: PTH112 - text
    return own, f"{_SUFFIX}{mask}" if is_suffix else resolved(mask)


def member_role(extension: str, rules: PartnerRules) -> tuple[str, int] | None:
    """Return what an image in a tar is to the others of its key by its compound extension, and its number; None: nothing.

    >>> member_role("ref0.png", PartnerRules()), member_role("png", PartnerRules())
    (('reference', 0), None)
    """
    own = extension.rpartition(".")[0].lower()
    if rules.mask is MaskForm.COLUMN and own == rules.mask_at.lower():
        return MASK, 0
    for name in rules.columns or ((_MEMBER,) if rules.finds_columns else ()):
        if found := re.fullmatch(rf"{re.escape(name.lower())}([0-9]*)", own):
            return REFERENCE, int(found[1] or -1)
    return None


# ----------------------------------------------------------------------------------------------------------------------- files

Listed = Mapping[str, tuple[int, ...]]  # path of each image in a folder, and its `at`


def images_below(folder: str) -> Listed:
    """List the images in a folder on a disk and below; hidden ones are left out."""
    found: dict[str, tuple[int, ...]] = {}
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        before = os.path.relpath(at, folder)
        inside = "" if before == "." else f"{before}/"
        if link := next((name for name in folders if os.path.islink(f"{at}/{name}")), None):  # noqa: PTH114
            raise SourceError(
                f"{folder}, for references or masks: {inside}{link} is a link to a folder, and these are never followed; put "
                "the folder itself there"
            )
        found |= {inside + name: () for name in files if is_image_file(name)}
    if not found:
        why = f"it has no images: expected {', '.join(sorted(IMAGE_SUFFIXES)[:3])} or others"
        raise SourceError(f"{folder}, for references or masks: {why if os.path.isdir(folder) else _why_no_folder(folder)}")  # noqa: PTH112
    return found


def _why_no_folder(folder: str) -> str:
    from pathlib import Path

    return f"expected a folder; {why_not_there(Path(folder))}"


def is_image_file(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122 - as in a listing


def stem_of(path: str) -> str:
    """Return a path without its extension, in Unicode normal form C."""
    return unicodedata.normalize("NFC", path.rpartition(".")[0])


@dataclass(slots=True)
class _Folder:
    """The images of one folder by the images that they belong to."""

    shown: str
    place: int
    listed: Listed
    by_owner: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # number and path, by the owner's stem
    stray: list[str] = field(default_factory=list)

    def match(self, stems: Collection[str], pattern: re.Pattern[str] | None) -> None:
        """Set the stems of the images that may have partners: one of that stem has number -1, others are numbered."""
        for path in sorted(self.listed):
            own = stem_of(path)
            if self.place and own in stems:
                self.by_owner.setdefault(own, []).append((-1, path))
                continue
            folder, slash, base = own.rpartition("/")
            found = pattern.fullmatch(base) if pattern is not None else None
            owner = f"{folder}{slash}{found['stem']}" if found else own
            if found and owner in stems and owner != own:
                self.by_owner.setdefault(owner, []).append((int(found.groupdict().get("n") or -1), path))
            elif self.place:
                self.stray.append(path)

    def of(self, stem: str) -> list[tuple[int, str]]:
        return sorted(self.by_owner.get(stem, ()))

    def partner(self, kind: str, path: str) -> Partner:
        return Partner(kind=kind, name=path, place=self.place, at=self.listed[path])

    def path(self, name: str) -> str:
        return f"{self.shown}/{name}" if self.place else name


def _as_regex(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern).replace(r"\{stem\}", "(?P<stem>.+)").replace(r"\{n\}", "(?P<n>[0-9]+)")
    return re.compile(text)


class FilePartners:
    """Finds the partners of images that are files of a folder, on a disk or in object storage."""

    def __init__(self, rules: PartnerRules, list_place: Callable[[str], Listed]) -> None:
        """`list_place` lists a folder by its path or URL."""
        self.rules = rules
        self._folders = [_Folder(shown, n, list_place(shown)) for n, shown in enumerate(rules.places, 1)]
        self._own = _Folder("", 0, {})
        self._suffixed = _Folder("", 0, {})
        self._rows: set[str] = set()
        self._is_in_columns = bool(rules.columns)
        self._is_idle = not (rules.has_references or rules.mask)  # until a table has columns of references

    def take(self, images: Sequence[str], at: Callable[[str], tuple[int, ...]], cells: Mapping[str, Cells]) -> dict[str, str]:
        """Set the images of the source, and the partners that rows of tables name by the image's path.

        Return the images that belong to others, which are no samples, each with what tells it.
        """
        rules, found = self.rules, dict[str, str]()
        self._is_idle = self._is_idle and not cells
        if self._is_idle:
            return found
        stems = {stem_of(image) for image in images}
        if rules.pattern is not None:
            self._own.listed = {image: at(image) for image in images}
            self._own.match(stems, _as_regex(rules.pattern))
            found |= {path: rules.pattern for own in self._own.by_owner.values() for _, path in own}
        if rules.mask is MaskForm.SUFFIX:
            self._suffixed.listed = {image: at(image) for image in images}
            self._suffixed.match(stems, _as_regex("{stem}" + rules.mask_at))
            found |= {path: f"NAME{rules.mask_at}" for own in self._suffixed.by_owner.values() for _, path in own}
        named = {name for row in cells.values() for name in (*(row.references or ()), *((row.mask,) if row.mask else ()))}
        found |= {image: "columns of tables" for image in images if image in named and image not in cells}
        self._is_in_columns |= any(row.references is not None for row in cells.values())
        targets = {stem_of(image) for image in images if image not in found}
        numbers = _as_regex("{stem}_{n}") if len(rules.folders) == 1 else None
        for number, folder in enumerate(self._folders):
            folder.match(targets, numbers if number < len(rules.folders) else None)
        return found

    def of(self, image: str, cells: Cells | None, at: Callable[[str], tuple[int, ...]]) -> Found:
        """Return an image's partners; `cells`: those of its row in a table."""
        if self._is_idle:
            return (), None
        references, error = self._references(image, cells, at)
        masks: tuple[Partner, ...] = ()
        if self.rules.mask in (MaskForm.FOLDER, MaskForm.SUFFIX, MaskForm.COLUMN):
            masks, own_error = self._mask(image, cells, at)
            error = error or own_error
        return (*references, *masks), error

    def _references(self, image: str, cells: Cells | None, at: Callable[[str], tuple[int, ...]]) -> Found:
        rules, stem = self.rules, stem_of(image)
        if self._is_in_columns:
            named = (cells.references if cells else None) or ()
            found = tuple(Partner(kind=REFERENCE, name=name, at=at(name)) for name in named)
            return found, _leads_out(named) or rules.missing(len(named), "in its row of a table")
        if rules.pattern is not None:
            own = self._own.of(stem)
            expected = rules.pattern.replace("{stem}", stem.rpartition("/")[2]).replace("{n}", "0")
            return _chosen(self._own, own) if own else ((), rules.missing(0, f"next to it, such as {expected}.png"))
        partners: list[Partner] = []
        for folder in self._folders[: len(rules.folders)]:
            own = folder.of(stem)
            if not own and not rules.optional:
                return tuple(partners), rules.missing(0, f"in {folder.shown}, such as {stem}.png")
            found, error = _chosen(folder, own)
            partners += found
            if error is not None:
                return tuple(partners), error
        return tuple(partners), None

    def _mask(self, image: str, cells: Cells | None, at: Callable[[str], tuple[int, ...]]) -> Found:
        stem, where = stem_of(image), self.rules.mask_at
        if self.rules.mask is MaskForm.COLUMN:
            named = (cells.mask,) if cells and cells.mask else ()
            if not named:
                return (), f"it has no mask in the column {where} of its row; add one (a white image counts in full)"
            return tuple(Partner(kind=MASK, name=name, at=at(name)) for name in named), _leads_out(named)
        folder = self._suffixed if self.rules.mask is MaskForm.SUFFIX else self._folders[-1]
        if not (own := folder.of(stem)):
            expected = f"next to it, {stem}{where}.png" if folder is self._suffixed else f"in {where}, such as {stem}.png"
            return (), f"it has no mask {expected}; add one (a white image counts in full)"
        found, error = _chosen(folder, own, MASK)
        if error is None and len(found) > 1:
            error = f"{folder.path(own[0][1])} and {folder.path(own[1][1])} are both its mask; keep one"
        return found, error

    def notes(self) -> list[str]:
        """Return what was found in folders of partners and belongs to no image."""
        return [
            f"left out of {one.shown}: {counted(len(one.stray), 'image')} without an image of the source: "
            f"{', '.join(one.stray[:3])}{', …' * (len(one.stray) > 3)}"
            for one in self._folders
            if one.stray
        ]


def _chosen(folder: _Folder, own: list[tuple[int, str]], kind: str = REFERENCE) -> Found:
    """Return partners in order of their numbers, or why they are ambiguous: two have one number."""
    for (number, path), (other, second) in itertools.pairwise(own):
        if number == other:
            what = f"{folder.path(path)} and {folder.path(second)} are both its {kind}"
            return (), f"{what}{'' if number < 0 else f' {number}'}; keep one"
    return tuple(folder.partner(kind, path) for _, path in own), None


def _leads_out(names: Iterable[str]) -> str | None:
    """Return why the names of a row cannot be used; None if they can."""
    bad = next((name for name in names if name.startswith(("/", "../")) or name == ".." or "\0" in name or "://" in name), None)
    return None if bad is None else f"its row names {bad!r:.200}, which leads out of the source; expected a path inside it"


def left_out_notes(kinds: Iterable[str]) -> list[str]:
    """Return a note that counts the images which are partners of others, by what tells them."""
    counts: dict[str, int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    named = ", ".join(f"{kind} ({counted(number, 'image')})" for kind, number in counts.items())
    return [f"references and masks of other images, not samples: {named}"] if named else []
