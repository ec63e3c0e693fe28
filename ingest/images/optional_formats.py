"""HEIC, HEIF and JPEG XL, which Pillow reads through the plugins in the extra `heif`."""

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
