"""Find installed fonts for a text: matplotlib's default has no Chinese, Japanese or Korean, and few emoji."""

from __future__ import annotations

import contextlib
import functools
import logging

from matplotlib import font_manager

log = logging.getLogger(__name__)

_FIRST = "DejaVu Sans"  # ships with matplotlib
_PREFERRED = (
    *("Noto Sans CJK", "Source Han Sans", "WenQuanYi", "Droid Sans Fallback", "IPA", "Nanum", "Unifont"),
    *("Noto Emoji", "Symbola", "Noto Sans", "Noto Serif", "Source Han", "Heiti", "PingFang", "Hiragino", "Microsoft YaHei"),
    *("SimHei", "SimSun", "Yu Gothic", "Meiryo", "MS Gothic", "Malgun Gothic", "Apple", "AR PL", "Arial Unicode MS"),
)
"""Prefixes of font families with many scripts, best first; other fonts are not opened, since there may be thousands."""


def fonts_for(text: str) -> tuple[list[str], set[str]]:
    """Return font families that together cover a text, as matplotlib takes them, and the characters that none of them has."""
    families, missing = [_FIRST], {letter for letter in text if not letter.isspace() and ord(letter) not in _codes(_FIRST)}
    for family in preferred_fonts() if missing else ():
        if found := {letter for letter in missing if ord(letter) in _codes(family)}:
            families.append(family)
            missing -= found
        if not missing:
            break
    return families, missing


@functools.cache
def preferred_fonts() -> tuple[str, ...]:
    """Return the preferred installed families, best first, including fonts missing from matplotlib's cached list."""
    known = {entry.fname for entry in font_manager.fontManager.ttflist}
    for path in set(font_manager.findSystemFonts()) - known:
        with contextlib.suppress(OSError, RuntimeError, ValueError, LookupError):  # a font that matplotlib cannot read
            font_manager.fontManager.addfont(path)
    names = sorted({entry.name for entry in font_manager.fontManager.ttflist})
    ranked = (name for start in _PREFERRED for name in names if _plain(name).startswith(_plain(start)))
    return tuple(dict.fromkeys(ranked))


def _plain(name: str) -> str:
    return name.replace(" ", "").lower()


@functools.cache
def _codes(family: str) -> frozenset[int]:
    """Return the code points of a family; none for a bitmap font, which matplotlib cannot draw."""
    try:
        path = font_manager.findfont(font_manager.FontProperties(family=[family]), fallback_to_default=False)
        font = font_manager.get_font(path)
    except (OSError, RuntimeError, ValueError):
        return frozenset()
    return frozenset(font.get_charmap()) if font.scalable else frozenset()


@functools.cache
def warn_of_no_font() -> None:
    """Warn once that captions are missing from the images."""
    log.warning(
        "no installed font has all characters of the captions: images.png shows such samples' ids instead, and images.json has "
        "the captions; a font such as Noto Sans CJK (package fonts-noto-cjk) would show them"
    )
