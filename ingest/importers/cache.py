"""Records of an importer: a cache's entries, listed without their values, and an entry's values once read.

Letters: C latent channels, F latent frames of a video, h and w the latent's height and width, H and W those of the image or of
its latent, T tokens of a caption, D width of a token.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from bucketline.errors import BucketlineError, SourceError
from bucketline.ingest.images.rejects import Reason, RejectedError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".jxl", ".tif", ".tiff", ".heic", ".gif")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """A sample of a cache, listed without reading its values."""

    id: str
    path: str  # of the file with its latent, from the source's folder
    image: str | None = None  # path of its image on the machine that cached it, if ids are made of these paths
    at: tuple[str | int, ...] = ()  # its place in that file, and whatever else the importer needs to find it
    text_path: str | None = None  # of the file with its text embedding
    is_text_older: bool = False  # than its caption file, and nothing else says of which caption it is
    captions: tuple[str, ...] | None = None  # None: they come with the values
    problem: str | None = None  # why it cannot be imported, if the listing shows it
    caption_problem: str | None = None  # why its caption file cannot be used
    stamp: tuple[int, int] | None = None  # length and mtime of its values, if these are a part of a larger file


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
    is_older: bool = False  # than the caption's file, so that it may be of another caption: it is encoded again


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """The values of an entry, as the cache has them."""

    latent: Tensor  # [C, h, w], of a video [C, F, h, w]
    geometry: Geometry
    flipped: Tensor | None = None  # [C, h, w], of the mirrored image
    captions: tuple[str, ...] | None = None  # None: those of the entry
    texts: tuple[Text, ...] = ()
    # what it has next to its latent, by role: `mask`, 0 to 1, or 0 to 255 in U8, [H, W], and `control/NAME`, like the latent
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    leaves_out: str | None = None  # what the cache also has and a store does not take, such as the image itself


@dataclass(slots=True, kw_only=True)
class CacheListing:
    """A cache's entries and what holds for all of them."""

    entries: list[CacheEntry]
    variant: str  # the model's architecture as the cache calls it; empty if it does not say
    scaling: Scaling
    control_scaling: Scaling | None = None  # of the columns `control/NAME`; None: that of the latents
    latents: str = "sample"  # `mode` or `sample`, as in the store's provenance
    family: str | None = None  # the text family whose layout the cache's embeddings have; None: it has none that can be kept
    text_refused: str | None = None  # why its captions can be stored only without embeddings
    text_unknown: str | None = None  # what is wrong if it has text embeddings, and none is of a caption that was found
    has_crops: bool = False
    captions_from: str = "the cache"
    vae: str | None = None  # what the cache says of its VAE
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRequest:
    """A source to list, and what the user says about it."""

    source: Path
    variant: str | None = None
    captions: Path | None = None  # folder of caption files
    trigger: str | None = None  # word that the trainer put into each caption


@dataclass(frozen=True, slots=True, kw_only=True)
class Importer:
    """A format: how to recognise, list and read it. `read` is a pure function of the files and is called from threads."""

    kind: str
    is_here: Callable[[Path], bool]
    listed: Callable[[ListRequest], CacheListing]
    read: Callable[[Path, CacheEntry, str], Cached]  # source, entry, variant


def files_below(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder's path from `folder` ('' for itself, others end in a slash) and its files' names, sorted.

    Raises:
        SourceError: if a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise SourceError(f"{error.filename} cannot be read: {error.strerror}; the list would not be complete") from error

    for path, folders, names in os.walk(folder, onerror=fail):
        folders.sort()
        inside = os.path.relpath(path, folder)
        yield ("" if inside == "." else f"{inside}/"), sorted(names)


def has_file(name: str | re.Pattern[str], folder: str | re.Pattern[str] = ".*") -> Callable[[Path], bool]:
    """Return the function that tells whether a source has a file of such a name, in a folder of such a path.

    The path is from the source's folder, '' for itself, and ends in a slash.
    """
    return lambda source: any(
        re.fullmatch(name, own) for inside, names in files_below(source) if re.fullmatch(folder, inside) for own in names
    )


def images_named(stem: str, names: set[str]) -> list[str]:
    """Return the names of the images that a cache file of this stem may belong to.

    >>> images_named("a", {"a.png", "a.txt"}), images_named("a", {"a.JPG", "a.png"}), images_named("a", set())
    (['a.png'], ['a.png', 'a.JPG'], [])
    """
    return [name for extension in _IMAGES for name in (stem + extension, stem + extension.upper()) if name in names]


def ids_of_paths(paths: Sequence[str]) -> dict[str, str]:
    """Return an id for each path: the path from the folder that all of them are in.

    >>> ids_of_paths(["/data/photos/cats/a.png", "/data/photos/b.png"])
    {'/data/photos/cats/a.png': 'cats/a.png', '/data/photos/b.png': 'b.png'}
    """
    plain = {path: path.replace("\\", "/") for path in paths}
    folders = {os.path.dirname(path) for path in plain.values()}  # noqa: PTH120 - a path of any machine
    try:
        shared = os.path.commonpath(folders) if folders else ""
    except ValueError:  # some absolute, some not
        shared = ""
    start = f"{shared.rstrip('/')}/" if shared else ""
    return {path: own.removeprefix(start).lstrip("/") for path, own in plain.items()}


def chosen_variant(
    found: Counter[str], request: ListRequest, kind: str, *, variants: str = "models", unknown: Sequence[str] = ()
) -> str:
    """Return the variant to import: the only one of the source, or the one that the user names; `variants` are what they are.

    Raises:
        SourceError: if the source has none, several and none is named, or not the named one, or if its name has a word of
            `unknown`: those of models whose scaling is not known.
    """
    if not found:
        raise SourceError(f"{request.source} has no latents in the format of {kind}; name the folder that has the cache")
    there = ", ".join(f"{name or 'unnamed'} ({count})" for name, count in found.most_common())
    if request.variant is not None:
        if request.variant not in found:
            raise SourceError(f"{request.source} has no latents of {request.variant!r:.80}, it has {there}; correct --variant")
    elif len(found) > 1:
        raise SourceError(f"{request.source} has latents of several {variants}: {there}; choose one by --variant NAME")
    variant = next(iter(found)) if request.variant is None else request.variant
    if any(word in variant.lower() for word in unknown):
        raise refuse_variant(kind, variant)
    return variant


def refuse_variant(kind: str, variant: str, why: str = "how they are scaled is unknown") -> SourceError:
    """Return the error for a variant that cannot be imported."""
    return SourceError(f"latents of {variant!r:.80} in the format of {kind} cannot be imported: {why}")


def damaged(what: str) -> RejectedError:
    """Return the error for an entry whose file does not hold what it should."""
    return RejectedError(Reason.CACHE, what)


@contextmanager
def odd_files_rejected(path: str) -> Iterator[None]:
    """Make a failure that a file causes a reject: the one place for what no trainer writes and an importer meets.

    Raises:
        RejectedError: if the block raises one, or any other error that does not say what to do.
    """
    try:
        yield
    except (RejectedError, BucketlineError):
        raise
    except Exception as error:
        what = "is damaged, or not as the trainer writes it"
        raise damaged(f"{path} {what} ({type(error).__name__}: {error!s:.150}); cache it again") from error


def squeezed(latent: Tensor, what: str = "latent") -> Tensor:
    """Return a latent without axes of length 1 before its channels or frames, `[C, h, w]`, or of a video `[C, F, h, w]`.

    Raises:
        RejectedError: if it is anything else.
    """
    shape = list(latent.shape)
    if latent.ndim == 5 and shape[0] == 1:
        latent = latent[0]
    if latent.ndim == 4 and latent.shape[1] == 1:
        latent = latent[:, 0]
    elif latent.ndim == 4 and latent.shape[0] == 1:
        latent = latent[0]
    if latent.ndim not in (3, 4) or 0 in shape or not latent.is_floating_point():
        raise damaged(f"its {what} is {str(latent.dtype).removeprefix('torch.')} {shape}, expected floats [C, h, w]")
    return latent


def pair(value: Any, what: str) -> tuple[int, int]:  # noqa: ANN401 - whatever a file holds
    """Return two whole numbers of a file, 0 or more.

    Raises:
        RejectedError: if it is anything else.
    """
    try:
        first, second = (int(number) for number in value)
    except (TypeError, ValueError, OverflowError):
        raise damaged(f"its {what} is {value!r:.80}, expected two numbers") from None
    if not (0 <= first < 1 << 31 and 0 <= second < 1 << 31):
        raise damaged(f"its {what} is {first}, {second}, expected two numbers, 0 or more")
    return first, second


def read_json(path: Path) -> Any:  # noqa: ANN401 - any JSON
    """Return a JSON file that describes a cache.

    Raises:
        SourceError: if it cannot be read or is damaged.
    """
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not JSON ({error!s:.100}); make the cache again, or restore the file") from error
