"""Captions out of the bytes that hold them: one a line, or a JSON object's `text` or `caption`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_CAPTIONS_BYTES = 1 << 20  # of one image

Captions = tuple[tuple[str, ...], str | None]  # the captions, and why they cannot be had


def too_long(name: str, num_bytes: int) -> Captions:
    """Give no captions, because there are too many bytes of them."""
    return (), f"{name} has {num_bytes} bytes, at most {MAX_CAPTIONS_BYTES} are read"


def captions_of_text(name: str, data: bytes) -> Captions:
    """Read a caption file, one caption a line; give the captions, or why there are none."""
    if len(data) > MAX_CAPTIONS_BYTES:
        return too_long(name, len(data))
    try:
        return lines_of(data.decode("utf-8-sig")), None
    except UnicodeDecodeError as error:
        return (), f"{name} is not UTF-8 (byte {error.start})"


def captions_of_json(name: str, data: bytes) -> Captions:
    """Read a JSON object's `text`, or else its `caption`: a string, or a list of them. None where it has neither."""
    if len(data) > MAX_CAPTIONS_BYTES:
        return too_long(name, len(data))
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        return (), f"{name} is not JSON: {str(error)[:80]}"
    if not isinstance(found, dict):
        return (), None
    field = next((field for field in ("text", "caption") if found.get(field) is not None), None)
    if field is None:
        return (), None
    texts = as_texts(found[field])
    if texts is None:
        return (), f"{name}: its {field} is a {type(found[field]).__name__}, expected a string or a list of strings"
    captions = stripped(texts)
    return captions, unusable(name, captions)


def lines_of(text: str) -> tuple[str, ...]:
    """Give a text's captions, one a line."""
    # not `splitlines`, which also breaks at U+2028, form feeds and others
    return stripped(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))


def stripped(texts: Iterable[str]) -> tuple[str, ...]:
    """Give the texts without blanks around them, and without those that are nothing else."""
    return tuple(text.strip() for text in texts if text.strip())


def as_texts(value: object) -> list[str] | None:
    """Give a string, or a list of strings, as a list; None where it is something else, and none for no value."""
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return None
    return texts


def unusable(name: str, captions: tuple[str, ...]) -> str | None:
    """Say why captions cannot be stored; None where they can."""
    try:
        num_bytes = sum(len(caption.encode()) for caption in captions)
    except UnicodeEncodeError:
        return f"its text in {name} holds half of a character (a lone surrogate)"
    return f"its text in {name} has {num_bytes} bytes" if num_bytes > MAX_CAPTIONS_BYTES else None
