"""What a format of a cache is: how its samples are listed, what it calls their values, in which form it has latents."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from bucketline.extensions import Extensions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path


class Scaling(StrEnum):
    """The form in which a cache stores the VAE's output."""

    NONE = "none"
    AS_FED = "as fed to the model"  # (z - shift) x scale, or (z - mean) / std x scale, by the VAE's constants
    PACKED = "packed 2 x 2 and normalised"  # as Flux.2 is fed, by the batch norm of its VAE


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The form of the latents of an architecture."""

    scaling: Scaling = Scaling.AS_FED
    latents: str = "sample"  # `mode` or `sample`, as in the store's provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A sample of a cache, listed without reading its latent."""

    path: str  # of the file with its values, from the source's folder
    id: str = ""  # made of `image` if the cache records that
    image: str | None = None  # path of its image on the machine that cached it
    suffix: str = ""  # of its id, after the image's
    variant: str | None = ""  # the model's architecture as the cache calls it; None if it does not say
    at: tuple[int, int] | None = None  # offset and length of its values in the file, if that has several samples
    facts: Mapping[str, Any] = field(default_factory=dict)  # values that the listing has, by name
    captioned: str | None = None  # path of its caption files without extension; None: that of its image or id
    captions: tuple[str, ...] | None = None  # None: those of caption files
    problem: str | None = None  # why it cannot be imported, if the listing shows it


def prefixed(text: str, trigger: str | None) -> str:
    """Return a caption with the trigger word before it, if there is one."""
    return text if trigger is None else f"{trigger} {text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Importer:
    """A format: a table of what it is, and how to list it.

    `found` yields the samples in a folder, without reading their latents; a text among them is a note for the user. `read`
    returns an entry's values by name, and is called from threads. Their names are `latent`, `flipped` (of the mirrored image),
    `original` (size of the upright image), `resized` and `crop` (top and left in the resized image), in px and height first.
    """

    kind: str
    found: Callable[[Path], Iterable[CacheEntry | str]]
    read: Callable[[Path, CacheEntry], Mapping[str, Any]] | None = None  # None: `read_values` of the entry's file
    names: Mapping[str, str] = field(default_factory=dict)  # what the format calls values by other names
    left_out: tuple[str, ...] = ()  # names of values that a store does not take
    variants: Mapping[str, Variant] = field(default_factory=lambda: {"": Variant()})
    other: Variant | None = None  # a variant that is not listed; None: it is refused
    unknown: tuple[str, ...] = ()  # words in the names of variants whose scaling is not known
    has_crops: bool = False
    captions_in: str | None = None  # what of the cache has the captions; None: caption files in the source
    file_has: Literal["a caption per line", "one caption", "a caption in line 1"] = "a caption per line"
    triggered: Callable[[str, str | None], str] = prefixed  # a file's caption with the trigger word


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheListing:
    """A cache's entries and what holds for all of them."""

    entries: list[CacheEntry]
    variant: str
    form: Variant
    captions_from: str
    root: str  # folder from which the ids of images are their paths, with a slash at its end
    notes: list[str]


OUR_KINDS = ("kohya", "musubi", "simpletuner", "onetrainer", "ai-toolkit", "diffusion-pipe", "mds")
IMPORTERS: Extensions[Importer] = Extensions(
    "an importer called",
    "bucketline.importers",
    {name: f"bucketline.ingest.importers.formats.{name.replace('-', '_')}:IMPORTER" for name in OUR_KINDS},
    lambda found: isinstance(found, Importer),
)
