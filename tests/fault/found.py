"""What the harness found in our own code, each with the test that now holds it."""

from __future__ import annotations

FOUND: list[tuple[str, str]] = []
