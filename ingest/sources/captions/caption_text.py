"""Parse captions from text (one per line) or a JSON field, and choose the names of columns and extensions to try."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from bucketline.ingest.sources.options import SourceOptions

MAX_CAPTIONS_BYTES = 1 << 20  # per image
CAPTION_COLUMNS = ("text", "caption", "captions", "prompt", "prompts")
EXTENSIONS = (".txt", ".caption", ".json")
JSON = ".json"
_TEXTS = (".txt", ".caption")

Captions = tuple[tuple[str, ...], str | None]  # the captions, and why they could not be read
NOTHING: Captions = ((), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionNames:
    """Names of columns and extensions to try for captions, in this order."""

    columns: tuple[str, ...] = CAPTION_COLUMNS
    extensions: tuple[str, ...] = EXTENSIONS  # in lower case, with the dot
    is_whole: bool = False  # a text file is one caption, as it is, not one per line

    @property
    def is_asked_for(self) -> bool:
        """True if the user named the column."""
        return self.columns != CAPTION_COLUMNS

    @classmethod
    def of(cls, options: SourceOptions) -> CaptionNames:
        """Return the names that the user gave, else the usual ones."""
        column, extension = options.caption_column, options.caption_extension
        extensions = EXTENSIONS if column is None else (JSON, *EXTENSIONS[:-1])  # a user who names a field means the JSON file
        return cls(
            columns=CAPTION_COLUMNS if column is None else (column,),
            extensions=extensions if extension is None else ("." + extension.lstrip(".").lower(),),
        )

    def column_of(self, there: Collection[str]) -> str | None:
        """Return the caption column among the columns `there`; None if there is none."""
        return next((name for name in self.columns if name in there), None)

    def column_in(self, there: Collection[str], name: str, notes: list[str]) -> str | None:
        """Return as `column_of`; if there is none, add a note that `name`, a table or a split, has no captions."""
        column, others = self.column_of(there), ", ".join(there) or "none"
        if column is None and self.is_asked_for:
            raise SourceError(f"{name} has no column {self.columns[0]} (--captions-from); it has {others}")
        if column is None:
            tried = ", ".join(self.columns)
            notes.append(
                f"{name} has no captions: it has no column {tried}, only {others}; --captions-from NAME selects another"
            )
        return column

    def read(self, extension: str, name: str, data: bytes) -> Captions:
        """Parse a caption file by its extension, in lower case; return the captions, or why there are none."""
        if extension == JSON:
            return captions_of_json(name, data, self.columns)
        return whole_text(name, data) if self.is_whole else captions_of_text(name, data)


def refuse_unmet(options: SourceOptions, captions_from: Collection[str]) -> None:
    """Refuse a caption option that matched no image."""
    if options.caption_extension is not None and not captions_from:
        raise SourceError(f"--captions-from {options.caption_extension}: no image has a caption in a file of this extension")
    if options.caption_column is not None and all(place.endswith(_TEXTS) for place in captions_from):
        raise SourceError(
            f"--captions-from {options.caption_column}: no image has a caption in a table's column or a JSON file's field "
            "of this name"
        )


def too_long(name: str, num_bytes: int) -> Captions:
    """Return no captions, and the reason that the file is too long."""
    return (), f"{name} has {num_bytes} bytes, at most {MAX_CAPTIONS_BYTES} are read"


def ambiguous(names: Iterable[str]) -> Captions:
    """Return no captions, and the reason that several files match."""
    first, *others = sorted(names)
    return (), f"{' and '.join((first, *others))} are both caption files of this image; keep one"


def captions_of_text(name: str, data: bytes) -> Captions:
    """Parse a caption file with one caption per line; return the captions, or why there are none."""
    texts, problem = whole_text(name, data)
    return (lines_of(texts[0]) if texts else ()), problem


def whole_text(name: str, data: bytes) -> Captions:
    r"""Return a caption file's text with "\n" at the ends of its lines, nothing if it is blank; or why it cannot be read."""
    if len(data) > MAX_CAPTIONS_BYTES:
        return too_long(name, len(data))
    try:
        text = _plain_ends(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return (), f"{name} is not UTF-8 (byte {error.start})"
    return ((text,), None) if text.strip() else NOTHING


def captions_of_json(name: str, data: bytes, fields: Iterable[str] = CAPTION_COLUMNS) -> Captions:
    """Parse a string or a list of strings, by itself or as the first of `fields` in a JSON object.

    There are no captions if an object has none of the fields.
    """
    if len(data) > MAX_CAPTIONS_BYTES:
        return too_long(name, len(data))
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        return (), f"{name} is not JSON: {str(error)[:80]}"
    if isinstance(found, dict):
        field = next((field for field in fields if found.get(field) is not None), None)
        what, found = f"{name}: its {field}", None if field is None else found[field]
        expected = "a string or a list of strings"
    else:
        what, expected = name, "an object, a string or a list of strings; move JSON files without captions out of the source"
    texts = as_texts(found)
    if texts is None:
        return (), f"{what} is a {type(found).__name__}, expected {expected}"
    captions = stripped(texts)
    return captions, unusable(name, captions)


def lines_of(text: str) -> tuple[str, ...]:
    """Return the captions in a text, one per line."""
    # not `splitlines`, which also splits at U+2028, form feeds and others
    return stripped(_plain_ends(text).split("\n"))


def _plain_ends(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def stripped(texts: Iterable[str]) -> tuple[str, ...]:
    """Strip the texts and drop empty ones."""
    return tuple(text.strip() for text in texts if text.strip())


def as_texts(value: object) -> list[str] | None:
    """Return a string or list of strings as a list, empty for None; None if it is anything else."""
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return None
    return texts


def unusable(name: str, captions: tuple[str, ...]) -> str | None:
    """Return why captions cannot be stored; None if they can."""
    try:
        num_bytes = sum(len(caption.encode()) for caption in captions)
    except UnicodeEncodeError:
        return f"its text in {name} has a lone surrogate, half of a character"
    return f"its text in {name} has {num_bytes} bytes" if num_bytes > MAX_CAPTIONS_BYTES else None
