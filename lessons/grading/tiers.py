"""What lesson 10 works on: the engine's own tree over two tiers, some decisions of which are a student's.

`Tiers` is what a student's function is given: the nodes, and the few things that can be done with them.
Whatever is not laid in is the engine's (`HiRadixCache`). `Twins` plays the same requests on a tree with the
student's functions and on one without, and compares node by node after every move. There are no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import ModuleType
from typing import Any, cast

import numpy as np

from lessons.grading.spec import Failure, expect
from lessons.grading.words import shown
from minirad.cache.allocator import PageAllocator
from minirad.cache.radix_cache import EvictResult, MatchResult, RadixKey
from minirad.config import SamplingParams
from minirad.errors import HostCopyError, InvariantError
from minirad.observe import events as ev
from minirad.schedule.cache_manager import TREE, CacheManager
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request
from minirad.tiers.hiradix_cache import SECOND_HIT, Copy, HiRadixCache, HostNode, NothingToCopy

PARTS = ("write_through", "make_host_room", "evict", "load_back")
PLENTY = 10**6  # slots to spare: the games' requests never ask for more than they get


class Node(HostNode):
    """The engine's node, in the words of lesson 10's exercise.py."""

    __slots__ = ()

    @property
    def size(self) -> int:
        return self.units

    @property
    def on_device(self) -> bool:
        return bool(self.packed)

    @property
    def on_host(self) -> bool:
        return self.backed_up

    @property
    def held(self) -> bool:
        return self.host_locks > 0

    @property
    def below(self) -> list[Any]:
        return list(self.children.values())

    def __repr__(self) -> str:
        return name_of(self)


class Tiers:
    """A tree over two tiers as a student's function sees it: see lesson 10's exercise.py."""

    def __init__(self, cache: LaidCache) -> None:
        self._cache = cache

    @property
    def write_back(self) -> bool:
        return self._cache.host_write == "write_back"

    @property
    def host_size(self) -> int:
        return self._cache.host_allocator.num_tokens

    @property
    def host_free(self) -> int:
        return self._cache.host_allocator.available

    @property
    def device_free(self) -> int:
        return self._cache.manager.allocator.available

    def nodes(self) -> list[Node]:
        return [cast(Node, node) for node in self._cache.walk() if node.parent is not None]

    def copy(self, node: Node) -> bool:
        _known(self._cache, node, "copy")
        expect(node.on_device, f"copy: {name_of(node)} is not on the device: there is nothing to copy from")
        expect(not node.on_host, f"copy: {name_of(node)} has a copy on the host already", hint=1)
        above = cast(Node, node.parent)
        words = f"copy: {name_of(above)}, which is above {name_of(node)}, has no copy on the host"
        expect(self.write_back or above.parent is None or above.on_host, words, hint=2)
        begun = self._cache._begin_backup(node)
        self._cache.poll(wait=True)
        return begun and node.on_host

    def demote(self, node: Node) -> None:
        _known(self._cache, node, "demote")
        self._may_leave(node, "demote")
        expect(node.on_device, f"demote: {name_of(node)} is not on the device")
        expect(node.on_host, f"demote: {name_of(node)} has no copy on the host: its KV would be lost", hint=1)
        self._cache.give_back(node)
        self._cache._demote(node)

    def remove(self, node: Node) -> None:
        _known(self._cache, node, "remove")
        self._may_leave(node, "remove")
        expect(not node.held, f"remove: {name_of(node)} is held, something is about to be loaded from it")
        words = f"remove: {_nodes(len(node.children))} below {name_of(node)}, and would be found no more"
        expect(not node.children, words, hint=2)
        if node.on_device:
            self._cache._take_out(node)
        else:
            self._cache._remove_from_host(node)

    def evict(self, num_tokens: int) -> int:
        before = self.device_free
        self._cache.manager.make_room(before + num_tokens)
        return self.device_free - before

    def hold(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            _known(self._cache, node, "hold")
            node.host_locks += 1

    def release(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            expect(node.held, f"release: {name_of(node)} is not held")
        self._cache.release_host(list(nodes))

    def load(self, nodes: Sequence[Node]) -> None:
        chain = list(nodes)
        expect(bool(chain), "load was called with no node")
        for above, node in zip([cast(Any, chain[0]).parent, *chain], chain, strict=False):
            _known(self._cache, node, "load")
            expect(not node.on_device, f"load: {name_of(node)} is on the device already")
            top = above is self._cache.root or above.on_device or above in chain
            expect(node.parent is above and top, f"load: what is above {name_of(node)} is not on the device")
        need = sum(node.size for node in chain)
        slots = self._cache.manager.allocator.alloc(need)
        words = f"load of {need} tokens, but {self.device_free} device slots are free"
        expect(slots is not None, words, hint=1)
        assert slots is not None
        self._cache.load_back(cast("list[HostNode]", chain), slots)
        self._cache.manager.adopt(slots)
        self._cache.poll(wait=True)

    def _may_leave(self, node: Node, what: str) -> None:
        expect(node.lock_ref == 0, f"{what}: {name_of(node)} is locked, a running request reads it")
        for child in node.below:
            words = f"{what}: {name_of(child)} below {name_of(node)} is on the device and needs it"
            expect(not child.on_device, words)


def name_of(node: Any) -> str:
    """A node by what it holds."""
    if node.parent is None and not node.units:
        return "the root"
    return f"node [{' '.join(map(str, node.key.tokens.tolist()))}]"


def _nodes(count: int) -> str:
    return "1 node hangs" if count == 1 else f"{count} nodes hang"


def _known(cache: LaidCache, node: Any, what: str) -> None:
    expect(isinstance(node, Node), f"{what} was given {node!r}, which is no node")
    expect(node.parent is not None, f"{what}: {name_of(node)} is the root, or is in the tree no more")


class Moody(NothingToCopy):
    """A copier without tensors. fails: which of its backups go wrong, counted from 1."""

    def __init__(self, fails: Sequence[int] = ()) -> None:
        self.fails, self.asked = tuple(fails), 0

    def backup(self, device_slots: Any, host_slots: Any) -> Copy:
        self.asked += 1
        if self.asked in self.fails:
            raise HostCopyError("this copy was to go wrong")
        return self


class LaidCache(HiRadixCache):
    """HiRadixCache with functions laid in. `log`: what each of the `watched` decisions came to.

    parts: name (of PARTS) -> function. watched: names whose outcome is noted, laid in or not.
    """

    _Node = Node
    manager: CacheManager

    def __init__(self, parts: Mapping[str, Callable[..., Any]], watched: Sequence[str], **more: Any) -> None:
        self.parts, self.watched = dict(parts), tuple(watched)
        self.log: list[tuple[str, Any]] = []
        self._copied = 0
        super().__init__(**more)
        self.bus.subscribe(ev.BackupEnded, self._count)
        self.tiers = Tiers(self)

    def _count(self, event: ev.BackupEnded) -> None:
        if event.ok:
            ids = set(event.nodes)
            self._copied += sum(node.units for node in self.walk() if node.id in ids)

    def _note(self, name: str, call: str, got: Any) -> None:
        if name in self.watched:
            self.log.append((f"{name}({call})", got))

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self.parts[name](self.tiers, *arguments)

    # -------------------------------------------------------------- write_through

    def seal(self, node: Any) -> None:
        """The request that inserted `node` has ended."""
        if node is None or self.host_write != "write_through":
            return
        self._through(list(reversed(self.path_up(node))), 0)

    def match_prefix(self, key: RadixKey, *, count_hit: bool = True, found: Any = None) -> MatchResult:
        match = super().match_prefix(key, count_hit=count_hit, found=found)
        if count_hit and self.host_write == "write_through_selective":
            below = self.hold_host(match)
            self._through(list(reversed(self.path_up(match.last_node))), SECOND_HIT)
            self.release_host(below)
        return match

    def _back_up(self, path: Sequence[HostNode]) -> None:
        """What the engine calls; `_through` is called instead."""

    def _through(self, path: Sequence[Any], least_hits: int) -> None:
        before, words = self._copied, f"{list(path)}, least_hits={least_hits}"
        if "write_through" in self.parts:
            got = self._ask("write_through", list(path), least_hits)
        else:
            super()._back_up([node for node in path if node.hits >= least_hits])
            self.poll(wait=True)
            got = self._copied - before
        self._note("write_through", words, got)

    # -------------------------------------------------------------- room on the host

    def _host_room(self, num_tokens: int) -> Any:
        if "make_host_room" not in self.parts:
            slots = super()._host_room(num_tokens)
            self._note("make_host_room", str(num_tokens), slots is not None)
            return slots
        got = self._ask("make_host_room", num_tokens)
        self._note("make_host_room", str(num_tokens), got)
        free = self.host_allocator.available
        words = f"make_host_room({num_tokens}) returned {shown(got)}"
        expect(isinstance(got, bool | np.bool_ | int), f"{words}, which is neither True nor False")
        expect(not got or free >= num_tokens, f"{words}, and {free} host slots are free")
        return self.host_allocator.alloc(num_tokens) if got else None

    # -------------------------------------------------------------- eviction

    def evict(self, num_tokens: int) -> EvictResult:
        if "evict" not in self.parts:
            result = super().evict(num_tokens)
            self._note("evict", str(num_tokens), result.num_tokens)
            return result
        before = self.manager.allocator.available
        got = self._ask("evict", num_tokens)
        self._note("evict", str(num_tokens), got)
        given_back = self.manager.allocator.available - before
        return EvictResult(given_back, np.empty(0, dtype=np.int64))

    def give_back(self, node: Node) -> None:
        """Its slots are free at once: what a student's function reads next is true."""
        self.evictable_size -= len(node)
        self.manager._release(node.slots, TREE, "evicted")

    def _take_out(self, node: Node) -> None:
        """Out of both tiers."""
        self.give_back(node)
        if node.host:
            self.host_allocator.free(node.host_slots)
        self._lost_child(node)
        self._remove(node)

    # -------------------------------------------------------------- loading back

    def init_load_back(self, manager: CacheManager, request: Request, match: MatchResult, spare: int) -> Any:
        end = match.host_node if match.host_node is not None else match.last_node
        path = list(reversed(self.path_up(end)))
        words = f"{path}, {len(request.prompt)}, {self.load_back_threshold}"
        if "load_back" not in self.parts:
            before = manager.loaded_tokens
            after = super().init_load_back(manager, request, match, spare)
            self._note("load_back", words, manager.loaded_tokens - before)
            return after
        saved = manager.cached(request, match.length + match.host_length) - manager.cached(
            request, match.length
        )
        free = manager.allocator.available
        got = self._ask("load_back", path, len(request.prompt), self.load_back_threshold)
        self._note("load_back", words, got)
        fewer = f"load_back({words}) evicted something, for a load that would save {saved} tokens"
        expect(saved >= self.load_back_threshold or manager.allocator.available <= free, fewer, hint=2)
        for node in path:
            words = f"load_back held {name_of(node)} and did not release it"
            expect(not cast(Node, node).held, words, hint=2)
        there = [node for node in path if node.parent is not None and cast(Node, node).on_device]
        if not there or there[-1] is match.last_node:
            return match
        self.inc_lock_ref(there[-1])
        self.dec_lock_ref(match.last_node)
        slots = np.concatenate([node.slots for node in there])
        return MatchResult(slots, len(slots), there[-1])


# ---------------------------------------------------------------------- games


class Side:
    """One tree with its pool, and the requests that run on it."""

    def __init__(
        self, parts: Mapping[str, Any], watched: Sequence[str], device: int, host: int, **more: Any
    ) -> None:
        fails = more.pop("fails", ())
        self.cache = LaidCache(parts, watched, host_tokens=host, copier=Moody(fails), **more)
        rows = ReqToTokenPool(16, 128)
        self.manager = CacheManager(self.cache, PageAllocator(device), rows, self.cache.bus)
        self.cache.manager = self.manager
        self.running: dict[str, Request] = {}

    def play(self, *calls: tuple[Any, ...]) -> list[Any]:
        """Calls of the methods below, by name; after each, all copies have ended. What they returned."""
        got = []
        for name, *arguments in calls:
            got.append(getattr(self, name)(*arguments))
            self.cache.poll(wait=True)
        return got

    def start(self, name: str, tokens: Sequence[int]) -> Any:
        """A request is admitted and its prompt computed. Returns how many tokens came from the cache."""
        prompt = np.array(tokens, dtype=np.int64)
        request = Request(name, prompt, SamplingParams(max_new_tokens=1), 0, len(self.running))
        match = self.manager.lock(RadixKey(prompt))
        match = self.manager.load_back(request, match, PLENTY)
        cached = self.manager.cached(request, match.length)
        self.manager.attach(request, match, cached)
        if not self.manager.extend(request, len(prompt)):
            self.manager.release(request, "released")
            return "no room"
        self.manager.commit(request, finished=False)
        self.running[name] = request
        return cached

    def end(self, name: str) -> None:
        request = self.running.pop(name, None)
        if request is not None:
            self.manager.commit(request, finished=True)

    def evict(self, num_tokens: int) -> None:
        self.manager.make_room(self.manager.allocator.available + num_tokens)

    def outline(self) -> dict[tuple[int, ...], Node]:
        """Every node by its path: the tokens from the root to its end."""
        paths: dict[int, tuple[int, ...]] = {self.cache.root.id: ()}
        found: dict[tuple[int, ...], Node] = {}
        for node in self.cache.walk():
            if node.parent is not None:
                paths[node.id] = (*paths[node.parent.id], *node.key.tokens.tolist())
                found[paths[node.id]] = cast(Node, node)
        return found


class Twins:
    """The same requests on a tree with functions of `impl` and on the engine's, compared after every move.

    names: which of PARTS are laid in. device, host: slots. more: host_write, load_back_threshold, fails.
    """

    def __init__(self, impl: ModuleType, *names: str, device: int = 12, host: int = 20, **more: Any) -> None:
        laid = {name: getattr(impl, name) for name in names}
        self.ours, self.theirs = (Side(part, names, device, host, **dict(more)) for part in (laid, {}))
        setup = {"host_write": "write_through", "load_back_threshold": 1, **more}
        setup.pop("fails", None)
        self.setup = f"{device} device slots, {host} host slots, {setup['host_write']}"
        if "load_back" in names:
            self.setup += f", threshold {setup['load_back_threshold']}"
        self.story: list[str] = []

    def play(self, *moves: tuple[Any, ...]) -> None:
        """("start", name, tokens), ("end", name), ("serve", tokens): both at once, ("evict", n)."""
        for kind, *arguments in moves:
            self.story.append(" ".join(map(str, (kind, *arguments))))
            calls = [(kind, *arguments)]
            if kind == "serve":
                name = f"served {len(self.story)}"
                calls = [("start", name, *arguments), ("end", name)]
            try:
                wanted, got = (side.play(*calls) for side in (self.theirs, self.ours))
                self._compare(got, wanted)
            except InvariantError as error:
                raise Failure(f"{self.where}: {error}", self._pictures()) from error
            except Failure as failure:
                raise Failure(f"{self.where}: {failure.words}", self._pictures(), failure.hint) from failure
        try:
            self.ours.cache.check()
        except InvariantError as error:
            raise Failure(f"{self.where}: {error}", self._pictures()) from error

    @property
    def where(self) -> str:
        before = "..., " if len(self.story) > 6 else ""
        return f"{self.setup}; {before}{', '.join(self.story[-6:])}"

    def _pictures(self) -> list[tuple[str, Any]]:
        both = zip(("the engine's own", "with your code"), (self.theirs, self.ours), strict=True)
        return [(title, side.cache.snapshot()) for title, side in both]

    def _compare(self, got: Any, wanted: Any) -> None:
        ours, theirs = ({path: _tiers(node) for path, node in side.outline().items()} for side in self._sides)
        calls = [side.cache.log for side in self._sides]
        if (ours, self._sizes(self.ours), calls[0]) != (theirs, self._sizes(self.theirs), calls[1]):
            raise Failure(self._difference(ours, theirs))
        expect(got == wanted, f"{got} tokens came from the cache instead of {wanted}")
        for log in calls:
            log.clear()

    def _difference(self, ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> str:
        for path, wanted in theirs.items():
            if path not in ours:
                return f"a node should end after {list(path)}, {_place(*wanted)}, and none does"
            if ours[path] != wanted:
                place = f"{_place(*wanted)}, it is {_place(*ours[path])}"
                return f"the node that ends after {list(path)} should be {place}"
        for path in ours:
            if path not in theirs:
                return f"no node should end after {list(path)}, and one does, {_place(*ours[path])}"
        both = zip(self.ours.cache.log, self.theirs.cache.log, strict=False)
        for (call, got), (other, wanted) in both:
            if call != other:
                return f"{call} came where the engine comes to {other}"
            if got != wanted:
                return f"{call} returned {got!r} instead of {wanted!r}"
        got_sizes, sizes = self._sizes(self.ours), self._sizes(self.theirs)
        for name, size in sizes.items():
            if got_sizes[name] != size:
                return f"{name} should be {size}, it is {got_sizes[name]}"
        counts = [len(side.cache.log) for side in self._sides]
        return f"decisions were asked for {counts[0]} times, by the engine's own {counts[1]} times"

    @property
    def _sides(self) -> tuple[Side, Side]:
        return self.ours, self.theirs

    @staticmethod
    def _sizes(side: Side) -> dict[str, int]:
        return {
            "the number of free device slots": side.manager.allocator.available,
            "the number of free host slots": side.cache.host_allocator.available,
            "evictable_size": side.cache.evictable_size,
        }


def _tiers(node: Node) -> tuple[bool, bool]:
    return node.on_device, node.on_host


def _place(on_device: bool, on_host: bool) -> str:
    if on_device:
        return "on both" if on_host else "on the device only"
    return "on the host only"


def random_moves(rng: Random, moves: int = 30, longest: int = 6) -> list[tuple[Any, ...]]:
    """Requests that share beginnings come, run for a while and end; now and then room is asked for."""
    known: list[list[int]] = []
    running: list[str] = []
    made: list[tuple[Any, ...]] = []
    for number in range(moves):
        kind = rng.choice(("serve", "serve", "serve", "start", "end", "evict"))
        if kind == "end" and running:
            made.append(("end", running.pop(rng.randrange(len(running)))))
        elif kind == "evict":
            made.append(("evict", rng.choice((1, 2, 4, 8))))
        elif kind == "start" and len(running) < 2:
            running.append(f"S{number}")
            made.append(("start", running[-1], _prompt(rng, known, longest)))
        else:
            made.append(("serve", _prompt(rng, known, longest)))
    return made


def _prompt(rng: Random, known: list[list[int]], longest: int) -> list[int]:
    """At least one token; often the beginning of a known prompt with something else behind it."""
    tail = [rng.randrange(3) for _ in range(rng.randint(1, longest))]
    head: list[int] = []
    if known and rng.random() < 0.75:
        head = list(rng.choice(known))
        head = head[: rng.randint(1, len(head))]
    prompt = (head + (tail if not head or rng.random() < 0.5 else []))[: 2 * longest]
    known.append(prompt)
    return prompt
