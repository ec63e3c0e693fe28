"""Use and misuse of a store: two runs at once, moving and copying it, odd names, very many files, a source that changes."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from bucketline.errors import BucketlineError
from bucketline.loader import Loader, LoaderConfig
from bucketline.store import Store
from bucketline.store.format.hashing import bytes_digest, identity
from tests.fault.apart import HANG_S, Apart, How
from tests.fault.ground import COMMAND_S, Ground, commanded, ids_of, is_sound, judged, listed, strange
from tests.fault.record import Asked, Kind, Outcome, Record
from tests.models import png, write_images

LONG_S = 900.0  # for 100,000 files
NAMES = (
    "plain", "with space", " before", "two\nlines", "tab\there", "carriage\rreturn", "quote'\"`",
    "back\\slash", "-dash", "--json", "%s%n{}$HOME", "~", "a;b&c|d", "*?[x]", "…", "ünïcödé",
    "u\u0308 combining", "Ελληνικά", "Русский", "עברית", "العربية", "हिन्दी", "ไทย", "日本語", "中文",
    "한국어", "ქართული", "አማርኛ", "😀👩\u200d👩\u200d👧", "\u202eright to left", "\u2028line separator",
    "\x7f\x01control", "CON", "a" * 251, "é" * 125, "😀" * 62, "dots.in.name", "Ünïcödé" * 20, "0", "null",
)  # fmt: skip


def people(asked: Asked) -> Iterator[Record]:
    """Try them all."""
    ground = Ground.prepare(asked)
    yield two_at_once(ground, asked.of(1, 12))
    yield moved_while_read(ground, asked.of(1, 12))
    yield copied_while_packed(ground, asked.of(1, 12))
    yield odd_names(ground)
    yield source_that_changes(ground, asked.of(1, 12))
    ground.most = 6 if asked.is_quick else None
    yield wrong_paths(ground)
    yield many_files(ground, asked.of(200, 100_000))


def two_at_once(ground: Ground, trials: int) -> Record:
    """Two packs of one store, the second begun while the first is at work: one waits for nobody, none does harm."""
    record = Record(fault="two packs of one store at once", kind=Kind.OTHER)
    source = ground.fresh()
    ids = write_images(source, 24)
    for _ in range(trials):
        store = ground.fresh() / "s"
        runs = [ground.packing(source, store)]
        time.sleep(ground.draw.random() * 0.5)
        runs.append(ground.packing(source, store))
        outcomes = [judged(run.ended(COMMAND_S)) for run in runs]
        bad = [(outcome, said) for outcome, said in outcomes if outcome not in (Outcome.COMPLETED, Outcome.CLEAN_ERROR)]
        if bad:
            record.add(*bad[0])
        elif all(outcome is Outcome.CLEAN_ERROR for outcome, _ in outcomes):
            record.add(Outcome.DEFECT, "neither went through")
        elif (wrong := is_sound(store)) or ids_of(store) != ids:
            record.add(Outcome.WRONG, wrong or f"the store has {len(ids_of(store))} samples, expected {len(ids)}")
        else:
            record.add(Outcome.CLEAN_ERROR if any(o is Outcome.CLEAN_ERROR for o, _ in outcomes) else Outcome.COMPLETED)
    return record


def moved_while_read(ground: Ground, trials: int) -> Record:
    """A store is renamed in the middle of a pass: the batches continue to be right, or an error says so."""
    record = Record(fault="a store moved while it is read", kind=Kind.OTHER)
    source, store = ground.fresh(), ground.fresh() / "s"
    write_images(source, 30)
    ground.packed(source, store)
    expected = Apart(lambda: _batches(store, None, plain=False)).ended(COMMAND_S)
    for number in range(trials):
        away = store.with_name("away")
        at = ground.draw.randrange(1, 15)
        ended = Apart(_moving(store, (at, away), plain=bool(number % 2))).ended(HANG_S)
        if away.exists():
            away.rename(store)
        if ended.how is not How.DONE:
            record.add(ended.outcome, ended.said)
        else:
            record.add(Outcome.COMPLETED if ended.gave == expected.gave else Outcome.WRONG, "other batches")
    return record


def _moving(store: Path, move: tuple[int, Path], *, plain: bool) -> Callable[[], object]:
    return lambda: _batches(store, move, plain=plain)


def _batches(store: Path, move: tuple[int, Path] | None, *, plain: bool) -> list[str]:
    """Take batches, and move the store away before one of them."""
    found = []
    with Loader(store, LoaderConfig(batch_size=2, plain_reads=plain, prefetch_bytes=1, threads=1)) as loader:
        batches = loader.forever()
        for number in range(20):
            if move is not None and number == move[0]:
                store.rename(move[1])
            found.append(bytes_digest(next(batches).latents.numpy().tobytes()))
    return found


def copied_while_packed(ground: Ground, trials: int) -> Record:
    """A store is copied while it is packed: the copy is sound, or is refused by name."""
    record = Record(fault="a store copied while it is packed", kind=Kind.OTHER)
    source = ground.fresh()
    write_images(source, 40)
    for number in range(trials):
        folder = ground.fresh()
        store = folder / "s"
        if number % 2:  # there is a store already
            ground.packed(source, store)
            write_images(source, 44 + number)
        run = ground.packing(source, store)
        time.sleep(ground.draw.random() * 1.0)
        with suppress(shutil.Error, FileNotFoundError):  # of files that went meanwhile; the copy is what it is
            shutil.copytree(store, folder / "copy")
        outcome, said = judged(run.ended(COMMAND_S))
        if outcome is not Outcome.COMPLETED or (wrong := is_sound(store)):
            record.add(Outcome.DEFECT, said or wrong or "")
            continue
        try:
            faults = is_sound(folder / "copy")
            record.add(Outcome.COMPLETED if faults is None else Outcome.CLEAN_ERROR)
        except BucketlineError:
            record.add(Outcome.CLEAN_ERROR)
    return record


def odd_names(ground: Ground) -> Record:
    """Files whose names are in every script, with spaces and newlines, up to 255 bytes: packed, found, and taken out again."""
    record = Record(fault="odd file names", kind=Kind.OTHER)
    source, folder = ground.fresh(), ground.fresh()
    raw = os.fsencode(source) + b"/not \xff\xfe UTF-8.png"
    for number, name in enumerate(NAMES):
        (source / f"{name}.png").write_bytes(png(20, 30, seed=number))
        (source / f"{name}.txt").write_text("a red cat", encoding="utf-8")
    Path(os.fsdecode(raw)).write_bytes(png(20, 30, seed=99))
    before = listed(ground.folder, folder)
    steps = [
        ground.packed(source, folder / "s"),
        commanded("store", "verify", folder / "s"),
        commanded("store", "export", folder / "s", folder / "tars", "--format", "webdataset"),
        commanded("store", "export", folder / "s", folder / "files", "--format", "safetensors"),
        ground.packed(source, folder / "s"),
    ]
    for ended in steps:
        outcome, said = judged(ended)
        if outcome is not Outcome.COMPLETED:
            record.add(Outcome.DEFECT, f"{ended.said}{said}{ended.gave}")
    if changed := strange(before, listed(ground.folder, folder)):
        record.add(Outcome.OUTSIDE, f"{changed[:3]}")
    opened, found = Store.open(folder / "s"), ids_of(folder / "s")
    for name in (*(f"{name}.png" for name in NAMES), os.fsdecode(raw[len(os.fsencode(source)) + 1 :])):
        is_right = found.count(name) == 1 and opened.sample(name)[1].id == name
        is_captioned = "UTF-8" in name or opened.sample(name)[1].captions == ("a red cat",)
        record.add(Outcome.COMPLETED if is_right and is_captioned else Outcome.LOST, repr(name))
    return record


def source_that_changes(ground: Ground, trials: int) -> Record:
    """Files are rewritten, cut, replaced and removed while they are packed; the next run has each as it then is."""
    record = Record(fault="a source that changes while it is packed", kind=Kind.OTHER)
    for _ in range(trials):
        source, store = ground.fresh(), ground.fresh() / "s"
        ids = write_images(source, 60)
        run = ground.packing(source, store)
        for name in ground.draw.choices(ids, k=100):
            _change(ground, source / name)
            time.sleep(ground.draw.random() * 0.02)
        first = judged(run.ended(COMMAND_S))
        again = ground.packed(source, store)
        outcome, said = judged(again)
        if first[0] not in (Outcome.COMPLETED, Outcome.CLEAN_ERROR):
            record.add(*first)
        elif outcome is not Outcome.COMPLETED:
            record.add(Outcome.DEFECT, said or str(again.gave))
        else:
            record.add(*_as_the_source_is(store, source, again.gave["out"]))
    return record


def _change(ground: Ground, path: Path) -> None:
    how = ground.draw.choice([0, 0, 0, 1, 1, 2, 2, 2, 3])
    with suppress(FileNotFoundError):
        if how == 0:
            path.write_bytes(png(30, 34, seed=ground.draw.randrange(1000)))
        elif how == 1:
            os.truncate(path, path.stat().st_size // 2)
        elif how == 2:
            aside = path.with_suffix(".new")
            aside.write_bytes(png(40, 30, seed=ground.draw.randrange(1000)))
            aside.replace(path)
        else:
            path.unlink()


def _as_the_source_is(store: Path, source: Path, out: str) -> tuple[Outcome, str]:
    report = json.loads(out) if out else {}
    if report and report["found"] != report["packed"] + report["unchanged"] + report["rejected"]:
        return Outcome.LOST, f"{report['found']} were found, the account is {report}"
    if wrong := is_sound(store):
        return Outcome.WRONG, wrong
    rejects = (store / "rejects.jsonl").read_text(encoding="ascii") if (store / "rejects.jsonl").exists() else ""
    opened = Store.open(store)
    for name in ids_of(store):
        path = source / name
        if path.exists() and json.dumps(name) not in rejects and opened.sample(name)[1].content != identity(path.read_bytes()):
            return Outcome.WRONG, f"{name} is not what its file is"
    return Outcome.RECOVERED, ""


def wrong_paths(ground: Ground) -> Record:
    """Paths that are not there, are something else, or are one inside the other: an error in words, and nothing is written."""
    record = Record(fault="wrong paths", kind=Kind.OTHER)
    folder = ground.fresh()
    source, store, model = folder / "photos", folder / "s", ground.folder / "model"
    write_images(source, 6)
    ground.packed(source, store)
    (folder / "file").write_text("precious", encoding="ascii")
    (folder / "empty").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    nowhere = [
        folder / "no" / "such",
        folder / "file",
        folder / "empty",
        folder / "loop",
        source,
        "",
        "\n",
        folder / ("x" * 300),
    ]
    packs = [
        *(("pack", path, folder / "new", "--model", model) for path in nowhere if path != source),
        *(
            ("pack", source, path, "--model", model)
            for path in (folder / "file", source, source / "s", folder, folder / "loop")
        ),
        *(("pack", source, folder / "new", "--model", path) for path in nowhere[:5]),
    ]
    stores = [(verb, path) for verb in ("info", "verify", "ls", "compact") for path in nowhere]
    exports = [
        ("export", store, path, "--format", "safetensors") for path in (folder / "file", store, store / "x", folder / "a" / "b")
    ]
    commands = [
        *(("ingest", *c) for c in packs),
        *(("store", *c) for c in (*stores, *exports)),
        ("loader", "serve", folder / "no", "--at", folder / "sock"),
    ]
    for command in ground.some(commands):
        before = listed(ground.folder)
        ended = commanded(*command)  # type: ignore[arg-type]
        outcome, said = judged(ended, may_be_usage=True)
        if changed := strange(before, listed(ground.folder)):
            outcome, said = Outcome.OUTSIDE, f"{changed[:3]}"
        elif outcome is Outcome.COMPLETED:
            outcome, said = Outcome.DEFECT, "it went through"
        record.add(outcome, f"{command}: {said}")
    return record


def many_files(ground: Ground, count: int) -> Record:
    """Very many files in one folder, packed to the end."""
    record = Record(fault=f"{count} files in one folder", kind=Kind.OTHER)
    source, store = ground.fresh(), ground.fresh() / "s"
    write_images(source, 50)
    images = sorted(source.rglob("*.png"))
    for number in range(count - len(images)):
        os.link(images[number % len(images)], source / f"{number:06d}.png")
    ended = ground.packing(source, store, "--batch-size", "256").ended(LONG_S)
    outcome, said = judged(ended)
    if outcome is Outcome.COMPLETED and json.loads(ended.gave["out"])["packed"] != count:
        outcome, said = Outcome.LOST, ended.gave["out"][:300]
    record.add(outcome, said)
    shutil.rmtree(source)
    return record
