"""WebDataset tar shards as a source, in files or in object storage, read by byte range; nothing is extracted.

The webdataset package expands patterns.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import tarfile
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from bucketline.command_line import counted
from bucketline.errors import BucketlineError, SourceError
from bucketline.files.paths import IMAGE_SUFFIXES, redacted, redacted_within, why_not_there, without_userinfo
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.sources.captions.files import (
    MAX_CAPTIONS_BYTES,
    NOTHING,
    CaptionNames,
    Captions,
    ambiguous,
    name_key,
    refuse_unmet,
    too_long,
)
from bucketline.ingest.sources.hf_dataset import VAL, Splits, side_files, side_notes, split_of_image
from bucketline.ingest.sources.object_place import folder_at, is_object_url, of_one_image, of_source, split_url, stamp_of
from bucketline.ingest.sources.objects import STREAM_PART_BYTES, STREAM_PARTS_AHEAD, FileWindow, ObjectFile
from bucketline.ingest.sources.partner_names import MASK, NO_PARTNERS, REFERENCE, MaskForm, Partner, PartnerRules, member_role
from bucketline.ingest.sources.source import (
    MAX_FILE_BYTES,
    Listing,
    Source,
    SourceItem,
    SourceOptions,
    Stamp,
    note_place,
    refuse_too_large,
)
from bucketline.store.format.schema import storable_mtime_ns

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bucketline.ingest.sources.partner_names import Found


# ------------------------------------------------------------------------------------------------------------------ tar reader
# Iterate over a tar, forwards only; damage raises an error instead of shortening the list.
#
# Like the webdataset package, this uses the standard library's tarfile. On its own, tarfile takes a damaged or missing
# header for the end of the archive, and silently loses the images after it. This module therefore checks the last block
# that tarfile read.

END_MARK = bytes(tarfile.BLOCKSIZE)
_MAGIC_BYTES = 6
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd
_CUT_SHORT = "the tar ends inside a member: it was cut short"
_REPAIR = "copy or create it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member of a tar. Its name is whatever the tar says, and is never used as a path."""

    name: str
    number: int  # among all members
    num_bytes: int
    offset: int  # of its bytes
    is_file: bool  # False for links, sparse files and others whose bytes are not stored as they are


class Forwards:
    """The file object for tarfile. It refuses to seek backwards, since a malicious header could cause an endless loop."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._num_bytes, self._at = file, file.seek(0, io.SEEK_END), 0
        self.seek(0)
        self.last, self.is_short = b"", False  # bytes of the last read; whether it met the end of the file

    def read(self, num_bytes: int = -1) -> bytes:
        if not 0 <= num_bytes <= MAX_FILE_BYTES:
            raise tarfile.ReadError(f"a header wants {num_bytes} bytes")
        parts = []
        while num_bytes and (part := self._file.read(num_bytes)):
            parts.append(part)
            num_bytes -= len(part)
        self.last, self.is_short = b"".join(parts), num_bytes > 0
        self._at += len(self.last)
        return self.last

    def seek(self, to: int, whence: int = 0) -> int:
        if to < self._at or whence:
            raise tarfile.ReadError(f"a header leads back to byte {to}")
        self._at = self._file.seek(to)
        return self._at

    def tell(self) -> int:
        return self._at

    @property
    def place(self) -> int:
        """The byte that was reached, at most the file's size; a seek can go past the end of a truncated file."""
        return min(self._at, self._num_bytes)

    def read_member(self, member: Member) -> bytes:
        self.seek(member.offset)
        data = self.read(member.num_bytes)
        if len(data) < member.num_bytes:
            raise tarfile.ReadError(f"{_CUT_SHORT} ({len(data)} of the {member.num_bytes} bytes of {member.name!r} are there)")
        return data


class Tar:
    """An open tar. Errors while reading it are SourceErrors that name the tar and the byte."""

    def __init__(self, file: IO[bytes], where: str) -> None:
        """Open a tar."""
        self._where = where
        try:
            head = file.read(_MAGIC_BYTES)
        except OSError as error:
            raise SourceError(f"{where} cannot be read: {error}") from error
        if head.startswith(_COMPRESSED):
            raise SourceError(f"{where} is compressed; unpack it first, by gunzip, bunzip2, unxz or unzstd")
        self._bytes = Forwards(file)

    def __iter__(self) -> Iterator[Member]:
        number = 0
        try:
            stream: Any = self._bytes
            archive: Any = tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115 - the file is the caller's
            while (info := archive.next()) is not None:
                archive.members.clear()  # otherwise it keeps all of them
                if info.size < 0:
                    raise tarfile.ReadError(f"a header says {info.size} bytes")
                yield Member(
                    name=info.name,
                    number=number,
                    num_bytes=info.size,
                    offset=info.offset_data,
                    is_file=info.isreg() and not info.issparse(),
                )
                number += 1
            self._check_end()
        except BucketlineError:
            raise
        except Exception as error:
            is_cut = isinstance(error, tarfile.ReadError) and self._bytes.is_short and self._bytes.place > 0
            raise self._damaged(_CUT_SHORT if is_cut else str(error) or type(error).__name__) from error

    def read(self, member: Member) -> bytes:
        """Read the member that the iteration yielded last."""
        try:
            return self._bytes.read_member(member)
        except BucketlineError:
            raise
        except Exception as error:
            raise self._damaged(str(error) or type(error).__name__) from error

    def _check_end(self) -> None:
        last = self._bytes.last
        if last != END_MARK:
            is_cut = len(last) < len(END_MARK)
            found = "the tar ends without its end mark: it was cut short" if is_cut else "a header is damaged"
            raise self._damaged(f"{found}, and its number of images is unknown")
        while rest := self._bytes.read(_CHUNK_BYTES):
            if rest.strip(b"\0"):
                raise self._damaged("there is data after its end mark (concatenated tars?)")

    def _damaged(self, what: str) -> SourceError:
        return SourceError(f"{self._where}, near byte {self._bytes.place}: {what}; {_REPAIR}")


# ---------------------------------------------------------------------------------------------------------------- tar grouping

_META = re.compile(r"__[^/]*__($|/)")  # names that webdataset skips


def key_and_extension(name: str) -> tuple[str, str] | None:
    """Split a member's name at the first dot of its last part, as webdataset does; None if it belongs to no sample.

    >>> key_and_extension("cats/a.seg.png")
    ('cats/a', 'seg.png')
    """
    folder, slash, last = name.rpartition("/")
    base, dot, extension = last.partition(".")
    if not base or not dot or _META.match(name):
        return None
    return f"{folder}{slash}{base}", extension


def is_image(extension: str) -> bool:
    """Return True if an extension, possibly compound, is that of an image."""
    return f".{extension.rpartition('.')[2].lower()}" in IMAGE_SUFFIXES


def caption_kind(extension: str, names: CaptionNames) -> str | None:
    """Return the caption extension of a member, in lower case with its dot; None if it does not hold captions.

    >>> caption_kind("seg.TXT", CaptionNames())
    '.txt'
    """
    kind = f".{extension.rpartition('.')[2].lower()}"
    return kind if kind in names.extensions else None


@dataclass(slots=True)
class _Sample:
    images: dict[str, tuple[Member, tuple[int, ...]]] = field(default_factory=dict)  # by extension
    captions: dict[str, tuple[str, Captions]] = field(default_factory=dict)  # by extension in lower case


@dataclass(slots=True)
class ShardSamples:
    """Groups the members of one shard into samples. Members with the same key need not be adjacent."""

    shard: str  # its name in ids
    place: str  # its name in errors
    path: str  # in the source
    splits: Splits
    names: CaptionNames = field(default_factory=CaptionNames)
    rules: PartnerRules = NO_PARTNERS
    _samples: dict[str, _Sample] = field(default_factory=dict)
    _passed_over: list[str] = field(default_factory=list)

    def add_image(self, member: Member, at: tuple[int, ...]) -> None:
        key, extension = self._split(member)
        images = self._samples.setdefault(key, _Sample()).images
        if extension in images:
            first = images[extension][0]
            raise SourceError(
                f"two samples have the id {self.shard}/{member.name!r}: one in {self.place} at byte {first.offset}, "
                f"one in {self.place} at byte {member.offset}; ids must differ, so rename one"
            )
        images[extension] = member, at

    def add_captions(self, member: Member, read: Captions) -> None:
        key, extension = self._split(member)
        captions = self._samples.setdefault(key, _Sample()).captions
        if extension.lower() in captions:
            read = ambiguous((captions[extension.lower()][0], member.name))
        captions[extension.lower()] = (member.name, read)

    def pass_over(self, member: Member, why: str) -> None:
        """Record an image that is not packed."""
        self._passed_over.append(f"{self.shard}/{member.name} ({why})")

    def finish(self, listing: Listing) -> list[str]:
        """Append the shard's images to a listing, in the order of the tar; return what each side file was told by."""
        items: list[tuple[int, SourceItem]] = []
        self._join_normal_forms()
        sides = side_files([member.name for sample in self._samples.values() for member, _ in sample.images.values()])
        for sample in self._samples.values():
            roles = {extension: member_role(extension, self.rules) for extension in sample.images}
            plain = [extension for extension in sample.images if "." not in extension]
            partners, partner_error = self._partners(sample, roles)
            if None not in roles.values():
                for member, _ in sample.images.values():
                    self.pass_over(member, "a reference or mask, and no other image has its key")
            for extension, (member, at) in sample.images.items():
                if member.name in sides or roles[extension] is not None:
                    continue
                if plain and extension not in plain and not _has_own_captions(extension, sample):
                    self.pass_over(member, f"its key also has a .{plain[0]}: assumed to be a mask or similar")
                    continue
                target = self.splits.take(split_of_image(self.path, member.name), f"{self.path}/{member.name}")
                if target is None:
                    continue
                (captions, error), kind = _captions_for(extension, sample, self.names)
                if captions:
                    listing.captions_from[f"KEY{kind}"] += 1
                item = SourceItem(
                    id=f"{self.shard}/{member.name}",
                    captions=captions,
                    caption_error=error,
                    held_out=target == VAL,
                    at=at,
                    partners=partners,
                    partner_error=partner_error,
                )
                items.append((member.number, item))
            listing.orphans += [f"{self.shard}/{name}" for name in _stray(sample)]
        listing.items += [item for _, item in sorted(items, key=lambda pair: pair[0])]
        listing.passed_over += self._passed_over
        return list(sides.values())

    def _partners(self, sample: _Sample, roles: Mapping[str, tuple[str, int] | None]) -> Found:
        """Return the references and the mask among the images of a key."""
        own = sorted((role, extension) for extension, role in roles.items() if role is not None)
        twice = next(((a[1], b[1]) for a, b in itertools.pairwise(own) if a[0] == b[0]), None)
        if twice is not None:
            return (), f"its key has a .{twice[0]} and a .{twice[1]}; keep one"
        found = [
            Partner(kind=kind, name=f"{self.shard}/{sample.images[extension][0].name}", at=sample.images[extension][1])
            for (kind, _), extension in own
        ]
        references = [one for one in found if one.kind == REFERENCE]
        masks = [one for one in found if one.kind == MASK]
        is_missing = self.rules.mask is MaskForm.COLUMN and not masks
        return (*references, *masks), f"its key has no .{self.rules.mask_at}.png, its mask" if is_missing else None

    def _join_normal_forms(self) -> None:
        """Move captions and partners without an image to the image whose key differs only in Unicode normal form."""
        alone = [key for key, sample in self._samples.items() if not key.isascii() and not self._has_target(sample)]
        if not alone:
            return
        targets = {key for key, sample in self._samples.items() if self._has_target(sample)}
        by_form = {name_key(key): key for key in targets}
        captionless = {key for key in targets if not self._samples[key].captions}
        for key in alone:
            if (own := by_form.get(name_key(key))) is None:
                continue
            sample, other = self._samples[own], self._samples[key]
            for extension in [one for one in other.images if one not in sample.images]:
                sample.images[extension] = other.images.pop(extension)
            for extension in [*other.captions] if own in captionless else []:
                name, read = other.captions.pop(extension)
                both = (sample.captions[extension][0], name) if extension in sample.captions else None
                sample.captions[extension] = (name, read if both is None else ambiguous(both))

    def _has_target(self, sample: _Sample) -> bool:
        return any(member_role(extension, self.rules) is None for extension in sample.images)

    def _split(self, member: Member) -> tuple[str, str]:
        split = key_and_extension(member.name)
        assert split is not None, member.name
        return split


def _stem(extension: str) -> str:
    """Return an extension without its last part, in lower case: `seg` of `seg.png`; empty for `png`."""
    return extension.rpartition(".")[0].lower()


def _has_own_captions(extension: str, sample: _Sample) -> bool:
    """Return True if there are captions of an image's own compound name, as `seg.txt` is of `seg.png`."""
    stem = _stem(extension)
    return any(_stem(own) == stem and read != NOTHING for own, (_, read) in sample.captions.items())


def _stray(sample: _Sample) -> list[str]:
    """Return the caption files that belong to no image of their key, except JSON files, which may hold other things."""
    stems = {_stem(extension) for extension in sample.images}
    return [
        name
        for extension, (name, _) in sample.captions.items()
        if not extension.endswith("json") and not (stems and _stem(extension) in {*stems, ""})
    ]


def _captions_for(extension: str, sample: _Sample, names: CaptionNames) -> tuple[Captions, str | None]:
    """Return an image's captions and the extension that they came from, None if there are none.

    Captions with the image's compound name take precedence over those of the key, then extensions in the order of `names`.
    """
    own = _stem(extension)
    for stem in ([f"{own}."] if own else []) + [""]:
        for kind in names.extensions:
            found = sample.captions.get(f"{stem}{kind[1:]}")
            if found is not None and found[1] != NOTHING:
                return found[1], kind
    return NOTHING, None


# ------------------------------------------------------------------------------------------------------------------ tar source

TAR = re.compile(r"\.(tar(\.\w+)?|tgz)$")  # what a tar's name ends in
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One tar: a local file, or an object in object storage."""

    url: str
    path: Path | None  # None for an object

    @property
    def shown(self) -> str:
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
        rules = self.options.partner_rules
        rules.refuse_other_than_columns("a tar")
        for number, shard in enumerate(self.shards):
            first, path = len(listing.items), shard.place.removeprefix(self.root).lstrip("/")
            samples = ShardSamples(shard=shard.name, place=shard.shown, path=path, splits=splits, names=names, rules=rules)
            _read_shard(number, shard, samples, self.options)
            sides += samples.finish(listing)
            for item in listing.items[first:]:
                note_place(seen, item.id, shard.shown)
        if rules.columns or any(one.kind == REFERENCE for item in listing.items for one in item.partners):
            _refuse_missing(listing, rules)
        listing.notes += side_notes(sides)
        splits.finish(self.shards[0].shown if len(self.shards) == 1 else redacted(self.root), self.root, listing.notes)
        if not listing.items:
            raise SourceError(f"{self.shards[0].shown}: its {len(self.shards)} tars have no images")
        names.note_lines(listing.notes)
        refuse_unmet(self.options, listing.captions_from)
        return listing

    def stamp(self, item: SourceItem) -> Stamp:
        return Stamp(num_bytes=item.at[2], mtime_ns=item.at[3])

    def read(self, item: SourceItem) -> tuple[bytes, Stamp]:
        stamp, shard = self.stamp(item), self.shards[item.at[0]]
        refuse_too_large(stamp.num_bytes)
        if item.held is not None:
            return item.held, stamp
        if shard.path is None:
            return _range_of(shard, item, self.options), stamp
        try:
            with self._window(item) as window:
                data = window.read(stamp.num_bytes)
        except OSError as error:
            raise RejectedError(Reason.UNREADABLE, f"{shard.shown}: {error.strerror or error}") from error
        if len(data) < stamp.num_bytes:
            raise _changed(shard)
        return data, stamp

    def opened(self, item: SourceItem) -> BinaryIO:
        if item.held is not None or self.shards[item.at[0]].path is None:
            return io.BytesIO(self.read(item)[0])
        return io.BufferedReader(self._window(item))

    def known_bytes(self, item: SourceItem) -> int | None:
        """Return the size of an item's file; see `read_ahead`."""
        return item.at[2]

    def fetched(self, item: SourceItem) -> SourceItem:
        """Return an item with its bytes; raises what `read` does."""
        return replace(item, held=self.read(item)[0])

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


def _refuse_missing(listing: Listing, rules: PartnerRules) -> None:
    """Have the images without a reference rejected, unless the user allows them."""
    error = rules.missing(0, "next to it, such as NAME.ref0.png")
    for n, item in enumerate(listing.items):
        if error is not None and item.partner_error is None and not any(one.kind == REFERENCE for one in item.partners):
            listing.items[n] = replace(item, partner_error=error)


def _changed(shard: Shard) -> SourceError:
    return SourceError(
        f"{shard.shown} changed while it was read; what was packed is kept: rerun the command once nothing writes to it"
    )
