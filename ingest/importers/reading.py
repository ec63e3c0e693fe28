"""List a cache, and read its files without ever running what they hold.

Letters: T tokens, D width.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from bucketline.command_line import counted
from bucketline.errors import BucketlineError, SourceError, UsageError
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.importers.cache import CacheEntry, FileForm, Text, Variant, damaged, files_below, odd_files_rejected
from bucketline.ingest.sources.captions.files import JSON, CaptionFiles, lines_of
from bucketline.ingest.sources.source import SourceOptions, open_file, read_file
from bucketline.store.format.block import POOLED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from bucketline.ingest.importers.cache import Importer, ListRequest, Spelled


_MAX_UNPACKED_BYTES = 256 << 20  # of a compressed file, or of the members of one
_GZIP, _ZIP = b"\x1f\x8b", b"PK"


def read_whole(source: Path, path: str) -> bytes:
    return read_file(f"{source}/{path}", source)[0]


def read_npz(source: Path, path: str) -> Mapping[str, Any]:
    """Return the arrays of an npz file, each decoded when it is used."""
    data = read_whole(source, path)
    if not data.startswith(_ZIP):
        raise damaged(f"{path} is not an npz file")
    with odd_files_rejected(path):
        if (total := _unpacked_bytes(data)) > max(_MAX_UNPACKED_BYTES, len(data)):
            raise ValueError(f"{total} bytes unpacked, expected at most {_MAX_UNPACKED_BYTES}")
        arrays: Mapping[str, Any] = np.load(io.BytesIO(data), allow_pickle=False)
        return arrays


def read_torch(source: Path, path: str) -> Any:  # noqa: ANN401 - tensors in whatever containers the trainer used
    """Return the content of a file written by `torch.save`, gzipped or not, as `torch.load(weights_only=True)` reads it."""
    return loaded(read_whole(source, path), path)


def loaded_dict(data: bytes, what: str) -> dict[str, Any]:
    """Return the dictionary that `torch.save` wrote into `data`; as `read_torch`."""
    found = loaded(data, what)
    if not isinstance(found, dict):
        raise damaged(f"{what} holds a {type(found).__name__}, expected a dictionary")
    return found


def loaded(data: bytes, what: str) -> Any:  # noqa: ANN401 - as above
    """Return what `torch.save` wrote into `data`; as `read_torch`. Its tensors have values of their own, in memory."""
    with odd_files_rejected(what):
        if data.startswith(_GZIP):
            unpacking = zlib.decompressobj(zlib.MAX_WBITS | 16)
            data = unpacking.decompress(data, _MAX_UNPACKED_BYTES)
            if not unpacking.eof:
                raise ValueError(f"truncated gzip, or more than {_MAX_UNPACKED_BYTES} bytes uncompressed")
        if data.startswith(_ZIP) and (total := _unpacked_bytes(data)) > len(data):  # `torch.save` compresses nothing
            raise damaged(f"{what} has more bytes unpacked, {total}, than it has itself, {len(data)}; save it by torch.save")
        try:
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            first = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), "")
            raise damaged(f"{what} needs unpickling beyond tensors, which is never done ({first or error!s:.150})") from error
    if isinstance(found, dict):
        return {
            name: _plain(value, f"{what}, {name!s:.80}", len(data)) if isinstance(value, torch.Tensor) else value
            for name, value in found.items()
        }
    return _plain(found, what, len(data)) if isinstance(found, torch.Tensor) else found


def _unpacked_bytes(data: bytes) -> int:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return sum(info.file_size for info in archive.infolist())


def _plain(value: Tensor, what: str, num_bytes: int) -> Tensor:
    """Return a tensor whose values a file of `num_bytes` holds."""
    value = value.detach()  # of a parameter, a plain tensor
    is_plain = type(value) is torch.Tensor and not value.is_nested and not value.is_quantized
    if not is_plain or value.layout is not torch.strided or value.device.type != "cpu":
        kind = f"{value.device.type} {'nested' if value.is_nested else value.layout} {value.dtype}".replace("torch.", "")
        raise damaged(f"{what} is a tensor of another kind ({kind}), expected one with all its values")
    if value.numel() * value.itemsize > num_bytes:
        raise damaged(
            f"{what} has the shape {list(value.shape)}, {value.numel() * value.itemsize} bytes, and its file {num_bytes}; "
            "save it by tensor.contiguous()"
        )
    return value


def read_safetensors(source: Path, path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file."""
    from safetensors.torch import load

    data = read_whole(source, path)
    with odd_files_rejected(path):
        length = int.from_bytes(data[:8], "little")
        return load(data), json.loads(data[8 : 8 + length]).get("__metadata__") or {}


def read_metadata(source: Path, path: str) -> dict[str, str]:
    """Return only the metadata of a safetensors file."""
    with open_file(f"{source}/{path}", source) as file, odd_files_rejected(path):
        length = int.from_bytes(file.read(8), "little")
        metadata = json.loads(file.read(min(length, os.fstat(file.fileno()).st_size)))["__metadata__"]
        return {str(name): str(value) for name, value in metadata.items()}


def read_part(source: Path, path: str, offset: int, length: int) -> bytes:
    with open_of_any_size(source, path) as descriptor:
        try:
            data = os.pread(descriptor.fileno(), length, offset)
        except OSError as error:
            raise RejectedError(Reason.UNREADABLE, error.strerror or str(error)) from error
    if len(data) < length:
        raise damaged(f"{path} ends at {offset + len(data)}, before the sample's last byte at {offset + length}")
    return data


def open_of_any_size(source: Path, path: str) -> BinaryIO:
    """Open a shard, which may be larger than a sample's file may be."""
    return open_file(f"{source}/{path}", source, sys.maxsize)


def as_tensor(values: Mapping[str, Any], name: str) -> Tensor:
    value = values.get(name)
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value)
        except (TypeError, ValueError):  # text, other byte orders, long doubles
            raise damaged(f"its {name} is {value.dtype} {list(value.shape)}, expected an array of numbers") from None
    raise damaged(f"it has no array {name!r}, only {', '.join(sorted(map(str, values)))[:200] or 'nothing'}")


def names_in(found: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """Return those of some names under which a file has a value."""
    return tuple(name for name in names if found.get(name) is not None)


def text_of(caption: str, tokens: Tensor, pooled: Tensor | None = None) -> Text:
    """Return a caption's embedding: its tokens [T, D], without a batch dimension of 1, and what is pooled of it."""
    if tokens.ndim == 3 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.ndim != 2:
        raise damaged(f"the tokens of its caption are {list(tokens.shape)}, expected [T, D]")
    fixed = {} if pooled is None else {POOLED: pooled.float().reshape(-1)}
    return Text(caption=caption, tokens=tokens.float(), fixed=fixed)


# --------------------------------------------------------------------------------------------------------------------- listing
# List a cache: the samples that a format finds, with their ids, and with their captions as the trainer made them of files.
#
# A trainer may take a file as one caption or a line of it, and put a trigger word in. If its text embeddings are called by a
# digest of their caption, `_EmbeddedCaptions` finds out which of these it was; elsewhere `FileForm` says what the trainer
# does.


@dataclass(slots=True, kw_only=True)
class CacheListing:
    """A cache's entries and what holds for all of them."""

    entries: list[CacheEntry]
    variant: str
    form: Variant
    family: str | None  # the text family whose layout the cache's embeddings have; None: it has none that can be kept
    captions_from: str
    root: str  # folder from which the ids of images are their paths, with a slash at its end
    text_unknown: str | None = None  # what is wrong if it has text embeddings, and none is of a caption that was found
    notes: list[str] = field(default_factory=list)


def listed(importer: Importer, request: ListRequest) -> CacheListing:
    try:
        return _listed(importer, request)
    except BucketlineError:
        raise
    except Exception as error:
        raise SourceError(
            f"{request.source}: the files that list this cache of {importer.kind} are not as the trainer writes them "
            f"({type(error).__name__}: {error!s:.150}); cache it again, or restore them"
        ) from error


def _listed(importer: Importer, request: ListRequest) -> CacheListing:
    captions, found = _CaptionFolder(request, importer), importer.found(request)
    counts = Counter(dict.fromkeys(found.variants, 0))
    counts.update(entry.variant for entry in found.entries if entry.variant is not None)
    variant, form = _chosen(counts, request, importer)
    kept = [entry for entry in found.entries if entry.variant in (variant, None)]
    images = [entry.image.replace("\\", "/") for entry in kept if entry.image is not None]
    shared = shared_folder(images)
    root = shared if request.root is None or not any(image.startswith(request.root) for image in images) else request.root
    known = None if importer.embedded is None else _EmbeddedCaptions(captions, found.texts)
    times, entries = Counter[str](), list[CacheEntry]()
    for entry in kept:
        base, named, text_path = entry.id, entry.captioned or entry.id, entry.text_path
        if entry.image is not None:
            base, named = (entry.image.replace("\\", "/").removeprefix(start).lstrip("/") for start in (root, shared))
        if known is None or importer.embedded is None:
            own, problem = captions.of(named, in_cache=entry.captions)
        else:
            own, problem, text_path = known.of(named, partial(importer.embedded, entry, variant), entry.uncaptioned)
        sample_id = base + entry.suffix
        times[sample_id] += 1
        sample_id = sample_id if times[sample_id] == 1 else sample_id + entry.again
        entries.append(replace(entry, id=sample_id, text_path=text_path, captions=own, caption_problem=problem))
    listing = CacheListing(
        entries=entries,
        variant=variant,
        form=form,
        family=form.family if any(entry.text_path for entry in entries) else None,
        captions_from=captions.told,
        root=root,
        notes=[*found.notes],
    )
    if captions.shortened:
        files = counted(captions.shortened, "caption file")
        listing.notes.append(f"{files} with several lines: the first is taken, as sd-scripts does")
    if known is not None:
        known.tell(listing, importer.causes)
    return listing


def _chosen(found: Counter[str], request: ListRequest, importer: Importer) -> tuple[str, Variant]:
    """Return the variant to import: the only one of the source, or the one that the user names."""
    if not found:
        raise SourceError(f"{request.source} has no latents in the format of {importer.kind}; name the folder of its cache")
    there = ", ".join(f"{name or 'unnamed'} ({count})" for name, count in found.most_common())
    if request.variant is not None and request.variant not in found:
        raise SourceError(f"{request.source} has no latents of {request.variant!r:.80}, it has {there}; correct --variant")
    if request.variant is None and len(found) > 1:
        raise SourceError(f"{request.source} has latents of several models or sizes: {there}; choose one by --variant NAME")
    variant = next(iter(found)) if request.variant is None else request.variant
    form = importer.variants.get(variant, importer.other)
    if form is None or any(word in variant.lower() for word in importer.unknown):
        known = f"; known are {', '.join(importer.variants)}" if form is None else ""
        form = Variant(why_not=f"how they are scaled is unknown{known}")
    if form.why_not is not None:
        raise SourceError(f"latents of {variant!r:.80} in the format of {importer.kind} cannot be imported: {form.why_not}")
    return variant, form


def shared_folder(paths: Sequence[str]) -> str:
    """Return the folder that all paths are in, with a slash at its end; an empty text if there is none.

    >>> shared_folder(["/data/photos/cats/a.png", "/data/photos/b.png"])
    '/data/photos/'
    """
    try:
        shared = os.path.commonpath({os.path.dirname(path) for path in paths})  # noqa: PTH120 - a path of any machine
    except ValueError:  # no paths, or some absolute, some not
        return ""
    return f"{shared.rstrip('/')}/" if shared else ""


class _CaptionFolder:
    """The caption files below a folder, or the captions that a cache has itself."""

    def __init__(self, request: ListRequest, importer: Importer) -> None:
        """List the folder that the user names; without one, the source, unless the cache has the captions."""
        self._importer, self._trigger = importer, request.trigger
        self._files: CaptionFiles | None = None
        self.shortened = 0  # captions of several lines, of which one is used
        if request.captions is None and importer.captions_in is not None:
            if request.trigger is not None:
                raise UsageError(
                    f"--trigger {request.trigger} is for captions of files, and those of this cache are from "
                    f"{importer.captions_in}; name the files' folder by --captions, or leave --trigger out"
                )
            self.told = importer.captions_in
            return
        folder = request.captions or request.source
        self.told = "files of the source" if request.captions is None else "--captions"
        if not folder.is_dir():
            raise SourceError(f"{folder} is not a folder; expected one with caption files, NAME.txt for NAME.png")
        self._files = CaptionFiles(folder=folder, options=SourceOptions())
        self._files.names = replace(self._files.names, is_whole=True)
        for inside, names in files_below(folder):
            for name in names:
                self._files.add(inside + name, os.path.splitext(name)[1].lower())  # noqa: PTH122 - as in a listing

    def of(self, name: str, in_cache: tuple[str, ...] | None) -> tuple[tuple[str, ...] | None, str | None]:
        """Return an image's captions, and why they cannot be used if they cannot; `in_cache`: of the cache."""
        if self._files is None:
            return in_cache, None
        forms, problem = self.forms(name)
        return ((), problem) if problem is not None else (self.usual(forms), None)

    def forms(self, name: str) -> tuple[list[tuple[str, ...]], str | None]:
        """Return the texts of a caption file, as one and then by lines if it has several; why they are unusable."""
        assert self._files is not None
        (texts, problem), extension = self._files.find(_with_dot(name))
        lines = lines_of(texts[0]) if texts and extension != JSON else ()
        return [texts, lines] if len(lines) > 1 else [texts], problem

    def usual(self, forms: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        """Return the captions that the trainer usually makes of a file; of none, the trigger word if there is one."""
        texts = forms[0] if self._importer.form is FileForm.WHOLE else forms[-1]
        if self._importer.form is FileForm.FIRST_LINE and len(forms) > 1:
            self.shortened += 1
            texts = texts[:1]
        captions = [self.spelled(text)[0][0] for text in texts or ("",)]
        return tuple(caption for caption in captions if caption)

    def spelled(self, text: str) -> list[Spelled]:
        """Return the captions that a text of a file may have become, the usual one first."""
        return list(dict.fromkeys(self._importer.spelled(text, self._trigger)))


class _EmbeddedCaptions:
    """A cache's text embeddings in files that are called by a digest of their caption, which tells what was embedded."""

    def __init__(self, captions: _CaptionFolder, paths: Mapping[str, str]) -> None:
        self._captions, self._paths, self._used = captions, paths, set[str]()
        self._found = self._missing = 0  # samples with a caption that has an embedding, and with only others
        self._whole = 0  # files of several lines that were embedded as one caption

    def of(
        self, name: str, names: Callable[[str], Mapping[str, bool]], unless_in_file: Sequence[str]
    ) -> tuple[tuple[str, ...], str | None, str | None]:
        """Return an image's captions, why they cannot be used if they cannot, and the file with the first one's embedding.

        `names` returns what a caption's embedding may be called, and whether it is then of the model that is imported;
        `unless_in_file` are texts that the trainer takes of images without a caption file.
        """
        forms, problem = self._captions.forms(name)
        for embedded in {"", *(embedded for _, embedded in self._captions.spelled(""))}:  # of captions that were dropped
            self._used |= names(embedded).keys() & self._paths.keys()
        if problem is not None:
            return (), problem, None
        for texts in forms if forms[0] else [(text,) for text in (*unless_in_file, "")]:
            found = [self._embedded(text, names) for text in texts]
            if hits := [one for one in found if one[1]]:
                self._found += 1
                self._whole += len(forms) > 1 and texts is forms[0]
                captions = (*(stored for stored, _ in hits), *(stored for stored, there in found if not there))
                return captions, None, next((self._paths[one] for one, is_own in hits[0][1].items() if is_own), None)
        captions = self._captions.usual(forms)
        self._missing += bool(captions)
        return captions, None, None

    def _embedded(self, text: str, names: Callable[[str], Mapping[str, bool]]) -> tuple[str, Mapping[str, bool]]:
        """Return the caption that a text became, and those of `names` that are there; the usual caption if none is."""
        spelled = self._captions.spelled(text)
        for stored, embedded in spelled:
            there = {name: is_own for name, is_own in names(embedded).items() if name in self._paths}
            if there and stored:
                self._used |= there.keys()
                return stored, there
        return spelled[0][0], {}

    def tell(self, listing: CacheListing, causes: str) -> None:
        """Note in a listing how many captions and embeddings have no counterpart, and whether none has."""
        if self._whole:
            files = f"{counted(self._whole, 'caption file')} with several lines {'is' if self._whole == 1 else 'are'}"
            listing.notes.append(f"{files} one caption each, as the trainer embedded it")
        unknown = len(self._paths) - len(self._used)
        embeddings = counted(unknown, "text embedding")
        if unknown and not self._found:
            listing.text_unknown = f"none of the cache's {embeddings} is of a caption that is here"
            listing.notes.append(listing.text_unknown)
        elif self._missing:
            captions = f"{counted(self._missing, 'caption')} {'has' if self._missing == 1 else 'have'}"
            listing.notes.append(f"{captions} no embedding in the cache, which has {unknown} of captions that are not here")
        elif unknown:
            listing.notes.append(f"the cache has {embeddings} of captions that are not here")
        if self._missing or listing.text_unknown is not None:
            listing.notes.append(f"likely causes: {causes}; --text encode takes the captions as they are here")


def _with_dot(name: str) -> str:
    """Return a name of an image, by which its caption files are found, with a dot before the extension that it may lack."""
    return name if "." in name.rpartition("/")[2] else f"{name}."
