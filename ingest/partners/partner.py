"""Partners of a sample: opened with its image, transformed with it or by a rule of their own, stored as columns of its row."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bucketline.errors import FingerprintError, UsageError
from bucketline.families.references import AREA_PX
from bucketline.families.registry import family_of_model, family_of_pipeline
from bucketline.files.paths import redacted
from bucketline.ingest.images.crop import Reason, RejectedError
from bucketline.ingest.sources.folder import FolderSource
from bucketline.ingest.sources.objects import ObjectFolderSource, ObjectSource
from bucketline.ingest.sources.partner_names import MASK, NONE, MaskForm
from bucketline.ingest.sources.source import SourceItem, Stamp
from bucketline.ingest.sources.tar import TarSource
from bucketline.store.format.block import (
    IS_IMAGE,
    SEEN_EMPTY,
    SEEN_IMAGES,
    Column,
    draw,
    flipped_role,
    identity,
    reference_role,
)
from bucketline.store.format.schema import ColumnRole
from bucketline.store.write.row_form import Axis, LatentColumn, MaskColumn, RaggedGroup, ReferenceColumn, with_flipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any, BinaryIO

    from numpy.typing import NDArray

    from bucketline.families.references import References
    from bucketline.ingest.config import PackConfig, ScanConfig
    from bucketline.ingest.encoders.model_folder import ModelFolder
    from bucketline.ingest.sources.dataset_file import DatasetEntry
    from bucketline.ingest.sources.partner_names import Partner
    from bucketline.ingest.sources.source import Listing, Source, SourceOptions
    from bucketline.store.format.schema import RaggedEntry, Schema
    from bucketline.store.format.text import TextSpec
    from bucketline.store.write.row_form import RowColumn


# ------------------------------------------------------------------------------------------------------------------------ read


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFiles:
    """The contents of an image and of its partners, in order."""

    data: bytes
    partners: tuple[bytes, ...]
    stamp: Stamp  # of all of them

    @property
    def content(self) -> bytes:
        """The digest of the image's bytes, followed by the digests of its partners if it has any."""
        return identity(b"".join((self.data, *map(identity, self.partners)))) if self.partners else identity(self.data)


class SampleReader:
    """Opens images of a source with their partners; safe to use from several threads."""

    def __init__(self, source: Source, options: SourceOptions) -> None:
        """Open the folders that `references` and `mask` name. Nothing is read yet."""
        own = options.alone()
        places = own.partner_rules.places
        self._places: list[Source] = [source, *(_folder(place, own) for place in places)]
        self._names = ("", *(Path(place).name for place in places))

    def stamp(self, item: SourceItem) -> Stamp:
        """Return the size and mtime of an image; with partners, the sum of sizes, and a draw from stamps and names."""
        stamp = self._places[0].stamp(item)
        if not item.partners:
            return stamp
        stamps = [stamp]
        for partner in item.partners:
            with self.naming(partner):
                stamps.append(self._places[partner.place].stamp(_as_item(partner)))
        return self._joined(item, stamps)

    def read(self, item: SourceItem) -> SampleFiles:
        """Read an image and its partners."""
        data, stamp = self._places[0].read(item)
        if not item.partners:
            return SampleFiles(data=data, partners=(), stamp=stamp)
        partners, stamps = [], [stamp]
        for partner in item.partners:
            with self.naming(partner):
                own, stamp = self._places[partner.place].read(_as_item(partner))
            partners.append(own)
            stamps.append(stamp)
        return SampleFiles(data=data, partners=tuple(partners), stamp=self._joined(item, stamps))

    def _joined(self, item: SourceItem, stamps: Sequence[Stamp]) -> Stamp:
        """Return one stamp of all files, and of their names: files that take each other's place may have equal stamps."""
        names = (f"{self._names[one.place]}/{'' if one.at else one.name}" for one in item.partners)
        text = ",".join((*(f"{stamp.num_bytes}:{stamp.mtime_ns}" for stamp in stamps), *names))
        return Stamp(num_bytes=sum(stamp.num_bytes for stamp in stamps), mtime_ns=draw(text, "stamp") >> 1)

    def opened(self, partner: Partner) -> BinaryIO:
        """Open a partner to read a part of it, such as its header."""
        return self._places[partner.place].opened(_as_item(partner))

    def with_partners_held(self, item: SourceItem) -> SourceItem:
        """Return an item with the bytes of those of its partners that are in object storage."""
        own = list(item.partners)
        for n, one in enumerate(own):
            place = self._places[one.place]
            if isinstance(place, ObjectSource) or (isinstance(place, TarSource) and place.is_remote):
                own[n] = replace(one, held=place.read(_as_item(one))[0])
        return replace(item, partners=tuple(own))

    def shown(self, partner: Partner) -> str:
        place = self._places[partner.place]
        folder = {FolderSource: "path", ObjectFolderSource: "url"}.get(type(place), "") if partner.place else ""
        return f"{redacted(str(getattr(place, folder)))}/{partner.name}" if folder else partner.name

    @contextmanager
    def naming(self, partner: Partner) -> Iterator[None]:
        """Reject a sample for its partner, with both names."""
        try:
            yield
        except RejectedError as error:
            why = error.detail if error.reason is Reason.PARTNER else error
            detail = f"its {partner.kind} {self.shown(partner)}: {why}"
            raise RejectedError(Reason.PARTNER, detail, is_passing=error.is_passing) from error


def _folder(place: str, options: SourceOptions) -> Source:
    return ObjectFolderSource(url=place, options=options) if "://" in place else FolderSource(path=Path(place), options=options)


def _as_item(partner: Partner) -> SourceItem:
    return SourceItem(id=partner.name, captions=(), at=partner.at, held=partner.held)


# ------------------------------------------------------------------------------------------------------------------------ form


@dataclass(frozen=True, slots=True, kw_only=True)
class PartnerForm:
    """What the rows of a store have of partners."""

    num_references: int = 0  # of a sample at most: the columns
    mask: str | None = None  # `file`, `alpha` or `whole`; None: no column
    family: References | None = None  # what the model's family does with references
    model: str = ""  # in messages
    area_px: int | None = None  # of a reference, in place of the family's own

    @property
    def sees_images(self) -> bool:
        """True if captions are encoded behind their sample's references."""
        return self.family is not None and self.family.text_sees

    @property
    def is_empty(self) -> bool:
        return not self.num_references and self.mask is None

    def refuse_number(self, number: int) -> None:
        """Check how many references a sample has.

        Raises:
            RejectedError: if the store or the model's family takes more, or fewer.
        """
        least, most = (0, 0) if self.family is None else (self.family.least, self.family.most)
        if not least <= number <= most:
            takes = f"{most}" if least == most else f"{least} to {most}"
            remedy = "leave some out" if number > most else "add one"
            raise RejectedError(Reason.PARTNER, f"it has {number} references, {self.model} takes {takes}; {remedy}")
        if number > self.num_references:
            raise RejectedError(
                Reason.PARTNER,
                f"it has {number} references, the store's samples have {self.num_references} at most, since its first pack; "
                "leave some out, or pack into a new store",
            )

    def bucket_sizes(self, sizes: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Return what a bucket's name has of the references' heights and widths in px: 0 of those that a sample lacks."""
        return tuple(side for size in (*sizes, *((0, 0),) * (self.num_references - len(sizes))) for side in size)

    def row_columns(
        self, *, channels: int, stored_channels: int, px_per_latent: int, dtype: str, flip: bool
    ) -> tuple[RowColumn, ...]:
        """Return the columns of rows: the target's latent, its references, its mask, each with its mirror image if `flip`."""
        target = replace(LatentColumn(channels=stored_channels, downscale=px_per_latent, dtype=dtype), encoder="vae")
        references = (
            ReferenceColumn(n, channels=channels, downscale=px_per_latent, dtype=dtype) for n in range(self.num_references)
        )
        masks = () if self.mask is None else (MaskColumn(downscale=px_per_latent),)
        columns = (target, *references, *masks)
        return with_flipped(columns) if flip else columns

    def estimated_bytes(self, bytes_per_latent: int, target_px: int, px_per_latent: int) -> int:
        """Return about how many bytes a row has of partners, of which references are as large as their target or their area."""
        pixels = max(target_px, self.area_px or AREA_PX) if self.num_references else 0
        per_mask = 0 if self.mask is None else target_px // px_per_latent**2
        return self.num_references * pixels // px_per_latent**2 * bytes_per_latent + per_mask

    def px_per_latent_in(self, schema: Schema) -> int:
        """Return how many px a latent pixel of a store covers, each way."""
        vae = schema.encoders.get("vae")
        found = vae.get("downscale") if isinstance(vae, dict) else None
        return found if isinstance(found, int) else 8

    def values(
        self,
        sample: int,
        mask: NDArray[np.uint8] | None,
        latents: Mapping[tuple[int, int], tuple[NDArray[Any], ...] | str],
        absent: NDArray[Any],
        *,
        flip: bool,
    ) -> dict[str, NDArray[Any]] | str:
        """Return a row's values of partners by column, or why they cannot be stored; those that it lacks have no bytes.

        `latents`: of each reference and its mirror image, [C, h, w], by the number of the `sample` and of the reference; those
        of another are `absent`, [C, 0, 0].
        """
        found: dict[str, NDArray[Any]] = {}
        for number in range(self.num_references):
            own, role = latents.get((sample, number), (absent, absent)), reference_role(number)
            if isinstance(own, str):
                return f"{role} {own}"
            found |= zip((role, flipped_role(role))[: 1 + flip], own, strict=False)
        if mask is not None:
            found[MASK] = mask
            if flip:
                found[flipped_role(MASK)] = np.ascontiguousarray(mask[:, ::-1])
        return found

    def columns(self, *, flip: bool) -> dict[str, ColumnRole]:
        """Return the columns in a manifest's form; none if rows have no partners."""
        if self.is_empty:
            return {}
        own = self.row_columns(channels=1, stored_channels=1, px_per_latent=1, dtype="F16", flip=flip)
        return {one.name: ColumnRole(role=one.role, encoder=one.encoder, optional=False) for one in own}


def axes_of(columns: Sequence[RowColumn]) -> tuple[str, ...]:
    """Return the names of the axes of a bucket with these columns, in order."""
    return tuple(dict.fromkeys(axis.name for column in columns for axis in column.dimensions if isinstance(axis, Axis)))


def seen_groups(family: References | None, text: TextSpec) -> dict[str, RaggedEntry]:
    """Return the ragged groups of a store whose text encoder sees the images, in a manifest's form; none of others."""
    if family is None or not family.text_sees:
        return {}
    tokens = tuple(text.delivered.tokens)
    groups = {SEEN_IMAGES: (Column(name=IS_IMAGE, dtype="U8", shape=()), *tokens), SEEN_EMPTY: tokens}
    return {name: RaggedGroup(columns=own, encoder="text_encoder").entry(name) for name, own in groups.items()}


# ------------------------------------------------------------------------------------------------------------------------ plan


def stored_form(config: PackConfig | ScanConfig, model: ModelFolder, schema: Schema) -> PartnerForm:
    """Return the form of a store's rows; the model says how references are resized."""
    name, family = _family(config, model)
    return PartnerForm(
        num_references=sum(reference_role(n) in schema.columns for n in range(len(schema.columns))),
        mask=config.partner_rules.mask_source if MASK in schema.columns else None,
        family=None if family is None else replace(family, text_sees=schema.sees_images),
        model=name,
        area_px=None if config.references_area is None else config.references_area**2,
    )


def planned_form(config: PackConfig | ScanConfig, model: ModelFolder, listing: Listing, schema: Schema | None) -> PartnerForm:
    """Return the form of the rows of a store that exists, with `schema`, or of a new one; refuse what cannot be packed at all.

    Raises:
        UsageError: if the model takes no references and there are some, or needs them and there are none.
        FingerprintError: if the store has other partners.
    """
    name, family = _family(config, model)
    rules, found = config.partner_rules, listing.num_references
    source = redacted(config.source)
    if family is None and (found or rules.has_references):
        raise UsageError(
            f"{source} has references, and {name} takes none; name a model that edits images, or set references = "
            '"none" for this source in a data set file'
        )
    if rules.has_references and not found:
        raise UsageError(f"{source}: not one image has a reference; check `references` of the source in the data set file")
    if family is not None and family.least > found:
        raise UsageError(
            f"{source} has no references, and {name} needs {family.least} of each image; name them by `references` of a "
            "source in a data set file, or name a model that draws from captions"
        )
    if family is not None and len(rules.folders) > family.most:
        raise UsageError(
            f"{source}: references names {len(rules.folders)} folders, and {name} takes {family.most} at most; leave some out"
        )
    if schema is None:
        most = min(max(len(rules.folders), found), 0 if family is None else family.most)
        if family is not None:  # of images alone, captions are those of a model that draws from captions
            family = replace(family, text_sees=family.text_sees and (most > 0 or config.references_optional))
        if family is not None and family.text_sees and config.flip:
            raise UsageError(
                f"--flip: the text encoder of {name} sees the references, which a mirrored image is not of; leave it out"
            )
        area_px = None if config.references_area is None else config.references_area**2
        return PartnerForm(num_references=most, mask=rules.mask_source, family=family, model=name, area_px=area_px)
    form = stored_form(config, model, schema)
    has_mask = MASK in schema.columns
    if found and not form.num_references:
        raise FingerprintError(
            f"the store was made without references, {source} has some; pack into a new store, or set references = "
            '"none" for this source in a data set file'
        )
    if form.num_references and not found and config.references == ():
        raise FingerprintError(
            f"the store has references, and {source} none: its samples would lose them; name them by `references` of a "
            'source in a data set file, or "none" to pack images without'
        )
    if has_mask != (rules.mask is not None):
        now, before = ("a mask", "none") if rules.mask else ("no mask", "masks")
        raise FingerprintError(
            f"{source} has {now}, the store {before}; pack into a new store, or name the mask by `mask` of a source in a data "
            f'set file: "{MaskForm.WHOLE}" counts each image in full'
        )
    return form


def refuse_unlike(config: PackConfig | ScanConfig, entries: Sequence[DatasetEntry], model: ModelFolder) -> None:
    """Check that captions of all sources of a data set file are encoded alike; their stores could not be read together.

    Raises:
        UsageError: if the text encoder sees the references of some sources, and others have none.
    """
    alone = [entry for entry in entries if entry.references in ((), (NONE,)) and not entry.references_optional]
    pairs = [entry for entry in entries if entry.references not in ((), (NONE,))]
    if alone and pairs:
        name, family = _family(config, model)
        if family is not None and family.text_sees:
            raise UsageError(
                f"{config.source}: source {alone[0].name} names no references, source {pairs[0].name} does, and the text "
                f"encoder of {name} sees them; set references_optional = true for {alone[0].name}, so that its captions are "
                "encoded as the others'"
            )


def _family(config: PackConfig | ScanConfig, model: ModelFolder) -> tuple[str, References | None]:
    """Return a model's name in messages, with its pipeline, and what its family does with references."""
    transformer, pipeline = model.config("transformer"), model.index().get("_class_name")
    family = family_of_pipeline(str(pipeline))
    if family is None and transformer is not None:
        family = family_of_model(transformer, "transformer", str(pipeline))
    name = f"{redacted(model.name)}{'' if pipeline is None else f' ({pipeline!s:.80})'}"
    if family is None or family.references is None:
        return name, None
    from bucketline.ingest.encoders.text_encoders import text_family_of  # imports torch

    sees = family.references.text_sees and text_family_of(model, is_plain=config.text is not None) is not None
    return name, replace(family.references, text_sees=sees)
