"""WebDataset tar shards as a source, in files or in object storage, read by byte range; nothing is extracted.

The webdataset package expands patterns.
"""

from __future__ import annotations

import io
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from bucketline.command_line import counted
from bucketline.errors import SourceError
from bucketline.files.paths import why_not_there
from bucketline.files.redact import redacted, redacted_within, without_userinfo
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.sources.captions.caption_text import MAX_CAPTIONS_BYTES, CaptionNames, refuse_unmet, too_long
from bucketline.ingest.sources.local_files import refuse_too_large
from bucketline.ingest.sources.objects.object_file import STREAM_PART_BYTES, STREAM_PARTS_AHEAD, FileWindow, ObjectFile
from bucketline.ingest.sources.objects.place import folder_at, is_object_url, of_one_image, of_source, split_url, stamp_of
from bucketline.ingest.sources.options import SourceOptions
from bucketline.ingest.sources.source import Listing, Source, SourceBytes, SourceItem, Stamp, note_place
from bucketline.ingest.sources.splits import Splits, side_notes
from bucketline.ingest.sources.tar.tar_grouping import ShardSamples, caption_kind, is_image, key_and_extension
from bucketline.ingest.sources.tar.tar_reader import Tar
from bucketline.store.format.sample_record import storable_mtime_ns

if TYPE_CHECKING:
    from collections.abc import Iterator

TAR = re.compile(r"\.(tar(\.\w+)?|tgz)$")  # what a tar's name ends in
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One tar: a local file, or an object in object storage."""

    url: str
    path: Path | None  # None for an object

    @property
    def shown(self) -> str:
        """Its name in messages."""
        return self.url if self.path is not None else redacted(self.url)

    @property
    def place(self) -> str:
        """Its path or URL, without a password."""
        return self.url if self.path is not None else without_userinfo(self.url)

    @property
    def name(self) -> str:
        """Prefix of the ids: the tar's name without its extension."""
        return TAR.sub("", self.url.rpartition("/")[2] if self.path is None else self.path.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TarSource(Source):
    """The images of tar shards; a sample's id is `SHARD/KEY.EXTENSION`, and never used as a path.

    An item's `at` is its shard, member number, size, mtime, and the offset of its bytes.
    """

    root: str  # the folder of the source
    shards: tuple[Shard, ...]
    options: SourceOptions = field(default_factory=SourceOptions)

    @property
    def is_remote(self) -> bool:
        """True if a tar is in object storage."""
        return any(shard.path is None for shard in self.shards)

    @property
    def local_paths(self) -> tuple[Path, ...]:
        return tuple(shard.path for shard in self.shards if shard.path is not None)

    def listing(self) -> Listing:
        """Read the headers and captions of every tar."""
        listing, seen, splits = Listing(), dict[str, str](), Splits(self.options.dataset_splits)
        names, sides = CaptionNames.of(self.options), list[str]()
        for number, shard in enumerate(self.shards):
            first, path = len(listing.items), shard.place.removeprefix(self.root).lstrip("/")
            samples = ShardSamples(shard=shard.name, place=shard.shown, path=path, splits=splits, names=names)
            _read_shard(number, shard, samples, self.options)
            sides += samples.finish(listing)
            for item in listing.items[first:]:
                note_place(seen, item.id, shard.shown)
        listing.notes += side_notes(sides)
        splits.finish(self.shards[0].shown if len(self.shards) == 1 else redacted(self.root), self.root, listing.notes)
        if not listing.items:
            raise SourceError(f"{self.shards[0].shown}: its {len(self.shards)} tars have no images")
        refuse_unmet(self.options, listing.captions_from)
        return listing

    def stamp(self, item: SourceItem) -> Stamp:
        return Stamp(num_bytes=item.at[2], mtime_ns=item.at[3])

    def read(self, item: SourceItem) -> SourceBytes:
        stamp, shard = self.stamp(item), self.shards[item.at[0]]
        refuse_too_large(stamp.num_bytes)
        if item.held is not None:
            return SourceBytes(data=item.held, stamp=stamp)
        if shard.path is None:
            return SourceBytes(data=_range_of(shard, item, self.options), stamp=stamp)
        try:
            with self._window(item) as window:
                data = window.read(stamp.num_bytes)
        except OSError as error:
            raise RejectedError(Reason.UNREADABLE, f"{shard.shown}: {error.strerror or error}") from error
        if len(data) < stamp.num_bytes:
            raise _changed(shard)
        return SourceBytes(data=data, stamp=stamp)

    def opened(self, item: SourceItem) -> BinaryIO:
        if item.held is not None or self.shards[item.at[0]].path is None:
            return io.BytesIO(self.read(item).data)
        return io.BufferedReader(self._window(item))

    def known_bytes(self, item: SourceItem) -> int | None:
        """Return the size of an item's file; see `read_ahead`."""
        return item.at[2]

    def fetched(self, item: SourceItem) -> SourceItem:
        """Return an item with its bytes; raises what `read` does."""
        return replace(item, held=self.read(item).data)

    def _window(self, item: SourceItem) -> FileWindow:
        """Open the tar at the item's bytes, after checking that the tar has not changed since it was listed."""
        shard, stamp = self.shards[item.at[0]], self.stamp(item)
        refuse_too_large(stamp.num_bytes)
        assert shard.path is not None, item.id
        try:
            file = shard.path.open("rb")
        except OSError as error:
            raise RejectedError(Reason.UNREADABLE, f"{shard.shown}: {error.strerror or error}") from error
        if storable_mtime_ns(os.fstat(file.fileno()).st_mtime_ns) != stamp.mtime_ns:
            file.close()
            raise _changed(shard)
        return FileWindow(file, item.at[4], stamp.num_bytes)


def expand(text: str, options: SourceOptions | None = None) -> TarSource:
    """Expand a pattern into tars: `{000000..000012}`, `*`, a file, or a URL in object storage."""
    try:
        from webdataset.shardlists import expand_urls
    except ImportError as error:
        raise SourceError(
            f"{redacted(text)}: reading tars needs webdataset; install the extra ingest: pip install 'bucketline[ingest]'"
        ) from error
    options = options or SourceOptions()
    try:
        urls = [text] if Path(text).is_file() else expand_urls(text)
    except Exception as error:
        raise SourceError(
            f"{redacted(text)!r} is not a pattern of tars: {redacted_within(str(error), text)}; "
            "expected such as photos/{000000..000012}.tar"
        ) from error
    shards: list[Shard] = []
    for url in urls:
        shards += _found_objects(url, options) if is_object_url(url) else _found(url)
    root = os.path.commonprefix([shard.place for shard in shards]).rpartition("/")[0]  # noqa: RUF071 - URLs as well
    return TarSource(root=root, shards=tuple(shards), options=options)


def has_scheme(text: str) -> bool:
    """Return True if a text begins with a scheme, such as `https:`."""
    return re.match(r"[A-Za-z][A-Za-z0-9+-]+:", text) is not None


def _found(url: str) -> list[Shard]:
    local = local_path(url)
    if local is None:
        raise SourceError(f"{redacted(url)} is neither a path nor a URL of object storage; download the tar, and name its path")
    if local.is_file():
        return [Shard(url=url, path=local)]
    import glob

    matches = sorted(path for path in map(Path, glob.glob(str(local), recursive=True)) if path.is_file())  # noqa: PTH207 - a Path would not take an absolute pattern
    if not matches:
        why = "no file matches the pattern" if glob.has_magic(str(local)) else f"no such tar, {why_not_there(local)}"
        raise SourceError(f"{redacted(url)}: {why}; expected a file, a pattern that matches files, or a URL")
    return [Shard(url=str(path), path=path) for path in matches]


def _found_objects(url: str, options: SourceOptions) -> list[Shard]:
    """Return the tars in object storage that a URL names: one, or those that match the pattern in its last parts."""
    if not any(letter in url for letter in "*["):
        split_url(url)
        return [Shard(url=url, path=None)]
    begin = min(url.index(letter) for letter in "*[" if letter in url)
    folder, _, pattern = url[:begin].rpartition("/")
    parts = f"{pattern}{url[begin:]}".split("/")
    with of_source(url):
        names = sorted(entry.name for entry in folder_at(folder, options).names(is_bounded=False))
    found = [name for name in names if len(own := name.split("/")) == len(parts) and all(map(fnmatchcase, own, parts))]
    if not found:
        raise SourceError(f"{url}: none of {counted(len(names), 'object')} below {folder} matches the pattern")
    return [Shard(url=f"{folder}/{name}", path=None) for name in found]


def _range_of(shard: Shard, item: SourceItem, options: SourceOptions) -> bytes:
    """Return an item's bytes, after checking that the tar has not changed since it was listed."""
    url, name = split_url(shard.url)
    if not item.at[2]:
        return b""
    with of_one_image():
        data, entry = folder_at(url, options).fetch_range(name, item.at[4], item.at[4] + item.at[2])
    if stamp_of(entry).mtime_ns != item.at[3] or len(data) < item.at[2]:
        raise _changed(shard)
    return data


def local_path(url: str) -> Path | None:
    """Return the path of a URL without a scheme or with `file:`; None for others."""
    if not has_scheme(url) or Path(url).exists():
        return Path(url)
    if url.startswith("file:"):
        from urllib.parse import urlparse
        from urllib.request import url2pathname

        return Path(url2pathname(urlparse(url).path))
    return None


@contextmanager
def _opened(shard: Shard, options: SourceOptions) -> Iterator[tuple[Tar, int]]:
    """Open a shard; yield the tar and its mtime."""
    if shard.path is None:
        url, name = split_url(shard.url)
        folder = folder_at(url, options)
        with of_source(shard.url):
            entry = folder.look_up(name)
        if entry is None:
            raise SourceError(f"{shard.url} is missing; check the URL")
        explaining = partial(of_source, shard.url)
        parts = {"part_bytes": STREAM_PART_BYTES, "parts_ahead": STREAM_PARTS_AHEAD}
        with ObjectFile(folder, name, entry.num_bytes, explaining=explaining, **parts) as object_file:
            buffered = io.BufferedReader(object_file, _CHUNK_BYTES)
            yield Tar(buffered, shard.shown), stamp_of(entry).mtime_ns
        return
    try:
        file = shard.path.open("rb")
    except OSError as error:
        raise SourceError(f"{shard.shown} cannot be read: {error.strerror}") from error
    with file:
        yield Tar(file, shard.shown), storable_mtime_ns(os.fstat(file.fileno()).st_mtime_ns)


def _read_shard(number: int, shard: Shard, samples: ShardSamples, options: SourceOptions) -> None:
    names = samples.names
    with _opened(shard, options) as (tar, mtime_ns):
        for member in tar:
            split = key_and_extension(member.name)
            if split is None:
                continue
            if is_image(split[1]):
                if not member.is_file:
                    samples.pass_over(member, "a link, or a sparse file")
                    continue
                samples.add_image(member, (number, member.number, member.num_bytes, mtime_ns, member.offset))
            elif (kind := caption_kind(split[1], names)) is not None and member.is_file:
                if member.num_bytes > MAX_CAPTIONS_BYTES:
                    samples.add_captions(member, too_long(member.name, member.num_bytes))
                else:
                    samples.add_captions(member, names.read(kind, member.name, tar.read(member)))


def _changed(shard: Shard) -> SourceError:
    return SourceError(
        f"{shard.shown} changed while it was read; what was packed is kept: rerun the command once nothing writes to it"
    )
