"""Rank 0 of a pack before images are read: list the source, deal it out, open the store, and plan."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bucketline.command_line import counted
from bucketline.errors import UsageError
from bucketline.families.family import Padding
from bucketline.files.atomic_write import refuse_too_little_disk
from bucketline.files.paths import refuse_overlap
from bucketline.ingest.config import CAPTION_OPTIONS, recorded_rules, refuse_other_options, shown_option, stored_options
from bucketline.ingest.images.crop import model_grid
from bucketline.ingest.packed_index import hold_out_one, leave_out_withdrawn, unknown
from bucketline.ingest.packing.packed_model import note_model
from bucketline.ingest.parallel.items import take_apart
from bucketline.ingest.partners.partner import planned_form, seen_groups
from bucketline.ingest.sources.dataset_file import open_source, source_as_json
from bucketline.ingest.sources.objects import ObjectSource, refuse_overlapping_urls
from bucketline.store import Store
from bucketline.store.commands.look import bar_of_bytes
from bucketline.store.folder import LocalFolder
from bucketline.store.format.block import CLASS_LABELS, DTYPES
from bucketline.store.format.manifest import Manifest  # noqa: TC001 - decoded by its annotation
from bucketline.store.format.schema import Schema, text_entry
from bucketline.store.read.files import refuse_lost_shards
from bucketline.store.remote.generations import find_newest
from bucketline.store.remote.urls import working_cache
from bucketline.store.write.publish import LocalTarget
from bucketline.typed_json import Json, TypedJsonError, decode_field

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bucketline.ingest.config import PackConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.images.crop import Grid
    from bucketline.ingest.parallel.items import Outline
    from bucketline.ingest.partners.partner import PartnerForm
    from bucketline.ingest.pipeline.model import EncoderFacts
    from bucketline.ingest.sources.source import Source
    from bucketline.store.folder import Folder
    from bucketline.store.remote.objects import ObjectFolder
    from bucketline.store.write.publish import StoreTarget


# ---------------------------------------------------------------------------------------------------------------- list and plan


def opened_source(config: PackConfig) -> Source:
    """Open the source, and check that it does not overlap with the store."""
    source = open_source(config.source, config)
    for path in source.local_paths:
        refuse_overlap(path, config.store)
    if isinstance(source, ObjectSource) and isinstance(config.place, str):
        refuse_overlapping_urls(source.folder_url, config.place)
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSource:
    """A source as rank 0 has listed it."""

    source: Source
    outline: Outline
    parts: list[list[bytes]]  # the items of each rank, see `ItemParts`
    num_withdrawn: int  # images whose ids are withdrawn: they are in no part
    started: float


def list_source(config: PackConfig, target: StoreTarget, num_ranks: int) -> ListedSource:
    """List the source, and deal its items out to ranks. `target` is held."""
    started = time.monotonic()
    source = opened_source(config)
    newest = newest_whole(target.folder)
    listing = config.listing_of(source)
    num_withdrawn = leave_out_withdrawn(listing, newest, config.taken_back)
    existing = target.newest()
    hold_out_one(listing.items, config.held_out, None if existing is None else target.open(existing))
    outline, shares = take_apart(listing, num_ranks)
    return ListedSource(
        source=source,
        outline=outline,
        parts=[own.parts for own in shares],
        num_withdrawn=num_withdrawn,
        started=started,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """The facts that all ranks of a pack share, decided by rank 0."""

    source: Json
    manifest: Manifest  # of the generation that the run continues
    token: str  # in the names of the run's shards, never used before
    num_ranks: int

    def name_of(self, writer: str) -> str:
        """Return what the names of the shards begin with that a rank makes."""
        return f"g{self.manifest.generation + 1:06d}-{self.token}-{writer}"


def make_plan(
    config: PackConfig,
    target: StoreTarget,
    listed: ListedSource,
    model: ModelFolder,
    facts: EncoderFacts,
    *,
    num_making: int,
) -> PackPlan:
    """Open or create the store, adopt the shards of an interrupted run, and check the free disk space.

    The store is locked for a moment: from then on each rank locks it for its commits. Its manifest keeps its caption rules
    until rows of other rules are published, in the same generation. `num_making`: processes that make shards on this disk;
    they send them if the store is in object storage.
    """
    existing = target.newest()
    if facts.text.get("family") == CLASS_LABELS:
        from bucketline.ingest.encoders.text_encoders import refuse_text_dtype

        config.caption_rules.refuse_for_classes(model.name)
        refuse_text_dtype(model, config.text_dtype)
    grid = model_grid(config.grid, model, facts.downscale)
    partners = planned_form(config, model, listed.outline.listing, existing)
    contents = Schema(
        encoders={"vae": dict(facts.vae), "text_encoder": dict(facts.text)},
        rules=recorded_rules(config, grid.name),
        max_captions=config.max_captions,
        text=text_entry(facts.columns),
        columns=partners.columns(flip=config.flip),
        ragged=seen_groups(partners.family, facts.columns),
    )
    is_recaptioned = False
    if existing is not None:
        refuse_other_options(config, existing, contents.encoders, contents.rules)
        contents.rules.update({name: existing.rules.get(name) for name in CAPTION_OPTIONS})
        is_recaptioned = config.caption_rules.difference(existing.rules) is not None
    most_bytes = num_making * SHARDS_ON_DISK * config.shard_size.num_bytes if isinstance(config.place, str) else None
    store = None if existing is None else target.open(existing)
    refuse_small_disk(config, facts, grid, partners, listed.outline, store, most_bytes, is_recaptioned=is_recaptioned)
    with target.writing(contents) as newest:
        if existing is None:
            note_model(config, is_compared=True)  # so that an interrupted run is continued without it
        manifest = target.publish(newest, (), taken_back=config.taken_back) if config.taken_back else newest
    return PackPlan(
        source=source_as_json(listed.source),
        manifest=manifest,
        token=secrets.token_hex(4),
        num_ranks=len(listed.parts),
    )


TOKENS_PER_CHARACTER = 0.3  # of a caption, to estimate whether the store will fit on the disk
DISK_FACTOR = 1.1  # page rounding, sample records, sidecars
SHARDS_ON_DISK = 4  # of a process that sends them: one that is written, one twice while it is sealed, one that is sent


def refuse_small_disk(
    config: PackConfig,
    facts: EncoderFacts,
    grid: Grid,
    partners: PartnerForm,
    outline: Outline,
    store: Store | None,
    most_bytes: int | None,
    *,
    is_recaptioned: bool,
) -> None:
    """Check that the disk has room for the estimated size of the new images, or of all if their captions change.

    `most_bytes`: what is on the disk at a time if shards leave it; None if they stay.
    """
    is_new = np.ones(outline.num_items, dtype=bool)
    if store is not None and not is_recaptioned:
        is_new = unknown(store, outline)
    num_new = int(is_new.sum())
    caption_chars = outline.caption_chars[np.repeat(is_new, outline.num_captions)]
    needed = estimate_bytes(config, facts, grid, partners, num_new, caption_chars)
    if most_bytes is not None:
        needed = min(needed, most_bytes)
    if facts.is_text_first:
        needed += int(_text_bytes(facts, caption_chars) * DISK_FACTOR)
    folder = next(path for path in (config.store, *config.store.absolute().parents) if path.exists())
    what = f"packing {counted(num_new, 'new image')} into {config.store}"
    if is_recaptioned:
        what = f"writing {counted(num_new, 'image')} again, with other captions, to {config.store}"
    refuse_too_little_disk(folder, needed, what, "choose another disk, or a smaller --grid")


def estimate_bytes(
    config: PackConfig, facts: EncoderFacts, grid: Grid, partners: PartnerForm, num_items: int, caption_chars: NDArray[np.int32]
) -> int:
    """Estimate the peak disk usage: rows of the largest bucket, with partners, tokens by caption length, one shard twice."""
    largest = max(size.height_px * size.width_px for size in grid.sizes)
    pixels, item_bytes = largest // facts.downscale**2, DTYPES[config.dtype].itemsize
    own = facts.stored_channels * pixels * item_bytes + partners.estimated_bytes(
        facts.latent_channels * item_bytes, largest, facts.downscale
    )
    row = own * (2 if config.flip else 1) + 512
    total = int((num_items * row + _text_bytes(facts, caption_chars)) * DISK_FACTOR)
    return total + min(total, config.shard_size.num_bytes)


def _text_bytes(facts: EncoderFacts, caption_chars: NDArray[np.int32]) -> int:
    num_tokens = len(caption_chars) * facts.max_tokens
    if facts.padding is Padding.VALID:
        lengths = 2 + (caption_chars * TOKENS_PER_CHARACTER).astype(np.int64)
        num_tokens = int(np.minimum(lengths, facts.max_tokens).sum())
    return num_tokens * facts.columns.token_bytes + len(caption_chars) * facts.columns.entry_bytes


# ---------------------------------------------------------------------------------------------------------------------- target


class Placed(Protocol):
    """The options of a command that writes to a store, in a folder or in object storage."""

    @property
    def place(self) -> Path | str:
        """Path or URL of the store."""

    @property
    def store(self) -> Path:
        """Its folder, or the one that stands for it."""

    @property
    def work(self) -> Path | None:
        """The folder that was given for `store`."""

    def objects(self, url: Path | str) -> ObjectFolder:
        """Return the folder at a URL."""


def target_of(config: Placed) -> StoreTarget:
    """Return the store, to be written; nothing is requested yet."""
    if isinstance(config.place, Path):
        return LocalTarget(config.store, waits=True)
    from bucketline.store.sync.working import WorkingStore

    folder, show = config.objects(config.place), partial(bar_of_bytes, "send")
    return WorkingStore(folder, config.store, working_cache(config.work), show)


def newest_whole(folder: Folder) -> Manifest | None:
    """Return the newest generation of the store in a folder; None if there is none."""
    if (manifest := find_newest(folder, lists=True)) is not None:
        refuse_lost_shards(folder, manifest)
    return manifest


def newest_store(config: Placed) -> Store | None:
    """Return the newest generation of the store where it is; None if there is none. Raises what `newest_whole` does."""
    folder = LocalFolder(config.store) if isinstance(config.place, Path) else config.objects(config.place)
    manifest = newest_whole(folder)
    return None if manifest is None else Store.at(folder, manifest, working_cache(config.work))


# ---------------------------------------------------------------------------------------------------------------- stored rules


def with_stored_rules(config: PackConfig) -> PackConfig:
    """Return the options with those of the store in place of what was `left_out`; as they are if there is no store.

    With `--recaption` the captions' options are as given: these are what it changes.
    """
    if not config.left_out:
        return config
    if isinstance(config.place, Path):
        manifest = newest_whole(LocalFolder(config.store))
    else:
        objects = config.objects(config.place)
        objects.refuse_read_only()
        manifest = newest_whole(objects)
    if manifest is None or "import" in manifest.rules:
        return config
    names = config.left_out - {*(CAPTION_OPTIONS if config.recaption else ())}
    stored = {name: value for name, value in stored_options(manifest).items() if name in names}
    try:
        return replace(config, **{name: decode_field(type(config), name, value, name) for name, value in stored.items()})
    except (TypedJsonError, UsageError):
        return config  # of a store that another program wrote: `refuse_other_options` names what differs


def changed_rules(before: PackConfig, after: PackConfig) -> list[str]:
    """Return the options that `with_stored_rules` has changed, as they are typed."""
    old, new = (_options(config) for config in (before, after))
    return [shown_option(name, value) for name, value in new.items() if old[name] != value]


def _options(config: PackConfig) -> dict[str, Json]:
    return {**recorded_rules(config, config.grid), "max_captions": config.max_captions}
