"""Engines on two ranks, in two processes: they say what one rank says, agree in every step, and end well."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_support import FOLLOW, RankPair, late_copies
from support import ROOT, ScriptedModel, drive, listen, tiny_config

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.errors import RankLost, RanksDiffer
from minirad.model.llama import LlamaModel, random_weights
from minirad.observe import rank_events
from minirad.observe.event import ReplayState
from minirad.observe.recorder import Recorder
from minirad.outputs import GenerationOutput
from minirad.ranks import unwatch, watch

MODELS = [
    LlamaModel(tiny_config(), random_weights(tiny_config(), seed, dtype=torch.float32, device="cpu"))
    for seed in (0, 1)
]
REPLY = SamplingParams(max_new_tokens=5, ignore_eos=True)
PROMPTS = [[5] * 9, [5, 6] * 4, [5, 5, 5, 7, 8]]

# The other process does what is planted, when rank 0 notes the strange input "plant".
PLANT = f"""
from minirad.ranks.follower import Follower
def plant(self, what):
    nodes = [node for node in self.cache.walk() if node.parent is not None]
    running = self.scheduler.running
    if what == "lock": nodes[0].lock_ref += 1
    if what == "unlocked":
        for node in nodes: node.lock_ref = 0
    if what == "kv": running[0].kv_len -= 1
    if what == "queue": self.scheduler.waiting.clear()
    if what == "token": running[0]._buffer[running[0].length - 1] += 1
    if what == "raise": self.runner.forward = None
Follower.take_plant = plant
{FOLLOW}
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPair]:
    pair = RankPair(code=PLANT)
    yield pair
    pair.close()


def two(model: LlamaModel = MODELS[0], **config: Any) -> Any:
    return Engine(EngineConfig(**{"kv_tokens": 64, "max_running": 4, "tp": 2, **config}), model=model)


def one(**config: Any) -> Engine:
    return Engine(EngineConfig(**{"kv_tokens": 64, "max_running": 4, **config}), model=MODELS[0])


def require_same(found: dict[Any, GenerationOutput], wanted: dict[Any, GenerationOutput]) -> None:
    assert found.keys() == wanted.keys()
    for key, output in found.items():
        other = wanted[key]
        assert output.token_ids == other.token_ids
        assert (output.finish_reason, output.error) == (other.finish_reason, other.error)
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def odd(output: list[int]) -> Any:
    return torch.tensor([token % 3 != len(output) % 3 for token in range(61)])


def bad(output: list[int]) -> Any:
    if len(output) == 2:
        raise ValueError("as the test wishes")
    return None


def play(engine: Any, seed: int) -> dict[Any, GenerationOutput]:
    """All that an engine can be asked for, in an order that the seed decides; checked after each."""
    rng, ids, pins, weights = random.Random(seed), [], [], 0
    done: dict[Any, GenerationOutput] = {}

    def take(outputs: list[GenerationOutput]) -> None:
        done.update({(output.request_id, output.index): output for output in outputs})

    for _ in range(60):
        chance = rng.random()
        if chance < 0.4:
            text = rng.choice(([5] * 40, [5, 6] * 20, [5, 5, 5, 5, 7, 8, 9, 5] * 5))
            params = SamplingParams(
                max_new_tokens=rng.randrange(8), n=rng.choice([1, 1, 2]), temperature=rng.choice([0.0, 1.0]),
                logprob_start=rng.choice([None, None, 0]),
            )  # fmt: skip
            ids.append(engine.add_request(
                [*text[: rng.randrange(1, 20)], rng.choice([5, 6, 7])], params,
                rng.choice([None, None, "a", 1, 1.0, frozenset([1])]), rng.randrange(2),
                token_mask=rng.choice([None, None, odd, bad]),
            ))  # fmt: skip
        elif chance < 0.7:
            take(engine.step().finished)
        elif chance < 0.75 and ids:
            engine.abort(rng.choice(ids))
        elif chance < 0.8:
            pins.append(engine.pin([5] * rng.randrange(1, 12), rng.choice([None, "a"])))
        elif chance < 0.85 and pins:
            engine.unpin(pins.pop())
        elif chance < 0.88:
            engine.set_eviction_policy(rng.choice(["lfu", "lru", "fifo"]))
        elif chance < 0.9:
            weights = 1 - weights
            engine.update_weights(MODELS[weights])
        elif chance < 0.93 and not (engine.has_work or pins):
            engine.flush_cache()
        elif chance < 0.95:
            engine.cache_manager.make_room(20)
        elif chance < 0.98:
            take(engine.generate([[5, 6, 7, 8]], REPLY))
        engine.check()
    for pin in pins:
        engine.unpin(pin)
    take(drive(engine))
    return done


@pytest.mark.parametrize(("seed", "config"), [
    (0, {"host_kv_tokens": 32, "host_write": "write_back", "page_size": 2, "chunk_tokens": 3, "mixed": True}),
    pytest.param(1, {"host_kv_tokens": 32, "host_write": "write_through",
                     "schedule_policy": "random"}, marks=pytest.mark.slow),
    pytest.param(2, {"bigram_keys": True, "chunk_tokens": 3, "schedule_policy": "dfs-weight",
                     "rank_digest": False}, marks=pytest.mark.slow),
    pytest.param(3, {"kv_tokens": 32, "schedule_policy": "fair", "new_token_ratio": 0.4,
                     "eviction_policy": "lfu"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_two_ranks_say_what_one_says(pair: RankPair, seed: int, config: dict[str, Any]) -> None:
    config = {"kv_tokens": 48, "max_running": 3, "load_back_threshold": 1, "poison_freed": True, **config}
    engine, alone = two(**config), one(**config)
    require_same(play(engine, seed), play(alone, seed))
    state, other = engine.snapshot(), alone.snapshot()
    told = state.pop("ranks")
    for node in (*state["tree"]["nodes"], *other["tree"]["nodes"]):
        node["namespace"] = 0  # where nobody listens they are numbered when first looked at
    assert state == other
    assert told["step"] == (engine.steps if engine.config.rank_digest else 0)


@pytest.mark.parametrize("write", [
    "write_back", *(pytest.param(f"write_through{how}", marks=pytest.mark.slow) for how in ("", "_selective"))
])  # fmt: skip
def test_copies_that_end_late_or_fail_do_so_on_all_ranks(pair: RankPair, write: str) -> None:
    engine = two(kv_tokens=32, host_kv_tokens=32, host_write=write, load_back_threshold=1)
    late_copies(engine, 5)
    heard = listen(engine)
    play(engine, 7)
    assert engine.wait_for_copies() in (True, False)
    engine.cache.poll(wait=True)
    engine.step()
    engine.check()
    kinds = {type(event).__name__ for event in heard}
    assert {"BackupStarted", "BackupEnded"} <= kinds
    assert write != "write_back" or "LoadStarted" in kinds


def test_a_mask_is_asked_on_rank_0_only_and_once(pair: RankPair) -> None:
    asked: list[list[int]] = []

    def mask(output: list[int]) -> Any:
        asked.append(output)
        return torch.arange(61) == 7 + len(output)

    engine = two()
    engine.add_request([5] * 4, SamplingParams(max_new_tokens=3, n=2, ignore_eos=True), token_mask=mask)
    assert [output.token_ids for output in drive(engine)] == [[7, 8, 9]] * 2
    assert asked == [[], [], [7], [7], [7, 8], [7, 8]]


def test_ready_tokenizers_stop_texts_and_streams(pair: RankPair) -> None:
    tokenizer = Engine(EngineConfig(kv_tokens=16)).tokenizer
    names = {"model": None, "kv_tokens": 256}
    engine = Engine(EngineConfig(tp=2, **names))
    alone = Engine(EngineConfig(**names), tokenizer=tokenizer)
    params = SamplingParams(max_new_tokens=24, stop=("only",))
    prompts = ["The capital of France is", "One, two,"]
    found, wanted = engine.generate(prompts, params), alone.generate(prompts, params)
    assert [(out.text, out.finish_reason) for out in found] == [
        (out.text, out.finish_reason) for out in wanted
    ]
    ready = Engine(EngineConfig(tp=2, kv_tokens=256), model=alone.model, tokenizer=tokenizer)
    pieces = list(ready.stream(prompts[0], params))
    assert "".join(piece.text for piece in pieces) == wanted[0].text
    next(iter(ready.stream(prompts[0], params)))  # left in the middle
    assert ready.generate(prompts[1], params)[0].text == wanted[1].text


def test_what_is_refused_loses_nothing(pair: RankPair) -> None:
    engine = two()
    rid = engine.add_request([5] * 4, REPLY)
    config = EngineConfig(tp=2, kv_tokens=64)
    scripted = ScriptedModel(
        tiny_config(), random_weights(tiny_config(), 0, dtype=torch.float32, device="cpu"), {}
    )
    uneven = LlamaModel(*[make(tiny_config(intermediate_size=47)) for make in (
        lambda c: c, lambda c: random_weights(c, 0, dtype=torch.float32, device="cpu"))])  # fmt: skip
    for make, sentence in (
        (lambda: Engine(EngineConfig(tp=3)), "tp=3 needs 3 processes, and here are 2"),
        (lambda: Engine(config, engine.cache, model=MODELS[0]), "cache= cannot be given"),
        (lambda: Engine(config, model=scripted), "only a plain LlamaModel can be cut"),
        (lambda: Engine(config, model=uneven), "tp=2 does not divide the model's intermediate, 47"),
        (lambda: Engine(config, model=MODELS[0], tokenizer=lambda text: [1]), "cannot be sent to the other"),
        (lambda: Engine(EngineConfig(tp=2, model="nosuch")), "model 'nosuch' is no directory"),
        (lambda: Engine(EngineConfig(tp=2, kv_tokens=10**13), model=MODELS[0]), "GB of memory"),
        (lambda: Engine(EngineConfig(tp=2, device="cuda:1")), "each rank takes a GPU of its own, say 'cuda'"),
        (lambda: engine.update_weights(uneven), "the new weights are of another model"),
        (lambda: engine.set_eviction_policy("nosuch"), "nosuch"),
        (lambda: engine.add_request([61]), "outside the vocabulary of 61"),
        (lambda: engine.flush_cache(), "cannot flush"),
        (lambda: watch(one()), "an engine of several ranks"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make()
    assert [output.request_id for output in drive(engine)] == [rid]


def test_engines_side_by_side_and_in_another_thread(pair: RankPair) -> None:
    wanted = [out.token_ids for out in one().generate(PROMPTS, REPLY)]
    engines = [two() for _ in range(3)]
    found: list[Any] = [None] * 3

    def run(at: int) -> None:
        found[at] = [out.token_ids for out in engines[at].generate(PROMPTS, REPLY)]

    threads = [threading.Thread(target=run, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert found == [wanted] * 3


def test_ctrl_c_waits_for_the_end_of_a_step(pair: RankPair) -> None:
    engine = two()
    forward, pressed = engine.runner.forward, []

    def press(*args: Any) -> Any:
        if not pressed:
            pressed.append(1)
            signal.raise_signal(signal.SIGINT)
        return forward(*args)

    engine.runner.forward = press
    rid = engine.add_request([5] * 4, REPLY)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, REPLY)
    engine.check()
    assert engine.steps == 1, "the step was done whole"
    assert [output.request_id for output in drive(engine)] == [rid]
    assert engine.snapshot()["ranks"]["step"] == engine.steps


def test_an_engine_of_ones_own_class_is_still_one(pair: RankPair) -> None:
    class Counting(Engine):
        steps_seen = 0

        def step(self) -> Any:
            self.steps_seen += 1
            return super().step()

    engine = Counting(EngineConfig(kv_tokens=64, tp=2), model=MODELS[0])
    engine.add_request([5] * 4, REPLY)
    drive(engine)
    assert isinstance(engine, Counting) and engine.steps_seen == engine.steps == 5


# ---------------------------------------------------------------------- what is told, and watched


def test_what_is_told_is_in_the_recording(pair: RankPair, tmp_path: Path) -> None:
    engine = two()
    replay = ReplayState(engine.snapshot())
    engine.bus.subscribe(None, replay.apply)
    with Recorder(engine, tmp_path / "run.jsonl", keyframe_every=3) as recording:
        others = list(watch(engine))
        assert watch(engine)[0] is others[0]
        engine.generate(PROMPTS, REPLY)
        pin = engine.pin([5] * 4)
        rid = engine.add_request([5] * 7, REPLY)
        engine.step()
        engine.abort(rid)
        engine.unpin(pin)
        engine.update_weights(MODELS[1])
        engine.set_eviction_policy("lfu")
        engine.step()
        engine.flush_cache()
        unwatch(engine)
        engine.step()
        assert len(others[0]) == len(recording), "what came last has a frame of its own"
    assert replay.snapshot() == engine.snapshot()
    told = [
        event for frame in recording for event in frame.events if isinstance(event, rank_events.RanksTold)
    ]
    assert told[1].requests == ("R1", "R2", "R3") and told[1].bytes > 300
    assert [event.other for event in told if event.other] == [
        ("send recordings",), ("pin 1",), ("unpin 1", "new weights"), ("eviction policy lfu",),
        ("flush", "no recordings"),
    ]  # fmt: skip
    assert [event.aborts for event in told if event.aborts] == [(rid,)]
    agreed = [e for frame in recording for e in frame.events if isinstance(e, rank_events.RanksAgreed)]
    assert [event.step for event in agreed] == list(range(1, engine.steps + 1))
    assert len({event.digest for event in agreed}) > 6
    loaded = Recorder.load(tmp_path / "run.jsonl")
    loaded.check()
    assert not loaded.missing and len(loaded) == len(recording)
    others[0].save(tmp_path / "run.rank1.jsonl")
    other = Recorder.load(tmp_path / "run.rank1.jsonl")
    other.check()
    for index, (frame, same) in enumerate(zip(recording.frames[:-1], other, strict=False)):
        assert frame.step == same.step
        state = recording.state(index)
        state.pop("ranks")
        assert state == other.state(index)


def test_a_recording_of_one_rank_has_none_of_this() -> None:
    engine = one()
    with Recorder(engine) as recording:
        engine.generate(PROMPTS, REPLY)
    assert not any(event.of_ranks for frame in recording for event in frame.events)
    assert "ranks" not in engine.snapshot()


# ---------------------------------------------------------------------- differences


@pytest.mark.parametrize(("what", "said"), [
    ("lock", r"rank 1 has lock_ref \d at n\d.*rank 0 has \d"), ("unlocked", "rank 1 has lock_ref 0 at n"),
    ("kv", r"rank 1 has tokens with KV 1\d in R\d, rank 0 has 1\d"),
    ("queue", r"rank 0 has a request R\d, rank 1 has none"), ("token", r"rank 1 has tokens \[.* in R\d, "),
])  # fmt: skip
def test_a_planted_difference_is_found_in_its_step(pair: RankPair, what: str, said: str) -> None:
    engine = two(max_running=2)
    heard = listen(engine, rank_events.RanksDiffered)
    engine.generate(PROMPTS[:2], REPLY)
    for number in range(4):
        engine.add_request([5] * (7 + number) + [6], SamplingParams(max_new_tokens=9, ignore_eos=True))
    engine.step()
    engine.step()
    engine._note("plant", what)
    with pytest.raises(RanksDiffer, match=f"^step {engine.steps + 1}: .*{said}"):
        engine.step()
    assert len(heard) == 1 and heard[0].rank == 1 and engine.snapshot()["ranks"]["differ"] == heard[0].what
    with pytest.raises(RanksDiffer):
        engine.step()
    assert [out.token_ids for out in two().generate(PROMPTS, REPLY)] == [
        out.token_ids for out in one().generate(PROMPTS, REPLY)
    ], "another engine goes on"


def test_the_recordings_hold_what_each_rank_had_where_they_differ(pair: RankPair, tmp_path: Path) -> None:
    """Also of a rank that unlocks the node in that very step; what lies before is as it was."""
    engine = two(max_running=2)
    with Recorder(engine, tmp_path / "run.jsonl", keyframe_every=1) as recording:
        (other,) = watch(engine)
        engine.add_request([5] * 7, SamplingParams(max_new_tokens=2, ignore_eos=True))
        engine.add_request([5] * 6 + [9, 9], SamplingParams(max_new_tokens=2, ignore_eos=True))
        engine.step()
        node = next(n for n in engine.cache.walk() if n.parent is not None and n.children)
        assert node.lock_ref == 2
        node.lock_ref = 3
        engine.bus.emit(rank_events.LockPlanted(node.id, 3))
        with pytest.raises(RanksDiffer, match=f"has lock_ref 0 at n{node.id} .*rank 0 has 1"):
            engine.step()
    with pytest.raises(RanksDiffer):
        engine.step()
    other.save(tmp_path / "run.rank1.jsonl")
    for name, before, after in (("run.jsonl", 2, 1), ("run.rank1.jsonl", 2, 0)):
        loaded = Recorder.load(tmp_path / name)
        loaded.check()
        assert not loaded.missing and len(loaded) == len(recording) == 2
        locks = [
            each["lock_ref"]
            for index in (0, 1)
            for each in loaded.state(index)["tree"]["nodes"]
            if each["id"] == node.id
        ]
        assert locks == [before, after] and not loaded.frames[1].events[-1].ends_frame


# ---------------------------------------------------------------------- who is lost


def lost(engine: Any, said: str) -> None:
    """said: also whether it was seen at once ("ended") or waited for ("did not answer for")."""
    with pytest.raises(RankLost, match=said):
        engine.generate(PROMPTS, REPLY)
    with pytest.raises(RankLost):  # found out once, and said at once
        engine.step()
    engine.check()
    assert not engine.has_work or engine.scheduler.requests() == []


def test_a_rank_that_fails_ends_all(pair: RankPair) -> None:
    engine = two()
    engine._note("plant", "raise")
    lost(engine, "^rank 1 failed in step 1: TypeError: 'NoneType' object is not callable$")
    with pytest.raises(RankLost, match="rank 1 failed in step 1"):
        two()
    code, said = pair.close()[1]
    assert code == 1 and said.count("\n") == 1 and said.startswith("minirad: rank 1 failed in step 1: Ty"), (
        said
    )


@pytest.mark.slow
def test_a_rank_that_is_killed() -> None:
    with RankPair() as pair:
        engine = two()
        engine.generate(PROMPTS, REPLY)
        pair.kill(1)
        lost(engine, rf"^rank 1 ended \(rank 0 was in step {engine.steps + 1}\)$")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGSTOP")
def test_a_rank_may_idle_and_one_that_hangs_is_lost() -> None:
    with RankPair(timeout=1.5) as pair:
        engine = two()
        engine.generate(PROMPTS, REPLY)
        time.sleep(4)  # rank 0 has nothing to say
        assert len(engine.generate(PROMPTS, REPLY)) == 3
        pair.stop(1)
        lost(engine, rf"^rank 1 did not answer for 1.5 seconds \(rank 0 was in step {engine.steps + 1}\)$")
        pair.kill(1)


@pytest.mark.slow
def test_three_others_name_the_one_that_is_lost() -> None:
    with RankPair(4) as pair:
        engine = two(tp=4)
        wanted = [out.token_ids for out in one().generate(PROMPTS, REPLY)]
        assert [out.token_ids for out in engine.generate(PROMPTS, REPLY)] == wanted
        pair.kill(2)
        lost(engine, "^rank 2 ended")
        ends = pair.close()
        assert [ends[rank][0] for rank in (1, 3)] == [1, 1]
        assert all(ends[rank][1].startswith("minirad: rank 2 ended") for rank in (1, 3)), ends


STANDS_STILL = """
import time, torch
from rank_support import RankPair
from support import tiny_config
from minirad import Engine, EngineConfig
from minirad.model.llama import LlamaModel, random_weights
pair = RankPair(timeout=1.5)
shape = tiny_config()
model = LlamaModel(shape, random_weights(shape, 0, dtype=torch.float32, device="cpu"))
engine = Engine(EngineConfig(tp=2, kv_tokens=64), model=model)
engine.runner.forward = lambda *some: time.sleep(100)
engine.generate([5] * 4)
"""


@pytest.mark.slow
def test_a_step_that_stands_still_on_rank_0_ends_the_run() -> None:
    """As a captured step of a GPU does whose partner hangs: it waits where no timeout is."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    run = subprocess.run(
        [sys.executable, "-c", STANDS_STILL], capture_output=True, text=True, timeout=90,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 1
    assert run.stderr.strip() == "minirad: step 1 has not come on for 3 seconds: a rank hangs"


# ---------------------------------------------------------------------- under torchrun


def torchrun(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, **more)


@pytest.mark.slow
def test_the_command_line_under_torchrun(tmp_path: Path) -> None:
    words = ["generate", "--max-new-tokens", "6", "--raw", "The capital of France is", "One, two,"]
    record = tmp_path / "run.jsonl"
    run = torchrun("-m", "minirad", *words, "--tp", "2", "--record", str(record))
    assert run.returncode == 0, run.stderr
    alone = subprocess.run(
        [sys.executable, "-m", "minirad", *words], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    texts = [
        [line for line in out.split("\n") if not line.startswith("  [")] for out in (run.stdout, alone.stdout)
    ]
    assert texts[0] == texts[1] and len(texts[0]) > 4
    files = [Recorder.load(tmp_path / name) for name in ("run.jsonl", "run.rank1.jsonl")]
    assert files[0].header["config"]["tp"] == 2 and len(files[0]) >= len(files[1]) > 10
    again = torchrun("-m", "minirad", *words, "--tp", "2", "--record", str(record))
    assert again.returncode == 1
    assert again.stderr.count("minirad: --record: ") == 1 and "exists already" in again.stderr


@pytest.mark.parametrize(("typed", "advised"), [
    (["python", "-m", "minirad", "serve", "--tp", "2"], "-m minirad serve --tp 2"),
    (["python", "-X", "dev", "-u", "-m", "minirad", "generate", "--tp", "2", "a b"],
     "-m minirad generate --tp 2 'a b'"),
    (["/usr/bin/python", "/home/me/.venv/bin/minirad", "chat", "--tp", "2"], "-m minirad chat --tp 2"),
    (["python", "mine.py", "2"], "mine.py 2"),
    (["python", "-m", "ipykernel_launcher", "-f", "x.json"], "-m minirad generate --tp 2 Hello"),
    (["python", "-c", "..."], "-m minirad generate --tp 2 Hello"),
    (["python"], "-m minirad generate --tp 2 Hello"),
])  # fmt: skip
def test_without_torchrun_a_sentence_says_what_to_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, typed: list[str], advised: str
) -> None:
    from minirad.__main__ import main

    monkeypatch.setattr(sys, "orig_argv", typed)
    assert main(["generate", "--tp", "2", "hello"]) == 2
    said = capsys.readouterr().err
    assert "tp=2 needs 2 processes" in said and said.count("\n") == 1
    assert said.endswith(f"`torchrun --nproc-per-node 2 {advised}`\n")


@pytest.mark.slow
def test_a_program_of_ones_own_under_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom minirad import Engine, EngineConfig, SamplingParams\n"
        "engine = Engine(EngineConfig(tp=2, kv_tokens=64))\n"
        "print(len(engine.generate([5, 6, 7], SamplingParams(max_new_tokens=3))))\n"
        "sys.exit(int(sys.argv[1]))\n",
        encoding="utf-8",
    )
    fine, not_fine = torchrun(str(program), "0"), torchrun(str(program), "3")
    assert (fine.returncode, fine.stdout) == (0, "1\n"), fine.stderr
    assert (not_fine.returncode, not_fine.stdout) == (1, "1\n")
    assert "exitcode: 3" in not_fine.stderr or "exitcode  : 3" in not_fine.stderr
