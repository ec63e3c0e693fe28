"""Shared by all console commands: parse into a dataclass, run it, map errors to messages and exit codes.

Exit codes: 0 success, 1 domain failure, 2 usage error, 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import shutil
import socket
import sys
import textwrap
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar, cast

from bucketline.errors import BucketlineError, UsageError
from bucketline.extensions import Extensions, extra_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console
    from rich.progress import ProgressColumn


# -------------------------------------------------------------------------------------------------------------------- progress
# Progress on stderr: bars if that is a terminal, which only this file decides, and lines that may be lost.


class _OutputStream:
    """A text stream with a function that is called if it cannot be written; everything else is the stream's own."""

    def __init__(self, stream: TextIO, fail: Callable[[OSError], None]) -> None:
        self._stream: TextIO = stream._stream if isinstance(stream, _OutputStream) else stream
        self._fail = fail

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._fail(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)


def as_log(stream: TextIO) -> TextIO:
    """Return a stream whose writes never fail: a full disk, a closed pipe or a lost terminal must not end what is logged."""
    return cast("TextIO", _OutputStream(stream, lambda _: None))


def as_results(stream: TextIO) -> TextIO:
    """Return stdout as a stream of which a failed write is an error of ours, or a BrokenPipeError if `head` has closed it."""

    def fail(error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise error
        raise BucketlineError(f"stdout cannot be written: {error.strerror}; fix this and rerun the command") from error

    return cast("TextIO", _OutputStream(stream, fail))


def stderr_console(**options: Any) -> Console:  # noqa: ANN401 - as rich's
    """Return a console on stderr whose `is_terminal` says whether to draw a bar or print lines; `options` are rich's.

    By itself, rich takes FORCE_COLOR for a terminal, and would draw a bar into a log file. A terminal that can show no bar has
    TTY_COMPATIBLE=0, and gets lines.
    """
    from rich.console import Console

    return Console(file=as_log(sys.stderr), force_terminal=None if sys.stderr.isatty() else False, **options)


def shows_bars() -> bool:
    """Return whether stderr is a terminal that shows bars. Where it is none, rich is not imported."""
    return sys.stderr.isatty() and bool(stderr_console().is_terminal)


@contextmanager
def progress_bar(
    what: str, total: float | None, *columns: ProgressColumn, transient: bool = True
) -> Iterator[Callable[..., None]]:
    """Yield a function that takes `advance=`, or `completed=` and `total=`.

    The bar appears at once, or at the first call if there is no total yet. `columns` follow it; the time left comes last. With
    `transient`, it is erased at the end.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = stderr_console()
    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    progress = Progress(*shown, console=console, transient=transient, disable=not console.is_terminal)
    task = progress.add_task(what, total=total)

    def update(**changes: Any) -> None:  # noqa: ANN401 - as rich's
        progress.start()
        progress.update(task, **changes)

    try:
        if total is not None:
            progress.start()
        yield update
    finally:
        if progress.live.is_started:
            progress.stop()


# ---------------------------------------------------------------------------------------------------------------- command line

_C = TypeVar("_C")
_MAX_SHOWN_BUCKETS = 16
_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


class Command(Protocol):
    """A command's options, with a `run` method."""

    def run(self) -> int:
        """Run the command and return the exit code."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """Print the version of bucketline."""

    def run(self) -> int:
        from bucketline import __version__

        print(__version__)
        return 0


def commands(program: str, ours: Mapping[str, str]) -> Extensions[type[Command]]:
    """Return a program's commands, `MODULE:CLASS` by name, and those that packages declare as entry points.

    The group of `store` is `bucketline.store_commands`. A command is a dataclass of its options, with `Command`'s method.
    """

    def is_command(found: object) -> bool:
        return isinstance(found, type) and is_dataclass(found) and callable(getattr(found, "run", None))

    return Extensions(f"a command of `{program}` called", f"bucketline.{program}_commands", ours, is_command)


def parse_command(command: type[_C], args: Sequence[str], prog: str) -> _C:
    """Return a command's options from its command line."""
    from bucketline.options import asked_for_help, command_help, parse_options

    if (asked := asked_for_help(args)) is not None:
        print(command_help(prog, command, asked), end="")
        raise SystemExit(0)
    return parse_options(command, args, prog)


def run_one_of(
    prog: str,
    description: str,
    commands: Extensions[type[Command]],
    args: Sequence[str] | None,
) -> int:
    """Parse `prog NAME …` into the dataclass of the command NAME, run it and return the exit code.

    Only this command is imported; all are for the help of `prog` itself. One that cannot be is left out there.
    """

    def parse_and_run() -> int:
        from bucketline.options import HELP, group_help, suggestion

        name, *rest = [*(sys.argv[1:] if args is None else args)] or [""]
        if name == "version":
            return Version().run()
        command = commands.own(name)
        if command is None and name in [*commands]:
            command = commands[name]
        if command is None:
            found: dict[str, type[Command]] = {}
            for one in commands:
                try:
                    found[one] = commands[one]
                except UsageError as error:
                    print_error(error)
            shown = group_help(prog, description, {**found, "version": Version})
            if name in HELP:
                print(shown, end="")
                return 0
            problem = f"there is no command `{prog} {name}`{suggestion(name, [*found])}" if name else "no command is given"
            print(f"error: {printable(problem)}\n\n{shown}", end="", file=sys.stderr)
            return 2
        return parse_command(command, rest, f"{prog} {name}").run()

    return guarded(parse_and_run, prog.rpartition(" ")[2])


def hide_warnings_of_torchao() -> None:
    """Hide its warnings about kernels and classes that nothing here uses: diffusers imports it wherever it is installed."""
    for name in ("torchao", "diffusers.quantizers.torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def guarded(run: Any, command: str = "bucketline") -> int:  # noqa: ANN401 - returns an exit code, or None for 0
    """Call `run` and turn Bucketline errors, missing extras, Ctrl-C and closed pipes into a message and an exit code.

    Stderr is a log meanwhile: `run` continues if a line cannot be written.
    """
    hide_warnings_of_torchao()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that is not UTF-8 must not fail a finished command
            stream.reconfigure(errors="backslashreplace")
    try:
        with ExitStack() as streams:
            if sys.stderr is not None:
                streams.enter_context(redirect_stderr(as_log(sys.stderr)))
            if sys.stdout is not None:
                streams.enter_context(redirect_stdout(as_results(sys.stdout)))
            return _with_messages(run, command)
    except BrokenPipeError:
        return 1
    finally:
        _give_up_unwritten()


def _with_messages(run: Any, command: str) -> int:  # noqa: ANN401
    try:
        with extra_named(command):
            try:
                return int(run() or 0)
            finally:  # here, so that a failure is caught below; also after --help, which raises SystemExit
                if sys.stdout is not None:
                    sys.stdout.flush()
    except BucketlineError as error:
        print_error(error)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        # any path check may raise it, so it is handled once, here
        print(
            f"error: {printable(str(error.filename)[:80])}… is not a usable path: {error.strerror}; use a shorter one",
            file=sys.stderr,
        )
        return 1


def _give_up_unwritten() -> None:
    """Send output that cannot be written to /dev/null: the flush at exit would print an error and set the exit code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_json(value: object) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(value, indent=1, ensure_ascii=True))


def print_json_line(value: object) -> None:
    """Print one JSON Lines object on stdout."""
    print(json.dumps(value, ensure_ascii=True))


def print_error(error: BaseException) -> None:
    """Print an error's message on stderr, each of its lines as `printable`."""
    lines = list(map(str, error.args)) if isinstance(error, BucketlineError) else [str(error)]
    for line in [f"error: {lines[0] if lines else ''}", *lines[1:]]:
        say(printable(line), sys.stderr)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line on stdout or `stream`; on a terminal that is narrower, it breaks between words and continues indented."""
    stream = stream or sys.stdout
    print(wrapped(text, shutil.get_terminal_size().columns) if stream and stream.isatty() else text, file=stream)


def wrapped(text: str, width: int) -> str:
    """Return a line broken between words.

    >>> print(wrapped("  note: three words more", 15))
      note: three
        words more
    """
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def printable(text: str) -> str:
    r"""Return a message on one line: characters that a terminal would act on become Python escapes, so that no name forges one.

    >>> printable("a\nb\x1b[2J \u202e")
    'a\\nb\\x1b[2J \\u202e'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def one_line(text: str) -> str:
    r"""Return a name for the terminal, on one line: unprintable characters and backslashes become Python escapes.

    Every name that a command prints goes through this, or `printable` if it is within a message.

    >>> one_line("boats/a\nb.png")
    'boats/a\\nb.png'
    """
    return printable(text.replace("\\", "\\\\"))


def refuse_below(least: int, **options: float | None) -> None:
    """Check the values of options, given by the names of their fields; None is not checked."""
    for name, value in options.items():
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} is {value}, expected {least} or more")


def torchrun_ranks() -> dict[str, int]:
    """Return `rank`, `world_size`, `local_rank` and `local_world_size` as torchrun sets them, or those of a single process."""
    names = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1}
    return {name: int(os.environ.get(name.upper(), default)) for name, default in names.items()}


def launch_name() -> str | None:
    """Return a name that all processes have in common which a launcher has started together; None if there is no launcher.

    Another launch at the same time has another name. One after the other may have the same.
    """
    told = [os.environ.get(name, "") for name in _LAUNCH]
    if not (told[0] and told[1]):
        return None
    is_here = told[0] in ("localhost", "::1") or told[0].startswith("127.")
    return hashlib.sha256("\0".join([*told, socket.gethostname() * is_here]).encode()).hexdigest()[:16]


def machines_of(world_size: int) -> int:
    """Return the number of machines with `world_size` ranks, by torchrun's LOCAL_WORLD_SIZE; without it, one for each rank."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(here) if here.isdecimal() else 1
    return world_size // ranks if ranks and world_size % ranks == 0 else world_size


def default_cache() -> Path:
    """Return the folder of the cache of stores in object storage: `BUCKETLINE_CACHE`, or in the user's cache directory."""
    given = os.environ.get("BUCKETLINE_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bucketline"


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, whose plural ends in `s`.

    >>> counted(1, "sample"), counted(0, "sample")
    ('1 sample', '0 samples')
    """
    return f"{number} {noun if number == 1 else f'{noun}s'}"


def shown_rows(about: str, rows: Sequence[tuple[str, int]]) -> str:
    """Return a store or a loader as `print` shows it, in at most 20 lines: what it is, then the rows of each bucket.

    >>> print(shown_rows("Store a.store", [("train/512x512", 3), ("train/512x768", 1)]))
    Store a.store, 4 rows in 2 buckets
      train/512x512: 3
      train/512x768: 1
    """
    few = rows[:_MAX_SHOWN_BUCKETS]
    more = [f"  and {counted(len(rows) - len(few), 'bucket')} more"] if len(rows) > len(few) else []
    total = f"{counted(sum(number for _, number in rows), 'row')} in {counted(len(rows), 'bucket')}"
    return "\n".join([f"{about}, {total}", *(f"  {name}: {number}" for name, number in few), *more])


def human_number(value: float) -> str:
    """Return a measured number, formatted as an integer or to three significant digits.

    >>> human_number(141180.3), human_number(12.34), human_number(0.001234)
    ('141,180', '12.3', '0.00123')
    """
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def per_second(value: float, noun: str) -> str:
    """Return a formatted rate with its unit.

    >>> per_second(141180.3, "image"), per_second(1.0, "image")
    ('141,180 images/s', '1 image/s')
    """
    shown = human_number(value)
    return f"{shown} {noun if shown == '1' else f'{noun}s'}/s"


def human_bytes(num_bytes: float) -> str:
    """Return a size in bytes with a binary unit.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
