"""What a production server's stream asks of the page's engine room: does it keep up, and does it stay in bounds?

A process of its own plays a server: so many ranks hold so many blocks together, and tell of `--rate` events a
second (a request's new blocks stored, others removed for them), as SGLang does. This process follows it as
`viz.live --connect` does: sockets, order, blocks, tree, frames. Printed every few seconds: events taken, how
far behind the newest one is, frames, memory. A view of the latest moment is made at each of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import statistics
import threading
import time
from collections import deque
from typing import Any

from minirad import command
from minirad.bench.tables import table
from minirad.fleet.wire import Batch, Record, Removed, Stored, encode

BLOCK = 16  # tokens
EVENTS_A_BATCH = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=command.positive, default=10_000, help="events a second, all ranks together")
    parser.add_argument("--seconds", type=command.positive, default=60)
    parser.add_argument("--blocks", type=command.positive, default=100_000, help="held by all ranks together")
    parser.add_argument("--ranks", type=command.positive, default=2)
    parser.add_argument("--port", type=command.positive, default=25557)
    parser.add_argument("--json", action="store_true")


class _Server:
    """One rank's chats: each event adds a few blocks to one, or removes the oldest chat's last ones."""

    def __init__(self, rank: int, capacity: int) -> None:
        self._rng = random.Random(rank)
        self._capacity, self._held = capacity, 0
        self._chats: deque[list[int]] = deque()
        self._next = (rank + 1) << 48

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
        tokens = tuple(tuple(rng.randrange(128_000) for _ in range(BLOCK)) for _ in hashes)
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


