"""The VAE of imported latents, as the user names it: undo a cache's scaling by its constants, and convert the result.

Letters: C latent channels, F latent frames of a video, h and w the latent's height and width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import ModelError, UsageError
from bucketline.families.vaes import VAES, batch_norm, latent_channels, vae_class
from bucketline.fingerprint import config_hash
from bucketline.ingest.encoders.vae import VaeEncoder, load_vae, vae_provenance
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.importers.cache import Scaling
from bucketline.ingest.importers.vae.spread import MAX_FACTOR_OF_ONE, ExpectedLatents, Moments
from bucketline.store.format.columns import LatentKind
from bucketline.store.report.published_vaes import PUBLISHED
from bucketline.torch_dtypes import TORCH_DTYPES, as_stored

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.typed_json import Json

F16_MAX = 65504.0
PATCH_PX = 2  # a patch's height and width
_PART = 1 << 14  # values; of twice as many, torch's threads would each take a part, and wait for one another


@dataclass(frozen=True, kw_only=True)
class NamedVae:
    """The VAE that the user names."""

    name: str  # as the user gave it, with the option
    provenance: Mapping[str, Json]  # as in the manifest's `encoders.vae`
    frames_step: int | None = None  # frames of a video per latent frame, after the first; None: its latents are of images

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
    def expected(self) -> ExpectedLatents:
        """Mean and standard deviation of its latents."""
        if self._packed:
            mean, std = (_each(self._packed[name]).reshape(self.channels, -1) for name in ("mean", "std"))
            whole = mean.mean(axis=1)
            return ExpectedLatents(name=self.name, mean=whole, std=np.sqrt((std**2 + mean**2).mean(axis=1) - whole**2))
        spread = _each(self.provenance["latents_std"] or 1.0 / self._number("scaling_factor"))
        return ExpectedLatents(name=self.name, mean=self.shift[:, 0], std=spread[:, 0])

    @property
    def is_packed(self) -> bool:
        """True if a model is fed its latents in patches."""
        return self._packed is not None

    @cached_property
    def _packed(self) -> Mapping[str, Json] | None:
        found = self.provenance.get("batch_norm")
        return found if isinstance(found, dict) else None

    def refuse_scaling(self, scaling: Scaling, source: str) -> None:
        """Check that a cache's latents can be of this VAE.

        Raises:
            ModelError: if only one of the two packs its latents.
        """
        if (scaling is Scaling.PACKED) != (self._packed is not None) and scaling is not Scaling.NONE:
            packs = f"packs latents {PATCH_PX} x {PATCH_PX}, as Flux.2 does"
            one, other = (
                (source, f"the VAE of {self.name}") if scaling is Scaling.PACKED else (f"the VAE of {self.name}", source)
            )
            raise ModelError(f"{one} {packs}, and {other} does not; name the model that made the latents by --model")

    def unscaled(self, latent: torch.Tensor, scaling: Scaling) -> NDArray[Any]:
        """Return a cache's latent, `[C, …]`, as the VAE made it, in float32, or float64 if it was scaled.

        Raises:
            RejectedError: if it has another number of channels.
        """
        channels = self.channels * (PATCH_PX**2 if scaling is Scaling.PACKED else 1)
        if scaling is Scaling.PACKED and latent.ndim != 3:
            raise RejectedError(
                Reason.CACHE, f"its packed latent is {list(latent.shape)}, expected that of an image, [C, h, w]"
            )
        if latent.shape[0] != channels:
            raise RejectedError(Reason.OTHER_VAE, f"it has {latent.shape[0]} channels, the VAE of {self.name} has {channels}")
        values: NDArray[Any] = latent.float().numpy()
        if scaling is not Scaling.NONE:
            with np.errstate(all="ignore"):  # what is not finite is rejected, not warned about
                values = (values.reshape(channels, -1) / self.scale + self.shift).reshape(values.shape)
        return unpacked(values) if scaling is Scaling.PACKED else values

    def is_wide(self, values: NDArray[Any]) -> bool:
        """Return True if the spread of an unscaled latent is so far over the VAE's that `stored` rejects it.

        Raises:
            RejectedError: if it is not finite.
        """
        moments = Moments.of(values)
        if not np.isfinite(moments.squares).all() and not np.isfinite(values).all():
            raise RejectedError(Reason.LATENT, "latent: NaN or infinite")
        return self.expected.factor_of(moments) > MAX_FACTOR_OF_ONE

    def stored(self, latent: torch.Tensor, scaling: Scaling, dtype: str, *, may_be_off: bool = False) -> NDArray[Any]:
        """Return a cache's latent as the VAE made it, in a stored dtype, of BF16 its bits.

        `may_be_off`: its spread is not compared with the VAE's.

        Raises:
            RejectedError: if it has another number of channels, or is not finite or far out of the VAE's range.
        """
        values = self.unscaled(latent, scaling)
        moments = Moments.of(values)
        largest = float(np.sqrt(moments.squares.sum()))  # no value is larger
        stored = _converted(values, dtype)
        if not largest < F16_MAX and not bool(torch.from_numpy(values).to(TORCH_DTYPES[dtype]).isfinite().all()):
            raise RejectedError(Reason.LATENT, f"latent as {dtype}: NaN, infinite, or beyond the dtype's range")
        if not may_be_off and (factor := self.expected.factor_of(moments)) > MAX_FACTOR_OF_ONE:
            raise RejectedError(
                Reason.SCALE,
                f"its spread is {factor:.3g} times that of the VAE of {self.name}, at most {MAX_FACTOR_OF_ONE:g} is plausible",
            )
        return stored

    def _number(self, name: str) -> float:
        value = self.provenance[name]
        assert isinstance(value, int | float)
        return float(value)


def unpacked(values: NDArray[Any]) -> NDArray[Any]:
    """Return packed latents, `[4 C, h / 2, w / 2]`, as `[C, h, w]`: four channels hold the pixels of a 2 x 2 patch, by row."""
    packed, height, width = values.shape
    patches = values.reshape(packed // PATCH_PX**2, PATCH_PX, PATCH_PX, height, width)
    return np.ascontiguousarray(patches.transpose(0, 3, 1, 4, 2)).reshape(
        packed // PATCH_PX**2, PATCH_PX * height, PATCH_PX * width
    )


def named_vae(model: ModelFolder | None, published: str | None, dtype: str, latents: str) -> NamedVae:
    """Return the VAE that the user names: that of a model, or a published one.

    Raises:
        UsageError: if neither or both are named.
        ModelError: if the model has none, or one whose constants are unknown.
    """
    if (model is None) == (published is None):
        raise UsageError(
            "the cache does not say which VAE made its latents: name the model that did by --model, or without its files a "
            f"published VAE by --vae ({', '.join(PUBLISHED)}); one of both"
        )
    if model is not None:
        return _of_model(model, dtype, latents)
    assert published is not None
    known = PUBLISHED[published]
    constants = {
        "scaling_factor": known.scaling,
        "shift_factor": known.shift,
        "latents_mean": known.mean,
        "latents_std": known.std,
    }
    made = _made(dtype, latents, known.channels, 8)
    return NamedVae(
        name=f"--vae {published}", provenance=vae_provenance(known.kind, constants, **made), frames_step=known.frames_step
    )


def _of_model(model: ModelFolder, dtype: str, latents: str) -> NamedVae:
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
    made = _made(dtype, latents, channels, downscale, config_hash(config), _weights_hash(model, kind))
    provenance = vae_provenance(kind, config, **made)
    if own.has_batch_norm:
        provenance["batch_norm"] = _saved_batch_norm(model)
    frames_step = None if own.frames_field is None else int(config.get(own.frames_field) or own.frames_step)
    return NamedVae(name=f"--model {model.name}", provenance=provenance, frames_step=frames_step)


def has_weights(model: ModelFolder) -> bool:
    """Return True if the model has the weights of its VAE, not only its configuration.

    Raises:
        ModelError: if they are on a hub that cannot be reached, and not in its cache.
    """
    return model.file is not None or model.has_weights("vae")


def _saved_batch_norm(model: ModelFolder) -> Json:
    """Return mean and standard deviation by which a Flux.2 VAE's packed latents are normalised, 4 C numbers each.

    Raises:
        ModelError: if the model does not have its VAE's weights, among which they are.
    """
    if not has_weights(model):
        raise ModelError(
            f"{model.name} has only the configuration of its VAE; the statistics that scale Flux.2's latents are among its "
            "weights: download vae/ completely"
        )
    return batch_norm(load_vae(model))


def _weights_hash(model: ModelFolder, kind: str) -> str | None:
    """Return the digest of the VAE's weights if the model has them, so that a trainer can compare them."""
    if not VAES[kind].is_packed or not has_weights(model):
        return None
    return str(VaeEncoder(model, torch.device("cpu"), "F32").provenance["weights_hash"])


def _made(
    dtype: str, latents: str, channels: int, downscale: int, config: str | None = None, weights: str | None = None
) -> dict[str, Json]:
    """Return how latents were made, as far as it is known; `config` and `weights` are digests."""
    return {
        "config_hash": config,
        "weights_hash": weights,
        "dtype": None,  # unknown: another program encoded the images
        "latents": LatentKind(latents).value,
        "stored_dtype": dtype,
        "latent_channels": channels,
        "downscale": downscale,
    }


def _each(values: Json) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64).reshape(-1, 1)


def _converted(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return values in a stored dtype, of BF16 as bits, rounded to F32 and then to it, as packing rounds them.

    In parts so small that torch converts each in this thread.
    """
    with np.errstate(all="ignore"):  # the caller rejects what is out of range
        single = values.astype("<f4", copy=False)
    if dtype == "F32":
        return single
    flat = torch.from_numpy(np.ascontiguousarray(single).reshape(-1))
    found = torch.empty(flat.shape, dtype=TORCH_DTYPES[dtype])
    for begin in range(0, len(flat), _PART):
        found[begin : begin + _PART] = flat[begin : begin + _PART]
    return as_stored(found).reshape(values.shape)
