"""The meaning of command lines: the options that each gives, or the exit code with which it is refused; nothing is run."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import io
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState

LINES = Path(__file__).with_name("command_lines.txt")
ONE_COMMAND = ("train", "export-model")  # programs without a command's name
FILES = {
    "dataset.toml": """
[[source]]
path = "photos"
[[source]]
path = "dog"
repeats = 10
caption = "a photo of sks dog"
[rules]
grid = "square:512"
val_fraction = 0.1
""",
    "run.toml": """
[run]
store = ["a.store", "b.store:2"]
model = "sd15"
output_dir = "runs/a"
max_steps = 100
[batches]
batch_size = "4MP"
seed = 3
[objective]
loss_weight = "min-snr:5"
guidance = 2.0
[optimizer]
learning_rate = 1e-5
lr_schedule = "cosine:0.1"
ema = "0.999:cpu"
[method]
lora_rank = 4
[watching]
val_timesteps = 4
image_guidance = 5.0
[reading]
threads = 2
""",
    "wrong.toml": "[run]\nmax_steps = 'ten'\n",
}


def meant(work: Path) -> dict[str, Any]:
    """Return what each line means, in a folder with files of options and nothing else; and the defaults of each command."""
    work.mkdir(parents=True)
    for name, text in FILES.items():
        (work / name).write_text(text, encoding="utf-8")
    found: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    with contextlib.chdir(work):
        for line in LINES.read_text(encoding="utf-8").splitlines():
            words = shlex.split(line)
            options = _meant(words)
            if isinstance(options, str):
                found[line] = options
                continue
            own = {name: _plain(value) for name, value in _defaults(type(options)).items()}
            defaults[words[0] if words[0] in ONE_COMMAND else " ".join(words[:2])] = own
            given = {one.name: _plain(getattr(options, one.name)) for one in dataclasses.fields(options)}
            found[line] = {name: given[name] for name in sorted(given) if name not in own or given[name] != own[name]}
    AcceleratorState._reset_state(reset_partial_state=True)  # a refused run has set it, and forked ranks would take it over
    return {"defaults": defaults, **found}


def _meant(words: Sequence[str]) -> Any:
    """Return the last options that the line makes, before what they say is done; of a refusal its exit code."""
    program, *rest = words
    options: list[Any] = []
    with (
        _recorded(program, rest, options),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            sys.argv = ["bucketline", *words]
            code: object = importlib.import_module("bucketline.cli").main()
        except SystemExit as end:
            code = end.code
    return options[-1] if options else f"refused with {code}"


def _defaults(command: type) -> dict[str, object]:
    found = dict[str, object]()
    for one in dataclasses.fields(command):
        if one.default is not dataclasses.MISSING:
            found[one.name] = one.default
        elif one.default_factory is not dataclasses.MISSING:
            found[one.name] = one.default_factory()
    return found


@contextlib.contextmanager
def _recorded(program: str, rest: Sequence[str], options: list[Any]) -> Iterator[None]:
    """Append the options that are made; what a command does with them is left out.

    The trainer's fail on a store that does not exist, after they were made.
    """
    if program == "train":
        from bucketline.train.config import TrainConfig

        checked = TrainConfig.__post_init__

        def recorded(config: TrainConfig) -> None:
            checked(config)
            if not options:  # a run's have absolute paths
                options.append(config)

        with _set(TrainConfig, "__post_init__", recorded):
            yield
        return
    place = "bucketline.cli" if program == "export-model" else f"bucketline.{program}.cli"
    commands = importlib.import_module(place).COMMANDS
    name = program if program == "export-model" else rest[0] if rest else ""
    if name not in [*commands]:
        yield
        return

    def run(command: Any) -> int:
        options.append(command)
        return 0

    with _set(commands[name], "run", run):
        yield


@contextlib.contextmanager
def _set(owner: type, name: str, value: object) -> Iterator[None]:
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _plain(value: object) -> Any:
    """Return a value as JSON: of a dataclass that has a spelling of its own that, of another one its fields."""
    match value:
        case enum.Enum():
            found: Any = str(value.value)
        case None | bool() | int() | float() | str():
            found = value
        case tuple() | list():
            found = [_plain(one) for one in value]
        case set() | frozenset():
            found = sorted(map(str, value))
        case dict():
            found = {str(key): _plain(one) for key, one in value.items()}
        case _ if dataclasses.is_dataclass(value) and type(value).__str__ is object.__str__:
            found = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        case _:
            found = str(value)
    return found
