"""The VAE of imported latents, as the user names it: undo a cache's scaling by its constants, and check the result's spread.

Letters: C latent channels, h and w the latent's height and width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bucketline.errors import ModelError, SourceError, UsageError
from bucketline.fingerprint import config_hash
from bucketline.ingest.images.rejects import Reason, RejectedError
from bucketline.ingest.importers.cache import Scaling
from bucketline.store.format.columns import LatentKind
from bucketline.store.report.published_vaes import PUBLISHED
from bucketline.torch_dtypes import TORCH_DTYPES, as_stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.typed_json import Json

MAX_FACTOR = 2.0  # of a source's spread, over or under its VAE's; scaling factors make it 2.8 to 7.7 but for SD3's 1.5
MAX_FACTOR_OF_ONE = 4.0  # of one sample over its VAE's, or of one channel either way if only the mean over all is published
F16_MAX = 65504.0
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
        """Mean of its latents, `[C, 1]` or `[1, 1]`."""
        return _each(self.provenance["latents_mean"] or self.provenance["shift_factor"])

    @cached_property
    def scale(self) -> NDArray[np.float64]:
        """The factor of centred latents as a model is fed, `[C, 1]` or `[1, 1]`."""
        return self._number("scaling_factor") / _each(self.provenance["latents_std"] or 1.0)

    @cached_property
    def spread(self) -> NDArray[np.float64]:
        """Standard deviation of its latents, `[C, 1]` or `[1, 1]`."""
        return _each(self.provenance["latents_std"] or 1.0 / self._number("scaling_factor"))

    def unscaled(self, latent: torch.Tensor, scaling: Scaling) -> NDArray[Any]:
        """Return a cache's latent, `[C, h, w]`, as the VAE made it, in float32, or float64 if it was scaled.

        Raises:
            RejectedError: if it has another number of channels.
        """
        if latent.shape[0] != self.channels:
            raise RejectedError(
                Reason.OTHER_VAE, f"it has {latent.shape[0]} channels, the VAE of {self.name} has {self.channels}"
            )
        values: NDArray[Any] = latent.float().numpy()
        if scaling is Scaling.AS_FED:
            values = (values.reshape(self.channels, -1) / self.scale + self.shift).reshape(values.shape)
        return values

    def stored(self, latent: torch.Tensor, scaling: Scaling, dtype: str, *, may_be_off: bool = False) -> NDArray[Any]:
        """Return a cache's latent as the VAE made it, in a stored dtype, of BF16 its bits.

        `may_be_off`: its spread is not compared with the VAE's.

        Raises:
            RejectedError: if it has another number of channels, or is not finite or far out of the VAE's range.
        """
        values = self.unscaled(latent, scaling)
        moments = _Moments.of(values)
        largest = float(np.sqrt(moments.squares.sum()))  # no value is larger
        stored = _converted(values, dtype)
        if not largest < F16_MAX and not bool(torch.from_numpy(values).to(TORCH_DTYPES[dtype]).isfinite().all()):
            raise RejectedError(Reason.LATENT, f"latent as {dtype}: NaN, infinite, or beyond the dtype's range")
        if not may_be_off and (factor := _factor(moments.factors(self))) > MAX_FACTOR_OF_ONE:
            raise RejectedError(
                Reason.SCALE,
                f"its spread is {factor:.3g} times that of the VAE of {self.name}, at most {MAX_FACTOR_OF_ONE:g} is plausible",
            )
        return stored

    def _number(self, name: str) -> float:
        value = self.provenance[name]
        assert isinstance(value, int | float)
        return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and standard deviation of a source's latents by channel, next to those of the VAE."""

    samples: int
    mean: list[float]  # [C]
    std: list[float]  # [C]
    expected_mean: list[float]  # [C] or [1]
    expected_std: list[float]  # [C] or [1]
    factor: float  # root mean square around the expected mean, over the expected standard deviation

    def __str__(self) -> str:
        return (
            f"per channel mean {_numbers(self.mean)} and spread {_numbers(self.std)}, those of the VAE are "
            f"{_numbers(self.expected_mean)} and {_numbers(self.expected_std)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moments:
    """Sums over the positions of latents, by channel."""

    number: int
    sums: NDArray[np.float64]  # [C]
    squares: NDArray[np.float64]  # [C]

    @classmethod
    def of(cls, latent: NDArray[Any]) -> _Moments:
        """Return the sums of one latent, `[C, h, w]`."""
        flat = latent.reshape(len(latent), -1)
        # not by BLAS, whose own threads would compete with those that read
        squares = np.einsum("ij,ij->i", flat, flat)
        return cls(number=flat.shape[1], sums=flat.sum(axis=1).astype(np.float64), squares=squares.astype(np.float64))

    def __add__(self, other: _Moments) -> _Moments:
        return _Moments(number=self.number + other.number, sums=self.sums + other.sums, squares=self.squares + other.squares)

    def factors(self, vae: NamedVae) -> NDArray[np.float64]:
        """Return the root mean square around the VAE's mean, over its spread, `[C]`."""
        shift, spread = vae.shift[:, 0], vae.spread[:, 0]
        centred = self.squares - 2 * shift * self.sums + self.number * shift**2
        found: NDArray[np.float64] = np.sqrt(np.maximum(centred, 0.0) / self.number) / spread
        return found


def refuse_wrong_scale(latents: Sequence[NDArray[Any]], vae: NamedVae, scaling: Scaling, source: str) -> Spread:
    """Check the spread of a source's unscaled latents, `[C, h, w]` each, against the VAE's.

    Raises:
        SourceError: if it is off by a factor of two; the message has both.
    """
    whole = reduce(add, map(_Moments.of, latents))
    each, mean = whole.factors(vae), whole.sums / whole.number
    found = Spread(
        samples=len(latents),
        mean=mean.tolist(),
        std=np.sqrt(np.maximum(whole.squares / whole.number - mean**2, 0.0)).tolist(),
        expected_mean=vae.shift[:, 0].tolist(),
        expected_std=vae.spread[:, 0].tolist(),
        factor=_factor(each),
    )
    limit = MAX_FACTOR if len(found.expected_std) > 1 else MAX_FACTOR_OF_ONE
    worst = max(each.tolist(), key=lambda factor: max(factor, 1 / max(factor, 1e-9)))
    if not 1 / MAX_FACTOR < found.factor < MAX_FACTOR or not 1 / limit < worst < limit:
        undone = "nothing was undone" if scaling is Scaling.NONE else "the VAE's scale and shift were undone"
        raise SourceError(
            f"{source}: its latents are not scaled as this format scales them, or not from the VAE of {vae.name} ({undone}): "
            f"in {found.samples} of them their spread is {found.factor:.3g} times the VAE's, in one channel {worst:.3g} times: "
            f"{found}. Name the model that made them, or import them as they are by --trust-scale"
        )
    return found


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
        return NamedVae(name=f"--model {model.name}", provenance=_of_model(model, dtype, latents))
    assert published is not None
    known = PUBLISHED[published]
    constants = {
        "scaling_factor": known.scaling,
        "shift_factor": known.shift,
        "latents_mean": known.mean and list(known.mean),
        "latents_std": known.std and list(known.std),
    }
    return NamedVae(
        name=f"--vae {published}",
        provenance=_provenance(known.kind, None, None, dtype, latents, known.channels, 8, constants),
    )


def _of_model(model: ModelFolder, dtype: str, latents: str) -> dict[str, Json]:
    config = model.config("vae")
    if config is None:
        raise ModelError(f"{model.name} has no vae/config.json; name the model whose VAE made the latents")
    kind = str(config.get("_class_name", "AutoencoderKL"))
    channels = config.get("latent_channels", config.get("z_dim"))
    if kind not in ("AutoencoderKL", "AutoencoderDC", "AutoencoderKLWan", "AutoencoderKLQwenImage") or not isinstance(
        channels, int
    ):
        raise ModelError(f"{model.name}: the constants of its VAE, a {kind:.80}, are unknown; its latents cannot be imported")
    downscale = 8
    if kind in ("AutoencoderKL", "AutoencoderDC"):
        blocks = config.get("block_out_channels" if kind == "AutoencoderKL" else "encoder_block_out_channels")
        if not isinstance(blocks, list):
            raise ModelError(f"{model.name}: vae/config.json does not tell its levels; download it again")
        downscale = 2 ** (len(blocks) - 1)
    constants = {name: config.get(name) for name in ("scaling_factor", "shift_factor", "latents_mean", "latents_std")}
    if constants["scaling_factor"] is None:
        constants["scaling_factor"] = 0.18215 if kind == "AutoencoderKL" else 1.0  # the class's own default
    return _provenance(kind, config_hash(config), _weights_hash(model, kind), dtype, latents, channels, downscale, constants)


def _weights_hash(model: ModelFolder, kind: str) -> str | None:
    """Return the digest of the VAE's weights if the model has them, so that a trainer can compare them."""
    from bucketline.ingest.encoders.vae import VaeEncoder

    has_weights = model.file is not None or model._has_weights("vae")
    if kind not in ("AutoencoderKL", "AutoencoderDC") or not has_weights:
        return None
    return str(VaeEncoder(model, torch.device("cpu"), "F32").provenance["weights_hash"])


def _provenance(  # noqa: PLR0917 - each once
    kind: str,
    config: str | None,
    weights: str | None,
    dtype: str,
    latents: str,
    channels: int,
    downscale: int,
    constants: Mapping[str, Any],
) -> dict[str, Json]:
    return {
        "class": kind,
        "config_hash": config,
        "weights_hash": weights,
        "dtype": None,  # unknown: another program encoded the images
        "latents": LatentKind(latents).value,
        "stored_dtype": dtype,
        "latent_channels": channels,
        "downscale": downscale,
        "scaling_factor": float(constants["scaling_factor"]),
        "shift_factor": float(constants["shift_factor"] or 0.0),
        "latents_mean": constants["latents_mean"] and [float(value) for value in constants["latents_mean"]],
        "latents_std": constants["latents_std"] and [float(value) for value in constants["latents_std"]],
    }


def _factor(each: NDArray[np.float64]) -> float:
    """Return the root mean square over all channels, of those by channel; infinite if it is not a number."""
    found = float(np.sqrt(np.mean(each**2)))
    return found if np.isfinite(found) else float("inf")


def _each(values: Json) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64).reshape(-1, 1)


def _converted(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return values in a stored dtype, of BF16 as bits. In parts so small that torch converts each in this thread."""
    if dtype == "F32":
        return values.astype("<f4", copy=False)
    flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
    found = torch.empty(flat.shape, dtype=TORCH_DTYPES[dtype])
    for begin in range(0, len(flat), _PART):
        found[begin : begin + _PART] = flat[begin : begin + _PART]
    return as_stored(found).reshape(values.shape)


def _numbers(values: Sequence[float]) -> str:
    shown = [f"{value:.3g}" for value in values[:16]]
    return ", ".join(shown) if len(shown) > 1 else shown[0]
