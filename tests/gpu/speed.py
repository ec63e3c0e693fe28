"""Checks of encoding and of speed, and figures for the documentation."""

from __future__ import annotations

import dataclasses
import gc
import time
from typing import Any

import numpy as np
import torch

from tests.gpu.material import DEVICE, ON_GPU, ROOM, sync, tell


def encoding() -> None:
    """A VAE of SD's size: batches that do not fit are halved, what comes out is the same, and what dtypes cost."""
    import diffusers

    from bucketline.ingest.encoders.model_folder import open_model
    from bucketline.ingest.encoders.vae import LatentColumns, VaeEncoder

    folder = ROOM / "vae.model"
    if not folder.exists():
        torch.manual_seed(0)
        kind: Any = diffusers.AutoencoderKL
        kind(
            block_out_channels=(128, 256, 512, 512) if ON_GPU else (32, 32, 32, 32),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            latent_channels=4,
            norm_num_groups=32,
            sample_size=512,
        ).save_pretrained(folder / "vae")
    side, count = (1024, 16) if ON_GPU else (64, 4)
    random = np.random.default_rng(0)
    images = [(str(n), random.integers(0, 256, (side, side, 3), dtype=np.uint8)) for n in range(count)]
    rates, answers, dtypes = {}, {}, {}
    for dtype in ("F32", "BF16"):
        vae = VaeEncoder(open_model(str(folder)), DEVICE, "F32", encode_dtype=dtype)
        dtypes[dtype] = vae.provenance["dtype"]
        columns = LatentColumns(vae, flip=False)
        columns.encode(images[:4])
        sync()
        begin = time.perf_counter()
        found: list[Any] = [row for at in range(0, count, 4) for row in columns.encode(images[at : at + 4])]
        answers[dtype] = [row["latent"] for row in found]
        rates[dtype] = count / (time.perf_counter() - begin)
        if dtype == "F32" and ON_GPU:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(14e9 / torch.cuda.mem_get_info()[1])
            encoded: list[Any] = columns.encode(images)
            halved = [row["latent"] for row in encoded]
            torch.cuda.set_per_process_memory_fraction(1.0)
            off = max(float(np.abs(a - b).max()) for a, b in zip(halved, answers["F32"], strict=True))
            tell("encoding: halved where it does not fit", ok=off < 0.05, largest=off)
    tell("encoding: in the requested dtype", ok=dtypes == {"F32": "F32", "BF16": "BF16"})
    off = max(float(np.abs(a - b).max()) for a, b in zip(answers["F32"], answers["BF16"], strict=True))
    tell("encoding: images/s", rates=rates, bf16_off=off, of_spread=off / float(np.std(answers["F32"][0])))


def bench(name: str = "tiny", *more: str) -> None:
    """The project's own benchmark of training, with two buckets of SDXL so that compiling ends in time."""
    from bucketline.bench.cases import train as loader_share
    from bucketline.bench.fixtures import trained_model

    if name == "sdxl":
        sdxl = trained_model.MODELS["sdxl"]
        trained_model.MODELS["sdxl"] = dataclasses.replace(sdxl, buckets_px=sdxl.buckets_px[:2])
    ROOM.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    options: dict[str, Any] = {"steps": 12, "repeats": 4, "discard_s": 15.0} if ON_GPU else {"steps": 2, "repeats": 2}
    options |= dict(one.split("=") for one in more)
    case = loader_share.Train(model=name, rows=64, stores=ROOM, **options)  # type: ignore[arg-type]
    results = {one.subject: one for one in case.measure(ROOM)}
    figures = {subject: round(one.median, 4) for subject, one in results.items()}
    ratio = results["the loader's"].limit_ratio
    good = results["compiled after the warm-up"].median == 0
    if ON_GPU:
        floor = {"dit-xl-2": 0.30, "sdxl": 0.25}.get(name, 0.0)
        is_fed = (ratio or 0.0) > 0.98 and results["data wait"].median < 0.01
        good &= is_fed and results["MFU"].median > floor
    tell("bench: training", ok=good, model=name, ratio=ratio, seconds=round(time.perf_counter() - begin), figures=figures)


def stall() -> None:
    """Cost to the loop of a checkpoint of SDXL's size (finding 14): pageable copies, pinned ones, and the checkpoint's own."""
    from bucketline.train.checkpoint import gathered_weights

    size = (10 << 30) if ON_GPU else (64 << 20)
    tensors = [torch.empty(size // 64, dtype=torch.uint8, device=DEVICE) for _ in range(64)]
    sync()
    begin = time.perf_counter()
    copies = [tensor.to("cpu", copy=True) for tensor in tensors]
    rates = {"pageable": size / (time.perf_counter() - begin) / 1e9}
    del copies
    gc.collect()
    if ON_GPU:
        pinned = torch.empty(size // 64, dtype=torch.uint8, pin_memory=True)
        begin = time.perf_counter()
        for tensor in tensors:
            pinned.copy_(tensor, non_blocking=True)
        sync()
        rates["pinned"] = size / (time.perf_counter() - begin) / 1e9
    named = {str(number): tensor.random_() for number, tensor in enumerate(tensors)}
    found: dict[str, torch.Tensor] = {}
    for save in ("first", "next"):
        begin = time.perf_counter()
        found = gathered_weights(named.items(), keeps=True)
        rates[f"{save} checkpoint"] = size / (time.perf_counter() - begin) / 1e9
    same = all(torch.equal(found[name], tensor.cpu()) for name, tensor in named.items())
    tell("stall: device to host, GB/s", ok=same, rates=rates, sdxl_copied_s=41 / rates["next checkpoint"])


def pause() -> None:
    """A step with a save lasts less than two steps (finding 14)."""
    from bucketline.bench.cases.train import TrainSaves

    ROOM.mkdir(parents=True, exist_ok=True)
    model = "dit-xl-2" if ON_GPU else "tiny"
    case = TrainSaves(model=model, batch_size=64 if ON_GPU else 2, save_every=60 if ON_GPU else 3, repeats=2)  # type: ignore[arg-type]
    results = case.measure(ROOM)
    figures = {one.subject: round(one.median, 4) for one in results}
    tell("pause: a step with a save", ok=results[-1].is_met if ON_GPU else None, model=model, figures=figures)


def kernels() -> None:
    """Kernels of a real SDXL, and the value of channels_last and of cuDNN's search."""
    if not ON_GPU:
        tell("kernels: needs a GPU")
        return
    import diffusers
    from torch.profiler import ProfilerActivity, profile

    from bucketline.bench.fixtures.trained_model import MODELS
    from bucketline.families.sdxl import Sdxl
    from bucketline.train.compile import compile_blocks

    config = {"in_channels": 4, "out_channels": 4, **MODELS["sdxl"].config}
    latents, timesteps = torch.randn(4, 4, 128, 128, device=DEVICE), torch.randint(0, 1000, (4,), device=DEVICE)
    tokens = torch.randn(4, 77, 2048, device=DEVICE)
    added = {"text_embeds": torch.randn(4, 1280, device=DEVICE), "time_ids": torch.full((4, 6), 1024.0, device=DEVICE)}

    def step(model: Any) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            out = model(latents, timesteps, tokens, added_cond_kwargs=added, return_dict=False)[0]
        out.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    times: dict[str, float] = {}
    kind: Any = diffusers.UNet2DConditionModel
    model: Any = None
    for layout in (torch.contiguous_format, torch.channels_last):
        torch._dynamo.reset()
        with torch.device(DEVICE):
            model = kind.from_config(config)
        model = model.to(memory_format=layout).train()
        compile_blocks(model, Sdxl)
        for search in (False, True):
            torch.backends.cudnn.benchmark = search
            for _ in range(4):
                step(model)
            sync()
            begin = time.perf_counter()
            for _ in range(8):
                step(model)
            sync()
            times[f"{layout}, search={search}"] = round((time.perf_counter() - begin) / 8 * 1e3, 1)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step(model)
        sync()
    top = sorted(seen.key_averages(), key=lambda one: -one.device_time_total)[:14]
    tell(
        "kernels: ms of a forward and backward",
        ms=times,
        top=[(one.key[:60], round(one.device_time_total / 1e3, 2)) for one in top],
    )
