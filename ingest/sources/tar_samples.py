"""WebDataset's convention: members of one key are a sample, and what follows the key's first dot says what each is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bucketline.errors import SourceError
from bucketline.ingest.sources.captions import Captions, captions_of_json, captions_of_text
from bucketline.ingest.sources.source import IMAGE_SUFFIXES, Listing, SourceItem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bucketline.ingest.sources.tar_members import Member

_META = re.compile(r"__[^/]*__($|/)")  # what webdataset passes over
CAPTION_READERS: Mapping[str, Callable[[str, bytes], Captions]] = {
    "txt": captions_of_text,
    "caption": captions_of_text,
    "json": captions_of_json,
}


def key_and_extension(name: str) -> tuple[str, str] | None:
    """Split a member's name as webdataset does, at the first dot of its last part; None where it belongs to no sample.

    >>> key_and_extension("cats/a.seg.png")
    ('cats/a', 'seg.png')
    """
    folder, slash, last = name.rpartition("/")
    base, dot, extension = last.partition(".")
    if not base or not dot or _META.match(name):
        return None
    return f"{folder}{slash}{base}", extension


def is_image(extension: str) -> bool:
    """Say whether an extension, compound or not, is a picture's."""
    return f".{extension.rpartition('.')[2].lower()}" in IMAGE_SUFFIXES


def is_caption(extension: str) -> bool:
    """Say whether a member of this extension may hold captions."""
    return extension.rpartition(".")[2].lower() in CAPTION_READERS


@dataclass(slots=True)
class _Sample:
    images: dict[str, tuple[Member, tuple[int, ...]]] = field(default_factory=dict)  # by extension
    captions: dict[str, tuple[str, Captions]] = field(default_factory=dict)  # by extension in lower case


@dataclass(slots=True)
class ShardSamples:
    """Gathers one shard's members to samples. Members of one key need not lie together."""

    shard: str  # its name in ids
    place: str  # what errors call it
    _samples: dict[str, _Sample] = field(default_factory=dict)
    _passed_over: list[str] = field(default_factory=list)

    def add_image(self, member: Member, at: tuple[int, ...]) -> None:
        """Note a picture, and where it is to be found.

        Raises:
            SourceError: where the shard has a member of that name already.
        """
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
        """Note what a member that may hold captions gave."""
        key, extension = self._split(member)
        self._samples.setdefault(key, _Sample()).captions.setdefault(extension.lower(), (member.name, read))

    def pass_over(self, member: Member, why: str) -> None:
        """Note a picture that is not packed."""
        self._passed_over.append(f"{self.shard}/{member.name} ({why})")

    def finish(self, listing: Listing) -> None:
        """Put the shard's images at the end of a listing, in the tar's order."""
        items: list[tuple[int, SourceItem]] = []
        for sample in self._samples.values():
            plain = [extension for extension in sample.images if "." not in extension]
            for extension, (member, at) in sample.images.items():
                if plain and extension not in plain:
                    self.pass_over(member, f"beside .{plain[0]} of the same key: taken for a mask or the like")
                    continue
                captions, error = _captions_for(extension, sample)
                item = SourceItem(id=f"{self.shard}/{member.name}", captions=captions, caption_error=error, at=at)
                items.append((member.number, item))
            if not sample.images:
                names = (name for extension, (name, _) in sample.captions.items() if not extension.endswith("json"))
                listing.orphans += [f"{self.shard}/{name}" for name in names]
        listing.items += [item for _, item in sorted(items, key=lambda pair: pair[0])]
        listing.passed_over += self._passed_over

    def _split(self, member: Member) -> tuple[str, str]:
        split = key_and_extension(member.name)
        assert split is not None, member.name
        return split


def _captions_for(extension: str, sample: _Sample) -> Captions:
    """Choose an image's captions: those of its own compound name before the key's, a text before a JSON object."""
    own = str(PurePosixPath(extension).with_suffix("")).lower() if "." in extension else None
    for stem in ([f"{own}."] if own else []) + [""]:
        for kind in CAPTION_READERS:
            if (found := sample.captions.get(f"{stem}{kind}")) is not None:
                return found[1]
    return (), None
