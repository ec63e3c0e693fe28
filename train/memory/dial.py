"""`--memory`: options that save memory, chosen in order of cost until the count of a run fits."""

from __future__ import annotations

import importlib.util
import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bucketline.command_line import human_bytes
from bucketline.errors import BucketlineError, UsageError
from bucketline.store.format.columns import LATENT
from bucketline.train.compile import compiles
from bucketline.train.config import Base, TrainConfig
from bucketline.train.memory.activations import BatchSizes, usual_sizes
from bucketline.train.memory.table import EVERY_BLOCK, CountedModel, in_gb, label, run_of, table_of
from bucketline.train.memory_choice import EMA_EVERY, decided
from bucketline.train.models.load import locate, read_model_config
from bucketline.train.parallel import from_rank_zero
from bucketline.train.sharding import shard_ranks_of
from bucketline.train.values import EmaPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bucketline.loader import Loader
    from bucketline.option_value import ByteSize
    from bucketline.train.parallel import TrainRanks
    from bucketline.typed_json import Json

log = logging.getLogger(__name__)

SPARE = 0.05  # of the memory, for the driver, the workspaces of libraries, and gaps between tensors
LEAST_COMPILED = 0.5  # of what uncompiled blocks take in passing, if they are compiled: the compiler chooses what to recompute
PROPOSED_RANK = 16
_Options = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Options that save memory, in addition to those before them, and what they cost."""

    options: _Options
    price: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The first savings with which a run fits; if it fits with none, all of them."""

    options: _Options  # in place of the configuration's
    savings: tuple[Saving, ...]
    need: int  # bytes on each device
    plain: int  # without any savings
    fits: bool

    def __str__(self) -> str:
        """Return the choice and its price."""
        if not self.savings:
            return f"{human_bytes(self.need)} are needed, so nothing is saved"
        last: dict[str, Saving] = {name: one for one in self.savings for name in one.options}
        taken = [one for one in self.savings if one in last.values()]
        chosen = "; ".join(f"{label(one.options).strip('`')}: {one.price}" for one in taken)
        return f"{human_bytes(self.plain)} are needed, and {human_bytes(self.need)} with {chosen}"


def fitted(config: TrainConfig, ranks: TrainRanks, loader: Loader, memory: int, say: Callable[[str], None]) -> TrainConfig:
    """Return the configuration with the options that a memory of so many bytes needs; tell `say` which, and why.

    Raises:
        UsageError: if the run does not fit into --memory; the message has the nearest that does.
    """
    sharing = shard_ranks_of(config, ranks) if config.is_sharded(ranks.world_size) else ranks.world_size
    choice = from_rank_zero(ranks, lambda: _counted_choice(config, sharing, loader, memory))
    if choice is None:
        return decided(config)
    note = "; counted uncompiled: compiled blocks take less" if compiles(config, loader.device) else ""
    say(f"memory: {human_bytes(memory)}; {choice}{note}")
    return replace(decided(config), **choice.options)


def _counted_choice(config: TrainConfig, ranks: int, loader: Loader, memory: int) -> Choice | None:
    compiled = compiles(config, loader.device)
    try:
        folder, _ = locate(config.model, config.model_config)
        counting, sizes = CountedModel(read_model_config(folder)[1]), largest_batch(loader)
        choice = choose(config, counting, sizes, memory, ranks=ranks, compiled=compiled and config.memory is None)
        chosen = replace(decided(config), **choice.options)
        least = counting.held(chosen, ranks).total
    except Exception as error:
        if config.memory is not None and isinstance(error, BucketlineError):
            raise
        log.warning("memory is not counted, so nothing is saved: %s: %s", type(error).__name__, f"{error!s:.300}")
        return None
    if choice.fits:
        return choice
    if config.memory is not None:
        least = _least(choice.need, least, compiled=compiled)
    said = refusal(config, counting, sizes, memory, choice, ranks=ranks)
    if least > (memory if config.memory is None else memory * (1 - SPARE)):
        raise UsageError(said)
    log.warning("%s%s", said, "; compiled blocks take less, so it may fit all the same" if compiled else "")
    return choice


def _least(need: int, held: int, *, compiled: bool) -> int:
    """Return the least that a run may need which was counted uncompiled, and of it what it holds between steps."""
    return int(held + LEAST_COMPILED * (need - held)) if compiled else need


def largest_batch(loader: Loader) -> BatchSizes:
    """Return the sizes of a micro-batch of the bucket that needs most."""

    def latents(bucket: Any) -> tuple[int, ...]:  # noqa: ANN401 - of a store or of several
        return loader.config.rows_of(bucket), *bucket.spec.column(LATENT).shape

    images, _, height, width = max((latents(bucket) for bucket in loader.rows.buckets("train")), key=math.prod)
    encoder = loader.shares[0].store.manifest.encoders.get("text_encoder")
    tokens = encoder.get("max_tokens") if isinstance(encoder, dict) else None
    return BatchSizes(images=images, height=height, width=width, tokens=tokens if isinstance(tokens, int) else None)


def choose(
    config: TrainConfig, counting: CountedModel, sizes: BatchSizes, memory: int, *, ranks: int = 1, compiled: bool = False
) -> Choice:
    """Return the savings with which a run fits into so many bytes, the cheapest first.

    `compiled`: blocks are compiled, and the memory is what there is: nothing is saved if the run may fit as it is.
    """
    savings, steps = list(savings_of(config, ranks)), [_Options()]
    for saving in savings:
        steps.append({**steps[-1], **saving.options})
    runs = [replace(decided(config), **options) for options in steps]
    room = memory * (1 - SPARE)

    def need(number: int) -> int:
        return counting.need(runs[number], sizes, ranks)

    plain = need(0)
    if _least(plain, counting.held(runs[0], ranks).total, compiled=compiled) <= room:
        return Choice(options={}, savings=(), need=plain, plain=plain, fits=True)
    found = _first(len(runs), sum("recompute" in saving.options for saving in savings), lambda number: need(number) <= room)
    last = len(runs) - 1 if found is None else found
    return Choice(options=steps[last], savings=tuple(savings[:last]), need=need(last), plain=plain, fits=found is not None)


def _first(count: int, recomputing: int, fits: Callable[[int], bool]) -> int | None:
    """Return the first number from 1 on that fits; up to `recomputing`, the more is recomputed, the less is needed.

    >>> _first(8, 4, lambda number: number >= 3), _first(8, 4, lambda number: number >= 6), _first(3, 0, lambda _: False)
    (3, 6, None)
    """
    if recomputing and fits(recomputing):
        low, high = 1, recomputing
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return low
    return next((number for number in range(recomputing + 1, count) if fits(number)), None)


def savings_of(config: TrainConfig, ranks: int = 1) -> Iterator[Saving]:
    """Yield what saves memory, in order of cost; an option that is given is not changed."""
    has_torchao, is_whole = importlib.util.find_spec("torchao") is not None, not config.is_sharded(ranks)
    if config.recompute is None and not config.offload_blocks:
        for share in (0.25, 0.5, 0.75, 1.0):
            yield Saving(options={"recompute": share}, price=f"up to {share / 3:.0%} more time, and the same losses")
    if config.lora_rank is None:
        if config.ema.decay is not None and config.ema.place is None:
            every = EMA_EVERY if config.ema.every == 1 else config.ema.every
            yield Saving(
                options={"ema": replace(config.ema, place=EmaPlace.CPU, every=every)},
                price=f"the average moves every {every} steps, by a copy to the device and back",
            )
        if config.optimizer is None and not config.resume and has_torchao and is_whole:
            yield Saving(options={"optimizer": "adamw-8bit"}, price="moments have 8 bits")
        return
    if not is_whole or config.dora:
        return
    if config.base is None and has_torchao:
        yield Saving(options={"base": Base.INT8}, price="frozen weights have 8 bits")
        yield Saving(options={"base": Base.NF4}, price="frozen weights have 4 bits")
    if config.offload_blocks is None and config.recompute in (None, 1):
        yield Saving(
            options={"offload_blocks": EVERY_BLOCK}, price="frozen weights wait in host memory and are copied for each use"
        )


def refusal(
    config: TrainConfig, counting: CountedModel, sizes: BatchSizes, memory: int, choice: Choice, *, ranks: int = 1
) -> str:
    """Return that a run does not fit, with the nearest that does."""
    run, room = replace(decided(config), **choice.options), memory * (1 - SPARE)

    def fits(one: TrainConfig, images: int) -> bool:
        return counting.need(one, replace(sizes, images=images), ranks) <= room

    ways: list[str] = []
    if sizes.images > 1 and fits(run, 1):
        low, high = 1, sizes.images - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(run, middle) else (low, middle - 1)
        ways.append(f"--batch {low}")
    elif config.lora_rank is None:
        adapters = replace(config, lora_rank=PROPOSED_RANK, optimizer=None, recompute=None)
        if (other := choose(adapters, counting, sizes, memory, ranks=ranks)).fits:
            more = f" with {label(other.options).strip('`')}" if other.options else ""
            ways.append(f"--lora-rank {PROPOSED_RANK}{more}")
    ways.append(f"--memory {math.ceil(choice.need / (1 - SPARE) / (1 << 30) * 10) / 10:g}GiB")
    saved = f", with {label(choice.options).strip('`')}" if choice.options else ""
    given = f"--memory is {config.memory}" if config.memory else f"the device has {human_bytes(memory)}"
    return (
        f"{given}, and the run needs {human_bytes(choice.need)} for a batch of {sizes.images} with latents of "
        f"{sizes.height} by {sizes.width}{saved}; {SPARE:.0%} of the memory stay free; what fits: {' or '.join(ways)}"
    )


def as_table(configs: Mapping[str, Mapping[str, Json]], memory: ByteSize, rank: int, images: int) -> str:
    """Return in Markdown what runs choose in so much memory, and the GB of 10^9 bytes that they need then.

    A column for each model; in full and with adapters of `rank`, with batches of so many images of the model's own size.
    """
    counted = [CountedModel(config) for config in configs.values()]
    rows: list[tuple[str, list[str]]] = []
    for given in ({}, {"lora_rank": rank}):
        asked = run_of(given)
        found = [choose(asked, one, usual_sizes(one.made(asked)[0], images), memory.num_bytes) for one in counted]
        rows.append((label(given), [in_gb(one.plain) for one in found]))
        rows.append(("chosen", [label(one.options) if one.options else "nothing" for one in found]))
        rows.append(("then", [in_gb(one.need) if one.fits else f"{in_gb(one.need)}: does not fit" for one in found]))
    return table_of(f"GB, of {memory}, for a batch of {images}", configs, rows)
