"""Report pages: one HTML file each, with charts as SVG and images inside."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import bucketline
from bucketline.command_line import counted, human_bytes, human_number, one_line, printable
from bucketline.errors import UsageError
from bucketline.extensions import extra_named
from bucketline.files.atomic_write import refuse_existing
from bucketline.files.paths import overlap, read_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray


# ----------------------------------------------------------------------------------------------------------------- image files
# The image files of pages, by Pillow: a page encodes the images that it shows, and never decodes a file of somebody else.

with extra_named("report"):
    from PIL import Image


_LEFT_OUT, _TINT = (230, 0, 40), 0.6  # the colour of what a mask leaves out, and how much of the image it hides
_JPEG = {"quality": 82, "subsampling": 0}  # sharp colours: captions are drawn into some images, and crops by a thin line


def png(pixels: NDArray[np.uint8], longest: int | None = None) -> bytes:
    """Return an RGB image, `[H, W, 3]`, as a PNG, averaged by a whole factor to at most `longest` pixels on its longer side."""
    image = Image.fromarray(pixels)
    return _encoded(image if longest is None else image.reduce(-(-max(image.size) // longest)), "PNG", optimize=True)


def jpeg(pixels: NDArray[np.uint8] | Image.Image, longest: int | None = None) -> bytes:
    """Return an RGB image, `[H, W, 3]` or Pillow's, as a JPEG whose longer side has at most `longest` pixels."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    if longest is not None and max(image.size) > longest:
        image = image.copy()
        image.thumbnail((longest, longest))
    return _encoded(image, "JPEG", **_JPEG)


def tinted(image: bytes, mask: NDArray[np.uint8]) -> bytes:
    """Return one of these files with red over what a mask, `[h, w]`, leaves out: all of it at 0, nothing at 255."""
    with Image.open(io.BytesIO(image)) as opened:
        kind, pixels = opened.format or "PNG", opened.convert("RGB")
    left_out = Image.fromarray(255 - mask).resize(pixels.size, Image.Resampling.NEAREST)
    pixels.paste(_LEFT_OUT, mask=left_out.point(lambda value: int(_TINT * value)))
    return jpeg(pixels) if kind == "JPEG" else _encoded(pixels, kind)


def _encoded(image: Image.Image, kind: str, **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(image: bytes) -> str:
    """Return a PNG or JPEG file as a `data:` URL."""
    kind = "png" if image.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"


# ------------------------------------------------------------------------------------------------------------------------ page

with extra_named("report"):
    from jinja2 import Environment, FileSystemLoader, StrictUndefined


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence at the top of a page."""

    level: str  # `error`, `warning` or `good`
    title: str
    detail: str = ""
    anchor: str | None = None  # the section that shows it


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """An image with its captions, as `parts.sheet` and `parts.gallery` take it."""

    images: Sequence[bytes]  # PNG or JPEG, next to each other; none: `problem` is shown
    title: str
    notes: Sequence[str] = ()
    captions: Sequence[str] = ()
    problem: str = "no image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a page that no template has. `body`: HTML of `parts`; anything else is shown as text."""

    anchor: str
    title: str
    body: str = ""
    note: str = ""
    findings: Sequence[Finding] = ()


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings in the order in which a page shows them."""
    return sorted(findings, key=lambda one: ("error", "warning", "good").index(one.level))


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage.

    >>> percent(0.125)
    '12.5 %'
    """
    return f"{100 * share:.{digits}f} %"


def _shown(value: object) -> object:
    """Return a template's value as text on one line: control characters and marks of direction are spelt out. HTML stays."""
    return value if hasattr(value, "__html__") else one_line(str(value))


_GENERATOR = b'<meta name="generator" content="bucketline">'  # as in page.html
_FOLDER = Path(bucketline.__file__).parent
_ENVIRONMENT = Environment(
    loader=FileSystemLoader(_FOLDER),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {one.__name__: one for one in (data_url, human_bytes, human_number, percent)}


class Macros(Protocol):
    """The macros of a template: functions that return HTML."""

    def __getattr__(self, name: str) -> Callable[..., str]: ...


parts = cast("Macros", _ENVIRONMENT.get_template("pages/parts.html").module)
_ENVIRONMENT.globals |= {"parts": parts, "counted": counted}


def document(
    template: str = "pages/page.html",
    *,
    title: str,
    subtitle: str,
    made_by: str,
    findings: Sequence[Finding] = (),
    tiles: Sequence[tuple[str, str]] = (),
    sections: Sequence[Section] = (),
    **values: object,
) -> bytes:
    """Return a page in UTF-8.

    `template`: its file below `bucketline/`, which extends `pages/page.html` and uses the `values`; by default there is none.
    `sections`: after those of the template; `made_by`: the command; `tiles`: value and what it is.
    """
    script, style = ((_FOLDER / "pages" / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    text = _ENVIRONMENT.get_template(template).render(
        title=title,
        subtitle=subtitle,
        made_by=made_by,
        findings=worst_first(findings),
        tiles=tiles,
        sections=sections,
        titles={},
        version=bucketline.__version__,
        style=style,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        **values,
    )
    return text.encode("utf-8", "backslashreplace")


def refuse_page(page: Path, folders: Iterable[tuple[str, Path]] = ()) -> None:
    """Check that a page can be written. `folders`: what they are, and their paths; it must be in none of them."""
    if page.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{page}: the page is written as HTML; name a file that ends in .html")
    for what, folder in folders:
        if overlap(page, folder):
            raise UsageError(f"{page} is inside the {what} {folder}; choose a place outside it")
    if not _is_ours(page):
        refuse_existing(page, "file")


def _is_ours(page: Path) -> bool:
    try:
        return not page.is_symlink() and _GENERATOR in read_regular(page, 1024)
    except OSError:
        return False


def page_report(page: Path, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return where a page was written and what is wrong by it, as JSON values."""
    return {"page": str(page), "findings": [asdict(one) for one in findings]}


def print_page(report: Mapping[str, Any]) -> None:
    page = Path(report["page"])
    print(f"{one_line(str(page))}: {human_bytes(page.stat().st_size)}")
    for finding in report["findings"]:
        if finding["level"] != "good":
            print(printable(f"  {finding['level']}: {finding['title']}. {finding['detail']}".rstrip()))


# ---------------------------------------------------------------------------------------------------------------------- charts
# Charts: where ticks and marks are, in pixels of an SVG that `parts.chart` draws in the page's colours.

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34
COLOURS = 6  # of lines; a seventh line has the first colour again
_MAX_POINTS = 600  # of a line; more are thinned


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """An axis between two values: linear, or by powers of two."""

    label: str = ""
    low: float
    high: float
    is_whole: bool = False  # its ticks
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return where a value is, from 0 to 1."""
        value, low, high = map(math.log2, (value, self.low, self.high)) if self.is_log else (value, self.low, self.high)
        return (value - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        if not self.is_log:
            return [(value, _number(value)) for value in _nice(self.low, self.high, is_whole=self.is_whole)]
        powers = range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1)
        return [(2.0**power, f"{2**power}" if power >= 0 else f"1/{2**-power}") for power in powers]


def histogram(edges: Sequence[float], counts: Sequence[int], label: str) -> str:
    """Return columns for counts between edges, one more than counts."""
    x, y = _Axis(label=label, low=edges[0], high=edges[-1], is_whole=True), _Axis(low=0, high=max(counts, default=0) or 1)
    spans = zip(edges, edges[1:], counts, strict=False)
    return _chart(x, y, columns=[(left, right, count) for left, right, count in spans if count])


def scatter(points: Sequence[tuple[float, float]], boxes: Sequence[tuple[float, float, str]], labels: tuple[str, str]) -> str:
    """Return points (x, y) and named boxes (x, y, name) on logarithmic axes."""
    both = [*points, *(box[:2] for box in boxes)]
    x, y = (_log_axis(label, [one[n] for one in both]) for n, label in enumerate(labels))
    return _chart(x, y, height=420, dots=points, boxes=boxes)


def lines(series: Sequence[Line], label: str, x_label: str = "step") -> str:
    """Return a line chart with a legend; lines without a point are left out."""
    drawn = [line for line in series if len(line.xs)]
    xs, ys = [x for line in drawn for x in line.xs], [y for line in drawn for y in line.ys]
    if not drawn:
        return parts.dim("not recorded")
    first, last, highest = min(xs), max(xs), max(ys)
    x = _Axis(label=x_label, low=first, high=last if last > first else first + 1.0, is_whole=all(x == int(x) for x in xs))
    return _chart(x, _Axis(low=0.0, high=highest if highest > 0.0 else 1.0), label=label, lines=drawn)


def _chart(
    x: _Axis,
    y: _Axis,
    *,
    label: str = "",
    height: int = HEIGHT,
    columns: Sequence[tuple[float, float, float]] = (),
    dots: Sequence[tuple[float, float]] = (),
    boxes: Sequence[tuple[float, float, str]] = (),
    lines: Sequence[Line] = (),
) -> str:
    bottom = height - BOTTOM

    def at(across: float, up: float) -> tuple[float, float]:
        place = LEFT + x.share(across) * (WIDTH - LEFT - RIGHT), bottom - y.share(up) * (bottom - TOP)
        return round(place[0], 1), round(place[1], 1)

    drawn = [(line, [at(*point) for point in _thinned(line)]) for line in lines]
    return parts.chart(
        label or f"{y.label} by {x.label}".removeprefix(" by "),
        frame={"left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": bottom, "width": WIDTH, "height": height},
        x_axis=x,
        y_axis=y,
        x_ticks=[(at(value, y.high)[0], text) for value, text in x.ticks()],
        y_ticks=[(at(x.low, value)[1], text) for value, text in y.ticks()],
        columns=[(at(left, up), at(right, y.low)) for left, right, up in columns],
        dots=[at(*dot) for dot in dots],
        boxes=[(*at(across, up), name) for across, up, name in boxes],
        lines=[(line, line.colour % COLOURS, " ".join(f"{a},{b}" for a, b in points), points) for line, points in drawn],
    )


def _thinned(line: Line) -> list[tuple[float, float]]:
    every = -(-len(line.xs) // _MAX_POINTS)
    points = list(zip(line.xs, line.ys, strict=True))
    return [*points[::every], *([points[-1]] if (len(points) - 1) % every else [])]


def _log_axis(label: str, values: Sequence[float]) -> _Axis:
    low, high = min(values, default=1.0), max(values, default=2.0)
    room = 2 ** max(0.12, 0.06 * math.log2(high / low))
    return _Axis(label=label, low=low / room, high=high * room, is_log=True)


def _nice(lowest: float, highest: float, *, is_whole: bool = False) -> list[float]:
    """Return round values between two others, about five; whole ones if `is_whole`.

    >>> _nice(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> _nice(20.0, 22.0, is_whole=True)
    [20.0, 21.0, 22.0]
    """
    if is_whole and highest - lowest < 14:  # else a distance could be 2.5 or less than 1
        every = 1 if highest - lowest < 7 else 2
        return [float(n) for n in range(math.ceil(lowest), math.floor(highest) + 1, every)]
    raw = (highest - lowest) / 5
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * n for n in (1, 2, 2.5, 5, 10) if size * n >= raw * 0.999)
    first = math.ceil(lowest / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(highest / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
