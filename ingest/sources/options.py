"""Options of a source, common to `ingest pack` and `ingest scan`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bucketline.errors import UsageError
from bucketline.store.remote.arguments import ObjectArguments


@dataclass(frozen=True, kw_only=True)
class SourceOptions(ObjectArguments):
    """Options about captions, splits, links and object storage."""

    captions_from: tuple[str, ...] = ()  # a column or field, and .EXT of caption files; empty: the usual ones
    caption: str | None = None  # of images without one; None: they get the empty caption
    dataset_splits: tuple[str, ...] = ()  # NAME, NAME=train or NAME=val; empty: all but test
    follow_links: bool = False  # follow file symlinks that lead out of the source

    def __post_init__(self) -> None:
        ObjectArguments.__post_init__(self)
        for one, kind in ((self._columns, "column"), (self._extensions, "extension")):
            if len(one) > 1:
                raise UsageError(f"--captions-from {one[0]} and {one[1]}: expected at most one {kind}")
        extension = self.caption_extension
        if extension is not None and (not extension.strip(".") or "/" in extension):
            raise UsageError(f"--captions-from is {extension!r}, expected a column's name, or an extension such as .caption")
        caption = self.caption
        if caption is not None and (not caption.strip() or any("\ud800" <= letter <= "\udfff" for letter in caption)):
            raise UsageError(f"caption is {caption!r:.80}, expected a caption, such as 'a photo of a dog'")
        for asked in self.dataset_splits:
            name, equals, target = asked.partition("=")
            if not name or (equals and target not in ("train", "val")):
                raise UsageError(f"dataset_splits has {asked!r}, expected a split's name, NAME=train or NAME=val")

    @property
    def _columns(self) -> list[str]:
        return [one for one in self.captions_from if not one.startswith(".")]

    @property
    def _extensions(self) -> list[str]:
        return [one for one in self.captions_from if one.startswith(".")]

    @property
    def caption_column(self) -> str | None:
        """Column of tables and saved datasets, or field of JSON files, that has the captions; None: the usual names."""
        return next(iter(self._columns), None)

    @property
    def caption_extension(self) -> str | None:
        """Extension of the caption files, with its dot; None: the usual ones."""
        return next(iter(self._extensions), None)

    def alone(self) -> SourceOptions:
        """Return only these options, without the other fields of a subclass."""
        return SourceOptions(**{field.name: getattr(self, field.name) for field in fields(SourceOptions)})
