"""Does the picture of a production server keep up with its stream of KV events, and stay within bounds?

A process of its own plays a server: so many ranks hold so many blocks together, and tell of `--rate` events a
second (a request's new blocks stored, others removed for them), as SGLang does. This process follows it as
`viz.live --connect` does: sockets, order, blocks, tree, frames (and files, with --record). Printed for each
tenth of the time: events taken a second, how long after it was sent a batch is in the tree, what is kept, and
the processor's time that an event takes. It keeps up if the last rows are like the first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from minirad import command
from minirad.bench.tables import table
from minirad.collector import rare_collections
from minirad.fleet.endpoints import rank_endpoints
from minirad.fleet.flight import Flight
from minirad.fleet.follow import Delivered, Follower, Gap, Told
from minirad.fleet.wire import Batch, Record, Removed, Stored, encode

BLOCK = 16  # tokens
EVENTS_A_BATCH = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=command.positive, default=10_000, help="events a second, in all")
    parser.add_argument("--seconds", type=command.positive, default=60)
    parser.add_argument("--blocks", type=command.positive, default=100_000, help="held by all ranks together")
    parser.add_argument("--ranks", type=command.positive, default=2)
    parser.add_argument("--port", type=command.positive, default=25557)
    parser.add_argument("--record", type=Path, metavar="FILE.jsonl", help="write the recording, too")
    parser.add_argument("--json", action="store_true")


class _Server:
    """One rank's chats: each event adds a few blocks to one, or removes the oldest chat's last ones."""

    def __init__(self, rank: int, capacity: int) -> None:
        self._rng = random.Random(rank)
        self._capacity, self._held = capacity, 0
        self._chats: deque[list[int]] = deque()
        self._next = (rank + 1) << 48
        self._ids = [self._rng.randrange(128_000) for _ in range(1 << 17)]

    def event(self) -> Record:
        if self._held > self._capacity:
            chat = self._chats[0]
            gone, chat[-4:] = tuple(chat[-4:]), []
            if not chat:
                self._chats.popleft()
            self._held -= len(gone)
            return Removed(gone)
        rng = self._rng
        if not self._chats or rng.random() < 0.2:
            self._chats.append([])
        chat = self._chats[-rng.randrange(1, min(len(self._chats), 200) + 1)]
        count = rng.randrange(1, 9)
        hashes = tuple(range(self._next, self._next + count))
        self._next += count
        self._held += count
        at = rng.randrange(len(self._ids) - BLOCK * count)
        starts = range(at, at + BLOCK * count, BLOCK)
        tokens = tuple(tuple(self._ids[start : start + BLOCK]) for start in starts)
        stored = Stored(hashes, chat[-1] if chat else None, tokens, BLOCK)
        chat += hashes
        return stored


def _serve(options: argparse.Namespace, ready: Any, stop: Any) -> None:
    """The server's process: fills its ranks as fast as is heard, then keeps the rate."""
    import zmq

    context = zmq.Context()
    sockets = []
    for rank in range(options.ranks):
        socket = context.socket(zmq.PUB)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(f"tcp://127.0.0.1:{options.port + rank}")
        sockets.append(socket)
    servers = [_Server(rank, options.blocks // options.ranks) for rank in range(options.ranks)]
    numbers = [0] * options.ranks
    time.sleep(1.5)  # until the subscriber is there
    sent, began = 0, time.perf_counter()
    filling = True
    while not stop.is_set():
        rank = sent // EVENTS_A_BATCH % options.ranks
        events = tuple(servers[rank].event() for _ in range(EVENTS_A_BATCH))
        payload = encode(Batch(time.time(), events, rank))
        sockets[rank].send_multipart((b"", numbers[rank].to_bytes(8, "big"), payload))
        numbers[rank] += 1
        sent += EVENTS_A_BATCH
        if filling and all(server._held >= server._capacity for server in servers):
            filling, sent, began = False, 0, time.perf_counter()
            ready.set()
        ahead = sent / (options.rate if not filling else 20_000) - (time.perf_counter() - began)
        if ahead > 0.002:
            time.sleep(ahead)
    context.destroy(linger=0)


class _Heard:
    """What a follower tells, counted on its way into the flight recorder."""

    def __init__(self, flight: Flight) -> None:
        self.flight, self.events, self.lost = flight, 0, 0
        self.late: list[float] = []

    def take(self, told: Told) -> None:
        self.flight.take(told)
        if isinstance(told, Delivered):
            self.events += len(told.batch.events)
            self.late.append(time.time() - told.batch.ts)
        elif isinstance(told, Gap):
            self.lost += told.last - told.first + 1


def _memory() -> float:
    """MB of this process, now; 0.0 where the system does not say."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each tenth of the time."""
    spawn = multiprocessing.get_context("spawn")
    ready, stop = spawn.Event(), spawn.Event()
    server = spawn.Process(target=_serve, args=(options, ready, stop), daemon=True)
    endpoints = rank_endpoints(f"tcp://127.0.0.1:{options.port}", options.ranks)
    flight = Flight(endpoints, path=options.record)
    heard, rows = _Heard(flight), []
    with rare_collections(), Follower(endpoints, tell=heard.take):
        server.start()
        while not ready.wait(0.1):
            flight.tick()
            if not server.is_alive():
                raise ValueError(f"the server's process ended: is port {options.port} taken?")
        part = options.seconds / 10
        for _ in range(10):
            before, heard.late, began, busy = heard.events, [], time.perf_counter(), time.process_time()
            while (spent := time.perf_counter() - began) < part:
                flight.tick()
                time.sleep(0.05)
            late = sorted(heard.late) or [0.0]
            rows.append({
                "events/s": round((heard.events - before) / spent), "late ms": 1000 * statistics.median(late),
                "latest ms": 1000 * late[-1], "lost": heard.lost, "frames": len(flight.recording),
                "chapter": flight.recording.chapter, "numbers": flight.recording.numbers, "MB": _memory(),
                "us/event": 1e6 * (time.process_time() - busy) / max(heard.events - before, 1),
                "blocks": sum(len(rank.blocks) for rank in flight.tree.ranks.values()),
            })  # fmt: skip
            print(".", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        stop.set()
    flight.close()
    server.join(5)
    return rows


def main(options: argparse.Namespace) -> int:
    """Prints the table; 1 if a message was lost or less than 95% of the rate was taken in the second half."""
    rows = measure(options)
    rate = statistics.mean(row["events/s"] for row in rows[5:])
    kept_up = rate >= 0.95 * options.rate and not rows[-1]["lost"]
    if options.json:
        print(json.dumps({"rows": rows, "kept_up": kept_up}))
    else:
        print(table(list(rows[0]), [list(row.values()) for row in rows]))
        print(f"asked for {options.rate:,} events a second: {'kept up' if kept_up else 'fell behind'}")
    return 0 if kept_up else 1
