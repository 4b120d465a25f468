"""Proof that the tests can fail: engines broken on purpose, each caught by one short scripted run.

The run is the same for all: it passes on the healthy engine, and on every mutant some invariant, poisoned
slot or comparison with a cold engine must object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import CheckedEngine
from mutants import Mutant, after, instead, nothing, says, unchanged, while_in
from support import ColdReference, drive

from minirad import runner
from minirad.cache.allocator import PageAllocator
from minirad.cache.eviction import EvictionQueue
from minirad.cache.radix_cache import Node, RadixCache, RadixKey
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel
from minirad.runner import TorchRunner
from minirad.schedule.cache_manager import TREE, CacheManager
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Scheduler

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
NO_PAGES = np.empty(0, dtype=np.int64)

COMMIT, RELEASE, FORK = (CacheManager, "commit"), (CacheManager, "release"), (CacheManager, "fork")
LOCK, UNLOCK, FREE = (RadixCache, "inc_lock_ref"), (RadixCache, "dec_lock_ref"), (PageAllocator, "free")


def _row_not_remapped(commit: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: CacheManager, request: Request, finished: bool) -> None:
        row, length = request.row, request.kv_len
        before = self.rows.rows[row, :length].copy()
        commit(self, request, finished)
        if not finished:
            self.rows.rows[row, :length] = before

    return broken


def _books_nothing_to_the_tree(own: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: CacheManager, slots: Any, before: Any, after: Any) -> None:
        if not np.array_equal(after, TREE):
            own(self, slots, before, after)

    return broken


def _commits_before(release: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: CacheManager, request: Request, cause: str) -> int:
        if cause == "released":  # an abort, or a retraction
            self.commit(request, False)
        return int(release(self, request, cause))

    return broken


def _frees_twice(release: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: CacheManager, request: Request, cause: str) -> int:
        private = self.rows.rows[request.row, request.protected_len : request.kv_len].copy()
        freed = release(self, request, cause)
        self.allocator.free(private)
        return int(freed)

    return broken


def _frees_all(release: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: CacheManager, request: Request, cause: str) -> int:
        request.protected_len = 0
        return int(release(self, request, cause))

    return broken


def _positions_from_zero(build_metadata: Callable[..., Any]) -> Callable[..., Any]:
    def broken(rows: Any, entries: Any, page_size: int, device: Any) -> Any:
        right = build_metadata(rows, entries, page_size, device)
        starts = right.positions.new_tensor([entry.start for entry in entries])
        lengths = right.positions.new_tensor([entry.stop - entry.start for entry in entries])
        return dataclasses.replace(right, positions=right.positions - starts.repeat_interleave(lengths))

    return broken


def _grows_whoever_locks(insert: Callable[..., Any]) -> Callable[..., Any]:
    def broken(
        self: RadixCache, key: RadixKey, slots: Any, priority: int = 0, grow: Node | None = None
    ) -> Any:
        others = max(grow.lock_ref - 1, 0) if grow is not None else 0
        if grow is None or not others:
            return insert(self, key, slots, priority, grow)
        grow.lock_ref -= others
        try:
            return insert(self, key, slots, priority, grow)
        finally:
            grow.lock_ref += others

    return broken


def _unlocks_what_is_new(find: Callable[..., Any]) -> Callable[..., Any]:
    """New are the upper halves of splits, and leaves, which nobody locks yet."""

    def broken(self: RadixCache, *args: Any, **named: Any) -> Any:
        before = {node.id for node in self.walk()}
        found = find(self, *args, **named)
        for node in self.walk():
            if node.id not in before:
                node.lock_ref = 0
        return found

    return broken


def _without_namespace(init: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: RadixKey, token_ids: Any, extra_key: Any = None, is_bigram: bool = False) -> None:
        init(self, token_ids, None, is_bigram)

    return broken


def _marks_in_use(pages: Any, allocator: PageAllocator, slots: Any) -> None:
    allocator._is_free[pages] = False


SPLIT_FORGETS_LOCKS = Mutant(
    "a split forgets the locks",
    (
        ((RadixCache, "match_prefix"), _unlocks_what_is_new),
        ((RadixCache, "insert"), _unlocks_what_is_new),
    ),
)
NOT_REMAPPED = instead("the row is not pointed at the tree's slots", COMMIT, _row_not_remapped)
FREED_TWICE = instead("private slots are freed twice", RELEASE, _frees_twice)
LOCK_KEPT = while_in(RELEASE, UNLOCK, nothing, "the lock is kept on release")
MUTANTS = [
    # commit
    NOT_REMAPPED,
    while_in(COMMIT, FREE, says(NO_PAGES), "duplicates are not freed"),
    instead(
        "the tree's new pages stay booked to the row", (CacheManager, "_own"), _books_nothing_to_the_tree
    ),
    while_in(COMMIT, LOCK, nothing, "the old lock goes without a new one"),
    while_in(COMMIT, UNLOCK, nothing, "the lock stays where it was"),
    instead("what the tree got stays private", COMMIT, unchanged("protected_len")),
    # release
    LOCK_KEPT,
    FREED_TWICE,
    instead("the tree's slots are freed with the tail", RELEASE, _frees_all),
    instead("an abort inserts", RELEASE, _commits_before),
    # admission, samples, retraction
    instead("all cached slots are used", (Request, "usable_prefix"), lambda _: lambda self: self.length),
    while_in((Scheduler, "next_batch"), LOCK, nothing, "the match is not locked"),
    instead(
        "a retracted request is forgotten",
        (Scheduler, "requeue"),
        after(lambda _, scheduler, request: scheduler.waiting.remove(request)),
    ),
    while_in(FORK, LOCK, nothing, "a further sample takes no lock"),
    instead("a further sample's tail is not copied", (TorchRunner, "copy_slots"), nothing),
    instead(
        "samples draw the same numbers",
        (runner, "position_uniform"),
        lambda uniform: lambda seed, index, position: uniform(seed, 0, position),
    ),
    instead("cached tokens are not counted into positions", (runner, "build_metadata"), _positions_from_zero),
    # the tree and the allocator
    instead(
        "locked leaves are evicted",
        (Node, "evictable"),
        lambda _: lambda self: not self.children and self.parent is not None,
    ),
    instead("a leaf that others lock grows", (RadixCache, "insert"), _grows_whoever_locks),
    SPLIT_FORGETS_LOCKS,
    while_in(UNLOCK, (EvictionQueue, "offer"), nothing, "an unlocked leaf is not offered"),
    instead("namespaces are not told apart", (RadixKey, "__init__"), _without_namespace),
    instead(
        "a partial page is filled from its last slot",
        (PageAllocator, "alloc_extend"),
        lambda extend: lambda self, start, stop, last: extend(self, start, stop, last - 1),
    ),
    instead("a freed page is not marked", FREE, after(_marks_in_use)),
]


def scripted_run(
    model: LlamaModel,
    reference: ColdReference,
    page: int,
    kind: type[Engine] = CheckedEngine,
    poison: bool = True,
) -> None:
    """Sharing, hits, chunks, samples, namespaces, retraction, an abort and a pin, all compared."""
    greedy = SamplingParams(max_new_tokens=7, ignore_eos=True)
    sampled = SamplingParams(max_new_tokens=7, temperature=1.0, n=3, seed=3, ignore_eos=True)
    work = [
        (PROMPT, greedy, None), (PROMPT, greedy, None), ([*PROMPT, 13], sampled, None),
        ([*PROMPT[:6], 20, 21], greedy, None), (PROMPT, greedy, "other"), ([30] * 9, greedy, None),
    ]  # fmt: skip

    def engine_of(kv_tokens: int, **changes: Any) -> Engine:
        sizes = {"page_size": page, "chunk_tokens": 5, "max_running": 4, **changes}
        return kind(EngineConfig(kv_tokens=kv_tokens, poison_freed=poison, **sizes), model=model)

    for kv_tokens in (96, 28):
        engine = engine_of(kv_tokens)
        for _ in range(2):
            asked = {engine.add_request(*each): each for each in work}
            outputs = drive(engine)
            assert len(outputs) == sum(params.n for _, params, _ in work)
            for output in outputs:
                prompt, params, _ = asked[output.request_id]
                reference.require_equal(prompt, params, output)
        assert engine.cache.protected_size == 0
        assert engine.allocator.available + engine.cache.total_size == kv_tokens

    engine = engine_of(64)
    assert engine.generate(PROMPT, greedy, extra_key="a")[0].cached_tokens == 0
    assert engine.generate(PROMPT, greedy, extra_key="b")[0].cached_tokens == 0
    engine.flush_cache()
    doomed = engine.add_request(PROMPT, greedy)
    for _ in range(5):
        engine.step()
    engine.abort(doomed)
    engine.check()
    assert engine.cache.total_size == len(PROMPT), "an abort inserts nothing"
    drive(engine)

    engine = engine_of(64, chunk_tokens=64)
    engine.add_request(PROMPT, greedy)
    engine.step()
    pin = engine.pin(PROMPT)
    drive(engine)
    assert engine.cache.protected_size == pin.length == len(PROMPT), "a pin holds its own tokens only"
    engine.generate([range(20 + at, 40 + at) for at in range(4)], greedy)
    assert engine.peek(PROMPT) == len(PROMPT)
    engine.unpin(pin)
    engine.flush_cache()
    assert engine.allocator.available == 64


@pytest.fixture(scope="module")
def reference(tiny_model: LlamaModel) -> ColdReference:
    """Filled by the healthy engine: the mutants are compared with what it said."""
    cold = ColdReference(tiny_model)
    for page in (1, 4):
        scripted_run(tiny_model, cold, page)
    return cold


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.about)
def test_a_broken_engine_is_caught(
    mutant: Mutant, tiny_model: LlamaModel, reference: ColdReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(Exception) as caught:
        for page in (1, 4):
            scripted_run(tiny_model, reference, page)
    assert not isinstance(caught.value, (NameError, AttributeError, TypeError)), "the mutant itself is wrong"


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize("page", [1, 4])
def test_a_row_that_reads_freed_slots_shows_in_the_output_without_any_check(
    tiny_model: LlamaModel,
    reference: ColdReference,
    monkeypatch: pytest.MonkeyPatch,
    page: int,
    poison: bool,
) -> None:
    """The classic silent bug: every count adds up. NaN in freed slots, or the comparison, finds it."""
    scripted_run(tiny_model, reference, page, Engine, poison)
    NOT_REMAPPED.apply(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        scripted_run(tiny_model, reference, page, Engine, poison)
    assert ("(NaN)" in str(caught.value)) == poison
