"""The frame and the parts of a report page. All text is escaped here; the policy in the page allows its own script only."""

from __future__ import annotations

import base64
import hashlib
import html
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from bucketline import __version__
from bucketline.command_line import one_line
from bucketline.pages.image_files import data_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_CAPTION = 600  # characters of a caption that a card shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence at the top of a page."""

    level: str  # `error`, `warning` or `good`
    title: str
    detail: str = ""
    anchor: str | None = None  # the section that shows it


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """An image with its captions."""

    images: Sequence[bytes]  # PNG or JPEG, next to each other; none: `problem` is shown
    title: str
    notes: Sequence[str] = ()
    captions: Sequence[str] = ()
    problem: str = "no image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page; `body` is HTML."""

    anchor: str
    title: str
    body: str
    note: str = ""


@cache
def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def script_source() -> str:
    """Return the script of every page."""
    return _part("page.js")


def document(
    *,
    title: str,
    subtitle: str,
    made_by: str,
    findings: Sequence[Finding],
    tiles: Sequence[tuple[str, str]],
    sections: Sequence[Section],
) -> bytes:
    """Return the page in UTF-8. `tiles`: value and what it is; `made_by`: the command."""
    script, style = _part("page.js"), _part("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    shown_tiles = "".join(f"<div><b>{escaped(value)}</b><span>{escaped(what)}</span></div>" for value, what in tiles)
    links = "".join(f'<a href="#{section.anchor}">{escaped(section.title)}</a>' for section in sections)
    text = "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>",
            f'<header class="top"><h1>{escaped(title)}</h1>\n<p class="dim">{escaped(subtitle)}</p>',
            _findings(findings),
            f'<div class="tiles">{shown_tiles}</div></header>' if tiles else "</header>",
            f'<nav class="jump"><div>{links}</div></nav>\n<main>',
            *(_section(section) for section in sections),
            f"</main>\n<footer>Written by <code>{escaped(made_by)}</code> of bucketline {__version__}.</footer>",
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )
    return text.encode("utf-8", "backslashreplace")


def _section(section: Section) -> str:
    note = f'<p class="note">{section.note}</p>' if section.note else ""
    return f'<section id="{section.anchor}">\n<h2>{escaped(section.title)}</h2>\n{note}\n{section.body}\n</section>'


def _findings(findings: Sequence[Finding]) -> str:
    order = ("error", "warning", "good")
    lines = []
    for finding in sorted(findings, key=lambda one: order.index(one.level)):
        title = f"<b>{escaped(finding.title)}</b>"
        link = f' <a href="#{finding.anchor}">show</a>' if finding.anchor else ""
        detail = f"<span>{escaped(finding.detail)}</span>" if finding.detail else ""
        lines.append(f'<li class="{finding.level}">{title}{link}{detail}</li>')
    return f'<ul class="findings">{"".join(lines)}</ul>' if lines else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, texts: int = 1) -> str:
    """Return a table of escaped cells; the first `texts` columns are text, the others numbers."""

    def row(cells: Iterable[object], tag: str) -> str:
        kinds = ("" if n < texts else ' class="n"' for n in range(len(head)))
        return (
            "<tr>" + "".join(f"<{tag}{kind}>{escaped(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)) + "</tr>"
        )

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="scroll"><table><thead>{row(head, "th")}</thead><tbody>{body}</tbody></table></div>'


def columns(parts: Iterable[str]) -> str:
    """Return parts of a section next to each other, where there is room; empty ones are left out."""
    return f'<div class="columns">{"".join(f"<div>{part}</div>" for part in parts if part)}</div>'


def card(one: Card) -> str:
    """Return a figure."""
    if one.images:
        tags = (f'<img src="{data_url(image)}" alt="{escaped(one.title)}">' for image in one.images)
        image = f'<div class="shown">{"".join(tags)}</div>'
    else:
        image = f'<div class="shown"><div class="none">{escaped(one.problem)}</div></div>'
    captions = "".join(f'<span class="more">{escaped(text[:MAX_CAPTION])}</span>' for text in one.captions)
    notes = "".join(f"<span>{escaped(note)}</span>" for note in one.notes)
    return f"<figure>{image}<figcaption><b>{escaped(one.title)}</b>{notes}{captions}</figcaption></figure>"


def sheet(cards: Iterable[Card], size: str = "") -> str:
    """Return cards next to each other; `size` is `small`, `large`, `wide` (captions at the right) or the usual one."""
    return f'<div class="sheet {size}">{"".join(map(card, cards))}</div>'


def gallery(groups: Sequence[tuple[str, str, Sequence[Card]]], placeholder: str, size: str = "") -> str:
    """Return groups of cards, each a name, a note and cards, with a search field and a button for each group."""
    buttons = [('<button type="button" data-group="" aria-pressed="true">all</button>')]
    buttons += [
        f'<button type="button" data-group="{n}" aria-pressed="false">{escaped(g[0])}</button>' for n, g in enumerate(groups)
    ]
    field = f'<input type="search" placeholder="{escaped(placeholder)}" aria-label="{escaped(placeholder)}">'
    body = "".join(
        f'<div class="by-choice" data-group="{n}"><h3>{escaped(name)} <small>{escaped(note)}</small></h3>'
        f"{sheet(cards, size)}</div>"
        for n, (name, note, cards) in enumerate(groups)
    )
    controls = (
        f'<div class="controls">{field}<span class="dim" data-count></span></div><div class="controls">{"".join(buttons)}</div>'
    )
    return f"<div data-gallery>{controls}{body}</div>"


def escaped(value: object) -> str:
    """Return a value on one line, escaped; surrogates, control characters and marks of direction are spelt out."""
    return html.escape(one_line(str(value)))


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage.

    >>> percent(0.125)
    '12.5 %'
    """
    return f"{100 * share:.{digits}f} %"
