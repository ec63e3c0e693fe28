"""The options of object storage: declared once for all commands, and taken from the environment where they are left out."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from bucketline.errors import UsageError
from bucketline.ingest.commands.pack import Pack
from bucketline.loader.config import LoaderConfig
from bucketline.options import parse_options
from bucketline.store.commands.change import Drop
from bucketline.store.commands.look import Info
from bucketline.store.remote.arguments import ObjectArguments, RemoteArguments
from bucketline.store.remote.urls import RemoteOptions
from tests.every_command import COMMANDS_OF

STORAGE = ("endpoint", "store_option", "deadline", "cache", "cache_bytes")
NAMES = {name: f"BUCKETLINE_{name.upper()}" for name in STORAGE}


def test_each_option_is_declared_by_one_class_for_all_commands() -> None:
    own = {field.name for field in fields(RemoteArguments)}
    assert own == {*STORAGE}
    for name, command in COMMANDS_OF.items():
        if not issubclass(command, ObjectArguments):
            continue
        declared = {field: owner for owner in command.__mro__ for field in vars(owner).get("__annotations__", {})}
        for option in own & declared.keys():
            owners = [owner for owner in command.__mro__ if option in vars(owner).get("__annotations__", {})]
            assert owners in ([ObjectArguments], [RemoteArguments]), (name, option, owners)


def test_an_option_may_be_given_several_times_wherever_it_stands() -> None:
    asked = parse_options(Info, ["--store-option", "a=1", "s3://b/s", "--store_option=region=x y", "--json"], "info")
    assert (asked.store_option, asked.store, asked.json) == (("a=1", "region=x y"), "s3://b/s", True)
    dropped = parse_options(Drop, ["s3://b/s", "--store-option", "a=1", "--", "-id"], "drop")
    assert (dropped.store_option, dropped.ids) == (("a=1",), ("-id",))
    with pytest.raises(UsageError, match="is not KEY=VALUE"):
        parse_options(Info, ["s3://b/s", "--store-option", "region"], "info")
    with pytest.raises(UsageError, match="--store-option has no value"):
        parse_options(Info, ["s3://b/s", "--store-option"], "info")


def test_what_is_left_out_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES.values():
        monkeypatch.delenv(name, raising=False)
    assert RemoteOptions() == RemoteOptions(deadline_s=60.0)
    monkeypatch.setenv(NAMES["endpoint"], "http://127.0.0.1:9000")
    monkeypatch.setenv(NAMES["store_option"], "region=eu-central-1 'skip_signature=true'")
    monkeypatch.setenv(NAMES["deadline"], "5")
    monkeypatch.setenv(NAMES["cache_bytes"], "2GiB")
    usual = RemoteOptions(
        endpoint="http://127.0.0.1:9000",
        options=("region=eu-central-1", "skip_signature=true"),
        deadline_s=5.0,
        cache_bytes=2 << 30,
    )
    pack = parse_options(Pack, ["photos", "s3://b/s", "--model", "m"], "pack")
    for found in (
        RemoteOptions(),
        parse_options(Info, ["s3://b/s"], "info").remote(),
        pack.remote(),
        LoaderConfig(batch_size=1).remote(),
    ):
        assert found == usual
    assert replace(usual, cache=Path("c")).options == usual.options  # once, also in a copy
    asked = [
        "s3://b/s",
        "--endpoint",
        "http://other:1",
        "--store-option",
        "region=x",
        "--deadline",
        "7",
        "--cache-bytes",
        "1GiB",
    ]
    given = parse_options(Info, asked, "info").remote()
    assert (given.endpoint, given.deadline_s, given.cache_bytes) == ("http://other:1", 7.0, 1 << 30)
    assert given.client_options() == {"region": "x", "skip_signature": "true"}


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("deadline", "soon", "BUCKETLINE_DEADLINE is 'soon', expected seconds above 0"),
        ("deadline", "0", "BUCKETLINE_DEADLINE is '0'"),
        ("cache_bytes", "much", "BUCKETLINE_CACHE_BYTES is 'much', expected a number of bytes"),
        ("endpoint", "minio", "minio is not a URL such as"),
        ("store_option", "region", "is not KEY=VALUE"),
        ("store_option", "secret_key=x", "is a secret"),
        ("store_option", "a='", "BUCKETLINE_STORE_OPTION"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_variable(
    option: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAMES[option], value)
    with pytest.raises(UsageError, match=words):
        RemoteOptions()
