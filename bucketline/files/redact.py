"""Redact sources and names for messages: remove passwords, tokens of signed URLs, and arguments of commands."""

from __future__ import annotations

import re

HIDDEN = "…"
PIPE = "pipe:"
_URL = re.compile(r"""(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#\s'"`]*@)?(?P<place>[^?#\s'"`]*)(?P<rest>[?#][^\s'"`]*)?""")
_KNOWN = r"(?:s3|gs|az|https?|ftps?|hf|file|memory)"
_BEGIN = re.compile(  # of a URL, however it is misspelt: its scheme, and what stands before the path
    rf"""(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*\s*[:;]\s*[/\\]+|{_KNOWN}(?:\s*[:;]\s*[/\\]*|\s*[/\\]+)|[/\\]{{2,}}|)"""
    r"""(?P<authority>[^/?#\\]*)""",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """Return a source's text without its secrets.

    >>> redacted("https://me:secret@host/a.tar?token=secret::https://host/b.tar")
    'https://host/a.tar?…::https://host/b.tar'
    >>> redacted("pipe:TOKEN=secret curl -u me:secret https://host/a.tar | zcat")
    'pipe:…'
    >>> redacted("https:/me:secret@host/a.tar"), redacted("https://me:sec/ret@host/a.tar"), redacted("https://me:secret/host/a.tar")
    ('https:/host/a.tar', 'https://host/a.tar', 'https://me:…/host/a.tar')
    """
    if text.startswith(PIPE):
        return PIPE + HIDDEN
    text = _without_user(text)
    return "::".join(_URL.sub(_without_secrets, part) for part in text.split("::"))


def redacted_within(message: str, source: str) -> str:
    """Return another program's message without secrets; it may quote the source, its command, or another URL."""
    return _URL.sub(_without_secrets, message.replace(source, redacted(source)) if source else message)


def without_userinfo(url: str) -> str:
    """Return a URL without user and password."""
    return re.sub(r"(://)[^/?#\s'\"]*@", r"\1", url)


def has_password(text: str) -> bool:
    """Return whether a text begins as a URL with a user and a password does, with or without its scheme.

    >>> has_password("https:/me:secret@host/a"), has_password("me:secret@host/a"), has_password("/data/a:b@c")
    (True, True, False)
    """
    return _without_user(text) != text


def _without_user(text: str) -> str:
    """Return a URL without user and password, also where it is not quite one; another text as it is."""
    found = _BEGIN.match(text)
    assert found is not None  # it matches the empty text
    scheme, authority = found["scheme"], found["authority"]
    after = text[found.end() :]
    user, at, host = authority.rpartition("@")
    if at:
        return scheme + host + after if scheme or ":" in user else text
    host, colon, port = authority.rpartition(":")
    if not colon or not port or port.isdecimal() or authority.endswith("]") or not (scheme or "@" in after):
        return text
    _, at, rest = after.rpartition("@")  # the password has a slash, or a question mark
    return scheme + rest if at else f"{scheme}{host}:{HIDDEN}{after}"


def _without_secrets(found: re.Match[str]) -> str:
    rest = found["rest"]
    return found["scheme"] + found["place"] + (f"{rest[0]}{HIDDEN}" if rest else "")
