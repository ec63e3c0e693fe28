"""Images that other trainers keep next to their training images: masks and control images, which must not be trained on."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from bucketline.command_line import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LABEL = re.compile(r"-(?:masklabel|condlabel)[^/]*$")  # of OneTrainer: NAME-masklabel.png next to NAME.png
_CONTROLS = "/_controls/"  # of ai-toolkit


def side_files(images: Sequence[str]) -> dict[str, str]:
    """Return the images (paths in a source) that belong to other images, each with what tells it.

    >>> side_files(["a.jpg", "a-masklabel.png", "b-masklabel.png", "_controls/a.depth.jpg"])
    {'a-masklabel.png': 'NAME-masklabel', '_controls/a.depth.jpg': '_controls/'}
    """
    labels = {image: found for image in images if (found := _LABEL.search(image))}
    stems = {image.rpartition(".")[0] for image in images} if labels else set()
    sides = {image: f"NAME{found[0][:10]}" for image, found in labels.items() if image[: found.start()] in stems}
    return sides | {image: _CONTROLS[1:] for image in images if _CONTROLS in f"/{image}"}


def side_notes(kinds: Iterable[str]) -> list[str]:
    """Return a note that counts side files by what tells them; none if there are none."""
    counts = Counter(kinds).most_common()
    if not counts:
        return []
    named = ", ".join(f"{kind} ({counted(number, 'image')})" for kind, number in counts)
    what = f"left out as masks and control images of other trainers: {named}"
    return [f"{what}; to pack such images, rename them, or name them in a table"]
