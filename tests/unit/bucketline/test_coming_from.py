"""The answers to options that other programs have: ours, or a plain sentence, and for what is lacking no guess."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from bucketline.coming_from import OWNERS, words
from bucketline.errors import UsageError
from bucketline.ingest.cli import COMMANDS as INGEST
from bucketline.loader.cli import COMMANDS as LOADER
from bucketline.options import options_of, parse_options
from bucketline.train.config import TrainConfig
from tests.coming_from_page import PAGE, page

OWNER: dict[str, Any] = {"train": TrainConfig, "loader": LOADER["plan"], "ingest": INGEST["pack"]}


def refusal(command: type, option: str) -> str:
    with pytest.raises(UsageError) as refused:
        parse_options(command, ["photos", option, "1"], "it")
    return str(refused.value)


def test_the_page_has_what_the_file_has() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.coming_from_page --write`"


@pytest.mark.parametrize("program", OWNERS)
def test_each_word_is_answered_once_with_what_its_command_has(program: str) -> None:
    command, kinds = OWNER[program], words()[program]
    own = {word for one in options_of(command) for word in one.names}
    others = [f"--{other}" for table in kinds.values() for several in table.values() for other in several]
    assert len(others) == len({*others})
    assert not own & {*others}
    assert {re.split(r"[ ,\[]", ours)[0] for ours in kinds["options"]} <= own
    in_file = {*kinds.get("run_file", ()), *kinds.get("data_set_file", ())}
    assert {ours.split(" ")[0] for ours in in_file} <= {one.name for one in fields(command)}
    for option in others:
        assert f"there is no option {option}; " in refusal(command, option)


def test_the_options_that_sentences_name_exist() -> None:
    known = {word for command in (*OWNER.values(), INGEST["prompts"]) for one in options_of(command) for word in one.names}
    elsewhere = {"--help", "--format", "--nproc_per_node"}
    named = {name for kinds in words().values() for ours in kinds["answers"] for name in re.findall(r"--[a-z0-9_-]+", ours)}
    assert named <= known | elsewhere


@pytest.mark.parametrize(
    ("command", "option", "answer"),
    [
        (TrainConfig, "--lr=1e-4", "here it is --learning-rate"),
        (TrainConfig, "--mixed_precision", "here it is --precision"),
        (TrainConfig, "--resolution", "packed by `ingest pack --grid`"),
        (TrainConfig, "--num_workers", "here it is threads, in a run file"),
        (INGEST["pack"], "--image_size", "here it is --grid"),
        (INGEST["pack"], "--num_workers", "it is decode_threads, in a data set file"),
        (INGEST["pack"], "--output_dir", "STORE is given without an option"),
        (INGEST["prompts"], "--random_flip", "`ingest pack` has --flip"),
        (LOADER["plan"], "--batch-size", "here it is --batch"),
    ],
)
def test_an_option_of_another_program_is_answered_with_ours(command: type, option: str, answer: str) -> None:
    name = option.partition("=")[0].replace("_", "-")
    assert re.search(rf"{name}; .*{re.escape(answer)}", refusal(command, option))


@pytest.mark.parametrize("option", ["--max_train_samples", "--clip_skip", "--learning_rate", "--verbose", "--xformers"])
def test_what_packing_lacks_gets_no_guess(option: str) -> None:
    assert refusal(INGEST["pack"], option) == f"there is no option {option.replace('_', '-')} (`--help all` lists them)"
