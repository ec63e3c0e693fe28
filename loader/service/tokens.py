"""A shared secret: the client proves that it has the token, and the token itself is never sent."""

from __future__ import annotations

import hmac
import secrets
import stat
from pathlib import Path

from bucketline.errors import UsageError

MIN_TOKEN_BYTES = 16


def read_token(path: Path | str) -> bytes:
    """Return the token in a file, without the white space around it."""
    path = Path(path)
    try:
        mode, token = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"cannot read the token file {path}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"the token file {path} has mode {stat.S_IMODE(mode):o}, so others may read it; chmod 600 {path}")
    if len(token) < MIN_TOKEN_BYTES:
        raise UsageError(
            f"the token in {path} has {len(token)} bytes, expected {MIN_TOKEN_BYTES} or more; make one: openssl rand -hex 32"
        )
    return token


def new_nonce() -> str:
    """Return a random text that a proof is made of."""
    return secrets.token_hex(16)


def proof_of(token: bytes | None, nonce: str) -> str:
    """Return the proof that its maker has the token; an empty text if there is none."""
    return "" if token is None else hmac.new(token, f"bucketline {nonce}".encode(errors="replace"), "sha256").hexdigest()


def is_proof(given: object, token: bytes | None, nonce: str) -> bool:
    """Return whether a client has proved that it has the token; takes as long for every wrong proof."""
    # JSON can have half a surrogate pair, which is not text
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), proof_of(token, nonce).encode())
