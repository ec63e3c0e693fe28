"""The order of a seed, as literal values: a run of last year continues in the same order today, on any machine.

A change that makes one of these fail changes every order: it needs another PLAN_VERSION, and breaks each saved state.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from bucketline.loader.config import Remainder
from bucketline.loader.plan.lanes import ShardRuns
from bucketline.loader.plan.plan import PLAN_VERSION, Plan, PlanBucket

SIZES = [1, 2, 7, 255, 256, 257, 65_535, 65_536, 65_537, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 10**6, 10**12, (1 << 40) + 1]
STEPS = [0, 1, 1_000_003, 10**11]


def plan_of(window: int | None, remainder: Remainder, *sizes: int, seed: int = 2026) -> Plan:
    buckets = tuple(PlanBucket(name=f"train/{64 * (k + 1)}x64", num_rows=n, global_batch=4) for k, n in enumerate(sizes))
    runs = tuple(map(in_shards, sizes))
    return Plan(
        seed=seed,
        remainder=remainder,
        buckets=buckets,
        source="s:1:d",
        window=window,
        lanes=2,
        runs=runs,
    )


def in_shards(n: int) -> ShardRuns:
    """Return 40 shards, each some rows longer than the one before it, as far as the rows suffice."""
    ends = np.unique(np.arange(1, 41) ** 2 * n // 1600)
    held = np.diff(ends, prepend=0)
    shard = np.flatnonzero(held)
    return ShardRuns(shard=shard, repeat=np.zeros_like(shard), num_rows=held[shard])


def rows_at(window: int | None, n: int) -> list[list[int]]:
    plan = plan_of(window, Remainder.CARRY, n)
    return [plan.at(step).rows.tolist() for step in STEPS]


def digest_of(window: int | None, remainder: Remainder) -> str:
    """Return a digest of thousands of rows: 600 steps from several places on, over buckets of all kinds of sizes."""
    plan = plan_of(window, remainder, *SIZES[2:])
    found = hashlib.blake2b(digest_size=16)
    for first in (0, 10**6, 10**10, 3 * 10**11):
        for planned in plan.draw([(first + k, 0) for k in range(150)]):
            found.update(f"{planned.epoch} {planned.bucket} {planned.rows.tolist()} {planned.weight.tolist()};".encode())
    return found.hexdigest()


@pytest.mark.parametrize("n", SIZES)
def test_the_rows_of_a_seed_never_change(n: int) -> None:
    assert rows_at(None, n) == SHUFFLED[n]


@pytest.mark.parametrize("n", SIZES)
def test_the_rows_of_a_seed_in_windows_never_change(n: int) -> None:
    assert rows_at(4096, n) == IN_WINDOWS[n]


@pytest.mark.parametrize("window", [None, 4096, 0])
@pytest.mark.parametrize("remainder", Remainder)
def test_steps_buckets_rows_and_weights_of_a_seed_never_change(window: int | None, remainder: Remainder) -> None:
    assert digest_of(window, remainder) == DIGESTS[window, remainder]


def test_the_digest_of_a_plan_never_changes() -> None:
    assert PLAN_VERSION == 1
    plans = [plan_of(window, Remainder.CARRY, 7, 3) for window in (None, 4096, 0)]
    assert [plan.digest for plan in plans] == PLAN_DIGESTS


SHUFFLED = {
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
IN_WINDOWS = {
    1: [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    2: [[1, 0, 0, 1], [1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1]],
    7: [[3, 6, 1, 0], [2, 5, 4, 1], [3, 6, 0, 4], [3, 3, 0, 1]],
    255: [[39, 222, 153, 148], [103, 137, 217, 209], [89, 51, 240, 0], [72, 34, 193, 236]],
    256: [[38, 143, 153, 148], [104, 136, 218, 210], [46, 42, 226, 192], [34, 70, 185, 112]],
    257: [[12, 35, 242, 230], [104, 137, 218, 210], [85, 4, 242, 67], [2, 75, 197, 179]],
    65535: [
        [63562, 11133, 44048, 34892],
        [33587, 7766, 44819, 51204],
        [7581, 8142, 53246, 29535],
        [18136, 14698, 14902, 37720],
    ],
    65536: [
        [63562, 11132, 44051, 34895],
        [33587, 7765, 44822, 51206],
        [25371, 59429, 46159, 53113],
        [13588, 31233, 48580, 46207],
    ],
    65537: [
        [63241, 31156, 44050, 34893],
        [33604, 8283, 44821, 51206],
        [33275, 39502, 46161, 53336],
        [21570, 5702, 34907, 52061],
    ],
    131071: [
        [125860, 21617, 85991, 71756],
        [65700, 14686, 89425, 101381],
        [21949, 26279, 87470, 70471],
        [61801, 68748, 3102, 55693],
    ],
    131072: [
        [125862, 21618, 85990, 71755],
        [65701, 14687, 89423, 101381],
        [26320, 9964, 117953, 9271],
        [40608, 49235, 96123, 70497],
    ],
    131073: [
        [127688, 61394, 85990, 71755],
        [64407, 16041, 89424, 101381],
        [26257, 39090, 75522, 97366],
        [124466, 29482, 75571, 117202],
    ],
    1000000: [
        [954970, 292686, 660271, 537177],
        [500309, 955211, 696178, 799485],
        [473783, 151990, 745311, 429298],
        [936259, 38255, 544943, 439360],
    ],
    1000000000000: [
        [971531036833, 298108127466, 667805016010, 532270723567],
        [499201010831, 971531037074, 713275837495, 779229122263],
        [375451326686, 971531234178, 851077279352, 587195871377],
        [639480266855, 125211837566, 453272675485, 891642189467],
    ],
    1099511627777: [
        [1063110285330, 331525301266, 735351255260, 604395045021],
        [556680740905, 1063110285571, 751898935591, 856675213441],
        [401445769374, 1063110482674, 913134973139, 948206556594],
        [201292811090, 518716363241, 966956369007, 377354785839],
    ],
}
DIGESTS = {
    (None, Remainder.CARRY): "fa75f8e9550db1e9949f54de832fdc3b",
    (4096, Remainder.CARRY): "5ab0efae38352f532066d67a0192687d",
    (0, Remainder.CARRY): "c1c846af7aa415c38af425ac4472f528",
    (None, Remainder.DROP): "fa75f8e9550db1e9949f54de832fdc3b",
    (4096, Remainder.DROP): "5ab0efae38352f532066d67a0192687d",
    (0, Remainder.DROP): "c1c846af7aa415c38af425ac4472f528",
    (None, Remainder.PARTIAL): "9d9186ae5dc54c502826517c2c287ba4",
    (4096, Remainder.PARTIAL): "d028c19dd8745ac9a99e3ba241bc8d1e",
    (0, Remainder.PARTIAL): "a21ee446b9a142f5bee79e1db977beba",
}
PLAN_DIGESTS = [
    "304f2ccb626d582a525515d34bf653e0",
    "322f9a4d8eb6ffbfa00e66b398b2eb03",
    "501c7f1ed1a27354ef5a9f33dd3aaf1e",
]
