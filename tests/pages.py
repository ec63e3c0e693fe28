"""Checks of a report page that need no browser: it is well formed, self-contained, and runs its own script only."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image

VOID = {"meta", "link", "img", "input", "br", "path", "rect", "circle", "polyline"}
FETCHING = ("src", "href", "action", "data", "poster", "srcset", "xlink:href")


@dataclass
class Parsed(HTMLParser):
    """A page's text, titles, captions of images, ids, links and scripts."""

    open_tags: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    policy: str = ""
    text: str = ""
    titles: list[str] = field(default_factory=list)
    captions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if (within := self._texts_of(tag)) is not None:
            within.append("")
        if tag not in VOID:
            self.open_tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has the handler {name}"
            if name == "id":
                self.ids.append(str(value))
            if name in FETCHING:
                self.links.append(str(value))
            if name == "content" and "default-src" in str(value):
                self.policy = str(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open_tags.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags, f"</{tag}> has no beginning"
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_tags and self.open_tags[-1] == "script":
            self.scripts.append(data)
        elif self.open_tags and self.open_tags[-1] != "style":
            self.text += data
            for within in filter(None, map(self._texts_of, self.open_tags)):
                within[-1] += data

    def _texts_of(self, tag: str) -> list[str] | None:
        return self.captions if tag == "figcaption" else self.titles if tag in ("h1", "h2", "h3") else None

    def images(self) -> list[Image.Image]:
        inlined = [link.partition(";base64,")[2] for link in self.links if link.startswith("data:image/")]
        return [Image.open(io.BytesIO(base64.b64decode(data))) for data in inlined]


def parsed(page: Path, names: str = "http://none") -> Parsed:
    """Parse a page and check what holds for every page; `names` is a URL in its text."""
    found = Parsed()
    found.feed(page.read_text(encoding="utf-8"))
    found.close()
    assert found.open_tags == []
    assert len(set(found.ids)) == len(found.ids)
    assert not [link for link in found.links if not re.match(r"data:|#", link)]
    assert not [link for link in found.links if link.startswith("#") and link[1:] not in found.ids]
    (script,) = found.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in found.policy
    assert "default-src 'none'" in found.policy
    assert not re.search(
        r"https?://|url\(|@import", re.sub(r"data:image/[^\"]*", "", page.read_text(encoding="utf-8")).replace(names, "")
    )
    return found
