"""The families that are known, found by a pipeline's class, or by a transformer's or UNet's and its configuration."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
import warnings
from typing import TYPE_CHECKING, Any

from bucketline import families
from bucketline.errors import UsageError
from bucketline.extensions import Extensions
from bucketline.families.family import Family

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ENDING = "Pipeline"
_TAKES_IMAGES = re.compile(
    "Edit|Kontext|Img2Img|ImageTo|ImageVariation|Inpaint|Control|Adapter|Fill|Redux|Depth2Img|Upscale|Pix2Pix|Layered"
)
"""In the names of pipelines whose model sees an image next to the caption; some are those of a family with references."""


def _known() -> Iterator[type[Family]]:
    """Yield the classes with a name of their own, of every file next to this one."""
    for found in sorted(pkgutil.iter_modules(families.__path__), key=lambda one: one.name):
        module = importlib.import_module(f"{families.__name__}.{found.name}")
        for one in vars(module).values():
            is_own = isinstance(one, type) and issubclass(one, Family) and one.__module__ == module.__name__
            if is_own and "name" in vars(one):
                yield one


def _of_other_packages() -> Iterator[type[Family]]:
    """Yield the families that other installed packages declare. One that cannot be used is named in a warning and left out."""
    found: Extensions[type[Family]] = Extensions(
        "a family called", "bucketline.families", {}, lambda one: isinstance(one, type) and issubclass(one, Family)
    )
    for name in found:
        try:
            yield found[name]
        except UsageError as error:
            warnings.warn(f"{error}; its models are unknown until then", stacklevel=2)


FAMILIES: tuple[type[Family], ...] = (*_known(), *_of_other_packages())
"""Ours by file, then those of other packages.

Of those that take the same model, the first is its family, unless its index names another's pipeline.
"""

_BY_PIPELINE = {pipeline: family for family in FAMILIES for pipeline in family.pipelines}


def family_named(name: str) -> type[Family] | None:
    """Return the family that stores record by a name; None if there is none."""
    return next((family for family in FAMILIES if family.name == name), None)


def family_of_pipeline(name: str) -> type[Family] | None:
    """Return the family whose captions a pipeline of diffusers encodes alike; None if there is none."""
    return _BY_PIPELINE.get(name)


def family_of_model(config: Mapping[str, Any], folder: str | None = None, pipeline: str | None = None) -> type[Family] | None:
    """Return the family of a transformer or UNet by its configuration; None if there is none.

    `folder`: in diffusers' layout, if it is known. `pipeline`: the class that the model's index names, which tells apart
    families with the same transformer.
    """
    kind = str(class_name(config))
    found = [one for one in FAMILIES if one.takes(kind, config) and folder in (None, one.folder)]
    return next((one for one in found if pipeline in one.pipelines), found[0] if found else None)


def class_name(config: Mapping[str, Any]) -> str | None:
    """Return a model's class name, of a published `Transformer2DModel` the present one. Source: diffusers' own mapping."""
    kind = config.get("_class_name")
    if kind != "Transformer2DModel":
        return kind
    norm = str(config.get("norm_type"))
    return next((one.model_class for one in FAMILIES if one.norm_type == norm), kind)


def takes_images(index: Mapping[str, Any]) -> str | None:
    """Return how a model's index says that it draws from an image that is not a reference, for a message; None if it does not.

    >>> takes_images({"_class_name": "QwenImageEditInpaintPipeline"}).partition("; ")[2]
    'take the model of a QwenImageEditPipeline'
    >>> takes_images({"_class_name": "QwenImageEditPipeline"})
    """
    name = str(index.get("_class_name"))
    if not _TAKES_IMAGES.search(name) or any(one.references and one.pipelines[0] == name for one in FAMILIES):
        return None
    own = [one.pipelines[0] for one in FAMILIES if name.startswith(one.pipelines[0].removesuffix(_ENDING))]
    of_own = f" of a {max(own, key=len)}" if own else ""
    return (
        f"names the pipeline {name:.80}, which draws from an image that is not a reference, expected one that draws from a "
        "caption, or from references and a caption: without such an image the model would be trained for another task than "
        f"its own, and stores have none; take the model{of_own}"
    )


def crossed(index: Mapping[str, Any], config: Mapping[str, Any], folder: str) -> str | None:
    """Return what a model's index names that contradicts the configuration of its transformer or UNet; None if nothing does.

    `folder`: where the configuration is, in diffusers' layout. A class that no family knows passes if the index names it too.
    """
    pipeline, kind = index.get("_class_name"), class_name(config)
    family = family_of_pipeline(str(pipeline))
    if family is None or kind is None or (folder == family.folder and family.takes(kind, config)):
        return None
    owner, entry = family_of_model(config, folder), index.get(folder)
    if owner is None and isinstance(entry, list) and entry[1:2] == [kind]:
        return None
    of_owner = "" if owner is None else f", of {owner.pipelines[0]}"
    return (
        f"names the pipeline {pipeline}, and {folder}/config.json is a {kind:.80}{of_owner}, expected "
        f"{family.folder}/ with a {family.model_class} of that pipeline; take both from one model"
    )


def square_only(transformer: Mapping[str, Any] | None, index: Mapping[str, Any] | None) -> str | None:
    """Return the class name of a model that takes only square images; None if it takes other shapes too.

    `transformer` is the content of `transformer/config.json`, `index` that of `model_index.json`; None if the file is missing.
    """
    index = index or {}
    part = index.get("transformer")
    named = part[1] if isinstance(part, list) and len(part) > 1 else None
    kind = class_name(transformer or {})
    for one in (family for family in FAMILIES if family.is_square_only):
        if one.model_class in ((kind,) if kind else (named,)) or (not kind and index.get("_class_name") in one.pipelines):
            return one.model_class
    return None


def known_pipelines(name: str) -> str:
    """Return how many families are known for a message, with the pipeline that is nearest to `name` if one is like it.

    >>> known_pipelines("FluxxPipeline").partition("; ")[2]
    'the nearest is FluxPipeline'
    """
    shown = ", ".join(sorted({family.pipelines[0] for family in FAMILIES}))
    known = f"known are {shown} and their variants"
    ends = {one.removesuffix(_ENDING): one for one in _BY_PIPELINE}
    return known + nearest(name.removesuffix(_ENDING), ends)


def nearest(name: str, known: Mapping[str, str]) -> str:
    """Return the end of a message that names the value of the key that is nearest to `name`; empty if none is like it."""
    found = difflib.get_close_matches(name, known, n=1)
    return f"; the nearest is {known[found[0]]}" if found else ""
