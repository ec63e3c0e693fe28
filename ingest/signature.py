"""What a file that is no picture is instead, by its first bytes, in words for its owner."""

from __future__ import annotations

TEXT_BYTES = 40  # of a text that are shown
PICTURES = (
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
OTHERS = (
    (b"%PDF", "a PDF document"),
    (b"%!PS", "a PostScript document"),
    (b"\xc5\xd0\xd3\xc6", "a PostScript document"),
    (b"8BPS", "a Photoshop document"),
    (b"PK\x03\x04", "a ZIP archive, or an office document"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"Rar!", "a RAR archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"\xff\x0a", "a JPEG XL picture"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL picture"),
    (b"\x76\x2f\x31\x01", "an OpenEXR picture"),
    (b"#?RADIANCE", "a Radiance HDR picture"),
    (b"\x1aE\xdf\xa3", "a video"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program"),
)
BRANDS = {b"hei": "a HEIC picture", b"hev": "a HEIC picture", b"mif": "a HEIF picture", b"msf": "a HEIF sequence"}


def damaged_format(data: bytes) -> str | None:
    """Give the picture format that a file begins as, which could not be opened; None where it begins as none."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp" and data[8:11] == b"avi":
        return "AVIF"
    return next((name for start, name in PICTURES if data.startswith(start)), None)


def described(data: bytes) -> str:
    """Say what a file is that begins as no picture.

    >>> described(b"<!DOCTYPE html><html>")
    "a web page: it begins with '<!DOCTYPE html><html>'"
    """
    known = next((name for start, name in OTHERS if data.startswith(start)), None)
    if known is None and data[4:8] == b"ftyp":
        known = BRANDS.get(data[8:11], "a video")
    if known is not None:
        return f"{known}; convert it to PNG, JPEG or WebP" if known.endswith("picture") else known
    if not data.strip(b"\x00"):
        return f"{len(data)} bytes of zeros"
    try:
        text = data[: 4 * TEXT_BYTES].decode("utf-8-sig", "ignore" if len(data) > 4 * TEXT_BYTES else "strict")
    except UnicodeDecodeError:
        return f"{len(data)} bytes in no format that is known"
    if not all(character.isprintable() or character.isspace() for character in text):
        return f"{len(data)} bytes in no format that is known"
    start = text.lstrip().lower()
    kind = "an SVG drawing" if "<svg" in start else "a web page" if start.startswith(("<!doctype html", "<html")) else "a text"
    return f"{kind}: it begins with {text[:TEXT_BYTES]!r}"
