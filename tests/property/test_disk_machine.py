"""Tree, host tier and disk against a model: keys and values are a function of all tokens before them.

No Llama computes here. What a forward pass would write is known for each position, so any slot that holds
another path's, another namespace's or other weights' KV shows at once, wherever it came from. Beside that the
machine knows which blocks lie in the folder, and so what an admission must find.

Threads do their jobs at once here, so that a game can be played again; test_disk_files.py has real ones.
MINIRAD_DISK_EXAMPLES sets how many games are played.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import ToldTier

from minirad.cache.allocator import PageAllocator
from minirad.cache.eviction import POLICIES
from minirad.config import HOST_WRITE, EngineConfig, SamplingParams
from minirad.kv.kv_pool import KVPool
from minirad.observe import disk_events as dv
from minirad.observe.bus import EventBus
from minirad.observe.event import ReplayState
from minirad.observe.snapshot import bare_snapshot
from minirad.schedule.cache_manager import CacheManager
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request
from minirad.tiers import disk_names
from minirad.tiers.disk import DiskTier
from minirad.tiers.disk_cache import DiskCache
from minirad.tiers.disk_files import Worker
from minirad.tiers.disk_names import Layout, block_units
from minirad.tiers.host_tier import HostTier

EXAMPLES = int(os.environ.get("MINIRAD_DISK_EXAMPLES", "45"))
STEPS = 40
PHASES = [Phase.generate, Phase.shrink] if "MINIRAD_SHRINK" in os.environ else [Phase.generate]
UNITS = 8  # of a block here, at least
DEVICE, ROWS = 96, 4
PRIME = 65521
HAPPENED: Counter[str] = Counter()
REACHED = (
    "read", "read from within a node", "read below the root", "read again",
    "read after a restart", "read by a second process", "less room than blocks", "BlocksWritten",
    "BlocksDropped", "broken", "deleted", "new weights", "no namespace on disk", "written by another process",
)  # fmt: skip
BASES = [[number * 7 % 5 + 5 for number in range(80)], [number % 3 + 5 for number in range(80)]]
NAMESPACES: list[Any] = [None, None, None, "tenant", ("a", 1), 2.5]  # the last one stays in memory

prompts = st.builds(
    lambda base, length, ending: [*BASES[base][:length], *ending] or [5],
    st.integers(0, 1), st.sampled_from([7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 48, 64]),
    st.lists(st.sampled_from([5, 6]), max_size=3),
)  # fmt: skip


def kv_of(tokens: Any, namespace: Any, weights: int, bigram: bool) -> torch.Tensor:
    """What each unit's slot must hold, float32 [units, 1, 2, 1, 1]."""
    value, values = weights * 991 + 17, []
    for letter in repr(namespace):
        value = (value * 31 + ord(letter)) % PRIME
    for token in tokens:
        value = (value * 31 + int(token) + 7) % PRIME
        values.append(value)
    if bigram:  # also of the next token
        values = [(v * 31 + int(t)) % PRIME for v, t in zip(values, [*tokens[1:], 0], strict=True)]
    flat = torch.tensor(values, dtype=torch.float32)
    return torch.stack((flat, -flat), dim=1).view(-1, 1, 2, 1, 1)


class Seen(DiskCache):
    """Notes what the disk brought: units before and after, and host slots that were left."""

    looked: Any = None

    def _from_disk(self, manager: Any, request: Any, match: Any) -> Any:
        found = super()._from_disk(manager, request, match)
        there = match.length + match.host_length
        self.looked = match.length, there, found.length + found.host_length, self.host_allocator.available
        return found


class DiskMachine(RuleBasedStateMachine):
    @initialize(
        page=st.sampled_from([1, 1, 2, 4, 16]), write=st.sampled_from(HOST_WRITE),
        host=st.sampled_from([16, 32, 48, 64, 128, 256]), bound=st.sampled_from([3, 8, 1000, 1000]),
        policy=st.sampled_from(sorted(POLICIES)), bigram=st.booleans(),
        threshold=st.sampled_from([1, 1, 6]),
    )  # fmt: skip
    def start(self, **sizes: Any) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.sizes, self.weights = sizes, 0
        self.page, self.bigram = sizes["page"], sizes["bigram"]
        self.block = block_units(self.page)
        self.spoilt: set[str] = set()  # names of files that this machine deleted or damaged
        self.read_names: set[str] = set()
        self.bound = sizes["bound"] * 1500
        self.born = 0
        self.next_id = 1
        self.open()

    def open(self) -> None:
        """A process begins."""
        sizes = self.sizes
        self.born += 1
        layout = Layout((self.block, 1, 2, 1, 1), torch.float32, self.bigram)
        self.pool = KVPool(1, DEVICE + self.page, 1, 1, dtype=torch.float32, device="cpu")
        config = EngineConfig(host_kv_tokens=sizes["host"], page_size=self.page)
        self.told = ToldTier(HostTier(self.pool, config), HAPPENED)
        self.cache = Seen(
            self.page, sizes["policy"], host_tokens=sizes["host"], host_write=sizes["write"],
            copier=self.told, load_back_threshold=sizes["threshold"],
            disk=DiskTier(self.folder, self.bound, layout), weights=lambda: b"%d" % self.weights,
        )  # fmt: skip
        self.rows = ReqToTokenPool(ROWS, 128)
        self.manager = CacheManager(
            self.cache, PageAllocator(DEVICE, self.page), self.rows, EventBus(), on_free=self.freed
        )
        self.live: list[Request] = []
        self.names = self.in_folder()  # from before this process
        self.replay = ReplayState(bare_snapshot(self.cache))
        self.cache.bus.subscribe(None, self.hear)

    def hear(self, event: Any) -> None:
        self.replay.apply(event)
        HAPPENED[type(event).__name__] += 1
        if isinstance(event, dv.BlocksDropped) and event.what == "broken":
            HAPPENED["broken"] += 1

    def freed(self, slots: Any) -> None:
        self.pool.poison(torch.from_numpy(np.asarray(slots)))

    def in_folder(self) -> set[str]:
        return {path.name[:64] for path in self.folder.glob("*.safetensors")}

    # ------------------------------------------------------------ requests

    @precondition(lambda self: len(self.live) < ROWS)
    @rule(tokens=prompts, namespace=st.sampled_from(NAMESPACES), finish=st.booleans())
    def ask(self, tokens: list[int], namespace: Any, finish: bool) -> None:
        request = Request(
            f"R{self.next_id}", np.array(tokens, dtype=np.int64), SamplingParams(max_new_tokens=20), 0,
            self.next_id, namespace, is_bigram=self.bigram,
        )  # fmt: skip
        self.next_id += 1
        manager, key = self.manager, request.key()
        found = manager.find(key)
        need = manager.allocator.pages_needed(manager.cached(request, found.length), request.length)
        need = (need + 1) * self.page
        if manager.room - found.cost < need:
            return
        wanted = self.wanted(request)
        match = manager.lock(key, found)
        match = manager.load_back(request, match, spare=manager.room - need)
        self.judge(request, wanted)
        manager.attach(request, match, manager.cached(request, match.length))
        self.compute(request, request.length)
        self.live.append(request)
        if finish:
            self.finish(0)

    @precondition(lambda self: len(self.live) < ROWS)
    @rule(asked=st.lists(prompts, min_size=2, max_size=5))
    def ask_many(self, asked: list[list[int]]) -> None:
        """One after another, as most requests come; in time the tree forgets some of it."""
        for tokens in asked:
            self.ask(tokens, None, True)
            self.step(4)

    def compute(self, request: Request, stop: int) -> None:
        """A forward pass: what was there is looked at, the rest is written."""
        start, row = request.kv_len, self.rows.rows[request.row]
        if not self.manager.extend(request, stop):
            self.live = [other for other in self.live if other is not request]
            self.manager.release(request, "retracted")
            return
        self.cache.before_launch()
        self.look(request, start)
        wanted = kv_of(request.tokens[:stop], request.extra_key, self.weights, self.bigram)
        if self.bigram and start > request.protected_len:
            start -= 1  # the token behind it is known only now; it is in a page of the row's own
        slots = torch.from_numpy(row[start:stop].copy())
        self.pool.write(0, slots, wanted[start:, 0, 0], wanted[start:, 0, 1])
        self.manager.commit(request, False)
        self.look(request, request.protected_len)

    def look(self, request: Request, stop: int) -> None:
        """All that its row points at, up to `stop`, is its own path's."""
        slots = torch.from_numpy(self.rows.rows[request.row, :stop].copy())
        stop -= (
            self.bigram and stop > request.protected_len
        )  # the last pair was not known when it was written
        wanted = kv_of(request.tokens, request.extra_key, self.weights, self.bigram)[:stop]
        for found, part in ((self.pool.k[0], 0), (self.pool.v[0], 1)):
            assert torch.equal(found[slots[:stop]], wanted[:, 0, part]), (request.id, stop)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, ROWS), token=st.sampled_from([5, 6, 9]))
    def decode(self, number: int, token: int) -> None:
        request = self.live[number % len(self.live)]
        if len(request.output) < request.params.max_new_tokens:
            request.append(token, 0.0)
            self.compute(request, request.length)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, ROWS))
    def finish(self, number: int) -> None:
        if self.live:
            request = self.live.pop(number % len(self.live))
            self.look(request, request.kv_len)
            self.manager.commit(request, True)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, ROWS))
    def abort(self, number: int) -> None:
        self.manager.release(self.live.pop(number % len(self.live)), "aborted")

    # ------------------------------------------------------------ what must be found

    def wanted(self, request: Request) -> tuple[int, int, list[str]]:
        """How far a path goes in tree and folder together, and the blocks that continue the tree's.

        At least, and at most: a file that was spoilt once may have been written again.
        """
        key = request.key()
        there = sum(self.cache.peek_tiers(key))
        usable = self.manager.cached(request, len(key) // self.block * self.block)
        blocks = self.cache._blocks(key, key.data, -(-usable // self.block))
        if blocks is None:
            HAPPENED["no namespace on disk"] += 1
            return there, there, []
        names, files, sure = [], self.in_folder(), 0
        for block in blocks[there // self.block :]:
            if block.name not in files:
                break
            names.append(block.name)
            sure += sure == len(names) - 1 and block.name not in self.spoilt
        least, most = (
            max(there, min(usable, (there // self.block + count) * self.block))
            for count in (sure, len(names))
        )
        return least, most, names

    def judge(self, request: Request, wanted: tuple[int, int, list[str]]) -> None:
        end, most, names = wanted
        on_device, there, found, left = self.cache.looked
        usable = self.manager.cached(request, len(request.key()) // self.block * self.block)
        if found > there:
            HAPPENED["read"] += 1
            HAPPENED["read from within a node"] += there % self.block > 0
            HAPPENED["read below the root"] += there == 0
            HAPPENED["read after a restart"] += bool(self.names & set(names))
            HAPPENED["read again"] += bool(self.read_names & set(names))
            self.read_names.update(names)
        assert found <= max(most, there), (found, most)
        enough = usable - on_device >= self.sizes["threshold"]
        if found < end and enough:
            assert left < self.page, f"{request.id}: {found} of {end} units, {left} host slots free"
            HAPPENED["less room than blocks"] += 1

    # ------------------------------------------------------------ around it

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        self.told.tell(count)
        self.cache.before_step()

    @rule(tokens=st.integers(1, 64))
    def make_room(self, tokens: int) -> None:
        self.manager.make_room(tokens)

    @rule(kind=st.sampled_from(["refuse_backups", "lose_backups", "refuse_loads"]))
    def fail_next(self, kind: str) -> None:
        setattr(self.told, kind, 1)

    @rule(policy=st.sampled_from(sorted(POLICIES)))
    def change_policy(self, policy: str) -> None:
        self.cache.eviction_policy = policy

    @precondition(lambda self: not self.live)
    @rule()
    def other_weights(self) -> None:
        self.weights = 1 - self.weights
        self.cache.bump_version()
        HAPPENED["new weights"] += 1

    @precondition(lambda self: not self.live)
    @rule()
    def flush(self) -> None:
        self.manager.flush()

    @rule(number=st.integers(0, 200), size=st.sampled_from([None, 0, 40, 300]))
    def spoil(self, number: int, size: int | None) -> None:
        """Another process deletes a file, or it is cut off."""
        names = sorted(self.in_folder())
        if names:
            name = names[number % len(names)]
            path = self.folder / f"{name}.minirad.safetensors"
            self.spoilt.add(name)
            if size is None:
                path.unlink()
                HAPPENED["deleted"] += 1
            else:
                os.truncate(path, size)

    @rule()
    def restart(self) -> None:
        """The process ends, and another one begins. Nothing that was to be written is lost."""
        while self.live:
            self.finish(0)
        self.cache.close()
        self.complete(True)
        self.open()

    @rule(tokens=prompts)
    def second_process(self, tokens: list[int]) -> None:
        """Another process, of the same weights, asks and ends, while this one goes on."""
        mine = dict(vars(self))
        before = self.in_folder()
        self.open()
        had = HAPPENED["read"]
        self.ask(tokens, None, True)
        HAPPENED["read by a second process"] += HAPPENED["read"] > had
        while self.live:
            self.finish(0)
        self.cache.close()
        if self.in_folder() - before:
            HAPPENED["written by another process"] += 1
        kept = {name: getattr(self, name) for name in ("spoilt", "read_names", "next_id")}
        vars(self).clear()
        vars(self).update(mine, **kept)
        self.cache.disk.files.scan()  # it would look some seconds later

    def complete(self, closed: bool) -> None:
        """All that can be written is: where the bound lets it."""
        if self.sizes["bound"] < 1000 or self.cache.disk.files.off:
            return
        files = self.in_folder()
        all_of_it = closed and self.sizes["write"] == "write_back"
        for node in self.cache.walk():
            if node is self.cache.root or node.outdated:
                continue
            path = self.cache.path_up(node)[::-1]
            end = sum(each.units for each in path)
            blocks = self.cache._blocks(node, b"".join(each.edge for each in path), end // self.block)
            for number in range((end - node.units) // self.block, end // self.block) if blocks else ():
                start, whole, at = number * self.block, True, 0
                for each in path:
                    inside = at + each.units > start and at < start + self.block
                    whole &= not inside or each.backed_up or (all_of_it and bool(each.packed))
                    at += each.units
                name = blocks[number].name
                assert not whole or name in files or name in self.spoilt, (node, number)

    @invariant()
    def check_all(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        self.manager.check(self.live, {})
        if self.sizes["write"] != "write_back":
            self.complete(False)
        self.cache.tell()
        assert self.replay.snapshot()["tree"] == bare_snapshot(self.cache)["tree"]
        size = sum(path.stat().st_size for path in self.folder.iterdir())
        assert size <= self.bound and not list(self.folder.glob("*.tmp"))
        assert not self.cache.disk.files.off, self.cache.disk.files.off

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.check_all()
            while self.live:
                self.finish(0)
            self.cache.close()
            self.complete(True)
            self.cache.check()
            shutil.rmtree(self.folder)


def play(examples: int) -> None:
    HAPPENED.clear()
    with (
        patch.object(Worker, "submit", lambda self, job: job()),
        patch.object(disk_names, "LEAST_UNITS", UNITS),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # of files that were spoilt
        run_state_machine_as_test(
            DiskMachine,
            settings=settings(
                max_examples=examples, stateful_step_count=STEPS, deadline=None, database=None,
                suppress_health_check=list(HealthCheck), print_blob=False, derandomize=True, phases=PHASES,
            ),
        )  # fmt: skip


@pytest.mark.slow
def test_whatever_is_asked_keys_and_values_are_those_of_the_path() -> None:
    play(EXAMPLES)
    missing = [name for name in REACHED if not HAPPENED[name]]
    assert not missing, (missing, HAPPENED)
