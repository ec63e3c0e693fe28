"""WebDataset tars, written by the webdataset package itself: what it reads is what is listed, and damage is never quiet."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import webdataset
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander

from bucketline.errors import SourceError
from bucketline.ingest.images.crop import Framing, RejectedError, parse_grid
from bucketline.ingest.images.decode import placed_by_header
from bucketline.ingest.sources.dataset_file import open_source
from bucketline.ingest.sources.tar import key_and_extension
from tests.commands import call
from tests.kit import untouched
from tests.models import png
from tests.unit.ingest.sources.kit import captions, contents, write_members


def write(path: Path, samples: Iterable[Mapping[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), encoder=False, **options) as writer:
        for sample in samples:
            writer.write(dict(sample))
    return path


def images(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"__key__": f"a/{n:03d}", "png": png(20 + n, 30, n), **more} for n in range(count)]


def by_webdataset(path: Path) -> Iterator[dict[str, Any]]:
    """Read a tar with the webdataset package; its own opener would leave the file open."""
    with path.open("rb") as stream:
        yield from group_by_keys(tar_file_expander([{"url": str(path), "stream": stream}]))


def test_what_webdataset_reads_is_what_is_listed(tmp_path: Path) -> None:
    for n in range(3):
        write(tmp_path / f"{n:03d}.tar", [{"__key__": f"k{n}-{k}", "JPG": png(20, 30, k), "txt": b"one"} for k in range(4)])
    pattern = str(tmp_path / "{000..002}.tar")
    expected = {
        f"{path.stem}/{sample['__key__']}.JPG": ((sample["txt"].decode(),), sample["jpg"])
        for path in sorted(tmp_path.glob("*.tar"))
        for sample in by_webdataset(path)
    }
    assert len(expected) == 12
    for text in (pattern, f"{tmp_path}/*.tar", f"{tmp_path}/00[0-2].tar", f"file:{pattern}"):
        assert contents(text) == expected
    assert list(contents(tmp_path / "001.tar")) == [f"001/k1-{k}.JPG" for k in range(4)]


@pytest.mark.parametrize(
    "name", ["a.png", "a/b.seg.png", "./a.png", "../a.png", "/a/b.c/d.png", "a", "a.b/c", ".png", "a/b..png"]
)
def test_names_are_split_as_webdataset_splits_them(name: str) -> None:
    assert (key_and_extension(name) or (None, None)) == base_plus_ext(name)


def test_hidden_files_belong_to_no_sample_as_in_a_folder() -> None:
    """Webdataset passes over `.b.png` at the root, and takes `a/.b.png` for a sample of the key `a/`."""
    assert key_and_extension("a/.b.png") is key_and_extension("a/._b.png") is None


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_tar_and_a_command_are_refused_with_what_to_do(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "c.tar.gz"
    path.write_bytes(pack(write(tmp_path / "plain.tar", images(2)).read_bytes()))
    with pytest.raises(SourceError, match=r"c.tar.gz is compressed; unpack it first"):
        open_source(str(path)).listing()
    for text in (f"pipe:zcat {path}", f"{tmp_path}/plain.tar::pipe:zcat {path}"):
        with pytest.raises(SourceError, match=r"^pipe:… is neither a path nor a URL of object storage"):
            open_source(text)


def test_a_plain_tars_images_are_read_where_they_lie(tmp_path: Path) -> None:
    """The rest of the tar is not touched: it may be gone by then."""
    path = write(tmp_path / "s.tar", images(9))
    status = path.stat()
    source = open_source(str(path))
    items = source.listing().items
    data = bytearray(len(path.read_bytes()))
    offset, length = items[4].at[4], items[4].at[2]
    data[offset : offset + length] = path.read_bytes()[offset : offset + length]
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert source.read(items[4])[0] == png(24, 30, 4)
    with source.opened(items[4]) as file:
        framing = Framing(grid=parse_grid("16x24", step_px=8, align_px=8))
        assert placed_by_header(file, framing, "a").source == (24, 30)
        assert file.seek(-3, os.SEEK_END) == length - 3
        assert file.read() == png(24, 30, 4)[-3:]


def test_a_tar_that_changes_under_a_run_stops_it(tmp_path: Path) -> None:
    path = write(tmp_path / "s.tar", images(3))
    local = open_source(str(path))
    items = local.listing().items
    write(path, images(2))
    os.utime(path, ns=(5, 5))
    with pytest.raises(SourceError, match="changed while it was read; what was packed is kept"):
        local.read(items[0])
    path.unlink()
    with pytest.raises(RejectedError, match="No such file"):
        local.read(items[0])


def test_captions_come_from_text_caption_or_json_in_this_order(tmp_path: Path) -> None:
    one, many = b'{"caption": "json", "other": 1}', b'{"text": ["j1", " ", "j2"]}'
    write(
        tmp_path / "s.tar",
        [
            {"__key__": "a", "png": png(20, 20), "txt": b"t1\nt2\n", "caption": b"c", "json": one},
            {"__key__": "b", "png": png(20, 20), "caption": b"c", "json": one},
            {"__key__": "c", "png": png(20, 20), "json": one},
            {"__key__": "d", "png": png(20, 20), "json": many},
            {"__key__": "e", "png": png(20, 20), "json": b'{"label": 5}', "cls": b"5"},
            {"__key__": "f", "png": png(20, 20)},
            {"__key__": "g", "png": png(20, 20), "json": b'["j1", "j2"]'},
        ],
    )
    assert list(captions(tmp_path / "s.tar").values()) == [("t1", "t2"), ("c",), ("json",), ("j1", "j2"), (), (), ("j1", "j2")]


def test_captions_that_cannot_be_read_are_noted_at_their_image_alone(tmp_path: Path) -> None:
    bad = {"txt": b"\xff\xfe", "json": b"{", "caption": b"x" * (1 << 21)}
    samples = [{"__key__": f"{n}", "png": png(20, 20), kind: data} for n, (kind, data) in enumerate(bad.items())]
    write(tmp_path / "s.tar", [*samples, {"__key__": "t", "png": png(20, 20), "json": b'{"text": 5}'}, *images(1, txt=b"fine")])
    *errors, fine = captions(tmp_path / "s.tar").values()
    assert fine == ("fine",)
    starts = ("0.txt is not UTF-8 (byte 0)", "1.json is not JSON", "2.caption has 2097152 bytes", "t.json: its text is a int")
    assert all(str(error).startswith(start) for error, start in zip(errors, starts, strict=True))


def test_members_of_one_key_need_not_lie_together_and_captions_without_an_image_are_named(tmp_path: Path) -> None:
    members = [("a.txt", b"one"), ("b.png", png(20, 20)), ("c.txt", b"lost"), ("a.png", png(20, 20)), ("b.txt", b"two")]
    listing = open_source(str(write_members(tmp_path / "s.tar", members))).listing()
    assert [(item.id, item.captions) for item in listing.items] == [("s/b.png", ("two",)), ("s/a.png", ("one",))]
    assert listing.orphans == ["s/c.txt"]


def test_images_of_compound_names_are_packed_unless_they_stand_beside_a_plain_one(tmp_path: Path) -> None:
    names = ("a.png", "a.seg.png", "b.v1.png", "b.v2.png", "c.jpg", "c.png")
    texts = {"a.txt": b"one", "b.v2.txt": b"second", "b.txt": b"both", "c.txt": b"two samples"}
    write_members(tmp_path / "s.tar", (dict.fromkeys(names, png(20, 20)) | texts).items())
    listing = open_source(str(tmp_path / "s.tar")).listing()
    found = {"a.png": "one", "b.v1.png": "both", "b.v2.png": "second", "c.jpg": "two samples", "c.png": "two samples"}
    assert captions(listing) == {f"s/{name}": (text,) for name, text in found.items()}
    assert listing.passed_over == ["s/a.seg.png (its key also has a .png: assumed to be a mask or similar)"]


def test_an_image_with_dots_in_its_name_has_its_own_captions_and_none_is_lost(tmp_path: Path) -> None:
    names = ("2021.png", "2021.05.png", "2021.06.png", "2022.png", "v1.2.JPG")
    texts = {"2021.05.txt": b"may", "2021.06.json": b'{"of": "a mask"}', "2021.txt": b"all"}
    texts |= {"2022.05.txt": b"lost", "2022.05.json": b"{}", "v1.2.Txt": b"own"}
    write_members(tmp_path / "s.tar", (dict.fromkeys(names, png(20, 20)) | texts).items())
    listing = open_source(str(tmp_path / "s.tar")).listing()
    found = {"2021.png": ("all",), "2021.05.png": ("may",), "2022.png": (), "v1.2.JPG": ("own",)}
    assert captions(listing) == {f"s/{name}": own for name, own in found.items()}
    assert listing.passed_over == ["s/2021.06.png (its key also has a .png: assumed to be a mask or similar)"]
    assert listing.orphans == ["s/2022.05.txt"]


NAMES = [
    *("../../escaped.png", "/abs/olute.png", "a/../b.png", "sp ace.png", "ü/日本.png", "new\nline/x\ny.png"),
    *("q'\";|&$(x).png", "-rf.png", "x" * 300 + ".png", "\udcff.png"),
]


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_names_of_members_are_only_ever_ids(kind: int, tmp_path: Path) -> None:
    inner = tmp_path / "deep" / "in"
    inner.mkdir(parents=True)
    members = [(name, png(20, 30, n)) for n, name in enumerate(NAMES)]
    path = write_members(inner / "s.tar", members, format=kind, encoding="utf-8", errors="surrogateescape")
    with untouched(tmp_path):
        assert contents(path) == {f"s/{name}": ((), png(20, 30, n)) for n, name in enumerate(NAMES)}


def test_what_webdataset_passes_over_is_passed_over_and_links_are_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        for name, kind in zip("abcd", (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE), strict=True):
            info = tarfile.TarInfo(f"{name}.png")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        for name in ("__meta__/x.png", "__x__", ".hidden.png", "._e.png", "e.png"):
            info = tarfile.TarInfo(name)
            info.size = len(png(20, 20))
            archive.addfile(info, io.BytesIO(png(20, 20)))
    listing = open_source(str(tmp_path / "s.tar")).listing()
    assert [item.id for item in listing.items] == ["s/e.png"]
    assert listing.passed_over == [f"s/{name}.png (a link, or a sparse file)" for name in "abcd"]


def test_equal_ids_are_an_error_that_names_both_places(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write(tmp_path / name / "s.tar", images(2))
    with pytest.raises(SourceError, match=r"'s/a/000.png': one at .*x/s.tar, one at .*y/s.tar; ids must differ"):
        open_source(f"{tmp_path}/{{x,y}}/s.tar").listing()
    twice = write_members(tmp_path / "t.tar", [("a.png", png(20, 20)), ("b.png", png(20, 20)), ("a.png", png(20, 30))])
    with pytest.raises(SourceError, match=r"t/'a.png': one in .*t.tar at byte 512, one in .*t.tar at byte \d+"):
        open_source(str(twice)).listing()


def cut_at(at: int) -> Callable[[bytearray], bytes]:
    return lambda data: bytes(data[:at])


def flipped(at: int) -> Callable[[bytearray], bytes]:
    def flip(data: bytearray) -> bytes:
        data[at] ^= 0x55
        return bytes(data)

    return flip


def header_of(data: bytearray, number: int) -> int:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return archive.getmembers()[number].offset


CUT_SHORT = "ends inside a member: it was cut short"
NO_END = "ends without its end mark: it was cut short"
DAMAGES: dict[str, tuple[Callable[[bytearray], bytes], str]] = {  # each with what is said of it
    "empty": (cut_at(0), ""),
    "within the first header": (cut_at(300), ""),
    "within the first image": (cut_at(600), f"byte 600: .*{CUT_SHORT}"),
    "before a header": (lambda data: bytes(data[: header_of(data, 3)]), NO_END),
    "within a header": (lambda data: bytes(data[: header_of(data, 3) + 100]), NO_END),
    "within the last image": (lambda data: bytes(data[: header_of(data, 5) + 512 + 40]), CUT_SHORT),
    "no end mark": (lambda data: bytes(data[: header_of(data, 5) + 512 + 1024]), ""),
    "a header that is broken": (lambda data: flipped(header_of(data, 3) + 5)(data), "number of images is unknown"),
    "the first header broken": (flipped(3), ""),
    "a header of nothing": (lambda data: bytes(data[: header_of(data, 3)]) + os.urandom(1024), ""),
    "another tar behind": (lambda data: bytes(data + data), ""),
    "no tar": (lambda _: b"no tar at all " * 100, ""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_that_names_tar_and_byte_and_never_a_smaller_count(damage: str, tmp_path: Path) -> None:
    """tarfile, and so webdataset, takes most of these for the end of the archive."""
    spoil, said = DAMAGES[damage]
    whole = write(tmp_path / "whole.tar", images(6))
    (tmp_path / "bad.tar").write_bytes(spoil(bytearray(whole.read_bytes())))
    with pytest.raises(SourceError, match=r"bad.tar, near byte \d+: .*; copy or create it again") as refused:
        open_source(f"{tmp_path}/bad.tar").listing()
    assert re.search(said, str(refused.value)), refused.value


def raw_header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    """Make a header with a size field that tarfile itself would not write."""
    header = bytearray(tarfile.TarInfo(name).tobuf())
    header[124:136], header[156:157] = size.ljust(12, b"\0"), kind
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


@pytest.mark.parametrize("kind", [b"0", b"x", b"L"])
@pytest.mark.parametrize("size", [b"\xff" * 11 + b"\x00", b"\xff" * 12, b"\x80" + b"\x7f" * 11, b"77777777777"])
def test_sizes_that_lie_neither_send_it_round_for_ever_nor_fill_the_memory(size: bytes, kind: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(raw_header("a.png", size, kind) + bytes(4096))
    with pytest.raises(SourceError, match=r"s.tar, near byte"):
        open_source(str(path)).listing()


@pytest.mark.parametrize("url", ["ftpx://x/a.tar", "https://host/{0..1}.tar"])
def test_what_a_web_server_has_is_refused_with_what_to_do(url: str) -> None:
    with pytest.raises(SourceError, match=r"is neither a path nor a URL of object storage; download the tar"):
        open_source(url)


def test_tars_without_an_image_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="its 1 tars have no images"):
        open_source(str(write(tmp_path / "s.tar", [{"__key__": "a", "cls": b"5"}]))).listing()


SECRET = "Zq81secret"


@pytest.mark.parametrize(
    "text",
    [
        f"http://me:{SECRET}@127.0.0.1:1/a.tar",
        f"http://{SECRET}@127.0.0.1:1/a.tar?X-Signature={SECRET}#{SECRET}",
        f"http://127.0.0.1:1/{{0..1}}.tar?sig={SECRET}::http://me:{SECRET}@127.0.0.1:1/b.tar",
        f"ftpx://me:{SECRET}@host/a.tar?token={SECRET}",
        f"s3://me:{SECRET}@bucket/a.tar?token={SECRET}",
        f"https://me:{SECRET}@127.0.0.1:1/{{0..a.tar",
        f"pipe:curl -s -H 'Authorization: Bearer {SECRET}' http://127.0.0.1:1/a.tar",
    ],
)
def test_passwords_tokens_and_commands_are_in_no_message(text: str) -> None:
    ran = call("ingest", "scan", text)
    assert ran.code == (2 if text.startswith("s3:") else 1)  # the URL of something in object storage has no query
    assert ran.err.startswith("error: ")
    assert SECRET not in ran.out + ran.err
