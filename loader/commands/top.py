"""`loader top`: watch a running service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Top:
    """Watch a running service: what each client reads, how fast, how long it waits, and what is fetched.

    Rates and waits are those since the last look. Ctrl-C ends it. Without a terminal, it prints one screen after `--every`
    seconds.

    Example: loader top /run/user/1000/photos.sock
    """

    socket: tyro.conf.Positional[Path]
    """Unix socket of the service."""
    every: float = 1.0
    """Seconds between two looks."""

    def run(self) -> int:
        import sys
        import time

        from rich.console import Console
        from rich.live import Live

        from bucketline.errors import UsageError
        from bucketline.loader.commands.stats import stats_of

        if not 0 < self.every < 1e9:
            raise UsageError(f"--every is {self.every}, expected seconds above 0")
        before, console = stats_of(self.socket), Console()
        if not sys.stdout.isatty():  # rich takes FORCE_COLOR for a terminal
            time.sleep(self.every)
            console.print(screen(before, stats_of(self.socket)))
            return 0
        with Live(screen(before, before), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(self.every)
                now = stats_of(self.socket)
                live.update(screen(before, now), refresh=True)
                before = now


def screen(before: dict[str, Any], now: dict[str, Any]) -> RenderableType:
    """Return what is shown of a service, from its statistics (`Service.stats`) at the last look and now."""
    from datetime import timedelta

    from rich.console import Group

    from bucketline.command_line import counted, human_bytes, per_second

    seconds = max(now["seconds"] - before["seconds"], 1e-9)
    rate = human_bytes(max(0.0, now["bytes"] - before["bytes"]) / seconds)
    clients = f"{counted(now['clients_so_far'], 'client')} so far, {now['refused']} refused"
    whole = [
        f"[bold]{_plain(', '.join(now['stores']))}[/bold]",
        f"process {now['pid']}, running for {timedelta(seconds=round(now['seconds']))}",
        f"{clients}, {counted(now['errors'], 'iteration')} ended with an error",
        f"{counted(now['samples'], 'sample')} and {human_bytes(now['bytes'])} delivered",
        f"{per_second((now['samples'] - before['samples']) / seconds, 'sample')}, {rate}/s",
    ]
    tables = [_clients(before, now)] if now["clients"] else []
    if now["fetched"]:
        tables.append(_fetching(before["fetched"], now["fetched"], seconds))
    return Group(*whole, *tables)


def _clients(before: dict[str, Any], now: dict[str, Any]) -> Table:
    from rich.table import Table

    from bucketline.command_line import human_bytes

    table = Table("client", "rank", "samples/s", "bytes/s", "ready", "waiting", "buckets", box=None, pad_edge=False)
    known = {_identity(one): one for one in before["clients"]}
    for one in now["clients"]:
        last = known.get(_identity(one), dict.fromkeys(("seconds", "samples", "bytes", "waited_s"), 0))
        seconds = max(one["seconds"] - last["seconds"], 1e-9)
        largest = sorted(one["by_bucket"].items(), key=lambda item: -item[1])[:3]
        more = f" and {len(one['by_bucket']) - 3} more" if len(one["by_bucket"]) > len(largest) else ""
        table.add_row(
            f"process {one['pid']}",
            f"{one['rank']} of {one['world_size']}",
            f"{(one['samples'] - last['samples']) / seconds:,.0f}",
            human_bytes((one["bytes"] - last["bytes"]) / seconds),
            f"{one['ready']} of {one['depth']}",
            "now" if one["is_waiting"] else f"{min(1.0, (one['waited_s'] - last['waited_s']) / seconds):.0%}",
            _plain(", ".join(name for name, _ in largest)) + more,
        )
    return table


def _identity(client: dict[str, Any]) -> tuple[object, ...]:
    return client["pid"], client["rank"], tuple(client["stores"])


def _fetching(before: dict[str, Any], now: dict[str, Any], seconds: float) -> Table:
    from rich.table import Table

    from bucketline.command_line import human_bytes

    table = Table("store", "fetched/s", "requests/s", "repeated", "lines in the cache", "waits", box=None, pad_edge=False)
    for url, own in now.items():
        last = before.get(url, dict.fromkeys(own, 0))
        lines = own["hits"] + own["misses"] - last["hits"] - last["misses"]
        table.add_row(
            _plain(url),
            human_bytes((own["bytes_fetched"] - last["bytes_fetched"]) / seconds),
            f"{(own['requests'] - last['requests']) / seconds:,.0f}",
            str(own["retries"] - last["retries"]),
            f"{(own['hits'] - last['hits']) / lines:.0%}" if lines else "",
            str(own["waits"] - last["waits"]),
        )
    return table


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
