"""Values of options that have several parts or a unit: what is printed parses to the same, and nothing typed is dropped."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from bucketline.errors import UsageError
from bucketline.ingest.config import PackConfig, RayEngine, WantedWorkers
from bucketline.ingest.rules import HeldOut
from bucketline.loader.commands.batch_options import BatchSize, SplitRows, WorldSize
from bucketline.loader.commands.plan import PlanCommand
from bucketline.loader.mixture import StoreArgument
from bucketline.option_value import ByteSize, Duration, OptionValue, value_fields
from bucketline.store.commands.change import Compact
from bucketline.store.commands.export import Export
from bucketline.train.config import (
    Betas,
    Ema,
    LossWeight,
    LrSchedule,
    MaskLoss,
    MemoryLimit,
    TimestepRange,
    Timesteps,
    TrainConfig,
)

TYPED: dict[type[OptionValue], tuple[str, ...]] = {
    Timesteps: ("uniform", "logit-normal", "logit-normal:-0.5,1.5", "logit-normal:0, 1", "mode", "mode:1.29", "mode:-1"),
    TimestepRange: ("0.2:0.9", "0:1", "+.5:1."),
    LossWeight: ("none", "min-snr:5", "cosmap", "sigma-sqrt", "sigma-squared"),
    MaskLoss: ("plain", "plain:0.1", "sample", "sample:0", "batch", "batch:0.25"),
    LrSchedule: (
        "constant",
        "cosine",
        "cosine:0.1@20000",
        "linear@7",
        "wsd:500:0.1@900",
        "wsd",
    ),
    Betas: ("0.9,0.999", "0.9,0.99,1e-6", "0.9, 0.999"),
    Ema: ("off", "0.9999", "0.9999:cpu:10", "0.9:10", "0.5:device"),
    MemoryLimit: ("off", "24GiB", "24gib", "24G", "24GB", "1.5 TiB", "80000000000"),
    BatchSize: ("8", "4MP", "4MP/8", "16ktok", "4096tok/2", "1.5mp", "786432px"),
    WorldSize: ("8", "64@8"),
    SplitRows: ("train", "val:partial", "val:carry"),
    RayEngine: ("ray", "ray:auto", "ray:10.0.0.1:6379"),
    WantedWorkers: ("auto", "4", "8@1gpu,4cpu", "4@8cpu", "@0.5gpu", "@4cpu,1gpu"),
    HeldOut: ("0", "0.02", "0.02:folder", "1:id"),
    ByteSize: ("1B", "512MiB", "1 kb", "2g", "1.5KiB"),
    Duration: ("0s", "90m", "24h", "7d", "1.5h"),
    StoreArgument: ("a.store", "a.store:3", "a.store:.5@2", "s3://me@host/b.store:3@0.5", "https://host:90/b.store"),
}
"""Spellings of each kind of value."""
_UNIT_WORDS = "B KB MB GB TB KiB MiB GiB TiB K M G T s m h d px MP tok ktok gpu cpu"
UNITS = tuple(_UNIT_WORDS.split())
COUNTS = {1, 60, 3600, 86400, *(base**n for base in (1000, 1024) for n in range(1, 5))}
STRANGE = ("", " ", "\n", *":@,/-+=", *["nan", "inf", "-inf", "None", "1e400", "1_0", "²", "٣", "0", "-1", "0x1"])
_TOKEN = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[^\W\d_][\w.-]*|\S")


@st.composite
def words(draw: st.DrawFn, kind: type[OptionValue]) -> str:
    """Draw a spelling with parts added, doubled, left out, exchanged with those of other values, or strange ones."""
    pieces = re.findall(r"[\w.+-]+|\W", draw(st.sampled_from(TYPED[kind])))
    every = [piece for texts in TYPED.values() for text in texts for piece in re.findall(r"[\w.+-]+|\W", text)]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(pieces)))
        new = draw(st.one_of(st.sampled_from(pieces or [""]), st.sampled_from(every), st.sampled_from(STRANGE + UNITS)))
        match draw(st.sampled_from(["add", "exchange", "remove", "double"])):
            case "add":
                pieces.insert(at, new)
            case "exchange":
                pieces[at : at + 1] = [new]
            case "remove":
                del pieces[at : at + 1]
            case "double":
                pieces[at:at] = pieces[at : at + 2]
    return "".join(pieces)


def dropped(text: str, value: OptionValue) -> list[str]:
    """Return the numbers and words of a text that no part of the value accounts for; each part does for one."""
    own = [getattr(value, one.name) for one in fields(value)]
    left = _TOKEN.findall(text)
    for name in (one for one in own if isinstance(one, str | Path) and not isinstance(one, StrEnum)):
        for token in _TOKEN.findall(str(name)):  # names and addresses, as they are
            left.remove(token)
    literal = {part for form in value.FORMS for part in re.findall(r"[a-z][a-z-]*", form)}
    found = []
    for token in left:
        if token in literal or token in ":@,/" or token.lower() in {unit.lower() for unit in UNITS}:
            continue
        match = next((one for one in own if _is_of(token, one)), None)
        if match is None:
            found.append(token)
        else:
            own.remove(match)
    return found


def _is_of(token: str, part: object) -> bool:
    if isinstance(part, StrEnum):
        return token in str(part)
    if not isinstance(part, int | float) or not re.fullmatch(r"[+-]?[0-9.]+(?:e[+-]?[0-9]+)?", token):
        return False
    is_rounded = part >= 1000  # down, to whole bytes
    return any(abs(float(token) * count - part) <= max(1e-9 * abs(part), is_rounded) for count in COUNTS)


def parsed(kind: type[OptionValue], text: str) -> OptionValue | None:
    try:
        return kind.parse(text, "--it")
    except UsageError as error:
        refusal = str(error)
    assert kind is StoreArgument or refusal.startswith("--it is ")
    assert len(refusal) < 400 + len(text)
    return None


def every_kind() -> set[type[OptionValue]]:
    return {kind for kind in OptionValue.__subclasses__() if kind.__module__.startswith("bucketline.")}


def test_every_kind_of_value_is_examined_here() -> None:
    assert {*TYPED} == every_kind()
    for command in (TrainConfig, PackConfig, Compact, Export, PlanCommand):
        assert {*value_fields(command).values()} <= {*TYPED}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in TYPED.items() for text in texts])
def test_what_is_printed_parses_to_the_same(kind: type[OptionValue], text: str) -> None:
    value = kind.parse(text, "--it")
    assert kind.parse(str(value), "--it") == value
    assert str(kind.parse(str(value), "--it")) == str(value)
    assert dropped(text, value) == []
    if kind is not StoreArgument:  # a path may end in a space
        assert kind.parse(f" {text} ", "--it") == value


@pytest.mark.parametrize("kind", TYPED)
@given(data=st.data())
@settings(max_examples=50)
def test_what_is_typed_is_refused_or_means_all_of_it(kind: type[OptionValue], data: st.DataObject) -> None:
    text = data.draw(words(kind))
    if (value := parsed(kind, text)) is not None:
        if isinstance(value, StoreArgument):
            assume(not re.search(r"[:@][\d.]+$", str(value.path)))  # typed with a slash after it, to be a path even so
        assert kind.parse(str(value), "--it") == value
        assert dropped(text, value) == [], value
        for one in fields(value):
            number: Any = getattr(value, one.name)
            assert not isinstance(number, int | float) or math.isfinite(number)


@given(seconds=st.floats(1e-6, 1e9))
@example(seconds=0.1)
def test_every_time_is_printed_exactly(seconds: float) -> None:
    value = Duration(seconds=seconds)
    assert Duration.parse(str(value), "--it") == value


@given(num_bytes=st.integers(1, 10**14))
def test_every_size_is_printed_exactly(num_bytes: int) -> None:
    assert ByteSize.parse(str(ByteSize(num_bytes=num_bytes)), "--it").num_bytes == num_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *((f"24{unit}", 24 << 30) for unit in ("GiB", "gib", "Gi", "G", "g", " GiB")),
        *((f"24{unit}", 24 * 10**9) for unit in ("GB", "gb", "Gb", " GB")),
        *(("0.5TB", 5 * 10**11), ("1.5MiB", 3 << 19), ("4194304", 1 << 22), ("4194304B", 1 << 22)),
    ],
)
def test_sizes_are_those_that_people_type(text: str, num_bytes: int) -> None:
    assert ByteSize.parse(text, "--it").num_bytes == num_bytes == MemoryLimit.parse(text, "--memory").num_bytes


REFUSED: dict[type[OptionValue], str] = {
    TimestepRange: "0.2|0.2:|:0.9|0.2:0.9:1|0.9:0.2|-0.1:1|nan:1|0:inf",
    Timesteps: "uniform:1|logit-normal:|logit-normal:0|logit-normal:0,1,2|logit-normal:0,0|mode:2|mode:nan|mode:0:0",
    LossWeight: "min-snr|min-snr:|min-snr:0|min-snr:5:5|cosmap:5|min-snr:inf",
    LrSchedule: "cosine:|cosine:0.1:0.1|cosine:6:0.1|cosine@0|polynomial|"
    "wsd:0.1|wsd::0.1|cosine@|cosine@5@6|cosine@5:0.1|wsd:0|wsd:5:0.1:0.1|cosine:2|constant:0.1",
    Betas: "0.9|0.9,|0.9,0.999,1e-8,1|1,0.9|0.9,-0.1|0.9,0.999,0",
    Ema: "off:cpu|0.9:cpu:cpu|0.9:10:10|0.9:10:cpu|0.9:|2|-0.1|nan|0.9:cpu:0|0.9:1.5",
    MemoryLimit: "|0|24|-1GiB|24 GiB GiB|24GiB8|24Gb/s|1,5GiB|nan|off:1|1.5|1.5B",
    BatchSize: "4MP/8/8|4MP/|/8|8/8|4MP/0|4MP 8|0|-8|0.5|4GP|8.0.0|infMP|4MP/8MP",
    RayEngine: "|ray:|ray: a|rays|spark|auto",
    WantedWorkers: "|2:|2:8|4@|4@gpu|@1gpu,1gpu|@1gpu,1cpu,1gpu|@-1gpu|0",
    WorldSize: "0|8@|@8|8@3|64@8@2|1.5",
    SplitRows: "|val:|val:all|val:drop:drop",
    HeldOut: "|2|-0.1|nan|0.1:|0.1:id:id|0.1:shelf",
    Duration: "|5|h|-1h|1h30m|nanh|1 h 1 h",
    ByteSize: "|0|B|-5B|1e400",
    StoreArgument: "a:3@0.5@2|a:3:4|a@1@2|a@2:3|a:0|s3://b/a:3@1@2|s3://b/a@1:2:3",
}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in REFUSED.items() for text in texts.split("|")])
def test_too_many_and_empty_parts_are_refused(kind: type[OptionValue], text: str) -> None:
    assert parsed(kind, text) is None


def test_numbers_after_a_store_are_its_repeats_and_then_its_weight_once(tmp_path: Path) -> None:
    store = tmp_path / "a.store"
    store.mkdir()
    for ends in (":3:2", "@2@1", "@2:3", ":3@0.5@2", ":0"):
        assert parsed(StoreArgument, f"{store}{ends}") is None
    (tmp_path / "a.store:3@2").mkdir()
    assert StoreArgument.parse(f"{store}:3@2") == StoreArgument(path=Path(f"{store}:3@2"))
    assert StoreArgument.parse(f"{store}:3@2@5") == StoreArgument(path=Path(f"{store}:3@2"), weight=5)
