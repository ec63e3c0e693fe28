"""A folder of images as a source: recursive, captions from `<name>.txt` beside each image or from `metadata.jsonl`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from bucketline.errors import SourceError

IMAGE_SUFFIXES = frozenset(
    [
        ".avif",
        ".bmp",
        ".dib",
        ".gif",
        ".jfif",
        ".jp2",
        ".jpe",
        ".jpeg",
        ".jpg",
        ".pgm",
        ".png",
        ".pnm",
        ".ppm",
        ".tga",
        ".tif",
        ".tiff",
        ".webp",
    ]
)
METADATA = "metadata.jsonl"
MAX_CAPTIONS_BYTES = 1 << 20  # of one image


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceItem:
    """An image of the source. Its id is its path in the source, with the extension: `a.png` and `a.jpg` differ."""

    id: str
    captions: tuple[str, ...]
    caption_error: str | None = None  # why its caption file could not be read


@dataclass(slots=True)
class FolderListing:
    """What a folder holds: images in order of their ids, and captions that belong to no image."""

    items: list[SourceItem] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)


def list_folder(source: Path) -> FolderListing:
    """Walk the folder. Hidden files and folders (a dot before the name) and links to folders are passed over.

    Raises:
        SourceError: where the path is not a folder, holds no image, or a `metadata.jsonl` is not what it should be.
    """
    if not source.is_dir():
        raise SourceError(f"{source} is not a folder; expected a folder of images")
    images: list[str] = []
    texts: set[str] = set()
    tables: list[str] = []
    for folder, folders, files in os.walk(source, onerror=_refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = PurePosixPath(Path(folder).relative_to(source).as_posix())
        for name in sorted(files):
            path, suffix = str(inside / name), PurePosixPath(name).suffix.lower()
            if name.startswith("."):
                continue
            if suffix in IMAGE_SUFFIXES:
                images.append(path)
            elif suffix == ".txt":
                texts.add(path)
            elif name == METADATA:
                tables.append(path)
    if not images:
        kinds = ", ".join(sorted(IMAGE_SUFFIXES))
        raise SourceError(f"{source} holds no image; looked in all its folders for {kinds}")
    return _with_captions(source, sorted(images), texts, tables)


def _with_captions(source: Path, images: list[str], texts: set[str], tables: list[str]) -> FolderListing:
    rows: dict[str, tuple[str, ...]] = {}
    for table in tables:
        rows.update(_read_table(source, table))
    listing = FolderListing()
    used: set[str] = set()
    for image in images:
        text = str(PurePosixPath(image).with_suffix(".txt"))
        captions: tuple[str, ...] = ()
        error: str | None = None
        if image in rows:
            captions = rows.pop(image)
            error = _unusable(captions)
        elif text in texts:
            captions, error = _read_captions(source / text)
        if text in texts:
            used.add(text)
        listing.items.append(SourceItem(id=image, captions=captions, caption_error=error))
    listing.orphans = sorted([*(texts - used), *(f"{name} (in {METADATA})" for name in rows)])
    return listing


def _unusable(captions: tuple[str, ...]) -> str | None:
    """Say why a table's captions cannot be stored; None where they can."""
    try:
        num_bytes = sum(len(caption.encode()) for caption in captions)
    except UnicodeEncodeError:
        return f"its text in {METADATA} holds half of a character (a lone surrogate)"
    return f"its text in {METADATA} has {num_bytes} bytes" if num_bytes > MAX_CAPTIONS_BYTES else None


def _read_captions(path: Path) -> tuple[tuple[str, ...], str | None]:
    """Read a caption file, one caption a line; give the captions, or why there are none."""
    try:
        if (num_bytes := path.stat().st_size) > MAX_CAPTIONS_BYTES:
            return (), f"{path.name} has {num_bytes} bytes, at most {MAX_CAPTIONS_BYTES} are read"
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        return (), f"{path.name} is not UTF-8 (byte {error.start})"
    except OSError as error:
        return (), f"{path.name}: {error.strerror}"
    return tuple(line.strip() for line in text.split("\n") if line.strip()), None


def _read_table(source: Path, table: str) -> dict[str, tuple[str, ...]]:
    """Read a `metadata.jsonl` (Hugging Face's image-folder convention): image path in the source → captions."""
    rows: dict[str, tuple[str, ...]] = {}
    try:
        # not `splitlines`, which also breaks where JSON does not: at U+2028, form feeds and others
        lines = (source / table).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{table} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, text = row["file_name"], row.get("text", [])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SourceError(
                f'{table}, line {number}: expected an object like {{"file_name": "a.png", "text": "…"}}, got {line[:80]!r}'
            ) from error
        texts = [text] if isinstance(text, str) else text
        if not isinstance(name, str) or not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
            raise SourceError(f"{table}, line {number}: file_name must be a string, and text a string or a list of strings")
        path = os.path.normpath(PurePosixPath(table).parent / name)
        rows[path] = tuple(caption.strip() for caption in texts if caption.strip())
    return rows


def _refuse(error: OSError) -> None:
    raise SourceError(f"{error.filename} cannot be read: {error.strerror}; the count of images would be wrong") from error
