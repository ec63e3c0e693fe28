"""Checks of the machine, of random draws, and of the loader's copies to a device."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import torch

from bucketline.loader import Batch, Loader, LoaderConfig
from bucketline.loader.plan.order import Purpose, _words, normal, uniform
from tests.gpu.material import DEVICE, ON_GPU, kept, lag, sync, tell

ON_THE_SECOND = """
import sys, torch
from itertools import islice
from bucketline.loader import Loader, LoaderConfig

torch.cuda.set_device(1)
for service in (None, "auto"):
    with Loader(sys.argv[1], LoaderConfig(batch_size=4), device="cuda:1", service=service) as one:
        list(islice(one.forever(), 20))
sys.exit(torch._C._cuda_hasPrimaryContext(0))
"""


def env() -> None:
    """The GPU is of Hopper or later and has a C compiler next to it."""
    compilers = subprocess.run(["sh", "-c", "command -v gcc cc"], capture_output=True, text=True, check=False).stdout.split()
    if not ON_GPU:
        tell("env", torch=torch.__version__, cpus=os.cpu_count(), compilers=compilers)
        return
    found = torch.cuda.get_device_properties(0)
    tell(
        "env",
        ok=torch.cuda.is_bf16_supported() and found.major >= 9 and bool(compilers),
        gpu=found.name,
        num_gpus=torch.cuda.device_count(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        memory_gib=found.total_memory >> 30,
        cpus=os.cpu_count(),
    )
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    for timed in (False, True):
        sync()
        begin = time.perf_counter()
        for _ in range(10):
            a @ a
        sync()
        if timed:
            tell("env: bf16 matmul TFLOP/s", value=round(10 * 2 * 8192**3 / (time.perf_counter() - begin) / 1e12))


def draws() -> None:
    """Random draws on the device are the CPU's: integers to the bit, normals to rounding (finding 27)."""
    keys = torch.randint(-(1 << 62), 1 << 62, (512,), generator=torch.Generator().manual_seed(0))
    there = keys.to(DEVICE)
    tell("draws: words are equal", ok=torch.equal(_words(keys, Purpose.NOISE), _words(there, Purpose.NOISE).cpu()))
    tell("draws: uniforms are equal", ok=torch.equal(uniform(keys, Purpose.TIMESTEP), uniform(there, Purpose.TIMESTEP).cpu()))
    mine, other = normal(keys, Purpose.NOISE, (4, 64, 64)), normal(there, Purpose.NOISE, (4, 64, 64)).cpu()
    off = float((mine - other).abs().max())
    tell("draws: normals agree", ok=off < 1e-5, largest=off, differ=float((mine != other).float().mean()))
    tell("draws: normals are normal", ok=abs(float(other.mean())) < 5e-3 and abs(float(other.std()) - 1) < 5e-3)


def _sums(batch: Batch) -> torch.Tensor:
    flat = [tensor.contiguous().view(torch.uint8).flatten().long() for tensor in batch.by_name().values()]
    return torch.stack([(one * torch.arange(1, len(one) + 1, device=one.device)).sum() for one in flat])


def loader() -> None:
    """Batches are the CPU's to the byte, in process and from a service, while the stream lags behind the host."""
    path, _ = kept("tiny", 64)
    asked = LoaderConfig(batch_size=4, epochs=3, caption_dropout=0.1)
    with Loader(path, asked, device="cpu") as plain:
        expected = [_sums(batch) for batch in plain.forever()]
    for service in (None, "auto"):
        for threads in (1, 3):
            found, held = [], {}
            with Loader(path, dataclasses.replace(asked, threads=threads), device=DEVICE, service=service) as on_device:
                for number, batch in enumerate(on_device.forever()):
                    lag(2.0 if number % 5 == 0 else 0.1)  # the stream reads long after the host has moved on
                    found.append(_sums(batch))
                    if number % 7 == 0:
                        held[number] = batch
            sync()
            stays = all(torch.equal(_sums(batch).cpu(), expected[number]) for number, batch in held.items())
            same = [one.cpu().tolist() for one in found] == [one.tolist() for one in expected]
            tell("loader: the same bytes", ok=same and stays, service=service, threads=threads, batches=len(found))


def contexts() -> None:
    """A rank on the second GPU makes no context on the first (finding 4); needs two GPUs."""
    if not ON_GPU or torch.cuda.device_count() < 2:
        tell("contexts: needs two GPUs")
        return
    path, _ = kept("tiny", 64)
    done = subprocess.run([sys.executable, "-c", ON_THE_SECOND, str(path)], capture_output=True, text=True, check=False)
    tell("contexts: none on GPU 0", ok=done.returncode == 0, problem=done.stderr[-300:])


def copies() -> None:
    """Copies from pinned and registered memory are fast, do not stop the host, and overlap with compute."""
    if not ON_GPU:
        tell("copies: needs a GPU")
        return
    from bucketline.loader.prefetch.stream import CudaCopier
    from bucketline.loader.service.ring import map_shared, register, unregister

    size, copier = 64 << 20, CudaCopier(DEVICE)
    fd = os.memfd_create("accept")
    os.posix_fallocate(fd, 0, size)
    shared = map_shared(fd, 0, size)
    is_registered = register(shared)
    buffers = {
        "pinned": torch.empty(size, dtype=torch.uint8, pin_memory=True),
        "registered": torch.from_numpy(shared),
        "pageable": torch.empty(size, dtype=torch.uint8).fill_(1),
    }
    rates, host = {}, {}
    for name, buffer in buffers.items():
        for _ in range(2):  # the first time, memory is allocated
            sync()
            begin = time.perf_counter()
            calls = [copier.copy(buffer, size, lambda: None) for _ in range(16)]
            host[name] = (time.perf_counter() - begin) / 16
            for call in calls:
                copier.receive(*call)
            sync()
            rates[name] = 16 * size / (time.perf_counter() - begin) / 1e9
            del call, calls
    copier.finish()
    tell("copies: shared memory is registered", ok=is_registered)
    tell("copies: pinned ones are fast", ok=min(rates["pinned"], rates["registered"]) > 15, GB_per_s=rates)
    tell("copies: the host does not wait", ok=max(host["pinned"], host["registered"]) < 1e-3, host_s=host)
    lag(50)
    busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
    busy.record()
    _, copied = copier.copy(buffers["registered"], size, lambda: None)
    copied.synchronize()
    tell("copies: next to compute", ok=not busy.query())  # type: ignore[no-untyped-call]
    sync()
    unregister(shared)
    os.close(fd)


def services() -> None:
    """Services begun and ended again and again leave no descriptor and no memory."""
    path, _ = kept("tiny", 64)
    descriptors, resident_mib = [], []
    with Loader(path, LoaderConfig(batch_size=4), device=DEVICE, service="auto") as one:
        for number in range(60):
            list(islice(one.forever(), 5))
            if number in (10, 59):
                descriptors.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208
                resident_mib.append(int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096 >> 20)
    good = descriptors[0] == descriptors[1] and resident_mib[1] - resident_mib[0] < 64
    tell("services: begun and ended again and again", ok=good, descriptors=descriptors, resident_mib=resident_mib)


def memory() -> None:
    """The device's memory does not grow with the batches."""
    if not ON_GPU:
        tell("memory: needs a GPU")
        return
    path, _ = kept("tiny", 64)
    seen = []
    with Loader(path, LoaderConfig(batch_size=4), device=DEVICE) as one:
        for number, _ in enumerate(islice(one.forever(), 4000)):
            lag(0.02)
            if number in (1000, 3999):
                sync()
                seen.append((torch.cuda.memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20))
    tell("memory: the device's does not grow", ok=seen[1][1] <= seen[0][1] + 64, allocated_reserved_mib=seen)
