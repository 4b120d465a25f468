"""The disk tier of a whole engine: restarts, sizes of pages, who may share, and what goes wrong on a disk."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CheckedEngine
from support import ColdReference, drive, tiny_config

from minirad.cache.radix_cache import RadixKey
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel, random_weights
from minirad.observe import disk_events as dv
from minirad.observe.kv_events import BlockStored, BlockTable, KVEventStream
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.server.metrics import Metrics
from minirad.tiers import disk, disk_cache
from minirad.tiers.disk_cache import DiskCache
from minirad.tiers.disk_files import BlockFiles
from minirad.why.recorded import Recorded
from viz.draw.tree import tree_svg
from viz.trace import Trace

REPLY = SamplingParams(max_new_tokens=4, ignore_eos=True)
LONG = tiny_config(max_position_embeddings=1024)
PATIENT = 120.0  # seconds: a disk that stands still for a while makes no hit a miss here, and loses nothing
SIZES: dict[str, Any] = {"kv_tokens": 512, "host_kv_tokens": 512, "max_running": 4, "poison_freed": True}


@pytest.fixture(scope="module")
def models() -> list[LlamaModel]:
    return [
        LlamaModel(LONG, random_weights(LONG, seed, dtype=torch.float32, device="cpu")) for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def reference(models: list[LlamaModel]) -> ColdReference:
    return ColdReference(models[0])


class Process:
    """Engines on one folder, one after another: each begins with what those before it left."""

    def __init__(self, folder: Path, model: LlamaModel) -> None:
        self.folder, self.model = folder, model
        self.engines: list[CheckedEngine] = []

    def __call__(self, **config: Any) -> CheckedEngine:
        sizes = {**SIZES, "disk_dir": self.folder, **config}
        model = sizes.pop("weights", self.model)
        engine = CheckedEngine(EngineConfig(**sizes), model=model)
        tree(engine).disk.read_wait = PATIENT
        self.engines.append(engine)
        return engine

    def end(self, engine: CheckedEngine) -> None:
        assert tree(engine).close(PATIENT)
        engine.check()

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))


def tree(engine: Engine) -> DiskCache:
    assert isinstance(engine.cache, DiskCache)
    return engine.cache


@pytest.fixture
def process(tmp_path: Path, models: list[LlamaModel]) -> Iterator[Process]:
    made = Process(tmp_path / "kv", models[0])
    yield made
    for engine in made.engines:
        tree(engine).close()


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 60) for _ in range(length)]


def ask(engine: Engine, tokens: list[int], params: SamplingParams = REPLY, **more: Any) -> Any:
    engine.add_request(tokens, params, **more)
    (output,) = drive(engine)
    return output


# ---------------------------------------------------------------------- a restart


@pytest.mark.parametrize("page", [1, 4, 16, 64, 128])
@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_after_a_restart_nothing_that_lies_on_the_disk_is_computed(
    process: Process, reference: ColdReference, page: int, write: str
) -> None:
    block, tokens = max(64, page), text(300)
    first = process(page_size=page, host_write=write)
    wanted = ask(first, tokens)
    process.end(first)
    second = process(page_size=page, host_write=write)
    output = ask(second, tokens)
    assert output.cached_tokens == 300 // block * block and output.token_ids == wanted.token_ids
    reference.require_equal(tokens, REPLY, output)
    assert tree(second).disk.stats.read == output.cached_tokens


@pytest.mark.parametrize(("length", "cached"), [(63, 0), (64, 63), (65, 64), (128, 127), (129, 128)])
def test_one_token_is_always_computed(process: Process, length: int, cached: int) -> None:
    first = process()
    ask(first, text(length))
    process.end(first)
    assert ask(process(), text(length)).cached_tokens == cached


@pytest.mark.slow  # two processes
def test_another_process_says_the_same(tmp_path: Path) -> None:
    """Really another one, which ends by itself, and only then writes anything; of an adapter, too."""
    code = """
import json, sys
from minirad import Engine, EngineConfig, SamplingParams
config = EngineConfig(device="cpu", host_write="write_back", **json.loads(sys.argv[1]))
engine, params = Engine(config), SamplingParams(max_new_tokens=8, ignore_eos=True)
for name in ("", "capitals"):
    (output,) = engine.generate([list(range(5, 205))], params, lora=name)
    print(json.dumps([output.cached_tokens, output.token_ids]))
"""
    folder = tmp_path / "Ein Ordner é"
    sizes = {"kv_tokens": 512, "host_kv_tokens": 512, "disk_dir": str(folder), "lora": "capitals"}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(sizes)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert len(list(folder.iterdir())) == 6
    engine = Engine(EngineConfig(device="cpu", **sizes))
    for name, line in zip(("", "capitals"), done.stdout.splitlines(), strict=True):
        none, cold = json.loads(line)
        warm = ask(engine, list(range(5, 205)), SamplingParams(max_new_tokens=8, ignore_eos=True), lora=name)
        assert none == 0 and warm.cached_tokens == 192 and warm.token_ids == cold
    tree(engine).close()


def test_blocks_end_where_no_node_ends(process: Process, reference: ColdReference) -> None:
    """Turns of a chat: each ends somewhere, and the folder has whole blocks of the whole."""
    first, tokens = process(), text(30)
    for _ in range(6):
        tokens = [*tokens, *ask(first, tokens).token_ids, *text(21, len(tokens))]
    process.end(first)
    assert len(process.files()) == (len(tokens) - 21 - 1) // 64
    second = process()
    for length in (150, len(tokens)):
        output = ask(second, tokens[:length])
        reference.require_equal(tokens[:length], REPLY, output)
        assert output.cached_tokens >= (length - 1 - 21) // 64 * 64


def test_a_fork_within_a_block_is_a_block_of_its_own(process: Process, reference: ColdReference) -> None:
    trunk = text(100)
    ends = [[*trunk, *text(100, seed)] for seed in (1, 2)]
    first = process()
    for tokens in ends:
        ask(first, tokens)
    process.end(first)
    assert len(process.files()) == 1 + 2 * 2
    second = process()
    for tokens, cached in zip(ends, (192, 192), strict=True):
        output = ask(second, tokens)
        assert output.cached_tokens == cached
        reference.require_equal(tokens, REPLY, output)
    assert tree(second).disk.stats.read == 192 + 192 - 100  # the fork's part of block 1 was there already


def test_pairs(process: Process, models: list[LlamaModel], reference: ColdReference) -> None:
    first = process(bigram_keys=True)
    tokens = text(200)
    ask(first, tokens)
    process.end(first)
    other = [*tokens[:128], tokens[128] % 50 + 6, *tokens[129:]]  # the last pair of block 1 is another one
    second = process(bigram_keys=True)
    for asked, cached in ((other, 64), (tokens, 192)):
        output = ask(second, asked)
        reference.require_equal(asked, REPLY, output)
        assert output.cached_tokens == cached
    plain = ask(process(), tokens)
    assert plain.cached_tokens == 0  # of other keys


def test_samples_chunks_and_a_small_pool(process: Process, reference: ColdReference) -> None:
    """With less room on device and host than the texts need, and what is evicted read again."""
    rng, asked = random.Random(3), {}
    texts = [text(120, seed) for seed in range(5)]
    engine = process(kv_tokens=192, host_kv_tokens=320, chunk_tokens=48, page_size=2)
    params = SamplingParams(max_new_tokens=5, ignore_eos=True, n=2, temperature=0.7, seed=4)
    for _ in range(25):
        tokens = [*rng.choice(texts), rng.randrange(5, 60)]
        asked[engine.add_request(tokens, params)] = tokens
        for output in drive(engine):
            reference.require_equal(asked[output.request_id], params, output)
        assert tree(engine).disk.flush(PATIENT)  # what is not written yet could not be read by the next one
    stats = tree(engine).disk.stats
    assert stats.read > 500 and engine.stats.first.cached > 1000, (stats, engine.stats)


def test_logprobs_of_the_prompt_are_computed(process: Process, reference: ColdReference) -> None:
    first = process()
    ask(first, text(200))
    process.end(first)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprob_start=100)
    output = ask(process(), text(200), params)
    assert output.cached_tokens == 99
    reference.require_equal(text(200), params, output)


# ---------------------------------------------------------------------- who may share


def test_namespaces(process: Process) -> None:
    keys: list[Any] = [None, "a", "b", ("a", 1), 1, b"a", ("a", (None, 2))]
    first = process(kv_tokens=1024, host_kv_tokens=2048)
    for key in (*keys[:4], object()):
        ask(first, text(100), extra_key=key)
    process.end(first)
    assert len(process.files()) == 4
    second = process(kv_tokens=1024, host_kv_tokens=2048)
    found = [ask(second, text(100), extra_key=key).cached_tokens for key in keys]
    assert found == [64] * 4 + [0] * 3


def test_other_weights_have_other_blocks(process: Process, models: list[LlamaModel]) -> None:
    first = process()
    wanted = ask(first, text(150))
    process.end(first)
    second = process(weights=models[1])
    assert ask(second, text(150)).cached_tokens == 0
    second.update_weights(models[0])
    output = ask(second, text(150))
    assert (output.cached_tokens, output.token_ids) == (128, wanted.token_ids)
    second.update_weights(models[1])  # and back: what this very process computed with them
    assert tree(second).disk.flush(PATIENT)
    assert ask(second, text(150)).cached_tokens == 128
    process.end(second)
    assert len(process.files()) == 4


def test_another_size_of_pages_type_or_model_is_another_block(process: Process) -> None:
    first = process()
    ask(first, text(100))
    process.end(first)
    for config in ({"page_size": 4}, {"bigram_keys": True}):
        assert ask(process(**config), text(100)).cached_tokens == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        half = LlamaModel(LONG, random_weights(LONG, 0, dtype=torch.bfloat16, device="cpu"))
        assert ask(process(weights=half), text(100)).cached_tokens == 0


def test_two_engines_on_one_folder(process: Process, reference: ColdReference) -> None:
    """Each finds what the other wrote while both are running."""
    engines = [process(kv_tokens=1024, host_kv_tokens=2048) for _ in range(2)]
    for turn in range(6):
        tokens = text(130, turn)
        for engine in (engines[turn % 2], engines[1 - turn % 2]):
            output = ask(engine, tokens)
            reference.require_equal(tokens, REPLY, output)
            engine.step()
            assert tree(engine).disk.flush(PATIENT)
        assert output.cached_tokens == 128


# ---------------------------------------------------------------------- the bound


def test_the_bound_holds_and_the_oldest_go(process: Process) -> None:
    engine = process()
    disk = tree(engine).disk
    size = disk.layout.nbytes + 1200
    disk.files.most_bytes = 6 * size
    for seed in range(5):
        ask(engine, text(130, seed))
        assert disk.flush(PATIENT)
        assert sum(path.stat().st_size for path in process.files()) <= 6 * size
    engine.step()
    process.end(engine)  # what had to go is in the tree, and does not come back
    again = process(host_kv_tokens=1024)
    assert [ask(again, text(130, seed)).cached_tokens // 64 for seed in (2, 3, 4, 0, 1)] == [2, 2, 2, 0, 0]


# ---------------------------------------------------------------------- what goes wrong


def warned(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """The disk tier's: the collector may come meanwhile, and say that some other test left a file open."""
    return [str(each.message) for each in caught if "disk tier" in str(each.message)]


def disk_full(*args: Any, **more: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(*args: Any, **more: Any) -> Any:
    raise PermissionError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize("fail", [disk_full, read_only])
def test_a_disk_that_takes_nothing(
    process: Process, reference: ColdReference, monkeypatch: pytest.MonkeyPatch, fail: Callable[..., Any]
) -> None:
    first = process()
    ask(first, text(130))
    process.end(first)
    monkeypatch.setattr(Path, "write_bytes", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second = process()
        for seed in range(4):
            output = ask(second, text(130, seed))
            reference.require_equal(text(130, seed), REPLY, output)
            tree(second).disk.flush(PATIENT)
        second.step()
    assert len(warned(caught)) == 1 and "cannot be written to" in warned(caught)[0]
    assert tree(second).disk.files.off and tree(second).disk.stats.read == 128  # what is there is read
    assert len(process.files()) == 2


def test_a_folder_that_vanishes(process: Process, reference: ColdReference) -> None:
    engine = process()
    ask(engine, text(130))
    tree(engine).disk.flush(PATIENT)
    for path in process.folder.iterdir():
        path.unlink()
    process.folder.rmdir()
    engine.flush_cache()
    with pytest.warns(RuntimeWarning, match="cannot be written to") as caught:
        for seed in (0, 1, 0):
            reference.require_equal(text(130, seed), REPLY, ask(engine, text(130, seed)))
            tree(engine).disk.flush(PATIENT)
        engine.step()
    assert len(warned(caught)) == 1


@pytest.mark.parametrize("left", [0, 7, 100, 300, -1])
def test_a_file_that_was_cut_off(process: Process, reference: ColdReference, left: int) -> None:
    first = process()
    ask(first, text(200))
    process.end(first)
    for path in process.files():
        os.truncate(path, left % path.stat().st_size)
    second = process()
    with pytest.warns(RuntimeWarning, match="is skipped") as caught:
        for _ in range(2):
            output = ask(second, text(200))
            reference.require_equal(text(200), REPLY, output)
        second.step()
    assert len(warned(caught)) == 1
    # The reader looks at what follows a spoilt block while the engine computes already; until it has, the
    # others count as being there.
    assert tree(second).disk._reader.idle(PATIENT)
    process.end(second)  # it has written them anew
    assert ask(process(), text(200)).cached_tokens == 192


def test_a_slow_disk_does_not_hold_the_engine_up(
    process: Process, reference: ColdReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = process()
    ask(first, text(200))
    process.end(first)
    gate, read = threading.Event(), BlockFiles.read

    def slow(files: Any, block: Any) -> Any:
        gate.wait(200)
        return read(files, block)

    monkeypatch.setattr(BlockFiles, "read", slow)
    second = process()
    tree(second).disk.read_wait = 0.1
    heard: list[Any] = []
    second.bus.subscribe(dv.BlocksLate, heard.append)
    second.generate([[5]], SamplingParams(max_new_tokens=1))  # what is loaded first is not counted
    for seed in (0, 1, 2, 3):
        output = ask(second, text(200, seed))
        assert output.cached_tokens < 3  # two texts may begin alike
        reference.require_equal(text(200, seed), REPLY, output)
    assert [event.blocks for event in heard] == [3] and heard[0].microseconds >= 90_000
    gate.set()
    late = tree(second).disk._late
    assert late is not None and late.done.wait(60)
    second.flush_cache()
    output = ask(second, text(200))
    assert output.cached_tokens == 192
    reference.require_equal(text(200), REPLY, output)


def test_a_slow_disk_does_not_hold_the_writing_up(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), BlockFiles.write
    monkeypatch.setattr(BlockFiles, "write", lambda *args: (gate.wait(200), write(*args))[1])
    engine = process(kv_tokens=1024, host_kv_tokens=1024)
    disk = tree(engine).disk
    disk.queue_bytes = 4 * disk.layout.nbytes
    for seed in range(4):
        ask(engine, text(200, seed))
    engine.step()
    assert disk.stats.dropped > 0 and not process.files()
    gate.set()
    process.end(engine)  # what found no room in the queue is written now
    again = process(kv_tokens=1024, host_kv_tokens=1024)
    assert [ask(again, text(200, seed)).cached_tokens for seed in range(4)] == [192] * 4


def test_another_process_deletes_between_look_and_read(
    process: Process, reference: ColdReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = process()
    ask(first, text(200))
    process.end(first)
    read = BlockFiles.read

    def gone(files: Any, block: Any) -> Any:
        if files.path(block.name) == process.files()[0]:
            files.path(block.name).unlink()
        return read(files, block)

    monkeypatch.setattr(BlockFiles, "read", gone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = ask(process(), text(200))
    assert output.cached_tokens in (0, 64, 128)
    reference.require_equal(text(200), REPLY, output)


def test_what_cannot_be_put_into_host_memory_is_computed(
    process: Process, reference: ColdReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = process()
    ask(first, text(200))
    process.end(first)
    second = process()
    monkeypatch.setattr(second.cache.copier, "fill", disk_full)
    output = ask(second, text(200))
    assert output.cached_tokens == 0
    reference.require_equal(text(200), REPLY, output)


def test_ctrl_c_while_the_disk_is_read(process: Process, reference: ColdReference) -> None:
    """It comes at the end of the step; no slot is lost, and the request is there."""
    first = process()
    ask(first, text(200))
    process.end(first)
    second = process()
    pressed: list[Any] = []

    def press(event: Any) -> None:
        if not pressed:
            pressed.append(event)
            signal.raise_signal(signal.SIGINT)

    second.bus.subscribe(dv.BlocksRead, press)
    name = second.add_request(text(200), REPLY)
    with pytest.raises(KeyboardInterrupt):
        drive(second)
    second.check()
    outputs = {output.request_id: output for output in drive(second)}
    assert pressed and outputs[name].cached_tokens == 192
    reference.require_equal(text(200), REPLY, outputs[name])


# ---------------------------------------------------------------------- settings


def test_a_file_instead_of_a_folder_is_refused(process: Process, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below", "no\0name"):
        with pytest.raises(ValueError, match=r"disk_dir '.*(file|below|name)' cannot be a folder"):
            process(disk_dir=tmp_path / name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_dir": "kv"}, "disk_dir 'kv' needs host_kv_tokens"),
        ({"disk_dir": "kv", "host_kv_tokens": 8, "disk_mb": 0}, "disk_mb must be at least 1, got 0"),
        ({"disk_dir": "kv", "host_kv_tokens": 8, "tp": 2}, "tp=2: disk_dir is for one process"),
        ({"disk_dir": 3, "host_kv_tokens": 8}, "disk_dir must be a path, got 3"),
        ({"disk_dir": "", "host_kv_tokens": 8}, "disk_dir must be a path, got ''"),
        ({"disk_dir": " ", "host_kv_tokens": 8}, "disk_dir must be a path, got ' '"),
    ],
)
def test_a_wrong_setting_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_after_close_the_engine_goes_on(process: Process, reference: ColdReference) -> None:
    engine = process()
    ask(engine, text(200))
    process.end(engine)
    process.end(engine)
    for seed in (0, 1):
        reference.require_equal(text(200, seed), REPLY, ask(engine, text(200, seed)))
    assert len(process.files()) == 3


# ---------------------------------------------------------------------- how it ends


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_an_engine_that_is_let_go_has_written_what_it_held(
    process: Process, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    monkeypatch.setattr(disk, "CLOSE_WAIT", PATIENT)
    engine = Engine(EngineConfig(disk_dir=process.folder, host_write=write, **SIZES), model=process.model)
    engine.generate([text(200)], REPLY)
    del engine
    gc.collect()
    disk._at_exit()  # waits for the threads, as the interpreter's end does
    assert len(process.files()) == 3


def test_an_end_that_takes_too_long_says_what_is_lost(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), BlockFiles.write
    monkeypatch.setattr(BlockFiles, "write", lambda *args: (gate.wait(200), write(*args))[1])
    engine = process()
    ask(engine, text(200))
    with pytest.warns(RuntimeWarning, match="took more than 0 seconds: 3 blocks are not written"):
        assert not tree(engine).close(0.05)
    gate.set()


def test_at_the_end_of_the_process_a_sentence_says_what_is_not_written(
    process: Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread that is still in a step, Ctrl-C once more; the others are written nevertheless."""
    engines = [process(host_write="write_back") for _ in range(3)]
    for seed, engine in enumerate(engines):
        ask(engine, text(200, seed))
    over = threading.Event()
    stuck, pressed, fine = map(tree, engines)
    stuck._driver = threading.Thread(target=over.wait, daemon=True)
    stuck._driver.start()
    monkeypatch.setattr(pressed.disk, "close", lambda seconds: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(disk_cache, "_open_ones", weakref.WeakSet((stuck, pressed, fine)))
    monkeypatch.setattr(disk_cache, "CLOSE_WAIT", PATIENT)
    disk_cache._at_exit()
    over.set()
    told = capsys.readouterr().err.splitlines()
    whys = sorted(line.rpartition(": ")[2] for line in told)
    assert whys == ["KeyboardInterrupt", "a step was still running"]
    assert all(f"not all was written to {process.folder}" in line for line in told)
    assert fine.disk.closed and not fine.disk.queued and len(process.files()) >= 3
    monkeypatch.undo()


# ---------------------------------------------------------------------- what is told


def test_a_recording_tells_what_the_disk_did(process: Process, tmp_path: Path) -> None:
    for turn in range(2):
        engine = process(kv_tokens=256, host_kv_tokens=256)
        path = tmp_path / f"{turn}.jsonl"
        with Recorder(engine, path, keyframe_every=3) as recorder:
            for seed in range(4):
                ask(engine, text(100, seed))
            tree(engine).disk.flush(PATIENT)
            engine.step()
            process.end(engine)
        recorder.check()
        recording = Recording.load(path)
        assert not recording.missing and len(recording) == len(recorder)
        assert recording.state(len(recording) - 1) == engine.snapshot()
        events = [event for frame in recording for event in frame.events]
        kind = dv.BlocksRead if turn else dv.BlocksWritten
        told = [event for event in events if isinstance(event, kind)]
        assert sum(event.blocks for event in told) == 4
        assert recording.header["config"]["disk_dir"] == str(process.folder)
        for event in told:
            assert event.describe() and kind.together([event, event])[1]


def test_the_stream_of_kv_events_knows_what_was_read(process: Process) -> None:
    first = process(page_size=4)
    ask(first, text(130))
    process.end(first)
    second = process(page_size=4)
    heard: list[Any] = []
    stream = KVEventStream(second.cache, heard.append)
    table = BlockTable()
    ask(second, text(130))
    stored = [event for event in heard if isinstance(event, BlockStored)]
    assert [(event.medium, len(event.block_hashes)) for event in stored[:2]] == [("CPU", 32), ("GPU", 32)]
    for event in heard:
        table.take(event)
    again: list[Any] = []
    KVEventStream(second.cache, again.append)  # who comes later hears of the same blocks
    told = {(e.medium, name) for e in again for name in e.block_hashes}
    assert told == {(e.medium, name) for e in stored for name in e.block_hashes}
    stream.close()


def test_why_a_request_missed_knows_the_disk(process: Process) -> None:
    first = process()
    ask(first, text(130))
    process.end(first)
    second = process()
    with Recorder(second) as recording:
        for tokens in (text(130), [*text(130)[:100], 5, 6]):
            ask(second, tokens)
    told = Recorded.of(recording)
    assert told.misfits == [] and [told.answers[name].cached for name in ("R1", "R2")] == [128, 100]


def test_the_pictures_draw_a_node_from_the_disk(process: Process) -> None:
    first = process()
    ask(first, text(130))
    process.end(first)
    second = process()
    with Recorder(second) as recording:
        ask(second, text(130))
    trace = Trace(recording)
    (read,) = [e for frame in recording for e in frame.events if isinstance(e, dv.BlocksRead)]
    view = trace.view("step", 1)
    assert read in view.events and view.status[read.node] in ("loaded", "hit", "locked")
    assert tree_svg(view, lambda ids: "")


def test_the_metrics_tell_tokens_by_tier(process: Process) -> None:
    first = process()
    ask(first, text(130))
    process.end(first)
    second = process(kv_tokens=192)
    metrics = Metrics()
    metrics.attach(second)
    for seed in (0, 1, 0):  # from the disk; computed; from the host
        ask(second, text(130, seed))
    assert tree(second).disk.flush(PATIENT)
    second.step()
    lines = dict(line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if line[0] != "#")
    tiers = [lines[f'minirad_cached_tokens_total{{tier="{name}"}}'] for name in ("disk", "host")]
    assert tiers == ["128.0", "129.0"]
    assert lines["minirad_disk_written_tokens_total"] == "128.0"
    assert float(lines["minirad_disk_bytes"]) == sum(path.stat().st_size for path in process.files())


def test_the_host_part_of_a_match_does_not_make_room_for_what_follows_it(
    process: Process, reference: ColdReference
) -> None:
    engine = process(kv_tokens=256, host_kv_tokens=256)
    cache, tokens, only = tree(engine), text(192), SamplingParams(max_new_tokens=0)
    ask(engine, tokens[:100], only)
    ask(engine, tokens, only)
    assert cache.disk.flush(PATIENT)
    engine.cache_manager.make_room(256)  # both nodes live on the host only
    held = cache._host_room(256 - 100)  # and only the first of them is left there
    assert held is not None
    cache.host_allocator.free(held)
    ask(engine, text(100, 1), only)  # on the device: its copy stays on the host
    assert cache.peek_tiers(RadixKey(tokens)) == (0, 100) and cache.host_allocator.available == 56
    output = ask(engine, tokens)
    assert output.cached_tokens == 156
    reference.require_equal(tokens, REPLY, output)
