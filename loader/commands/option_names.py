"""Options of older versions and of other programs, by command, each with the answer to a command line that has it."""

from __future__ import annotations

from bucketline.loader.config import NOT_OPTIONS

_RUN = "it is --run, from which stores, seed, batch and ranks are read as well"
_BILL = "say --bill bandwidth=10Gbit,step=0.4,requests=0.0004,egress=0.09, or a part of it"

PLAN = {
    **NOT_OPTIONS,
    "--machines": "name them after the ranks: --world-size RANKS@MACHINES, such as 64@8",
    "--bandwidth": _BILL,
    "--prices": _BILL,
    "--ragged": "name the groups in --columns",
    "--remainder": "name it after the split: --split train:drop",
    "--state": _RUN,
}
PEEK = {name: answer for name, answer in PLAN.items() if name not in ("--machines", "--bandwidth", "--prices", "--ragged")}
SEEN = {"--state": _RUN}
SERVE = {
    "--socket": "say --at unix:PATH",
    **dict.fromkeys(("--listen", "--host", "--port"), "say --at tcp://HOST:PORT"),
    "--key": "name it after the certificate: --certificate cert.pem key.pem",
}
STATS = {"--socket": "name the address without an option: loader stats unix:PATH"}
