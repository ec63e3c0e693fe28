"""The words at the top of `store report`: each seeded fault is named with its number, and a good store has none."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from bucketline.pages.page import Finding
from bucketline.store import Store
from bucketline.store.report import collect as collect_module
from bucketline.store.report.collect import collect_facts, collect_lists
from bucketline.store.report.findings import findings
from bucketline.store.report.latents import check_latents, near_duplicates, vae_of
from tests.unit.store.report.conftest import CONSTANT, DUPLICATES, NAME, NAN_ROW, ROWS


def found_in(store: Store, most: int = 1000) -> list[Finding]:
    return findings(
        facts=collect_facts(store, 4),
        lists=collect_lists(store),
        latents=check_latents(store, most),
        vae=vae_of(store),
    )


def wrong(store: Store) -> list[Finding]:
    return [one for one in found_in(store) if one.level != "good"]


def test_a_good_store_has_no_finding(store_with: Callable[..., Store]) -> None:
    assert not wrong(store_with())
    assert {one.title for one in found_in(store_with())} == {
        "No NaN",
        "The latents' spread fits their VAE",
        "No near-duplicates",
        "Little is cropped away",
    }


def test_constant_latents_are_counted(store_with: Callable[..., Store]) -> None:
    (only,) = wrong(store_with("constant"))
    assert only.title == f"{CONSTANT} constant latents"
    places = check_latents(store_with("constant"), 1000).constant
    assert [place.row for place in places] == list(range(CONSTANT))


def test_near_duplicates_are_one_cluster(store_with: Callable[..., Store]) -> None:
    (only,) = wrong(store_with("duplicates"))
    assert only.title == f"{DUPLICATES} near-duplicates in 1 cluster"
    (cluster,) = check_latents(store_with("duplicates"), 1000).clusters
    assert [place.row for place in cluster] == list(range(CONSTANT + 1, CONSTANT + 1 + DUPLICATES))


def test_a_bucket_that_loses_much_is_named(store_with: Callable[..., Store]) -> None:
    (only,) = wrong(store_with("crops"))
    assert only.title == "train/192x320 loses 60 % of its images to cropping"
    assert "30 images" in only.detail


def test_a_latent_with_nan_is_an_error(store_with: Callable[..., Store]) -> None:
    (only,) = wrong(store_with("nan"))
    assert (only.level, only.title) == ("error", "1 latent with NaN or infinity")
    assert [place.row for place in check_latents(store_with("nan"), 1000).not_finite] == [NAN_ROW]


@pytest.mark.parametrize(("factor", "level"), [(0.13025, "warning"), (0.45, "error"), (0.05, "error")])
def test_a_wrong_scaling_factor_is_named_with_the_one_that_fits(
    store_with: Callable[..., Store], factor: float, level: str
) -> None:
    (only,) = wrong(store_with(scaling_factor=factor))
    assert only.level == level
    assert f"recorded scaling factor {factor:g}" in only.detail
    assert "that of Stable Diffusion 1 and 2 is near" in only.detail
    assert "scaled twice" not in only.detail


def test_what_was_encoded_here_is_not_judged_by_a_factor(store_with: Callable[..., Store]) -> None:
    assert not wrong(store_with("encoded here", scaling_factor=0.45))


def test_a_few_latents_are_not_judged_by_a_factor(store_with: Callable[..., Store]) -> None:
    store = store_with(scaling_factor=0.45)
    assert not [one.title for one in found_in(store, 99) if one.level != "good"]
    assert [one.title for one in wrong(store)] == ["Wrong scaling factor, or a broken VAE"]


def test_latents_that_were_scaled_before_they_were_stored_are_recognised(store_with: Callable[..., Store]) -> None:
    faults = [one for one in wrong(store_with("scaled before")) if one.level == "error"]
    assert [one.title for one in faults] == ["Wrong scaling factor, or a broken VAE"]
    assert "would be scaled twice" in faults[0].detail


def test_all_faults_together_are_all_named(store_with: Callable[..., Store]) -> None:
    titles = " | ".join(one.title for one in wrong(store_with("constant", "duplicates", "crops", scaling_factor=0.45)))
    for part in ("Wrong scaling factor", "5 constant latents", "10 near-duplicates in 1 cluster", "train/192x320 loses 60 %"):
        assert part in titles


def test_a_drawn_part_says_that_it_is_one(store_with: Callable[..., Store]) -> None:
    total = sum(ROWS.values())
    facts = check_latents(store_with(), 20)
    assert (facts.live, facts.read) == (total, 20)
    assert any(f"20 latents read (drawn from {total})" in one.detail for one in found_in(store_with(), 20))
    assert (check_latents(store_with(), 20).std == facts.std).all()


def test_rejects_and_cut_captions_are_findings(store_with: Callable[..., Store]) -> None:
    store = store_with("crops", "nan")
    lines = [{"id": f"{n}.png", "reason": "empty file", "detail": "0 bytes"} for n in range(9)]
    (store.path / "rejects.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines) + "{broken\n", encoding="ascii"
    )
    cut = {"id": NAME.format(1), "encoder": "text_encoder", "tokens": 90, "limit": 77, "cut": "the rest"}
    (store.path / "long_captions.jsonl").write_text(json.dumps(cut) + "\n", encoding="ascii")
    by_title = {one.title: one.detail for one in wrong(store)}
    assert by_title["9 images rejected"] == "8.1 % of the images found: 9 empty file."
    assert by_title["1 caption cut by a text encoder"].startswith("text_encoder: 1.")


def test_a_chain_of_alike_latents_is_one_cluster_and_thousands_of_copies_are_found_quickly() -> None:
    random = np.random.default_rng(0)
    turns = np.arange(30) * 0.1  # each is 0.1 rad from the next: a cosine of 0.995; its ends are not alike
    chain = np.stack([np.cos(turns), np.sin(turns)], axis=1) @ np.linalg.qr(random.normal(size=(256, 2)))[0].T
    others = random.normal(size=(40, 256)) / 16
    found = near_duplicates(np.concatenate([others, chain, -chain]).astype(np.float32))
    assert found == [list(range(40, 70)), list(range(70, 100))]
    copies = np.concatenate([np.repeat(others[:2], 1500, axis=0), -others[:2].repeat(700, axis=0)]).astype(np.float32)
    assert [len(cluster) for cluster in near_duplicates(copies)] == [1500, 1500, 700, 700]


def test_frequent_words_stay_when_rare_ones_make_room(
    store_with: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = collect_facts(store_with(), 1).words
    assert counted.most_common(1) == [("b", 2 * sum(ROWS.values()))]  # twice in each caption
    assert len(counted) > 4
    monkeypatch.setattr(collect_module, "MAX_WORDS", 4)
    few = collect_facts(store_with(), 1).words
    assert few["b"] == counted["b"]
    assert len(few) <= 4
