"""The order of a seed, as literal values: a run of last year continues in the same order today, on any machine.

A change that makes one of these fail changes every order: it needs another PLAN_VERSION, and breaks each saved state.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from bucketline.loader.config import Remainder, Shuffle
from bucketline.loader.plan.lanes import ShardRuns
from bucketline.loader.plan.plan import PLAN_VERSION, Plan, PlanBucket

SIZES = [1, 2, 7, 255, 256, 257, 65_535, 65_536, 65_537, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 10**6, 10**12, (1 << 40) + 1]
STEPS = [0, 1, 1_000_003, 10**11]


def plan_of(shuffle: Shuffle, remainder: Remainder, *sizes: int, seed: int = 2026) -> Plan:
    buckets = tuple(PlanBucket(name=f"train/{64 * (k + 1)}x64", num_rows=n, global_batch=4) for k, n in enumerate(sizes))
    window = 4096 if shuffle is Shuffle.LINES else 64
    runs = tuple(map(in_shards, sizes))
    return Plan(
        seed=seed,
        remainder=remainder,
        buckets=buckets,
        source="s:1:d",
        shuffle=shuffle,
        shuffle_window=window,
        lanes=2,
        runs=runs,
    )


def in_shards(n: int) -> ShardRuns:
    """Return 40 shards, each some rows longer than the one before it, as far as the rows suffice."""
    ends = np.unique(np.arange(1, 41) ** 2 * n // 1600)
    held = np.diff(ends, prepend=0)
    shard = np.flatnonzero(held)
    return ShardRuns(shard=shard, repeat=np.zeros_like(shard), num_rows=held[shard])


def rows_at(shuffle: Shuffle, n: int) -> list[list[int]]:
    plan = plan_of(shuffle, Remainder.CARRY, n)
    return [plan.at(step).rows.tolist() for step in STEPS]


def digest_of(shuffle: Shuffle, remainder: Remainder) -> str:
    """Return a digest of thousands of rows: 600 steps from several places on, over buckets of all kinds of sizes."""
    plan = plan_of(shuffle, remainder, *SIZES[2:])
    found = hashlib.blake2b(digest_size=16)
    for first in (0, 10**6, 10**10, 3 * 10**11):
        for planned in plan.draw([(first + k, 0) for k in range(150)]):
            found.update(f"{planned.epoch} {planned.bucket} {planned.rows.tolist()} {planned.weight.tolist()};".encode())
    return found.hexdigest()


@pytest.mark.parametrize("n", SIZES)
def test_the_rows_of_a_seed_never_change(n: int) -> None:
    assert rows_at(Shuffle.FULL, n) == FULL[n]


@pytest.mark.parametrize("n", SIZES)
def test_the_rows_of_a_seed_in_blocks_never_change(n: int) -> None:
    assert rows_at(Shuffle.BLOCKS, n) == BLOCKS[n]


@pytest.mark.parametrize("n", SIZES)
def test_the_rows_of_a_seed_by_lines_never_change(n: int) -> None:
    assert rows_at(Shuffle.LINES, n) == LINES[n]


@pytest.mark.parametrize("shuffle", Shuffle)
@pytest.mark.parametrize("remainder", Remainder)
def test_steps_buckets_rows_and_weights_of_a_seed_never_change(shuffle: Shuffle, remainder: Remainder) -> None:
    assert digest_of(shuffle, remainder) == DIGESTS[shuffle, remainder]


def test_the_digest_of_a_plan_never_changes() -> None:
    assert PLAN_VERSION == 2
    assert [plan_of(shuffle, Remainder.CARRY, 7, 3).digest for shuffle in Shuffle] == PLAN_DIGESTS


FULL = {
    1: [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    2: [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]],
    7: [[0, 6, 5, 4], [2, 1, 3, 0], [4, 1, 5, 1], [0, 2, 3, 5]],
    255: [[234, 42, 60, 18], [48, 118, 184, 231], [166, 19, 15, 134], [15, 132, 189, 181]],
    256: [[234, 42, 60, 18], [53, 48, 118, 184], [145, 86, 198, 122], [39, 86, 73, 221]],
    257: [[234, 42, 60, 18], [53, 48, 118, 184], [162, 86, 98, 197], [219, 67, 236, 47]],
    65535: [
        [23478, 14317, 16092, 17842],
        [16362, 21709, 26012, 44658],
        [37382, 47662, 35684, 34969],
        [54666, 62280, 56595, 12569],
    ],
    65536: [
        [21804, 23478, 14317, 16092],
        [17331, 16362, 21709, 26012],
        [18891, 12684, 54559, 35189],
        [40780, 59938, 4091, 55756],
    ],
    65537: [
        [19174, 37402, 44423, 22246],
        [42931, 37340, 63471, 30277],
        [51131, 53761, 28782, 42367],
        [16029, 32922, 832, 39609],
    ],
    131071: [
        [36123, 14506, 22436, 29257],
        [117357, 120216, 55312, 64239],
        [89953, 61306, 120083, 52254],
        [67458, 15315, 104700, 9513],
    ],
    131072: [
        [36123, 14506, 22436, 29257],
        [117357, 120216, 55312, 64239],
        [11619, 117934, 98223, 53809],
        [94098, 7993, 8540, 1974],
    ],
    131073: [
        [36123, 14506, 22436, 29257],
        [117357, 120216, 55312, 64239],
        [720, 40894, 75206, 20004],
        [69439, 80413, 60710, 62714],
    ],
    1000000: [
        [318219, 774598, 811097, 495732],
        [129488, 574061, 535460, 577677],
        [379197, 139015, 932612, 899682],
        [964954, 181966, 592256, 184766],
    ],
    1000000000000: [
        [658243320899, 449969468054, 882005753855, 773899923125],
        [128502425192, 750616914060, 188325719892, 412999450776],
        [158333503078, 856153982381, 468417601514, 819391859452],
        [374595738003, 296553416647, 11041126158, 250652801400],
    ],
    1099511627777: [
        [428472036782, 1071378706376, 572589768139, 871739032599],
        [131537619712, 391015211379, 659964013234, 928173480309],
        [757107709402, 155326829662, 206379669948, 8136383291],
        [929452740025, 29876503260, 99471522243, 466635749963],
    ],
}
BLOCKS = {
    1: [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    2: [[0, 1, 0, 1], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]],
    7: [[1, 4, 3, 2], [6, 0, 5, 0], [1, 6, 5, 0], [4, 2, 0, 3]],
    255: [[193, 53, 40, 82], [46, 205, 54, 155], [244, 123, 16, 190], [101, 46, 213, 176]],
    256: [[52, 76, 40, 82], [46, 205, 77, 155], [231, 22, 229, 238], [215, 39, 197, 208]],
    257: [[195, 55, 40, 82], [46, 205, 76, 155], [140, 120, 154, 216], [48, 122, 243, 208]],
    65535: [
        [10084, 41876, 8524, 47402],
        [45030, 4573, 41877, 39915],
        [26510, 39683, 61440, 47257],
        [38651, 12736, 48817, 27281],
    ],
    65536: [[10084, 41876, 8524, 47402], [45030, 4573, 41877, 39915], [26661, 59834, 42031, 4618], [15819, 51743, 2125, 14357]],
    65537: [
        [10084, 41876, 8524, 47402],
        [45030, 4573, 41877, 39915],
        [44273, 60853, 15961, 60619],
        [33273, 45641, 15051, 3368],
    ],
    131071: [
        [123492, 4572, 45028, 102998],
        [60742, 103861, 4573, 124735],
        [15547, 59698, 37430, 34146],
        [71650, 71651, 48558, 51854],
    ],
    131072: [
        [123492, 4572, 45028, 102998],
        [60742, 103861, 4573, 124735],
        [19406, 126779, 70540, 33248],
        [110714, 46051, 50736, 12324],
    ],
    131073: [
        [123492, 4572, 45028, 102998],
        [60742, 103861, 4573, 124735],
        [59323, 52941, 26665, 115657],
        [54319, 88518, 44672, 79095],
    ],
    1000000: [
        [345532, 723916, 989392, 83834],
        [674182, 864165, 723917, 897139],
        [522964, 543467, 543464, 768163],
        [691377, 367595, 589204, 367594],
    ],
    1000000000000: [
        [904680167000, 871461033932, 202581903016, 905429050382],
        [932411424038, 649381323465, 871461033933, 798906495019],
        [993291091847, 675197617324, 479422242317, 916645383454],
        [659263994105, 752644638818, 280896250144, 954965990816],
    ],
    1099511627777: [
        [910549126736, 849254372996, 668877421372, 158405812190],
        [921827555578, 255103070493, 849254372997, 1007965904779],
        [655602002459, 550903377360, 1089488152581, 677775100718],
        [107557725329, 408803360990, 69980203428, 387172813464],
    ],
}
LINES = {
    1: [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    2: [[1, 0, 0, 1], [1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1]],
    7: [[6, 2, 0, 4], [3, 5, 1, 1], [3, 6, 4, 1], [2, 2, 1, 4]],
    255: [[252, 56, 203, 66], [42, 82, 29, 97], [20, 44, 237, 66], [22, 41, 206, 233]],
    256: [[252, 55, 205, 69], [43, 83, 30, 221], [102, 15, 215, 198], [77, 164, 121, 214]],
    257: [[255, 23, 206, 67], [44, 47, 30, 99], [138, 76, 99, 92], [253, 76, 192, 200]],
    65535: [
        [62360, 18167, 42012, 34516],
        [32245, 62601, 44692, 50478],
        [4978, 7028, 53247, 27906],
        [61648, 11653, 27323, 23286],
    ],
    65536: [
        [62362, 18167, 42012, 34516],
        [32245, 62603, 44692, 50478],
        [30128, 23771, 44744, 53113],
        [24899, 14248, 28974, 29296],
    ],
    65537: [
        [62598, 29935, 42013, 34517],
        [32274, 8042, 44694, 50479],
        [62611, 10558, 44747, 53337],
        [3699, 30976, 43330, 35747],
    ],
    131071: [
        [124661, 36231, 83955, 68964],
        [64357, 124902, 89298, 100654],
        [81490, 81623, 86835, 86628],
        [64646, 6791, 84280, 11960],
    ],
    131072: [
        [124662, 36230, 83955, 68963],
        [64358, 124903, 89297, 100654],
        [28244, 66706, 31236, 92056],
        [129517, 1942, 104944, 117143],
    ],
    131073: [
        [124785, 21034, 83955, 68964],
        [64373, 13845, 89298, 100654],
        [25112, 128014, 103273, 97449],
        [4629, 28191, 71502, 553],
    ],
    1000000: [
        [950701, 275750, 640084, 525712],
        [490134, 950942, 680732, 765933],
        [455826, 140668, 722610, 67500],
        [902561, 30642, 525757, 422766],
    ],
    1000000000000: [
        [950625000062, 275625000106, 640000000069, 525625000069],
        [490000000133, 950625000303, 680625000087, 765625000302],
        [950625197406, 122500072602, 855625187630, 640000162512],
        [970375000181, 616375000049, 403375000148, 656250000115],
    ],
    1099511627777: [
        [1045223241217, 303052892512, 703687441846, 577930799419],
        [538760697743, 1045223241458, 748355101742, 841813590318],
        [1045223438561, 134690247004, 940769824146, 703687604289],
        [184171860518, 1064973241215, 375276032166, 959519636559],
    ],
}
DIGESTS = {
    (Shuffle.FULL, Remainder.CARRY): "fa75f8e9550db1e9949f54de832fdc3b",
    (Shuffle.BLOCKS, Remainder.CARRY): "7b9bf285801d9e2cd500b1f3fe9deaf0",
    (Shuffle.LINES, Remainder.CARRY): "29f9c712c5f4006574ae403da70d3ab9",
    (Shuffle.NONE, Remainder.CARRY): "c1c846af7aa415c38af425ac4472f528",
    (Shuffle.FULL, Remainder.DROP): "fa75f8e9550db1e9949f54de832fdc3b",
    (Shuffle.BLOCKS, Remainder.DROP): "7b9bf285801d9e2cd500b1f3fe9deaf0",
    (Shuffle.LINES, Remainder.DROP): "29f9c712c5f4006574ae403da70d3ab9",
    (Shuffle.NONE, Remainder.DROP): "c1c846af7aa415c38af425ac4472f528",
    (Shuffle.FULL, Remainder.PARTIAL): "9d9186ae5dc54c502826517c2c287ba4",
    (Shuffle.BLOCKS, Remainder.PARTIAL): "149e682f39e2a08d30c5fe8fad614f5f",
    (Shuffle.LINES, Remainder.PARTIAL): "10173793d028f99dc3640f89ef96aefc",
    (Shuffle.NONE, Remainder.PARTIAL): "a21ee446b9a142f5bee79e1db977beba",
}
PLAN_DIGESTS = [
    "7c1258f771a2acb63b87bcf60e177ce6",
    "e34bac638e8c76d660280f906c615219",
    "97d91db4cfd801863f3b8e389ca645d0",
    "f33597b60221766d275f240e8087fe04",
]
