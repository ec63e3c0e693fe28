"""Caption rules: make stored captions from those of the source, by a trigger word, templates and shuffled tags."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from itertools import zip_longest
from string import Formatter
from typing import TYPE_CHECKING

from bucketline.command_line import counted
from bucketline.errors import UsageError
from bucketline.ingest.sources.captions.caption_text import unusable
from bucketline.store.format.hashing import text_bytes
from bucketline.typed_json import first_difference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bucketline.ingest.sources.source import Listing
    from bucketline.typed_json import Json

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
    def parse(cls, templates: Sequence[str], tags: str | None) -> CaptionRules:
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
        """Refuse rules for a model whose captions are classes."""
        set_ = {"caption-template": self.trigger_word or self.templates, "shuffle-tags": self.shuffle_tags}
        if option := next((name for name, value in set_.items() if value), None):
            raise UsageError(f"--{option}: {model} takes a class, not text; leave the option out")

    def as_json(self) -> dict[str, Json]:
        """Return the options that `parse` makes these rules of, by field, as a manifest's `rules` record them.

        >>> CaptionRules(trigger_word="ohwx", shuffle_tags=4, keep_tokens=1).as_json()
        {'caption_template': ['ohwx'], 'shuffle_tags': '4:1'}
        """
        numbers = (self.shuffle_tags, self.keep_tokens, self.shuffle_seed)
        num_given = 3 if self.shuffle_seed else 2 if self.keep_tokens else 1
        words = [] if self.trigger_word is None else [self.trigger_word.replace("{", "{{").replace("}", "}}")]
        return {
            "caption_template": [*words, *self.templates],
            "shuffle_tags": ":".join(map(str, numbers[:num_given])) if self.shuffle_tags else None,
        }

    def difference(self, rules: Mapping[str, Json]) -> tuple[str, Json, Json] | None:
        """Return the first of these caption rules that differs from a manifest's, with both values; None if none does."""
        own = self.as_json()
        return first_difference({name: rules.get(name) for name in own}, own, "")

    def applied(self, listing: Listing) -> Listing:
        """Replace the captions of a listing by those that are stored; return it. Changes `listing`."""
        if self == CaptionRules():
            return listing
        alone = 0
        for n, item in enumerate(listing.items):
            if item.caption_error is None:
                captions = self.stored(item.id, item.captions)
                error = unusable("the captions made of it", captions)
                listing.items[n] = replace(item, captions=captions, caption_error=error)
                alone += bool(captions) and not item.captions
        if alone:
            listing.notes.append(f"{counted(alone, 'image')} without a caption {_has(alone)} only the trigger word")
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


def _has(number: int) -> str:
    return "has" if number == 1 else "have"
