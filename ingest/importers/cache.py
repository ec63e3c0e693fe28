"""Records of a format and of a cache, and the formats that `ingest import` knows.

Letters: C latent channels, h and w the latent's height and width, T tokens of a caption, D width of a token.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from bucketline.errors import BucketlineError, SourceError, UsageError
from bucketline.extensions import Extensions
from bucketline.ingest.images.crop import Reason, RejectedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor


Spelled: TypeAlias = "tuple[str, str]"  # a caption as it is stored, and as the trainer embeds it; often with other white space


class Scaling(StrEnum):
    """The form in which a cache stores the VAE's output."""

    NONE = "none"
    AS_FED = "as fed to the model"  # (z - shift) x scale, or (z - mean) / std x scale, by the VAE's constants
    PACKED = "packed 2 x 2 and normalised"  # as Flux.2 is fed, by the batch norm of its VAE


class Crops(StrEnum):
    """The origin of the crops of imported images."""

    SOURCE = "source"  # as the cache records it
    CENTER = "center"  # computed, because the user says that images were cropped to their centre
    UNKNOWN = "unknown"


class FileForm(StrEnum):
    """The part of a caption file that a trainer takes as a caption."""

    WHOLE = "one caption"
    LINES = "a caption per line"
    FIRST_LINE = "the first line"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A sample of a cache, listed without reading its values."""

    path: str  # of the file with its latent, from the source's folder
    id: str = ""  # made of `image` if the cache records that
    image: str | None = None  # path of its image on the machine that cached it
    variant: str | None = ""  # the model's architecture as the cache calls it; None if its file is too damaged to say
    at: tuple[Any, ...] = ()  # its place in the file
    facts: Mapping[str, Any] = field(default_factory=dict)  # what else the listing says and reading needs, such as sizes
    text_path: str | None = None  # of the file with its text embedding
    suffix: str = ""  # of its id, after the image's
    again: str = ""  # what follows the suffix if another sample has the same id
    captioned: str | None = None  # name by which its caption files are found; None: its id without suffix
    uncaptioned: tuple[str, ...] = ()  # texts that the trainer takes if there is no caption file
    captions: tuple[str, ...] | None = None  # of the cache; None: they come with the values
    problem: str | None = None  # why it cannot be imported, if the listing shows it
    caption_problem: str | None = None  # why its caption file cannot be used
    stamp: tuple[int, int] | None = None  # length and mtime of its values, if these are a part of a larger file


@dataclass(slots=True, kw_only=True)
class FoundEntries:
    """The samples that a format finds in a folder."""

    entries: Sequence[CacheEntry]
    texts: Mapping[str, str] = field(default_factory=dict)  # path of each text embedding, by what `Importer.embedded` names
    notes: list[str] = field(default_factory=list)
    variants: Iterable[str] = ()  # that are there, also without entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Size of the source image and where it was cropped, in px, height first; None for what the cache does not say."""

    original: tuple[int, int] | None = None  # upright
    resized: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None  # top and left in the resized image


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A caption's embedding, in the layout that `ingest pack` stores for the model's family."""

    caption: str
    tokens: Tensor  # [T, D]
    fixed: Mapping[str, Tensor] = field(default_factory=dict)  # such as `pooled` [D']


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """The values of an entry, as the cache has them."""

    latent: Tensor  # [C, h, w]
    geometry: Geometry
    flipped: Tensor | None = None  # [C, h, w], of the mirrored image
    captions: tuple[str, ...] | None = None  # None: those of the entry
    texts: tuple[Text, ...] = ()
    left_out: tuple[str, ...] = ()  # what the cache has next to them and is not imported, such as masks


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The form of the caches of an architecture."""

    scaling: Scaling = Scaling.AS_FED
    latents: str = "sample"  # `mode` or `sample`, as in the store's provenance
    family: str | None = None  # the text family whose layout the embeddings have; None: they cannot be kept
    why_not: str | None = None  # why it cannot be imported


def prefixed(text: str, trigger: str | None) -> list[Spelled]:
    """Return a text as the caption that it becomes, with the trigger word before it if there is one."""
    caption = text.strip() if trigger is None else f"{trigger} {text.strip()}".strip()
    return [(caption, caption)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRequest:
    """A source to list, and what the user says about it."""

    source: Path
    variant: str | None = None
    captions: Path | None = None  # folder of caption files
    trigger: str | None = None  # word that the trainer put into each caption
    root: str | None = None  # folder from which the ids of images are their paths; None: the one that all are in


@dataclass(frozen=True, slots=True, kw_only=True)
class Importer:
    """A format: how to list and read it. `read` is a pure function of the files and is called from threads."""

    kind: str
    found: Callable[[ListRequest], FoundEntries]
    read: Callable[[Path, CacheEntry, str], Cached]  # source, entry, variant
    variants: Mapping[str, Variant] = field(default_factory=lambda: {"": Variant()})
    other: Variant | None = None  # a variant that is not listed; None: it is refused
    unknown: tuple[str, ...] = ()  # words in the names of variants whose scaling is not known
    has_crops: bool = False
    captions_in: str | None = None  # what of the cache has the captions; None: caption files in the source
    form: FileForm = FileForm.LINES  # of the caption files
    # what may become of a file's text and the trigger word, what the trainer usually makes of them first
    spelled: Callable[[str, str | None], Iterable[Spelled]] = prefixed
    # of an entry, the variant and a caption: names of embeddings that may be there, and whether they are of the variant
    embedded: Callable[[CacheEntry, str, str], Mapping[str, bool]] | None = None
    causes: str = ""  # why a caption may have no embedding


def files_below(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder's path from `folder` ('' for itself, others end in a slash) and its files' names, sorted."""

    def fail(error: OSError) -> None:
        raise SourceError(f"{error.filename} cannot be read: {error.strerror}; the list would not be complete") from error

    for path, folders, names in os.walk(folder, onerror=fail):
        folders.sort()
        inside = os.path.relpath(path, folder)
        yield ("" if inside == "." else f"{inside}/"), sorted(names)


def damaged(what: str) -> RejectedError:
    """Return the error for an entry whose file does not hold what it should."""
    return RejectedError(Reason.CACHE, what)


@contextmanager
def odd_files_rejected(path: str) -> Iterator[None]:
    """Make a failure that a file causes a reject: the one place for what no trainer writes and an importer meets."""
    try:
        yield
    except (RejectedError, BucketlineError):
        raise
    except Exception as error:
        what = "is damaged, or not as the trainer writes it"
        raise damaged(f"{path} {what} ({type(error).__name__}: {error!s:.150}); cache it again") from error


def squeezed(latent: Tensor, what: str = "latent") -> Tensor:
    """Return a latent without axes of length 1 before its channels or after them, `[C, h, w]`."""
    shape = list(latent.shape)
    if latent.ndim == 5 and shape[0] == 1:
        latent = latent[0]
    if latent.ndim == 4 and latent.shape[1] == 1:
        latent = latent[:, 0]
    elif latent.ndim == 4 and latent.shape[0] == 1:
        latent = latent[0]
    if latent.ndim != 3 or 0 in shape or not latent.is_floating_point():
        kind = "of a video, " if latent.ndim == 4 else ""
        raise damaged(f"its {what} is {kind}{str(latent.dtype).removeprefix('torch.')} {shape}, expected floats [C, h, w]")
    return latent


def pair(value: Any, what: str) -> tuple[int, int]:  # noqa: ANN401 - whatever a file holds
    """Return two whole numbers of a file, 0 or more."""
    try:
        first, second = (int(number) for number in value)
    except (TypeError, ValueError, OverflowError):
        raise damaged(f"its {what} is {value!r:.80}, expected two numbers") from None
    if not (0 <= first < 1 << 31 and 0 <= second < 1 << 31):
        raise damaged(f"its {what} is {first}, {second}, expected two numbers, 0 or more")
    return first, second


def read_json(path: Path) -> Any:  # noqa: ANN401 - any JSON
    """Return a JSON file that describes a cache."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not JSON ({error!s:.100}); make the cache again, or restore the file") from error


# -------------------------------------------------------------------------------------------------------------------- registry

OUR_KINDS = ("kohya", "musubi", "simpletuner", "onetrainer", "ai-toolkit", "diffusion-pipe", "mds")
IMPORTERS: Extensions[Importer] = Extensions(
    "an importer called",
    "bucketline.importers",
    {name: f"bucketline.ingest.importers.formats.{name.replace('-', '_')}:IMPORTER" for name in OUR_KINDS},
    lambda found: isinstance(found, Importer),
)


def importer_of(kind: str) -> Importer:
    importer = IMPORTERS[kind]
    if importer.kind != kind:
        raise UsageError(f"an importer called {kind!r} has the kind {importer.kind!r}, expected the same; update its package")
    return importer
