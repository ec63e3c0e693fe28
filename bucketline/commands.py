"""What every console command shares: parse into a dataclass, run it, turn our errors into messages and exit codes.

Exit codes: 0 done, 1 a failure in the domain, 2 a request that makes no sense, 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Union

from bucketline.errors import BucketlineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Command(Protocol):
    """A command's configuration, which can be carried out."""

    def run(self) -> int:
        """Do it; give the exit code."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """Print the version of bucketline."""

    def run(self) -> int:
        from bucketline import __version__

        print(__version__)
        return 0


def run_one_of(prog: str, description: str, commands: Mapping[str, type[Command]], args: Sequence[str] | None) -> int:
    """Parse `prog NAME …` into the dataclass of the command NAME and run it. Give the exit code."""
    import tyro

    choices = tuple(
        Annotated[command, tyro.conf.subcommand(name=name, prefix_name=False)]
        for name, command in {**commands, "version": Version}.items()
    )
    union: Any = Union[choices]  # noqa: UP007 - made at run time

    settings = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.EnumChoicesFromValues)

    def parse_and_run() -> int:
        command: Command = tyro.cli(
            Annotated[union, *settings],
            prog=prog,
            description=description,
            args=list(args) if args is not None else None,
        )
        code = command.run()
        sys.stdout.flush()  # here, where a closed pipe is still no traceback
        return code

    return guarded(parse_and_run)


def guarded(run: Any) -> int:  # noqa: ANN401 - any callable that gives an exit code
    """Call `run`; turn Bucketline's errors, Ctrl-C and a closed pipe into a message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names that are no UTF-8 must not end a command that has done its work
            stream.reconfigure(errors="backslashreplace")
    try:
        return int(run())
    except BucketlineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        # whatever asks first whether a path is there is told so: no one place could say it for all
        print(f"error: {str(error.filename)[:80]}… is no path: {error.strerror}; name a shorter one", file=sys.stderr)
        return 1


def print_json(value: object) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(value, indent=1, ensure_ascii=True))


def print_json_line(value: object) -> None:
    """Print one object of JSON Lines on stdout."""
    print(json.dumps(value, ensure_ascii=True))


def one_line(text: str) -> str:
    r"""Give a text as it can stand in a line: what is no printable character, and the backslash, as Python escapes it.

    >>> one_line("boats/a\nb.png")
    'boats/a\\nb.png'
    """
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode("ascii") for c in text)


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_bytes(text: str, option: str) -> int:
    """Read a number of bytes such as `512MiB`; `option` is named in the error.

    Raises:
        UsageError: where it is none, or 0.

    >>> parse_bytes("1.5KiB", "--shard-size")
    1536
    """
    match = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(_UNITS)})?", text.strip())
    num_bytes = int(float(match[1]) * 1024 ** _UNITS.index(match[2] or "B")) if match else 0
    if num_bytes < 1:
        raise UsageError(f"{option} is {text!r}, expected a number of bytes above 0, such as 1GiB or 512MiB")
    return num_bytes


def counted(number: int, noun: str) -> str:
    """Give a number with its noun, which takes an s where there is not one of it.

    >>> counted(1, "sample"), counted(0, "sample")
    ('1 sample', '0 samples')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def human_bytes(num_bytes: float) -> str:
    """Give bytes as people read them.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
