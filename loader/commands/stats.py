"""`loader stats`: print a running service's statistics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bucketline.options import Arg, Positional

if TYPE_CHECKING:
    from bucketline.loader.service.address import ServiceAddress

_LOST_AFTER_S = 10.0  # a service that does not answer in this time is taken for lost


@dataclass(frozen=True, kw_only=True)
class StatsCommand:
    """Print a running service's statistics: its clients, their rates, and the batches ready.

    Example: loader stats unix:/run/user/1000/photos.sock --json
    """

    address: Positional[str]
    """Address of the service: unix:PATH (or only the path), or tcp://HOST:PORT."""
    token_file: Annotated[Path | None, Arg(metavar="FILE")] = None
    """File with the token of a service over TCP, readable by its owner only."""
    certificate: Annotated[Path | None, Arg(metavar="FILE")] = None
    """File (PEM) with the certificates to trust, of a service with TLS."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        from bucketline.command_line import print_json
        from bucketline.errors import UsageError
        from bucketline.loader.service.address import AUTO, ServiceAddress

        if self.address == AUTO:
            raise UsageError(
                "ADDRESS is auto, a service that only its own process reaches; expected unix:PATH or tcp://HOST:PORT"
            )
        stats = stats_of(ServiceAddress(self.address, self.token_file, self.certificate, deadline_s=_LOST_AFTER_S))
        if self.json:
            print_json(stats)
        else:
            print(summary(stats))
        return 0


def stats_of(address: ServiceAddress | Path | str) -> dict[str, Any]:
    """Return the statistics of the service at an address; see `Service.stats`."""
    from bucketline.loader.service.address import ServiceAddress
    from bucketline.loader.service.links import link_to
    from bucketline.loader.service.wire import StatsRequest, StatsResponse

    link = link_to(ServiceAddress.of(address))
    link.silence_s = _LOST_AFTER_S
    return link.told(StatsRequest()).parsed(StatsResponse).stats


def summary(stats: dict[str, Any]) -> str:
    """Return a service's statistics as readable text."""
    from bucketline.command_line import counted, human_bytes

    since = f"in {stats['seconds']:.0f} s"
    lines = [f"{', '.join(stats['stores'])}: {_clients_of(stats, since)}", *_each_of(stats)]
    if (network := stats["network"]) is not None:
        lines += [f"  other machines: {_clients_of(network, 'sent')}", *_each_of(network)]
    for url, own in stats["fetched"].items():
        times = f"{own['bytes_fetched'] / max(1, own['store_bytes']):.3f} times the store"
        got = (
            f"{human_bytes(own['bytes_fetched'])}, {times}, in {counted(own['requests'], 'request')}, {own['retries']} repeated"
        )
        found = f"{own['misses']} of {counted(own['hits'] + own['misses'], 'line')} not in the cache"
        lines.append(f"  {url}: fetched {got}; {found}; waited {own['waited_s']:.1f} s in {counted(own['waits'], 'wait')}")
    return "\n".join(lines)


def _clients_of(counts: dict[str, Any], how: str) -> str:
    from bucketline.command_line import counted, human_bytes

    now = counted(len(counts["clients"]), "client") if counts["clients"] else "no client"
    failed = f"{counts['errors']} ended with an error, {counts['refused']} refused"
    amount = f"{counted(counts['samples'], 'sample')} and {human_bytes(counts['bytes'])} {how}"
    return f"{now} now, {counts['clients_so_far']} since the start; {amount}; {failed}"


def _each_of(counts: dict[str, Any]) -> list[str]:
    from bucketline.command_line import counted, human_bytes, per_second

    lines = []
    for one in counts["clients"]:
        process = one["address"] if "address" in one else f"process {one['pid']}"
        who = f"{process}, rank {one['rank']} of {one['world_size']}"
        rate = f"{per_second(one['samples_per_s'], 'sample')}, {human_bytes(one['bytes_per_s'])}/s"
        ready = f"{one['ready']} of {one['depth']} batches ready"
        waited = f"waited {one['waited_s']:.1f} s in {counted(one['waits'], 'wait')}{', waits now' * one['is_waiting']}"
        largest = sorted(one["by_bucket"], key=one["by_bucket"].__getitem__, reverse=True)
        buckets = ", ".join(largest[:3]) + (f" and {len(largest) - 3} more" if len(largest) > 3 else "")
        lines.append(f"  {who}: {rate}, {ready}, {waited}; of {buckets or 'no bucket yet'}")
    return lines
