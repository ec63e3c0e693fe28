"""Report pages: templates of jinja2, whose values are all escaped, in a frame whose policy allows its own script only."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import bucketline
from bucketline.command_line import counted, human_bytes, human_number, one_line, printable
from bucketline.errors import UsageError
from bucketline.extras import extra_named
from bucketline.files.atomic_folder import refuse_existing
from bucketline.files.paths import overlap
from bucketline.files.regular_file import read_regular
from bucketline.pages.image_files import data_url

with extra_named("report"):
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


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
    """Return True if a file is a page that a command of this package wrote."""
    try:
        return not page.is_symlink() and _GENERATOR in read_regular(page, 1024)
    except OSError:
        return False


def page_report(page: Path, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return where a page was written and what is wrong by it, as JSON values."""
    return {"page": str(page), "findings": [asdict(one) for one in findings]}


def print_page(report: Mapping[str, Any]) -> None:
    """Print a `page_report` as text."""
    page = Path(report["page"])
    print(f"{one_line(str(page))}: {human_bytes(page.stat().st_size)}")
    for finding in report["findings"]:
        if finding["level"] != "good":
            print(printable(f"  {finding['level']}: {finding['title']}. {finding['detail']}".rstrip()))
