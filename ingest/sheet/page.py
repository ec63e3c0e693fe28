"""The page of a contact sheet: one HTML file without scripts, links to other files, or unescaped names."""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bucketline import __version__
from bucketline.command_line import counted, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from bucketline.ingest.summary import Reject

TOO_CROPPED = "Too much cropped away"  # the section of images that are rejected for it
MAX_REJECTS = 1000  # that the page lists

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --dim: #616161; --line: #d4d4d4; --page: #fff; --card: #f5f5f5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --dim: #a2a2a2; --line: #444; --page: #181818; --card: #242424; }
}
* { box-sizing: border-box; }
body { margin: 2rem auto; padding: 0 1.5rem; max-width: 84rem; color: var(--ink); background: var(--page);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
h2, h3 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; border-top: 1px solid var(--line); padding-top: 1rem; break-after: avoid; }
h3 { font-size: 1rem; border: 0; margin-top: .5rem; }
p { margin: .3rem 0 .9rem; max-width: 60rem; }
p, small, figcaption span { color: var(--dim); }
a { color: inherit; }
table { border-collapse: collapse; margin: .6rem 0 1.2rem; }
th, td { padding: .2rem 1.4rem .2rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(256px, 1fr)); gap: .8rem; }
figure { margin: 0; padding: 8px; background: var(--card); border-radius: 4px; break-inside: avoid;
  display: flex; flex-direction: column; }
figure > :first-child { margin: auto; }
figcaption { margin-top: 6px; font-size: 13px; line-height: 1.35; overflow-wrap: anywhere; }
.none { padding: 2.5rem 1rem; border: 1px dashed var(--line); text-align: center; color: var(--dim); overflow-wrap: anywhere; }
@media print {
  :root { --ink: #000; --dim: #444; --line: #bbb; --page: #fff; --card: #fff; }
  body { margin: 0; padding: 0; max-width: none; font-size: 10pt; }
  img { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumbnail:
    """An image as the page shows it; `problem` says why there is no JPEG."""

    id: str
    height_px: int  # of the source image
    width_px: int
    lost: float  # share of its area outside the crop
    jpeg: bytes = b""
    shown_px: tuple[int, int] = (0, 0)  # height, width of `jpeg`
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SheetSection:
    """A bucket, or the images that are rejected for their crop."""

    name: str
    images: int
    mean: float  # share of the area that the crops lose
    most: float
    shown: Sequence[Thumbnail]  # largest loss first


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The content of the page, of one source."""

    source: str  # without secrets
    grid: str
    crop: str
    max_crop: float
    found: int
    buckets: Sequence[SheetSection]  # largest loss first
    cropped: SheetSection | None  # images that are rejected because their crop would lose too much
    rejects: Sequence[Reject]
    rejected_by_reason: Mapping[str, int]


def sheet_page(title: str, sheets: Sequence[Sheet]) -> bytes:
    """Return the page in UTF-8, with the sheet of each source."""
    return "\n".join(_lines(title, sheets)).encode("utf-8")


def _lines(title: str, sheets: Sequence[Sheet]) -> Iterator[str]:
    # no script and nothing from elsewhere, even if a name should find a way past the escaping
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Crops of {_shown(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>"
    )
    for number, sheet in enumerate(sheets):
        yield from _sheet(sheet, f"source-{number}")
    yield "</body>\n</html>\n"


def _sheet(sheet: Sheet, anchor: str) -> Iterator[str]:
    yield f'<h1 id="{anchor}">Crops of {_shown(sheet.source)}</h1>'
    limit = f"; an image that would lose more than {_percent(sheet.max_crop)} of its area is rejected (<code>--max-crop</code>)"
    yield (
        f"<p>{counted(sheet.found, 'image')}, {len(sheet.rejects)} rejected. Grid {_shown(sheet.grid)}, crop: {sheet.crop}"
        f"{limit if sheet.max_crop < 1.0 else ''}. Written by <code>ingest scan</code> of bucketline {__version__}.</p>\n"
        "<p>The orange line is the crop; what is grey and hatched is lost. Sizes are height &times; width. Each bucket "
        "shows the images that lose most, largest loss first. Very narrow images are drawn wider than they are.</p>"
    )
    yield from _summary(sheet.buckets, anchor)
    for number, section in enumerate(sheet.buckets):
        yield from _section(section, f"{anchor}-bucket-{number}")
    if sheet.rejects:
        yield from _rejects(sheet, anchor)


def _summary(buckets: Sequence[SheetSection], anchor: str) -> Iterator[str]:
    rows = (
        (
            f'<a href="#{anchor}-bucket-{number}">{_shown(bucket.name)}</a>',
            bucket.images,
            _percent(bucket.mean),
            _percent(bucket.most),
        )
        for number, bucket in enumerate(buckets)
    )
    yield from _table(("bucket", "images", "lost on average", "lost at most"), rows, texts=1)


def _section(section: SheetSection, anchor: str, tag: str = "h2") -> Iterator[str]:
    numbers = f"{counted(section.images, 'image')}, {_percent(section.mean)} lost on average, {_percent(section.most)} at most"
    yield f'<section id="{anchor}">\n<{tag}>{_shown(section.name)} <small>{numbers}</small></{tag}>\n<div class="sheet">'
    for image in section.shown:
        yield _figure(image)
    yield "</div>"
    if (more := section.images - len(section.shown)) > 0:
        yield f"<p>and {more} more, which lose {_percent(section.shown[-1].lost)} or less</p>"
    yield "</section>"


def _figure(image: Thumbnail) -> str:
    name = _shown(image.id)
    if image.problem is None:
        height, width = image.shown_px
        data = base64.b64encode(image.jpeg).decode("ascii")
        shown = f'<img src="data:image/jpeg;base64,{data}" width="{width}" height="{height}" alt="{name}">'
    else:
        shown = f'<div class="none">{_shown(image.problem)}</div>'
    size = f"{image.height_px} &times; {image.width_px} px"
    return f"<figure>{shown}<figcaption><b>{_percent(image.lost)}</b> {name} <span>{size}</span></figcaption></figure>"


def _rejects(sheet: Sheet, anchor: str) -> Iterator[str]:
    yield f'<section id="{anchor}-rejected">\n<h2>Rejected <small>{counted(len(sheet.rejects), "image")}</small></h2>'
    counts = ((_shown(reason), count) for reason, count in sheet.rejected_by_reason.items())
    yield from _table(("reason", "images"), counts, texts=1)
    if sheet.cropped is not None:
        yield from _section(sheet.cropped, f"{anchor}-rejected-crops", "h3")
    named = sheet.rejects[:MAX_REJECTS]
    rows = ((_shown(reject.id), _shown(reject.reason), _shown(reject.detail)) for reject in named)
    yield from _table(("image", "reason", "found"), rows, texts=3)
    if (more := len(sheet.rejects) - len(named)) > 0:
        yield f"<p>and {more} more; <code>ingest scan --json</code> names all</p>"
    yield "</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], *, texts: int) -> Iterator[str]:
    """Yield the lines of a table; `texts` columns are text, the others numbers. The cells are already HTML."""

    def row(cells: Iterable[object], tag: str) -> str:
        kinds = ("" if n < texts else ' class="number"' for n in range(len(head)))
        return f"<tr>{''.join(f'<{tag}{kind}>{cell}</{tag}>' for kind, cell in zip(kinds, cells, strict=True))}</tr>"

    yield f"<table>\n<thead>{row(head, 'th')}</thead>\n<tbody>"
    for cells in rows:
        yield row(cells, "td")
    yield "</tbody>\n</table>"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _shown(text: str) -> str:
    """Return a text on one line, escaped; also surrogates, control characters and marks of direction are spelt out."""
    return html.escape(one_line(text))
