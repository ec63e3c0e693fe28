"""Read what a training run has left in its folder: configuration, status, metrics and image grids."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bucketline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

METRICS, CONFIG, STATUS = "metrics.jsonl", "config.json", "status.json"
IMAGES, IMAGES_FOLDER = "images.png", "images"
MAX_BYTES = 1 << 30  # of a metrics file
MAX_FRAMES = 12  # grids of a run that a page shows
MAX_TEXTS = 1000  # captions or prompts of a grid
FRAME_PX = 1000  # width of a grid on the page
JPEG_QUALITY = 80
_STEP = re.compile(r"step-(\d+)\.png")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A measured value by optimizer step."""

    steps: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run, as its folder describes it."""

    name: str  # of the folder
    path: Path
    document: Mapping[str, Any]  # config.json
    status: Mapping[str, Any]  # status.json
    windows: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl about steps
    validations: Sequence[Mapping[str, Any]]  # and those about validations

    @property
    def config(self) -> Mapping[str, Any]:
        found = self.document.get("config")
        return found if isinstance(found, dict) else {}

    def series(self, field: str) -> Series:
        """Return a value of the windows by the steps done at their end; of lines that have it as a finite number."""
        found = [(_number(line.get("step")) + 1, _number(line.get(field))) for line in self.windows]
        return _series(found)

    def validation(self, field: str) -> Series:
        """Return a value of the validations by the steps done."""
        return _series([(_number(line.get("step")), _number(line.get(field))) for line in self.validations])

    def by_timestep(self, line: Mapping[str, Any]) -> Series:
        """Return a validation's loss by timestep."""
        found = line.get("val_loss_per_timestep")
        pairs = found.items() if isinstance(found, dict) else ()
        return _series(sorted((_number(float(step)), _number(loss)) for step, loss in pairs if _is_number(step)))

    @property
    def buckets(self) -> dict[str, int]:
        """Return the number of steps by bucket."""
        total: dict[str, int] = {}
        for line in self.windows:
            found = line.get("buckets")
            for name, count in found.items() if isinstance(found, dict) else ():
                total[str(name)] = total.get(str(name), 0) + int(max(_number(count), 0))
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A grid of images that a run drew."""

    step: int
    image: bytes  # JPEG


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Return runs in the given order, each once; those of equal folder names are named by their paths.

    Raises:
        UsageError: as `read_run`.
    """
    runs = [read_run(path) for path in {path.resolve(): path for path in paths}.values()]
    names = Counter(run.name for run in runs)
    return [run if names[run.name] == 1 else replace(run, name=str(run.path)) for run in runs]


def read_run(path: Path) -> Run:
    """Return a run.

    Raises:
        UsageError: if the folder has no metrics or no configuration.
    """
    if not (path / CONFIG).is_file() or not (path / METRICS).is_file():
        raise UsageError(f"{path} is not the folder of a run: it needs {CONFIG} and {METRICS}; give a run's --output-dir")
    lines = []
    with (path / METRICS).open("rb") as file:
        for line in file.read(MAX_BYTES).splitlines():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue  # such as the last line of a run that was killed
            if isinstance(entry, dict) and _is_number(entry.get("step")):
                lines.append(entry)
    return Run(
        name=path.resolve().name,
        path=path,
        document=_document(path / CONFIG),
        status=_document(path / STATUS),
        windows=[line for line in lines if "val_loss" not in line],
        validations=[line for line in lines if "val_loss" in line],
    )


def _document(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def frames_of(run: Run) -> list[Frame]:
    """Return the image grids of a run by step, at most MAX_FRAMES of them, the first and the last included."""
    found = {int(match[1]): path for path in (run.path / IMAGES_FOLDER).glob("*.png") if (match := _STEP.fullmatch(path.name))}
    if (last := run.path / IMAGES).is_file():
        done = run.status.get("step")
        found[int(done) if isinstance(done, int) else 1 + max(found, default=0)] = last
    steps = sorted(found)
    if len(steps) > MAX_FRAMES:
        steps = [steps[round(n * (len(steps) - 1) / (MAX_FRAMES - 1))] for n in range(MAX_FRAMES)]
    return [Frame(step=step, image=small_jpeg(found[step])) for step in steps]


def texts_of(run: Run) -> list[dict[str, Any]]:
    """Return the captions, or the prompts with seed, size and guidance, of a run's newest grid, as the run wrote them."""
    found = sorted((run.path / IMAGES_FOLDER).glob("step-*.json"))
    last = run.path / IMAGES.replace(".png", ".json")
    path = last if last.is_file() else found[-1] if found else None
    if path is None:
        return []
    try:
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    own = entries if isinstance(entries, list) else []
    return [one for one in own if isinstance(one, dict)][:MAX_TEXTS]


def small_jpeg(path: Path) -> bytes:
    """Return an image file as a JPEG of at most FRAME_PX in width."""
    from PIL import Image  # matplotlib, which drew it, needs Pillow too

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    if image.width > FRAME_PX:
        image = image.resize((FRAME_PX, max(1, round(image.height * FRAME_PX / image.width))), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def _series(found: Sequence[tuple[float, float]]) -> Series:
    finite = [(step, value) for step, value in found if math.isfinite(step) and math.isfinite(value)]
    return Series(steps=tuple(step for step, _ in finite), values=tuple(value for _, value in finite))


def _is_number(value: object) -> bool:
    try:
        return math.isfinite(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ: name and the value of each run. Stores, versions and the commit count too."""
    flat = [_flat("", run.document) for run in runs]
    names = list(dict.fromkeys(name for own in flat for name in own))
    found = [(name, [own.get(name, "") for own in flat]) for name in names]
    return [(name, values) for name, values in found if len(set(values)) > 1]


def _flat(prefix: str, value: object) -> dict[str, str]:
    """Return a document as one value per dotted name.

    >>> _flat("", {"config": {"seed": 1, "store": ["a"]}})
    {'config.seed': '1', 'config.store': '["a"]'}
    """
    if not isinstance(value, dict):
        return {prefix: value if isinstance(value, str) else json.dumps(value)}
    found: dict[str, str] = {}
    for key, own in value.items():
        found |= _flat(f"{prefix}.{key}" if prefix else str(key), own)
    return found
