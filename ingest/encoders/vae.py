"""Encode images to latents and back with a VAE of diffusers, in halves when memory is short. The trainer scales the latents.

Letters: B images, H and W their height and width in px, C latent channels, h and w the latent's height and width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from bucketline.errors import ModelError, UsageError
from bucketline.families.vaes import PACKED_VAES, VAES, batch_norm, latent_channels, vae_class, vae_decode, vae_encode
from bucketline.ingest.encoders.model_folder import loading, refuse_incomplete
from bucketline.model_file import DIFFUSERS, config_hash, weights_hash
from bucketline.store.format.block import FLIPPED, LATENT, Column, LatentKind, draw
from bucketline.torch_dtypes import TORCH_DTYPES, as_stored
from bucketline.torch_setup import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from numpy.typing import NDArray

    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.typed_json import Json


def refuse_latents(kind: str, latents: LatentKind) -> None:
    """Check that a VAE of class `kind` can produce `latents`."""
    if not VAES[kind].has_posterior and latents is not LatentKind.MODE:
        raise UsageError(f"--latents {latents.value}: {kind} has no distribution, only one latent; expected --latents mode")


class VaeEncoder:
    """A loaded VAE."""

    def __init__(
        self,
        model: ModelFolder,
        device: torch.device,
        stored_dtype: str,
        *,
        latents: LatentKind = LatentKind.MODE,
        encode_dtype: str = "F32",
    ) -> None:
        """Load `vae/` to compute in `encode_dtype`; for F16 in F32, if its config requires it (`force_upcast`)."""
        self._vae = vae = load_vae(model)
        config = vae.config
        kind = type(vae).__name__
        self._kind = VAES[kind]
        refuse_latents(kind, latents)
        self._latents = latents
        downscale, channels = self._kind.px_per_latent(config), latent_channels(config)
        assert downscale is not None, config  # an instance's configuration has all fields
        assert channels is not None, config
        self.stored_dtype = stored_dtype
        self.downscale = downscale  # px per latent pixel, each way
        self.latent_channels = channels
        self.stored_channels = self.latent_channels * (2 if latents is LatentKind.MOMENTS else 1)
        # As diffusers' pipelines: such a VAE overflows in F16. BF16 has the exponents of F32.
        dtype = "F32" if encode_dtype == "F16" and getattr(config, "force_upcast", False) else encode_dtype
        self.provenance = vae_provenance(
            kind,
            config,
            config_hash=config_hash(model.config("vae") or {}),
            weights_hash=weights_hash(vae),
            dtype=dtype,
            latents=latents.value,
            stored_dtype=stored_dtype,
            latent_channels=self.latent_channels,
            downscale=self.downscale,
        )
        if self._kind.has_batch_norm:
            self.provenance["batch_norm"] = batch_norm(vae)
        self._device = device
        self._dtype, self._compute_dtype = TORCH_DTYPES[stored_dtype], TORCH_DTYPES[dtype]
        # torch's own `to`: that of diffusers warns at every cast about modules to keep in F32, without naming any
        moved: Any = torch.nn.Module.to(vae, device=device, dtype=self._compute_dtype)
        self._vae = moved.eval().requires_grad_(requires_grad=False)

    @torch.inference_mode()
    def encode(
        self, pixels: NDArray[np.uint8], seeds: Sequence[int] = (), *, are_references: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode sRGB images `[B, H, W, 3]`; `seeds` has one seed per image if samples are drawn. Of references, the mode.

        Return latents `[B, C, h, w]` on the CPU in the stored dtype (moments: `[B, 2C, h, w]`, means first), and a bool `[B]`
        that tells which of them are finite in that dtype.
        """
        images = torch.from_numpy(pixels).to(self._device).permute(0, 3, 1, 2)
        if not are_references:  # which pipelines encode with channels last: the same latents to the bit
            images = images.contiguous()
        encoded = vae_encode(self._vae, (images.to(torch.float32) / 127.5 - 1.0).to(self._compute_dtype))
        kind = LatentKind.MODE if are_references else self._latents
        latents = self._of_posterior(encoded, seeds, kind) if self._kind.has_posterior else encoded
        stored = latents.to(self._dtype).cpu().contiguous()
        return stored, torch.isfinite(stored).flatten(1).all(dim=1)

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        """Decode stored latents, or the means of moments, `[B, C, h, w]` to sRGB images `[B, H, W, 3]`."""
        images = vae_decode(self._vae, latents.to(self._device, self._compute_dtype)).float()
        pixels = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        decoded: NDArray[np.uint8] = pixels.permute(0, 2, 3, 1).cpu().numpy()
        return decoded

    @staticmethod
    def _of_posterior(parameters: torch.Tensor, seeds: Sequence[int], kind: LatentKind) -> torch.Tensor:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

        posterior = DiagonalGaussianDistribution(parameters.float())
        if kind is LatentKind.MOMENTS:
            return torch.cat([posterior.mean, posterior.logvar], dim=1)
        if kind is LatentKind.SAMPLE:
            # drawn on the CPU with one seed per image: the same on any device and in any batch
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            sampled: torch.Tensor = posterior.sample(generators)
            return sampled
        mode: torch.Tensor = posterior.mode()
        return mode


def seed_of(sample_id: str, column: str) -> int:
    """Return the 63-bit seed for sampling a latent, a hash of the sample's id and the column."""
    return draw(sample_id, "draw", column) >> 1


def load_vae(model: ModelFolder, kinds: Sequence[str] = PACKED_VAES) -> Any:  # noqa: ANN401 - diffusers has no types
    """Load `vae/` in F32."""
    import diffusers

    kind = vae_class(model.config("vae") or {})
    if kind not in kinds:
        raise ModelError(
            f"{model.name}: vae/ is a {kind[:80]}, expected {' or '.join(kinds)}; pack with a model that has one of these"
        )
    if (loaded := model.from_file("vae")) is not None:
        return loaded
    part = model.weights("vae", DIFFUSERS)
    with loading(model, "vae"):
        # in F32 first, so that the digest of the weights does not depend on the compute dtype
        vae, told = getattr(diffusers, kind).from_pretrained(**part, torch_dtype=torch.float32, output_loading_info=True)
        refuse_incomplete(f"{model.name}: vae/", told)
    return vae


def vae_provenance(kind: str, constants: Mapping[str, Any], **made: Json) -> dict[str, Json]:
    """Return what a manifest says of a VAE of class `kind`: how latents were `made`, and the constants of its configuration."""
    mean, std = (constants.get(name) for name in ("latents_mean", "latents_std"))
    return {
        "class": kind,
        **made,
        "scaling_factor": float(constants.get("scaling_factor") or VAES[kind].scaling),
        "shift_factor": float(constants.get("shift_factor") or 0.0),
        "latents_mean": mean and [float(value) for value in mean],
        "latents_std": std and [float(value) for value in std],
    }


# ------------------------------------------------------------------------------------------------------------------- oom retry

T = TypeVar("T")
R = TypeVar("R")


class OomRetry(Generic[T, R]):
    """Calls an encoder with as many items as fit into GPU memory.

    If memory runs out, the batch is halved and retried. The size that fitted is remembered for items of the same kind (such
    as an image size), so that the failure does not recur in every batch.
    """

    def __init__(self, encode: Callable[[Sequence[T]], Sequence[R]], what: str) -> None:
        """`encode` returns one result per item, in order; `what` names an item in messages."""
        self._encode, self._what = encode, what
        self._limits: dict[Hashable, int] = {}

    def __call__(self, items: Sequence[T], kind: Hashable = None) -> list[R]:
        """Encode items in order."""
        results: list[R] = []
        while len(results) < len(items):
            size = self._limits.get(kind, len(items))
            part = items[len(results) : len(results) + size]
            try:
                results.extend(self._encode(part))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if len(part) == 1:
                    item = self._what if kind is None else f"{self._what} of {kind}"
                    raise ModelError(
                        f"not enough GPU memory to encode one {item}: "
                        f"{error!s:.200}; free some, use a smaller --grid or --encode-dtype bf16, or choose another --device"
                    ) from error
                self._limits[kind] = (len(part) + 1) // 2
            else:
                continue
            # outside the handler: inside it, the exception still holds the failed call's tensors
            torch.cuda.empty_cache()
        return results


# --------------------------------------------------------------------------------------------------------------------- latents


class LatentColumns:
    """Encodes images into the latent columns of a bucket."""

    def __init__(self, vae: VaeEncoder, *, flip: bool) -> None:
        self.vae = self._vae = vae
        self._names = (LATENT, FLIPPED) if flip else (LATENT,)
        self._halving = OomRetry(self._encode, "image")
        self._halving_references = OomRetry(self._encode_references, "reference")

    def columns(self, height_px: int, width_px: int) -> tuple[Column, ...]:
        """Return the columns of a bucket; they depend only on its size, never on the output of the VAE."""
        shape = (self._vae.stored_channels, height_px // self._vae.downscale, width_px // self._vae.downscale)
        return tuple(Column(name=name, dtype=self._vae.stored_dtype, shape=shape) for name in self._names)

    def encode(self, images: Sequence[tuple[str, NDArray[np.uint8]]]) -> list[dict[str, NDArray[Any]] | str]:
        """Encode images of one size, given as id and pixels `[H, W, 3]`.

        Return in order each image's columns by name, `[C, h, w]` as stored, or why they cannot be stored.
        """
        height, width = images[0][1].shape[:2]
        return self._halving(images, f"{height}x{width} px")

    def encode_references(self, pixels: Sequence[NDArray[np.uint8]]) -> list[tuple[NDArray[Any], ...] | str]:
        """Encode references `[H, W, 3]` of one size.

        Return each one's latent `[C, h, w]`, and that of its mirror image if these are stored; of one that cannot be, why.
        """
        height, width = pixels[0].shape[:2]
        return self._halving_references(pixels, f"{height}x{width} px")

    def _encode_references(self, pixels: Sequence[NDArray[np.uint8]]) -> list[tuple[NDArray[Any], ...] | str]:
        images = np.stack(pixels)
        found = [
            self._vae.encode(np.ascontiguousarray(images[:, :, ::-1]) if name == FLIPPED else images, are_references=True)
            for name in self._names
        ]
        rows = [
            self._row({str(n): (latents[row], bool(good[row])) for n, (latents, good) in enumerate(found)})
            for row in range(len(pixels))
        ]
        return [row.partition(" ")[2] if isinstance(row, str) else tuple(row.values()) for row in rows]

    def _encode(self, images: Sequence[tuple[str, NDArray[np.uint8]]]) -> list[dict[str, NDArray[Any]] | str]:
        pixels = np.stack([own for _, own in images])
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name in self._names:
            seen = np.ascontiguousarray(pixels[:, :, ::-1]) if name == FLIPPED else pixels
            found[name] = self._vae.encode(seen, [seed_of(sample_id, name) for sample_id, _ in images])
        return [
            self._row({name: (latents[n], bool(good[n])) for name, (latents, good) in found.items()})
            for n in range(len(images))
        ]

    def _row(self, found: Mapping[str, tuple[torch.Tensor, bool]]) -> dict[str, NDArray[Any]] | str:
        for name, (latent, is_finite) in found.items():
            if not is_finite:
                what = "NaN" if bool(torch.isnan(latent).any()) else "infinite, or beyond the dtype's range"
                return f"{name} as {self._vae.stored_dtype}: {what}"
        return {name: as_stored(latent) for name, (latent, _) in found.items()}
