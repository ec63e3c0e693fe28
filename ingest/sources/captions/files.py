"""Captions from files next to images, one per line or in a JSON field."""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from string import Formatter
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import SourceError, UsageError
from bucketline.ingest.images.crop import RejectedError
from bucketline.ingest.sources.source import TooLargeError, read_file
from bucketline.store.format.block import text_bytes
from bucketline.typed_json import first_difference

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from bucketline.ingest.sources.source import CaptionPer, Listing, SourceOptions
    from bucketline.typed_json import Json


# ---------------------------------------------------------------------------------------------------------------- caption text

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
    per: CaptionPer = "line"
    is_whole: bool = False  # a text file is one caption, as it is
    several: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)  # texts of several lines, each a caption

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
            per=options.caption_per,
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
        texts, problem = whole_text(name, data)
        return (texts if self.is_whole or not texts else self.split(name, texts[0])), problem

    def split(self, name: str, text: str) -> tuple[str, ...]:
        r"""Return the captions in `name`, a text file or a cell of a CSV; note it for `lines_note` if these are several lines.

        >>> [CaptionNames(per=per).split("a.txt", "a cat\n\na tabby") for per in ("line", "file")]
        [('a cat', 'a tabby'), ('a cat a tabby',)]
        """
        lines = lines_of(text)
        if len(lines) > 1 and self.per == "file":
            return (" ".join(lines),)
        if len(lines) > 1:
            self.several.append((name, lines))
        return lines

    def note_lines(self, notes: list[str]) -> None:
        """Add a note about the texts of several lines that were split since the last one, with an example."""
        if not self.several:
            return
        name, lines = min(self.several)
        shown = " | ".join(f"'{line[:60]}{'…' * (len(line) > 60)}'" for line in lines[:2]) + " | …" * (len(lines) > 2)
        found = "1 caption has" if len(self.several) == 1 else f"{len(self.several)} captions have"
        found += " several lines: each line is a caption of its own, and training draws one at each step"
        notes.append(f"{found} ({name}: {shown}); --caption-per file makes one caption of all lines")
        self.several.clear()


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


def whole_text(name: str, data: bytes) -> Captions:
    r"""Return a caption file's text with "\n" at the ends of its lines, nothing if it is blank; or why it cannot be read."""
    if len(data) > MAX_CAPTIONS_BYTES:
        return too_long(name, len(data))
    try:
        text = _plain_ends(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return (), f"{name} is not UTF-8 (byte {error.start}); save it as UTF-8"
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


# --------------------------------------------------------------------------------------------------------------- caption files


def name_key(path: str) -> str:
    r"""Return a path in Unicode normal form C, so that paths that look the same compare equal.

    >>> name_key("cafe\u0301") == name_key("caf\u00e9")
    True
    """
    return path if path.isascii() else unicodedata.normalize("NFC", path)


@dataclass(slots=True, kw_only=True)
class CaptionFiles:
    """The caption files of a folder, by the name of the image that they may belong to."""

    folder: Path
    options: SourceOptions
    names: CaptionNames = field(init=False)
    within: Path | None = field(init=False)  # links that lead out of it are not followed; None follows all
    num_unused: Counter[str] = field(default_factory=Counter)  # images whose files with this extension are unused
    _files: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # path, extension; by key without extension
    _used: set[str] = field(default_factory=set)  # keys of images
    _out_of_reach: set[str] = field(default_factory=set)  # keys of files that could not be read at present

    def __post_init__(self) -> None:
        self.names = CaptionNames.of(self.options)
        self.within = None if self.options.follow_links else self.folder

    def add(self, path: str, extension: str) -> bool:
        """Record a file if `extension`, in lower case, is one of caption files; else return False."""
        if extension not in self.names.extensions:
            return False
        self._files.setdefault(name_key(path[: -len(extension)]), []).append((path, extension))
        return True

    def find(self, image: str) -> tuple[Captions, str | None]:
        """Return an image's captions and the extension that they came from, None if there are none."""
        stem = image[: image.rindex(".")]
        key = name_key(stem)
        self._used.add(key)
        candidates = self._files.get(key, ())
        if len(candidates) > 1:
            # if names differ only in their normal form, prefer the one equal to the image's
            candidates = [one for one in candidates if one[0].startswith(f"{stem}.")] or candidates
            return self._choose(candidates)
        for path, extension in candidates:
            if (found := self._read(path, extension)) != NOTHING:
                return found, extension
        return NOTHING, None

    def _choose(self, candidates: Sequence[tuple[str, str]]) -> tuple[Captions, str | None]:
        """Return the captions of the first extension that has any; two files with the same extension are ambiguous."""
        found, taken = NOTHING, None
        for extension in self.names.extensions:
            paths = [path for path, own in candidates if own == extension]
            if not paths:
                continue
            if taken is None:
                found = self._read(paths[0], extension) if len(paths) == 1 else ambiguous(map(os.path.basename, paths))
                taken = extension if found != NOTHING else None
            elif extension != JSON:  # JSON files often hold other things
                self.num_unused[extension] += 1
        return found, taken

    def find_all(self, images: Iterable[str]) -> Iterator[tuple[Captions, str | None]]:
        return map(self.find, images)

    def candidates(self, image: str) -> list[str]:
        """Return the paths of the files that may hold an image's captions."""
        return [path for path, _ in self._files.get(name_key(image[: image.rindex(".")]), ())]

    def load(self, path: str) -> bytes:
        return read_file(f"{self.folder}/{path}", self.within, MAX_CAPTIONS_BYTES)[0]

    def pass_over(self, image: str) -> None:
        """Record that an image's captions come from elsewhere, so that its caption files do not count as stray."""
        self._used.add(name_key(image[: image.rindex(".")]))

    def is_out_of_reach(self, image: str) -> bool:
        """Return True if an image's captions could not be read at present and are therefore unknown."""
        return name_key(image[: image.rindex(".")]) in self._out_of_reach

    def stray(self) -> list[str]:
        """Return the caption files without an image, except JSON files, which may hold other things."""
        return [
            path
            for key, paths in self._files.items()
            for path, extension in paths
            if key not in self._used and extension != JSON
        ]

    def _read(self, path: str, extension: str) -> Captions:
        name = path.rpartition("/")[2]
        try:
            data = self.load(path)
        except TooLargeError as error:
            return too_long(name, error.num_bytes)
        except RejectedError as error:
            # An I/O error, a dangling link, a link out of the source: none says what the captions are, so the row is kept.
            self._out_of_reach.add(name_key(path[: -len(extension)]))
            return (), f"{name}: {error.detail}"
        return self.names.read(extension, name, data)


# --------------------------------------------------------------------------------------------------------------- caption rules

_CAPTION = "caption"  # the field of a template
_SORT_KEY_BYTES = 8  # per tag
_DRAWS = 8  # per wanted order: orders of few tags repeat, and repeats are not stored


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionRules:
    """How a caption of the source is stored. The defaults store it as it is.

    A caption's tags are shuffled first, then each template makes a caption of each order, and the trigger word comes first.
    """

    trigger_word: str | None = None  # put before every caption, and the only one of an image that has none
    templates: tuple[str, ...] = ()  # each makes a caption of its own, with the source's in the place of {caption}
    shuffle_tags: int = 0  # orders of the comma-separated tags to store; 0 leaves captions as they are
    keep_tokens: int = 0  # first tags that stay in place, named as by kohya's scripts
    shuffle_seed: int = 0
    per: CaptionPer = "line"  # what was read as one caption; a rule of the store like the others

    def __post_init__(self) -> None:
        """Check the rules."""
        if self.trigger_word is not None:
            _refuse_bad_text(self.trigger_word)
            word = self.trigger_word.strip(" \t\n,")
            if not word:
                raise UsageError(f"--caption-template is {self.trigger_word!r}, expected a word, or text with {{caption}}")
            object.__setattr__(self, "trigger_word", word)
        for template in self.templates:
            if not _has_caption(template):
                raise UsageError(f"--caption-template {template!r} has no {{{_CAPTION}}}, the place of the source's caption")

    @classmethod
    def parse(cls, templates: Sequence[str], tags: str | None, per: CaptionPer = "line") -> CaptionRules:
        """Return the rules that `--caption-template` and `--shuffle-tags` name.

        A template without {caption} is the trigger word. Tags are ORDERS[:KEEP[:SEED]].

        >>> CaptionRules.parse(["ohwx", "a photo of {caption}"], "4:1") == CaptionRules(
        ...     trigger_word="ohwx", templates=("a photo of {caption}",), shuffle_tags=4, keep_tokens=1
        ... )
        True
        """
        words = [text for text in templates if not _has_caption(text)]
        if len(words) > 1:
            raise UsageError(
                f"--caption-template {words[0]!r} and {words[1]!r} have no {{{_CAPTION}}}, the place of the source's caption; "
                "only one may be without it: the trigger word"
            )
        match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9})(?::([0-9]{1,18}))?)?", "0" if tags is None else tags)
        if match is None:
            raise UsageError(f"--shuffle-tags is {tags!r:.80}, expected ORDERS[:KEEP[:SEED]], such as 4 or 4:1")
        orders, keep, seed = (int(number or 0) for number in match.groups())
        return cls(
            trigger_word=words[0].format() if words else None,
            templates=tuple(text for text in templates if text not in words),
            shuffle_tags=orders,
            keep_tokens=keep if orders else 0,
            shuffle_seed=seed if orders else 0,
            per=per,
        )

    def refuse_too_many(self, max_captions: int) -> None:
        """Check that the captions made of one caption can all be stored."""
        if (number := max(1, len(self.templates)) * max(1, self.shuffle_tags)) > max_captions:
            raise UsageError(
                f"{counted(len(self.templates), 'template')} and --shuffle-tags {self.shuffle_tags} make {number} captions of "
                f"each, max_captions is {max_captions}; max_captions = {number} under [rules] of a data set file "
                "stores them all, in a new store"
            )

    def refuse_for_classes(self, model: str) -> None:
        set_ = {"caption-template": self.trigger_word or self.templates, "shuffle-tags": self.shuffle_tags}
        if option := next((name for name, value in set_.items() if value), None):
            raise UsageError(f"--{option}: {model} takes a class, not text; leave the option out")

    def as_json(self) -> dict[str, Json]:
        """Return the options that `parse` makes these rules of, by field, as a manifest's `rules` record them.

        >>> CaptionRules(trigger_word="ohwx", shuffle_tags=4, keep_tokens=1).as_json()
        {'caption_template': ['ohwx'], 'shuffle_tags': '4:1', 'caption_per': 'line'}
        """
        numbers = (self.shuffle_tags, self.keep_tokens, self.shuffle_seed)
        num_given = 3 if self.shuffle_seed else 2 if self.keep_tokens else 1
        words = [] if self.trigger_word is None else [self.trigger_word.replace("{", "{{").replace("}", "}}")]
        return {
            "caption_template": [*words, *self.templates],
            "shuffle_tags": ":".join(map(str, numbers[:num_given])) if self.shuffle_tags else None,
            "caption_per": self.per,
        }

    def difference(self, rules: Mapping[str, Json]) -> tuple[str, Json, Json] | None:
        """Return the first of these caption rules that differs from a manifest's, with both values; None if none does."""
        own = self.as_json()
        return first_difference({name: rules.get(name) for name in own}, own, "")

    def applied(self, listing: Listing) -> Listing:
        """Replace the captions of a listing by those that are stored; return it. Changes `listing`."""
        if self == CaptionRules(per=self.per):
            return listing
        alone = 0
        for n, item in enumerate(listing.items):
            if item.caption_error is None:
                captions = self.stored(item.id, item.captions)
                error = unusable("the captions made of it", captions)
                listing.items[n] = replace(item, captions=captions, caption_error=error)
                alone += bool(captions) and not item.captions
        if alone:
            listing.notes.append(
                f"{counted(alone, 'image')} without a caption {'has' if alone == 1 else 'have'} only the trigger word"
            )
        return listing

    def stored(self, sample_id: str, captions: Sequence[str]) -> tuple[str, ...]:
        """Return the captions to store for a sample, each once. They depend only on the arguments and the rules.

        The orders of all captions take turns, so that `max_captions` cuts the last orders, and no caption of the source.

        >>> CaptionRules(trigger_word="ohwx", templates=("a photo of {caption}",)).stored("a.png", ["a cat"])
        ('ohwx, a photo of a cat',)
        """
        if not captions:
            return (self.trigger_word,) if self.trigger_word else ()
        turns = zip_longest(*(self._orders(sample_id, n, caption) for n, caption in enumerate(captions)))
        before = f"{self.trigger_word}, " if self.trigger_word else ""
        made = (
            before + template.format(caption=text)
            for turn in turns
            for text in turn
            if text is not None
            for template in self.templates or (f"{{{_CAPTION}}}",)
        )
        return tuple(dict.fromkeys(made))

    def _orders(self, sample_id: str, number: int, caption: str) -> list[str]:
        """Return a caption with its tags in up to `shuffle_tags` different orders."""
        if not self.shuffle_tags:
            return [caption]
        tags = [tag.strip() for tag in caption.split(",") if tag.strip()]
        kept, free = tags[: self.keep_tokens], tags[self.keep_tokens :]
        if len(free) < 2:
            return [", ".join(tags) or caption]
        found: dict[str, None] = {}
        for draw in range(_DRAWS * self.shuffle_tags):
            order = _order(len(free), f"{self.shuffle_seed}/{number}/{draw}/{sample_id}")
            found[", ".join([*kept, *(free[place] for place in order)])] = None
            if len(found) == self.shuffle_tags:
                break
        return list(found)


def _order(count: int, key: str) -> list[int]:
    """Return the numbers below `count` in an order that depends only on `key`."""
    drawn = hashlib.shake_256(b"bucketline.tags/" + text_bytes(key)).digest(_SORT_KEY_BYTES * count)
    return sorted(range(count), key=lambda n: drawn[_SORT_KEY_BYTES * n : _SORT_KEY_BYTES * (n + 1)])


def _has_caption(template: str) -> bool:
    """Return True if a template has a place for the source's caption; without one it is text."""
    what = f"--caption-template {template!r}"
    _refuse_bad_text(template)
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise UsageError(f"{what}: {error}; a brace that is text is written twice: {{{{ or }}}}") from error
    for _, name, form, conversion in parts:
        if name is not None and (name, form, conversion) != (_CAPTION, "", None):
            shown = name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise UsageError(f"{what} has the field {{{shown}}}; the only one is {{{_CAPTION}}}")
    return any(name == _CAPTION for _, name, _, _ in parts)


def _refuse_bad_text(text: str) -> None:
    """Refuse text that cannot be stored: an argument that is not UTF-8 arrives with surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"--caption-template is {text!r}, expected text in UTF-8") from error
