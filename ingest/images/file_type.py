"""Formats that Pillow reads by plugins, and what a file that is not an image is, by its first bytes."""

from __future__ import annotations

from importlib.util import find_spec

# Plugin by image kind, as named in a reject's reason.
PLUGINS = {
    "a HEIC image": "pillow_heif",
    "a HEIF image": "pillow_heif",
    "a JPEG XL image": "pillow_jxl",
}


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


def remedy(kind: str) -> str:
    """Return advice for a kind of image that cannot be opened.

    >>> remedy("an OpenEXR image")
    'convert it to PNG, JPEG or WebP'
    """
    convert = "convert it to PNG, JPEG or WebP"
    plugin = PLUGINS.get(kind)
    if plugin is None:
        return convert
    if find_spec(plugin):
        return f"it is damaged or of a kind that {plugin} cannot read; {convert}"
    return f"{convert}, or install the extra heif: pip install 'bucketline[heif]'"


TEXT_BYTES = 40  # shown of a text file
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
_OTHERS = (
    (b"%PDF", "a PDF document"),
    (b"%!PS", "a PostScript document"),
    (b"\xc5\xd0\xd3\xc6", "a PostScript document"),
    (b"8BPS", "a Photoshop document"),
    (b"PK\x03\x04", "a ZIP archive, or an office document"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"Rar!", "a RAR archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL image"),
    (b"\x76\x2f\x31\x01", "an OpenEXR image"),
    (b"#?RADIANCE", "a Radiance HDR image"),
    (b"\x1aE\xdf\xa3", "a video"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program"),
)
BRANDS = {b"hei": "a HEIC image", b"hev": "a HEIC image", b"mif": "a HEIF image", b"msf": "a HEIF sequence"}


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
    "a web page: it begins with '<!DOCTYPE html><html>'"
    """
    known = next((name for start, name in _OTHERS if data.startswith(start)), None)
    if known is None and data[4:8] == b"ftyp":
        known = BRANDS.get(data[8:11], "a video")
    if known is not None:
        return f"{known}; {remedy(known)}" if known.endswith("image") else known
    if not data.strip(b"\x00"):
        return f"{len(data)} bytes of zeros"
    try:
        text = data[: 4 * TEXT_BYTES].decode("utf-8-sig", "ignore" if len(data) > 4 * TEXT_BYTES else "strict")
    except UnicodeDecodeError:
        return f"{len(data)} bytes in no known format"
    if not all(character.isprintable() or character.isspace() for character in text):
        return f"{len(data)} bytes in no known format"
    start = text.lstrip().lower()
    kind = "an SVG drawing" if "<svg" in start else "a web page" if start.startswith(("<!doctype html", "<html")) else "a text"
    return f"{kind}: it begins with {text[:TEXT_BYTES]!r}"
