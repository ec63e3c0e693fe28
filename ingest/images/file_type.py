"""Formats that Pillow reads by plugins, and what a file that is not an image is, by its first bytes."""

from __future__ import annotations

from importlib.util import find_spec


def register() -> tuple[str, ...]:
    """Register the installed plugins with Pillow and return the names of their formats."""
    formats: tuple[str, ...] = ()
    if find_spec("pillow_heif"):
        import pillow_heif

        pillow_heif.register_heif_opener(thumbnails=False)
        formats += ("HEIF",)
    if find_spec("pillow_jxl"):
        import pillow_jxl  # noqa: F401 - registers itself

        formats += ("JXL",)
    return formats


SHOWN_BYTES = 32  # of a file that is no image
_IMAGES = (
    (b"\x89PNG", "PNG"),
    (b"\xff\xd8", "JPEG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"II+\x00", "TIFF"),
    (b"MM\x00+", "TIFF"),
    (b"\x00\x00\x01\x00", "ICO"),
    (b"\x00\x00\x02\x00", "CUR"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"qoif", "QOI"),
)
_JXL = (b"\xff\x0a", b"\x00\x00\x00\x0cJXL ")


def damaged_format(data: bytes) -> str | None:
    """Return the image format that the first bytes of an unreadable file indicate; None if they indicate none."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp" and data[8:11] == b"avi":
        return "AVIF"
    return next((name for start, name in _IMAGES if data.startswith(start)), None)


def described(data: bytes) -> str:
    """Describe a file whose first bytes are not those of a known image format.

    >>> described(b"<!DOCTYPE html><html>")
    "it begins with b'<!DOCTYPE html><html>'"
    """
    is_heif = data[4:8] == b"ftyp" and data[8:11] in (b"hei", b"hev", b"mif", b"msf")
    if is_heif or data.startswith(_JXL):
        kind, plugin = ("a HEIC image", "pillow_heif") if is_heif else ("a JPEG XL image", "pillow_jxl")
        if find_spec(plugin):
            return f"{kind}; it is damaged or of a kind that {plugin} cannot read; convert it to PNG, JPEG or WebP"
        return f"{kind}; convert it to PNG, JPEG or WebP, or install the extra heif: pip install 'bucketline[heif]'"
    return f"it begins with {data[:SHOWN_BYTES]!r}"
