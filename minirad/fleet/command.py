"""What a foreign server's cache holds, rebuilt from the KV events that it publishes.

    python -m minirad kv-events tcp://host:5557 --replay tcp://host:5558 --ranks 2 --seconds 10 --json
    python -m minirad kv-events --server http://host:30000

Follows the events of SGLang, vLLM or Dynamo: a line for each batch, or with --json what was rebuilt at the
end. Ends after --seconds or with Ctrl-C, and first asks the replay whether anything was missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minirad.collector import rare_collections
from minirad.command import above_zero, positive
from minirad.fleet.blocks import RankBlocks
from minirad.fleet.endpoints import ServerInfo, rank_endpoints, server_info
from minirad.fleet.follow import Delivered, Follower, Gap, Restart, State, Told, Trouble
from minirad.fleet.wire import Batch, Cleared, Stored
from minirad.text import escaped

MISSING = "an endpoint such as tcp://host:5557, --bind ENDPOINT or --server URL is needed"
STATES = {
    "connecting": "connecting",
    "replaying": "asking the replay for what was before",
    "live": "live",
    "silent": "silent",
    "lost": "the connection is lost, waiting for another",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    where = parser.add_argument
    where("endpoint", nargs="?", help="the publisher of rank 0, tcp://host:port; rank 1 has the next port")
    where("--replay", metavar="ENDPOINT", help="its replay endpoint, for what was before and what gets lost")
    where("--ranks", type=positive, metavar="N", help="data-parallel ranks (default: 1)")
    where("--topic", metavar="T", help="only messages whose topic begins with it (default: all)")
    where("--bind", metavar="ENDPOINT", help="listen here, for a publisher that connects: tcp://*:5557")
    where("--server", metavar="URL", help="ask SGLang's /server_info for all of this")
    where("--seconds", type=above_zero, metavar="S", help="how long to follow (default: until Ctrl-C)")
    where("--json", action="store_true", help="print what was rebuilt, as JSON, and nothing else")


def main(args: argparse.Namespace) -> int:
    """Follows, and prints."""
    source = _source(args)
    for notice in source.notices:
        print(f"minirad: {escaped(notice)}", file=sys.stderr)
    ranks = [Rebuilt() for _ in source.endpoints]
    tell = _taking(ranks) if args.json else _printing(ranks)
    follower = Follower(
        source.endpoints, source.replays, source.topic, bind=args.bind is not None, tell=tell
    )  # fmt: skip
    with rare_collections(), follower:
        _follow(follower, args.seconds)
    if args.json:
        print(json.dumps({"ranks": [rank.as_json() for rank in ranks]}))
    else:
        for number, rank in enumerate(ranks):
            print(f"rank {number}: {rank.summary()}")
    return 0


def _source(args: argparse.Namespace) -> ServerInfo:
    """What is followed; ValueError for options that do not go together."""
    if args.server is not None:
        if args.endpoint is not None or args.ranks is not None:
            raise ValueError(
                "--server says what the endpoints and ranks are, leave out the endpoint and --ranks"
            )
        found = server_info(args.server)
        ranks, topic = len(found.endpoints), found.topic if args.topic is None else args.topic
        endpoints, replays, notices = found.endpoints, found.replays, found.notices
    elif (args.endpoint is None) == (args.bind is None):
        raise ValueError(
            MISSING if args.endpoint is None else "an endpoint is connected to or listened at, not both"
        )
    else:
        ranks, topic, endpoints, replays, notices = args.ranks or 1, args.topic or "", [], [], ()
    if args.endpoint is not None:
        endpoints = rank_endpoints(args.endpoint, ranks)
    if args.bind is not None:
        endpoints = rank_endpoints(args.bind, ranks, bind=True)
        notices = ()
    if args.replay is not None:
        replays = rank_endpoints(args.replay, ranks)
    return ServerInfo(endpoints, replays, topic, 0, notices)


def _follow(follower: Follower, seconds: float | None) -> None:
    """Waits for the end, and then for what was missed. A second Ctrl-C is not waited for."""
    until = time.monotonic() + seconds if seconds is not None else float("inf")
    try:
        while (left := until - time.monotonic()) > 0 and not follower.wait(min(left, 0.5)):
            pass
    except KeyboardInterrupt:
        print("minirad: asking the replay whether anything was missed", file=sys.stderr)
    follower.catch_up()


@dataclass(slots=True)
class Rebuilt:
    """What is known of one rank: its blocks, and how it came to be."""

    blocks: RankBlocks = field(default_factory=RankBlocks)
    batches: int = 0
    replayed: int = 0
    gaps: int = 0
    lost: int = 0  # batches in gaps
    restarts: int = 0
    unknown: int = 0
    troubles: int = 0

    def take(self, told: Told) -> None:
        """Moves it on by what a follower told."""
        if isinstance(told, Delivered):
            self.batches += 1
            self.replayed += told.replayed
            self.unknown += told.batch.unknown
            for event in told.batch.events:
                self.blocks.take(event)
        elif isinstance(told, Gap):
            self.gaps += 1
            self.lost += told.last - told.first + 1
        elif isinstance(told, Restart):
            self.restarts += 1
            self.blocks.clear()
        elif isinstance(told, Trouble):
            self.troubles += 1

    def as_json(self) -> dict[str, Any]:
        """As the command prints it; ambiguous: blocks that may be there, and those that were told twice."""
        counts = ("batches", "replayed", "gaps", "lost", "restarts", "unknown", "troubles")
        known = self.blocks.as_json()
        twice = {name: block for name, block in known["blocks"].items() if block.pop("ambiguous", False)}
        known["ambiguous"] = {**known["ambiguous"], **twice}
        return {**known, **{name: getattr(self, name) for name in counts}}

    def summary(self) -> str:
        """The same as a sentence."""
        held = Counter(name for block in self.blocks.blocks.values() for name in block.media)
        blocks = ", ".join(f"{held[name]} in {escaped(name)}" for name in sorted(held)) or "none"
        lost = f", {self.lost} lost in {_count(self.gaps, 'gap')}" if self.gaps else ""
        anew = f", begun anew {_count(self.restarts, 'time')}" if self.restarts else ""
        return (
            f"blocks: {blocks}; {_count(self.batches, 'batch')}, {self.replayed} of them replayed{lost}{anew}"
        )


def _taking(ranks: list[Rebuilt]) -> Callable[[Told], None]:
    def tell(told: Told) -> None:
        ranks[told.rank].take(told)
        if isinstance(told, Trouble | Gap | Restart):
            print(f"minirad: {_sentence(told)}", file=sys.stderr)

    return tell


def _printing(ranks: list[Rebuilt]) -> Callable[[Told], None]:
    def tell(told: Told) -> None:
        ranks[told.rank].take(told)
        print(_sentence(told), flush=True)

    return tell


def _sentence(told: Told) -> str:
    """What was told, as a line that is safe in a terminal."""
    if isinstance(told, Delivered):
        text = f"batch {told.seq}{' (replayed)' if told.replayed else ''}: {_what(told.batch)}"
    elif isinstance(told, Gap):
        which = (
            f"batch {told.first} is"
            if told.first == told.last
            else f"batches {told.first} to {told.last} are"
        )
        text = f"{which} lost: {told.why}"
    elif isinstance(told, Restart):
        text = f"the publisher began anew, its cache is empty: {told.why}"
    else:
        text = STATES[told.state] if isinstance(told, State) else told.text
    return f"rank {told.rank}: {escaped(text)}"


def _what(batch: Batch) -> str:
    """What a batch did, in words."""
    parts, done = [], Counter[str]()
    for event in batch.events:
        if isinstance(event, Cleared):
            parts.append("all cleared")
        elif event.other_group:
            done["of other cache groups"] += len(event.hashes)
        else:
            did = "stored in" if isinstance(event, Stored) else "removed from"
            done[f"{did} {event.medium}"] += len(event.hashes)
    parts += [f"{_count(number, 'block')} {what}" for what, number in done.items()]
    if batch.unknown:
        parts.append(f"{_count(batch.unknown, 'thing')} not understood")
    if batch.trouble:
        parts.append(batch.trouble)
    return ", ".join(parts) or "nothing"


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"
