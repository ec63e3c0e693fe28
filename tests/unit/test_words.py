"""One word for each idea, and plain English, in docstrings, help texts, messages, comments and documents.

Every text is found through the syntax tree, so a new command or error cannot be forgotten.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.commands import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDERS = ("bucketline", "store", "ingest", "loader", "train", "bench", "demo", "examples", "tests")


class Rule(NamedTuple):
    """A forbidden word, what to say instead, and a sentence that has it."""

    found: str  # a regular expression, any case
    instead: str
    sample: str


_PLACE = r"(in|on|at|behind|beyond|outside|inside|between|under|over|above|below|next|ready|there|where|elsewhere|one)\b"
_COUNTED = "(line|pass|rank|row|word|process|file|thread|store|core|shard|batch|step|image|sample|model|bucket|round)"
# Idioms that have such a word.
IDIOMS = r"\b(?i:leave|leaves|leaving|left)( \w+){0,2} alone\b"
# For every text: docstring, help, message or comment. Words in `backticks` are names, and not held to this.
ANYWHERE = (
    Rule(r"\bpictures?\b", "image", "one picture for each row"),
    Rule(r"\bfillers?\b", "BatchBuilder, batch builder", "the filler of a batch"),
    Rule(r"\b(hand-?overs?|handed-over)\b", "reorder buffer", "the handover to the trainer"),
    Rule(r"\bslabs?\b", "buffer", "a slab of shared memory"),
    Rule(r"\blook-?ahead\b", "readahead", "the lookahead of 8 batches"),
    Rule(r"\bproviders?\b", "backend", "a provider of batches"),
    Rule(r"\bdraft(s|ed|ing)?\b", "copy plan, to plan", "the draft of a copy"),
    Rule(r"\baims?\b", "gather index", "the aim of each row"),
    Rule(r"(?<!there )\b(is|are|was|were) no\b(?!\s+(longer|more than)\b)", "is not a, is not", "photos is no store"),
    Rule(r"\b(has|have|had) not (?=(the|a|an|any)\b|\{)", "does not have, has no", "the shard has not the captions"),
    Rule(r"\b(that|which) (the )?\w+ (has|have|had) not(?=[,.;:\n]|$)", "does not have", "captions that the shard has not"),
    Rule(r"\b(mend(s|ed|ing)?)\b", "fix", "mend it first"),
    Rule(r"\b(go|goes|going|gone|went) on\b", "continue, resume", "the next iteration goes on"),
    Rule(r"\bway on\b", "how to continue", "the way on"),
    Rule(r"\bbeside\b", "next to, in addition to, as well as", "a file beside the image"),
    Rule(r"\banew\b", "again", "a pass begins anew"),
    Rule(r"\bask(s|ed|ing)? for\b", "request, need, want", "the split that --split asks for"),
    Rule(rf"\b(lie|lies|lain|lying)\s+(?={_PLACE})", "is, be, stay", "the image lies in the store"),
    Rule(r"\balone\b", "only, by itself", "the page cache alone is shared"),
    Rule(rf"\bone an? {_COUNTED}\b", "one per", "a list of ids, one a line"),
    Rule(rf"\bstands?\s+(?={_PLACE})(?!in for\b)", "is", "its own message stands above"),
    Rule(r"\bother way about\b", "vice versa, the reverse", "rows without a list, or the other way about"),
    Rule(r"\b(leave|leaves|leaving|left)( \w+)? away\b", "leave out", "leave it away"),
)
# For docstrings only.
FIRST_WORDS = Rule(
    r"\A\s*(Gives?|Says?|Holds?|Tells?|Do|What|Where|Which|Whether|Who)\b(?! not\b| nothing\b)",
    "Return …, True if …, or a noun phrase; 'Wh…' as a noun: the …",
    "Give the number of rows.",
)
RAISES = Rule(
    r"^\s+[\w, ]*(Error|Exception|Interrupt|Stopped)[\w, ]*: (where|when)\b", "X: if …", "\n    StoreError: where it is gone"
)

# (file, found) and the reason; the word stays there.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("ingest/images/decode.py", "draft"): "Pillow's name for a JPEG that is decoded at a fraction of its size",
    ("tests/unit/train/outputs/test_trackers.py", "aim"): "Aim is a tracker",
}
UNREAD = {
    "demo/catalogue.py": "captions of photographs: data that a model is trained on",
    "tests/unit/test_words.py": "the list itself",
}

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "store/FORMAT.md")),
    *(ROOT / "bucketline").glob("*.md"),
    *(ROOT / "demo").glob("*.md"),
    *(path for path in (ROOT / "docs").rglob("*.md") if path.name not in ("RESULTS.md", "faults.md")),  # these are generated
]


class Text(NamedTuple):
    """A docstring, message or comment, and the line on which it begins."""

    line: int
    text: str
    is_docstring: bool


def texts(source: str) -> Iterator[Text]:
    """Yield what a module says to people: docstrings, strings of more than one word, and comments."""
    inside_fstrings, docstrings = set(), set()
    for node in ast.walk(ast.parse(source)):  # parents first
        match node:
            case ast.JoinedStr():
                inside_fstrings |= {id(part) for part in node.values}
                parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
                yield Text(node.lineno, "".join(parts), is_docstring=False)
            case ast.Expr(value=ast.Constant(value=str())):
                docstrings.add(id(node.value))
            case ast.Constant(value=str()) if id(node) not in inside_fstrings:
                yield Text(node.lineno, str(node.value), is_docstring=id(node) in docstrings)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], token.string, is_docstring=False)


def offences(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, what was found, what to say instead)."""
    for line, text, is_docstring in texts(source):
        if " " not in text.strip():
            continue  # a key, a name or an option, not a sentence
        for offset, word, instead in _forbidden(text, (*ANYWHERE, *((FIRST_WORDS, RAISES) if is_docstring else ()))):
            yield line + offset, word, instead


def _forbidden(text: str, rules: tuple[Rule, ...]) -> Iterator[tuple[int, str, str]]:
    prose = re.sub(rf"`[^`]*`|{IDIOMS}", _blank, text)
    for rule in rules:
        for match in re.finditer(rule.found, prose, re.MULTILINE if rule is RAISES else re.IGNORECASE):
            yield prose.count("\n", 0, match.start()), " ".join(match[0].split()), rule.instead


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "~", match[0])


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_messages_and_comments_say_it_in_the_words_of_the_field(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name in UNREAD:
            continue
        for line, word, instead in offences(path.read_text(encoding="utf-8")):
            if (name, word) not in EXCEPTIONS:
                found.append(f"{name}:{line}: {word!r}; say: {instead}")
    assert not found, f"{len(found)} words to replace:\n" + "\n".join(found)


def test_the_documents_say_it_in_the_same_words() -> None:
    found = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        prose = re.sub(r"^ *```.*?^ *```", _blank, text, flags=re.MULTILINE | re.DOTALL)
        for line, word, instead in _forbidden(prose, ANYWHERE):
            found.append(f"{path.relative_to(ROOT)}:{line + 1}: {word!r}; say: {instead}")
    assert not found, f"{len(found)} words to replace:\n" + "\n".join(found)


def test_every_exception_is_still_needed() -> None:
    for name, word in EXCEPTIONS:
        assert word in {found for _, found, _ in offences((ROOT / name).read_text(encoding="utf-8"))}, (name, word)


@pytest.mark.parametrize("rule", ANYWHERE, ids=lambda rule: rule.sample)
@pytest.mark.parametrize(
    "module",
    [
        '"""A module.\n\n{}.\n"""',
        'class Config:\n    size: int = 0\n    """The size; {}."""',
        'def check(path):\n    raise ValueError(\n        "{}"\n    )',
        'def check(path):\n    raise ValueError(f"{{path}} is wrong; {}")',
        'parser.add_argument("--size", help="{}")',
        "size = 0  # {}",
    ],
    ids=["docstring", "help of an option", "error", "formatted error", "argparse", "comment"],
)
def test_each_word_is_found_wherever_it_stands(rule: Rule, module: str) -> None:
    assert [instead for _, _, instead in offences(module.format(rule.sample))] == [rule.instead]


@pytest.mark.parametrize("word", ["Give", "Gives", "Say", "Holds", "Tell", "Do", "What", "Where", "Which", "Whether", "Who"])
def test_each_first_word_of_a_docstring_is_found(word: str) -> None:
    source = f'def count():\n    """{word} a number."""\n    return f("{word} a number.")'
    assert [(line, found) for line, found, _ in offences(source)] == [(2, word)]


@pytest.mark.parametrize("word", ["where", "when"])
def test_a_raises_section_that_does_not_say_if_is_found(word: str) -> None:
    source = f'def count():\n    """Return a number.\n\n    Raises:\n        StoreError: {word} it is gone.\n    """'
    assert [line for line, _, _ in offences(source)] == [5]


def test_sentences_that_only_look_alike_are_left_alone() -> None:
    sentences = [
        "Return where the rows are, and what they hold.",
        "Do nothing if there is no store.",
        "Do not read it: it is no longer there, and `slab` is a name.",
        "Stands in for the encoder; the standard one has not been loaded.",
        "Raises: StoreError: if it is gone.",
        "There is no image; the others are no longer listed. Leave it alone: no file can lie about its checksum.",
        "The name stands for several classes, and has not been found one a second time.",
    ]
    assert not [offence for text in sentences for offence in offences(f'"""{text}"""')]
