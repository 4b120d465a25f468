"""New weights in a running engine: nothing that the old ones computed is used again, in any tier."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CheckedEngine, tiny_config
from support import ColdReference, LateCopier, PlainCache, drive, listen, one_slow

from minirad import RadixCache, RadixKey
from minirad.cache.eviction import POLICIES
from minirad.config import HOST_WRITE, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel, random_weights
from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.outputs import GenerationOutput
from minirad.tiers.hiradix_cache import HiRadixCache, HostNode

MakeEngine = Callable[..., CheckedEngine]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
TIERS: list[dict[str, Any]] = [
    {},
    *({"host_kv_tokens": 64, "host_write": write, "load_back_threshold": 1} for write in HOST_WRITE),
]


def ids(options: Any) -> str:
    return "-".join(map(str, options.values())) or "one tier"


def other_weights(seed: int, **changes: Any) -> LlamaModel:
    config = tiny_config(**changes)
    return LlamaModel(config, random_weights(config, seed, dtype=torch.float32, device="cpu"))


@pytest.fixture(scope="module")
def models(tiny_model: LlamaModel) -> list[LlamaModel]:
    return [tiny_model, other_weights(7), other_weights(8)]


@pytest.fixture(scope="module")
def cold(models: list[LlamaModel]) -> list[ColdReference]:
    return [ColdReference(model) for model in models]


def reply(count: int, **how: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **how)


def old_nodes(cache: Any) -> list[Any]:
    return [node for node in cache.walk() if len(node.namespace) == 3]


def late(engine: Engine, seed: int) -> None:
    if isinstance(engine.cache, HiRadixCache):
        engine.cache.copier = LateCopier(engine.cache.copier, seed)


# ---------------------------------------------------------------------- the tree


@pytest.mark.parametrize("tiers", [None, *HOST_WRITE])
@pytest.mark.parametrize("page", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_no_old_node_matches_in_any_tier(tiers: str | None, page: int, seed: int) -> None:
    rng = random.Random(seed)
    cache = HiRadixCache(page, host_tokens=160, host_write=tiers) if tiers else RadixCache(page)
    keys = [
        RadixKey([rng.choice([1, 2]) for _ in range(rng.randrange(2, 14))], space, rng.random() < 0.3)
        for space in [None, "a", ("a",)] * 5
    ]
    fresh, found = page, {"before": 0, "host": 0}
    for key in keys:
        node = cache.insert(key, range(fresh, fresh + len(key))).last_node
        fresh += -(-len(key) // page) * page
        cache.match_prefix(key)
        if isinstance(cache, HiRadixCache):
            cache.seal(node)
            cache.match_prefix(key)
            if key is keys[11]:  # of those that come later some copies are still under way
                cache.poll()
                cache.evict(20)
    for key in keys:
        match = cache.match_prefix(key)
        found["before"] += match.length
        found["host"] += match.host_length
    assert found["before"] and (found["host"] or not tiers)
    held = cache.total_size, getattr(cache, "host_size", 0)
    cache.bump_version()
    cache.check()
    assert (cache.total_size, getattr(cache, "host_size", 0)) == held
    for key in keys:
        assert (cache.find(key).length, cache.find(key).cost) == (0, 0)
        match = cache.match_prefix(key)
        assert (match.length, match.host_length, match.last_node) == (0, 0, cache.root)
    for key in keys:  # the new ones' nodes stand beside the old ones
        inserted = cache.insert(key, range(fresh, fresh + len(key)))
        fresh += -(-len(key) // page) * page
        assert cache.peek(key) == len(key) // page * page
        assert all(len(step.namespace) == 2 for step in cache.path_up(inserted.last_node))
        cache.check()


def test_versions_do_not_meet_either() -> None:
    cache = RadixCache()
    for at in range(4):
        assert cache.insert(RadixKey([1, 2, 3]), range(10 * at, 10 * at + 3)).prefix_len == 0
        cache.bump_version()
        cache.check()
    assert cache.version == 4 and cache.total_size == 12
    assert len({node.namespace for node in old_nodes(cache)}) == 4
    assert cache.evict(12).num_tokens == 12


def test_what_is_locked_stays_until_it_is_unlocked() -> None:
    cache = RadixCache()
    node = cache.insert(RadixKey([1, 2, 3]), [10, 11, 12]).last_node
    cache.inc_lock_ref(node)
    cache.bump_version()
    assert cache.evict(10).num_tokens == 0
    assert cache.path_slots(node).tolist() == [10, 11, 12]
    cache.dec_lock_ref(node)
    cache.check()
    assert cache.evict(1).slots.tolist() == [10, 11, 12]


def test_a_leaf_of_old_weights_does_not_grow() -> None:
    cache = RadixCache()
    leaf = cache.insert(RadixKey([1, 2]), [10, 11]).last_node
    cache.bump_version()
    inserted = cache.insert(RadixKey([1, 2, 3]), [20, 21, 22], grow=leaf)
    assert inserted.prefix_len == 0 and inserted.last_node is not leaf and len(leaf) == 2
    cache.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("changed", ["before", "after", "never"])
def test_old_nodes_go_before_all_others_whatever_they_were_worth(policy: str, changed: str) -> None:
    """Well-used, of high priority, the oldest: nothing can match them any more."""
    cache = RadixCache(eviction_policy="fifo" if changed != "never" else policy)
    for at in (10, 20):
        cache.insert(RadixKey([at, 1, 2]), range(at, at + 3), priority=9)
        for _ in range(5):
            cache.match_prefix(RadixKey([at, 1, 2]))
    if changed == "before":
        cache.eviction_policy = policy
    cache.bump_version()
    if changed == "after":
        cache.eviction_policy = policy
    assert cache.eviction_policy == policy
    cache.insert(RadixKey([10, 1, 2, 3]), range(30, 34))
    cache.insert(RadixKey([40, 1]), range(40, 42))
    told: list[ev.NodeEvicted] = []
    cache.bus.subscribe(ev.NodeEvicted, told.append)
    assert sorted(cache.evict(6).slots.tolist()) == [10, 11, 12, 20, 21, 22]
    assert all("old weights" in event.describe() and event.policy == policy for event in told)
    cache.check()
    assert cache.evict(1).num_tokens in (2, 4) and "old weights" not in told[-1].describe()


@pytest.mark.parametrize("write", HOST_WRITE)
def test_nothing_old_is_copied_to_the_host(write: str) -> None:
    """Its copy would take the room of one that can be matched."""
    cache = HiRadixCache(host_tokens=4, host_write=write)
    node = cache.insert(RadixKey([1, 2]), [10, 11]).last_node
    cache.match_prefix(RadixKey([1, 2]))
    cache.bump_version()
    cache.seal(node)
    assert cache.host_size == 0
    assert cache.evict(2).slots.tolist() == [10, 11]
    assert cache.host_size == 0 and old_nodes(cache) == []
    cache.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_old_copies_leave_the_host_before_new_ones(policy: str) -> None:
    cache = HiRadixCache(host_tokens=6, eviction_policy=policy, host_write="write_through")

    def put(first: int, at: int) -> None:
        node = cache.insert(
            RadixKey([first, 1, 2]), range(at, at + 3), priority=9 if at < 20 else 0
        ).last_node
        for _ in range(4 if at < 20 else 0):
            cache.match_prefix(RadixKey([first, 1, 2]))
        cache.seal(node)
        cache.poll(wait=True)
        cache.evict(3)
        cache.check()

    put(5, 10)
    cache.bump_version()
    put(6, 20)
    put(7, 30)  # no room for three
    assert [cache.peek_tiers(RadixKey([first, 1, 2])) for first in (6, 7)] == [(0, 3), (0, 3)]
    assert old_nodes(cache) == []


@pytest.mark.parametrize("write", HOST_WRITE)
@pytest.mark.parametrize("arrives", [True, False])
def test_copies_under_way_end_as_they_would_have(write: str, arrives: bool) -> None:
    cache = HiRadixCache(host_tokens=8, host_write=write)
    node: Any = cache.insert(RadixKey([1, 2, 3]), [10, 11, 12]).last_node
    cache.copier = LateCopier(cache.copier, 1, failing=0.0)
    for _ in range(2):
        cache.match_prefix(RadixKey([1, 2, 3]))
    cache.seal(node)
    if write == "write_back":  # copies only what it evicts, and waits for that: a load is what can be late
        cache.evict(3)
        match = cache.match_prefix(RadixKey([1, 2, 3]))
        chain = cache.hold_host(match)
        assert cache.load_back(chain, [20, 21, 22])
        cache.release_host(chain)
    assert isinstance(node, HostNode) and cache.copy_locks == [node]
    cache.bump_version()
    cache.check()
    assert cache.evict(3).num_tokens == 3, "it waits for the copy"
    cache.check()
    assert cache.copy_locks == [] and cache.peek_tiers(RadixKey([1, 2, 3])) == (0, 0)


# ---------------------------------------------------------------------- the engine


def require_new(
    output: GenerationOutput,
    prompt: Sequence[int],
    params: SamplingParams,
    said: list[int],
    fresh: ColdReference,
) -> None:
    """What came after `said` is what a fresh engine says after the prompt and that."""
    rest = SamplingParams(
        max_new_tokens=params.max_new_tokens - len(said), ignore_eos=True, temperature=params.temperature,
        seed=params.seed,
    )  # fmt: skip
    assert output.token_ids[: len(said)] == said
    new = {"token_ids": output.token_ids[len(said) :], "logprobs": output.logprobs[len(said) :]}
    fresh.require_equal([*prompt, *said], rest, dataclasses.replace(output, **new))


# Every tier with every page size; by turns, so that the default run has each of both.
TURNS = [(*way, tier) for tier in TIERS for way in ((1, False, 1.0), (4, False, 0.0), (2, True, 1.0))]


@pytest.mark.parametrize(
    ("page", "bigram", "temperature", "options"),
    one_slow(2, TURNS),
    ids=lambda value: ids(value) if isinstance(value, dict) else str(value),
)
def test_who_runs_goes_on_as_a_fresh_engine_of_the_new_weights_would(
    make_engine: MakeEngine, models: list[LlamaModel], cold: list[ColdReference],
    page: int, bigram: bool, temperature: float, options: dict[str, Any],
) -> None:  # fmt: skip
    """Waiting, between chunks, decoding or retracted, with copies under way: at every moment of a run."""
    for steps in range(0, 14, 3):
        engine = make_engine(
            kv_tokens=48, page_size=page, bigram_keys=bigram, chunk_tokens=4, max_running=3,
            new_token_ratio=0.0, **options,
        )  # fmt: skip
        late(engine, steps)
        asked: dict[str, tuple[list[int], SamplingParams]] = {}
        for number in range(6):
            prompt = [*PROMPT[: 3 + number], 20 + number % 3]
            params = reply(8, temperature=temperature, seed=5)
            asked[engine.add_request(prompt, params)] = prompt, params
        done = [output.request_id for _ in range(steps) for output in engine.step().finished]
        said = {request.id: list(request.output) for request in engine.scheduler.requests()}
        engine.update_weights(models[1])
        engine.check()
        assert not engine.scheduler.live
        assert engine.allocator.available + engine.cache.total_size == engine.allocator.num_tokens
        assert all(engine.peek(prompt) == 0 for prompt, _ in asked.values())
        outputs = drive(engine)
        assert sorted([*done, *(output.request_id for output in outputs)]) == sorted(asked)
        for output in outputs:
            require_new(output, *asked[output.request_id], said[output.request_id], cold[1])


def test_samples_that_have_parted_go_on_one_by_one(
    make_engine: MakeEngine, models: list[LlamaModel], cold: list[ColdReference]
) -> None:
    engine = make_engine(kv_tokens=64, max_running=4)
    params = reply(6, n=3, temperature=1.0, seed=4)
    engine.add_request(PROMPT, params)
    engine.step()
    engine.step()
    said = {request.index: list(request.output) for request in engine.scheduler.requests()}
    assert len(said) == 3 and all(said.values())
    engine.update_weights(models[1])
    outputs = drive(engine)
    # What each sample says next depends on what it said, not on its fellows: greedy after the update would
    # be one thing for all, so the draws are held to a fresh engine with the same seed and index.
    fresh = make_engine(radix_cache=False, kv_tokens=64)
    fresh.update_weights(models[1])
    for output in outputs:
        assert output.token_ids[: len(said[output.index])] == said[output.index]
        again = fresh.generate([[*PROMPT, *said[output.index]]], reply(4, n=3, temperature=1.0, seed=4))
        assert output.token_ids[len(said[output.index]) :] == again[output.index].token_ids


@pytest.mark.parametrize("options", TIERS, ids=ids)
def test_weights_may_change_again_and_again(
    make_engine: MakeEngine, models: list[LlamaModel], cold: list[ColdReference], options: dict[str, Any]
) -> None:
    """Each whole reply is that of the weights in force; going back to earlier ones hits nothing of theirs."""
    engine = make_engine(kv_tokens=40, **options)
    late(engine, 3)
    for turn in range(12):
        which = turn // 2 % 3
        if turn % 2 == 0:
            engine.update_weights(models[which])
        (output,) = engine.generate([PROMPT], reply(5))
        cold[which].require_equal(PROMPT, reply(5), output)
        assert bool(output.cached_tokens) == bool(turn % 2)


# Every policy with one tier, and with two, whose way of writing changes from policy to policy.
@pytest.mark.parametrize(
    ("policy", "options"),
    [(policy, TIERS[at]) for number, policy in enumerate(sorted(POLICIES)) for at in (0, 1 + number % 3)],
    ids=lambda each: each if isinstance(each, str) else ids(each),
)
def test_old_nodes_are_evicted_in_time(
    make_engine: MakeEngine, models: list[LlamaModel], options: dict[str, Any], policy: str
) -> None:
    """A pool full of well-used nodes of old weights is soon full of new ones, under every policy."""
    engine = make_engine(kv_tokens=48, eviction_policy=policy, max_running=2, **options)
    rng = random.Random(policy)

    def rounds(count: int, priority: int) -> int:
        texts = [[rng.randrange(5, 60) for _ in range(9)] for _ in range(3)]
        for turn in range(count):
            engine.add_request([*texts[turn % 3], rng.randrange(5, 60)], reply(2), priority=priority)
            hits = engine.stats.first.cached
            drive(engine)
        return engine.stats.first.cached - hits

    rounds(20, 5)
    engine.update_weights(models[1])
    before = sum(len(node) for node in old_nodes(engine.cache))
    assert before > 24
    assert rounds(20, 0) == 9, "the last one finds its text"
    assert sum(len(node) for node in old_nodes(engine.cache)) == 0


def test_a_pin_of_old_weights_holds_slots_and_matches_nothing(
    make_engine: MakeEngine, models: list[LlamaModel], cold: list[ColdReference]
) -> None:
    engine = make_engine(kv_tokens=32)
    engine.generate([PROMPT], reply(1))
    pin = engine.pin(PROMPT)
    assert pin.length == len(PROMPT)
    engine.update_weights(models[1])
    assert engine.peek(PROMPT) == 0 and engine.cache.protected_size == len(PROMPT)
    (output,) = engine.generate([PROMPT], reply(4))
    assert output.cached_tokens == 0
    cold[1].require_equal(PROMPT, reply(4), output)
    with pytest.raises(ValueError, match=r"pins \[1\]"):
        engine.flush_cache()
    again = engine.pin(PROMPT)
    assert again.length == len(PROMPT)
    engine.unpin(pin)
    engine.check()
    assert engine.cache.protected_size == len(PROMPT)  # the new one's
    engine.unpin(again)
    engine.flush_cache()
    assert engine.allocator.available == 32


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 16}, {"num_hidden_layers": 1}, {"num_key_value_heads": 4}, {"rope_theta": 500.0},
     {"vocab_size": 60}, {"eos_token_id": 3}],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_another_model_is_refused_and_nothing_changes(
    make_engine: MakeEngine, tiny_model: LlamaModel, cold: list[ColdReference], changes: dict[str, Any]
) -> None:
    engine = make_engine()
    engine.add_request(PROMPT, reply(4))
    engine.step()
    before, heard = engine.snapshot(), listen(engine)
    with pytest.raises(ValueError, match="the new weights are of another model"):
        engine.update_weights(other_weights(3, **changes))
    assert engine.snapshot() == before and heard == [] and engine.model is tiny_model
    (output,) = drive(engine)
    cold[0].require_equal(PROMPT, reply(4), output)


def test_not_in_the_middle_of_a_step(make_engine: MakeEngine, models: list[LlamaModel]) -> None:
    engine = make_engine()
    engine.add_request(PROMPT, reply(2))
    unsubscribe = engine.bus.subscribe(ev.BatchScheduled, lambda event: engine.update_weights(models[1]))
    with pytest.raises(ValueError, match="a step is running"):
        engine.step()
    unsubscribe()
    assert engine.model is models[0]
    drive(engine)


def test_a_tree_without_versions_is_emptied(
    make_engine: MakeEngine, models: list[LlamaModel], cold: list[ColdReference]
) -> None:
    engine = make_engine(PlainCache())
    engine.generate([PROMPT], reply(2))
    rid = engine.add_request([*PROMPT, 20], reply(5))
    engine.step()
    said = list(engine.scheduler.running[0].output)
    engine.update_weights(models[1])
    assert engine.allocator.available == engine.allocator.num_tokens
    (output,) = drive(engine)
    assert output.request_id == rid
    require_new(output, [*PROMPT, 20], reply(5), said, cold[1])
    pin = engine.pin(PROMPT)
    with pytest.raises(ValueError, match=r"pins \[1\] hold KV of the old weights"):
        engine.update_weights(models[0])
    engine.unpin(pin)
    assert engine.model is models[1]


def test_an_update_is_no_lack_of_room(make_engine: MakeEngine, models: list[LlamaModel]) -> None:
    """Neither the books nor the estimate of future tokens take it for a retraction."""
    engine = make_engine()
    for number in range(3):
        engine.add_request([*PROMPT, 20 + number], reply(6))
    engine.step()
    engine.step()
    told, ratio = listen(engine, ev.RequestRetracted, ev.VersionBumped), engine.scheduler.future.ratio
    engine.update_weights(models[1])
    assert [type(event).__name__ for event in told].count("RequestRetracted") == 3
    assert engine.stats.retractions == engine.stats.preemptions == 0
    assert engine.scheduler.future.ratio == ratio
    drive(engine)


@pytest.mark.parametrize("options", TIERS, ids=ids)
def test_a_recording_replays_it(
    make_engine: MakeEngine, models: list[LlamaModel], options: dict[str, Any], tmp_path: Path
) -> None:
    engine = make_engine(kv_tokens=40, chunk_tokens=8, **options)
    late(engine, 2)
    path, rng = tmp_path / "run.jsonl", random.Random(0)
    with Recorder(engine, path, keyframe_every=3) as recorder:
        for turn in range(30):
            prompt = [*PROMPT[: rng.randrange(1, 9)], rng.randrange(5, 60)]
            engine.add_request(prompt, reply(rng.randrange(5)), rng.choice([None, "a"]))
            engine.step()
            if turn % 8 == 5:
                engine.update_weights(models[turn % 3])
        drive(engine)
    loaded = Recording.load(path)
    loaded.check()
    replay, bumps = ReplayState(loaded.header["start"]), 0
    for frame in loaded:
        for event in frame.events:
            replay.apply(event)
            bumps += isinstance(event, ev.VersionBumped)
            assert event.describe()
        if frame.keyframe is not None:
            assert replay.snapshot() == frame.keyframe
    assert bumps == 4 and replay.snapshot() == engine.snapshot() == recorder.state(len(recorder) - 1)
