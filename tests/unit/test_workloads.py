"""minirad/workloads.py: data that plays the same every time, and histories that are never retokenised."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace

import pytest

from minirad import workloads
from minirad.config import EngineConfig, SamplingParams
from minirad.model.classroom import corpus
from minirad.observe.events import RequestAdded
from minirad.observe.recorder import Recorder
from minirad.workloads import Player, Session, Turn, Workload


@dataclass
class Output:
    request_id: str
    token_ids: list[int]
    index: int = 0
    finish_reason: str = "stop"


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def two_turns(**first) -> Workload:
    return Workload("w", "w", (Session("chat", (Turn("ab", **first), Turn("cd", wait=3)), arrival=4),))


PROGRAMS = [name for name, make in workloads.WORKLOADS.items() if make().program]
DATA = [name for name in workloads.WORKLOADS if name not in PROGRAMS]


def played(player: Player) -> int:
    """Plays it to its end with made-up replies; how many requests it sent."""
    step = sent = 0
    while not player.done:
        assert player.next_due is not None
        for asked in player.due(step):
            assert asked.prompt and isinstance(asked.params, SamplingParams)
            sent += 1
            player.sent(asked, f"R{sent}")
            player.finished(Output(f"R{sent}", [1, 2, 3]), step)
        step += 1
        assert step < 1000
    return sent


@pytest.mark.parametrize("name", DATA)
def test_every_built_in_one_can_be_played_and_saved(name, tmp_path):
    workload = workloads.load(name)
    assert workload.name == name and workload.title
    assert workload == workloads.load(name), "the same every time"
    workload.save(tmp_path / "w.json")
    assert workloads.load(tmp_path / "w.json") == workload
    player = Player(workload, encode)
    sent = played(player)
    assert sent == workload.requests
    assert len(player.labels) == sent


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_can_be_played_without_an_engine(name, tmp_path):
    workload = workloads.load(name)
    assert workload.name == name and workload.title and not workload.sessions
    with pytest.raises(ValueError, match="is a program"):
        workload.save(tmp_path / "w.json")
    player = Player(workload, encode)
    sent = played(player)
    assert sent >= 4 and len(player.labels) == sent
    assert player.failures == []


def test_a_refusal_reaches_the_program():
    player = Player(workloads.load("few-shot-batch"), encode)
    (hint,) = player.due(0)
    player.refused(hint, "no room")  # it only helps
    assert not player.done and player.failures == []
    answers = player.due(0)
    assert len(answers) == 6
    for answer in answers:
        player.refused(answer, "no room")
    assert player.done and "no room" in player.failures[0]
    player.close()


def test_a_dropped_program_gives_everything_back():
    from minirad.engine import Engine

    engine = Engine(EngineConfig(kv_tokens=700, device="cpu"))
    player = Player(workloads.load("vote"), engine.encode, engine)
    for step in range(6):
        for asked in player.due(step):
            player.sent(asked, engine.add_request(asked.prompt, asked.params, token_mask=asked.token_mask))
        for output in engine.step().finished:
            player.finished(output, step + 1)
    assert engine.has_work
    player.close()
    assert not engine.scheduler.has_work
    engine.step()  # hands over what was aborted
    engine.flush_cache()  # refused while anything is pinned
    engine.check()


def test_a_history_is_kept_as_token_ids():
    player = Player(two_turns(), encode)
    assert player.due(3) == [] and player.next_due == 4
    (first,) = player.due(4)
    assert first.prompt == encode("ab") and first.label == "chat · turn 1"
    assert player.due(5) == [] and player.next_due is None and not player.done
    player.sent(first, "R1")
    generated = [700, 701]  # no text encodes to these: they can only come through as ids
    player.finished(Output("R1", generated), step=9)
    assert player.due(11) == [] and player.next_due == 12
    (second,) = player.due(12)
    assert second.prompt == [*encode("ab"), *generated, *encode("\n"), *encode("cd")]
    player.sent(second, "R2")
    player.finished(Output("R2", []), step=15)
    assert player.done


def test_a_reply_cut_by_its_length_is_closed_first():
    player = Player(two_turns(), encode)
    (first,) = player.due(4)
    player.sent(first, "R1")
    player.finished(Output("R1", [700], finish_reason="length"), step=5)
    (second,) = player.due(8)
    assert second.prompt == [*encode("ab"), 700, *encode("<|im_end|>\n"), *encode("cd")]


def test_only_the_first_sample_counts_and_an_abort_ends_the_session():
    player = Player(two_turns(n=3, temperature=1.0), encode)
    (first,) = player.due(4)
    assert first.params.n == 3
    player.sent(first, "R1")
    player.finished(Output("R1", [5], index=2), step=5)
    assert player.next_due is None
    player.finished(Output("R1", [], finish_reason="abort"), step=5)
    assert player.done
    player = Player(two_turns(), encode)
    player.refused(player.due(4)[0])
    assert player.done


def test_the_shared_prompts_are_shared(make_engine):
    agents = [session.turns[0].text for session in workloads.agents().sessions]
    assert all(corpus.AGENT_PROMPT in text for text in agents)
    shots = [session.turns[0].text for session in workloads.few_shot().sessions]
    header = shots[0][: shots[0].index("Question 7")]
    assert all(text.startswith(header) for text in shots) and len(set(shots)) == len(shots)
    raw = [workloads.raw_prompt(number) for number in range(12)]
    assert len({text.split()[0] for text in raw}) == 12


def test_requests_of_a_recording_come_as_they_came(make_engine, tmp_path):
    engine = make_engine()
    recorder = Recorder(engine)
    engine.add_request([3, 4, 5], SamplingParams(max_new_tokens=3), priority=2)
    engine.step()
    engine.step()
    engine.add_request([3, 4, 9, 9], SamplingParams(max_new_tokens=2, temperature=0.5), extra_key="tenant")
    while engine.has_work:
        engine.step()
    recorder.close()
    fork = workloads.from_recording(recorder)
    assert [s.turns[0].token_ids for s in fork.sessions] == [(3, 4, 5), (3, 4, 9, 9)]
    assert [s.arrival for s in fork.sessions] == [0, 2]
    assert [s.priority for s in fork.sessions] == [2, 0]
    assert fork.sessions[0].extra_key is None and fork.sessions[1].extra_key is not None
    assert fork.kv_tokens == 64
    assert len(workloads.from_recording(recorder, until=0).sessions) == 1
    assert [len(s.turns[0].reply) for s in fork.sessions] == [3, 2]
    recorder.save(tmp_path / "run.jsonl")
    fork.save(tmp_path / "w.json")
    for name in ("run.jsonl", "w.json"):
        assert workloads.load(tmp_path / name).sessions == fork.sessions


def test_a_recorded_request_loses_nothing(tmp_path):
    """Each field of SamplingParams, by both ways of asking again: a workload, and `viz.fork`."""
    from minirad.engine import Engine
    from viz.fork import fork

    asked = SamplingParams(max_new_tokens=3, temperature=0.7, top_p=0.9, top_k=5, stop=("x", "yz"),
                           ignore_eos=True, n=2, seed=11, logprob_start=1)  # fmt: skip
    plain = SamplingParams()
    same = [f.name for f in fields(SamplingParams) if getattr(asked, f.name) == getattr(plain, f.name)]
    assert set(same) <= {"stop_token_ids"}, "each one is asked for here with another value than its default"
    assert {f.name for f in fields(SamplingParams)} <= {f.name for f in fields(RequestAdded)}
    engine = Engine(EngineConfig(kv_tokens=64, device="cpu"))  # with a tokenizer: there are stop texts
    with Recorder(engine) as recorder:
        engine.add_request([3, 4, 5], asked, extra_key="tenant", priority=2)
        while engine.has_work:
            engine.step()
    (added,) = (e for e in recorder.frames[0].events if isinstance(e, RequestAdded))
    workload = workloads.from_recording(recorder)
    (session,) = workload.sessions
    assert session.turns[0].params() == asked
    workload.save(tmp_path / "w.json")
    assert workloads.load(tmp_path / "w.json").sessions == workload.sessions
    again = Engine(engine.config, model=engine.model, tokenizer=engine.tokenizer)
    player = Player(workload, again.encode)
    _, forked = fork(recorder, 0)
    with Recorder(again) as replayed:
        for due in player.due(0):
            again.add_request(due.prompt, due.params, due.session.extra_key, due.session.priority)
        replayed.cut()
    for other in (replayed, forked):
        (found,) = (e for e in other.frames[0].events if isinstance(e, RequestAdded))
        assert found == replace(added, request=found.request)


def test_bad_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no workload 'nonsense'.*mixed"):
        workloads.load("nonsense")
    cases = {
        "[]": 'list of "sessions"',
        "{": "no workload",
        '{"sessions": [{"turns": [{"text": ""}]}]}': "without text",
        '{"sessions": [{"turns": [{"text": "a", "max_new_tokens": -1}]}]}': "max_new_tokens",
        '{"sessions": [{"turns": [{"text": "a", "reply": [3, "x"]}]}]}': "token id.*'x'",
        '{"sessions": [{"turns": [{"words": "a"}]}]}': "words",
        '{"sessions": [{"name": "x"}]}': "turns",
    }
    for text, message in cases.items():
        path = tmp_path / "w.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            workloads.load(path)
    path.write_text(json.dumps({"sessions": [{"turns": [{"token_ids": [1, 2]}]}]}))
    assert workloads.load(path).sessions[0].turns[0].token_ids == (1, 2)


def test_the_default_shows_splits_evictions_and_retractions():
    from minirad.engine import Engine
    from viz.trace import Trace

    workload = workloads.load("mixed")
    engine = Engine(EngineConfig(kv_tokens=workload.kv_tokens, chunk_tokens=128, device="cpu"))
    player, step = Player(workload, engine.encode), 0
    with Recorder(engine) as recorder:
        while not player.done and step < 500:
            for asked in player.due(step):
                player.sent(asked, engine.add_request(asked.prompt, asked.params))
            for output in engine.step().finished:
                player.finished(output, step + 1)
            step += 1
    assert player.done
    marks = Trace(recorder).marks()
    assert len(marks["split"]) >= 4 and len(marks["evict"]) >= 8 and len(marks["retract"]) >= 1
