"""WebDataset tar shards as a source: local ones read by byte range, streams passed through. Nothing is extracted.

Patterns are expanded and URLs are opened by the webdataset package.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from bucketline.errors import SourceError
from bucketline.ingest.rejects import Reason, RejectedError
from bucketline.ingest.sources.captions import MAX_CAPTIONS_BYTES, too_long
from bucketline.ingest.sources.file_window import FileWindow
from bucketline.ingest.sources.files import refuse_too_large
from bucketline.ingest.sources.source import MAX_FILE_BYTES, Listing, SourceBytes, SourceItem, Stamp, note_place
from bucketline.ingest.sources.tar_members import Member, Tar
from bucketline.ingest.sources.tar_samples import CAPTION_READERS, ShardSamples, is_caption, is_image, key_and_extension
from bucketline.ingest.sources.tar_stream import TarStream
from bucketline.near_names import why_not_there

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_CHUNK_BYTES = 1 << 20
_PLACED = 5  # numbers in `at` of an item whose bytes lie in a plain tar of this machine
_TAR_NAME = re.compile(r"""[^/\s'"|;&<>()=]+?\.(?:tar(?:\.\w+)?|tgz)(?![\w.])""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One tar: a file of this machine, or what webdataset opens for a URL."""

    url: str
    path: Path | None  # None for a stream

    @property
    def name(self) -> str:
        """What ids begin with: the tar's name without its extension."""
        if self.path is not None:
            return re.sub(r"\.(tar(\.\w+)?|tgz)$", "", self.path.name)
        if found := _TAR_NAME.search(self.url):
            return re.sub(r"\.(tar(\.\w+)?|tgz)$", "", found[0])
        return f"stream-{hashlib.blake2b(self.url.encode('utf-8', 'surrogateescape'), digest_size=4).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TarSource:
    """The images of tar shards; a sample's id is `SHARD/KEY.EXTENSION`, and never a path.

    An item's `at` is its shard, its number among the members, its size and time, and for a plain tar of this machine the
    place of its bytes.
    """

    shards: tuple[Shard, ...]

    @property
    def local_paths(self) -> tuple[Path, ...]:
        return tuple(shard.path for shard in self.shards if shard.path is not None)

    def listing(self) -> Listing:
        """Go through every tar once. Of a plain local one only headers and captions are read.

        Raises:
            SourceError: where a tar is damaged or cut short, has no end mark, cannot be opened, or ids are equal.
        """
        listing, seen = Listing(), dict[str, str]()
        for number, shard in enumerate(self.shards):
            first = len(listing.items)
            _list_shard(number, shard, listing)
            for item in listing.items[first:]:
                note_place(seen, item.id, shard.url)
        if not listing.items:
            raise SourceError(f"{self.shards[0].url}: its {len(self.shards)} tars hold no image")
        return listing

    def in_turn(self, items: Iterable[SourceItem]) -> Iterator[SourceItem]:
        for number, group in itertools.groupby(items, key=lambda item: item.at[0]):
            wanted = list(group)
            if _is_placed(wanted[0]):
                yield from wanted
            else:
                yield from _stream(self.shards[number], wanted)

    def stamp(self, item: SourceItem) -> Stamp:
        return Stamp(num_bytes=item.at[2], mtime_ns=item.at[3])

    def read(self, item: SourceItem) -> SourceBytes:
        stamp, shard = self.stamp(item), self.shards[item.at[0]]
        refuse_too_large(stamp.num_bytes)
        if item.held is not None:
            return SourceBytes(data=item.held, stamp=stamp)
        try:
            with self._window(item) as window:
                data = window.read(stamp.num_bytes)
        except OSError as error:
            raise RejectedError(Reason.UNREADABLE, f"{shard.url}: {error.strerror or error}") from error
        if len(data) < stamp.num_bytes:
            raise _changed(shard)
        return SourceBytes(data=data, stamp=stamp)

    def opened(self, item: SourceItem) -> BinaryIO:
        return io.BytesIO(self.read(item).data) if item.held is not None else io.BufferedReader(self._window(item))

    def _window(self, item: SourceItem) -> FileWindow:
        """Open the tar at the item's bytes, after a look at whether it is still the tar that was listed."""
        shard, stamp = self.shards[item.at[0]], self.stamp(item)
        refuse_too_large(stamp.num_bytes)
        assert shard.path is not None, item.id
        try:
            file = shard.path.open("rb")
        except OSError as error:
            raise RejectedError(Reason.UNREADABLE, f"{shard.url}: {error.strerror or error}") from error
        if max(0, os.fstat(file.fileno()).st_mtime_ns) != stamp.mtime_ns:
            file.close()
            raise _changed(shard)
        return FileWindow(file, item.at[4], stamp.num_bytes)


def expand(text: str) -> TarSource:
    """Find the tars that a pattern names: `{000000..000012}`, `*`, a file, or any URL that webdataset opens.

    Raises:
        SourceError: where webdataset is not installed, the pattern is broken, or names no file.
    """
    try:
        from webdataset.shardlists import expand_urls
    except ImportError as error:
        raise SourceError(
            f"{text}: reading tars needs webdataset; install bucketline with its extra: bucketline[ingest]"
        ) from error
    try:
        urls = [text] if Path(text).is_file() else expand_urls(text)
    except Exception as error:
        raise SourceError(f"{text!r} is no pattern of tars: {error}; expected such as photos/{{000000..000012}}.tar") from error
    shards: list[Shard] = []
    for url in urls:
        shards += _found(url)
    return TarSource(shards=tuple(shards))


def is_url(text: str) -> bool:
    """Say whether a text has a scheme, as `https:` and `pipe:` have."""
    return re.match(r"[A-Za-z][A-Za-z0-9+-]+:", text) is not None


def _found(url: str) -> list[Shard]:
    local = local_path(url)
    if local is None:
        return [Shard(url=url, path=None)]
    if local.is_file():
        return [Shard(url=url, path=local)]
    import glob

    matches = sorted(path for path in map(Path, glob.glob(str(local), recursive=True)) if path.is_file())  # noqa: PTH207 - a Path would not take an absolute pattern
    if not matches:
        why = "no file fits the pattern" if glob.has_magic(str(local)) else f"no such tar, {why_not_there(local)}"
        raise SourceError(f"{url}: {why}; expected a file, a pattern that matches files, or a URL")
    return [Shard(url=str(path), path=path) for path in matches]


def local_path(url: str) -> Path | None:
    """Give the path that a URL without a scheme, or a `file:` one, stands for; None for others."""
    if not is_url(url) or Path(url).exists():
        return Path(url)
    if url.startswith("file:"):
        from urllib.parse import urlparse
        from urllib.request import url2pathname

        return Path(url2pathname(urlparse(url).path))
    return None


@contextmanager
def _opened(shard: Shard) -> Iterator[tuple[Tar, int | None]]:
    """Open a shard; give the tar, and the time of its file where it is one."""
    if shard.path is not None:
        try:
            file: IO[bytes] = shard.path.open("rb")
        except OSError as error:
            raise SourceError(f"{shard.url} cannot be read: {error.strerror}") from error
        with file:
            yield Tar(file, shard.url, seekable=file), max(0, os.fstat(file.fileno()).st_mtime_ns)
        return
    stream = TarStream(shard.url)
    try:
        yield Tar(stream, shard.url), None
        while stream.read(_CHUNK_BYTES):  # to its end, where it says whether its command failed
            pass
    finally:
        stream.abandon()


def _list_shard(number: int, shard: Shard, listing: Listing) -> None:
    samples = ShardSamples(shard=shard.name, place=shard.url)
    with _opened(shard) as (tar, mtime_ns):
        is_placed = mtime_ns is not None and not tar.is_compressed
        for member in tar:
            split = key_and_extension(member.name)
            if split is None:
                continue
            if is_image(split[1]):
                if not member.is_file:
                    samples.pass_over(member, "a link, or a sparse file")
                    continue
                time = member.mtime_ns if mtime_ns is None else mtime_ns
                at = (number, member.number, member.num_bytes, max(0, time))
                samples.add_image(member, (*at, member.offset) if is_placed else at)
            elif is_caption(split[1]) and member.is_file:
                if member.num_bytes > MAX_CAPTIONS_BYTES:
                    samples.add_captions(member, too_long(member.name, member.num_bytes))
                else:
                    kind = split[1].rpartition(".")[2].lower()
                    samples.add_captions(member, CAPTION_READERS[kind](member.name, tar.read(member)))
    samples.finish(listing)


def _is_placed(item: SourceItem) -> bool:
    return len(item.at) == _PLACED


def _stream(shard: Shard, items: list[SourceItem]) -> Iterator[SourceItem]:
    """Pass through a stream and give the wanted items with their bytes.

    Raises:
        SourceError: where the stream is not what was listed, or is damaged.
    """
    wanted = {item.at[1]: item for item in items}
    with _opened(shard) as (tar, mtime_ns):
        for member in tar:
            item = wanted.pop(member.number, None)
            if item is None:
                continue
            if _identity(shard, member, mtime_ns) != (item.id, item.at[2], item.at[3]):
                raise _changed(shard)
            yield item if member.num_bytes > MAX_FILE_BYTES else replace(item, held=tar.read(member))
    if wanted:
        raise _changed(shard)


def _identity(shard: Shard, member: Member, mtime_ns: int | None) -> tuple[str, int, int]:
    return f"{shard.name}/{member.name}", member.num_bytes, max(0, member.mtime_ns if mtime_ns is None else mtime_ns)


def _changed(shard: Shard) -> SourceError:
    return SourceError(
        f"{shard.url} changed while it was read; what was packed is kept: run the same command again when nothing writes to it"
    )
