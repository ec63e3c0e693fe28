"""Paths: suggestions and overlaps, what is redacted in messages, regular files, and the files of a training run's folder."""

from __future__ import annotations

import difflib
import errno
import itertools
import json
import os
import re
import stat
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


_LOOKED_AT = 10_000  # maximum number of names read from a folder
IMAGE_SUFFIXES = frozenset(
    [
        *(".apng", ".avif", ".bmp", ".cur", ".dib", ".gif", ".heic", ".heif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg"),
        *(".jpg", ".jxl", ".pgm", ".png", ".pnm", ".ppm", ".qoi", ".tga", ".tif", ".tiff", ".webp"),
    ]
)


def can_be_reached(path: Path | str) -> bool:
    """Return whether a path leads to something that can be reached; `Path.exists` raises where it may not be looked at."""
    return os.path.exists(path)  # noqa: PTH110


def why_not_there(path: Path) -> str:
    """Return how much of a missing path exists, and a similar name there.

    >>> from pathlib import Path
    >>> why_not_there(Path("/no-such-folder/photos"))
    "/ has no 'no-such-folder'"
    """
    above, wanted = path.absolute().parent, path.name
    while not above.exists():
        above, wanted = above.parent, above.name
    if not above.is_dir():
        return f"{above} is a file"
    try:
        names = [child.name for child in itertools.islice(above.iterdir(), _LOOKED_AT)]
    except OSError as error:
        return f"{above} cannot be listed ({error.strerror})"
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.7)
    return f"{above} has no {wanted!r}" + (f" (did you mean {near[0]!r}?)" if near else "")


class Overlap(StrEnum):
    """How one path relates to another."""

    SAME = "same"
    INSIDE = "inside"
    AROUND = "around"


def overlap(one: Path, other: Path) -> Overlap | None:
    """Return how `one` relates to `other`; None if they are disjoint.

    Links and `..` are resolved first. Inodes are compared too, for a folder with two names (a bind mount).
    """
    real_one, real_other = Path(os.path.realpath(one)), Path(os.path.realpath(other))
    if _same(real_one, real_other):
        return Overlap.SAME
    if any(_same(real_other, parent) for parent in real_one.parents):
        return Overlap.INSIDE
    if any(_same(real_one, parent) for parent in real_other.parents):
        return Overlap.AROUND
    return None


def _same(one: Path, other: Path) -> bool:
    """Return True if two resolved paths are the same place: by inode if both exist, else by case-insensitive name."""
    try:
        return one.samefile(other)
    except OSError:
        return os.fsencode(one).lower() == os.fsencode(other).lower()


_CHILDREN_LOOKED_AT = 1000  # maximum number of names read from a folder


def why_no_store(path: Path, manifest: str) -> str:
    """Return what the path contains instead of a folder with a `manifest`, and what to do."""
    above = next((folder for folder in path.absolute().parents if (folder / manifest).is_file()), None)
    if not path.exists():
        return f"{why_not_there(path)}; name a store's folder, or make one with `ingest pack SOURCE {path}`"
    if above is not None:
        return f"it is in the store {above}; name that folder"
    if not path.is_dir():
        return "it is a file; name a store's folder, which `ingest pack SOURCE STORE` makes"
    children = list(_children(path))
    if inside := next((child for child in children if (child / manifest).is_file()), None):
        return f"it has no {manifest}, but its subfolder {inside.name} does; name {inside}"
    if is_folder_of_images(path):
        return f"it is a folder of images; pack it with `ingest pack {path} STORE`, and name that STORE"
    return f"it has no {manifest}; name a store's folder, or make one with `ingest pack SOURCE STORE`"


def is_folder_of_images(path: Path) -> bool:
    """Return True if there are images in a folder or in one of its folders, among the first names of each."""
    return any(_is_image(child) or any(map(_is_image, _children(child))) for child in _children(path))


def _children(folder: Path) -> Iterator[Path]:
    try:
        yield from itertools.islice(folder.iterdir(), _CHILDREN_LOOKED_AT)
    except OSError:
        return  # not a folder, or one that cannot be listed


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES


def refuse_overlap(source: Path, store: Path) -> None:
    """Check that source and store are disjoint."""
    found = {
        Overlap.SAME: f"the source {source} and the store {store} are the same folder",
        Overlap.INSIDE: f"the store {store} is inside the source {source}",
        Overlap.AROUND: f"the source {source} is inside the store {store}",
    }
    if how := overlap(store, source):
        raise UsageError(f"{found[how]}; choose a store outside the folder of images")


# ---------------------------------------------------------------------------------------------------------------------- redact
# Redact sources and names for messages: remove passwords, tokens of signed URLs, and arguments of commands.

HIDDEN = "…"
PIPE = "pipe:"
_URL = re.compile(r"""(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#\s'"`]*@)?(?P<place>[^?#\s'"`]*)(?P<rest>[?#][^\s'"`]*)?""")
_KNOWN = r"(?:s3|gs|az|https?|ftps?|hf|file|memory)"
_BEGIN = re.compile(  # of a URL, however it is misspelt: its scheme, and what stands before the path
    rf"""(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*\s*[:;]\s*[/\\]+|{_KNOWN}(?:\s*[:;]\s*[/\\]*|\s*[/\\]+)|[/\\]{{2,}}|)"""
    r"""(?P<authority>[^/?#\\]*)""",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """Return a source's text without its secrets.

    >>> redacted("https://me:secret@host/a.tar?token=secret::https://host/b.tar")
    'https://host/a.tar?…::https://host/b.tar'
    >>> redacted("pipe:TOKEN=secret curl -u me:secret https://host/a.tar | zcat")
    'pipe:…'
    >>> redacted("https:/me:secret@host/a.tar"), redacted("https://me:sec/ret@host/a.tar"), redacted("https://me:secret/host/a.tar")
    ('https:/host/a.tar', 'https://host/a.tar', 'https://me:…/host/a.tar')
    """
    if text.startswith(PIPE):
        return PIPE + HIDDEN
    text = _without_user(text)
    return "::".join(_URL.sub(_without_secrets, part) for part in text.split("::"))


def redacted_within(message: str, source: str) -> str:
    """Return another program's message without secrets; it may quote the source, its command, or another URL."""
    return _URL.sub(_without_secrets, message.replace(source, redacted(source)) if source else message)


def without_userinfo(url: str) -> str:
    return re.sub(r"(://)[^/?#\s'\"]*@", r"\1", url)


def has_password(text: str) -> bool:
    """Return whether a text begins as a URL with a user and a password does, with or without its scheme.

    >>> has_password("https:/me:secret@host/a"), has_password("me:secret@host/a"), has_password("/data/a:b@c")
    (True, True, False)
    """
    return _without_user(text) != text


def _without_user(text: str) -> str:
    """Return a URL without user and password, also where it is not quite one; another text as it is."""
    found = _BEGIN.match(text)
    assert found is not None  # it matches the empty text
    scheme, authority = found["scheme"], found["authority"]
    after = text[found.end() :]
    user, at, host = authority.rpartition("@")
    if at:
        return scheme + host + after if scheme or ":" in user else text
    host, colon, port = authority.rpartition(":")
    if not colon or not port or port.isdecimal() or authority.endswith("]") or not (scheme or "@" in after):
        return text
    _, at, rest = after.rpartition("@")  # the password has a slash, or a question mark
    return scheme + rest if at else f"{scheme}{host}:{HIDDEN}{after}"


def _without_secrets(found: re.Match[str]) -> str:
    rest = found["rest"]
    return found["scheme"] + found["place"] + (f"{rest[0]}{HIDDEN}" if rest else "")


# ------------------------------------------------------------------------------------------------------------------ run marker
# The files of a training run's folder, and how ingest and trainer recognise it: its images must never become samples.

STATUS = "status.json"  # written first in a run's folder and never removed
CONFIG, METRICS = "config.json", "metrics.jsonl"
CHECKPOINTS = "checkpoints"  # folder of the checkpoints
RUN_FILE = "run.toml"  # the options of CONFIG, to be run again
IMAGES, IMAGES_FOLDER = "images.png", "images"  # the last contact sheet, and what is drawn along the run
LOSS_CURVE = "loss.png"
_FIELDS = frozenset(("state", "step", "reason"))  # of the status
_MAX_BYTES = 1 << 16  # the reason is an error message


def is_run(folder: Path) -> bool:
    """Return True if the folder contains a training run, judged by the fields of its `status.json`."""
    try:
        with (folder / STATUS).open("rb") as file:
            return is_status(file.read(_MAX_BYTES))
    except OSError:
        return False


def is_status(data: bytes) -> bool:
    """Return True if this is the content of a training run's `status.json`."""
    try:
        found = json.loads(data[:_MAX_BYTES])
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() == _FIELDS


# ---------------------------------------------------------------------------------------------------------------- regular file
# Open regular files for reading, or links to them; never a pipe or a device, which could block or never end.
#
# Links are followed, because large shards may be on another disk. Writes and removals never follow one (`atomic_write`,
# `locks`).

NO_FILE = "it is a pipe, a device or a folder, expected a file"
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: do not block if a pipe has just replaced the file


def open_regular(path: Path) -> int:
    """Open a regular file, or a link to one, and return its descriptor."""
    _refuse_others(path.stat(), path)  # check before opening: opening a device may have side effects
    fd = os.open(path, _FLAGS)
    try:
        _refuse_others(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return a file's content, truncated to `most_bytes` + 1 bytes, so that the caller can detect a file that is too long."""
    with open(open_regular(path), "rb") as file:
        return file.read(most_bytes + 1)


def why_unread(error: OSError | UnicodeDecodeError) -> str:
    """Return why a file cannot be read as UTF-8 text, to follow its name in a sentence.

    >>> why_unread(FileNotFoundError(2, "No such file or directory", "a.txt"))
    'does not exist'
    """
    if isinstance(error, FileNotFoundError):
        return "does not exist"
    return (
        f"is not UTF-8 (byte {error.start})" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error.strerror}"
    )


def _refuse_others(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, NO_FILE, os.fspath(path))
