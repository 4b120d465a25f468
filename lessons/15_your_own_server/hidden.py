"""Hidden cases of lesson 15: two servers that tell, the engine's listeners, and the student's.

First some that are the same for every student, then random ones. One of the servers is the engine's own tree
with its own publisher's events; the other one is made up, and does what vLLM's does: it removes blocks
wherever they stand, copies some without their tokens, and names blocks by bytes.
"""

from __future__ import annotations

import hashlib
from random import Random
from types import ModuleType
from typing import Any

import msgspec

from lessons.grading import expect, sibling
from lessons.grading.words import shown
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.fleet.publish import as_record
from minirad.fleet.wire import Batch, Cleared, Record, Removed, Stored, decode, encode
from minirad.observe.kv_events import KVEvent, KVEventStream

exercises = sibling(__file__, "exercises")
Pair, Stream, read = exercises.Pair, exercises.Stream, exercises.read

Prompt = tuple[list[int], str]  # tokens, and the space that it is asked in ("": none)

# ---------------------------------------------------------------------- servers


class OwnTree:
    """The engine's radix tree with its publisher's events. A call is a request; it returns what was told."""

    def __init__(self, rng: Random, page: int = 2, room: int = 24) -> None:
        self.rng, self.page, self.room = rng, page, room
        self.cache = RadixCache(page)
        self.told: list[KVEvent] = []
        self.stream = KVEventStream(self.cache, self.told.append)
        self.prompts: list[Prompt] = []
        self.slot = page

    def __call__(self) -> list[Record]:
        tokens, space = prompt_of(self.rng, self.prompts, self.page)
        slots = list(range(self.slot, self.slot + len(tokens)))
        self.slot += len(tokens)
        self.cache.insert(RadixKey(tokens, extra_key=space or None), slots)
        if self.cache.evictable_size > self.room:
            self.cache.evict(self.cache.evictable_size - self.room)
        elif self.rng.random() < 0.04:
            self.cache.reset()
        told, self.told[:] = [as_record(event) for event in self.told], []
        return told


class MadeUp:
    """A server as vLLM: blocks in a table, the least recently used one goes, whatever follows it."""

    def __init__(self, rng: Random, page: int = 2, room: int = 12) -> None:
        self.rng, self.page, self.room = rng, page, room
        self.names: dict[Any, list[str]] = {}  # media, the one that was used last at the end
        self.prompts: list[Prompt] = []
        self.bytes = rng.random() < 0.5

    def name(self, parent: Any, tokens: tuple[int, ...], space: str) -> Any:
        digest = hashlib.sha256(repr((parent, tokens, space)).encode()).digest()[:8]
        return digest if self.bytes else int.from_bytes(digest, "big")

    def __call__(self) -> list[Record]:
        tokens, space = prompt_of(self.rng, self.prompts, self.page)
        events, run = self._store(tokens, space), self.rng.random()
        while sum("GPU" in media for media in self.names.values()) > self.room:
            gone = next(name for name, media in self.names.items() if "GPU" in media)
            events.append(self._leave([gone], "GPU"))
        copies = [name for name, media in self.names.items() if "CPU" in media]
        here = [name for name, media in self.names.items() if media == ["GPU"]]
        if copies and run < 0.2:
            events.append(self._leave(self.rng.sample(copies, self.rng.randint(1, len(copies))), "CPU"))
        elif here and run < 0.5:
            some = self.rng.sample(here, self.rng.randint(1, min(3, len(here))))
            for name in some:
                self.names[name].append("CPU")
            events.append(Stored(tuple(some), None, (), self.page, "CPU"))
        elif run > 0.97:
            self.names.clear()
            events.append(Cleared())
        return events

    def _store(self, tokens: list[int], space: str) -> list[Record]:
        parent, events, new = None, [], []
        spaces = ((space,),) if space else ()
        first = None
        for at in range(0, len(tokens) - self.page + 1, self.page):
            row = tuple(tokens[at : at + self.page])
            name = self.name(parent, row, space)
            media = self.names.pop(name, [])
            if "GPU" not in media:
                first = parent if not new else first
                new.append((name, row))
            self.names[name] = media if "GPU" in media else [*media, "GPU"]
            if new and ("GPU" in media or at + 2 * self.page > len(tokens)):
                names, rows = zip(*new, strict=True)
                events.append(Stored(names, first, rows, self.page, spaces=spaces * len(names)))
                new = []
            parent = name
        return events

    def _leave(self, names: list[Any], medium: str) -> Removed:
        for name in names:
            self.names[name].remove(medium)
            if not self.names[name]:
                del self.names[name]
        return Removed(tuple(names), medium)


def prompt_of(rng: Random, known: list[Prompt], page: int) -> Prompt:
    """A new prompt, often with the beginning of a known one."""
    tail = [rng.randrange(3) for _ in range(page * rng.randint(1, 4) + rng.randrange(page))]
    head, space = rng.choice(known) if known and rng.random() < 0.7 else ([], rng.choice(("", "", "a", "b")))
    whole = rng.randrange(len(head) // page + 1) * page
    known.append((head[:whole] + tail, space))
    return known[-1]


SERVERS = (OwnTree, MadeUp)

# ---------------------------------------------------------------------- read_batch


def batches_of_everybody(impl: ModuleType) -> None:
    """Batches of every shape, with everything that may stand in them."""
    rng = Random("everybody's")
    for _ in range(40):
        read(impl, random_batch(rng))
    for server in SERVERS:
        as_published(impl, server(rng), 6)


def random_batches(impl: ModuleType, rng: Random) -> None:
    """Random batches of random shapes."""
    for _ in range(40):
        read(impl, random_batch(rng))
    for server in SERVERS:
        as_published(impl, server(rng), 8)


def random_batch(rng: Random) -> Any:
    """What is sent, before it is packed."""
    events = []
    for _ in range(rng.randrange(4)):
        event = random_event(rng)
        kind = rng.random()
        if kind < 0.4 and event["type"] == "BlockStored" and event.get("cache_salt"):
            event = exercises.as_salted_list(event, event["cache_salt"])
        elif kind < 0.4:
            event = exercises.as_list(event, rng.choice((8, 8, 7, 6, 4)))
            event += [0, "full_attention"] if len(event) == 9 and rng.random() < 0.3 else []
        elif kind < 0.5:
            event = {**event, "of_tomorrow": [None, {"x": 1}]}
        elif kind < 0.55:
            event = rng.choice(
                ({"type": "BlockPinned", "block_hashes": [1]}, ["BlockPinned", [1]], ["CacheResized"])
            )
        events.append(event)
    ts = rng.choice((0.0, 3, 1700000000.25, rng.random()))
    if rng.random() < 0.5:
        named = rng.choice(("data_parallel_rank", "attn_dp_rank"))
        return {
            "events": events,
            named: rng.randrange(3),
            "ts": ts,
            **({"seq": 7} if rng.random() < 0.3 else {}),
        }
    return [
        ts,
        events,
        *([rng.randrange(3)] if rng.random() < 0.7 else []),
        *(["x"] if rng.random() < 0.1 else []),
    ]


def random_event(rng: Random) -> dict[str, Any]:
    """An event as a map, now and then with a size that is not so."""
    kind = rng.random()
    if kind < 0.1:
        return dict(exercises.CLEARED)
    name = (lambda: rng.randbytes(4)) if rng.random() < 0.3 else (lambda: rng.randrange(-(2**63), 2**64))
    hashes = [name() for _ in range(rng.randint(1, 4))]
    medium: dict[str, Any] = (
        {} if rng.random() < 0.3 else {"medium": rng.choice(("GPU", "CPU", "DISK", None))}
    )
    if kind < 0.4:
        return exercises.removed(hashes, **medium)
    size = rng.choice((1, 2, 3, 16))
    count = len(hashes) * size + (rng.choice((-1, 1, size)) if rng.random() < 0.1 else 0)
    tokens = rng.choice((None, [])) if rng.random() < 0.15 else [rng.randrange(200_000) for _ in range(count)]
    more: dict[str, Any] = dict(medium)
    if rng.random() < 0.5:
        more["lora_id"] = None
    if rng.random() < 0.4:
        more["lora_name"] = rng.choice(("law", "", None, "poems"))
    if rng.random() < 0.3:
        more["cache_salt"] = rng.choice(("school-a", "law", None))
    if rng.random() < 0.3:
        more["extra_keys"] = rng.choice((None, [rng.choice((None, ["law"], ["x", "y"], [])) for _ in hashes]))
    return exercises.stored(hashes, rng.choice((None, name())), tokens, size, **more)


def as_published(impl: ModuleType, server: Any, requests: int) -> None:
    """What a server tells, packed by the engine's publisher."""
    for number in range(requests):
        payload = encode(Batch(float(number), tuple(server()), 0))
        ours, found = decode(payload), impl.read_batch(payload)
        what = f"read_batch of {msgspec.msgpack.decode(payload)}"
        expect(
            found == (ours.ts, list(ours.events)),
            f"{what} should be {(ours.ts, list(ours.events))}, it is {shown(found)}",
        )


# ---------------------------------------------------------------------- store, remove


def stories_of_everybody_store(impl: ModuleType) -> None:
    """Both servers, from their beginning and from later on."""
    _stories(impl, Random("everybody's"), "store", 4, 14)


def stories_of_everybody_remove(impl: ModuleType) -> None:
    """Both servers, from their beginning and from later on."""
    _stories(impl, Random("everybody's"), "remove", 4, 14)


def random_stories_store(impl: ModuleType, rng: Random) -> None:
    """Random requests to both servers."""
    _stories(impl, rng, "store", 3, 16)


def random_stories_remove(impl: ModuleType, rng: Random) -> None:
    """Random requests to both servers."""
    _stories(impl, rng, "remove", 3, 16)


def _stories(impl: ModuleType, rng: Random, part: str, rounds: int, requests: int) -> None:
    for number in range(rounds):
        for make in SERVERS:
            server = make(rng, page=rng.choice((1, 2, 3)))
            pair = Pair(impl, part)
            for _ in range(4 * (number % 2)):
                server()  # you come late
            for _ in range(requests):
                for event in server():
                    if may_be_told(event, pair.forest):
                        pair.take(event)


def may_be_told(event: Record, forest: Any) -> bool:
    """Not for a copy of what came before you did: what the engine makes of it is more than is asked for."""
    if not isinstance(event, Stored) or event.tokens:
        return True
    return all(name in forest.blocks and forest.blocks[name].seen for name in event.hashes)


# ---------------------------------------------------------------------- order


def streams_of_everybody(impl: ModuleType) -> None:
    """Publishers that lose, forget and begin anew."""
    rng = Random("everybody's")
    for _ in range(80):
        random_stream(impl, rng, 30)


def random_streams(impl: ModuleType, rng: Random) -> None:
    """Random publishers."""
    for _ in range(40):
        random_stream(impl, rng, 30)


def random_stream(impl: ModuleType, rng: Random, moves: int) -> None:
    """One publisher, which is quiet or loses much, with a long buffer, a short one or none."""
    stream = Stream(impl, replay=rng.random() < 0.75, keeps=rng.choice((1, 2, 4, 1000)))
    loses = rng.choice((0.1, 0.3, 0.6))
    for _ in range(rng.choice((0, 0, 3))):
        stream.send(False)
    stream.connect()
    for _ in range(moves):
        move = rng.random()
        if move < 0.45:
            stream.send(rng.random() >= loses)
        elif move < 0.6:
            stream.make_answer()
        elif move < 0.85:
            stream.reply(rng.choice((1, 1, 2, 9)))
        elif move < 0.9:
            stream.begin_anew()
            stream.send(*[False] * rng.choice((0, 0, 1, 4)))
        else:
            stream.connect()
    stream.send(True)
    stream.reply()
    if stream.rank.replay:
        expect(
            not stream.rank.asking,
            "the stream is over, all questions are answered, and rank.asking is still True",
        )


# ---------------------------------------------------------------------- hit


def hits_of_everybody(impl: ModuleType) -> None:
    """Prompts that both servers have seen, asked of what they told."""
    rng = Random("everybody's")
    for _ in range(3):
        random_hits(impl, rng)


def random_hits(impl: ModuleType, rng: Random) -> None:
    """Prompts, some a little different, against the engine's own tree and against names."""
    for make in SERVERS:
        for late in (0, 5):
            server = make(rng, page=rng.choice((1, 2, 3)))
            for _ in range(late):
                server()
            events = [event for _ in range(12) for event in server()]
            forest = exercises.engine.RankBlocks()
            for event in events:
                if may_be_told(event, forest):
                    forest.take(event)
            own: dict[Any, Any] = {}
            exercises.bring_in_line(own, forest)
            asked = []
            for tokens, space in rng.sample(server.prompts, 8):
                tokens = tokens[: rng.randint(0, len(tokens))] + [rng.randrange(3)] * rng.randrange(3)
                asked.append(
                    (tokens, (space,) if space else (), known_length(server, forest, tokens, space, late))
                )
            held = "; ".join(f"{name!r}: {block}" for name, block in list(own.items())[:12])
            exercises.hits(impl, own, asked, f"blocks {{{held}{', ...' if len(own) > 12 else ''}}}")


def known_length(server: Any, forest: Any, tokens: list[int], space: str, late: int) -> int:
    """What the server would hit: as its tree says, or by the names that it gives to blocks.

    Of a tree that was there before you came you know less: what of it hangs together from a beginning on.
    """
    if isinstance(server, OwnTree) and not late:
        return server.cache.peek(RadixKey(tokens, extra_key=space or None))
    if isinstance(server, OwnTree):
        hashes = _names_by_the_publisher(server, tokens, space)
    else:
        hashes, parent = [], None
        for at in range(0, len(tokens) - server.page + 1, server.page):
            parent = server.name(parent, tuple(tokens[at : at + server.page]), space)
            hashes.append(parent)
    done, parent = 0, None
    for name in hashes:
        block = forest.blocks.get(name)
        if block is None or not block.seen or not block.media or block.parent != parent:
            break
        done, parent = done + server.page, name
    return done


def _names_by_the_publisher(server: OwnTree, tokens: list[int], space: str) -> list[Any]:
    """The names that the engine's publisher gives to this prompt's blocks, from a tree of its own."""
    cache, told = RadixCache(server.page), []
    KVEventStream(cache, told.append)
    if len(tokens) >= server.page:
        cache.insert(RadixKey(tokens, extra_key=space or None), list(range(1, len(tokens) + 1)))
    return [name for event in told for name in event.block_hashes]


HIDDEN = {
    "read_batch": [batches_of_everybody, random_batches],
    "store": [stories_of_everybody_store, random_stories_store],
    "remove": [stories_of_everybody_remove, random_stories_remove],
    "order": [streams_of_everybody, random_streams],
    "hit": [hits_of_everybody, random_hits],
}
