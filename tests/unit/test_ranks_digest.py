"""The digest of an engine: whatever ranks could differ in changes it, and is named; and what ranks tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import ROOT

from minirad.config import SamplingParams
from minirad.engine import Engine
from minirad.observe import rank_events as ranks
from minirad.observe.event import ReplayState
from minirad.observe.reading import check_state, event_fields, parse_event
from minirad.ranks import digest
from minirad.ranks.messages import AskedFor, KeyElsewhere, Keys, Message, is_plain
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Batch

MakeEngine = Callable[..., Engine]


def busy(make_engine: MakeEngine, **config: Any) -> Engine:
    """An engine in the middle of much: two run, two wait, one is pinned."""
    engine = make_engine(max_running=2, **config)
    engine.generate([[5] * 9, [5, 6, 7, 8]], SamplingParams(max_new_tokens=3, ignore_eos=True))
    engine.pin([5, 5, 5])
    for number in range(4):
        params = SamplingParams(max_new_tokens=9, ignore_eos=True)
        engine.add_request([5] * (7 + number) + [6], params, extra_key="ab"[number % 2])
    engine.step()
    engine.step()
    return engine


def leaf(engine: Engine) -> Any:
    return next(node for node in engine.cache.walk() if node.parent is not None and not node.children)


def bump(name: str) -> Callable[[Engine], None]:
    def change(engine: Engine) -> None:
        node = leaf(engine)
        setattr(node, name, getattr(node, name) + 1)

    return change


def of_request(name: str) -> Callable[[Engine], None]:
    def change(engine: Engine) -> None:
        request = engine.scheduler.running[0]
        setattr(request, name, getattr(request, name) + 1)

    return change


def swap_free_pages(engine: Engine) -> None:
    stack, top = engine.allocator._stack, engine.allocator._top
    stack[[top - 1, top - 2]] = stack[[top - 2, top - 1]]


def other_slot(engine: Engine) -> None:
    leaf(engine).packed = (63).to_bytes(8, "little") + leaf(engine).packed[8:]


def other_token(engine: Engine) -> None:
    leaf(engine).edge = b"\x01\0\0\0" + leaf(engine).edge[4:]


def forget(engine: Engine) -> None:
    node = leaf(engine)
    del node.parent.children[node.first]


def other_row(engine: Engine) -> None:
    engine.rows.rows[engine.scheduler.running[0].row, 2] += 1


def other_reply(engine: Engine) -> None:
    request = engine.scheduler.running[0]
    request._buffer[request.length - 1] += 1


def lose_a_request(engine: Engine) -> None:
    engine.scheduler.waiting.pop()


def other_pin(engine: Engine) -> None:
    engine._pins[1] = leaf(engine)


@pytest.mark.parametrize(("change", "said"), [
    (bump("lock_ref"), "lock_ref {1} at n"), (bump("hits"), "hits 1 at n"), (bump("created"), "created"),
    (bump("last_access"), "last_access"), (bump("priority"), "priority 1 at n"), (other_slot, "slots [63"),
    (other_token, "tokens [1"), (forget, "rank 0 has a node n"), (other_row, "slots [... "),
    (other_reply, "tokens [... "), (of_request("kv_len"), "tokens with KV"), (of_request("seed"), "seed"),
    (of_request("protected_len"), "protected tokens"), (of_request("row"), "row 1 in R"),
    (of_request("passes"), "times passed 1 in R"),
    (lose_a_request, "rank 0 has a request R6, rank 2 has none"),
    (swap_free_pages, "free pages [... "), (other_pin, "pins {1: "),
    (lambda engine: engine.scheduler.waiting.reverse(), "waiting [R6, R5]"),
    (lambda engine: setattr(engine, "steps", 99), "steps 99"),
    (lambda engine: setattr(engine.cache, "evictable_size", 1), "evictable tokens 1"),
    (lambda engine: engine.set_eviction_policy("lfu"), "eviction policy lfu"),
], ids=lambda value: getattr(value, "__name__", None) or str(value)[:20])  # fmt: skip
def test_whatever_is_changed_is_seen_and_named(
    make_engine: MakeEngine, change: Callable[[Engine], None], said: str
) -> None:
    one, other = busy(make_engine), busy(make_engine)
    assert digest.of_engine(one) == digest.of_engine(other)
    mine = digest.parts_of(one)
    assert digest.difference(None, mine, digest.parts_of(other), 2) == ""
    change(other)
    assert digest.of_engine(one) != digest.of_engine(other)
    sentence = digest.difference(None, mine, digest.parts_of(other), 2)
    assert said.replace("{1}", str(leaf(other).lock_ref)) in sentence and "rank 0 has" in sentence, sentence
    assert "rank 2 has" in sentence and "\n" not in sentence


def test_the_digest_of_two_tiers(make_engine: MakeEngine) -> None:
    tiers = {"host_kv_tokens": 32, "kv_tokens": 32}
    one, other = busy(make_engine, **tiers), busy(make_engine, **tiers)
    assert digest.of_engine(one) == digest.of_engine(other)
    node = next(node for node in other.cache.walk() if getattr(node, "host", b""))
    node.host = (9).to_bytes(8, "little") + node.host[8:]
    assert "host slots [9" in digest.difference(None, digest.parts_of(one), digest.parts_of(other), 1)
    assert digest.of_engine(one) != digest.of_engine(other)


def test_a_batch_by_its_requests_and_their_tokens(make_engine: MakeEngine) -> None:
    engine = busy(make_engine)
    batch = Batch(engine.scheduler.running, [1, 2], [], 0)
    same, other = (
        Batch(engine.scheduler.running, [1, 2], [], 0),
        Batch(engine.scheduler.running, [1, 3], [], 0),
    )
    assert digest.of_batch(batch) == digest.of_batch(same) != digest.of_batch(other)
    assert len(digest.of_batch(Batch())) == digest.SIZE == len(digest.of_engine(engine))


def test_it_is_the_same_in_every_process() -> None:
    """Python's hashes of texts are not."""
    code = (
        "from minirad.simulate import ModelFreeEngine; from minirad.config import SamplingParams;"
        "from minirad.ranks import digest;"
        "e = ModelFreeEngine(64, schedule_policy='dfs-weight', max_running=3);"
        "[e.add_request([5] * n + [7], SamplingParams(max_new_tokens=4), extra_key=k)"
        " for n, k in ((9, 'a'), (4, 'b'), (12, 'c'), (5, 'a'), (7, ('x', 'y')))];"
        "[e.cache.namespace_number((r.extra_key, False)) for r in e.scheduler.waiting];"
        "print([(e.step(), digest.of_engine(e).hex())[1] for _ in range(6)])"
    )
    found = set()
    for seed in "123":
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240
        )
        assert run.returncode == 0, run.stderr
        found.add(run.stdout)
    assert len(found) == 1 and len(set(json.loads(found.pop().replace("'", '"')))) == 6


# ---------------------------------------------------------------------- what is said


def test_a_message_is_what_was_said() -> None:
    keys = Keys()
    request = Request("", np.arange(5), SamplingParams(n=2), 7, 0, lambda: 0, 3)
    asked = AskedFor.of(request, keys, 7)
    message = Message("step", 2, [("enqueue", (asked,)), ("abort", ("R1",))], 4, [1], [True], ("weights", 1))
    back = Message.from_bytes(message.to_bytes())
    assert back == message
    made = back.inputs[0][1][0].request()
    assert made.prompt.tolist() == [0, 1, 2, 3, 4] and made.params == request.params
    assert (made.seed, made.priority, made.extra_key) == (7, 3, KeyElsewhere(1))


def test_keys_that_are_equal_are_sent_alike() -> None:
    keys, strange = Keys(), frozenset({1})
    plain = ["a", ("a", 1), 1, ("a", ("b", None))]
    assert [keys.sent(key) for key in plain] == plain and all(map(is_plain, plain))
    assert keys.sent(None) is None
    assert keys.sent(1.0) == 1, "equal to one that was sent"
    number = keys.sent(strange)
    assert keys.sent(frozenset({1})) == number == KeyElsewhere(number.number)
    assert keys.sent(2.5) not in (number, 2.5) and not is_plain(("a", 2.5))


SENTENCES = (
    (["RanksTold", 12, ["R3"], ["R1", "R2"], ["pin 1"], 300, 2],
     "rank 0 tells 1 other: R3 came, R1 and R2 aborted, pin 1 (300 bytes)"),
    (["RanksTold", 1, [], [], [], 33, 4], "rank 0 tells 3 others: nothing new (33 bytes)"),
    (["RanksAgreed", 3, "00ff12ab34", 2], "all 2 ranks agree: 00ff12ab"),
    (["RanksDiffered", 12, 1, "rank 1 has lock_ref 2 at n7, rank 0 has 1"],
     "the ranks differ: rank 1 has lock_ref 2 at n7, rank 0 has 1"),
)  # fmt: skip


@pytest.mark.parametrize(("held", "sentence"), SENTENCES)
def test_what_ranks_tell(held: list[Any], sentence: str, make_engine: MakeEngine) -> None:
    event = parse_event(held)
    assert event.describe() == sentence and json.loads(json.dumps(event_fields(event))) == held
    assert type(event).of_ranks
    state = ReplayState(make_engine().snapshot())
    event.check(state)
    event.apply(state)
    told = json.loads(json.dumps(state.snapshot()))
    check_state(told)
    assert told["ranks"]["ranks"] == (held[-1] if isinstance(held[-1], int) else 2)
    for name, wrong in (("step", "3"), ("digest", 7), ("requests", [1]), ("aborts", "R1"), ("bytes", -1)):
        with pytest.raises(ValueError, match="ranks"):
            check_state({**told, "ranks": {**told["ranks"], name: wrong}})
    with pytest.raises(ValueError, match="ranks must be an object"):
        check_state({**told, "ranks": {**told["ranks"], "more": 1}})


def test_a_planted_lock_is_told_to_the_recording(make_engine: MakeEngine) -> None:
    held = ["LockPlanted", 1, 2]
    event = parse_event(held)
    assert event.describe() == "lock_ref of n1 was made 2 by hand, no other rank is told"
    assert json.loads(json.dumps(event_fields(event))) == held and type(event).of_ranks
    engine = make_engine()
    engine.generate([[5, 6, 7]])
    state = ReplayState(engine.snapshot())
    event.check(state)
    event.apply(state)
    assert state.nodes[1]["lock_ref"] == 2
    for wrong, said in (
        (ranks.LockPlanted(99, 1), "no node 99|n99"),
        (ranks.LockPlanted(1, -1), "a lock_ref of -1"),
        (ranks.LockPlanted(1, 1 << 31), "a lock_ref of 2"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong.check(state)


def test_a_stranger_cannot_have_no_ranks(make_engine: MakeEngine) -> None:
    state = ReplayState(make_engine().snapshot())
    for event in (
        ranks.RanksAgreed(1, "", 1),
        ranks.RanksTold(-1, (), (), (), 0, 2),
        ranks.RanksDiffered(1, 0, ""),
    ):
        with pytest.raises(ValueError, match="ranks"):
            event.check(state)
    with pytest.raises(ValueError, match="2001 characters"):
        ranks.RanksDiffered(1, 1, "x" * 2001).check(state)
