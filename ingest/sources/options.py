"""Options of a source, common to `ingest pack` and `ingest scan`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bucketline.errors import UsageError
from bucketline.store.remote.arguments import ObjectArguments


@dataclass(frozen=True, kw_only=True)
class SourceOptions(ObjectArguments):
    """Options about captions, splits, links and object storage."""

    caption_column: str | None = None  # in tables and saved datasets, or field of JSON files; None: the usual names
    caption_extension: str | None = None  # of caption files; None: the usual ones
    default_caption: str | None = None  # of images without one; None: they get the empty caption
    split: tuple[str, ...] = ()  # of a saved dataset: NAME, NAME=train or NAME=val; empty: all but test
    follow_links: bool = False  # follow file symlinks that lead out of the source

    def __post_init__(self) -> None:
        ObjectArguments.__post_init__(self)
        extension = self.caption_extension
        if extension is not None and (not extension.strip(".") or "/" in extension):
            raise UsageError(f"--caption-extension is {extension!r}, expected an extension such as .caption")
        caption = self.default_caption
        if caption is not None and (not caption.strip() or any("\ud800" <= letter <= "\udfff" for letter in caption)):
            raise UsageError(f"--default-caption is {caption!r:.80}, expected a caption, such as 'a photo of a dog'")
        for asked in self.split:
            name, equals, target = asked.partition("=")
            if not name or (equals and target not in ("train", "val")):
                raise UsageError(f"--split is {asked!r}, expected a split's name, NAME=train or NAME=val")

    def alone(self) -> SourceOptions:
        """Return only these options, without the other fields of a subclass."""
        return SourceOptions(**{field.name: getattr(self, field.name) for field in fields(SourceOptions)})
