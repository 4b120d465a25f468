"""Why the requests of a recording missed: small runs of which every word is known; silent trees."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import PlainCache, tiny_config
from test_why import Logprobs

from minirad.__main__ import main
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.errors import HostCopyError
from minirad.model.llama import LlamaModel, random_weights
from minirad.observe import events as ev
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.parts import Parts
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.simulate import Script
from minirad.tiers.hiradix_cache import HiRadixCache, NothingToCopy
from minirad.why import Memory
from minirad.why.recorded import Listener, Recorded
from minirad.why.words import Words

ONE = SamplingParams(max_new_tokens=1)


def engine(kv_tokens: int = 32, cache: Any = None, script: Any = None, **options: Any) -> Engine:
    """An engine without a model that can be recorded."""
    script = Script() if script is None else script
    script.model = SimpleNamespace(config=SimpleNamespace(num_parameters=0))
    config = EngineConfig(kv_tokens=kv_tokens, max_context=kv_tokens, max_running=2, **options)
    rows = ReqToTokenPool(2, kv_tokens)
    tree = RadixCache(config.page_size) if cache is None else cache
    return Engine(parts=Parts(config, script, tree, rows, script))


def ask(engine: Engine, prompt: Any, extra_key: Any = None, params: SamplingParams = ONE) -> str:
    name = engine.add_request(list(prompt), params, extra_key)
    while engine.has_work:
        engine.step()
        engine.check()
    return name


def said(told: Recorded, name: str) -> str:
    return Words().sentence(told.answers[name])


def test_for_whom_it_was_evicted_is_told() -> None:
    run = engine(32)
    with Recorder(run) as recording:
        ask(run, range(100, 112))
        ask(run, range(200, 212))
        ask(run, range(100, 112))  # used once more
        ask(run, range(300, 316))
        ask(run, range(200, 213))
    told = Recorded.of(recording)
    assert said(told, "R3") == "R3 finds 11 of 12 tokens in the cache; computed are the last one, as always"
    assert said(told, "R5") == (
        "R5 finds 0 of 13 tokens in the cache; computed are 12 that were evicted from the device in step 4 "
        "for R4 by lru, 2 steps after their last use by R2; 1 never seen, behind what R2 had"
    )
    (evicted, _) = told.answers["R5"].losses
    assert "oldest unlocked leaf" in evicted.left[0].reason


def test_both_tiers_are_told() -> None:
    run = engine(16, HiRadixCache(1, host_tokens=16), host_kv_tokens=16)
    with Recorder(run) as recording:
        for first in (100, 200, 300):
            ask(run, range(first, first + 12))
        ask(run, range(100, 113))
    (evicted, _) = Recorded.of(recording).answers["R4"].losses
    assert [(left.medium, left.by) for left in evicted.left] == [("GPU", ("R2",)), ("CPU", ("R2",))]


def test_what_is_loaded_back_needs_room_as_well() -> None:
    run = engine(16, HiRadixCache(1, host_tokens=32), host_kv_tokens=32)
    with Recorder(run) as recording:
        ask(run, range(100, 110))
        ask(run, range(200, 210))
        ask(run, range(100, 112))
    told = Recorded.of(recording)
    assert told.answers["R3"].cached == 10 and told.misfits == []
    record = told.memory.record(0, range(200, 210))
    assert record is not None and record.held == ("CPU",) and record.left[0].by == ("R3",)


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_an_engine_with_a_model_that_runs_ahead(seed: int) -> None:
    """Steps launched before the last was read, samples, new weights: the memory foresees every hit."""
    rng, config = random.Random(seed), tiny_config()
    model = LlamaModel(config, random_weights(config, 0, dtype=torch.float32, device="cpu"))
    run = Engine(
        EngineConfig(kv_tokens=64, page_size=4, max_running=3, chunk_tokens=rng.choice([4, 16]),
                     host_kv_tokens=32 * (seed % 2), mixed=seed > 1, bigram_keys=seed == 4),
        model=model,
    )  # fmt: skip
    texts = [[rng.randrange(3, 60) for _ in range(24)] for _ in range(3)]
    with Recorder(run) as recording:
        for turn in range(6):
            prompts = [rng.choice(texts)[: rng.randrange(4, 24)] for _ in range(rng.randrange(1, 5))]
            params = [SamplingParams(max_new_tokens=rng.randrange(8), n=1 + (turn == 2)) for _ in prompts]
            run.generate(prompts, params)
            if turn == 3:
                run.update_weights(model)
    told = Recorded.of(recording)
    assert told.misfits == told.unknown == [] and len(told.answers) >= 6
    assert all(sum(loss.tokens for loss in a.losses) == a.missed for a in told.answers.values())
    causes = {loss.cause for answer in told.answers.values() for loss in answer.losses}
    assert {"weights", "new"} <= causes


def test_what_decodes_needs_room_as_well() -> None:
    run = engine(24)
    with Recorder(run) as recording:
        ask(run, range(100, 110))
        ask(run, range(200, 210), params=SamplingParams(max_new_tokens=10, ignore_eos=True))
        ask(run, range(100, 111))
    evicted = Recorded.of(recording).answers["R3"].losses[0]
    assert (evicted.cause, evicted.tokens, evicted.left[0].by) == ("evicted", 10, ("R2",))


def test_a_moment_before_the_end_and_a_prompt_that_nobody_sent() -> None:
    run = engine(64)
    with Recorder(run) as recording:
        ask(run, range(100, 110))
        at = len(recording.frames)
        ask(run, range(100, 108), "b")
        run.flush_cache()
        ask(run, [5])
    then = Recorded.of(recording, at)
    assert then.why(range(100, 110)).cached == 9 and then.why(range(100, 105), 1).main.cause == "namespace"
    now = Recorded.of(recording)
    assert now.why(range(100, 110)).main.cause == "flushed"
    assert now.why([5, 6]).cached == 1


def test_a_recorder_that_came_late(tmp_path: Path) -> None:
    run = engine(64)
    ask(run, range(100, 110))
    run.add_request(list(range(200, 210)), SamplingParams(max_new_tokens=2, ignore_eos=True))
    with Recorder(run) as recording:
        while run.has_work:
            run.step()
        ask(run, range(100, 112))
        ask(run, range(200, 212))
    told = Recorded.of(recording)
    assert told.unknown == ["R2"]
    assert told.answers["R3"].cached == 10 and told.answers["R4"].cached == 10


def test_a_tree_that_tells_nothing() -> None:
    """What a student's tree did is put together afterwards; numbers are the engine's, and sums are right."""
    rng = random.Random(1)
    run = engine(24, PlainCache())
    with Recorder(run) as recording:
        for _ in range(40):
            ask(run, [rng.randrange(2) for _ in range(rng.randrange(2, 12))])
    admitted = [e for frame in recording for e in frame.events if isinstance(e, ev.RequestAdmitted)]
    told = Recorded.of(recording)
    assert len(admitted) == len(told.answers) == 40
    for event in admitted:
        answer = told.answers[event.request]
        assert (answer.cached, answer.length) == (event.cached, event.length)
        assert sum(loss.tokens for loss in answer.losses) == answer.missed
        assert answer.losses[0].start == answer.cached
        said(told, event.request)
    assert {"evicted", "new", "last"} <= {loss.cause for a in told.answers.values() for loss in a.losses}


def test_frames_that_do_not_follow_are_refused() -> None:
    run = engine(64)
    with Recorder(run) as recording:
        ask(run, range(100, 110))
        ask(run, range(100, 120))
    with pytest.raises(ValueError, match="frame 1 does not follow"):
        Recorded(recording.header).catch_up([recording.frames[1]])


def test_the_command_tells_of_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = engine(32)
    with Recorder(run) as recording:
        for first in (100, 200, 300, 100):
            ask(run, range(first, first + 12))
    path = tmp_path / "run.jsonl"
    recording.save(path)
    assert Recording.load(path).frames == recording.frames
    assert main(["why", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 4 and report["tokens"] == 48
    (answer,) = report["answers"]
    assert (answer["request"], answer["cause"]) == ("R4", "evicted")
    assert report["cache"] == {"capacity": 32, "page_size": 1, "eviction_policy": "lru"}
    assert main(["why", str(path), "--request", "R2"]) == 0
    assert capsys.readouterr().out.startswith("R2: 0 of 12 tokens from the cache")
    assert main(["why", str(path), "--request", "R9"]) == 2
    assert "there is no request 'R9' in " in capsys.readouterr().err
    assert main(["why", str(path), "--log", str(path)]) == 2
    assert "is a recording" in capsys.readouterr().err
    typed = tmp_path / "typed.jsonl"
    typed.write_text(json.dumps({"prompt": [*range(300, 312), 7]}), encoding="utf-8")
    assert main(["why", str(typed), "--log", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("line 1: 12 of 13 tokens from the cache")
    assert f"{typed}, at the end of {path}: 1 request, 13 prompt tokens, 12 from" in text
    typed.write_text('{"prompt": "a text"}', encoding="utf-8")
    assert main(["why", str(typed), "--log", str(path)]) == 2
    assert "has no tokenizer: say --tokenizer" in capsys.readouterr().err


OF_A_LOG = ["--cache 200", "--page-size 4", "--eviction-policy lfu", "--prompts-only", "--format openai"]


@pytest.mark.parametrize("option", OF_A_LOG)
@pytest.mark.parametrize("beside", [False, True])
def test_a_recording_takes_nothing_of_a_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, beside: bool
) -> None:
    run, asked = engine(32), tmp_path / "asked.jsonl"
    with Recorder(run) as recording:
        ask(run, range(12))
    recording.save(tmp_path / "run.jsonl")
    asked.write_text('{"prompt": [1, 2]}', encoding="utf-8")
    words = ["why", str(asked), "--log"] if beside else ["why"]
    read = beside and "--format" in option  # FILE is a log
    assert main([*words, str(tmp_path / "run.jsonl"), *option.split()]) == (0 if read else 2)
    err = capsys.readouterr().err
    assert err == "" if read else err.startswith(f"minirad: {option} goes with a log only: ")


def test_a_recording_may_begin_with_a_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An editor of Windows puts it there."""
    run, path, asked = engine(32), tmp_path / "run.jsonl", tmp_path / "asked.jsonl"
    with Recorder(run) as recording:
        ask(run, range(12))
    recording.save(path)
    asked.write_text('{"prompt": [1, 2]}', encoding="utf-8")
    lines = path.read_bytes()
    for words in (["why", str(path)], ["why", str(asked), "--log", str(path)]):
        said = []
        for mark in (b"", b"\xef\xbb\xbf"):
            path.write_bytes(mark + lines)
            assert main(words) == 0
            said.append(capsys.readouterr())
        assert said[0] == said[1] and said[0].out


@pytest.mark.parametrize("retracted", [False, True])
def test_what_is_said_of_all_is_what_the_engine_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], retracted: bool
) -> None:
    """A request that was retracted is one, and is looked up again: its admissions are what is summed up."""
    run = engine(24 if retracted else 64, schedule_policy="fcfs")
    with Recorder(run) as recording:
        for first in (100, 200):
            run.add_request([*range(first, first + 8)], SamplingParams(max_new_tokens=10, ignore_eos=True))
        while run.has_work:
            run.step()
    path, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    recording.save(path)
    found = [e for frame in recording.frames for e in frame.events if isinstance(e, ev.RequestAdmitted)]
    tokens, cached = sum(each.length for each in found), sum(each.cached for each in found)
    assert (len(found) > 2) == retracted
    counted = f"{len(found)} admissions of 2 requests" if retracted else "2 requests"
    told = f"{counted}, {tokens} {'' if retracted else 'prompt '}tokens, "
    assert main(["why", str(path), "--all", "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert f"{path}: {told}{cached} from the cache" in text and f": {told}" in page.read_text(
        encoding="utf-8"
    )
    names = [f"{each.request}{f'#{each.attempt}' * (each.attempt > 1)}" for each in found]
    assert all(text.count(f"{name}: ") == 1 for name in names)
    assert main(["why", str(path), "--request", names[-1], "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["request"] for each in report["answers"]] == names[-1:]
    assert (report["requests"], report["count"]) == (2, len(found))


class Refusing(NothingToCopy):
    """A copier that can be told to refuse."""

    refuses = False

    def backup(self, device_slots: Any, host_slots: Any) -> Any:
        if self.refuses:
            raise HostCopyError("as the test wishes")
        return super().backup(device_slots, host_slots)


@pytest.mark.parametrize("below", [True, False])
def test_what_goes_along_with_what_is_before_it(below: bool) -> None:
    """Room was made on the host for a copy that is then refused: what hangs below the victim goes along with
    it, and what does not went for the copy alone."""
    copier = Refusing()
    cache = HiRadixCache(host_tokens=4, host_write="write_back", copier=copier)
    listener = Listener(Memory())
    cache.bus.subscribe(None, listener.take)
    first, other = ([1, 2, 3, 4], [9, 9, 9, 9])
    cache.insert(RadixKey(first[:2]), [1, 2])
    cache.insert(RadixKey(first if below else other), [1, 2, 3, 4])
    cache.match_prefix(RadixKey(first[:2]))
    cache.evict(2)  # the longer one lives on the host now
    copier.refuses = True
    cache.evict(2)
    record = listener.memory.record(0, first if below else other)
    assert record is not None and [left.medium for left in record.left] == ["GPU", "CPU"]
    assert record.left[1].along is below


def test_a_running_request_is_not_its_own_cause() -> None:
    run = engine(64)
    with Recorder(run) as recording:
        run.add_request(list(range(100, 110)), SamplingParams(max_new_tokens=3, ignore_eos=True))
        run.step()
    told = Recorded.of(recording)
    prompt = [*range(100, 110), told.requests["R1"].tokens[-1], 5]
    run.step()
    later = Recorded.of(recording)
    assert later.why(prompt).cached == 10
    told.memory.began(0, [1, 2, 3], when=1, by="R7")
    assert told.why([1, 2, 3, 4]).main.cause == "running"
    assert told.why([1, 2, 3, 4], name="R7").main.cause != "running"


def test_an_eviction_between_two_admissions_is_for_the_first() -> None:
    """Told by hand: what comes after the slots were taken is not what room was made for."""
    run = engine(32)
    with Recorder(run) as recording:
        ask(run, range(100, 110))
    told = Recorded(recording.header)
    told.catch_up(recording.frames)
    node = next(e.node for frame in recording for e in frame.events if isinstance(e, ev.NodeInserted))
    for event in (
        ev.RequestAdded("R2", (1, 2), 1, 0.0, 1, 0, 0, 1.0, 0, (), False, None, None),
        ev.RequestAdded("R3", (3, 4), 1, 0.0, 1, 0, 0, 1.0, 0, (), False, None, None),
        ev.RequestAdmitted("R2", 0, 0, 0, 0, 2, 1),
        ev.NodeEvicted(node, 0, tuple(range(10)), "lru", "oldest", None),
        ev.SlotsFreed(tuple(range(10)), "evicted"),
        ev.SlotsAllocated("R2", (4, 5)),
        ev.RequestAdmitted("R3", 1, 0, 0, 0, 2, 1),
        ev.SlotsAllocated("R3", (6, 7)),
    ):
        told.hear(event)
    (evicted, *_) = told.why(range(100, 110)).losses
    assert evicted.left[0].by == ("R2",)


def test_of_those_that_decode_the_one_that_enters_a_page_needed_the_room() -> None:
    run = engine(32, page_size=4)
    with Recorder(run) as recording:
        ask(run, range(100, 109))
    told = Recorded.of(recording)
    node = next(e.node for frame in recording for e in frame.events if isinstance(e, ev.NodeInserted))
    for event in (
        ev.NodeEvicted(node, 0, tuple(range(4, 12)), "lru", "oldest", None),
        ev.SlotsFreed(tuple(range(4, 12)), "evicted"),
        ev.SlotsAllocated("R5", (17,)),
        ev.SlotsAllocated("R6", (20,)),
        ev.SlotsAllocated("R7", (22,)),
    ):
        told.hear(event)
    (evicted, *_) = told.why(range(100, 110)).losses
    assert evicted.left[0].by == ("R6",)


@pytest.mark.parametrize(
    ("chunk", "keep", "causes"),
    [(4, True, ["logprobs", "last"]), (64, True, ["new"]), (64, False, ["retracted", "new"])],
)
def test_log_probabilities_that_are_known_are_not_computed_again(
    chunk: int, keep: bool, causes: list[str]
) -> None:
    run = engine(64, script=Logprobs(random.Random(3)), chunk_tokens=chunk, radix_cache=keep)
    with Recorder(run) as recording:
        run.add_request(
            list(range(100, 110)), SamplingParams(max_new_tokens=2, ignore_eos=True, logprob_start=2)
        )
        run.step()
        with run.transaction:
            run.scheduler.put_back(run.scheduler.live)
        while run.has_work:
            run.step()
    told = Recorded.of(recording).answers["R1#2"]
    event = [e for frame in recording for e in frame.events if isinstance(e, ev.RequestAdmitted)][1]
    assert (told.matched, told.cached) == (event.matched, event.cached)
    assert [loss.cause for loss in told.losses] == causes
