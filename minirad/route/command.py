"""Route the OpenAI API to several servers of ours, which are started behind one port.

    python -m minirad route --workers 4
    python -m minirad route --workers 2 --policy events --record fleet.jsonl --page-size 4

Prefixes go where they are held, unless that worker is too busy. /workers says how each is, where the last
requests went, and why; `python -m viz.live --server http://127.0.0.1:8000` shows what all of them hold.
Workers that die are started again, and their requests go elsewhere. Ctrl-C ends all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from minirad import command
from minirad.options import add_engine_options, engine_words
from minirad.server.command import api_key, is_loopback
from minirad.server.settings import needed

if TYPE_CHECKING:
    from minirad.route.router import Router, Settings

LOOK = 0.2  # seconds in which a signal is seen on any system
WRITING = 26.0  # seconds in which servers with a disk tier end: it takes 20 at most (tiers/disk.py)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minirad route`."""
    from minirad.route import policies

    add = parser.add_argument
    add("--workers", metavar="N", type=command.positive, default=4, help="servers to start (default: 4)")
    add("--policy", default="cache-aware", help=f"{', '.join(policies.POLICIES)} (default: cache-aware)")
    policies.add_arguments(parser)
    add("--host", default="127.0.0.1", help="address (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=8000, help="default: 8000; 0 takes any free one")
    add("--api-key", metavar="KEY", help="clients have to send it (default: MINIRAD_API_KEY)")
    add(
        "--max-requests", metavar="N", type=command.positive, default=1024,
        help="requests in flight (default: 1024); more are answered 429",
    )  # fmt: skip
    add(
        "--max-body", metavar="BYTES", type=command.positive, default=4 << 20,
        help=f"size of a request (default: {4 << 20:,})",
    )  # fmt: skip
    add(
        "--health-seconds", metavar="S", type=command.above_zero, default=10.0,
        help="a worker that says nothing of its health for so long is dead (default: 10)",
    )  # fmt: skip
    add(
        "--kv-port", metavar="PORT", type=command.positive,
        help="of worker 0's KV events; the others' are the next ones (default: any that are free)",
    )  # fmt: skip
    add("--record", type=Path, help="write KV events and routes to this new .jsonl file")
    add_engine_options(parser)


def main(args: argparse.Namespace) -> int:
    """Routes until it is told to end; returns the exit code."""
    settings = settings_of(args)
    from minirad.route.router import Router
    from minirad.route.workers import CannotStart

    router = Router(settings)
    try:
        with _ended_by_signals(router):
            router.start(wait=False)
            while not router.wait_ready(LOOK):
                pass
            if not router.wait(0):
                print(
                    f"minirad route: {router.url} ({settings.workers} workers, {settings.policy})", flush=True
                )
            while not router.wait(LOOK):
                pass
    except CannotStart as error:
        print(f"minirad route: {command.one_line(error)}", file=sys.stderr)
        return 1
    finally:
        router.stop()
    return 0


def settings_of(args: argparse.Namespace) -> Settings:
    """What `add_arguments` asked for; ValueError for what cannot be."""
    needed("route")
    from minirad.route.policies import options_of
    from minirad.route.proxy import Limits
    from minirad.route.router import Settings
    from minirad.route.workers import Patience

    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {args.port}")
    if args.record is not None:
        command.may_be_written("--record", args.record, (".jsonl",), keep=True)
    key = api_key(args.api_key)
    if not is_loopback(args.host) and key is None:
        print(
            f"minirad route: {args.host} can be reached from other machines, and without --api-key anybody"
            " who reaches it may use it", file=sys.stderr,
        )  # fmt: skip
    grace = Patience().grace if args.disk_dir is None else WRITING
    return Settings(
        workers=args.workers, policy=args.policy, options=options_of(args), engine=engine_words(args),
        host=args.host, port=args.port, key=key or "", kv_port=args.kv_port, record=args.record, loud=True,
        limits=Limits(requests=args.max_requests, body=args.max_body),
        patience=Patience(deadline=args.health_seconds, grace=grace),
    )  # fmt: skip


@contextlib.contextmanager
def _ended_by_signals(router: Router) -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM end the router; a second one does not wait for anything."""
    asked = 0

    def end(number: int, frame: object) -> None:
        nonlocal asked
        asked += 1
        router.end_soon()
        if asked > 1:
            router.workers.kill()
            os._exit(command.INTERRUPTED)

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
