"""A request is given up only when it could not run even alone: a search, with a judge that does the sums.

A game is a small engine of a random kind, random requests, pins and aborts. The judge knows the pinned
texts and nothing of the tree or the scheduler. MINIRAD_STUCK_GAMES sets how many games are played.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY, CheckedEngine, tiny_config
from mutants import Mutant, attribute, instead, says, while_in
from support import LateCopier, PlainCache, drive

from minirad.cache.eviction import POLICIES as EVICTION
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine, Pin
from minirad.model.llama import LlamaModel, random_weights
from minirad.observe import events as ev
from minirad.outputs import GenerationOutput, StepReport
from minirad.schedule.admission import PrefillBudget
from minirad.schedule.cache_manager import CacheManager
from minirad.schedule.policies import POLICIES as SCHEDULE
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Scheduler
from minirad.tiers.hiradix_cache import HOST_WRITE, HiRadixCache

GAMES = int(os.environ.get("MINIRAD_STUCK_GAMES", "8"))
TEXT = [3, 3, 4, 3, 5, 3, 6, 3, 7, 3, 8, 3, 9, 3, 10, 3, 11, 3, 4, 4, 5, 4, 6, 4]
SHAPE: dict[str, Any] = {
    **TINY, "vocab_size": 12, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4, "eos_token_id": 2,
}  # fmt: skip


def after(token: int) -> int:
    """What the model says next: a cycle, so that replies repeat what prompts and other replies hold."""
    return 3 + (token * 4 + 1) % 9 if token != 11 else 2


class Parrot(LlamaModel):
    """Computes nothing: scheduling is all that this file looks at."""

    @torch.inference_mode()
    def forward(self, token_ids: Any, metadata: Any, pool: Any, backend: Any, logit_index: Any) -> Any:
        said = [after(token) for token in token_ids[logit_index].tolist()]
        return torch.nn.functional.one_hot(torch.tensor(said, dtype=torch.int64), 12).float() * 20


@pytest.fixture(scope="module")
def parrot() -> Parrot:
    config = tiny_config(**SHAPE)
    return Parrot(config, random_weights(config, 0, dtype=torch.float32, device="cpu"))


class Stalled:
    """A Copier whose copies end only when somebody waits for them."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def backup(self, device_slots: Any, host_slots: Any) -> Any:
        self._inner.backup(device_slots, host_slots)
        return self

    def load(self, host_slots: Any, device_slots: Any) -> Any:
        self._inner.load(host_slots, device_slots)
        return self

    def fence(self) -> None:
        self._inner.fence()

    def done(self) -> bool:
        return False

    def wait(self) -> bool:
        return True


class Judge:
    """Says by the pinned texts alone whether a request could run with all else gone from the engine."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.kv_tokens is not None
        self.pages, self.page, self.pairs = (
            config.kv_tokens // config.page_size,
            config.page_size,
            config.bigram_keys,
        )
        self.held: dict[int, tuple[Any, tuple[Any, ...]]] = {}

    def units(self, tokens: Any) -> tuple[Any, ...]:
        tokens = [int(token) for token in tokens]
        return tuple(pairwise(tokens)) if self.pairs else tuple(tokens)

    def pinned(self, pin: Pin, tokens: Any, namespace: Any) -> None:
        assert pin.length % self.page == 0
        self.held[pin.id] = namespace, self.units(tokens)[: pin.length]

    def forget(self) -> None:
        """New weights: what is pinned matches nothing any more, and is as pinned as before."""
        self.held = {number: (("old", space), units) for number, (space, units) in self.held.items()}

    @property
    def room(self) -> int:
        """Slots that no pin holds: two pins share the whole pages that their texts have in common."""
        ends = {
            (space, units[:end])
            for space, units in self.held.values()
            for end in range(self.page, len(units) + 1, self.page)
        }
        return (self.pages - len(ends)) * self.page

    def shared(self, tokens: Any, namespace: Any) -> int:
        """Slots of pinned text that a request can have for its own."""
        mine = self.units(tokens)
        best = 0
        for space, units in self.held.values():
            if space == namespace:
                alike = next(
                    (at for at, (a, b) in enumerate(zip(mine, units, strict=False)) if a != b),
                    min(len(mine), len(units)),
                )
                best = max(best, alike // self.page * self.page)
        return best

    def need(self, tokens: Any, namespace: Any) -> int:
        """Slots beside those; one token is always computed, and duplicates are freed when it is."""
        rest = len(tokens) - self.shared(tokens, namespace)
        return max(-(-rest // self.page), 1) * self.page

    def fits(self, tokens: Any, namespace: Any) -> bool:
        return self.need(tokens, namespace) <= self.room


class Game:
    """One engine, played by one random generator."""

    def __init__(self, seed: int, model: LlamaModel) -> None:
        self.rng = rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        page = rng.choice([1, 1, 2, 4])
        tree = rng.choice(["own", "own", "own", "tiers", "tiers", "plain", "none"])
        sizes: dict[str, Any] = {
            "page_size": page,
            "kv_tokens": page * rng.randint(max(8 // page, 3), 40 // page),
            "chunk_tokens": rng.choice([1, 2, 3, 5, 8, 16, 64]),
            "max_running": rng.randint(1, 4),
            "schedule_policy": rng.choice(sorted(SCHEDULE)),
            "eviction_policy": rng.choice(sorted(EVICTION)),
            "bigram_keys": rng.random() < 0.2,
            "radix_cache": tree != "none",
            "mixed": rng.random() < 0.5,
            "preemption": rng.random() < 0.7,
            "in_batch_prefix": rng.random() < 0.7,
            "in_batch_cached": rng.choice([0, 3]),
            "in_batch_shared": rng.choice([2, 4]),
            "fair_passes": rng.choice([0, 1, 32]),
            "new_token_ratio": rng.choice([0.0, 0.0, 0.5, 1.0]),
            "new_token_decay": rng.choice([0.01, 0.3]),
        }
        if tree == "tiers":
            sizes |= {
                "host_kv_tokens": page * rng.randint(2, 40),
                "host_write": rng.choice(HOST_WRITE),
                "load_back_threshold": rng.choice([1, 3]),
            }
        self.engine = engine = CheckedEngine(
            EngineConfig(device="cpu", **sizes), PlainCache(page) if tree == "plain" else None, model=model
        )
        if isinstance(engine.cache, HiRadixCache):
            inner = engine.host_tier
            engine.cache.copier = rng.choice(
                [inner, Stalled(inner), LateCopier(inner, seed, rng.choice([0.0, 0.3]))]
            )
        self.judge = Judge(engine.config)
        self.kv, self.priorities = engine.config.kv_tokens, rng.choice([[0], [0, 1], [-1, 0, 1]])
        self.asked: dict[str, tuple[list[int], SamplingParams, Any]] = {}
        self.outputs: dict[tuple[str, int], GenerationOutput] = {}
        self.pins: list[Pin] = []
        self.pinning = tree != "none" and rng.random() < 0.7
        self.texts: list[tuple[list[int], Any]] = []
        self.passed: list[Request] = []  # looked at in this step, and left waiting for room
        for kind in (ev.RequestDeferred, ev.RequestRetracted, ev.RequestAdmitted):
            engine.bus.subscribe(kind, self.watch)

    def play(self) -> Counter[str]:
        rng, tree_can_forget = self.rng, hasattr(self.engine.cache, "bump_version")
        for _ in range(rng.randint(3, 8)):
            for _ in range(rng.choice([0, 1, 1, 2, 3])):
                self.add()
            if self.pinning and rng.random() < 0.5:
                self.pin()
            if self.pins and rng.random() < 0.1:
                self.unpin(self.pins.pop(rng.randrange(len(self.pins))))
            if tree_can_forget and rng.random() < 0.04:
                self.engine.update_weights(self.engine.model)
                self.judge.forget()
            if self.asked and rng.random() < 0.1:
                self.engine.abort(rng.choice(sorted(self.asked)))
            for _ in range(rng.choice([1, 1, 2, 3, 8])):
                self.step()
        limit = 200 + 20 * sum(
            len(prompt) + params.max_new_tokens * params.n for prompt, params, _ in self.asked.values()
        )
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < limit, f"still at work after {steps} steps: {self.engine.snapshot()}"
        for rid, (prompt, params, _) in self.asked.items():
            self.require_ended(rid, prompt, params)
        while self.pins:
            self.unpin(self.pins.pop())
        if isinstance(self.engine.cache, HiRadixCache):
            self.engine.cache.poll(wait=True)
        self.engine.flush_cache()
        assert self.engine.allocator.available == self.kv
        return self.seen

    def add(self) -> None:
        rng = self.rng
        token, text = rng.randint(3, 11), []
        if self.texts and rng.random() < 0.6:
            text = list(rng.choice(self.texts)[0])
            text = text[: rng.randint(1, len(text))]
            token = text[-1]
        length = min(
            rng.choice([1, 3, self.kv // 4, self.kv // 2, 3 * self.kv // 4, self.kv]) + rng.randint(0, 2),
            self.kv,
        )
        while len(text) < length:
            token = after(token) if rng.random() < 0.8 else rng.randint(3, 11)
            text.append(token)
        text = text[:length]
        params = SamplingParams(
            max_new_tokens=min(rng.choice([0, 1, 2, 5, 12, self.kv]), self.kv - length),
            n=rng.choice([1, 1, 1, min(2, self.engine.config.max_running), self.engine.config.max_running]),
            logprob_start=rng.choice([None, None, 0, length // 2]),
            ignore_eos=rng.random() < 0.7,
        )
        namespace = rng.choice([None, None, None, "adapter"])
        rid = self.engine.add_request(text, params, namespace, rng.choice(self.priorities))
        self.asked[rid] = text, params, namespace
        self.texts.append((text, namespace))

    def pin(self) -> None:
        if not self.texts:
            return
        text, namespace = self.rng.choice(self.texts)
        text = text[: self.rng.randint(1, len(text))]
        pin = self.engine.pin(text, namespace)
        self.pins.append(pin)
        self.judge.pinned(pin, text, namespace)

    def unpin(self, pin: Pin) -> None:
        self.engine.unpin(pin)
        del self.judge.held[pin.id]

    def watch(self, event: Any) -> None:
        """Nobody who waits for room is passed, but for those who would have none even alone."""
        if isinstance(event, ev.RequestRetracted):
            self.passed = []  # there is more room now, and another order perhaps
        elif isinstance(event, ev.RequestDeferred) and "slots needed" in event.reason:
            self.passed += [each for each in self.engine.scheduler.waiting if each.id == event.request]
        elif isinstance(event, ev.RequestAdmitted):
            self.passed = [each for each in self.passed if each.id != event.request]
            for each in self.passed:
                assert not self.judge.fits(each.tokens, each.extra_key), (each, event, self.judge.held)
                self.seen["passed"] += 1

    def step(self) -> None:
        self.passed = []
        had_work = self.engine.has_work
        report = self.engine.step()
        assert not had_work or report.batch or report.finished, "a step of work unfinished did nothing"
        self.seen["retracted"] += len(report.retracted)
        for output in report.finished:
            self.outputs[output.request_id, output.index] = output
            prompt, _, namespace = self.asked[output.request_id]
            self.texts.append(([*prompt, *output.token_ids], namespace))
            self.seen[output.finish_reason] += 1
            if output.finish_reason == "error":
                self.require_right(output, report)

    def require_right(self, output: GenerationOutput, report: StepReport) -> None:
        """It could not run, nothing ran that could end and make room, and what is said of it is true."""
        judge, scheduler = self.judge, self.engine.scheduler
        prompt, _, namespace = self.asked[output.request_id]
        text = [*prompt, *output.token_ids]
        told = (output, judge.held, text)
        assert judge.room < self.kv, told
        assert not judge.fits(text, namespace), told
        assert not report.batch and not scheduler.live, told
        assert not getattr(self.engine.cache, "copy_locks", []), told
        for other in scheduler.waiting:
            assert not judge.fits(other.tokens, other.extra_key), (other, told)
        need, shared = judge.need(text, namespace), judge.shared(text, namespace)
        whole = f"{output.request_id} " in output.error  # it had not branched yet: its samples end with it
        name = output.request_id + (f".{output.index}" if output.index and not whole else "")
        beside = f" beside the {shared} pinned ones that it shares" if shared else ""
        assert output.error == (
            f"{name} needs {need} slots{beside}, but of {self.kv} only {judge.room} are free or evictable: "
            "the rest is pinned"
        ), told

    def require_ended(self, rid: str, prompt: list[int], params: SamplingParams) -> None:
        outputs = [output for (request, _), output in self.outputs.items() if request == rid]
        assert outputs, rid
        reasons = {output.finish_reason for output in outputs}
        if reasons <= {"stop", "length"}:
            assert len(outputs) == params.n
        for output in outputs:
            text = [*prompt, *output.token_ids]
            assert all(
                b == after(a) for a, b in zip(text[len(prompt) - 1 :], text[len(prompt) :], strict=False)
            )


# ---------------------------------------------------------------------- the search

TELLING = (0, 6, 7, 10, 30, 34, 49, 155)  # games in which what the mutants below break is needed


def test_nobody_is_given_up_who_could_run(parrot: Parrot) -> None:
    seen: Counter[str] = Counter()
    for seed in (*range(GAMES), *TELLING):
        try:
            seen += Game(seed, parrot).play()
        except AssertionError as error:
            raise AssertionError(f"game {seed}: {error}") from error
    assert min(seen[what] for what in ("length", "stop", "abort", "error", "retracted", "passed")) > 5, seen


@pytest.mark.parametrize("page", [1, 2, 4])
@pytest.mark.parametrize("pairs", [False, True])
def test_the_judge_is_right(parrot: Parrot, page: int, pairs: bool) -> None:
    """Judged are requests that are really tried: all else evicted, one token at a time."""
    rng, verdicts = random.Random(page), Counter()
    for _ in range(8):
        config = EngineConfig(kv_tokens=24, page_size=page, bigram_keys=pairs, device="cpu")
        engine = Engine(config, model=parrot)
        judge = Judge(engine.config)
        trunk = [rng.randint(3, 11) for _ in range(24)]
        for _ in range(rng.randint(1, 3)):
            text = [*trunk[: rng.randint(1, 18)], rng.randint(3, 11)]
            engine.generate(text, SamplingParams(max_new_tokens=0))
            judge.pinned(engine.pin(text), text, None)
        for _ in range(4):
            text = [*trunk[: rng.randint(1, 20)], *rng.choices(range(3, 12), k=rng.randint(0, 20))][:24]
            could = could_run(engine, text, rng.choice([None, 0]))
            verdicts[could] += 1
            assert could == judge.fits(text, None), (judge.held, text)
            engine.check()
    assert min(verdicts[True], verdicts[False]) >= 3, verdicts


def could_run(engine: Engine, text: list[int], logprob_start: int | None) -> bool:
    cache_manager, cache = engine.cache_manager, engine.cache
    params = SamplingParams(max_new_tokens=0, logprob_start=logprob_start)
    request = Request("R0", np.array(text), params, 0, 0, is_bigram=engine.config.bigram_keys)
    cache_manager.make_room(cache_manager.room)
    match = cache.match_prefix(request.key())
    cache.inc_lock_ref(match.last_node)
    cache_manager.attach(request, match, cache_manager.cached(request, match.length))
    while not request.computed and cache_manager.extend(request, request.kv_len + 1):
        cache_manager.commit(request, finished=False)
    computed = request.computed
    cache_manager.release(request, "released")
    return computed


# ---------------------------------------------------------------------- single cases


def reply(count: int, **how: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **how)


@pytest.mark.parametrize(
    "how",
    [{}, {"mixed": False}, {"kv_tokens": 113}, {"page_size": 4}, {"page_size": 8}, {"chunk_tokens": 7}],
    ids=str,
)
@pytest.mark.parametrize("priority", [0, 5])
def test_a_chunk_gets_the_room_of_whom_decoding_retracts(
    parrot: Parrot, how: dict[str, Any], priority: int
) -> None:
    """Two that do not fit together: a chunk finds no room, and then the only one who decodes has none."""
    sizes = {"kv_tokens": 112, "chunk_tokens": 32, "max_running": 2, "mixed": True, **how}
    for at in range(1, 6):
        rng = random.Random(5)
        engine = CheckedEngine(EngineConfig(device="cpu", **sizes), model=parrot)
        engine.add_request([3, *rng.choices(range(3, 12), k=39)], reply(8))
        for _ in range(at):
            engine.step()
        engine.add_request([4, *rng.choices(range(3, 12), k=69)], reply(8), priority=priority)
        outputs = drive(engine)
        assert sorted((each.request_id, each.finish_reason, len(each.token_ids)) for each in outputs) == [
            ("R1", "length", 8), ("R2", "length", 8),
        ]  # fmt: skip


def pinned_engine(parrot: Parrot, **sizes: Any) -> tuple[Engine, Pin]:
    """24 slots, 10 of them pinned."""
    sizes = {"kv_tokens": 24, "schedule_policy": "fcfs", **sizes}
    engine = CheckedEngine(EngineConfig(device="cpu", **sizes), model=parrot)
    engine.generate([5] * 10, reply(0))
    return engine, engine.pin([5] * 10)


@pytest.mark.parametrize("mixed", [False, True])
def test_who_has_no_room_beside_pins_waits_for_those_who_have(parrot: Parrot, mixed: bool) -> None:
    """The pins may be theirs: a program lets go of its prefix when its requests have ended."""
    engine, pin = pinned_engine(parrot, mixed=mixed)
    large = engine.add_request([3] * 15, reply(1), priority=1)
    small = [engine.add_request([token] * 4, reply(3)) for token in (6, 7)]
    assert engine.step().admitted == small
    outputs = []
    while len(outputs) < 2:
        outputs += engine.step().finished
    engine.unpin(pin)
    outputs += drive(engine)
    assert [(each.request_id, each.finish_reason) for each in outputs] == [
        (small[0], "length"), (small[1], "length"), (large, "length"),
    ]  # fmt: skip


def test_what_is_said_of_a_request_without_room(parrot: Parrot) -> None:
    engine, _ = pinned_engine(parrot, page_size=2)
    engine.add_request([3] * 15, reply(1))
    engine.add_request([*[5] * 7, *[3] * 15], reply(2))
    engine.add_request([5] * 10, reply(14))
    errors = {each.request_id: (each.finish_reason, each.error) for each in drive(engine)}
    assert errors == {
        "R2": ("error", "R2 needs 16 slots, but of 24 only 14 are free or evictable: the rest is pinned"),
        "R3": (
            "error",
            "R3 needs 16 slots beside the 6 pinned ones that it shares, but of 24 only 14 are free or "
            "evictable: the rest is pinned",
        ),
        "R4": ("length", ""),
    }


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_duplicates_of_what_is_pinned_need_no_more_than_a_page(parrot: Parrot, chunk: int) -> None:
    """All log-probabilities of a pinned prompt: its KV is computed again, and is freed chunk by chunk."""
    engine = CheckedEngine(EngineConfig(kv_tokens=24, chunk_tokens=chunk, device="cpu"), model=parrot)
    engine.generate(TEXT[:22], reply(0))
    engine.pin(TEXT[:22])
    [output] = engine.generate(TEXT[:22], reply(2, logprob_start=0))
    assert (output.finish_reason, output.error, len(output.prompt_logprobs)) == ("length", "", 22)
    assert engine.scheduler.stats.retractions == 0


def test_pins_on_part_of_a_match_that_fills_the_pool(parrot: Parrot) -> None:
    """4 of 12 are pinned, the other 8 have to give way to what is computed again."""
    engine = CheckedEngine(EngineConfig(kv_tokens=12, device="cpu"), model=parrot)
    engine.generate(TEXT[:12], reply(0))
    engine.pin(TEXT[:4])
    [output] = engine.generate(TEXT[:12], reply(0, logprob_start=0))
    assert (output.finish_reason, output.error) == ("length", "")


# ---------------------------------------------------------------------- the search can fail

Broken = Callable[..., Any]
NEXT, DECODE, PREFILL = (Scheduler, "next_batch"), (Scheduler, "_decode"), (Scheduler, "_prefill")
RETRACT, ADMIT, NEED = (Scheduler, "retract"), (PrefillBudget, "try_admit"), (PrefillBudget, "need")
ALONE, RIGHT_RETRACT = (PrefillBudget, "alone"), Scheduler.retract


def _stops_at_a_retraction(next_batch: Broken) -> Broken:
    def broken(self: Scheduler) -> Any:
        ends: list[Request] = []
        has_work = property(lambda self: not ends and bool(self.waiting or self.live))
        retract = self.retract

        def noted(request: Request) -> None:
            retract(request)
            ends.append(request)

        with attribute(self, "retract", noted), attribute(Scheduler, "has_work", has_work):
            batch = next_batch(self)
        if batch is None and ends:
            self.stuck = self.ordered()[0]
        return batch

    return broken


def _stuck_instead(retract: Broken) -> Broken:
    def broken(self: Scheduler, request: Request) -> None:
        if request is self.chunking:
            self.stuck = self.ordered()[0]
        else:
            retract(self, request)

    return broken


# Between chunks nothing is retracted, but to decode.
GOES_ON = Mutant(
    "what is between chunks has to go on",
    ((RETRACT, _stuck_instead), *while_in(DECODE, RETRACT, lambda _: RIGHT_RETRACT).changes),
)


class _Stays(Exception):
    """The only one is not retracted."""


def _ends_where_one_stays(decode: Broken) -> Broken:
    def broken(self: Scheduler, batch: Any) -> None:
        retract = self.retract

        def careful(request: Request) -> None:
            if not self.live[1:]:
                raise _Stays
            retract(request)

        with attribute(self, "retract", careful), contextlib.suppress(_Stays):
            decode(self, batch)

    return broken


def _tries_those_behind_too(prefill: Broken) -> Broken:
    def broken(self: Scheduler, batch: Any) -> None:
        prefill(self, batch)
        busy = self.live or batch.requests
        if busy and self.waiting and not self.chunking and not self.cache_manager.copying:
            ordered = self.ordered
            with attribute(self, "ordered", lambda: ordered()[1:]):
                prefill(self, batch)

    return broken


def _matches_once(try_admit: Broken) -> Broken:
    def broken(self: PrefillBudget, *args: Any) -> Any:
        refused: list[Any] = []
        lock = PrefillBudget._lock

        def once(self: PrefillBudget, *args: Any) -> Any:
            if not refused:
                refused.append(lock(self, *args))
            return refused[0]

        with attribute(PrefillBudget, "_lock", once):
            return try_admit(self, *args)

    return broken


def _all_at_once(need: Broken) -> Broken:
    return lambda self, request, matched: need(self, request, 0 if self.alone else matched)


def _no_page(need: Broken) -> Broken:
    def broken(self: PrefillBudget, request: Request, matched: int) -> int:
        return 0 if self.alone and matched >= request.length else int(need(self, request, matched))

    return broken


def _none_locked(able: bool) -> Callable[[Broken], Broken]:
    """Nothing of a match counts as locked: in trees that are able to say what a lock costs, or in others."""

    def make(locked: Broken) -> Broken:
        def broken(self: CacheManager, key: Any) -> int:
            return 0 if hasattr(self.cache, "find") is able else int(locked(self, key))

        return broken

    return make


MUTANTS = [
    (6, instead("who was retracted made no room", NEXT, _stops_at_a_retraction)),
    (10, while_in(NEXT, (CacheManager, "wait_for_copies"), says(False), "copies are not waited for")),
    (155, GOES_ON),
    (6, instead("the only one stays", DECODE, _ends_where_one_stays)),
    (
        6,
        instead(
            "one without room holds up all",
            (Scheduler, "ordered"),
            lambda ordered: lambda self: ordered(self)[:1],
        ),
    ),
    (34, while_in(PREFILL, (CacheManager, "copying"), says(False), "others pass while copies end")),
    (4, instead("others pass while some run", PREFILL, _tries_those_behind_too)),
    (0, while_in(NEED, ALONE, says(False), "alone, a reserve is kept")),
    (7, instead("all duplicates at once", NEED, _all_at_once)),
    (95, instead("no page for duplicates", NEED, _no_page)),
    (102, instead("the whole match is locked", ADMIT, _matches_once)),
    (7, instead("all of a match costs room", (CacheManager, "locked"), _none_locked(True))),
    (155, instead("what cannot say is not tried", (CacheManager, "locked"), _none_locked(False))),
    (7, while_in((Scheduler, "shortage"), (CacheManager, "locked"), says(0), "shared pins are not told of")),
    (
        30,
        while_in(
            (Scheduler, "_extend"), (CacheManager, "room"), says(10**6), "chunks as large as the budget"
        ),
    ),
]


@pytest.mark.parametrize(("seed", "mutant"), MUTANTS, ids=[mutant.about for _, mutant in MUTANTS])
def test_a_broken_scheduler_is_caught(
    seed: int, mutant: Mutant, parrot: Parrot, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError):
        for each in (seed, *TELLING):
            Game(each, parrot).play()


def test_what_pins_lock_is_never_reckoned_as_to_be_computed_again(
    parrot: Parrot, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_in(ADMIT, (CacheManager, "locked"), says(0)).apply(monkeypatch)
    with pytest.raises(AssertionError, match="error"):
        test_pins_on_part_of_a_match_that_fills_the_pool(parrot)
