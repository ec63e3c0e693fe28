"""The log of a long run: lines that say how far it is and what holds it up, and none of a short one."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from bucketline.ingest import progress
from bucketline.ingest.encoders.model_folder import open_model
from bucketline.ingest.encoders.text_columns import TextSettings, text_spec
from bucketline.ingest.encoders.text_encoders import TextEncoder, load_caption_encoder
from bucketline.ingest.images.crop import CropLoss
from bucketline.ingest.images.decode import Reason, RejectedError
from bucketline.ingest.parallel.ranks import PackRanks
from bucketline.ingest.parallel.signals import Interrupts
from bucketline.ingest.pipeline.pool import DECODE, ENCODE, WRITE, StageTimer, slowest_of
from bucketline.ingest.summary import RunSummary, by_reason, check_identity, joined_summaries, rejects_as_lines
from bucketline.store import Store
from bucketline.store.format.text import dequantise, quantise
from bucketline.typed_json import encode
from tests.commands import call
from tests.models import SMALL, in_file, pack, write_model


def test_a_log_has_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stages = StageTimer(on_shared_cores=lambda: False)
    stages.add(ENCODE, 1.0)
    stages.add(DECODE, 0.5)
    ranks = PackRanks(rank=0, world_size=2, interrupts=Interrupts())
    with progress.packing_progress(10, ranks.title, lambda: f"bottleneck: {stages.slowest}") as on_image:
        on_image()
        monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
        on_image()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pack (rank 0 of 2): 2 of 10, ")
    assert "images/s" in err
    assert err.endswith("min left, bottleneck: decode\n")


def test_a_terminal_that_takes_no_bar_has_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.counting_progress("scan", 2) as on_image:
        on_image()
    assert stderr.getvalue().startswith("scan: 1 of 2, ")


def test_a_short_run_leaves_no_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.counting_progress("scan", 2) as on_image:
        on_image()
        on_image()
    assert capsys.readouterr() == ("", "")


def test_only_the_first_rank_reports(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    ranks = PackRanks(rank=1, world_size=2, interrupts=Interrupts())
    with progress.packing_progress(10, ranks.title) as on_image:
        on_image()
    assert capsys.readouterr() == ("", "")


def test_the_slowest_stage_is_the_one_that_is_waited_for() -> None:
    waits = {DECODE: 0.0, ENCODE: 10.0, WRITE: 2.0}
    assert slowest_of(waits, on_shared_cores=False) == WRITE
    assert slowest_of(waits, on_shared_cores=True) == ENCODE
    assert slowest_of({DECODE: 11.0, ENCODE: 10.0}, on_shared_cores=True) == DECODE
    assert slowest_of({}, on_shared_cores=False) == ENCODE


def test_what_is_long_ago_is_forgotten() -> None:
    stages = StageTimer(on_shared_cores=lambda: False)
    stages.add(DECODE, 8.0)
    for _ in range(100):
        stages.add(ENCODE, 1.0)
    assert stages.slowest == ENCODE
    assert stages.seconds == {DECODE: 8.0, ENCODE: 100.0, WRITE: 0.0}


def test_accounts_of_several_ranks_are_added_up_in_every_part() -> None:
    one = RunSummary(packed=3, unchanged=1, without_caption=2, enlarged=1, captions_beyond=["a"])
    other = RunSummary(packed=1, unchanged=5, without_caption=1, enlarged=3, captions_beyond=["b"], dropped=["c"])
    other.reject("z.png", RejectedError(Reason.EMPTY, "0 bytes"))
    one.reject("é\n.png", RejectedError(Reason.TOO_SMALL, "1x1"))
    one.reject("a.png", RejectedError(Reason.EMPTY, "0 bytes"))
    for account, bucket, lost in ((one, "a", 0.0), (one, "a", 0.25), (other, "a", 0.5), (other, "b", 0.25)):
        account.crop_losses[bucket] = account.crop_losses.get(bucket, CropLoss()) + CropLoss(images=1, total=lost, most=lost)
    whole = joined_summaries([one, other])
    assert whole.total == 3 + 1 + 1 + 5 + 3
    assert (whole.without_caption, whole.enlarged) == (3, 4)
    assert (whole.captions_beyond, whole.dropped) == (["a", "b"], ["c"])
    check_identity(13, whole)
    assert whole.crop_losses == {"a": CropLoss(images=3, total=0.75, most=0.5), "b": CropLoss(images=1, total=0.25, most=0.25)}
    assert by_reason(whole) == {"empty file": 2, "too small": 1}
    lines = [json.loads(line) for line in rejects_as_lines(whole).splitlines()]
    assert [line["id"] for line in lines] == ["a.png", "z.png", "é\n.png"]
    assert set(lines[0]) == {"id", "reason", "detail"}


# `ingest pack --text-dtype`: tokens quantised or in another dtype than the latents.


CPU = torch.device("cpu")


def captions(store: Store) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield each sample's captions with their tokens as they are delivered."""
    for bucket in store.buckets():
        for sample_id in bucket.sample_ids(np.arange(bucket.num_rows)):
            shard, record = store.sample(sample_id)
            for text, row in zip(record.captions or ("",), record.caption_rows, strict=True):
                yield text, store.read_caption(store.shards.index(shard), row)["tokens"]


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_tokens_are_quantised_from_what_the_encoder_computed(source: Path, tmp_path: Path, model: Path, dtype: str) -> None:
    done = pack(source, tmp_path / "s", model, "--text-dtype", dtype).json
    store = Store.open(tmp_path / "s")
    said = store.encoders["text_encoder"]
    assert isinstance(said, dict)
    assert (said["stored_dtype"], said["dtype"]) == (dtype, "F32")
    assert {column.dtype for bucket in store.buckets() for column in bucket.columns if column.name == "latent"} == {"F16"}
    text = TextEncoder(open_model(str(model)), CPU, TextSettings(stored_dtype="F32"))
    found = list(captions(store))
    assert len({caption for caption, _ in found}) > 3
    for caption, tokens in found[:12]:
        computed = text.encode([caption])[0].tokens.numpy()
        assert np.abs(tokens - dequantise(quantise(computed, dtype))).max() < 0.02  # a batch is computed in another order
    error = store.manifest.text_error
    assert error is not None
    assert 0 < error.relative_mean < 0.05
    assert done["text_error"] == encode(error)
    again = pack(source, tmp_path / "s", model, "--text-dtype", dtype).json
    assert (again["packed"], again["unchanged"]) == (0, done["packed"])


def test_captions_of_two_phases_have_the_error_of_when_they_were_encoded(source: Path, tmp_path: Path, model: Path) -> None:
    one, two = (
        pack(in_file(tmp_path / "d.toml", source, phases=n), tmp_path / n, model, "--text-dtype", "I8").json["text_error"]
        for n in ("one", "two")
    )
    assert one == two
    assert one["captions"] > 3


def test_tokens_may_have_another_dtype_than_latents(source: Path, tmp_path: Path, model: Path) -> None:
    pack(source, tmp_path / "s", model, "--text-dtype", "BF16").done()
    store = Store.open(tmp_path / "s")
    assert [(column.name, column.dtype) for column in store.text.tokens] == [("tokens", "BF16")]
    assert store.buckets()[0].spec.column("latent").dtype == "F16"


def test_new_captions_of_a_quantised_store_are_quantised_too(source: Path, tmp_path: Path, model: Path) -> None:
    pack(source, tmp_path / "s", model, "--text-dtype", "I8").done()
    done = pack(source, tmp_path / "s", model, "--text-dtype", "I8", "--caption-template", "red", "--recaption").json
    assert done["latents_kept"] == done["packed"] > 0
    store = Store.open(tmp_path / "s")
    assert {text[:3] for text, _ in captions(store)} == {"red"}
    assert call("store", "verify", tmp_path / "s").code == 0


def test_pooled_embeddings_stay_in_16_bits() -> None:
    for dtype, pooled in (("I8", "F16"), ("F8_E4M3", "F16"), ("BF16", "BF16"), ("F32", "F32")):
        fixed = {column.name: column.dtype for column in text_spec(dtype, 64, {"pooled": 5}).fixed}
        assert fixed["pooled"] == pooled
        assert set(fixed) == {"pooled"}


@pytest.fixture(scope="module")
def loud_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose tokens are beyond the range of F16, though not of F32."""
    folder = write_model(tmp_path_factory.mktemp("loud"))
    (path,) = (folder / "text_encoder").glob("*.safetensors")
    weights = load_file(path)
    (name,) = (name for name in weights if name.endswith("layer.0.output.LayerNorm.weight"))
    save_file({**weights, name: weights[name] * 1e7}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_tokens_beyond_the_range_are_refused_with_a_remedy(loud_model: Path, source: Path, tmp_path: Path, dtype: str) -> None:
    call("ingest", "pack", source, tmp_path / "s", "--model", loud_model, *SMALL, "--text-dtype", dtype).fails(
        f"the empty caption's tokens are not finite as {dtype}", "Try --text-dtype bf16 or fp32"
    )
    loaded = load_caption_encoder(open_model(str(loud_model)), CPU, TextSettings(stored_dtype="BF16"))
    assert loaded.encode(["a red cat"])[0].is_finite
