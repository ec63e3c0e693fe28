"""Columns that a cache has next to its latents: masks, and latents of control or edit images.

Letters: C latent channels, F latent frames of a video, h and w the latent's height and width, H and W a mask's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import SourceError, UsageError
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.importers.cache import damaged
from bucketline.store import Axis, RowColumn
from bucketline.store.format.columns import FLIPPED_SUFFIX, ROLE, TARGET

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.ingest.importers.cache import Cached, Scaling
    from bucketline.ingest.importers.vae import NamedVae
    from bucketline.typed_json import Json

_MASK = "mask"
_NO_COLUMNS = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideColumn:
    """A column of an imported store next to the latent; rows may lack it."""

    role: str
    step: int  # px of the image per value, each way: 1 of a mask of the image's size


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRules:
    """The columns of an import, decided before the first row is written."""

    side: tuple[SideColumn, ...] = ()
    frames: bool = False  # whether latents are stored as videos', [C, F, h, w]
    flip: bool = False  # whether the mirrored image's latent is stored too
    declined: bool = False  # whether the user has named the columns, so that others are left out, not an error

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(column.role for column in self.side)

    def as_json(self) -> dict[str, Json]:
        """Return what the manifest's rules say of them; nothing of a store of images' latents only."""
        return {"columns": {column.role: column.step for column in self.side}} if self.side else {}

    def row_columns(self, vae: NamedVae, dtype: str) -> list[RowColumn]:
        """Return the store's columns. That their values are finite is checked before they are written."""
        height, width = (Axis(name=name, step=vae.downscale) for name in ("height_px", "width_px"))
        frames = (Axis(name="frames", step=vae.frames_step or 1, first=1),) if self.frames else ()
        shape = (vae.channels, *frames, height, width)
        columns = [RowColumn(role=TARGET, dtype=dtype, shape=shape, allow_nonfinite=True)]
        for side in self.side:
            own = (Axis(name="height_px", step=side.step), Axis(name="width_px", step=side.step))
            is_mask = side.role == _MASK
            columns.append(
                RowColumn(
                    role=side.role,
                    dtype="U8" if is_mask else dtype,
                    shape=own if is_mask else shape,
                    optional=True,
                    encoder=None if is_mask else "vae",
                    allow_nonfinite=True,
                )
            )
        if self.flip:
            columns += [_mirrored(column) for column in columns]
        return columns

    def side_values(
        self, cached: Cached, latent_hw: tuple[int, int], vae: NamedVae, scaling: Scaling, dtype: str
    ) -> dict[str, NDArray[Any]]:
        """Return a sample's values of these columns by role; `latent_hw` is the size of its unpacked latent."""
        others = self.left_out(cached)
        if others and not self.declined:
            both, own = ",".join([*self.roles, *others]), ",".join(self.roles) or _NO_COLUMNS
            raise damaged(
                f"it has a column {others[0]}, which no sample that was checked first has: --columns {both} imports it into a "
                f"new store, --columns {own} leaves it out"
            )
        found: dict[str, NDArray[Any]] = {}
        for side in self.side:
            if (value := cached.columns.get(side.role)) is None:
                continue
            if side.role != _MASK:
                if value.shape != cached.latent.shape:
                    raise damaged(
                        f"its {side.role} is {list(value.shape)}, its latent {list(cached.latent.shape)}, expected one shape; "
                        f"--columns {_NO_COLUMNS} leaves it out"
                    )
                found[side.role] = vae.stored(as_frames(value, is_video=self.frames), scaling, dtype)
                continue
            mask = _as_mask(value)
            expected = [length * vae.downscale // side.step for length in latent_hw]
            if list(mask.shape) != expected:
                raise damaged(f"its mask is {mask.shape[0]}x{mask.shape[1]}, expected {expected[0]}x{expected[1]}")
            found[_MASK] = mask
            if self.flip:
                found[_MASK + FLIPPED_SUFFIX] = np.ascontiguousarray(mask[:, ::-1])
        return found

    def left_out(self, cached: Cached) -> tuple[str, ...]:
        """Return the roles that a sample has and the store does not."""
        return tuple(sorted(cached.columns.keys() - {*self.roles}))


def as_frames(latent: torch.Tensor, *, is_video: bool) -> torch.Tensor:
    """Return a latent as a store has it: of a video `[C, F, h, w]`, of an image `[C, h, w]`."""
    if latent.ndim == 4 and not is_video:
        raise RejectedError(
            Reason.CACHE,
            f"its latent is of a video, {list(latent.shape)}, and this store is of images: either the VAE that is named is one "
            "of images, or the samples that were checked first are; import videos into a store of their own",
        )
    return latent[:, None] if is_video and latent.ndim == 3 else latent


def named_roles(given: str | None) -> tuple[str, ...] | None:
    """Return the roles of `--columns`; None if it is not given."""
    if given is None:
        return None
    roles = () if given.strip() == _NO_COLUMNS else tuple(dict.fromkeys(role.strip() for role in given.split(",")))
    for role in roles:
        if not ROLE.fullmatch(role) or (role != _MASK and not role.startswith("control/")) or role.endswith(FLIPPED_SUFFIX):
            raise UsageError(f"--columns {given:.80}: expected {_NO_COLUMNS}, or roles as mask,control/NAME")
    return roles


def side_columns(
    samples: Iterable[tuple[Cached, tuple[int, int]]], roles: Sequence[str] | None, vae: NamedVae
) -> tuple[SideColumn, ...]:
    """Return the columns that samples, each with the size of its unpacked latent, have: all, or those named."""
    found: dict[str, SideColumn] = {}
    for cached, (height, _) in samples:
        for role, value in cached.columns.items():
            if role not in found and (roles is None or role in roles):
                of_image = role == _MASK and value.shape[-2:-1] != (height,)
                found[role] = SideColumn(role=role, step=1 if of_image else vae.downscale)
        if roles is not None and len(found) == len(roles):
            break
    if missing := [role for role in roles or () if role not in found]:
        raise SourceError(f"no sample has a column {missing[0]}; leave it out of --columns")
    return tuple(found[role] for role in sorted(found))


def stored_columns(rules: Mapping[str, Json]) -> tuple[SideColumn, ...]:
    """Return the columns of a store from its rules of the import."""
    found = rules.get("columns", {})
    assert isinstance(found, dict)
    return tuple(SideColumn(role=role, step=step) for role, step in sorted(found.items()) if isinstance(step, int))


def _as_mask(value: torch.Tensor) -> NDArray[Any]:
    """Return a mask as U8 [H, W], 255 for 1."""
    while value.ndim > 2 and value.shape[0] == 1:
        value = value[0]
    if value.ndim != 2:
        raise damaged(f"its mask is {list(value.shape)}, expected [H, W]")
    if value.dtype == torch.uint8:
        return np.ascontiguousarray(value.numpy())
    scaled = value.float().numpy() * np.float32(255.0)
    if not (scaled.min(initial=0.0) >= 0.0 and scaled.max(initial=0.0) <= 255.0):  # NaN is in neither range
        raise damaged("its mask has values outside 0 to 1")
    return np.rint(scaled).astype("u1")


def _mirrored(column: RowColumn) -> RowColumn:
    if column.role.startswith("control/"):
        raise SourceError(
            f"the cache has latents of mirrored images, and no mirrored {column.role}; --columns {_NO_COLUMNS} leaves it out"
        )
    return replace(column, role=column.role + FLIPPED_SUFFIX)
