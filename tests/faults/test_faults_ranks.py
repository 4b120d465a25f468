"""Several ranks under torchrun: what becomes of all when one is killed, hangs, fails or never starts.

One clear sentence, no traceback of ours, all processes gone in time, and an exit code that is not 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import ROOT, TINY, tiny_config

from minirad.bench.dummy import dummy_weights
from minirad.fleet.endpoints import free_ports

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signals and /proc of Linux")

CLASSROOM = ROOT / "minirad" / "model" / "classroom" / "weights"
START = 240.0  # seconds for processes that import torch on a busy machine

# What a user's script does; argv: a folder for notes, what rank 0 does, what the others do, the model, tp.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path

import torch

from minirad import Engine, EngineConfig, SamplingParams
from minirad.model.llama import LlamaConfig, LlamaModel, random_weights

folder, leader, follower, model, tp = Path(sys.argv[1]), *sys.argv[2:6]
rank = os.environ["RANK"]
if model.endswith("RANK"):  # one path, which is another directory for each
    os.chdir(model.replace("RANK", rank))
    model = "model"
me, what = folder / f"rank{rank}", leader if rank == "0" else follower
(folder / f"pid{rank}").write_text(str(os.getpid()))
calls = 0


def tiny():
    shape = LlamaConfig.from_dict(TINY)
    return LlamaModel(shape, random_weights(shape, 0, dtype=torch.float32, device="cpu"))


def note(text):
    (folder / f"{text}{rank}").touch()


def forward(self, *arguments, usual=LlamaModel.forward):
    global calls
    calls += 1
    if calls == 6 and what == "sleeps in a forward pass":
        note("sleeps")
        time.sleep(1000)
    if calls == 6 and what == "fails in a forward pass":
        raise MemoryError("as the test wishes")
    return usual(self, *arguments)


LlamaModel.forward = forward
if what == "never starts":
    raise SystemExit(3)
config = EngineConfig(model=model or None, tp=int(tp), kv_tokens=1024)
engine = Engine(config, model=None if model else tiny())  # without a tokenizer: sooner at work
some, params = [[1, 5, 6, 7]], SamplingParams(max_new_tokens=8, ignore_eos=True)
try:
    engine.generate(some, params)
    if "told" in what:
        signal.signal(signal.SIGTERM, lambda number, frame: (folder / "enough").touch())
    note("works")
    if what == "raises":
        raise OSError("as the test wishes")
    if "steps" in what or "forward" in what or "forward" in follower:
        while True:
            engine.generate(some, params)
            if (folder / "enough").exists():
                break
    else:
        while not (folder / "go").exists():
            time.sleep(0.05)
        engine.generate(some, params)
    engine.flush_cache()
    engine.step()
    engine.check()
    print("free", engine.allocator.available, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    engine.check()
    engine.flush_cache()
    engine.step()
    print("free", engine.allocator.available, flush=True)
    raise SystemExit(130)
"""


class Run:
    """Processes of one run, under torchrun or as it would start them; each one's output in files."""

    def __init__(self, folder: Path, arguments: list[str], ranks: int, under: bool, timeout: float) -> None:
        self.folder, self.ranks, self.under = folder, ranks, under
        folder.mkdir(exist_ok=True)
        env = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "MINIRAD_RANKS_TIMEOUT": str(timeout),
        }  # fmt: skip
        if under:
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                "--redirects", "3", "--log-dir", str(folder / "logs"), *arguments,
            ]  # fmt: skip
            self.processes = [self._start(command, env, "torchrun")]
            return
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)), "WORLD_SIZE": str(ranks)}
        command = [sys.executable, *arguments]
        self.processes = [
            self._start(command, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, f"rank{rank}")
            for rank in range(ranks)
        ]

    def _start(self, command: list[str], env: dict[str, str], name: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("wb") as err:
            return subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip

    # ------------------------------------------------------------ looking on

    def until(self, name: str, seconds: float = START) -> None:
        """Waits until a rank has noted something."""
        self.wait_for(lambda: (self.folder / name).exists(), seconds, f"no {name}")

    def wait_for(self, true: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not true():
            over = all(each.poll() is not None for each in self.processes) and not true()
            assert time.monotonic() < end and not over, f"{what}: {self.all_said()}"
            time.sleep(0.05)

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid{rank}").read_text())

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pid(rank), number)

    def ends(self, seconds: float) -> list[int]:
        """The exit codes, once all processes (also those that torchrun started) are gone; in time."""
        self.wait_for(
            lambda: all(each.poll() is not None for each in self.processes), seconds, "still running"
        )
        pids = [int(file.read_text()) for file in self.folder.glob("pid*")]
        end = time.monotonic() + 60
        while any(map(alive, pids)):
            assert time.monotonic() < end, f"a rank outlives its run: {self.all_said()}"
            time.sleep(0.05)
        return [each.returncode for each in self.processes]

    def said(self, rank: int, stream: str = "stderr") -> str:
        if self.under:
            files = sorted(self.folder.glob(f"logs/*/attempt_0/{rank}/{stream}.log"))
        else:
            files = [self.folder / f"rank{rank}.{stream.removeprefix('std')}"]
        return "".join(file.read_text(errors="replace") for file in files)

    def all_said(self) -> str:
        whole = [f"[rank {rank}] {self.said(rank, 'stdout')}{self.said(rank)}" for rank in range(self.ranks)]
        return "\n".join([*whole, *(file.read_text() for file in self.folder.glob("torchrun.*"))])

    def close(self) -> None:
        """Whatever is left of it ends."""
        pids = [int(file.read_text()) for file in self.folder.glob("pid*")]
        for pid in [*pids, *(each.pid for each in self.processes if each.poll() is None)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for each in self.processes:
            each.wait(60)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def another_model(
    folder: Path, heads: int = 4, kv_heads: int = 2, intermediate: int = 64, seed: int = 0
) -> Path:
    """A small model's directory."""
    shape = {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": intermediate,
        "hidden_size": 48, "head_dim": 8, "vocab_size": 1024,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **shape}))
    for file in CLASSROOM.glob("tokenizer*"):
        shutil.copy(file, folder)
    weights = dummy_weights(tiny_config(**shape), torch.float32, "cpu", seed)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(
        leader: str = "waits", follower: str = "", *, model: str = "", tp: int = 2, ranks: int = 2,
        under: bool = True, timeout: float = 10.0, command: list[str] | None = None,
    ) -> Run:  # fmt: skip
        folder = tmp_path / f"run{len(runs)}"
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.replace("TINY", repr(TINY)))
        arguments = command or [str(program), str(folder), leader, follower, model, str(tp)]
        runs.append(Run(folder, arguments, ranks, under, timeout))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def require_told(run: Run, rank: int, *words: str, traceback: bool = False) -> None:
    """The last thing that a rank said is one sentence, with these words in it."""
    said = run.said(rank)
    if not said and "Signal 9 (SIGKILL) received by PID" in run.all_said():
        return  # torchrun saw first who was killed, said so, and ended this rank
    assert all(word in last_line(said) for word in words), (words, run.all_said())
    assert traceback or "Traceback" not in said, run.all_said()


# ---------------------------------------------------------------------- a rank is killed


@pytest.mark.slow
def test_a_rank_killed_at_work_ends_the_run_with_a_sentence(start: Start) -> None:
    """Here rank 0 is a user's program, which does not catch the error: Python shows where it was."""
    run = start("steps")
    run.until("works0")
    run.signal(1, signal.SIGKILL)
    assert run.ends(60) == [1]
    require_told(run, 0, "RankLost: rank 1 ended (rank 0 was in step", traceback=True)


@pytest.mark.slow
@pytest.mark.parametrize("under", [True, False])
def test_a_rank_killed_in_a_forward_pass(start: Start, under: bool) -> None:
    run = start("", "sleeps in a forward pass", under=under, timeout=60)
    run.until("sleeps1")
    run.signal(1, signal.SIGKILL)
    codes = run.ends(50)  # before the timeout
    assert codes[0] == 1
    require_told(run, 0, "RankLost: rank 1 ended (rank 0 was in step", traceback=True)


@pytest.mark.slow
def test_a_rank_killed_while_idle_is_missed_at_the_next_step(start: Start) -> None:
    run = start(under=False)
    run.until("works0")
    run.signal(1, signal.SIGKILL)
    time.sleep(1.0)
    (run.folder / "go").touch()
    assert run.ends(60) == [1, -signal.SIGKILL]
    require_told(run, 0, "RankLost: rank 1 ended (rank 0 was in", traceback=True)


@pytest.mark.slow
def test_a_rank_killed_while_idle_under_torchrun(start: Start) -> None:
    run = start()
    run.until("works0")
    run.signal(1, signal.SIGKILL)
    assert run.ends(60) == [1]  # torchrun itself ends rank 0


@pytest.mark.slow
@pytest.mark.parametrize("leader", ["steps", "waits"])
def test_rank_0_killed_ends_the_others(start: Start, leader: str) -> None:
    """Also where nobody watches over them: each notices by itself."""
    run = start(leader, ranks=2, under=False, timeout=60)
    run.until("works0")
    run.signal(0, signal.SIGKILL)
    assert run.ends(60) == [-signal.SIGKILL, 1]
    require_told(run, 1, "minirad: rank 0 ended (rank 1 was in")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_who_was_lost_is_named_among_several(start: Start, tmp_path: Path, ranks: int) -> None:
    model = another_model(tmp_path / "twelve", heads=12, kv_heads=ranks, intermediate=48)
    run = start("steps", model=str(model), tp=ranks, ranks=ranks, under=False)
    run.until("works0")
    run.signal(2, signal.SIGKILL)
    codes = run.ends(60)
    assert codes == [1, 1, -signal.SIGKILL, *[1] * (ranks - 3)]
    require_told(run, 0, "RankLost: rank 2 ended", traceback=True)
    for rank in set(range(1, ranks)) - {2}:
        require_told(run, rank, "minirad: rank 2 ended")


# ---------------------------------------------------------------------- a rank hangs


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_so_long(start: Start) -> None:
    run = start("steps")
    run.until("works0")
    run.signal(1, signal.SIGSTOP)
    run.wait_for(lambda: "RankLost" in run.said(0), 100, "no sentence")
    assert run.ends(100) == [1]  # torchrun asks a stopped process to end for half a minute
    require_told(run, 0, "RankLost: rank 1 did not answer for 10 seconds (rank 0 was in step", traceback=True)


@pytest.mark.slow
def test_a_rank_that_hung_ends_when_it_goes_on(start: Start) -> None:
    run = start("steps", under=False)
    run.until("works0")
    run.signal(1, signal.SIGSTOP)
    run.wait_for(lambda: run.processes[0].poll() is not None, 100, "rank 0 is held")
    require_told(run, 0, "RankLost: rank 1 did not answer for 10 seconds", traceback=True)
    run.signal(1, signal.SIGCONT)
    assert run.ends(60) == [1, 1]
    require_told(run, 1, "minirad: ")


@pytest.mark.slow
@pytest.mark.parametrize("leader", ["steps", "waits"])
def test_rank_0_that_hangs_is_given_up(start: Start, leader: str) -> None:
    run = start(leader, under=False)
    run.until("works0")
    run.signal(0, signal.SIGSTOP)
    run.wait_for(lambda: run.processes[1].poll() is not None, 100, "rank 1 is held")
    assert run.processes[1].returncode == 1
    require_told(run, 1, "minirad: rank 0 did not answer for 10 seconds (rank 1 was in")
    if leader == "steps":
        time.sleep(12.0)  # longer than any step may take: the time in which it was stopped does not count
    run.signal(0, signal.SIGCONT)
    (run.folder / "go").touch()
    assert run.ends(60) == [1, 1]
    require_told(run, 0, "RankLost: ", traceback=True)


@pytest.mark.slow
def test_rank_0_may_be_idle_for_longer_than_the_timeout(start: Start) -> None:
    run = start(under=False, timeout=2.0)
    run.until("works0")
    time.sleep(7.0)
    (run.folder / "go").touch()
    assert run.ends(60) == [0, 0]
    assert run.said(0, "stdout") == "free 1024\n"
    assert run.said(1) == run.said(1, "stdout") == ""


# ---------------------------------------------------------------------- a rank fails


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("under", [True, False])
def test_a_rank_that_fails_in_a_forward_pass_ends_the_run(start: Start, rank: int, under: bool) -> None:
    fails = "fails in a forward pass"
    run = start(*(fails, "") if rank == 0 else ("", fails), under=under, timeout=60)
    codes = run.ends(START)
    assert codes == ([1] if under else [1, 1])
    sentence = f"rank {rank} failed in step"
    require_told(run, 0, sentence, "MemoryError: as the test wishes", traceback=True)
    if not under:  # torchrun may end it before it has said so
        require_told(run, 1, f"minirad: {sentence}", "MemoryError: as the test wishes")


@pytest.mark.slow
@pytest.mark.parametrize("under", [True, False])
def test_a_program_of_rank_0_that_fails_ends_the_others(start: Start, under: bool) -> None:
    run = start("raises", under=under, timeout=60)
    codes = run.ends(START)
    assert codes == ([1] if under else [1, 0])
    assert last_line(run.said(0)).endswith("OSError: as the test wishes")
    assert run.said(1) == ""


@pytest.mark.slow
def test_a_rank_that_never_starts_ends_the_run(start: Start) -> None:
    assert start("", "never starts").ends(START) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("under", [True, False])
@pytest.mark.parametrize("leader", ["steps", "waits"])
def test_ctrl_c_for_all_is_rank_0s_alone(start: Start, leader: str, under: bool) -> None:
    """It is taken at the next whole step; no slot is lost, and the others end when rank 0 does."""
    run = start(leader, under=under, timeout=60)
    run.until("works0")
    if under:  # it passes Ctrl-C on
        os.kill(run.processes[0].pid, signal.SIGINT)
    else:
        for rank in (1, 0):
            run.signal(rank, signal.SIGINT)
    codes = run.ends(45)
    assert run.said(0, "stdout") == "interrupted\nfree 1024\n", run.all_said()
    assert run.said(1) == ""
    assert codes == [130, 0] or (under and codes[0] != 0)


@pytest.mark.slow
@pytest.mark.parametrize("under", [True, False])
def test_the_others_live_as_long_as_rank_0_when_all_are_told_to_end(start: Start, under: bool) -> None:
    """torchrun passes SIGTERM on to all: rank 0 may finish what it has begun, as a server does."""
    run = start("steps and ends when told", under=under, timeout=60)
    run.until("works0")
    if under:
        os.kill(run.processes[0].pid, signal.SIGTERM)
    else:
        for rank in (1, 0):
            run.signal(rank, signal.SIGTERM)
    codes = run.ends(45)
    assert run.said(0, "stdout") == "free 1024\n", run.all_said()
    assert run.said(1) == "" and (under or codes == [0, 0])


@pytest.mark.slow
def test_who_ignores_sigterm_still_ends_after_rank_0(start: Start) -> None:
    run = start("steps", under=False, timeout=60)
    run.until("works0")
    for rank in (1, 0):
        run.signal(rank, signal.SIGTERM)
    assert run.ends(60) == [-signal.SIGTERM, 1]
    require_told(run, 1, "minirad: rank 0 ended (rank 1 was in")


# ---------------------------------------------------------------------- what cannot begin


@pytest.mark.slow
@pytest.mark.parametrize("under", [True, False])
def test_a_rank_without_its_model_ends_the_run(start: Start, tmp_path: Path, under: bool) -> None:
    shutil.copytree(CLASSROOM, tmp_path / "home0" / "model")
    (tmp_path / "home1").mkdir()
    run = start(model=str(tmp_path / "homeRANK"), under=under, timeout=60)
    assert run.ends(START)[0] == 1
    require_told(
        run, 0, "ValueError: rank 1 could not make its part of the engine", "'model'", traceback=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "other"),
    [("shape", {"intermediate": 96}), ("heads", {"heads": 8}), ("weights", {"seed": 1})],
)
def test_ranks_with_different_models_are_refused(
    start: Start, tmp_path: Path, what: str, other: dict
) -> None:
    another_model(tmp_path / "home0" / "model")
    another_model(tmp_path / "home1" / "model", **other)
    run = start(model=str(tmp_path / "homeRANK"), under=False)
    codes = run.ends(START)
    assert codes[0] == 1, what
    require_told(run, 0, "ValueError: rank 1 read another model than rank 0", traceback=True)


REFUSED = {
    "uneven heads": (3, 3, "tp=3 does not divide the model's heads, 4"),
    "more ranks": (
        2,
        3,
        "tp=3 needs 3 processes, and here are 2: start it with `torchrun --nproc-per-node 3`",
    ),
    "fewer ranks": (
        3,
        2,
        "tp=2 needs 2 processes, and here are 3: start it with `torchrun --nproc-per-node 2`",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_command_that_cannot_begin_says_why_once(start: Start, name: str) -> None:
    ranks, tp, sentence = REFUSED[name]
    command = ["-m", "minirad", "generate", "--tp", str(tp), "Ann likes"]
    run = start(command=command, ranks=ranks, under=False)
    codes = run.ends(START)
    assert codes[0] == 2 and sentence in run.said(0)
    assert run.said(0).count("\n") == 1 and run.said(0, "stdout") == "", run.all_said()
    for rank in range(1, ranks):
        assert (codes[rank] == 0) == (ranks == tp), "they follow until rank 0 is refused, or are refused, too"
        assert run.said(rank).count("\n") <= 1, run.all_said()


# ---------------------------------------------------------------------- the command


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_command_whose_rank_is_lost_says_so_in_one_line(start: Start, number: signal.Signals) -> None:
    tokens = ["--max-new-tokens", "900", "--ignore-eos", "--temperature", "1", "--record", "run.jsonl"]
    command = ["-m", "minirad", "generate", "--tp", "2", *tokens, *["Ann likes"] * 4]
    run = start(command=command, under=False)
    recording = run.folder / "run.jsonl"
    run.wait_for(lambda: recording.exists() and recording.stat().st_size > 20_000, START, "no steps")
    os.kill(run.processes[1].pid, number)
    run.wait_for(lambda: run.processes[0].poll() is not None, 100, "rank 0 is held")
    assert run.processes[0].returncode == 1
    assert run.said(0).count("\n") == 1, run.all_said()
    require_told(run, 0, "rank 1 ")
