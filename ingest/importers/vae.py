"""The VAE of imported latents, as the user names it: undo a cache's scaling by its constants, and compare the spread with its.

Letters: C latent channels, h and w the latent's height and width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import ModelError, UsageError
from bucketline.families.vaes import VAES, batch_norm, latent_channels, vae_class
from bucketline.ingest.encoders.vae import VaeEncoder, load_vae, vae_provenance
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.importers.cache import Scaling
from bucketline.model_file import config_hash
from bucketline.store.format.block import LatentKind
from bucketline.store.report.latent_rgb import PUBLISHED
from bucketline.torch_dtypes import TORCH_DTYPES, as_stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.typed_json import Json

MAX_SPREAD_OF_ONE = 4.0  # of one latent over the VAE's; scaling factors make it 2.8 to 7.7 but for SD3's 1.5
_PATCH_PX = 2  # a patch's height and width
_PART = 1 << 14  # values; of twice as many, torch's threads would each take a part, and wait for one another


@dataclass(frozen=True, kw_only=True)
class NamedVae:
    """The VAE that the user names."""

    name: str  # as the user gave it, with the option
    provenance: Mapping[str, Json]  # as in the manifest's `encoders.vae`

    @cached_property
    def channels(self) -> int:
        return int(self._number("latent_channels"))

    @cached_property
    def downscale(self) -> int:
        return int(self._number("downscale"))

    @cached_property
    def shift(self) -> NDArray[np.float64]:
        """Mean of its latents, `[C, 1]` or `[1, 1]`; of packed ones, of what is packed."""
        return _each(
            self._packed["mean"] if self._packed else self.provenance["latents_mean"] or self.provenance["shift_factor"]
        )

    @cached_property
    def scale(self) -> NDArray[np.float64]:
        """The factor of centred latents as a model is fed, `[C, 1]` or `[1, 1]`; of packed ones, of what is packed."""
        std = self._packed["std"] if self._packed else self.provenance["latents_std"] or 1.0
        return self._number("scaling_factor") / _each(std)

    @cached_property
    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of its latents, `[C]` or `[1]` each."""
        if self._packed:
            mean, std = (_each(self._packed[name]).reshape(self.channels, -1) for name in ("mean", "std"))
            whole = mean.mean(axis=1)
            return whole, np.sqrt((std**2 + mean**2).mean(axis=1) - whole**2)
        return self.shift[:, 0], _each(self.provenance["latents_std"] or 1.0 / self._number("scaling_factor"))[:, 0]

    @cached_property
    def _packed(self) -> Mapping[str, Json] | None:
        found = self.provenance.get("batch_norm")
        return found if isinstance(found, dict) else None

    def unscaled(self, latent: torch.Tensor, scaling: Scaling) -> NDArray[Any]:
        """Return a cache's latent, `[C, …]`, as the VAE made it, in float32, or float64 if it was scaled."""
        channels = self.channels * (_PATCH_PX**2 if scaling is Scaling.PACKED else 1)
        if latent.shape[0] != channels:
            packed = f", packed {channels}" if channels != self.channels else ""
            raise RejectedError(
                Reason.OTHER_VAE, f"it has {latent.shape[0]} channels, the VAE of {self.name} has {self.channels}{packed}"
            )
        values: NDArray[Any] = latent.float().numpy()
        if scaling is not Scaling.NONE:
            with np.errstate(all="ignore"):  # what is not finite is rejected, not warned about
                values = (values.reshape(channels, -1) / self.scale + self.shift).reshape(values.shape)
        return _unpacked(values) if scaling is Scaling.PACKED else values

    def stored(self, latent: torch.Tensor, scaling: Scaling, dtype: str, *, may_be_off: bool = False) -> NDArray[Any]:
        """Return a cache's latent as the VAE made it, in a stored dtype, of BF16 its bits.

        `may_be_off`: its spread is not compared with the VAE's.
        """
        values = self.unscaled(latent, scaling)
        stored = _converted(values, dtype)
        if not stored.isfinite().all():
            raise RejectedError(Reason.LATENT, f"latent as {dtype}: NaN, infinite, or beyond the dtype's range")
        if not may_be_off and (spread := self.spread_of([values])) > MAX_SPREAD_OF_ONE:
            what = f"its spread is {spread:.3g} times that of the VAE of {self.name}"
            raise RejectedError(Reason.SCALE, f"{what}, at most {MAX_SPREAD_OF_ONE:g} is plausible; --trust-scale imports it")
        return as_stored(stored)

    def spread_of(self, latents: Sequence[NDArray[Any]]) -> float:
        """Return the spread of unscaled latents, `[C, …]` each, over the VAE's: the median of their root mean squares.

        The mean and the standard deviation of the VAE's latents are taken from its constants.
        """
        mean, std = (values.reshape(-1, 1) for values in self.expected)
        flat = (latent.reshape(len(latent), -1) for latent in latents)
        return float(np.median([np.sqrt((((values - mean) / std) ** 2).mean()) for values in flat]))

    def _number(self, name: str) -> float:
        value = self.provenance[name]
        assert isinstance(value, int | float)
        return float(value)


def _unpacked(values: NDArray[Any]) -> NDArray[Any]:
    """Return packed latents, `[4 C, h / 2, w / 2]`, as `[C, h, w]`: four channels hold the pixels of a 2 x 2 patch, by row."""
    packed, height, width = values.shape
    patches = values.reshape(packed // _PATCH_PX**2, _PATCH_PX, _PATCH_PX, height, width)
    return np.ascontiguousarray(patches.transpose(0, 3, 1, 4, 2)).reshape(
        packed // _PATCH_PX**2, _PATCH_PX * height, _PATCH_PX * width
    )


def _converted(values: NDArray[Any], dtype: str) -> torch.Tensor:
    """Return values in a stored dtype, rounded to F32 and then to it, as packing rounds them.

    In parts so small that torch converts each in this thread.
    """
    with np.errstate(all="ignore"):  # the caller rejects what is out of range
        single = torch.from_numpy(np.ascontiguousarray(values.astype("<f4", copy=False)))
    if dtype == "F32":
        return single
    flat, found = single.reshape(-1), torch.empty(single.numel(), dtype=TORCH_DTYPES[dtype])
    for begin in range(0, len(flat), _PART):
        found[begin : begin + _PART] = flat[begin : begin + _PART]
    return found.reshape(single.shape)


def named_vae(model: ModelFolder | None, published: str | None, dtype: str, latents: str) -> NamedVae:
    """Return the VAE that the user names: that of a model, or a published one."""
    if (model is None) == (published is None):
        raise UsageError(
            "the cache does not say which VAE made its latents: name the model that did by --model, or without its files a "
            f"published VAE by --vae ({', '.join(PUBLISHED)}); one of both"
        )
    made: dict[str, Json] = {
        "config_hash": None,
        "weights_hash": None,
        "dtype": None,  # unknown: another program encoded the images
        "latents": LatentKind(latents).value,
        "stored_dtype": dtype,
    }
    if model is not None:
        return _of_model(model, made)
    assert published is not None
    known = PUBLISHED[published]
    constants = {
        "scaling_factor": known.scaling,
        "shift_factor": known.shift,
        "latents_mean": known.mean,
        "latents_std": known.std,
    }
    provenance = vae_provenance(known.kind, constants, **made, latent_channels=known.channels, downscale=8)
    return NamedVae(name=f"--vae {published}", provenance=provenance)


def _of_model(model: ModelFolder, made: dict[str, Json]) -> NamedVae:
    config = model.config("vae")
    if config is None:
        raise ModelError(f"{model.name} has no vae/config.json; name the model whose VAE made the latents")
    kind, channels = vae_class(config), latent_channels(config)
    if kind not in VAES or channels is None:
        raise ModelError(f"{model.name}: the constants of its VAE, a {kind:.80}, are unknown; its latents cannot be imported")
    own = VAES[kind]
    downscale = own.px_per_latent(config)
    if downscale is None:
        raise ModelError(f"{model.name}: vae/config.json does not tell its levels; download it again")
    has_weights = model.file is not None or model.has_weights("vae")
    made["config_hash"] = config_hash(config)
    if own.is_packed and has_weights:  # so that a trainer can compare them
        made["weights_hash"] = str(VaeEncoder(model, torch.device("cpu"), "F32").provenance["weights_hash"])
    provenance = vae_provenance(kind, config, **made, latent_channels=channels, downscale=downscale)
    if own.has_batch_norm:
        if not has_weights:
            raise ModelError(
                f"{model.name} has only the configuration of its VAE; the statistics that scale Flux.2's latents are among its "
                "weights: download vae/ completely"
            )
        provenance["batch_norm"] = batch_norm(load_vae(model))
    return NamedVae(name=f"--model {model.name}", provenance=provenance)


def _each(values: Json) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64).reshape(-1, 1)
