"""The content of a model's hash, and the names that are taken for a hub's."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bucketline.errors import ModelError
from bucketline.ingest.encoders.model_folder import ModelFolder, open_model, refuse_incomplete
from bucketline.ingest.encoders.text_columns import TextSettings
from bucketline.ingest.encoders.text_encoders import load_caption_encoder
from bucketline.model_file import MODULAR_INDEX, config_hash, weights_hash
from tests.commands import BIN, Ran, call, spawn
from tests.family_models import write_pipeline
from tests.kit import edit_json
from tests.models import SMALL, png, write_files, write_images, write_model
from tests.serving import web_server


def test_a_weights_hash_changes_with_any_weight_and_with_a_name_and_with_nothing_else() -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    before = weights_hash(module)
    assert weights_hash(module.requires_grad_(requires_grad=False)) == before
    with torch.no_grad():
        module.weight[1, 2] += 1e-6
    assert weights_hash(module) != before


def test_a_config_hash_leaves_out_what_changes_from_machine_to_machine() -> None:
    config = {"a": 1, "block": [2, 3], "_name_or_path": "x", "transformers_version": "5.0"}
    assert config_hash(config) == config_hash({"block": [2, 3], "a": 1, "_diffusers_version": "0.3", "_name_or_path": "y"})
    assert config_hash(config) != config_hash({**config, "a": 2})


def test_a_config_hash_does_not_follow_the_order_of_a_librarys_sets(tmp_path: Path) -> None:
    """diffusers keeps `_use_default_values`, a list made from a set, in a loaded configuration."""
    assert config_hash({"a": 1, "_use_default_values": ["x", "y"]}) == config_hash({"a": 1, "_use_default_values": ["y", "x"]})


def test_weights_that_are_missing_are_refused_by_name_but_for_those_that_nothing_reads() -> None:
    assert refuse_incomplete("text_encoder/", {"missing_keys": ["pooler.dense.bias"]}, unread="pooler.") == {
        "pooler.dense.bias"
    }
    with pytest.raises(
        ModelError, match=r"text_encoder/ is incomplete: 1 of its weights are missing, such as layer\.0\.weight"
    ):
        refuse_incomplete("text_encoder/", {"missing_keys": ["layer.0.weight", "pooler.x"]}, unread="pooler.")
    with pytest.raises(ModelError, match="mismatched"):
        refuse_incomplete("vae/", {"mismatched_keys": [("conv.weight", (1,), (2,))]})


def test_a_name_of_one_slash_is_taken_for_a_hubs_and_anything_else_for_a_path(tmp_path: Path) -> None:
    assert open_model(str(tmp_path)).path == tmp_path
    with pytest.raises(ModelError, match="owner/model is not a local folder, and the hub could not be reached"):
        open_model("owner/model")
    with pytest.raises(ModelError, match="own er/model is neither a folder nor a valid hub name"):
        open_model("own er/model")
    for name in ("model", "./owner/model", "/owner/model", "~/model", "a/b/c"):
        with pytest.raises(ModelError, match="is not a folder; expected a model folder in diffusers' layout"):
            open_model(name)


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    assert open_model(str(tmp_path)).config("vae") is None
    (tmp_path / "unet" / "config.json").write_text("{", encoding="ascii")
    with pytest.raises(ModelError, match=r"unet/config.json is not JSON"):
        open_model(str(tmp_path)).config("unet")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_files(tmp_path / "images", {"a.png": png(16, 24)})


def away(tmp_path: Path, url: str = "http://127.0.0.1:1") -> dict[str, str]:
    """Return the environment of a process whose hub is at `url`, where nothing answers unless something is started there."""
    return {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hub")}


COMMIT = "0123456789abcdef0123456789abcdef01234567"
UNREAD = "unet/diffusion_pytorch_model.safetensors"


@contextmanager
def hub_of(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder as the model `owner/model` of a hub; yield its URL and the paths of the files that were fetched."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    fetched: list[str] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path, _, _ = self.path.partition("?")
            if path.startswith("/api/models/owner/model/tree/"):
                entries = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()]
                self.answer(200, json.dumps(entries).encode())
            elif path.startswith("/api/models/owner/model"):
                names = [{"rfilename": name} for name in files]
                self.answer(200, json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": names}).encode())
            elif (name := "/".join(path.split("/")[5:])) in files:
                fetched.extend([name] if self.command == "GET" else [])
                self.answer(200, files[name], ETag=f'"{hashlib.sha1(files[name]).hexdigest()}"')
            else:
                self.answer(404, b"", **{"X-Error-Code": "EntryNotFound"})

        def answer(self, status: int, data: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    with web_server(Hub) as server:
        yield f"http://127.0.0.1:{server.server_port}", fetched


@pytest.mark.slow
def test_a_hubs_model_is_downloaded_in_used_parts_and_then_used_without_a_network(images: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "unet").mkdir()
    (folder / UNREAD).write_bytes(bytes(100))
    encoder = transformers.BertModel.from_pretrained(folder / "text_encoder")
    (folder / "text_encoder" / "model.safetensors").unlink()
    encoder.save_pretrained(folder / "text_encoder", max_shard_size="2KB")  # downloaded as a snapshot, known to be in part
    asked = (images, tmp_path / "s", "--model", "owner/model", *SMALL, "--json")
    with hub_of(folder) as (url, fetched):
        ran = spawn([BIN / "ingest", "pack", *asked], **away(tmp_path, url))
    assert ran.code == 0, ran.err
    assert "vae/diffusion_pytorch_model.safetensors" in fetched
    assert UNREAD not in fetched
    (images / "b.png").write_bytes(png(16, 24, 1))
    again = spawn([BIN / "ingest", "pack", *asked], **away(tmp_path)).done()
    assert (again.json["packed"], again.json["unchanged"]) == (1, 1)


@pytest.mark.slow
def test_the_index_of_a_hubs_modular_pipeline_is_read(images: Path, tmp_path: Path) -> None:
    asked = (images, "--model", "owner/model", *SMALL)
    with hub_of(write_pipeline(tmp_path / "model", "anima")) as (url, fetched):
        spawn([BIN / "ingest", "scan", *asked], **away(tmp_path, url)).done()
    assert MODULAR_INDEX in fetched


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (None, "", "([Errno 111] Connection refused); name a model's folder, or run it once with network access"),
        (404, "RepoNotFound", "the hub has no such model"),
        pytest.param(500, "", "refused", marks=pytest.mark.slow),
    ],
)
def test_a_hub_that_says_no_or_nothing_is_named_with_what_to_do(
    status: int | None, code: str, words: str, images: Path, tmp_path: Path
) -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status or 500)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with web_server(Refusing) as server:
        port = 1 if status is None else server.server_port
        hub = away(tmp_path, f"http://127.0.0.1:{port}")
        ran = spawn([BIN / "ingest", "scan", images, "--model", "someone/name"], **hub).fails(
            "someone/name is not a local folder", words
        )
    assert (ran.out, len(ran.err.splitlines())) == ("", 1)


# Model folders of strangers: code that is never run, names that are not a model's, and embeddings that are not finite.

CPU = torch.device("cpu")


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "model")


def packed(model: Path, *more: object) -> Ran:
    photos = model.parent / "photos"
    write_images(photos, 2)
    return call("ingest", "pack", photos, model.parent / "s", "--model", model, *SMALL, *more)


def refused(model: Path) -> str:
    """Pack two images; return the one line of the error. Nothing is written."""
    ran = packed(model)
    assert (ran.code, ran.out, (model.parent / "s").exists()) == (1, "", False)
    (line,) = ran.err.splitlines()
    assert line.startswith(f"error: {model}: ")
    return line


def spoil(weights: Path, name: str, value: float) -> None:
    tensors = load_file(weights)
    tensors[name].fill_(value)
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_an_empty_caption_that_is_not_finite_is_refused_before_anything_is_written(value: float, own: Path) -> None:
    weights = own / "text_encoder" / "model.safetensors"
    spoil(weights, "encoder.layer.0.output.LayerNorm.bias", value)
    line = refused(own)
    assert "the empty caption's tokens are not finite as F16; " in line
    assert "--text-dtype" in line


@pytest.mark.parametrize("zeros", [False, True])
def test_a_pooled_embedding_of_the_empty_caption_must_be_finite_unless_its_pipeline_sets_it_to_zeros(
    tmp_path: Path, *, zeros: bool
) -> None:
    folder = write_pipeline(tmp_path / "model", "sdxl", force_zeros_for_empty_prompt=zeros)
    spoil(folder / "text_encoder_2" / "model.safetensors", "text_projection.weight", float("nan"))
    model, settings = open_model(str(folder)), TextSettings(stored_dtype="F32")
    if zeros:
        assert load_caption_encoder(model, CPU, settings).encode([""])[0].is_finite
        return
    with pytest.raises(ModelError, match=r"the empty caption's pooled are not finite as F32"):
        load_caption_encoder(model, CPU, settings)


def asks_for_own_code(folder: Path, file: str, **automatic: Any) -> Path:
    """Have a part's JSON name a class of its own Python file, which leaves a mark where it is run; give the mark."""
    mark = folder.parent / "was-run"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\n", encoding="utf-8")
    edit_json(folder / file, auto_map=automatic)
    return mark


@pytest.mark.parametrize("part", ["text_encoder", "tokenizer"])
def test_a_models_own_code_is_never_run_though_stdin_says_yes(part: str, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if part == "text_encoder":
        edit_json(own / part / "config.json", model_type="a_kind_of_its_own")
        mark = asks_for_own_code(own / part, "config.json", AutoConfig="own.Config", AutoModel="own.Model")
    else:
        edit_json(own / part / "tokenizer_config.json", tokenizer_class="OwnTokenizer")
        mark = asks_for_own_code(own / part, "tokenizer_config.json", AutoTokenizer=["own.Tokenizer", None])
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\ny\n"))
    assert f"{part}/ requires custom code (auto_map), which is never run; " in refused(own)
    assert not mark.exists()


@pytest.mark.parametrize(
    "architectures",
    [*([name] for name in ("Trainer", "models", "set_seed", "NoSuchClass", "AutoTokenizer")), [5], "BertModel", [[]], {"a": 1}],
    ids=str,
)
def test_an_architecture_that_is_not_a_model_is_passed_over(architectures: object, own: Path) -> None:
    """Only the kind of model says what to load then, as where no architecture is named."""
    edit_json(own / "text_encoder" / "config.json", architectures=architectures)
    assert packed(own, "--json").done().json["packed"] == 2


@pytest.mark.parametrize("architecture", ["T5EncoderModel", "CLIPTextModel", "ViTModel"])
def test_an_architecture_that_does_not_suit_is_an_error_in_words(architecture: str, own: Path) -> None:
    edit_json(own / "text_encoder" / "config.json", architectures=[architecture])
    refused(own)


def test_a_configuration_that_says_nothing_is_an_error_in_words(own: Path) -> None:
    (own / "text_encoder" / "config.json").write_text(json.dumps({"architectures": ["Trainer"]}), encoding="ascii")
    with pytest.raises(ModelError, match="its text encoder a Trainer, and how that encodes captions is not known"):
        load_caption_encoder(open_model(str(own)), CPU, TextSettings())
    with pytest.raises(ModelError, match=r"cannot be loaded"):
        load_caption_encoder(open_model(str(own)), CPU, TextSettings(is_plain=True))


INDEX = {"_class_name": "StableDiffusionPipeline", "vae": ["diffusers", "AutoencoderKL"]}


@pytest.mark.parametrize(
    ("part", "named", "found"),
    [("vae", "AutoencoderDC", "AutoencoderKL"), ("text_encoder", "BertModelWithProjection", "BertModel")],
)
def test_an_index_that_names_another_class_than_the_part_has_is_refused_before_anything_is_written(
    part: str, named: str, found: str, own: Path, tmp_path: Path
) -> None:
    (own / "model_index.json").write_text(json.dumps({**INDEX, part: ["its library", named]}), encoding="ascii")
    said = f"names the class {named} for {part}/, and {part}/config.json {found}, expected the same"
    assert said in refused(own)
    call("ingest", "scan", tmp_path / "photos", "--model", own, *SMALL).fails(said)


@pytest.mark.parametrize(
    ("named", "architecture"), [("Qwen3Model", "Qwen3ForCausalLM"), ("T5EncoderModel", "T5ForConditionalGeneration")]
)
def test_an_index_may_name_the_class_of_an_encoder_without_its_head(named: str, architecture: str, own: Path) -> None:
    edit_json(own / "text_encoder" / "config.json", architectures=[architecture])
    index = {**INDEX, "text_encoder": ["transformers", named], "text_encoder_2": [None, None]}
    (own / "model_index.json").write_text(json.dumps(index), encoding="ascii")
    assert open_model(str(own)).path == own


@pytest.mark.parametrize(
    ("part", "kept", "lacks"),
    [
        ("vae", "diffusion_pytorch_model.safetensors", "no config.json; it has diffusion_pytorch_model.safetensors"),
        ("text_encoder", "model.safetensors", "no config.json; it has model.safetensors"),
        ("tokenizer", "nothing", "no tokenizer_config.json; it has no file"),
        ("tokenizer", "tokenizer.json", "no tokenizer_config.json; it has tokenizer.json"),
        (
            "tokenizer",
            "tokenizer_config.json",
            "no vocabulary (tokenizer.json, vocab.json, vocab.txt, or a .model file); it has tokenizer_config.json",
        ),
    ],
)
def test_a_part_that_lacks_its_configuration_or_vocabulary_says_so(part: str, kept: str, lacks: str, own: Path) -> None:
    for file in (own / part).iterdir():
        if file.name != kept:
            file.unlink()
    assert f"{part}/ has {lacks}; " in refused(own)


def test_weights_that_a_hub_has_are_there_before_they_are_downloaded(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}", encoding="ascii")
    names = ("vae/config.json", "vae/diffusion_pytorch_model.fp16.safetensors")
    assert ModelFolder(name="owner/model", path=tmp_path, hub_files=names).has_weights("vae")
    assert not ModelFolder(name="owner/model", path=tmp_path, hub_files=names[:1]).has_weights("vae")
    assert not ModelFolder(name=str(tmp_path), path=tmp_path).has_weights("vae")
    unreached = ModelFolder(name="owner/model", path=tmp_path, is_unreached=True)
    with pytest.raises(ModelError, match=r"owner/model: the weights of vae/ are not in the hub's cache, and the hub could not"):
        unreached.has_weights("vae")
    (tmp_path / "vae/diffusion_pytorch_model.fp16.safetensors").touch()
    assert unreached.has_weights("vae")
