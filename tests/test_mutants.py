"""Proof that the tests can fail: engines broken on purpose, each caught by one short scripted run.

A mutant is one line of one function replaced. The run is the same for all: it passes on the healthy
engine, and on every mutant some invariant, poisoned slot or comparison with a cold engine must object.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest
from conftest import CheckedEngine
from support import ColdReference, drive

from minirad.attention import metadata
from minirad.cache.allocator import PageAllocator
from minirad.cache.radix_cache import Node, RadixCache, RadixKey
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel
from minirad.process_result import ResultProcessor
from minirad.runner import Draw
from minirad.schedule.ownership import SlotOwnership
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Scheduler

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in the source of `owner.name`."""

    about: str
    owner: Any
    name: str
    old: str
    new: str

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = inspect.getattr_static(self.owner, self.name)
        function = found.fget if isinstance(found, property) else found
        source = textwrap.dedent(inspect.getsource(function))
        source = source.removeprefix("@property\n")
        assert source.count(self.old) == 1, f"{self.name} has changed: bring this mutant up to date"
        if inspect.isclass(self.owner):  # outside its class a function has no bare super()
            source = source.replace("super()", f"super({self.owner.__name__}, self)")
        scope: dict[str, Any] = {}
        code = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(compile(code, f"mutant: {self.about}", "exec"), function.__globals__, scope)
        broken = scope[self.name]
        monkeypatch.setattr(
            self.owner, self.name, property(broken) if isinstance(found, property) else broken
        )
        if not inspect.isclass(self.owner):  # a function that others imported by its name
            monkeypatch.setattr("minirad.runner.build_metadata", broken)


MUTANTS = [
    # commit
    Mutant(
        "the row is not pointed at the tree's slots",
        SlotOwnership,
        "commit",
        "line[protected:prefix_len] = tree[protected:prefix_len]",
        "pass",
    ),
    Mutant(
        "duplicates are not freed",
        SlotOwnership,
        "commit",
        'self._release(line[protected:prefix_len].copy(), row, "duplicate")',
        "pass",
    ),
    Mutant(
        "the tree's new pages stay booked to the row",
        SlotOwnership,
        "commit",
        "self._own(line[prefix_len:aligned], row, TREE)",
        "pass",
    ),
    Mutant(
        "the old lock goes without a new one",
        SlotOwnership,
        "commit",
        "self.cache.inc_lock_ref(node)",
        "pass #",
    ),
    Mutant(
        "the lock stays where it was",
        SlotOwnership,
        "commit",
        "self.cache.dec_lock_ref(request.node)",
        "pass",
    ),
    Mutant(
        "what the tree got stays private",
        SlotOwnership,
        "commit",
        "request.protected_len = aligned",
        "pass",
    ),
    # release
    Mutant(
        "the lock is kept on release",
        SlotOwnership,
        "release",
        "self.cache.dec_lock_ref(request.node)",
        "pass",
    ),
    Mutant(
        "private slots are freed twice",
        SlotOwnership,
        "release",
        "self._release(private, request.row, cause)",
        "[self._release(private, request.row, cause) for _ in '12']",
    ),
    Mutant(
        "the tree's slots are freed with the tail",
        SlotOwnership,
        "release",
        "request.protected_len : request.kv_len",
        "0 : request.kv_len",
    ),
    Mutant("an abort inserts", ResultProcessor, "finish", 'reason not in ("abort", "error")', "True"),
    # admission, samples, retraction
    Mutant("all cached slots are used", Request, "usable_prefix", "self.length - 1", "self.length"),
    Mutant("the match is not locked", Scheduler, "_admit_by", "cache.inc_lock_ref(match.last_node)", "pass"),
    Mutant("a retracted request is forgotten", Scheduler, "requeue", "self.waiting.append(request)", "pass"),
    Mutant(
        "a further sample takes no lock",
        SlotOwnership,
        "fork",
        "self.cache.inc_lock_ref(leader.node)",
        "pass",
    ),
    Mutant("a further sample's tail is not copied", ResultProcessor, "_branch", "if len(tail):", "if False:"),
    Mutant(
        "samples draw the same numbers",
        Draw,
        "uniform",
        "request.index + self.index",
        "0",
    ),
    Mutant(
        "cached tokens are not counted into positions",
        metadata,
        "build_metadata",
        "np.repeat(q_indptr[:-1] - starts, lengths)",
        "np.repeat(q_indptr[:-1], lengths)",
    ),
    # the tree and the allocator
    Mutant("locked leaves are evicted", Node, "evictable", "self.lock_ref == 0 and", ""),
    Mutant("a leaf that others lock grows", RadixCache, "insert", "node.lock_ref <= 1", "True"),
    Mutant(
        "a split forgets the locks",
        RadixCache,
        "_split",
        "upper.lock_ref, upper.hits, upper.priority = lower.lock_ref,",
        "upper.lock_ref, upper.hits, upper.priority = 0,",
    ),
    Mutant("an unlocked leaf is not offered", RadixCache, "dec_lock_ref", "self._queue.offer(node)", "pass"),
    Mutant(
        "namespaces are not told apart", RadixKey, "__init__", "(extra_key, is_bigram)", "(None, is_bigram)"
    ),
    Mutant(
        "a partial page is filled from its last slot",
        PageAllocator,
        "alloc_extend",
        "last_slot + 1 +",
        "last_slot +",
    ),
    Mutant("a freed page is not marked", PageAllocator, "free", "self._is_free[pages] = True", "pass"),
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
    assert not isinstance(caught.value, (NameError, SyntaxError)), "the mutant itself is wrong"


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
    MUTANTS[0].apply(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        scripted_run(tiny_model, reference, page, Engine, poison)
    assert ("(NaN)" in str(caught.value)) == poison
