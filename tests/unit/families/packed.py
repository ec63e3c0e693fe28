"""A form's tiny pipeline, and a store of two captions of different lengths that `ingest` packed with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bucketline.families.family import Family
from bucketline.families.registry import family_of_pipeline
from tests.commands import Ran, call
from tests.family_models import FORMS
from tests.models import png

TEXTS = ("a red cat", "a blue dog of the house")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A family's tiny pipeline, and a store that was packed with it."""

    form: str
    model: Path
    images: Path
    store: Path

    @property
    def family(self) -> type[Family]:
        found = family_of_pipeline(FORMS[self.form].pipeline)
        assert found is not None
        return found

    @property
    def encoder(self) -> str:
        """A text encoder that the family cannot do without."""
        return next(part.encoder for part in self.family.parts if not part.is_optional)

    @property
    def tokenizer(self) -> str:
        return next(part.tokenizer for part in self.family.parts if not part.is_optional)


def ingest(command: str, packed: Packed, model: Path, *more: object) -> Ran:
    height, width = FORMS[packed.form].size
    return call("ingest", command, packed.images, *more, "--model", model, "--grid", f"{height}x{width}", "--min-size-px", 8)


def pack(form: str, model: Path, root: Path) -> Packed:
    height, width = FORMS[form].size
    made = Packed(form=form, model=model, images=root / "images", store=root / "store")
    made.images.mkdir()
    for n, text in enumerate(TEXTS):
        (made.images / f"{n}.png").write_bytes(png(height, width, seed=n))
        (made.images / f"{n}.txt").write_text(text, encoding="utf-8")
    ingest("pack", made, model, made.store).done()
    return made
