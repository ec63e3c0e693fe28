"""A command's options: a dataclass declares them, and is what parses them, its files and its help are made of.

The options that one class declares are a section: its `SECTION` is "NAME: WHAT IT HAS". A field's docstring is its help.
`FIRST` of a command names the options that its first screen has next to the required ones, `ONE_OF` groups of fields of which a
command line needs one each. A field with the metadata
`ONLY_IN_FILE` is set in a run file (or what the command's `FILE` says) and not on the command line. `complete` of a command, if
it has one, is told the options and the fields that were given. cyclopts parses; it is imported for the first command line.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable  # noqa: TC003 - commands read their annotations at run time
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from bucketline import coming_from
from bucketline.dtype_names import choice_of, dtype_name
from bucketline.errors import UsageError
from bucketline.option_value import is_option_value, words_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import cyclopts
    from cyclopts import App


_T = TypeVar("_T")
BY_PLACE, REPEATED, HIDDEN = "given by place", "once for each of its values", "not an option"
Positional = Annotated[_T, BY_PLACE]
"""A field that is given by its place."""
Repeated = Annotated[_T, REPEATED]
"""A field with several values, for each of which the option is typed again. Without it, they follow one another."""
Hidden = Annotated[_T, HIDDEN]
"""A field that a program sets."""
ALONE = "alone"
"""Key of a field's metadata: the value that its option stands for without one (`--prune`, `--prune=0.5`)."""
ONLY_IN_FILE = {"only_in_file": True}
"""Metadata of a field that only a file sets: few runs need another value than its default."""
COMMAND_LINE_ONLY = {"command_line_only": True}
"""Metadata of a field that no file has."""
_ALIKE = 0.75  # of difflib's ratios, from which a name may have been meant: "resolution" and "recaption" have 0.63
_NO_HYPHENS = re.compile("^--(no-)?")
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_WORDS = {int: "INT", float: "FLOAT", str: "TEXT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arg:
    """How an option is typed, where its field does not say it: `Annotated[str, Arg(metavar="URL")]`."""

    metavar: str = ""  # what stands for its value
    name: str = ""  # without hyphens; "": the field's
    aliases: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None  # makes the value of a word
    words: tuple[str, ...] = ()  # that shells complete, of a value that may be another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option or a positional argument, as it is typed and explained."""

    field: str
    names: tuple[str, ...]  # with hyphens; () of one that is given by place or in a file only
    metavar: str  # "" of a flag
    kind: Any  # the type of its value, or of each of its values
    text: str
    default: Any  # dataclasses' MISSING: it is required
    section: str
    choices: tuple[str, ...]  # words that it takes; (): others as well
    words: tuple[str, ...]  # words that shells complete
    is_many: bool  # it has several values
    repeats: bool  # and is typed once for each
    file: str  # the kind of file that sets it; "": the command line does
    alone: str | None  # what it stands for if it is typed without a value
    read: Callable[[str], Any] | None

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def is_in_file(self) -> bool:
        return bool(self.file)

    @property
    def by_place(self) -> bool:
        return not (self.names or self.is_in_file)

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def typed(self) -> str:
        """How help shows it: `--batch-size INT`, `--prune[=N]`, `SOURCE`, `image_steps = INT` of what only a file sets."""
        if self.is_in_file:
            return f"{self.field} = {self.metavar or 'true|false'}"
        if self.is_flag and self.default is True:
            return f"--no-{self.names[-1][2:]}"
        joined = f"{', '.join(self.names)}[={self.metavar}]" if self.alone is not None else ", ".join(self.names)
        return joined if self.alone is not None else f"{joined} {self.metavar}".strip()


@cache
def options_of(command: type) -> tuple[Option, ...]:
    """Return the options of a command, in the order of their declaration."""
    hints = get_type_hints(command, include_extras=True)
    owners = {name: owner for owner in reversed(command.__mro__) for name in vars(owner).get("__annotations__", {})}
    texts = {name: text for owner in reversed(command.__mro__) for name, text in _texts(owner).items()}
    found = [field for field in fields(command) if field.init and HIDDEN not in _extras(hints[field.name])]
    file = getattr(command, "FILE", "a run file")
    return tuple(_option(field, hints[field.name], owners[field.name], texts.get(field.name, ""), file) for field in found)


def sections_of(command: type) -> dict[str, str]:
    """Return a command's sections in the order of their classes, storage last, with what is said of each."""
    declared = [vars(one).get("SECTION", "") for one in command.__mro__ if vars(one).get("__annotations__")]
    found = {name: about for name, _, about in (text.partition(": ") for text in reversed(declared))}
    return {name: found[name] for name in sorted([*reversed(found)], key=lambda name: name == "storage")}


def _option(field: Any, hint: Any, owner: type, text: str, kind_of_file: str) -> Option:  # noqa: ANN401 - a dataclass's field, a type
    extras = _extras(hint)
    asked = [one for one in extras if isinstance(one, Arg)]  # of the whole before that of each value
    own = next(iter(asked), Arg())
    whole = _bare(hint)
    kind = _bare(get_args(whole)[0]) if get_origin(whole) in (tuple, list) else whole
    file = kind_of_file if field.metadata.get("only_in_file") else ""
    name = (own.name or field.name).replace("_", "-")
    has_factory = field.default_factory is not MISSING
    return Option(
        field=field.name,
        names=() if file or BY_PLACE in extras else (*own.aliases, f"--{name}"),
        metavar=own.metavar or (field.name.upper() if BY_PLACE in extras else _metavar(kind)),
        kind=kind,
        text=" ".join(text.split()),
        default=field.default_factory() if has_factory else field.default,
        section=vars(owner).get("SECTION", "").partition(":")[0],
        choices=_choices(kind),
        words=next((one.words for one in asked if one.words), ()) or tuple(map(dtype_name, _choices(kind))) or _heads(kind),
        is_many=kind is not whole,
        repeats=REPEATED in extras,
        file=file,
        alone=field.metadata.get(ALONE),
        read=next((one.read for one in asked if one.read is not None), None),
    )


def _extras(hint: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a type
    """Return what is annotated about a type, and about the type of its values."""
    inner = get_args(_bare(hint))[:1] if get_origin(_bare(hint)) in (tuple, list) else ()
    return (*getattr(hint, "__metadata__", ()), *(extra for one in inner for extra in _extras(one)))


def _bare(hint: Any) -> Any:  # noqa: ANN401
    return get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


@cache
def _texts(owner: type) -> dict[str, str]:
    """Return the docstrings of the attributes that a class itself declares; none of a package without its source."""
    if "__annotations__" not in vars(owner):
        return {}
    from docstring_parser import parse_from_object  # cyclopts has it

    return {one.args[1]: one.description or "" for one in parse_from_object(owner).params if one.args[0] == "attribute"}


def _members(kind: Any) -> list[Any]:  # noqa: ANN401
    """Return the types of a union but None, or the one type."""
    if get_origin(kind) is Literal or not get_args(kind):
        return [kind]
    return [inner for one in get_args(kind) if one is not NoneType for inner in _members(_bare(one))]


def _choices(kind: Any) -> tuple[str, ...]:  # noqa: ANN401
    """Return the words that a type has; () if it takes others as well."""
    found: list[str] = []
    for one in _members(kind):
        if get_origin(one) is Literal:
            found += map(str, get_args(one))
        elif isinstance(one, type) and issubclass(one, Enum):
            found += (str(each.value) for each in one)
        else:
            return ()
    return tuple(found)


def _heads(kind: Any) -> tuple[str, ...]:  # noqa: ANN401
    """Return the words with which the values of a type begin, such as `cosine` of `cosine[:FLOOR]`."""
    forms = [form for one in _members(kind) if is_option_value(one) for form in one.forms()]
    return tuple(dict.fromkeys(head for form in forms if (head := re.split(r"[^a-z0-9-]", form, maxsplit=1)[0])))


def _metavar(kind: Any) -> str:  # noqa: ANN401
    """Return what stands for an option's value; "" for a flag."""
    if kind is bool:
        return ""
    shown = [
        "|".join(map(dtype_name, _choices(one))) or (str(one.metavar()) if is_option_value(one) else _WORDS.get(one, "PATH"))
        for one in _members(kind)
    ]
    return "|".join(dict.fromkeys(shown))


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return a suggestion for a name that is not known, to end a sentence with; "" if none is like it.

    >>> suggestion("sdxl-lorra", ["sd15", "sdxl-lora"])
    "; did you mean 'sdxl-lora'?"
    """
    by_name = {_NO_HYPHENS.sub("", one): one for one in known}  # equal beginnings would count as likeness
    found = difflib.get_close_matches(_NO_HYPHENS.sub("", name.replace("_", "-")), by_name, n=1, cutoff=_ALIKE)
    return f"; did you mean {by_name[found[0]]!r}?" if found else ""


def parse_options(command: type[_T], args: Sequence[str], prog: str) -> _T:
    """Return a command's options from its command line; its `complete` is told which fields are given."""
    values = parse_fields(command, args, prog)
    options, complete = command(**values), getattr(command, "complete", None)
    return options if complete is None else complete(options, frozenset(values))


def parse_fields(command: type, args: Sequence[str], prog: str, files: Any = None) -> dict[str, Any]:  # noqa: ANN401
    """Return the fields that a command line gives, with their values.

    `files`: a configuration of cyclopts, which gives what the command line does not; with it, files may set what only they do.
    """
    from cyclopts import CycloptsError

    try:
        words = [*_with_values(command, args)]
        _, bound, _ = app_of(command, prog, files).parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise _refusal(command, prog, error, args) from error
    options = {one.field: one for one in options_of(command)}
    groups = [*((one.field,) for one in options.values() if one.is_required), *getattr(command, "ONE_OF", ())]
    if needed := [group for group in groups if bound.arguments.keys().isdisjoint(group)]:
        typed = ([options[field].typed.rpartition(", ")[2] for field in group] for group in needed)
        named = [f"either {' or '.join(one)}" if len(one) > 1 else one[0] for one in typed]
        example = re.findall(r"^Example: .*$", inspect.getdoc(command) or "", re.MULTILINE)
        raise UsageError(f"{prog} needs {', '.join(named)} (`{prog} --help` explains more)", *example)
    return dict(bound.arguments)


def app_of(command: type, prog: str, files: Any = None, *, completing: bool = False) -> cyclopts.App:  # noqa: ANN401
    """Return cyclopts' application of a command; `completing`: one of which shells complete what may be another word, too."""
    from cyclopts import App, Parameter

    def run(**_: object) -> None:
        """Bound, and never called."""

    options = [one for one in options_of(command) if files is not None or not one.is_in_file]
    run.__signature__ = inspect.Signature([*_parameters(options, completing=completing)])  # type: ignore[attr-defined]
    run.__annotations__ = {name: one.annotation for name, one in run.__signature__.parameters.items()}  # type: ignore[attr-defined]
    app = App(
        name=prog,
        help_flags=(),
        version_flags=(),
        config=() if files is None else (files,),
        default_parameter=Parameter(negative_iterable=(), allow_repeating=True),
    )
    app.default(run)
    return app


def _parameters(options: Sequence[Option], *, completing: bool) -> Iterator[inspect.Parameter]:
    from cyclopts import Parameter

    for one in sorted(options, key=lambda one: not one.by_place):
        kinds, words = _members(one.kind), one.words if completing else one.choices
        is_word = one.read is not None or str in kinds or any(map(is_option_value, kinds))
        text = Path if completing and str in kinds else str  # of a path or URL, or a model's name
        kind = Literal[words] if words else text if is_word else one.kind
        asked = Parameter(
            name=one.names or (f"--{one.field.replace('_', '-')}" if one.is_in_file else None),
            help=one.text.partition(". ")[0],
            consume_multiple=one.is_many and not one.repeats and not one.by_place,
            converter=None if one.is_flag else partial(_converted, one),
        )
        yield inspect.Parameter(
            one.field,
            inspect.Parameter.POSITIONAL_ONLY if one.by_place else inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[tuple[kind, ...] if one.is_many else kind, asked],  # type: ignore[valid-type]
            default=None if one.is_required else one.default,  # parse_fields says what is needed, all at once
        )


def _converted(option: Option, _: object, tokens: Sequence[cyclopts.Token]) -> Any:  # noqa: ANN401
    found = [_value(option, token) for token in tokens]
    return tuple(found) if option.is_many else found[-1]


def _value(option: Option, token: cyclopts.Token) -> Any:  # noqa: ANN401
    """Return the value of a word; one of text and of an `OptionValue` is the word itself."""
    from cyclopts import CycloptsError, convert

    word, kinds = token.value, _members(option.kind)
    if word == str(None) and NoneType in get_args(option.kind):
        return None
    if option.read is not None:
        return option.read(word)
    if option.choices:
        return _choice(option, word, _name(option, token))
    if str in kinds or any(map(is_option_value, kinds)):
        return word
    if int in kinds and float not in kinds and word not in words_of(kinds) and not _WHOLE_NUMBER.fullmatch(word):
        expected = "a whole number" if kinds == [int] else option.metavar
        raise UsageError(f"{_name(option, token)} is {word!r:.80}, expected {expected}")
    try:
        return convert(option.kind, [word])
    except (CycloptsError, ValueError) as error:
        expected = "a number" if kinds == [float] else option.metavar
        raise UsageError(f"{_name(option, token)} is {word!r:.80}, expected {expected}") from error


def _choice(option: Option, word: str, name: str) -> Any:  # noqa: ANN401
    if (found := choice_of(word, option.choices)) is None:
        shown = [*map(dtype_name, option.choices)]
        raise UsageError(f"{name} is {word!r:.80}, expected {', '.join(shown)}{suggestion(word, shown)}")
    enums = [one for one in _members(option.kind) if isinstance(one, type) and issubclass(one, Enum)]
    return next((one(found) for one in enums if found in {str(each.value) for each in one}), found)


def _name(option: Option, token: cyclopts.Token) -> str:
    """Return how a value's option was typed, or where it is set."""
    if token.source not in ("", "cli"):
        return f"{token.source}: {option.field}"
    return token.keyword or option.metavar


def _with_values(command: type, args: Sequence[str]) -> Iterator[str]:
    """Yield the words, with a value of each option that was typed without one and has one then."""
    alone = {name: one.alone for one in options_of(command) if one.alone is not None for name in one.names}
    words = iter(args)
    for word in words:
        yield f"{word}={alone[name]}" if (name := word.replace("_", "-")) in alone else word
        if word == "--":
            yield from words


def _refusal(command: type, prog: str, error: cyclopts.CycloptsError, args: Sequence[str]) -> UsageError:
    """Return the refusal of a command line that cyclopts does not take."""
    from cyclopts import MissingArgumentError, UnknownOptionError, UnusedCliTokensError

    options = options_of(command)
    known = [name for one in options for name in one.names]
    if isinstance(error, UnknownOptionError):
        typed = [word.partition("=")[0].replace("_", "-") for word in (error.token.keyword or error.token.value, *args)]
        others = (name for name in typed[1:] if re.match("--[a-z]", name) and name.replace("--no-", "--") not in known)
        return UsageError(*(_unknown(command, name, known) for name in dict.fromkeys([typed[0], *others])))
    if isinstance(error, UnusedCliTokensError):
        takes = " and ".join(one.metavar for one in options if one.by_place) or "only options"
        return UsageError(f"{prog} does not take {(error.unused_tokens or [''])[0]!r:.80}, it takes {takes}")
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        asked = next(one for one in options if one.field == error.argument.field_info.name)
        return UsageError(f"{error.keyword} has no value, expected {asked.metavar}")
    message = " ".join(str(error).split()).removesuffix(".")
    return UsageError(f"{prog}: {message} (`{prog} --help` explains it)")


def _unknown(command: type, name: str, known: Sequence[str]) -> str:
    """Return the answer to an option that a command does not have."""
    field = name.removeprefix("--").replace("-", "_")
    if found := next((one for one in options_of(command) if one.is_in_file and one.field == field), None):
        return f"{name} is set in {found.file}, not on the command line: {field}, in its [{found.section}]"
    answer = coming_from.answer(command.__module__.removeprefix("bucketline.").partition(".")[0], name, known)
    return f"there is no option {name}" + (f"; {answer}" if answer else f"{suggestion(name, known)} (`--help all` lists them)")


# ----------------------------------------------------------------------------------------------------------------- help screen
# The help of a command, from the dataclass of its options; and completion in bash, zsh and fish.

HELP = ("-h", "--help")
ALL = "all"
_FEW = 16  # a command with so many options or fewer shows all of them on its first screen
_MAX_WIDTH, _INDENT = 100, 24


def explained(option: Option, *, in_full: bool) -> str:
    """Return what is said of an option: its first sentence, or all of it with the default."""
    default = _shown(option.default)
    if in_full:
        says_default = default is None or re.search(r"\b[Dd]efault:", option.text)
        return option.text if says_default else f"{option.text} Default: {default}."
    short = re.split(r"[.:;](?= |$)", option.text, maxsplit=1)[0]
    return short if default is None else f"{short} [{default}]"


def _shown(default: object) -> str | None:
    if default is MISSING or default is None or isinstance(default, bool) or default in ((), ""):
        return None
    return dtype_name(str(default.value) if isinstance(default, Enum) else str(default))


def _leads(option: Option) -> bool:
    """Return True if help begins with an option: what is required, and what is given by place."""
    return option.is_required or option.by_place


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
    """Return the help of a command: its first screen, a section of its options, or all of them."""
    options, sections = options_of(command), sections_of(command)
    leading = sorted((one for one in options if _leads(one)), key=lambda one: not one.is_required)
    about = inspect.getdoc(command) or ""
    if asked == ALL:
        parts = [*_paragraphs(about), "", *_listed("", leading, in_full=True)]
        for name in sections:
            if own := [one for one in _in(options, name) if not _leads(one)]:
                parts += ["", *_listed(name, own, in_full=True)]
        return _joined(_usage(prog, leading), parts)
    if asked:
        if asked not in sections:
            raise UsageError(f"--help {asked}: there is no such section, expected {', '.join([*filter(None, sections), ALL])}")
        return _joined(f"{prog}: {sections[asked]}", [*_listed("", _in(options, asked), in_full=True)])
    first = getattr(command, "FIRST", ())
    rest = [one for one in options if not _leads(one) and not one.is_in_file]
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


def _in(options: Sequence[Option], section: str) -> list[Option]:
    return [one for one in options if one.section == section]


def _usage(prog: str, leading: Sequence[Option]) -> str:
    given = (one.typed if one.is_required or one.typed.startswith("[") else f"[{one.typed}]" for one in leading)
    return " ".join(["usage:", prog, *given, "[OPTIONS]"])


def _other_sections(options: Sequence[Option], sections: dict[str, str], shown: Sequence[Option]) -> Iterator[str]:
    hidden = [one for one in options if not _leads(one) and not one.is_in_file and one not in shown]
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
    yield from (_row(one.typed, explained(one, in_full=in_full)) for one in typed)
    if in_file:
        yield f"Only in {in_file[0].file}:"
    yield from (_row(one.typed, explained(one, in_full=in_full)) for one in in_file)


def _row(typed: str, text: str) -> str:
    """Return an option and its text in two columns, or the text below where the option is long."""
    lines = textwrap.wrap(text, _width() - _INDENT, break_on_hyphens=False, break_long_words=False) or [""]
    head = f"  {typed}"
    if len(head) >= _INDENT - 1:
        heads = textwrap.wrap(head.replace("|", "| "), _width() - 2, subsequent_indent="      ", break_on_hyphens=False)
        return "\n".join([*(one.replace("| ", "|") for one in heads), *(" " * _INDENT + line for line in lines)])
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
    indent = "    " * line.startswith("Example: ")
    return textwrap.fill(line, _width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


# ------------------------------------------------------------------------------------------------------------------ completion
# Completion of command lines in bash, zsh and fish: scripts that cyclopts writes of all commands, those of packages too.

_GROUPS = ("ingest", "store", "loader")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script that makes a shell complete commands, options and choices. Write it again after an update.

    bash, zsh: write it to a file that ~/.bashrc or ~/.zshrc sources. fish: to ~/.config/fish/completions/bucketline.fish.

    Example: bucketline completion bash > ~/.bucketline-completion
    """

    shell: Positional[Literal["bash", "zsh", "fish"]]
    """Shell: bash, zsh or fish."""

    def run(self) -> int:
        for program in (whole := program_of_all(), *(whole[name] for name in _GROUPS)):
            script = program.generate_completion(shell=self.shell)
            if self.shell == "bash":  # which completes paths itself, folders with their slash and names with spaces
                script = re.sub(r"\( \$\(compgen -[df] .*\) \)$", "()", script, flags=re.MULTILINE)
                script = script.replace("complete -F", "complete -o bashdefault -o default -F")
            print(script)
        return 0


def program_of_all() -> App:
    """Return cyclopts' application of `bucketline`, with every command."""
    from cyclopts import App

    whole = App(name="bucketline")
    for group in _GROUPS:
        own = App(name=group)
        _add_all(own, f"{group}.cli")
        whole.command(own)
    train = app_of(importlib.import_module("bucketline.train.config").TrainConfig, "train", completing=True)
    _add_all(train, "train.commands")
    whole.command(train)
    _add_all(whole, "cli")
    return whole


def _add_all(program: App, module: str) -> None:
    for name, command in importlib.import_module(f"bucketline.{module}").COMMANDS.items():
        program.command(app_of(command, name, completing=True))
