"""Redact sources and names for messages: remove passwords, tokens of signed URLs, and arguments of commands."""

from __future__ import annotations

import re

HIDDEN = "…"
PIPE = "pipe:"
TAR_NAME = re.compile(r"""[^/\s'"|;&<>()=]+?\.(?:tar(?:\.\w+)?|tgz)(?![\w.])""")
_URL = re.compile(r"""(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#\s'"`]*@)?(?P<place>[^?#\s'"`]*)(?P<rest>[?#][^\s'"`]*)?""")
_PROGRAM = re.compile(r"(?:\w+=\S*\s+)*(?P<program>[\w./+-]+)(?P<more>.*)", re.DOTALL)


def redacted(text: str) -> str:
    """Return a source's text without its secrets.

    >>> redacted("https://me:secret@host/a.tar?token=secret::https://host/b.tar")
    'https://host/a.tar?…::https://host/b.tar'
    >>> redacted("pipe:TOKEN=secret curl -u me:secret https://host/a.tar | zcat")
    'pipe:curl … a.tar'
    """
    if text.startswith(PIPE):
        return PIPE + _redacted_command(text.removeprefix(PIPE))
    return "::".join(_URL.sub(_without_secrets, part) for part in text.split("::"))


def redacted_within(message: str, source: str) -> str:
    """Return another program's message without secrets; it may quote the source, its command, or another URL."""
    for quoted in (source, source.removeprefix(PIPE)):
        if quoted:
            message = message.replace(quoted, redacted(source))
    return _URL.sub(_without_secrets, message)


def without_userinfo(url: str) -> str:
    """Return a URL without user and password."""
    return re.sub(r"(://)[^/?#\s'\"]*@", r"\1", url)


def _without_secrets(found: re.Match[str]) -> str:
    rest = found["rest"]
    return found["scheme"] + found["place"] + (f"{rest[0]}{HIDDEN}" if rest else "")


def _redacted_command(command: str) -> str:
    found = _PROGRAM.fullmatch(command.strip())
    if found is None:
        return HIDDEN
    program = found["program"].rpartition("/")[2]
    tar = TAR_NAME.search(without_userinfo(found["more"]))
    return " ".join((program, *([HIDDEN] if found["more"] else []), *([tar[0]] if tar else [])))
