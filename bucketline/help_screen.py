"""The help of a command, from the dataclass of its options: one screen, and the rest by section.

The options that one class declares are a section: its `SECTION` is "NAME: WHAT IT HAS".
`FIRST` of a command names the options that its first screen has next to the required ones. With `FROM_FILES`, files give
options too, which the command line overrides: each flag has an opposite, and an option with several values is repeated.
A field with the metadata `ONLY_IN_FILE` is set in a run file (or what the
command's `FILE` says) and not on the command line: its section lists it apart, without hyphens.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import shutil
import textwrap
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from bucketline.dtype_names import dtype_name
from bucketline.errors import UsageError
from bucketline.option_value import is_option_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HELP = ("-h", "--help")
ALL = "all"
ALONE = "alone"
"""Key of a field's metadata: the value that its option stands for without one (`--prune`, `--prune=0.5`)."""
METAVAR = "metavar"
"""Key of a field's metadata: what stands for the option's value in its help, in code that does not import tyro."""
REPEATS = "repeats"
"""Key of a field's metadata: the option may be given several times, each with one value."""
ONLY_IN_FILE = {"only_in_file": True}
"""Metadata of a field that only a run file sets: few runs need another value than its default."""
_FEW = 16  # a command with so many options or fewer shows all of them on its first screen
_ALIKE = 0.75  # of difflib's ratios, from which a name may have been meant: "resolution" and "recaption" have 0.63
_NO_HYPHENS = re.compile("^--(no-)?")
_MAX_WIDTH, _INDENT = 100, 24
_WORDS = {int: "INT", float: "FLOAT", str: "TEXT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option or a positional argument, as it is typed and explained."""

    field: str
    typed: str  # "--batch-size INT", "--prune", "SOURCE"; of what only a run file sets, "image_steps = INT"
    text: str
    default: str | None  # None: there is none, or it says nothing
    section: str
    is_required: bool
    is_in_file: bool = False  # and not on the command line
    file: str = ""  # the kind of file that sets it
    choices: tuple[str, ...] = ()  # words that it takes; (): others as well
    number: type[int | float] | None = None  # its values are numbers of this type
    is_many: bool = False  # it takes several values, one after the other
    repeats: bool = False  # it is typed once for each of its values, though tyro takes them together
    is_flag: bool = False  # it may be typed without a value
    alone: str | None = None  # the value that it then has; None: it is a bool

    @property
    def words(self) -> list[str]:
        """Return how it may be spelt, without its value."""
        names = re.split(r"[ \[]", self.typed.replace(", ", ","), maxsplit=1)[0]
        return [word for word in names.split(",") if word.startswith("-")]

    @property
    def value(self) -> str:
        """Return what stands for its value after its name; "" of a flag."""
        return "" if self.is_flag else self.typed.rpartition(", ")[2].partition(" ")[2]

    @property
    def takes_word(self) -> bool:
        """True if the next word may be its value: of a flag, as in `--resume [RUN]`."""
        return bool(self.value) or " [" in self.typed

    @property
    def leads(self) -> bool:
        """True if help begins with it: what is required, and what is given by place."""
        return self.is_required or not (self.words or self.is_in_file)

    def explained(self, *, in_full: bool) -> str:
        """Return what is said of it: its first sentence, or all of it with the default."""
        says_default = self.default is None or re.search(r"\b[Dd]efault:", self.text)
        if in_full:
            return self.text if says_default else f"{self.text} Default: {self.default}."
        short = re.split(r"[.:;](?= |$)", self.text, maxsplit=1)[0]
        return short if self.default is None else f"{short} [{self.default}]"


@cache
def options_of(command: type) -> tuple[Option, ...]:
    """Return the options of a command, in the order of their declaration."""
    hints = get_type_hints(command, include_extras=True)
    owners = {name: owner for owner in reversed(command.__mro__) for name in vars(owner).get("__annotations__", {})}
    texts = {name: text for owner in reversed(command.__mro__) for name, text in _texts(owner).items()}
    found = [
        replace(_option(field, hints[field.name], owners[field.name], texts), file=getattr(command, "FILE", "a run file"))
        for field in fields(command)
        if field.init and not any(str(one) == "Suppress" for one in getattr(hints[field.name], "__metadata__", ()))
    ]
    if getattr(command, "FROM_FILES", False):
        found = [replace(one, is_many=one.is_many and not one.words, repeats=False) for one in found]
    return tuple(found)


def _option(field: Any, hint: Any, owner: type, texts: dict[str, str]) -> Option:  # noqa: ANN401 - a dataclass's field, a type
    kind, extras = (get_args(hint)[0], get_args(hint)[1:]) if hasattr(hint, "__metadata__") else (hint, ())
    metavar = next((found for one in extras if (found := getattr(one, "metavar", None))), field.metadata.get(METAVAR))
    has_default = field.default is not MISSING or field.default_factory is not MISSING
    alias = "".join(f"{name}, " for one in extras for name in getattr(one, "aliases", None) or ())
    told = next((found for one in extras if (found := getattr(one, "help", None))), "")
    is_in_file = bool(field.metadata.get("only_in_file"))
    if any(str(one) == "Positional" for one in extras):
        typed = metavar or field.name.upper()
    elif is_in_file:
        typed = f"{field.name} = {metavar or _metavar(kind) or 'true|false'}"
    else:
        name = next((found for one in extras if (found := getattr(one, "name", None))), field.name)
        no = "no-" if kind is bool and field.default is True else ""
        typed = " ".join(filter(None, (f"{alias}--{no}{name.replace('_', '-')}", metavar or _metavar(kind))))
        if ALONE in field.metadata:
            typed = f"{typed.replace(' ', '[=', 1)}]"
    return Option(
        field=field.name,
        typed=typed,
        text=" ".join(texts.get(field.name, told).split()),
        default=_shown(field.default),
        section=vars(owner).get("SECTION", "").partition(":")[0],
        is_required=not has_default,
        is_in_file=is_in_file,
        choices=_choices(kind),
        number=None if not {*_inner(kind)} - {NoneType} <= {int, float} else float if float in _inner(kind) else int,
        repeats=REPEATS in field.metadata,
        is_flag=kind is bool or ALONE in field.metadata,
        alone=field.metadata.get(ALONE),
        is_many=get_origin(kind) in (tuple, list)
        and REPEATS not in field.metadata
        and not any(str(one) == "UseAppendAction" for one in extras),
    )


def _inner(kind: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a type
    """Return the types that a value of a type may have: those of a union, or of a tuple's items."""
    if get_origin(kind) is Literal or not get_args(kind):
        return (kind,)
    inner = get_args(kind)[:1] if hasattr(kind, "__metadata__") else get_args(kind)
    return tuple(found for one in inner if one is not Ellipsis for found in _inner(one))


@cache
def _texts(owner: type) -> dict[str, str]:
    """Return the docstrings of the attributes that a class itself declares."""
    if "__annotations__" not in vars(owner):
        return {}
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    except (OSError, TypeError, SyntaxError):  # a package without its source, or a class that no file has
        return {}
    found: dict[str, str] = {}
    for one, following in pairwise(body.body if isinstance(body, ast.ClassDef) else []):
        match one, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = text
    return found


def _metavar(kind: Any) -> str | None:  # noqa: ANN401 - a type
    """Return what stands for an option's value; None for a flag."""
    if named := next((found for one in getattr(kind, "__metadata__", ()) if (found := getattr(one, "metavar", None))), None):
        return str(named)
    if get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        return "|".join(map(dtype_name, _choices(kind)))
    if is_option_value(kind):
        return str(kind.metavar())
    inner = get_args(kind)[:1] if hasattr(kind, "__metadata__") else get_args(kind)
    if inner:
        return "|".join(dict.fromkeys(filter(None, (_metavar(one) for one in inner if one not in (NoneType, Ellipsis)))))
    return None if kind is bool else _WORDS.get(kind, "PATH")


def _choices(kind: Any) -> tuple[str, ...]:  # noqa: ANN401 - a type
    """Return the words that a type has; () if it takes others as well."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(str(one.value) for one in kind)
    inner = [one for one in get_args(kind) if one is not NoneType]
    return _choices(inner[0]) if len(inner) == 1 else ()


def _shown(default: object) -> str | None:
    if default is MISSING or default is None or isinstance(default, bool) or default in ((), ""):
        return None
    return dtype_name(str(default.value) if isinstance(default, Enum) else str(default))


def asked_for_help(args: Sequence[str]) -> str | None:
    """Return what follows `--help` in a command line: a section, or "" for the first screen; None without `--help`."""
    for at, word in enumerate(args):
        if word == "--":
            return None
        name, is_given, section = word.partition("=")
        if name in HELP:
            rest = [section] if is_given else args[at + 1 : at + 2]
            return rest[0] if rest and not rest[0].startswith("-") else ""
    return None


def command_help(prog: str, command: type, asked: str = "") -> str:
    """Return the help of a command: its first screen, a section of its options, or all of them.

    Raises:
        UsageError: if there is no section of that name.
    """
    options, sections = options_of(command), sections_of(command)
    leading = sorted((one for one in options if one.leads), key=lambda one: not one.is_required)
    about = inspect.getdoc(command) or ""
    if asked == ALL:
        parts = [*_paragraphs(about), "", *_listed("", leading, in_full=True)]
        for name in sections:
            if own := [one for one in _in(options, name) if not one.leads]:
                parts += ["", *_listed(name, own, in_full=True)]
        return _joined(_usage(prog, leading), parts)
    if asked:
        if asked not in sections:
            raise UsageError(f"--help {asked}: there is no such section, expected {', '.join([*filter(None, sections), ALL])}")
        return _joined(f"{prog}: {sections[asked]}", [*_listed("", _in(options, asked), in_full=True)])
    first = getattr(command, "FIRST", ())
    rest = [one for one in options if not one.leads and not one.is_in_file]
    rest.sort(key=lambda one: [*sections].index(one.section))
    shown = rest if len(rest) <= _FEW - len(leading) else [one for name in first for one in rest if one.field == name]
    summary, example = about.partition("\n\n")[0], re.search(r"^Example: (.*)$", about, re.MULTILINE)
    parts = [" ".join(summary.split()), *([f"Example: {example[1]}"] if example else [])]
    parts += ["", *_listed("", [*leading, *shown], in_full=False), ""]
    return _joined(_usage(prog, leading), [*parts, *_other_sections(options, sections, shown)])


def group_help(prog: str, description: str, commands: Mapping[str, type]) -> str:
    """Return the help of a program with several commands: a line for each."""
    parts = [" ".join(description.split()), "", *(_row(name, _line_about(command)) for name, command in commands.items())]
    return _joined(f"usage: {prog} COMMAND …", [*parts, "", f"`{prog} COMMAND --help` shows a command's options."])


def _line_about(command: type) -> str:
    return re.split(r"[:.;](?= |$)", " ".join((inspect.getdoc(command) or "").split()), maxsplit=1)[0]


def sections_of(command: type) -> dict[str, str]:
    """Return a command's sections in the order of their classes, storage last, with what is said of each."""
    declared = [vars(one).get("SECTION", "") for one in command.__mro__ if vars(one).get("__annotations__")]
    found = {name: about for name, _, about in (text.partition(": ") for text in reversed(declared))}
    return {name: found[name] for name in sorted([*reversed(found)], key=lambda name: name == "storage")}


def _in(options: Sequence[Option], section: str) -> list[Option]:
    return [one for one in options if one.section == section]


def _usage(prog: str, leading: Sequence[Option]) -> str:
    given = (one.typed if one.is_required or one.typed.startswith("[") else f"[{one.typed}]" for one in leading)
    return " ".join(["usage:", prog, *given, "[OPTIONS]"])


def _other_sections(options: Sequence[Option], sections: dict[str, str], shown: Sequence[Option]) -> Iterator[str]:
    hidden = [one for one in options if not one.leads and not one.is_in_file and one not in shown]
    if not hidden:
        yield f"--help {ALL}: the same in full"
        return
    yield "More options:"
    for name, about in sections.items():
        if name and (own := [one for one in _in(options, name) if not one.is_in_file]):
            yield _row(f"--help {name}", f"{len(own)}: {about}")
    yield _row(f"--help {ALL}", "everything, in full")


def _listed(title: str, options: Sequence[Option], *, in_full: bool) -> Iterator[str]:
    if title and options:
        yield f"{title}:"
    typed, in_file = ([one for one in options if one.is_in_file is is_in_file] for is_in_file in (False, True))
    yield from (_row(one.typed, one.explained(in_full=in_full)) for one in typed)
    if in_file:
        yield f"Only in {in_file[0].file}:"
    yield from (_row(one.typed, one.explained(in_full=in_full)) for one in in_file)


def _row(typed: str, text: str) -> str:
    """Return an option and its text in two columns, or the text below where the option is long."""
    lines = textwrap.wrap(text, _width() - _INDENT, break_on_hyphens=False, break_long_words=False) or [""]
    head = f"  {typed}"
    if len(head) >= _INDENT - 1:
        return "\n".join([head, *(" " * _INDENT + line for line in lines)])
    return "\n".join([f"{head:<{_INDENT}}{lines[0]}", *(" " * _INDENT + line for line in lines[1:])])


def _width() -> int:
    return min(shutil.get_terminal_size((80, 40)).columns, _MAX_WIDTH)


def _joined(head: str, parts: Sequence[str]) -> str:
    wrapped = [textwrap.fill(head, _width(), subsequent_indent="  ", break_on_hyphens=False), ""]
    for part in parts:
        is_row = part.startswith(" ")
        wrapped.append(part if is_row else "\n".join(_filled(line) for line in part.split("\n")))
    return "\n".join(wrapped) + "\n"


def _paragraphs(text: str) -> list[str]:
    """Return a docstring's paragraphs, each in one line, and an empty one between two."""
    return "\n\n".join(" ".join(one.split()) for one in text.split("\n\n")).split("\n")


def _filled(line: str) -> str:
    return textwrap.fill(line, _width(), break_long_words=False, break_on_hyphens=False) if line else ""


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return a suggestion for a name that is not known, to end a sentence with; "" if none is like it.

    >>> suggestion("sdxl-lorra", ["sd15", "sdxl-lora"])
    "; did you mean 'sdxl-lora'?"
    """
    by_name = {_NO_HYPHENS.sub("", one): one for one in known}  # equal beginnings would count as likeness
    found = difflib.get_close_matches(_NO_HYPHENS.sub("", name.replace("_", "-")), by_name, n=1, cutoff=_ALIKE)
    return f"; did you mean {by_name[found[0]]!r}?" if found else ""
