"""WebDataset's convention: members with the same key are one sample, and the extension after the first dot is their type."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bucketline.errors import SourceError
from bucketline.files.paths import IMAGE_SUFFIXES
from bucketline.ingest.sources.captions.caption_files import name_key
from bucketline.ingest.sources.captions.caption_text import NOTHING, CaptionNames, Captions, ambiguous
from bucketline.ingest.sources.source import Listing, SourceItem
from bucketline.ingest.sources.splits import VAL, Splits, side_files, split_of_image

if TYPE_CHECKING:
    from bucketline.ingest.sources.tar.tar_reader import Member

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
    _samples: dict[str, _Sample] = field(default_factory=dict)
    _passed_over: list[str] = field(default_factory=list)

    def add_image(self, member: Member, at: tuple[int, ...]) -> None:
        """Add an image and its position."""
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
            plain = [extension for extension in sample.images if "." not in extension]
            for extension, (member, at) in sample.images.items():
                if member.name in sides:
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
                    id=f"{self.shard}/{member.name}", captions=captions, caption_error=error, held_out=target == VAL, at=at
                )
                items.append((member.number, item))
            listing.orphans += [f"{self.shard}/{name}" for name in _stray(sample)]
        listing.items += [item for _, item in sorted(items, key=lambda pair: pair[0])]
        listing.passed_over += self._passed_over
        return list(sides.values())

    def _join_normal_forms(self) -> None:
        """Move captions without an image to the image whose key differs only in Unicode normal form."""
        alone = [key for key, sample in self._samples.items() if not sample.images and not key.isascii()]
        if not alone:
            return
        with_images = {name_key(key): key for key, sample in self._samples.items() if sample.images and not sample.captions}
        for key in alone:
            if (own := with_images.get(name_key(key))) is not None:
                sample, other = self._samples[own], self._samples.pop(key)
                for extension, (name, read) in other.captions.items():
                    both = (sample.captions[extension][0], name) if extension in sample.captions else None
                    sample.captions[extension] = (name, read if both is None else ambiguous(both))

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
