"""The words at the top of a report: what is wrong in a store, and what was checked and is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bucketline.command_line import counted, human_number
from bucketline.pages.page import Finding, percent
from bucketline.store.report.published_vaes import PUBLISHED, TITLES, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from bucketline.store.report.collect import Facts, ListFacts
    from bucketline.store.report.latents import LatentFacts
    from bucketline.typed_json import Json

FEW_LATENTS = 100  # of which the spread says more of their images than of their VAE
SPREAD_WARNS = (0.8, 1.2)  # of latents as a model is fed, where 1 is expected
SPREAD_FAILS = (0.6, 1.7)
MUCH_CROPPED = 0.4  # mean share that crops remove in a bucket
MANY_REJECTS = 0.01  # of the images found
FEW_CAPTIONS = 0.05  # samples without one


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpread:
    """Latents as a model is fed, by channel and over all values, and how far they are from what the VAE's constants promise."""

    mean: NDArray[np.float64]  # [C]
    std: NDArray[np.float64]  # [C]
    rms: float  # around 0; 1 is expected


def spread_of(facts: LatentFacts, vae: Mapping[str, Json]) -> ChannelSpread:
    """Return the spread of latents after the VAE's own centring and scaling."""
    factor = number(vae, "scaling_factor", 1.0)
    mean, std = (
        np.array(found) if isinstance(found, list) else None for found in (vae.get("latents_mean"), vae.get("latents_std"))
    )
    shift = number(vae, "shift_factor", 0.0) if mean is None else mean
    scale = factor if std is None else factor / std
    fed_mean, fed_std = (facts.mean - shift) * scale, facts.std * scale
    rms = float(np.sqrt((np.square(fed_mean) + np.square(fed_std)).mean())) if len(facts.mean) else 0.0
    return ChannelSpread(mean=fed_mean, std=fed_std, rms=rms)


def findings(*, facts: Facts, lists: ListFacts, latents: LatentFacts, vae: Mapping[str, Json]) -> list[Finding]:
    """Return the findings of a store."""
    return [
        *_of_latents(latents, vae),
        *_of_crops(facts),
        *_of_captions(facts, lists),
        *_of_rejects(facts, lists),
    ]


def _of_latents(facts: LatentFacts, vae: Mapping[str, Json]) -> Iterator[Finding]:
    if not facts.read:
        return
    read = f"{counted(facts.read, 'latent')} read"
    if facts.read < facts.live:
        read += f" (drawn from {facts.live:,})"
    if facts.not_finite:
        title = f"{counted(len(facts.not_finite), 'latent')} with NaN or infinity"
        yield Finding(level="error", title=title, detail=f"Of {read}; training on them ends in NaN.", anchor="latents")
    else:
        yield Finding(level="good", title="No NaN", detail=f"All values of {read} are finite.")
    yield from _of_spread(facts, vae)
    if facts.constant:
        title = f"{counted(len(facts.constant), 'constant latent')}"
        detail = f"Of {read}: every position has the same value, as a blank image or a broken VAE makes them."
        yield Finding(level="warning", title=title, detail=detail, anchor="latents")
    if facts.clusters:
        title = f"{counted(facts.duplicates, 'near-duplicate')} in {counted(len(facts.clusters), 'cluster')}"
        detail = f"Of {read}: these are seen more often than others, and leak from train to val if a cluster has both."
        yield Finding(level="warning", title=title, detail=detail, anchor="duplicates")
    else:
        yield Finding(level="good", title="No near-duplicates", detail=f"Of {read}.")


def _of_spread(facts: LatentFacts, vae: Mapping[str, Json]) -> Iterator[Finding]:
    """Judge latents from elsewhere. What a pack encoded has its VAE's spread, whatever its images show."""
    if vae.get("dtype") is not None:  # in which the VAE computed: only who encodes records one
        return
    recorded = vae.get("scaling_factor")
    if not isinstance(recorded, int | float) or len(facts.mean) == 0:
        yield Finding(level="warning", title="The store records no scaling factor", detail="The spread cannot be judged.")
        return
    if facts.read < FEW_LATENTS:
        return
    rms = spread_of(facts, vae).rms
    said = f"with the recorded scaling factor {recorded:g} a model is fed latents of spread {human_number(rms)}; 1 is expected."
    if SPREAD_WARNS[0] <= rms <= SPREAD_WARNS[1]:
        yield Finding(level="good", title="The latents' spread fits their VAE", detail=said[0].upper() + said[1:])
        return
    is_error = not SPREAD_FAILS[0] <= rms <= SPREAD_FAILS[1]
    fitting = recorded / rms if rms else 0.0
    hint = f" A factor of {human_number(fitting)} would fit" if fitting else " The latents are all alike"
    near = [
        TITLES[name]
        for name, one in PUBLISHED.items()
        if name in TITLES and one.channels == len(facts.mean) and abs(fitting / one.scaling - 1.0) < 0.15
    ]
    hint += f"; that of {' or '.join(near)} is near." if near else "."
    if rms and abs(rms / recorded - 1.0) < 0.25:
        hint += " The latents look as if they had been scaled before they were stored, so they would be scaled twice."
    title = "Wrong scaling factor, or a broken VAE" if is_error else "The latents' spread is unusual for their VAE"
    yield Finding(
        level="error" if is_error else "warning", title=title, detail=said[0].upper() + said[1:] + hint, anchor="latents"
    )


def _of_crops(facts: Facts) -> Iterator[Finding]:
    known = [bucket for bucket in facts.buckets.values() if bucket.with_crop]
    for bucket in sorted(known, key=lambda one: -one.mean_loss):
        if bucket.mean_loss >= MUCH_CROPPED:
            yield Finding(
                level="warning",
                title=f"{bucket.name} loses {percent(bucket.mean_loss, 0)} of its images to cropping",
                detail=f"On average over {counted(bucket.with_crop, 'image')}; {percent(bucket.most, 0)} at most. "
                "A grid with a bucket of their shape, or --max-crop, would keep more.",
                anchor="crops",
            )
    if known and max(bucket.mean_loss for bucket in known) < MUCH_CROPPED:
        total = sum(bucket.loss for bucket in known) / sum(bucket.with_crop for bucket in known)
        yield Finding(level="good", title="Little is cropped away", detail=f"{percent(total)} of the pixels on average.")


def _of_captions(facts: Facts, lists: ListFacts) -> Iterator[Finding]:
    if facts.samples and facts.without_caption > FEW_CAPTIONS * facts.samples:
        share = percent(facts.without_caption / facts.samples)
        title = f"{counted(facts.without_caption, 'sample')} without a caption"
        yield Finding(level="warning", title=title, detail=f"{share} of all; they train the empty caption.", anchor="captions")
    if total := lists.cuts.total():
        by = ", ".join(f"{name}: {count}" for name, count in lists.cuts.most_common())
        title = f"{counted(total, 'caption')} cut by a text encoder"
        yield Finding(level="warning", title=title, detail=f"{by}. What is beyond the limit is not learned.", anchor="captions")


def _of_rejects(facts: Facts, lists: ListFacts) -> Iterator[Finding]:
    total = lists.rejects.total()
    if not total:
        return
    share = total / (total + facts.samples)
    by = ", ".join(f"{count} {reason}" for reason, count in lists.rejects.most_common(3))
    level = "warning" if share > MANY_REJECTS else "good"
    detail = f"{percent(share)} of the images found: {by}."
    yield Finding(level=level, title=f"{counted(total, 'image')} rejected", detail=detail, anchor="rejects")
