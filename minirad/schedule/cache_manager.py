"""The cache manager: what owns each KV slot, from the moment it is handed out until it is free again.

A page is owned by nothing (free), by the tree, or by one row; only its owner can give it up, so that nothing
is freed twice and nothing freed is still in use. The heart is `commit`, the number line of one row after a
forward pass:

    [ 0 ....... protected ....... prefix_len ....... aligned ....... committed )
      the tree's    duplicates of ours:  new: now the     tail: stays ours (unfinished)
      already       freed, row REMAPPED  tree's           or is freed (finished)

Between `protected` and `prefix_len` another request inserted the same tokens first (or the last token
had to be computed again): our slots are duplicates. They are freed and the row is pointed at the
tree's. Skip the remap and every count still adds up, while the row reads freed slots, which soon
hold another request's keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from minirad import rooms
from minirad.cache.allocator import PageAllocator
from minirad.cache.node import RadixKey, Slots
from minirad.cache.prefix_cache import Prefix, PrefixCache, path_slots, usable
from minirad.errors import require
from minirad.observe import events as ev
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request

FREE, TREE, DUMMY = -1, -2, -3  # owners that are no row


class CacheManager:
    """Hands out, passes on and takes back the slots of one pool. See the module's number line.

    keep: False makes the tree stay empty (`radix_cache=False`): a finished request frees everything.
    on_free: called with slots that are free again.

    Attributes:
        tree: the cache, with all that is asked of it where it has only what it must (any_tree.py).
        evicted_tokens, loaded_tokens: since the engine started; loaded: from a second tier.
    """

    def __init__(
        self, cache: PrefixCache, allocator: PageAllocator, rows: ReqToTokenPool, bus: ev.EventBus,
        keep: bool = True, on_free: Callable[[Slots], None] | None = None,
    ) -> None:  # fmt: skip
        self.cache, self.allocator, self.rows, self.bus = cache, allocator, rows, bus
        self.keep, self.on_free = keep, on_free
        self.tree: Any = rooms.room("cache.any_tree").adapted(cache)
        self.evicted_tokens = self.loaded_tokens = 0
        self._owner = np.full(allocator.num_pages + 1, FREE, dtype=np.int64)
        self._owner[0] = DUMMY

    # ------------------------------------------------------------ handing out

    @property
    def room(self) -> int:
        """Slots that are free or can be made so by eviction."""
        return self.allocator.available + self.cache.evictable_size

    def find(self, key: RadixKey, found: Prefix | None = None) -> Prefix:
        """What the tree would match of a key; for order, room and lock.

        found: an earlier answer for this key: nothing is walked again if the tree is as it was.
        """
        return self.tree.find(key, found)  # type: ignore[no-any-return]  # any tree

    def lock(self, key: RadixKey, found: Prefix | None = None, count_hit: bool = True) -> Any:
        """Matches a key and locks what matched, so that it is not evicted; returns the tree's match.

        found: what `find` said of the key. count_hit: whether a tree that counts hits counts this one.
        """
        match = self.tree.match_prefix(key, found=found, count_hit=count_hit)
        self.cache.inc_lock_ref(match.last_node)
        return match

    def unlock(self, match: Any) -> None:
        """Takes the lock on a match back."""
        self.cache.dec_lock_ref(match.last_node)

    def locked(self, key: RadixKey) -> int:
        """How much of this key's match is locked, and so costs no room."""
        return int(self.tree.locked(key))

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
        assert slots is not None, f"{request.id}: no room although room was made"
        begun = np.arange(start, stop) < -(-start // page) * page  # in the page that the row ended in
        self._own(slots, np.where(begun, row, FREE), row)
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
        self._own(slots, np.where(enters, FREE, rows), rows)
        table[rows, at] = slots
        wanted = self.bus.wants(ev.SlotsAllocated)
        for request, slot in zip(requests, slots.tolist(), strict=True):
            request.kv_len += 1
            if wanted:
                self.bus.emit(ev.SlotsAllocated(request.id, (slot,)))

    def take_back(self, request: Request, kv_len: int, cause: str = "released") -> None:
        """Undoes `extend` down to `kv_len`: what is behind it was handed out for tokens that are not to come.

        The rest of a page that begins before it stays the row's.
        """
        page = self.allocator.page_size
        slots = self.rows.rows[request.row, -(-kv_len // page) * page : request.kv_len].copy()
        request.kv_len = kv_len
        self._release(slots, request.row, cause)

    # ------------------------------------------------------------ admission and commit

    def load_back(self, request: Request, match: Any, spare: int) -> Any:
        """Loads the part of a locked match that lies in another tier; returns the match as it is then.

        spare: slots that there are beside those that the request needs anyway.
        """
        return self.tree.init_load_back(self, request, match, spare)

    def cached(self, request: Request, matched: int) -> int:
        """How many of `matched` slots the request can use: whole pages, and one token is always computed."""
        return usable(matched, request.usable_prefix + 1, self.allocator.page_size)

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
        priority, leaf = request.priority, request.leaf
        inserted = self.tree.insert(key, line[: len(key)], priority=priority, grow=leaf)
        prefix_len, node = int(inserted.prefix_len), inserted.last_node
        require(prefix_len >= protected, f"{request.id}: locked {protected}, matched {prefix_len}")
        tree = path_slots(node)
        require(len(tree) == aligned, f"{request.id}: path of {len(tree)} slots, not {aligned}")

        self._release(line[protected:prefix_len].copy(), row, "duplicate")
        line[protected:prefix_len] = tree[protected:prefix_len]
        self.rows.rewritten.add(row)
        self._own(line[prefix_len:aligned], row, TREE)
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
            self.tree.seal(request.leaf)
            request.leaf = node

    # ------------------------------------------------------------ taking back

    def release(self, request: Request, cause: str) -> int:
        """Ends a request's hold: private slots freed, lock and row given back. Nothing is inserted.

        Returns how many private slots were freed.
        """
        private = self.rows.rows[request.row, request.protected_len : request.kv_len].copy()
        self._release(private, request.row, cause)
        self.cache.dec_lock_ref(request.node)
        self.tree.seal(request.leaf)
        self.rows.free(request.row)
        request.row = -1
        request.node = request.leaf = None
        request.kv_len = request.protected_len = request.ahead = 0
        return len(private)

    @property
    def copying(self) -> bool:
        """Copies between the tiers are under way, and lock what they copy."""
        return bool(self.tree.copy_locks)

    def wait_for_copies(self) -> bool:
        """Waits for copies that are under way; False if there are none."""
        return bool(self.tree.wait_for_copies())

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
        require(self.extend(sample, leader.kv_len), f"{sample.id}: no room although room was made")
        source: Slots = self.rows.rows[leader.row, shared : leader.kv_len].copy()
        return source

    def adopt(self, slots: Slots) -> None:
        """Free slots that were just allocated become the tree's."""
        self._own(slots, FREE, TREE)

    def _release(self, slots: Slots, owner: int, cause: str) -> None:
        if len(slots) == 0:
            return
        self._own(slots, owner, FREE)
        self.allocator.free(slots)
        if self.on_free is not None:
            self.on_free(slots)
        if self.bus.wants(ev.SlotsFreed):
            self.bus.emit(ev.SlotsFreed(tuple(slots.tolist()), cause))

    def _own(self, slots: Slots, before: Any, after: Any) -> None:
        """The pages of these slots pass from one owner to another (one for all, or one for each slot)."""
        pages = slots // self.allocator.page_size
        differs = self._owner[pages] != before
        if differs.any():
            wrong = int(differs.argmax())
            held = owner_name(self._owner[pages[wrong]])
            wanted = owner_name(np.broadcast_to(before, pages.shape)[wrong])
            require(False, f"page {pages[wrong]} belongs to {held}, not to {wanted}")
        self._owner[pages] = after

    def check(self, requests: Iterable[Request], pins: Mapping[int, Any]) -> None:
        """Recomputes the owner of every page from tree, rows and free list (observe/check.py)."""
        rooms.room("observe.check").cache_manager(self, requests, pins)


def owner_name(owner: int) -> str:
    names = {FREE: "nobody (free)", TREE: "the tree", DUMMY: "the dummy page"}
    return names.get(owner, f"row {owner}")
