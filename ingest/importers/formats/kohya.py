"""Caches of kohya-ss/sd-scripts: npz files next to the images.

`NAME_WWWWxHHHH_MODEL.npz`, or `NAME.npz` of SD and SDXL, has a latent; W and H are the original's size, never the bucket's.
SD3, FLUX and later models append `_{h}x{w}` to each key, and may have several sizes in a file: each becomes a sample.
`crop_ltrb` is what the trainer computed, not what it cropped, so it is not read. The text is in a file of its own, its caption
only in the caption file next to the image, so that the text may be of an older caption if that file is newer. Of several lines
the trainer takes the first, or with `enable_wildcard` any. Two images of one name and size share a file. Source:
`strategy_base.py` and `strategy_*.py` of version 0.10.1.
"""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bucketline.command_line import counted
from bucketline.ingest.images.rejects import RejectedError
from bucketline.ingest.importers import cache
from bucketline.ingest.importers.reading.caption_folder import CaptionFolder, FileForm
from bucketline.ingest.importers.reading.npz import read_npz
from bucketline.ingest.importers.reading.read_files import as_tensor
from bucketline.ingest.importers.reading.text_layouts import sd3_tokens, sdxl_tokens, text_of
from bucketline.ingest.sources.local_files import open_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from numpy.typing import NDArray


OLD = "sd or sdxl"  # `NAME.npz`, which does not tell the two apart
_NAME = re.compile(r"(?P<stem>.+)_(?P<width>\d{4,})x(?P<height>\d{4,})_(?P<model>sd|sdxl|sd3|flux|lumina|hi|anima)\.npz")
_TEXTS = {"sdxl": "_te_outputs", "sd3": "_sd3_te", "flux": "_flux_te"}  # suffix of those whose layout `ingest pack` has too
_TEXT_FILE = re.compile(r".+_(te_outputs|(sd3|flux|lumina|hi|anima)_te)\.npz")
_SCALED = ("flux", "lumina", "anima")
_SEVERAL_SIZES = ("sd3", "flux", "lumina", "hi", "anima")
_KEY = re.compile(r"latents((_\d+x\d+)?)\.npy")


def _listed(request: cache.ListRequest) -> cache.CacheListing:
    captions = CaptionFolder(request, form=FileForm.FIRST_LINE)
    found: dict[str, list[tuple[str, str, str, set[str]]]] = {}  # folder, file, stem, all names; by model
    for folder, names in cache.files_below(request.source):
        own = set(names)
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None and (not name.endswith(".npz") or _TEXT_FILE.fullmatch(name)):
                continue
            model, stem = (match["model"], match["stem"]) if match else (OLD, name.removesuffix(".npz"))
            found.setdefault(model, []).append((folder, name, stem, own))
    variant = cache.chosen_variant(Counter({model: len(files) for model, files in found.items()}), request, "kohya")
    family = variant if variant in _TEXTS else None
    num_files = Counter((folder, stem) for folder, _, stem, _ in found[variant])
    entries = []
    for folder, name, stem, own in found[variant]:
        images = cache.images_named(stem, own)
        sample_id = folder + (images[0] if len(images) == 1 else stem)
        is_shared = len(images) > num_files[folder, stem]
        text = f"{stem}{_TEXTS[variant]}.npz" if family else ""
        texts, problem = captions.of(sample_id, stem=folder + stem)
        text_path = folder + text if text in own else None
        is_older = text_path is not None and captions.is_newer(sample_id, request.source / text_path, stem=folder + stem)
        suffixes = _suffixes(request.source, folder + name) if variant in _SEVERAL_SIZES else [""]
        entries += [
            cache.CacheEntry(
                id=sample_id if len(suffixes) == 1 else f"{sample_id}/{suffix.removeprefix('_')}",
                path=folder + name,
                at=(suffix,),
                text_path=text_path,
                is_text_older=is_older,
                captions=texts,
                problem=f"{' and '.join(images)} share it; rename one, and cache both again" if is_shared else None,
                caption_problem=problem,
            )
            for suffix in suffixes
        ]
    return cache.CacheListing(
        entries=_one_each(entries),
        variant=variant,
        scaling=cache.Scaling.AS_FED if variant in _SCALED else cache.Scaling.NONE,
        family=family if any(entry.text_path for entry in entries) else None,
        captions_from=captions.told,
        notes=[f"{counted(captions.shortened, 'caption file')} with several lines: the first is taken, as sd-scripts does"]
        if captions.shortened
        else [],
    )


def _suffixes(source: Path, path: str) -> list[str]:
    """Return what the keys of a file's latents end in; one, found or not, if it cannot be read."""
    try:
        with open_file(f"{source}/{path}", source) as file, zipfile.ZipFile(file) as members:
            found = [match[1] for name in members.namelist() if (match := _KEY.fullmatch(name))]
    except (RejectedError, OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        found = []
    return sorted(found) or [""]


def _one_each(entries: list[cache.CacheEntry]) -> list[cache.CacheEntry]:
    """Return the entries with an id each: two caches of one image, of other sizes of the original, keep their file names."""
    times = Counter(entry.id for entry in entries)
    return [
        entry if times[entry.id] == 1 else replace(entry, id=entry.path.removesuffix(".npz") + str(entry.at[0]))
        for entry in entries
    ]


def _read(source: Path, entry: cache.CacheEntry, variant: str) -> cache.Cached:
    arrays, suffix = read_npz(source, entry.path), str(entry.at[0])
    width, height = _original(arrays, suffix, entry)
    flipped = f"latents_flipped{suffix}"
    mask = next((name for name in (f"alpha_mask{suffix}", "alpha_mask") if name in arrays), None)
    return cache.Cached(
        latent=cache.squeezed(as_tensor(arrays, f"latents{suffix}")),
        flipped=None if flipped not in arrays else cache.squeezed(as_tensor(arrays, flipped), "flipped latent"),
        geometry=cache.Geometry(original=(height, width)),
        texts=_texts(source, entry, variant),
        columns={} if mask is None else {"mask": as_tensor(arrays, mask)},
    )


def _original(arrays: Mapping[str, NDArray[Any]], suffix: str, entry: cache.CacheEntry) -> tuple[int, int]:
    """Return the original's width and height, as the file has them, else as its name does."""
    for name in (f"original_size{suffix}", "original_size"):
        if name in arrays:
            return cache.pair(arrays[name].reshape(-1)[:3].tolist(), "original_size")
    match = _NAME.fullmatch(entry.path.rpartition("/")[2])
    if match is None:
        raise cache.damaged(f"it has no original_size, only {', '.join(sorted(arrays))[:200]}")
    return int(match["width"]), int(match["height"])


def _texts(source: Path, entry: cache.CacheEntry, variant: str) -> tuple[cache.Text, ...]:
    if entry.text_path is None or not entry.captions:
        return ()
    arrays = read_npz(source, entry.text_path)
    for name in ("apply_lg_attn_mask", "apply_t5_attn_mask"):
        if name in arrays and bool(arrays[name].any()):
            raise cache.damaged(
                f"{entry.text_path} has {name}: its padding is zeros, which the model's own pipeline does not see"
            )

    def own(name: str) -> torch.Tensor:
        return as_tensor(arrays, name).float()

    if variant == "sdxl":
        tokens, pooled = sdxl_tokens(own("hidden_state1"), own("hidden_state2")), own("pool2")
    elif variant == "sd3":
        tokens, pooled = sd3_tokens(own("lg_out"), own("t5_out")), own("lg_pooled")
    else:
        tokens, pooled = own("t5_out"), own("l_pooled")
    return (text_of(entry.captions[0], tokens, pooled, is_older=entry.is_text_older),)


IMPORTER = cache.Importer(kind="kohya", is_here=cache.has_file(_NAME), listed=_listed, read=_read)
