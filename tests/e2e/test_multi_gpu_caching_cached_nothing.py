"""The failure: `not_local: 2392, cached: 0, total: 2392`; each of several ranks left every image to another.

Here each rank packs its own slice into a shard of its own, and found = packed + unchanged + rejected is checked over all.
"""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from bucketline.errors import AccountError
from bucketline.ingest.parallel.items import ItemParts, Share, rank_of
from bucketline.ingest.summary import RunSummary, check_identity, joined_summaries
from bucketline.store import Store
from bucketline.store.format.block import sample_digest
from bucketline.store.shard.reader import as_keys
from tests.commands import call, forked_ranks
from tests.fault.same_store import compare
from tests.kit import by_id, tree
from tests.models import SMALL, png, write_images


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of forking while threads run
def test_two_ranks_pack_every_image_exactly_once_and_what_one_rank_packs(tmp_path: Path, model: Path) -> None:
    photos = tmp_path / "photos"
    ids = write_images(photos, 40)
    (photos / "broken.png").write_bytes(b"no image")
    packed = [photos, "--model", model, *SMALL, "--val-fraction", "0.2", "--json"]
    both = forked_ranks(2, "ingest", "pack", packed[0], tmp_path / "two", *packed[1:]).done()
    assert (both.json["found"], both.json["packed"], both.json["unchanged"], both.json["rejected"]) == (41, 40, 0, 1)
    two = Store.open(tmp_path / "two")
    assert sorted(by_id(two)) == ids
    per_rank = {shard.name: shard.entry.samples for shard in two.shards}
    assert len(per_rank) == 2
    assert min(per_rank.values()) > 5

    one = call("ingest", "pack", packed[0], tmp_path / "one", *packed[1:]).done()
    counts = ("found", "packed", "unchanged", "rejected", "rejected_by_reason", "without_caption", "crop_loss")
    assert {name: both.json[name] for name in counts} == {name: one.json[name] for name in counts}
    compared = compare(tmp_path / "two", tmp_path / "one")
    assert (compared.samples, compared.faults) == (40, [])

    again = call("ingest", "pack", packed[0], tmp_path / "two", *packed[1:])  # with another number of ranks
    assert (again.json["packed"], again.json["unchanged"], again.json["rejected"]) == (0, 40, 1)
    assert by_id(Store.open(tmp_path / "two")) == by_id(two)


def test_ranks_that_leave_every_image_to_another_end_in_an_error_and_publish_nothing(
    source: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: images are shared out, and none comes to a rank."""
    monkeypatch.setattr(ItemParts, "append", lambda *_: None)
    ran = call("ingest", "pack", source, tmp_path / "s", "--model", model, *SMALL, "--json").fails(
        "14 images found, 0 packed + 0 unchanged + 0 rejected + 0 withdrawn = 0; nothing was published"
    )
    assert ran.out == ""
    assert Store.open(tmp_path / "s").manifest.generation == 0
    assert not [name for name in tree(tmp_path / "s" / "shards") if name.endswith(".lmdb")]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_image_belongs_to_exactly_one_rank_and_no_rank_is_left_without(world_size: int) -> None:
    digests = [sample_digest(f"photo {n}.png") for n in range(2392)]
    ranks = [rank_of(digest, world_size) for digest in digests]
    shares = [ranks.count(rank) for rank in range(world_size)]
    assert sum(shares) == 2392
    assert min(shares) > 2392 / world_size * 0.8
    for rank in range(world_size):
        assert Share(rank=rank, world_size=world_size).of(as_keys(digests)).tolist() == [own == rank for own in ranks]


@pytest.mark.parametrize("counts", [(0, 0), (2391, 0), (2392, 1), (1200, 1191)])
def test_an_account_that_does_not_add_up_is_an_error_that_names_the_numbers(counts: tuple[int, int]) -> None:
    whole = joined_summaries([RunSummary(packed=counts[0]), RunSummary(unchanged=counts[1])])
    with pytest.raises(AccountError, match=rf"2392 images found, {counts[0]} packed \+ {counts[1]} unchanged"):
        check_identity(2392, whole)


@pytest.mark.slow
def test_two_ranks_pack_each_split_where_it_belongs(tmp_path: Path, model: Path) -> None:
    datasets.disable_progress_bars()
    features = datasets.Features({"image": datasets.Image(), "prompt": datasets.Value("string")})
    parts = {}
    for name, count in (("train", 8), ("validation", 8), ("test", 4)):
        rows = {"image": [{"bytes": png(20, 30, n), "path": f"{n}.png"} for n in range(count)], "prompt": ["a cat"] * count}
        parts[name] = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    asked = (tmp_path / "d", tmp_path / "s", "--model", model, *SMALL, "--json")
    ran = forked_ranks(2, "ingest", "pack", *asked).done()
    assert (ran.json["packed"], ran.json["captions_from"]) == (16, {"column prompt": 16})
    store = Store.open(tmp_path / "s")
    assert len(store.shards) == 2
    assert {split: sum(bucket.num_rows for bucket in store.buckets(split)) for split in ("train", "val")} == {
        "train": 8,
        "val": 8,
    }
