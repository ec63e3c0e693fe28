"""Decode an image from stdin in a process of its own; a decoder that crashes ends only this process, by a signal."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

from bucketline.ingest.images.crop import Framing, Grid, RejectedError, Size
from bucketline.ingest.images.decode import decode_image

_ANY = Framing(grid=Grid(name="64x64", sizes=(Size(64, 64),)))


def main() -> int:
    """Return 0 whether the image is decoded or rejected."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data = sys.stdin.buffer.read()
    for jpeg_draft in (False, True):
        with suppress(RejectedError):
            decode_image(data, Framing(grid=_ANY.grid, jpeg_draft=jpeg_draft), "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
