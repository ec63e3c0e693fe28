"""Read what a training run has left in its folder: configuration, status, metrics and contact sheets."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from bucketline.errors import UsageError
from bucketline.files.run_marker import CONFIG, IMAGES, IMAGES_FOLDER, METRICS, STATUS
from bucketline.pages.image_files import jpeg

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

_MAX_BYTES = 1 << 30  # of a metrics file
MAX_FRAMES = 12  # contact sheets of a run that a page shows
MAX_IMAGES, IMAGE_PX = 16, 2048  # newest images of a run that a page shows at their own size, and their longest side
MAX_TEXTS = 1000  # captions or prompts of a sheet
FRAME_PX = 1000  # longest side of a sheet on the page
_FOLDER = re.compile(r"step-\d+")
_STEP = re.compile(r"step-(\d+)\.png")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A measured value by optimizer step."""

    steps: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """A run, as its folder describes it."""

    name: str  # of the folder
    path: Path
    document: Mapping[str, Any]  # config.json
    status: Mapping[str, Any]  # status.json
    lines: Sequence[Mapping[str, Any]]  # of metrics.jsonl; each has a number as its step

    @property
    def config(self) -> Mapping[str, Any]:
        """The options."""
        found = self.document.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def rest(self) -> Mapping[str, Any]:
        """The rest of config.json: stores, versions, the commit."""
        return {name: value for name, value in self.document.items() if name != "config"}

    @property
    def validations(self) -> list[Mapping[str, Any]]:
        """The lines about validations; the others are about windows of steps."""
        return [line for line in self.lines if "val_loss" in line]

    def series(self, field: str) -> Series:
        """Return a value by the steps done."""
        return series_of(self.lines, field)

    @property
    def buckets(self) -> Counter[str]:
        """The number of steps by bucket."""
        total: Counter[str] = Counter()
        for line in self.lines:
            found = line.get("buckets")
            total.update({name: count for name, count in found.items() if _is_number(count)} if isinstance(found, dict) else ())
        return total


def series_of(lines: Iterable[Mapping[str, Any]], field: str) -> Series:
    """Return a value by the steps done, of the lines of metrics that have it as a finite number."""
    # A window's line has its last step, counted from 0; a validation's has the steps done.
    return _series((line["step"] + (0 if "val_loss" in line else 1), line.get(field)) for line in lines)


def by_timestep(line: Mapping[str, Any]) -> Series:
    """Return a validation's loss by timestep."""
    found = line.get("val_loss_per_timestep")
    losses = {int(step): loss for step, loss in found.items() if step.isdecimal()} if isinstance(found, dict) else {}
    return _series((step, losses[step]) for step in sorted(losses))


def _series(found: Iterable[tuple[float, Any]]) -> Series:
    finite = [(step, value) for step, value in found if _is_number(value)]
    return Series(steps=tuple(step for step, _ in finite), values=tuple(value for _, value in finite))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Return runs in the given order, each once; those of equal folder names are named by their paths."""
    runs = [read_reported_run(path) for path in {path.resolve(): path for path in paths}.values()]
    names = Counter(run.name for run in runs)
    return [run if names[run.name] == 1 else replace(run, name=str(run.path)) for run in runs]


def read_reported_run(path: Path) -> ReportedRun:
    if not (path / CONFIG).is_file() or not (path / METRICS).is_file():
        raise UsageError(f"{path} is not the folder of a run: it needs {CONFIG} and {METRICS}; give a run's --output-dir")
    with (path / METRICS).open("rb") as file:
        lines: list[dict[str, Any]] = [_parsed(line, {}) for line in file.read(_MAX_BYTES).splitlines()]
    return ReportedRun(
        name=path.resolve().name,
        path=path,
        document=_read(path / CONFIG, {}),
        status=_read(path / STATUS, {}),
        lines=[line for line in lines if _is_number(line.get("step"))],
    )


def _read(path: Path, otherwise: T) -> T:
    """Return the value of a JSON file if it is of the type of `otherwise`, else this."""
    try:
        return _parsed(path.read_bytes(), otherwise)
    except OSError:
        return otherwise


def _parsed(data: bytes, otherwise: T) -> T:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):  # such as the last line of a run that was killed
        return otherwise
    return found if isinstance(found, type(otherwise)) else otherwise


def spread(values: Sequence[T], most: int) -> list[T]:
    """Return at most so many of the values, in equal distances, the first and the last included.

    >>> spread([1, 2, 3, 4, 5, 6, 7], 3)
    [1, 4, 7]
    """
    if len(values) <= most:
        return list(values)
    return [values[round(n * (len(values) - 1) / (most - 1))] for n in range(most)]


def frames_of(run: ReportedRun) -> dict[int, bytes]:
    """Return the contact sheets of a run by step, as JPEGs, at most MAX_FRAMES of them, the first and the last included.

    One that cannot be read is left out, with a warning.
    """
    found = {int(match[1]): path for path in (run.path / IMAGES_FOLDER).glob("*.png") if (match := _STEP.fullmatch(path.name))}
    if (last := run.path / IMAGES).is_file():
        done = run.status.get("step")
        found[int(done) if isinstance(done, int) else 1 + max(found, default=0)] = last
    frames = {step: _shown(found[step], FRAME_PX) for step in spread(sorted(found), MAX_FRAMES)}
    return {step: frame[0] for step, frame in frames.items() if frame is not None}


def newest_images(run: ReportedRun) -> list[tuple[bytes, int, int, Mapping[str, Any]]]:
    """Return the newest images of a run as JPEGs of their own size, with width and height in px and what they are of.

    There are at most MAX_IMAGES. One that cannot be read is left out, with a warning.
    """
    folders = [path for path in (run.path / IMAGES_FOLDER).glob("step-*") if path.is_dir() and _FOLDER.fullmatch(path.name)]
    if not folders:
        return []
    newest = max(folders, key=lambda path: int(path.name.removeprefix("step-")))
    paths = sorted(path for path in newest.glob("*.png") if path.stem.isdecimal())[:MAX_IMAGES]
    entries = dict(enumerate(texts_of(run), 1))
    shown = [(entries.get(int(path.stem), {}), _shown(path, IMAGE_PX)) for path in paths]
    return [(*image, entry) for entry, image in shown if image is not None]


def _shown(path: Path, longest: int) -> tuple[bytes, int, int] | None:
    """Return an image as a JPEG of a longest side, and the width and the height of its file in px."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return jpeg(image.convert("RGB"), longest), *image.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        log.warning("%s is not shown, it cannot be read as an image: %s", path, error)
        return None


def texts_of(run: ReportedRun) -> list[dict[str, Any]]:
    """Return the captions, or the prompts with seed, size and guidance, of a run's newest sheet, as the run wrote them."""
    along = sorted((run.path / IMAGES_FOLDER).glob("step-*.json"), reverse=True)
    last = (run.path / IMAGES).with_suffix(".json")
    entries: list[Any] = next((_read(path, []) for path in (last, *along) if path.is_file()), [])
    return [one for one in entries if isinstance(one, dict)][:MAX_TEXTS]


def run_differences(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ: name and the value of each run. Stores, versions and the commit count too."""
    every = [flat(run.document) for run in runs]
    names = list(dict.fromkeys(name for own in every for name in own))
    found = [(name, [own.get(name, "") for own in every]) for name in names]
    return [(name, values) for name, values in found if len(set(values)) > 1]


def flat(value: object, prefix: str = "") -> dict[str, str]:
    """Return a document as one value per dotted name.

    >>> flat({"config": {"seed": 1, "store": ["a"]}, "stores": [{"rows": 3}]})
    {'config.seed': '1', 'config.store': '["a"]', 'stores.0.rows': '3'}
    """
    if isinstance(value, list) and value and all(isinstance(own, dict) for own in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {prefix: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}
    found: dict[str, str] = {}
    for key, own in value.items():
        found |= flat(own, f"{prefix}.{key}" if prefix else str(key))
    return found
