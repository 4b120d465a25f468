"""Who owns which KV slot, from the moment it is handed out until it is free again.

A page is owned by nobody (free), by the tree, or by one row; whoever gives it up must be its owner,
so that nothing is freed twice and nothing freed is still in use. The heart is `commit`, the number
line of one row after a forward pass:

    [ 0 ....... protected ....... prefix_len ....... aligned ....... committed )
      the tree's    duplicates of ours:  new: now the     tail: stays ours (unfinished)
      already       freed, row REMAPPED  tree's           or is freed (finished)

Between `protected` and `prefix_len` somebody else inserted the same tokens first (or the last token
had to be computed again): our slots are duplicates. They are freed and the row is pointed at the
tree's. Skip the remap and every count still adds up, while the row reads freed slots, which soon
hold another request's keys and values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from minirad import events as ev
from minirad.cache.allocator import PageAllocator
from minirad.cache.hiradix_cache import HiRadixCache
from minirad.cache.radix_cache import MatchResult, RadixKey, Slots
from minirad.errors import require
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request

FREE, TREE, DUMMY = -1, -2, -3  # owners that are no row


class PrefixCache(Protocol):
    """What the engine asks of a tree: RadixCache, or a student's own."""

    page_size: int

    def peek(self, key: RadixKey) -> int: ...
    def match_prefix(self, key: RadixKey) -> Any: ...
    def insert(self, key: RadixKey, slots: Any, priority: int = 0) -> Any: ...
    def inc_lock_ref(self, node: Any) -> Any: ...
    def dec_lock_ref(self, node: Any) -> Any: ...
    def evict(self, num_tokens: int) -> Any: ...
    def walk(self) -> Iterable[Any]: ...
    def reset(self) -> None: ...
    @property
    def evictable_size(self) -> int: ...
    @property
    def protected_size(self) -> int: ...


class Prefix(NamedTuple):
    """What a tree would match of a key: a look that changes nothing.

    length: matched units, whole pages. cost: how many evictable tokens locking them would protect; 0 where
    the tree cannot say.
    """

    length: int
    cost: int


def path_slots(node: Any) -> Slots:
    """All slots from the root down to the end of `node`; works on anybody's nodes."""
    parts = []
    while node.parent is not None:
        parts.append(np.asarray(node.slots, dtype=np.int64))
        node = node.parent
    return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int64)


class SlotOwnership:
    """Hands out, passes on and takes back the slots of one pool. See the module's number line.

    keep: False makes the tree stay empty (`radix_cache=False`): a finished request frees everything.
    on_free: called with slots that nobody owns any more.
    load_back_threshold: the fewest tokens that are loaded back from the host (of a tree that has one).
    """

    def __init__(
        self,
        cache: PrefixCache,
        allocator: PageAllocator,
        rows: ReqToTokenPool,
        bus: ev.EventBus,
        keep: bool = True,
        on_free: Callable[[Slots], None] | None = None,
        load_back_threshold: int = 1,
    ) -> None:
        self.cache, self.allocator, self.rows, self.bus = cache, allocator, rows, bus
        self.keep = keep
        self.on_free = on_free
        self.load_back_threshold = load_back_threshold
        self.loaded_tokens = 0  # from the host, since the engine started
        self._tiers: HiRadixCache | None = cache if isinstance(cache, HiRadixCache) else None
        self.evicted_tokens = 0  # since the engine started; a step's share is a difference
        self._owner = np.full(allocator.num_pages + 1, FREE, dtype=np.int64)
        self._owner[0] = DUMMY
        self._insert_options = inspect.signature(cache.insert).parameters

    # ------------------------------------------------------------ handing out

    @property
    def room(self) -> int:
        """Slots that are free or can be made so by eviction."""
        return self.allocator.available + self.cache.evictable_size

    def lock_cost(self, key: RadixKey) -> int:
        """What locking this key's match would take from `room`; 0 where the tree cannot say."""
        ask = getattr(self.cache, "lock_cost", None)
        return int(ask(key)) if ask is not None else 0

    def find(self, key: RadixKey, found: Prefix | None = None) -> Prefix:
        """What the tree would match of a key; for order, room and lock. found: an earlier answer."""
        return Prefix(int(self.cache.peek(key)), self.lock_cost(key))

    def lock(self, key: RadixKey, found: Prefix | None = None) -> Any:
        """Matches a key and locks what matched, so that it is not evicted; returns the tree's match.

        found: what `find` said of the key.
        """
        match = self.cache.match_prefix(key)
        self.cache.inc_lock_ref(match.last_node)
        return match

    def unlock(self, match: Any) -> None:
        """Takes the lock on a match back."""
        self.cache.dec_lock_ref(match.last_node)

    def locked(self, key: RadixKey) -> int:
        """How much of this key's match is locked, and so costs no room; a tree that cannot say is tried."""
        cache, ask = self.cache, getattr(self.cache, "lock_cost", None)
        if ask is not None:
            return cache.peek(key) - int(ask(key))
        match, before = cache.match_prefix(key), self.room
        cache.inc_lock_ref(match.last_node)
        cost = before - self.room
        cache.dec_lock_ref(match.last_node)
        return int(match.length) - cost

    def make_room(self, num_tokens: int) -> bool:
        """Evicts the shortfall, not the whole need; False if even that leaves too little."""
        shortfall = num_tokens - self.allocator.available
        if shortfall > 0:
            evicted = self.cache.evict(shortfall)
            self.evicted_tokens += int(evicted.num_tokens)
            self._release(np.asarray(evicted.slots, dtype=np.int64), TREE, "evicted")
        return self.allocator.available >= num_tokens

    def extend(self, request: Request, stop: int) -> bool:
        """Gives the request's row slots for positions [kv_len, stop), evicting if need be.

        False, with nothing handed out, when there is not enough room even so.
        """
        start, row, page = request.kv_len, request.row, self.allocator.page_size
        if not self.make_room(self.allocator.pages_needed(start, stop) * page):
            return False
        last = int(self.rows.rows[row, start - 1]) if start % page else 0
        slots = self.allocator.alloc_extend(start, stop, last)
        require(slots is not None, f"{request.id}: no room although room was made")
        assert slots is not None
        pages = slots // page
        theirs = pages[(self._owner[pages] != FREE) & (self._owner[pages] != row)]
        require(len(theirs) == 0, f"{request.id} was given page {theirs[:1]}, which has an owner")
        self._owner[pages] = row
        self.rows.rows[row, start:stop] = slots
        request.kv_len = stop
        if len(slots) and self.bus.wants(ev.SlotsAllocated):
            self.bus.emit(ev.SlotsAllocated(request.id, tuple(slots.tolist())))
        return True

    def need_by_one(self, requests: Iterable[Request]) -> int:
        """Slots of the pages that these enter with their next token."""
        page = self.allocator.page_size
        return page * sum(request.kv_len % page == 0 for request in requests)

    def extend_by_one(self, requests: Sequence[Request]) -> None:
        """One more slot for each of many decoding requests, for which there is room (`make_room`).

        What `extend` does for each, in a few array operations for all.
        """
        page, table = self.allocator.page_size, self.rows.rows
        rows = np.array([request.row for request in requests])
        at = np.array([request.kv_len for request in requests])
        slots = table[rows, at - 1] + 1
        enters = at % page == 0
        fresh = self.allocator.alloc(int(enters.sum()) * page)
        assert fresh is not None, f"{requests[0].id} cannot decode although room was made"
        slots[enters] = fresh[::page]
        pages = slots // page
        theirs = np.flatnonzero(self._owner[pages] != np.where(enters, FREE, rows))
        if len(theirs):
            wrong = int(theirs[0])
            require(False, f"{requests[wrong].id} was given page {pages[wrong]}, which has an owner")
        self._owner[pages] = rows
        table[rows, at] = slots
        wanted = self.bus.wants(ev.SlotsAllocated)
        for request, slot in zip(requests, slots.tolist(), strict=True):
            request.kv_len += 1
            if wanted:
                self.bus.emit(ev.SlotsAllocated(request.id, (slot,)))

    def take_back_one(self, request: Request) -> None:
        """Undoes the last slot of `extend_by_one`: it was handed out for a token that is not to come."""
        request.kv_len -= 1
        if request.kv_len % self.allocator.page_size == 0:
            slot = self.rows.rows[request.row, request.kv_len : request.kv_len + 1].copy()
            self._release(slot, request.row, "released")

    # ------------------------------------------------------------ admission and commit

    def load_back(self, request: Request, match: Any, spare: int) -> Any:
        """Brings back what of a locked match lies on the host only: all of that or nothing.

        Returns the match as it is then; the lock has moved along with its end. Nothing is loaded where it
        would save less than the threshold, and when there is no room even after evicting.
        spare: slots that there are beside those that the request needs anyway. What is loaded takes the
        place of what would be computed, but for the end that has to be computed once more.
        """
        tiers, length = self._tiers, getattr(match, "host_length", 0)
        if tiers is None or length == 0:
            return match
        total = match.length + length
        usable = self.cached(request, total)
        saved = usable - self.cached(request, match.length)
        if saved < self.load_back_threshold or total - usable > spare:
            return match
        chain = tiers.hold_host(match)  # so that making room on the device does not cost the host its copy
        slots, loaded = None, False
        try:
            slots = self.allocator.alloc(length) if self.make_room(length) else None
            loaded = slots is not None and tiers.load_back(chain, slots)
        finally:  # whatever the copying raises
            tiers.release_host(chain)
            if slots is not None and not loaded:
                self.allocator.free(slots)
        if slots is None or not loaded:
            return match
        self._owner[slots // self.allocator.page_size] = TREE
        self.loaded_tokens += length
        self.cache.inc_lock_ref(chain[-1])
        self.cache.dec_lock_ref(match.last_node)
        whole = np.concatenate((match.slots, slots))
        return MatchResult(whole, len(whole), chain[-1])

    def cached(self, request: Request, matched: int) -> int:
        """How many of `matched` slots the request can use: whole pages, and one token is always computed."""
        page = self.allocator.page_size
        return min(matched, request.usable_prefix) // page * page

    def attach(self, request: Request, match: Any, cached: int) -> None:
        """Points a new row at the first `cached` slots of a match whose node is locked already."""
        request.row = self.rows.alloc()
        request.node, request.leaf = match.last_node, None
        request.kv_len = request.protected_len = cached
        self.rows.rows[request.row, :cached] = match.slots[:cached]

    def commit(self, request: Request, finished: bool) -> None:
        """Passes what was computed on to the tree, by the number line above.

        Unfinished: the row goes on, pointing at the tree's slots, and the lock moves down to the new
        end of its path. Finished: the lock and the row are given up, the tail is freed.
        """
        if not self.keep:
            if finished:
                self.release(request, "released")
            return
        row, committed, protected = request.row, request.kv_len, request.protected_len
        key, line = request.committed_key(), self.rows.rows[row]
        aligned = len(key) // self.allocator.page_size * self.allocator.page_size
        inserted = self._insert(request, key, line[: len(key)])
        prefix_len, node = int(inserted.prefix_len), inserted.last_node
        require(prefix_len >= protected, f"{request.id}: locked {protected}, matched {prefix_len}")
        tree = path_slots(node)
        require(len(tree) == aligned, f"{request.id}: path of {len(tree)} slots, not {aligned}")

        self._release(line[protected:prefix_len].copy(), row, "duplicate")
        line[protected:prefix_len] = tree[protected:prefix_len]
        self.rows.rewritten.add(row)
        self._pass_on(line[prefix_len:aligned], row)
        request.protected_len = aligned
        if self.bus.wants(ev.Committed):
            self.bus.emit(ev.Committed(request.id, node.id, prefix_len, aligned, committed, finished))
        if finished:
            if prefix_len < aligned:
                request.leaf = node
            self.release(request, "tail")
            return
        self.cache.inc_lock_ref(node)  # before the old one goes, so that nothing is evicted between
        self.cache.dec_lock_ref(request.node)
        request.node = node
        if prefix_len < aligned and node is not request.leaf:
            self._complete(request.leaf)
            request.leaf = node

    def _insert(self, request: Request, key: RadixKey, slots: Slots) -> Any:
        options: dict[str, Any] = {"priority": request.priority, "grow": request.leaf}
        known = {name: value for name, value in options.items() if name in self._insert_options}
        return self.cache.insert(key, slots, **known)

    # ------------------------------------------------------------ taking back

    def release(self, request: Request, cause: str) -> int:
        """Ends a request's hold: private slots freed, lock and row given back. Nothing is inserted.

        Returns how many private slots were freed.
        """
        private = self.rows.rows[request.row, request.protected_len : request.kv_len].copy()
        self._release(private, request.row, cause)
        self.cache.dec_lock_ref(request.node)
        self._complete(request.leaf)
        self.rows.free(request.row)
        request.row = -1
        request.node = request.leaf = None
        request.kv_len = request.protected_len = request.ahead = 0
        return len(private)

    @property
    def copying(self) -> bool:
        """Copies between the tiers are under way, and lock what they copy."""
        return self._tiers is not None and bool(self._tiers.copy_locks)

    def settle(self) -> bool:
        """Waits for copies that are under way; False if there are none.

        What was just given up may be locked by its own copy.
        """
        if self._tiers is None or not self.copying:
            return False
        self._tiers.poll(wait=True)
        return True

    def _complete(self, leaf: Any) -> None:
        """Nobody will grow this leaf any more: a tree with a second tier may copy it now."""
        if leaf is not None and self._tiers is not None:
            self._tiers.seal(leaf)

    def flush(self) -> None:
        """Empties the tree. Only for when nothing is locked."""
        slots = [np.asarray(node.slots) for node in self.cache.walk() if node.parent is not None]
        self.cache.reset()
        if slots:
            self._release(np.concatenate(slots).astype(np.int64), TREE, "flushed")

    def fork(self, leader: Request, sample: Request) -> Slots | None:
        """Gives a further sample its own row on the leader's path; None when there is no room.

        The tree's part is shared and locked once more; a partial last page is private, so the
        sample gets a page of its own. Returns the leader's slots that have to be copied into it.
        """
        shared, page = leader.protected_len, self.allocator.page_size
        tail = leader.kv_len - shared
        if not self.rows.available or not self.make_room(-(-tail // page) * page):
            return None
        self.cache.inc_lock_ref(leader.node)
        sample.row, sample.node, sample.leaf = self.rows.alloc(), leader.node, None
        sample.kv_len = sample.protected_len = shared
        self.rows.rows[sample.row, :shared] = self.rows.rows[leader.row, :shared]
        if self.bus.wants(ev.RequestForked):
            self.bus.emit(ev.RequestForked(sample.id, leader.id, sample.row, tail))
        extended = self.extend(sample, leader.kv_len)
        assert extended, f"{sample.id}: no room although room was made"
        source: Slots = self.rows.rows[leader.row, shared : leader.kv_len].copy()
        return source

    def _pass_on(self, slots: Slots, row: int) -> None:
        self._require_owner(slots, row)
        self._owner[slots // self.allocator.page_size] = TREE

    def _release(self, slots: Slots, owner: int, cause: str) -> None:
        if len(slots) == 0:
            return
        self._require_owner(slots, owner)
        self._owner[self.allocator.free(slots)] = FREE
        if self.on_free is not None:
            self.on_free(slots)
        if self.bus.wants(ev.SlotsFreed):
            self.bus.emit(ev.SlotsFreed(tuple(slots.tolist()), cause))

    def _require_owner(self, slots: Slots, owner: int) -> None:
        pages = slots // self.allocator.page_size
        wrong = pages[self._owner[pages] != owner]
        if len(wrong):
            page = int(wrong[0])
            held = _owner_name(int(self._owner[page]))
            require(False, f"page {page} belongs to {held}, not to {_owner_name(owner)}")

    # ------------------------------------------------------------ checking

    def check(self, requests: Iterable[Request], pins: Mapping[int, Any]) -> None:
        """Recomputes who owns what from the tree, the rows and the free list.

        Every page has exactly one owner; every row points at its locked path and then at pages of its
        own; every lock of a node's own is held by a row or a pin.
        """
        self.allocator.check()
        live = [request for request in requests if request.row >= 0]
        page_size = self.allocator.page_size
        expected = np.full_like(self._owner, FREE)
        expected[0] = DUMMY
        in_tree = []
        for node in self.cache.walk():
            if node.parent is not None:
                in_tree.append(np.asarray(node.slots, dtype=np.int64)[::page_size] // page_size)
        tree_pages = np.concatenate(in_tree) if in_tree else np.empty(0, dtype=np.int64)
        require(len(np.unique(tree_pages)) == len(tree_pages), "two nodes hold one page")
        expected[tree_pages] = TREE
        for request in live:
            request.check()
            self._check_row(request, expected)
        free = self.allocator.free_pages()
        doubly = free[expected[free] != FREE]
        require(len(doubly) == 0, f"page {doubly[:1]} is free and in use")
        for page in np.flatnonzero(expected != self._owner)[:1].tolist():
            found, noted = _owner_name(int(expected[page])), _owner_name(int(self._owner[page]))
            require(False, f"page {page} is held by {found}, booked to {noted}")
        lost = np.flatnonzero(expected == FREE)
        leaked = np.setdiff1d(lost, free)
        require(len(leaked) == 0, f"page {leaked[:1]} is owned by nobody and not free")
        self._check_locks(live, pins)

    def _check_row(self, request: Request, expected: Slots) -> None:
        line, page_size = self.rows.rows[request.row], self.allocator.page_size
        shared = path_slots(request.node)[: request.protected_len]
        same = np.array_equal(line[: request.protected_len], shared)
        require(same, f"{request.id}: its row does not point at its locked path")
        pages = np.unique(line[request.protected_len : request.kv_len] // page_size)
        taken = pages[expected[pages] != FREE]
        require(len(taken) == 0, f"{request.id}: its page {taken[:1]} has another owner, too")
        expected[pages] = request.row

    def _check_locks(self, live: list[Request], pins: Mapping[int, Any]) -> None:
        holders: dict[int, int] = {}
        copies = self._tiers.copy_locks if self._tiers is not None else []
        for node in [request.node for request in live] + list(pins.values()) + copies:
            holders[node.id] = holders.get(node.id, 0) + 1
        for node in self.cache.walk():
            if node.parent is None:
                continue
            children = node.children
            below = sum(c.lock_ref for c in getattr(children, "values", lambda c=children: c)())
            own, held = node.lock_ref - below, holders.get(node.id, 0)
            require(own == held, f"n{node.id}: {own} locks of its own, {held} rows, pins and copies hold it")


def _owner_name(owner: int) -> str:
    names = {FREE: "nobody (free)", TREE: "the tree", DUMMY: "the dummy page"}
    return names.get(owner, f"row {owner}")
