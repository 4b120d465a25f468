"""The tree with a third tier: runs of its KV as files, found again after a restart and by other processes.

Above it all is as in HiRadixCache, whose host tier everything passes through:

    written   when a node's copy in host memory is whole (write_through*), or when its KV is about to be
              forgotten (write_back), and at the end what the tree still holds
    read      when a request is admitted: what continues its match on device and host comes into host slots,
              as a node that lives on the host only, and is loaded back like any other

The tree knows nodes, the disk blocks of equal size (disk_names.py), which do not end where nodes end: a block
is written with the node that it ends in, with what lies in the nodes above; a node that is read begins where
the match ended. A block is found if all blocks before it are in some tier. What a request has of its last,
unfinished block is computed.

Nodes of old weights, and of namespaces that another process could not tell the same, stay in memory. The
folder stays as it is when the tree is flushed.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from minirad.cache.node import Node, RadixKey, Slots
from minirad.cache.radix_cache import MatchResult
from minirad.errors import DiskWarning
from minirad.observe import disk_events as dv
from minirad.schedule.cache_manager import CacheManager
from minirad.schedule.request import Request
from minirad.tiers import disk_names
from minirad.tiers.disk import CLOSE_WAIT, DiskTier
from minirad.tiers.disk_names import Block
from minirad.tiers.hiradix_cache import Copier, HiRadixCache, HostNode, _UnderWay

Digest = Callable[[Hashable], "bytes | None"]


class BlockCopier(Copier, Protocol):
    """A Copier whose tensors can be looked at and filled (host_tier.HostTier)."""

    def copied(self, host_slots: Slots) -> Tensor:
        """A copy of what lies in these host slots, `[n, layers, 2, kv_heads, head_dim]`."""
        ...

    def fill(self, host_slots: Slots, kv: Tensor) -> None:
        """Puts KV of that shape into these host slots."""
        ...

    def fetched(self, device_slots: Slots) -> Tensor:
        """A copy of what lies in these slots of the device, of the same shape."""
        ...


class DiskCache(HiRadixCache):
    """HiRadixCache with a folder of blocks below.

    disk: the folder. weights: a digest of the weights that compute now; asked for when it is needed first,
    and again after `bump_version`.
    namespace_digest: of an extra key, the same in every process; None for one that stays in memory.
    """

    copier: BlockCopier
    parents_are_copied = False  # below a node without a copy there may be one that came from the disk

    def __init__(
        self, *args: Any, disk: DiskTier, weights: Callable[[], bytes],
        namespace_digest: Digest = disk_names.namespace_digest, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **more)
        self.disk, self._weights, self._digest_of = disk, weights, namespace_digest
        self.block = disk_names.block_units(self.page_size)
        self._starts: dict[Any, bytes | None] = {}  # by namespace: where its chain begins
        self._driver = threading.current_thread()
        _open_ones.add(self)

    # -------------------------------------------------------------- names

    def _blocks(self, like: RadixKey | HostNode, data: bytes, count: int) -> list[Block] | None:
        """The first blocks of a path; None for a namespace that stays in memory. like: what is of it."""
        namespace = like.namespace
        if namespace not in self._starts:
            own = self._digest_of(namespace[0])
            layout = self.disk.layout
            self._starts[namespace] = (
                None if own is None else disk_names.chain_start(self._weights(), own, self.page_size, layout)
            )
        start = self._starts[namespace]
        if start is None:
            return None
        return disk_names.blocks_of(start, data, self.block, like.width == 8, count)

    def bump_version(self) -> None:
        """Other weights, another digest: what is on the disk matches again where those weights compute."""
        self.poll(wait=True)  # what was copied is still theirs
        super().bump_version()
        self._starts = {}

    # -------------------------------------------------------------- reading

    def init_load_back(self, manager: CacheManager, request: Request, match: MatchResult, spare: int) -> Any:
        """As of HiRadixCache, after what continues the match on the disk has come to the host."""
        match = self._from_disk(manager, request, match)
        return super().init_load_back(manager, request, match, spare)

    def _from_disk(self, manager: CacheManager, request: Request, match: MatchResult) -> MatchResult:
        """The match, with a further node of the host at its end if there are blocks that continue it."""
        key, there, size = request.key(), match.length + match.host_length, self.block
        usable = manager.cached(request, len(key) // size * size)
        saved = usable - manager.cached(request, match.length)
        if usable <= there or saved < self.load_back_threshold or self.disk.closed:
            return match
        path, at, _, shared = self._walk(key)
        if (at + shared) // key.width != there:  # less was matched than is there: see PrefillBudget.try_admit
            return match
        blocks = self._blocks(key, key.data, -(-usable // size))
        if blocks is None:
            return match
        first = there // size
        found = self.disk.read(blocks[:first], blocks[first:])
        if found.late and self.bus.wants(dv.BlocksLate):
            self.bus.emit(dv.BlocksLate(request.id, found.late, found.microseconds))
        units = min(usable, (first + len(found.kv)) * size) - there
        if units <= 0:
            return match
        host = self._host_slots(match, units)
        if host is None:
            return match
        skipped = there - first * size
        parent = cast(HostNode, path[-1] if path else self.root)
        try:
            self.copier.fill(host, torch.cat(found.kv)[skipped : skipped + len(host)])
        except BaseException as error:
            self.host_allocator.free(host)
            if isinstance(error, Exception):  # whatever goes wrong with a copy: it is computed
                return match
            raise
        leaf = self._add_host_leaf(parent, key, there, host)
        self.disk.stats.read += len(host)
        self.disk.stats.read_blocks += len(found.kv)
        self.disk.stats.read_bytes += len(found.kv) * self.disk.layout.nbytes
        if self.bus.wants(dv.BlocksRead):
            self._tell_read(leaf, request, len(found.kv), found.microseconds)
        return match._replace(host_length=match.host_length + len(host), host_node=leaf)

    def _host_slots(self, match: MatchResult, units: int) -> Slots | None:
        """Host slots for so many units or as many as there is room for; the match loses nothing for it."""
        chain = self.hold_host(match)
        try:
            host = self._host_room(min(units, self.host_allocator.num_tokens))
            if host is None and self.host_allocator.available:
                host = self.host_allocator.alloc(min(units, self.host_allocator.available))
        finally:
            self.release_host(chain)
        return host

    def _add_host_leaf(self, parent: HostNode, key: RadixKey, at: int, host: Slots) -> HostNode:
        """A new node that lives on the host only: the key's units from `at` on, as many as host slots."""
        edge = key.data[at * key.width : (at + len(host)) * key.width]
        first: Any = edge[: key.width * self.page_size]
        if parent is self.root:
            first = (key.namespace, first)
        leaf = HostNode(next(self._ids), parent, first, edge, b"", key)
        leaf.host = host.tobytes()
        leaf.created = leaf.last_access = self._tick
        leaf.hits = 1  # by the request that it came for
        parent.children[first] = leaf
        self._changes += 1
        self._host_queue.offer(leaf.entry)
        return leaf

    def _tell_read(self, leaf: HostNode, request: Request, blocks: int, microseconds: int) -> None:
        assert leaf.parent is not None
        units = tuple(np.frombuffer(leaf.edge, dtype=np.int32).tolist())
        self.bus.emit(
            dv.BlocksRead(
                leaf.id, leaf.parent.id, request.id, units, tuple(leaf.host_slots.tolist()), self._tick,
                self.namespace_number(leaf.namespace), blocks, blocks * self.disk.layout.nbytes, microseconds,
            )
        )  # fmt: skip

    # -------------------------------------------------------------- writing

    def seal(self, node: Node | None) -> None:
        """As of HiRadixCache; a copy that is over at once is written now, not when the next request comes."""
        super().seal(node)
        self.poll()

    def _end_backup(self, backup: _UnderWay, arrived: bool) -> None:
        super()._end_backup(backup, arrived)
        if not self._spills:
            for node in backup.nodes:
                self._write(node)

    def _remove_from_host(self, leaf: HostNode) -> None:
        if self._spills:  # else it was written, and what the disk's bound deleted since is not to come back
            self._write(leaf)
        super()._remove_from_host(leaf)

    def _remove_with_all_below(self, node: HostNode) -> None:
        """With write_back the host had no room for it: from the device it goes to the disk at once."""
        if self._spills:
            self._write(node)
        super()._remove_with_all_below(node)

    def _write(self, node: HostNode) -> None:
        """Puts the blocks that end in a node into the queue. The caller is amid a change: it never raises."""
        try:
            if self.disk.writes and not node.outdated and (node.backed_up or self._spills):
                self._queue_blocks(node)
        except Exception as error:  # no memory, no thread: not to write is never wrong
            self.disk.files.turn_off(f"n{node.id} cannot be written: {error!r}")

    @property
    def _spills(self) -> bool:
        """What is on the device alone may be written, too."""
        return self.host_write == "write_back"

    def _queue_blocks(self, node: HostNode) -> None:
        path = cast("list[HostNode]", self.path_up(node)[::-1])
        end = sum(each.units for each in path)
        first, last = (end - node.units) // self.block, end // self.block
        if first == last:
            return
        blocks = self._blocks(node, b"".join([each.edge for each in path]), last)
        new = [number for number in range(first, last) if not self.disk.has(blocks[number])] if blocks else []
        if not new or blocks is None:
            return
        room = self.disk.room()
        if len(new) > room:
            self.disk.refuse(len(new) - room, "the disk is slower than the engine")
        places = self._places(path)
        put = []
        for number in new[:room]:
            kv = self._gathered(places, number * self.block, (number + 1) * self.block)
            if kv is None:
                break
            put.append((blocks[number], kv))
        if put:
            self.disk.put(blocks, put)

    def _places(self, path: Sequence[HostNode]) -> list[tuple[int, bool, Slots]]:
        """Where the KV of each node of a path lies: its first unit, whether on the host, its slots."""
        places, at = [], 0
        for node in path:
            if node.backed_up:
                places.append((at, True, node.host_slots))
            elif node.packed and self._spills:
                places.append((at, False, node.slots))
            at += node.units
        return places

    def _gathered(self, places: Sequence[tuple[int, bool, Slots]], start: int, stop: int) -> Tensor | None:
        """The KV of units [start, stop) of a path; None if some of it lies nowhere that may be read."""
        parts = []
        for at, on_host, slots in places:
            own = slots[max(start - at, 0) : max(stop - at, 0)]
            if len(own):
                parts.append(self.copier.copied(own) if on_host else self.copier.fetched(own))
        if sum(map(len, parts)) != stop - start:
            return None
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # -------------------------------------------------------------- the engine's hooks

    def before_step(self) -> None:
        """Notes which copies have ended, and tells what the disk did meanwhile."""
        self._driver = threading.current_thread()
        super().before_step()
        self.tell()

    def tell(self) -> None:
        """Events and warnings for what the disk's threads did since the last time."""
        for note in self.disk.notes():
            files = self.disk.files.files, self.disk.files.nbytes
            if note.what == "written":
                if self.bus.wants(dv.BlocksWritten):
                    tokens = note.blocks * self.block
                    self.bus.emit(
                        dv.BlocksWritten(note.blocks, tokens, note.bytes, note.microseconds, *files)
                    )
            elif self.bus.wants(dv.BlocksDropped):
                self.bus.emit(dv.BlocksDropped(note.blocks, note.bytes, note.what, note.why[:500], *files))
        for sentence in self.disk.warnings():
            _warn(sentence)

    def close(self, seconds: float = CLOSE_WAIT) -> bool:
        """Writes what the tree holds and the disk has not, and ends the disk's threads; twice does no harm.

        The tree goes on without a disk. False, and a warning, if it took longer than so many seconds: the
        rest is lost.
        """
        if self.disk.closed:
            return True
        _open_ones.discard(self)
        self.poll(wait=True)
        self._write_all()
        done = self.disk.close(seconds)
        self.tell()
        if not done:
            _warn(f"{self.disk.files.folder} took more than {seconds:.0f} seconds: {self.disk.queued} blocks "
                  "are not written")  # fmt: skip
        return done

    def __del__(self) -> None:
        """Let go without `close`. What was copied when it was computed is queued; here is the rest."""
        disk = getattr(self, "disk", None)
        if disk is None or disk.closed or not self._spills:
            return
        with contextlib.suppress(Exception):
            disk.last_words()
            self._write_all()

    def _write_all(self) -> None:
        """Queues what the disk has not, whatever is queued already, as far as it has room for it."""
        self.disk.queue_bytes = max(self.disk.queue_bytes, self.disk.files.most_bytes)
        for node in self._latest(self.disk.files.most_bytes // self.disk.layout.nbytes):
            self._write(node)

    def _latest(self, blocks: int) -> list[HostNode]:
        """The nodes that were used last, about so many blocks of them, those used last at the end."""
        nodes = [cast(HostNode, node) for node in self.walk() if node is not self.root]
        nodes.sort(key=lambda node: node.last_access, reverse=True)
        ends = np.cumsum([node.units for node in nodes])
        return nodes[: int(np.searchsorted(ends, blocks * self.block, side="right")) + 1][::-1]

    # -------------------------------------------------------------- looking at it

    def snapshot(self) -> dict[str, Any]:
        """As of HiRadixCache, with the size of the disk tier."""
        return {**super().snapshot(), "disk_bytes": self.disk.files.most_bytes}


def _warn(sentence: str) -> None:
    warnings.warn(f"disk tier: {sentence}", DiskWarning, stacklevel=3)


_open_ones: weakref.WeakSet[DiskCache] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Whoever did not close a tree: it is done now, unless a thread may be in the middle of a step."""
    deadline = time.monotonic() + CLOSE_WAIT
    for cache in list(_open_ones):
        left, driver = max(deadline - time.monotonic(), 0.0), cache._driver
        try:
            if driver is threading.current_thread() or not driver.is_alive():
                cache.close(left)
            else:
                cache.disk.close(left)
                if cache._spills:
                    raise RuntimeError("a step was still running")
        except BaseException as error:  # Ctrl-C again, a warning that is to be an error
            why = " ".join(str(error).split()) or type(error).__name__
            print(f"disk tier: not all was written to {cache.disk.files.folder}: {why}", file=sys.stderr)
