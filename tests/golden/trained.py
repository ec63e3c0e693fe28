"""Training runs of each family's tiny model, full and LoRA: every loss, norm, rate and validation, and the weights."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.family_models import FORMS, write_dit, write_pipeline
from tests.golden.digests import of_safetensors
from tests.golden.forking import CallFailedError, forked, program
from tests.models import png

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


EVERY_FORM = (*FORMS, "dit")
TEXTS = ("a red cat", "a blue dog of the house", "the house", "a cat of the dog")
CLASSES = {0: "cat", 1: "dog", 2: "house"}
NUM_IMAGES = 10
END, STOP = 6, 4  # steps of a whole run, and of the first part of one that is resumed
OPTIONS = (
    *("--batch-size", 2, "--accumulation", 2, "--warmup-steps", 2),
    *("--learning-rate", 1e-3, "--lr-schedule", f"cosine:0.1@{END}"),
    *("--log-every", 1, "--validate-every", 3, "--save-every", STOP, "--ema", 0.9, "--caption-dropout", 0.1),
    *("--num-images", 0, "--seed", 5),
)
LORA = ("--lora-rank", 2, "--lora-alpha", 4)
KINDS: dict[str, tuple[object, ...]] = {"full": (), "lora": LORA}
RECORDED = ("step", "loss", "grad_norm", "lr", "val_loss", "val_zero_loss", "val_loss_per_timestep")
# On several ranks: the number of each part of a run, and the options of all parts.
ON_RANKS: dict[str, tuple[tuple[int, ...], tuple[object, ...]]] = {
    "2 ranks": ((2,), ()),
    "2 ranks, then 4": ((2, 4), ()),
    "4 ranks, then 1": ((4, 1), ("--accumulation", 1)),
    "fsdp on 2 ranks": ((2,), ("--sharding", "fsdp")),
    "fsdp on 2 ranks, then 2": ((2, 2), ("--sharding", "fsdp")),
    "fsdp on 2 ranks, then ddp on 1": ((2, 1), ("--sharding", "fsdp")),
}
OF_ADAPTERS = ("2 ranks, then 4", "fsdp on 2 ranks, then 2")
FORMS_ON_RANKS = ("sd", "flux")
# Other options, on one rank: of a form, by the name of the run.
CHOICES: dict[str, dict[str, tuple[object, ...]]] = {
    "sd": {
        "min-snr": ("--loss-weight", "min-snr:5", "--noise-offset", 0.05),
        "v": ("--objective", "v_prediction", "--timesteps", "mode", "--timestep-range", "0.1:0.9"),
        "average on the cpu": ("--ema", "0.9:cpu:2", "--clip-norm", 0.5, "--weight-decay", 0.1, "--betas", "0.8,0.9,1e-6"),
        "no average": ("--ema", "off", "--lr-schedule", f"wsd:2@{END}", "--clip-norm", "None"),
        "bf16": ("--precision", "bf16"),
        "weights in bf16": ("--weights", "bf16", "--precision", "bf16", "--optimizer", "adamw-8bit"),
        "recomputed": ("--recompute", 1),
        "pixels in a window": ("--batch-size", "0.002MP", "--window", 16, "--verify"),
        "tokens": ("--batch-size", "0.4ktok", "--log-every", 2),
        "a service": ("--service", "auto"),
        "8 bits": ("--optimizer", "adamw-8bit"),
        "muon": ("--optimizer", "muon"),
        "prodigy": ("--optimizer", "prodigy", "--learning-rate", 1),
        "lora of all": (*LORA, "--lora-targets", "all", "--precision", "bf16"),
        "lora on 8 bits": (*LORA, "--lora-targets", "attention+mlp", "--base", "int8", "--recompute", 1),
        "lora, offloaded": (*LORA, "--offload-blocks", 1, "--recompute", 1),
    },
    "flux": {
        "logit-normal": ("--timesteps", "logit-normal:0.5,1", "--loss-weight", "cosmap"),
        "shifted": ("--shift", 3, "--loss-weight", "sigma-sqrt", "--caption-dropout", 0.5),
    },
}
# Other forms of a store, and what is trained on them.
STORED: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
    "sdxl": (("--flip",), ("--flip", 0.5)),
    "sd3": (("--latents", "moments"), ()),
    "pixart_sigma": (("--text-dtype", "int8"), ()),
    "chroma": (("--dtype", "bf16"), ()),
}


@dataclass(frozen=True, kw_only=True)
class Made:
    """A form's model and its store."""

    root: Path
    form: str

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def store(self) -> Path:
        return self.root / "tiny.store"

    def arguments(self, run: str, *more: object) -> list[object]:
        chosen: dict[str, list[object]] = {}
        name = ""
        for word in (*OPTIONS, *STORED.get(self.form, ((), ()))[1], *more):
            if str(word).startswith("--"):
                name = str(word)
                chosen[name] = []
            else:
                chosen[name].append(word)
        place = ("--store", self.store, "--model", self.model, "--output-dir", self.root / run)
        return [*place, *(word for option, values in chosen.items() for word in (option, *values))]


def trained(work: Path, forms: Iterable[str] = EVERY_FORM, *, only_whole: bool = False) -> dict[str, Any]:
    """Return what each run gave, by form and name; of one that failed, how.

    `only_whole`: the metrics of whole runs on one rank, without their weights.
    """
    found: dict[str, Any] = {}
    for form in forms:
        made = Made(root=work / re.sub(r"\W", "-", form), form=form)
        made.root.mkdir(parents=True)
        try:
            forked(partial(_write, made), made.root / "log")
            forked(program("bucketline.ingest.cli:main", _packing(made)), made.root / "log")
        except CallFailedError as error:
            found[form] = _said(error, work)
            continue
        names = [(KINDS[kind], kind, name) for kind in KINDS for name in _names(form, kind, only_whole=only_whole)]
        if not only_whole:
            names += [(options, name, f"{name} on 1") for name, options in CHOICES.get(form, {}).items()]
        found[form] = {name: _or_failed(work, made, kind, name, options, only_whole) for options, kind, name in names}
        shutil.rmtree(made.root)
    return found


def _names(form: str, kind: str, *, only_whole: bool) -> list[str]:
    if only_whole:
        return [f"{kind} on 1"]
    others = (ON_RANKS if kind == "full" else OF_ADAPTERS) if form in FORMS_ON_RANKS else ()
    return [f"{kind} on 1", *(f"{kind} on {ranks}" for ranks in others)]


def _or_failed(
    work: Path,
    made: Made,
    kind: str,
    name: str,
    options: tuple[object, ...],
    only_whole: bool,  # noqa: FBT001
) -> Any:
    """Return what the run with these options gave, or how it failed; on one rank, also whether a resumed one gave the same."""
    parts, more = ON_RANKS.get(name.removeprefix(f"{kind} on "), ((1,), ()))
    try:
        if parts != (1,):
            return _run(made, name, parts, *options, *more)
        whole = _run(made, f"{kind}-whole", (1,), *options, is_exported=not only_whole)
        if only_whole:
            return whole
        resumed = _run(made, f"{kind}-parts", (1, 1), *options)
    except CallFailedError as error:
        return _said(error, work)
    return {**whole, "resumed": "equals the whole run" if whole == resumed else resumed}


def _said(error: Exception, work: Path) -> str:
    return f"failed: {error}".replace(str(work), "")


def _run(made: Made, name: str, ranks: Sequence[int], *more: object, is_exported: bool = True) -> dict[str, Any]:
    """Run in parts, each on its number of ranks; the weights are exported from the last checkpoint."""
    run = made.root / name
    shutil.rmtree(run, ignore_errors=True)
    for part, count in enumerate(ranks):
        end = END if part == len(ranks) - 1 else STOP
        words = made.arguments(name, *more, "--max-steps", end)
        if part and count == 1 and "--sharding" in words:
            words[words.index("--sharding") + 1] = "ddp"
        if count != ranks[0]:
            at = words.index("--accumulation") + 1
            words[at] = int(str(words[at])) * ranks[0] // count
        call = program("bucketline.train.main:main", [*words, *(["--resume"] if part else [])])
        forked(call, made.root / "log", processes=count)
    weights = _weights(made, run, has_average="off" not in more) if is_exported else None
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    kept = [{key: line[key] for key in RECORDED if key in line} for line in lines]
    shutil.rmtree(run)
    return {"lines": kept, "weights": weights}


def _weights(made: Made, run: Path, *, has_average: bool) -> dict[str, Any]:
    chosen: dict[str, tuple[str, ...]] = {"average": (), "last": ("--last",)} if has_average else {"last": ("--last",)}
    out = made.root / "exported"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    calls = [("export-model", run, out / which, "--dtype", "fp32", *more) for which, more in chosen.items()]
    forked(lambda: max(map(_bucketline, calls)), made.root / "log")
    return {which: of_safetensors(out / which) for which in chosen}


def _bucketline(words: Sequence[object]) -> int:
    import sys

    from bucketline.cli import main

    sys.argv = ["bucketline", *(str(word) for word in words)]
    return main()


def _write(made: Made) -> None:
    import torch

    images = made.root / "images"
    images.mkdir()
    height, width = FORMS[made.form].size if made.form in FORMS else (16, 16)
    for n in range(NUM_IMAGES):
        # of two sizes where the model takes them
        (images / f"{n}.png").write_bytes(png(height, height if _is_turned(made.form, n) else width, seed=n))
        text = CLASSES[n % 3] if made.form == "dit" else TEXTS[n % len(TEXTS)]
        (images / f"{n}.txt").write_text(text, encoding="utf-8")
    if made.form == "dit":
        torch.manual_seed(0)
        write_dit(made.model, CLASSES)
    else:
        write_pipeline(made.model, made.form)


def _is_turned(form: str, n: int) -> bool:
    return form in TWO_SIZES and n % 2 == 1


TWO_SIZES = ("sd", "sdxl", "sd3", "flux", "pixart_alpha", "pixart_sigma")


def _packing(made: Made) -> list[object]:
    height, width = FORMS[made.form].size if made.form in FORMS else (16, 16)
    grid = f"{height}x{width}" + (f",{height}x{height}" if made.form in TWO_SIZES else "")
    options: dict[str, Any] = {"--model": made.model, "--grid": grid, "--min-size-px": 8, "--val-fraction": 0.25}
    more = STORED.get(made.form, ((), ()))[0]
    return ["pack", made.root / "images", made.store, *(word for pair in options.items() for word in pair), *more]
