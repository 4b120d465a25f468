"""What a caller can do wrong: one line and exit code 2 at every command, at the API a ValueError that names
the argument and what it takes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architecture import ROOT
from conftest import CheckedEngine

from minirad import EngineConfig, RadixCache, RadixKey, Recorder, SamplingParams, command, resolve_model
from minirad.engine import Engine
from minirad.observe import events as ev
from minirad.transaction import Transaction
from minirad.workloads import load

MakeEngine = Callable[..., CheckedEngine]
COMMANDS = {
    name: import_module("minirad.__main__" if name == "minirad" else name).main
    for name in ("minirad", "minirad.figure3", "viz.live", "viz.gallery", "viz.figure3", "viz.roofline",
                 "viz.measure")
}  # fmt: skip
DIGITS = '{"timestamp":%s,"input_length":1,"output_length":1,"hash_ids":[1]}'
FILES: dict[str, bytes] = {
    "late.jsonl": (DIGITS % ("9" * 400)).encode(),
    "digits.jsonl": (DIGITS % ("9" * 5000)).encode(),
    "nested.jsonl": b"[" * 100_000,
    "objects.jsonl": b'{"a":' * 100_000,
    "exercise.py": b"mine",
    "old.jsonl": b"mine",
    "old-lru.jsonl": b"mine",
    "keep.html": b"mine",
    "prompts.jsonl": b"mine",
    "binary.txt": b"\xff\xfe\x00abc",
    "row.json": b'{"roofline":[1]}',
    "still.json": json.dumps(
        {
            "roofline": [
                dict.fromkeys(("batch", "weight_ms", "kv_ms", "host_ms", "step_ms", "tokens_per_s"), 0)
            ]
        }
    ).encode(),
    "no-turns.json": b'{"sessions":[{"turns":[]}]}',
    "arrival.json": b'{"sessions":[{"turns":[{"text":"a"}],"arrival":"x"}]}',
    "turns.json": b'{"sessions":[{"turns":1}]}',
}

# command, words after it ("@name" is a file of FILES), what the line says
WRONG: list[tuple[str, str, str]] = [
    ("minirad", "info --kv-tokens 10000000000000", "kv_tokens 10000000000000 takes .* GB; this machine has"),
    ("minirad", "info --max-running 1000000000", "max_running 1000000000 takes .* GB"),
    ("minirad", "info --host-kv-tokens 10000000000000", "host_kv_tokens 10000000000000 takes .* GB"),
    ("minirad", f"info --kv-tokens {'9' * 30}", "kv_tokens must fit into 64 bits"),
    ("minirad", f"info --kv-tokens {'9' * 5000}", "invalid int value"),
    ("minirad", "info --seed -1", "seed must be at least 0, got -1"),
    ("minirad", "info --device cuda:x", "unknown device 'cuda:x'"),
    ("minirad", "generate x --temperature nan", "temperature must be 0 or more, got nan"),
    ("minirad", "bogus", "invalid choice: 'bogus'"),
    ("minirad", "bench engine --requests 0", "--requests: a whole number, 1 or more, is needed, not '0'"),
    ("minirad", "bench schedule --rate nan", "--rate: a number above 0 is needed, not 'nan'"),
    ("minirad", "simulate @late.jsonl", r"late\.jsonl, line 1: timestamp must be a number"),
    ("minirad", "simulate @digits.jsonl", r"digits\.jsonl, line 1: no JSON"),
    ("minirad", "simulate @nested.jsonl", r"nested\.jsonl.*nested too deeply"),
    ("minirad", "simulate @objects.jsonl", r"objects\.jsonl, line 1: .*nested too deeply"),
    ("minirad", "simulate @binary.txt", r"binary\.txt, line 1: no UTF-8 text"),
    ("minirad", "simulate --diff @binary.txt x", r"binary\.txt is no UTF-8 text"),
    ("minirad.figure3", "--kv-tokens 99999999999999", "kv_tokens 99999999999999 takes"),
    ("minirad.figure3", "--page-size x", "invalid int value: 'x'"),
    ("viz.live", "--kv-tokens 99999999999999 --export x.html", "kv_tokens 99999999999999 takes"),
    (
        "viz.live",
        "--workload @binary.txt --export x.html",
        r"binary\.txt is no workload: .* is no UTF-8 text",
    ),
    ("viz.live", "--workload @nested.jsonl --export x.html", r"nested\.jsonl is no workload"),
    ("viz.live", "--workload @turns.json --export x.html", r"turns\.json is no workload"),
    ("viz.live", "--replay @binary.txt --export x.html", r"binary\.txt does not begin with the header"),
    ("viz.live", "--replay @nested.jsonl --export x.html", "does not begin with the header"),
    ("viz.live", "--replay /dev/zero --export x.html", "/dev/zero does not begin with the header"),
    ("viz.live", "--steps -5 --export x.html", "a whole number, 1 or more, is needed, not '-5'"),
    ("viz.live", "--workload @no-turns.json --export x.html", r"no-turns\.json is no workload: session 1"),
    ("viz.live", "--workload @arrival.json --export x.html", "arrival must be a whole number, got 'x'"),
    ("viz.live", "--bogus", "unrecognized arguments: --bogus"),
    ("viz.gallery", "--out @binary.txt", "binary.txt"),
    ("viz.figure3", "--out x --kv-tokens -5", "-5"),
    ("viz.figure3", "", "--out"),
    ("viz.measure", "--shapes wide,round", "unknown shape 'round'; known: wide, deep, mixed, stream"),
    ("viz.measure", "--sizes 10,many", "a whole number, 1 or more, is needed, not 'many'"),
    ("viz.roofline", "@binary.txt --out x.html", r"binary\.txt is no JSON"),
    ("viz.roofline", "@row.json --out x.html", "row 0 of 'roofline' must be an object, got 1"),
    ("viz.roofline", "@still.json --out x.html", "reads its weights in no time"),
    ("viz.roofline", "@nested.jsonl --out x.html", "is no JSON"),
    ("viz.roofline", "@still.json --out exercise.py", r"must end in .html, not 'exercise\.py'"),
    ("viz.live", "--record @exercise.py", r"--record: a file's name must end in .jsonl, not .*exercise\.py"),
    ("viz.live", "--record @old.jsonl", r"old\.jsonl exists already, name another file or delete it"),
    ("viz.live", "--compare lru,lfu --record @old.jsonl", r"old-lru\.jsonl exists already"),
    ("viz.live", "--record none/x.jsonl", "--record: there is no folder none"),
    ("viz.live", "--replay @old.jsonl --record new.jsonl", "nothing runs, so nothing is recorded"),
    ("viz.live", "--replay @keep.html --export @keep.html", r"keep\.html is read by this command"),
    ("viz.live", "--replay @keep.html --export link.html", r"link\.html is read by this command"),
    ("viz.live", "--workload chat --export exercise.py", "must end in .html or .gif"),
    ("minirad", "generate x --record @exercise.py", "must end in .jsonl"),
    ("minirad", "generate x --record @old.jsonl", "exists already"),
    ("minirad", "generate --file @prompts.jsonl --record @prompts.jsonl", "is read by this command"),
    ("minirad", "chat --record @old.jsonl", "exists already"),
    ("minirad", "simulate @keep.html --figure @keep.html", r"keep\.html is read by this command"),
    ("minirad", "simulate chat --figure @exercise.py", "must end in .html"),
    ("minirad", "bench gpu --device cpu --out @exercise.py", "must end in .json"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    (folder / "link.html").hardlink_to(folder / "keep.html")
    return folder


@pytest.mark.parametrize(("name", "words", "told"), WRONG)
def test_a_mistake_is_one_line_and_code_2(
    name: str, words: str, told: str, folder: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if "/dev/zero" in words and sys.platform == "win32":
        pytest.skip("there is no /dev/zero")
    monkeypatch.chdir(folder)
    try:
        code = COMMANDS[name]([str(folder / w[1:]) if w[0] == "@" else w for w in words.split()])
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    assert len(line) < 800
    assert re.search(told, line), line
    assert all((folder / file).read_bytes() == data for file, data in FILES.items()), "nothing is lost"


# ---------------------------------------------------------------------- how a command ends


def run_code(body: str, **options: Any) -> subprocess.Popen[str]:
    text = f"import sys\nfrom minirad import command\n{body}"
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([sys.executable, "-c", text], **pipes)


def test_a_closed_pipe_ends_a_command_quietly() -> None:
    body = "sys.exit(command.run('x', lambda: [print('line ' * 50) for _ in range(5000)] and 0))"
    process = run_code(body)
    assert process.stdout is not None and process.stdout.readline().startswith("line")
    process.stdout.close()
    assert process.stderr is not None and process.stderr.read() == ""
    assert process.wait(30) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_a_pipe_is_one_line(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    body = "sys.exit(command.run('x', lambda: print('line') or 0))"
    with open("/dev/full", "w") as full:
        process = run_code(body, stdout=full, env=environment)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert err.count("\n") == 1 and err.startswith("x: ") and "'standard output'" in err


def test_a_file_that_is_not_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        with command.named(tmp_path / "out.csv"):
            raise OSError(28, "No space left on device")

    assert command.run("x", work) == 2
    assert capsys.readouterr().err.endswith(f"No space left on device: {str(tmp_path / 'out.csv')!r}\n")
    with pytest.raises(FileNotFoundError, match="there"), command.named("here"):
        (tmp_path / "there").read_bytes()


ASKED = {
    "minirad": ["simulate chat", "why prompts.jsonl", "theorem", "info", "generate Hi", "chat", "--help"],
    "minirad.figure3": [""], "viz.live": ["--export x.html"], "viz.gallery": ["--out gallery"],
    "viz.figure3": ["--out steps"], "viz.roofline": ["--out x.html"], "viz.measure": [""],
    "lessons": ["", "grade 01"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "words"), [(name, each) for name in ASKED for each in ASKED[name]])
def test_a_closed_output_is_one_line_and_nothing_is_computed(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = COMMANDS.get(name) or import_module("lessons.__main__").main
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", None)
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and ": the standard output is closed; " in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "words", ["lessons list", "viz.live --help", "viz.live --steps 5", "minirad theorem"]
)
def test_what_is_closed_is_no_traceback(words: str, closed: str) -> None:
    line = f"exec {sys.executable} -m {words} {closed}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert "Traceback" not in done.stderr and done.returncode in (0, 2)  # 1: of one that nobody sees


def test_a_closed_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    for words in ("chat", "why -", "why - --log -", "why nowhere.jsonl --log -"):
        assert COMMANDS["minirad"](words.split()) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "standard input" in err


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit there")
@pytest.mark.parametrize("words", ["why prompts.jsonl --html page.html", "simulate chat --figure page.html"])
def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, words: str) -> None:
    (tmp_path / "page.html").write_bytes(b"mine")
    (tmp_path / "prompts.jsonl").write_bytes(b'{"prompt": "Hi"}')
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))\n"
    body = f"{limit}from minirad.__main__ import main\nsys.exit(main({words.split()}))"
    process = run_code(body, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2 and err == "minirad: [Errno 27] File too large: 'page.html'\n"
    assert (tmp_path / "page.html").read_bytes() == b"mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["page.html", "prompts.jsonl"]


def test_a_file_is_written_as_a_whole(tmp_path: Path) -> None:
    old, link, new = tmp_path / "old.html", tmp_path / "link.html", tmp_path / "new.html"
    old.write_text("mine")
    old.chmod(0o640)
    link.symlink_to(old)
    for path in (link, new):
        command.write_whole(path, "“all”")
        assert path.read_text(encoding="utf-8") == "“all”"
    assert link.is_symlink() and old.stat().st_mode & 0o777 == 0o640
    with pytest.raises(UnicodeEncodeError):
        command.write_whole(old, "\ud800")
    with pytest.raises(OSError, match=re.escape(repr(str(tmp_path / "no" / "page.html")))):
        command.write_whole(tmp_path / "no" / "page.html", "")
    assert old.read_text(encoding="utf-8") == "“all”" and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("kind", ["protected", "loop", "hard link", "no folder", "a pipe"])
def test_what_may_not_be_replaced(kind: str, tmp_path: Path) -> None:
    """It is written as open() would write it, or stays as it is; the error names what was asked for."""
    page, other = tmp_path / "page.html", tmp_path / "other.html"
    page.write_text("mine")
    if kind == "protected":
        page.chmod(0o444)
        refused = "page.html" if os.geteuid() else None  # root may write all
    elif kind == "loop":
        page.unlink()
        page.symlink_to(page)
        refused = "page.html"
    elif kind == "hard link":
        other.hardlink_to(page)
        refused = None
    elif kind == "no folder":
        page, refused = page / "page.html", "page.html/page.html"
    else:
        page.unlink()
        os.mkfifo(page)
        reader, refused = os.open(page, os.O_RDONLY | os.O_NONBLOCK), None
    if refused is not None:
        with pytest.raises(OSError, match=re.escape(repr(str(tmp_path / refused)))):
            command.write_whole(page, "new")
    else:
        command.write_whole(page, "new")
    if kind == "a pipe":
        assert os.read(reader, 9) == b"new"
        os.close(reader)
    elif kind == "hard link":
        assert page.read_text() == other.read_text() == "new" and page.samefile(other)
    elif kind == "protected":
        assert page.read_text() == ("mine" if refused else "new")
        assert page.stat().st_mode & 0o777 == 0o444
    assert len(list(tmp_path.iterdir())) == 1 + (kind == "hard link")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_of_ours_in_a_folder_that_is_not(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    tmp_path.chmod(0o555)
    try:
        command.write_whole(page, "new")
        assert page.read_text() == "new"
    finally:
        tmp_path.chmod(0o755)


def test_another_users_file_stays_theirs(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root may give a file away")
    page = tmp_path / "page.html"
    page.write_text("mine")
    os.chown(page, 65534, 65534)
    command.write_whole(page, "new")
    assert page.read_text() == "new" and page.stat().st_uid == 65534


def test_an_import_that_hides_ctrl_c_does_not_hide_it_from_a_command() -> None:
    """numpy's import makes an ImportError of it."""
    body = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\ncommand.end_quietly('x')\n"
    )
    hide = "try: signal.raise_signal(signal.SIGINT)\nexcept BaseException: raise ImportError from None"
    process = run_code(body + hide)
    assert process.communicate(timeout=30)[1] == "x: interrupted\n" and process.returncode == 130
    kept = "command.run('x', lambda: signal.raise_signal(signal.SIGINT))"
    process = run_code(f"{body}sys.exit({kept})")
    assert process.communicate(timeout=30)[1] == "x: interrupted\n" and process.returncode == 130


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send there")
@pytest.mark.parametrize("where", ["inside", "while it imports"])
def test_ctrl_c_is_one_line_and_code_130(where: str) -> None:
    wait = "(print('ready', flush=True), time.sleep(60))"
    body = {
        "inside": f"import time\nsys.exit(command.run('x', lambda: {wait} and 0))",
        "while it imports": f"command.end_quietly('x')\nimport time\n{wait}",
    }[where]
    process = run_code("import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + body)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "x: interrupted\n")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("where", ["outside", "in a transaction", "where Ctrl-C is not heard"])
def test_who_is_told_to_end_ends_as_with_ctrl_c(
    name: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that what is held is written, and no slot is lost."""
    number = getattr(signal, name, None)
    if number is None:
        pytest.skip(f"no {name} here")
    done: list[str] = []

    def work() -> int:
        with Transaction(ev.EventBus()) if where == "in a transaction" else contextlib.nullcontext():
            signal.raise_signal(number)
            done.append("the books are right")
        return 0

    ctrl_c = signal.getsignal(signal.SIGINT)
    if where == "where Ctrl-C is not heard":  # a job in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert command.run("x", work) == 128 + number
    finally:
        signal.signal(signal.SIGINT, ctrl_c)
    assert capsys.readouterr().err == f"x: ended by {name}\n"
    assert bool(done) == (where == "in a transaction") and signal.getsignal(number) == signal.SIG_DFL


def test_every_command_that_imports_torch_ends_quietly_from_its_first_line_on() -> None:
    for name in (*COMMANDS, "lessons"):
        module = import_module(f"{name}.__main__" if name in ("minirad", "lessons") else name)
        source = Path(module.__file__ or "").read_text(encoding="utf-8")
        assert source.index("command.end_quietly(") < source.index("\nimport ")


def test_the_packages_of_the_commands_import_nothing_that_takes_time() -> None:
    process = run_code("import lessons, minirad\nprint('numpy' in sys.modules, 'torch' in sys.modules)")
    assert process.communicate(timeout=30)[0] == "False False\n"


def test_a_long_mistake_is_shortened() -> None:
    assert len(command.one_line("a\nb" * 5000)) < 2 * command.LONGEST
    assert "\n" not in command.one_line("a\nb")


# ---------------------------------------------------------------------- the Python API


def api(engine: Engine) -> dict[str, tuple[Callable[[Any], Any], str]]:
    """Every place for an argument, with the words that name it."""
    ids, one = [5, 6], SamplingParams(max_new_tokens=1)
    tree = RadixCache()
    return {
        "config": (lambda v: Engine(v, model=engine.model), "config must be an EngineConfig"),
        "cache": (lambda v: Engine(EngineConfig(kv_tokens=64), v, model=engine.model), "cache must"),
        "model": (lambda v: Engine(EngineConfig(kv_tokens=64), model=v), "model must be a LlamaModel"),
        "prompt": (lambda v: engine.add_request(v, one), "prompt"),
        "prompts": (lambda v: engine.generate(v, one), "prompt"),
        "params": (lambda v: engine.add_request(ids, v), "params must be SamplingParams"),
        "params of generate": (lambda v: engine.generate(ids, v), "params must be|sampling parameters"),
        "params of stream": (lambda v: engine.stream(ids, v), "params must be SamplingParams"),
        "priority": (lambda v: engine.add_request(ids, one, priority=v), "priority must be a whole number"),
        "mask": (lambda v: engine.add_request(ids, one, token_mask=v), "token_mask must be a function"),
        "abort": (engine.abort, "a request's id is a text"),
        "pin": (engine.pin, "prompt"),
        "unpin": (engine.unpin, "pin that this engine's"),
        "policy": (engine.set_eviction_policy, "eviction policy"),
        "weights": (engine.update_weights, "must be a LlamaModel"),
        "kv_tokens": (lambda v: EngineConfig(kv_tokens=v), "kv_tokens must be a whole number"),
        "radix_cache": (lambda v: EngineConfig(radix_cache=v), "radix_cache must be True or False"),
        "device": (lambda v: EngineConfig(device=v), "unknown device"),
        "temperature": (lambda v: SamplingParams(temperature=v), "temperature must be"),
        "ignore_eos": (lambda v: SamplingParams(ignore_eos=v), "ignore_eos must be True or False"),
        "page_size": (RadixCache, "page_size must be a whole number"),
        "key": (tree.match_prefix, "a RadixKey is needed"),
        "peek": (tree.peek, "a RadixKey is needed"),
        "insert": (lambda v: tree.insert(v, [1]), "a RadixKey is needed"),
        "slots": (lambda v: tree.insert(RadixKey([1]), v), "slots"),
        "node": (tree.inc_lock_ref, "a node of this tree is needed"),
        "unlocked node": (tree.dec_lock_ref, "a node of this tree is needed"),
        "evict": (tree.evict, "num_tokens must be a whole number"),
        "source": (Recorder, "an engine or a tree can be recorded"),
        "keyframes": (lambda v: Recorder(engine, keyframe_every=v), "keyframe_every must be a whole number"),
        "recording": (Recorder.load, "a recording must be a path"),
        "event": (lambda v: engine.bus.subscribe(v, print), "no event type"),
        "handler": (lambda v: engine.bus.subscribe(ev.StepEnded, v), "cannot be called"),
        "workload": (load, "a workload must be a path"),
        "name of a model": (resolve_model, "a model must be a path"),
    }


TAKEN = {"mask": {"None"}, "name of a model": {"None"}, "event": {"None"}, "kv_tokens": {"None"}}
DEFAULTS = ("config", "cache", "model", "params", "params of generate", "params of stream")


def test_wrong_types_get_a_sentence_that_names_the_argument(make_engine: MakeEngine) -> None:
    engine = make_engine()
    values = (
        None,
        {},
        {"max_new_tokens": 3},
        1.5,
        object(),
        b"bytes",
        {1, 2},
        float("nan"),
        [None],
        RadixCache,
    )
    for name, (call, told) in api(engine).items():
        for value in values:
            takes_number = name in ("temperature",) and isinstance(value, float) and value == value
            if value is None and (name in DEFAULTS or "None" in TAKEN.get(name, ())):
                continue
            if takes_number or (name == "handler" and callable(value)):
                continue
            if name == "params of generate" and value == [None]:  # one for one prompt
                continue
            with pytest.raises(ValueError, match=told) as caught:
                call(value)
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 300, name
    assert not engine.has_work and not engine.bus.wants(ev.StepEnded)
    engine.check()
    assert engine.generate([5, 6], SamplingParams(max_new_tokens=1))[0].finish_reason == "length"


def test_numpy_scalars_are_numbers_and_no_is_no_bool(make_engine: MakeEngine) -> None:
    params = SamplingParams(max_new_tokens=np.int64(2), temperature=np.float32(0.5), seed=np.uint8(3))
    assert (type(params.max_new_tokens), type(params.temperature)) == (int, float)
    config = EngineConfig(kv_tokens=np.int32(64), mixed=np.bool_(True))
    assert type(config.kv_tokens) is int and config.mixed is True
    engine = make_engine()
    assert engine.add_request(np.array([5, 6]), params, priority=np.int16(3)) == "R1"
    for name in ("radix_cache", "poison_freed", "mixed", "overlap"):
        with pytest.raises(ValueError, match=f"{name} must be True or False, got 'no'"):
            EngineConfig(**{name: "no"})


def test_pins_and_nodes_of_another_engine_are_refused(make_engine: MakeEngine) -> None:
    one, other = make_engine(), make_engine()
    for engine in (one, other):
        engine.generate([5, 6, 7, 8], SamplingParams(max_new_tokens=1))
    mine, theirs = one.pin([5, 6]), other.pin([5, 6])
    assert mine == theirs, "they look alike"
    with pytest.raises(ValueError, match="a pin that this engine's pin"):
        one.unpin(theirs)
    node = other.cache.match_prefix(RadixKey([5, 6])).last_node
    before = other.cache.snapshot(), one.cache.snapshot()
    for call in (one.cache.inc_lock_ref, one.cache.dec_lock_ref, one.cache.path_slots):
        with pytest.raises(
            ValueError, match=f"n{node.id} is not in this tree: evicted, or a node of another"
        ):
            call(node)
    assert (other.cache.snapshot(), one.cache.snapshot()) == before, "nobody's locks have changed"
    one.unpin(mine)
    other.unpin(theirs)
    for engine in (one, other):
        engine.check()
