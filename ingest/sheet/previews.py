"""The page of `ingest previews`: latents shown by linear factors next to the same latents decoded by the VAE."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted
from bucketline.errors import UsageError
from bucketline.files.atomic_folder import refuse_existing
from bucketline.files.atomic_write import write_or_explain
from bucketline.ingest.sheet.crops import refuse_sheet
from bucketline.ingest.sheet.decoded import decode_each, decoding_vae
from bucketline.pages.image_files import jpeg, png
from bucketline.pages.page import Card, Section, document, parts
from bucketline.store.report.latent_rgb import LATENT_RGB, fit, published_for, rms_error, scaled
from bucketline.store.report.latents import drawn_rows, read_latents, vae_of, with_latents

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.store.read.store import Store
    from bucketline.store.report.latent_rgb import LatentRgb

FITTED_SHARE = 0.5  # of the drawn samples; the others measure the error
DECODED_PX = 256  # longer side of a decoded image on the page


@dataclass(frozen=True, slots=True, kw_only=True)
class Previews:
    """The content of the page in numbers, as `ingest previews --json` prints it."""

    page: str
    samples: int  # that measure the errors
    fitted_on: int
    published: str | None  # name of the published factors of the store's VAE
    published_rms: float | None  # root mean square error at the latents' size, 0 to 255
    fitted_rms: float
    gray_rms: float  # of a preview that is the mean colour of the decoded images, to compare with


def previews(
    store: Store, model: ModelFolder, page: Path, device: torch.device, *, count: int, save_factors: Path | None
) -> Previews:
    """Decode `count` samples drawn by hash, fit factors to half of them, and write the page, and the factors if requested."""
    refuse_sheet(page, [] if isinstance(store.place, str) else [store.path])
    if save_factors is not None:
        refuse_existing(save_factors, "file")
    vae = decoding_vae(store.encoders.get("vae"), model, device, "F32")
    ids, latents = _drawn(store, count)
    images = decode_each(vae, latents)
    own = vae_of(store)
    fed = [scaled(latent[None], own)[0] for latent in latents]
    half = max(1, round(FITTED_SHARE * len(fed)))
    fitted, _ = fit(fed[:half], images[:half], "fitted")
    rest = slice(half, None) if len(fed) > half else slice(None)
    published = published_for(own)
    result = Previews(
        page=str(page),
        samples=len(fed[rest]),
        fitted_on=half,
        published=None if published is None else published.name,
        published_rms=None if published is None else rms_error(published, fed[rest], images[rest]),
        fitted_rms=rms_error(fitted, fed[rest], images[rest]),
        gray_rms=_gray(images[:half], images[rest]),
    )
    if save_factors is not None:
        write_or_explain(save_factors, json.dumps(fitted.as_json(), indent=1).encode("ascii") + b"\n")
    columns = [*([published] if published else []), fitted]
    write_or_explain(page, _page(store, result, columns, ids[rest], fed[rest], images[rest]))
    return result


def _drawn(store: Store, count: int) -> tuple[list[str], list[NDArray[np.float32]]]:
    """Return ids and latents, `[C, h, w]` each, of samples from all buckets in turn."""
    buckets = [bucket for bucket in with_latents(store) if len(bucket.axes) == 2 and bucket.height_px]
    if not buckets:
        raise UsageError(f"{store.where} has no latents of images; `ingest previews` needs a store of images")
    ids: list[str] = []
    latents: list[NDArray[np.float32]] = []
    for n, bucket in enumerate(buckets):
        share = count // len(buckets) + (n < count % len(buckets))
        if share:
            rows = drawn_rows(store, bucket, share)
            ids += bucket.sample_ids(rows)
            latents += list(read_latents(store, bucket, rows))
    order = np.random.default_rng(0).permutation(len(ids))  # so that both halves have all buckets
    return [ids[n] for n in order], [latents[n] for n in order]


def _gray(known: list[NDArray[np.uint8]], shown: list[NDArray[np.uint8]]) -> float:
    mean = np.concatenate([image.reshape(-1, 3) for image in known]).mean(axis=0)
    return float(np.sqrt(np.mean([np.square(image - mean).mean() for image in shown])))


def _page(
    store: Store,
    result: Previews,
    columns: list[LatentRgb],
    ids: list[str],
    fed: list[NDArray[np.float32]],
    images: list[NDArray[np.uint8]],
) -> bytes:
    cards = [
        Card(images=[*(png(rgb.image(latent)) for rgb in columns), jpeg(image, DECODED_PX)], title=name)
        for name, latent, image in zip(ids, fed, images, strict=True)
    ]
    names = [*(f"{rgb.name} factors" for rgb in columns), "decoded"]
    errors = [
        ("published factors", result.published or "none for this VAE", _rms(result.published_rms)),
        ("fitted factors", columns[-1].source, _rms(result.fitted_rms)),
        ("the mean colour", "no preview, to compare with", _rms(result.gray_rms)),
    ]
    rows = [(f"channel {n}", *(f"{value:.4f}" for value in row)) for n, row in enumerate(columns[-1].factors)]
    rows.append(("bias", *(f"{value:.4f}" for value in columns[-1].bias)))
    known = ", ".join(LATENT_RGB)
    return document(
        title="Previews of latents",
        subtitle=str(store.place),
        made_by="ingest previews",
        sections=[
            Section(
                anchor="samples",
                title="Side by side",
                note=f"Of each sample, from left to right: {', '.join(names)}. None of them was used for the fit.",
                body=parts.sheet(cards, "large"),
            ),
            Section(
                anchor="errors",
                title="Errors",
                note=f"Root mean square difference from the decoded image at the latent's size, of 0 to 255, over "
                f"{counted(result.samples, 'sample')}. Factors are published for {known}.",
                body=parts.table(("preview", "from", "error"), errors, texts=2),
            ),
            Section(
                anchor="factors",
                title="Fitted factors",
                note="Of the scaled latent; red, green and blue from -1 to 1.",
                body=parts.table(("", "red", "green", "blue"), rows),
            ),
        ],
    )


def _rms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
