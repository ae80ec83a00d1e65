"""`python -m bench.capacity`: what an event costs at three sizes of the log, and what a machine therefore holds.

CPU time and bytes are counted, not timed, so that they mean the same on a busy machine. Beside them stand rates of this
run, which do not.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from itertools import count as counting
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import psycopg
from rich.console import Console
from rich.progress import Progress

from bench import child, load, machine, postgres
from bench.measure import Call
from postbus import EventBus

__all__ = ["cost"]

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "capacity.md"
BEGIN: Final = "<!-- figures: written by `python -m bench.capacity --write-docs`, never by hand -->"
END: Final = "<!-- /figures -->"
SIZES: Final = (10_000, 100_000, 1_000_000)
STORES: Final = {"sqlite": "SQLite", "postgres": "PostgreSQL"}
SINGLE: Final = 1_000
BATCHED: Final = 10_000
BATCH: Final = 1_000
URL: Final = os.environ.get(postgres.URL, "sqlite:///postbus.db")
TICKS: Final = os.sysconf("SC_CLK_TCK")
STEPS: Final = {
    "one": "publish, one call each",
    "batch": f"publish, {BATCH:,} a call",
    "handle": "claim, handle and complete",
}


# ── measuring: each size in a process and a database of its own ──────────────────────────────────────────────────────


def cost(size: int) -> dict[str, float]:
    """Fill a log with completed events, then return what some more cost, each."""
    bus = EventBus(URL)
    for _ in range(0, size, BATCH * 100):
        for batch in load.batches(min(size, BATCH * 100), BATCH):
            bus.publish_many(batch)
        _handle(min(size, BATCH * 100))
    figures: dict[str, float] = {}
    payloads = [load.order(number) for number in range(SINGLE)]
    given = list(load.batches(BATCHED, BATCH))
    figures |= _metered("one", SINGLE, lambda: [bus.publish(load.TYPE, payload) for payload in payloads])
    figures |= _metered("batch", BATCHED, lambda: [bus.publish_many(batch) for batch in given])
    figures |= _metered("handle", SINGLE + BATCHED, lambda: _handle(SINGLE + BATCHED))
    left = bus.list(status="PENDING").total
    bus.shutdown()
    if left:
        raise RuntimeError(f"{left} events were not handled")
    return figures | {"disk": _disk() / (size + SINGLE + BATCHED)}


def _handle(count: int) -> None:
    """Handle so many with a handler that does nothing, by a worker of this process."""
    worker = EventBus(URL)
    numbers, finished = counting(1), threading.Event()

    @worker.on("*")
    def handle(_: object) -> None:
        if next(numbers) == count:
            finished.set()

    worker.start()
    finished.wait()
    worker.wait_idle()
    worker.shutdown()


def _metered(name: str, count: int, work: Callable[[], object]) -> dict[str, float]:
    written, server, own, began = _written(), _server_cpu(), time.process_time(), time.perf_counter()
    work()
    took = time.perf_counter() - began
    return {
        f"{name} rate": count / took,
        f"{name} cpu": (time.process_time() - own) / count,
        f"{name} server": (_server_cpu() - server) / count,
        f"{name} bytes": (_written() - written) / count,
    }


def _written() -> int:
    """Return the bytes written so far: to the WAL of a server; to WAL and file of SQLite."""
    if URL.startswith("sqlite:"):
        told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(told["wchar"])
    with psycopg.connect(URL) as db:
        row = db.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
    return row[0] if row else 0


def _server_cpu() -> float:
    """Return the CPU seconds of a server's processes, those that have ended and its housekeeping included."""
    if URL.startswith("sqlite:"):
        return 0.0
    time.sleep(0.5)  # until those that are about to end have been counted by their parent
    data = Path(parse_qs(urlsplit(URL).query)["host"][0])
    first = int((data / "postmaster.pid").read_text().split()[0])
    ticks = 0
    for folder in Path("/proc").iterdir():
        try:
            told = (folder / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if folder.name == str(first):
            ticks += sum(map(int, told[11:15]))
        elif told[1] == str(first):
            ticks += sum(map(int, told[11:13]))
    return ticks / TICKS


def _disk() -> int:
    """Return the bytes that tables and indexes take."""
    if URL.startswith("sqlite:"):
        return Path("postbus.db").stat().st_size
    with psycopg.connect(URL) as db:
        row = db.execute("""
            SELECT sum(pg_total_relation_size(oid))::bigint FROM pg_class
            WHERE relkind = 'r' AND relnamespace = 'postbus'::regnamespace""").fetchone()
    return row[0] if row else 0


# ── telling ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Costs = Mapping[tuple[str, int], Mapping[str, float]]


def tables(costs: Costs, sizes: Sequence[int], facts: Mapping[str, Any], when: datetime) -> str:
    """Return the figures as Markdown, and what follows from them."""
    where = f"{facts['cores']} cores ({facts['cpu']}), fsync {facts['fsync_ms']:.2f} ms, load {facts['load']:.1f}"
    what = f"Python {facts['python']}, SQLite {facts['sqlite_of_apsw']}, PostgreSQL {facts['postgres']}"
    parts = [f"Measured on {when:%Y-%m-%d}, {where}; {what}."]
    for store, title in STORES.items():
        server = store == "postgres"
        head = ["completed events in the log", "step", "CPU of the client", *(["CPU of the server"] if server else [])]
        head += ["WAL" if server else "written to WAL and file", "rate here, one process"]
        rows = [head, ["---:", "---", *(["---:"] * (len(head) - 2))]]
        for size in sizes:
            told = costs[store, size]
            for name, step in STEPS.items():
                row = [f"{size:,}", step, f"{told[f'{name} cpu'] * 1e6:,.0f} µs"]
                row += [f"{told[f'{name} server'] * 1e6:,.0f} µs"] if server else []
                rows.append([*row, f"{told[f'{name} bytes']:,.0f} bytes", f"{told[f'{name} rate']:,.0f}/s"])
        parts.append(f"### {title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows))
        parts.append(_held(store, [costs[store, size] for size in sizes]))
    return "\n\n".join(parts)


def _held(store: str, costs: Sequence[Mapping[str, float]]) -> str:
    """Say what follows, from the largest size."""
    last = costs[-1]
    disk = ", ".join(f"{each['disk']:,.0f}" for each in costs)
    millions = 100e9 / last["disk"] / 1e6
    few, many = last["batch bytes"] + last["handle bytes"], last["one bytes"] + last["handle bytes"]
    client = last["batch cpu"] + last["handle cpu"]
    lines = [
        (
            f"- **Disk**: {last['disk']:,.0f} bytes for a completed event with its two audit rows and all indexes "
            f"({disk} at the sizes above): {millions:,.0f} million in 100 GB, before anything is archived."
        ),
        (
            f"- **Written**: {few:,.0f} bytes for each event published in batches and handled, {many:,.0f} for one "
            f"published singly: at 1,000 events a second {few / 1e3:,.1f} to {many / 1e3:,.1f} MB a second."
        ),
        f"- **Python**: one core publishes in batches and handles {1 / client:,.0f} events a second.",
    ]
    if store == "postgres":
        core = last["batch server"] + last["handle server"]
        lines.append(
            f"- **The server**: one core of it serves {1 / core:,.0f} events a second, published in batches and "
            f"handled, so that it keeps {client / core:,.1f} cores of Python busy."
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, show, and on demand write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.capacity", description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), metavar="N", help="events in the log")
    parser.add_argument("--dir", type=Path, default=ROOT / "bench" / "results", help="where the databases lie")
    parser.add_argument("--write-docs", action="store_true", help="put the figures into docs/capacity.md")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    console = Console(width=130)
    costs: dict[tuple[str, int], Mapping[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="run-", dir=options.dir) as place, Progress(console=console) as progress:
        folder = Path(place)
        task = progress.add_task("measuring", total=len(STORES) * sum(options.sizes))
        with postgres.server(folder) as server:
            facts = machine.facts(folder, postgres.facts(server), {})
            for size in options.sizes:
                for store in STORES:
                    progress.update(task, description=f"{STORES[store]}, {size:,} events")
                    call = Call("bench.capacity:cost", {"size": size})
                    with (
                        tempfile.TemporaryDirectory(dir=folder) as own,
                        postgres.database(server) if store == "postgres" else nullcontext() as url,
                    ):
                        costs[store, size] = child.run(call, Path(own), {postgres.URL: url} if url else {})
                    progress.advance(task, size)
    told = tables(costs, options.sizes, facts, datetime.now(UTC))
    console.print(told, markup=False, highlight=False)
    if options.write_docs:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        _, after = rest.split(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{told}\n\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
