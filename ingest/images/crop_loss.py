"""Share of the pixels that cropping removes, by bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline.command_line import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

SHOWN = 10  # worst buckets that the summary lists


@dataclass(slots=True, kw_only=True)
class CropLoss:
    """Number of images in one bucket, and the sum and maximum of the shares of source pixels cropped away."""

    images: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, images: int, total: float, most: float) -> None:
        self.images += images
        self.total += total
        self.most = max(self.most, most)


def note_crop_loss(losses: dict[str, CropLoss], bucket: str, cropped_away: float) -> None:
    """Add one image to its bucket; `cropped_away` is the share of its pixels outside the crop, 0 to 1."""
    losses.setdefault(bucket, CropLoss()).add(1, cropped_away, cropped_away)


def add_crop_losses(whole: dict[str, CropLoss], part: Mapping[str, CropLoss]) -> None:
    """Add the losses of one rank to the total."""
    for bucket, loss in part.items():
        whole.setdefault(bucket, CropLoss()).add(loss.images, loss.total, loss.most)


def crop_losses_as_json(losses: Mapping[str, CropLoss]) -> dict[str, dict[str, float]]:
    """Return by bucket the number of `images`, and the `mean` and `max` share cropped away.

    >>> crop_losses_as_json({"train/64x64": CropLoss(images=4, total=1.0, most=0.5)})
    {'train/64x64': {'images': 4, 'mean': 0.25, 'max': 0.5}}
    """
    return {
        bucket: {"images": loss.images, "mean": round(loss.total / loss.images, 6), "max": round(loss.most, 6)}
        for bucket, loss in sorted(losses.items())
    }


def crop_losses_as_lines(losses: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Format the result of `crop_losses_as_json` as lines of text, largest loss first.

    >>> crop_losses_as_lines({"train/64x64": {"images": 4, "mean": 0.25, "max": 0.5}})
    ['cropped away in train/64x64: 25.0 % of the pixels on average, 50.0 % at most, of 4 images']
    """
    worst = sorted(losses.items(), key=lambda item: (-item[1]["mean"], item[0]))
    lines = [
        f"cropped away in {bucket}: {loss['mean']:.1%} of the pixels on average, {loss['max']:.1%} at most, "
        f"of {counted(int(loss['images']), 'image')}".replace("%", " %")
        for bucket, loss in worst[:SHOWN]
    ]
    if len(worst) > SHOWN:
        lines.append(f"and less in {len(worst) - SHOWN} more buckets (--json lists them all)")
    return lines
