"""A learner's file that does not come back is told: which it is, for how long, and where Python is in it."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_careless import READERS

from lessons.grading.drafting import Yours
from minirad import own_code
from minirad.own_code import PATIENCE, _Watcher

WAITS = "while not go.wait(0.01):\n{0}    here.set()\n"


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Watcher]:
    """One whose looks are the test's."""
    made = _Watcher()
    made._thread = threading.current_thread()  # it starts none
    monkeypatch.setattr(own_code, "_watcher", made)
    yield made


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """(here, go): set by a file that waits, and what it waits for; every file finds them as builtins."""
    here, go = threading.Event(), threading.Event()
    monkeypatch.setattr("builtins.here", here, raising=False)
    monkeypatch.setattr("builtins.go", go, raising=False)
    yield here, go
    go.set()


def begun(here: threading.Event, call: Callable[[], Any]) -> threading.Thread:
    """A thread that has come to the place where it waits."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert here.wait(30)
    return thread


@pytest.mark.parametrize("read", READERS)
def test_a_file_that_does_not_end_while_it_is_loaded(tmp_path: Path, watcher, held, capsys, read) -> None:
    """Whatever takes a learner's file: it is watched before its first line runs."""
    file, (here, go) = tmp_path / "mine.py", held
    file.write_text("x = 1\n" + WAITS.format("") + "1 / 0\n", encoding="utf-8")

    def load() -> None:
        with pytest.raises(ValueError, match="ZeroDivisionError"):
            read(str(file))

    thread = begun(here, load)
    watcher.look(100.0)
    watcher.look(100.0 + PATIENCE - 0.1)
    assert own_code.slow() == ""
    watcher.look(100.0 + PATIENCE)
    said = own_code.slow()
    assert said.startswith(f"{file} has been running for {PATIENCE} seconds, at line ")
    assert ", while it is loaded; " in said and capsys.readouterr().err == f"{said}\n"
    go.set()
    thread.join()
    watcher.look(117.0)
    assert own_code.slow() == "" and capsys.readouterr().err == f"{file} came back after 17 seconds\n"


def test_the_function_that_it_is_in_is_named(tmp_path: Path, watcher, held, capsys) -> None:
    """That of the innermost line of the file, whatever it is called from and whatever it calls."""
    file, (here, go) = tmp_path / "mine.py", held
    text = "def deep(x):\n    {}\n    return x\n\n\ndef accept(draft):\n    return [deep(x) for x in draft]\n"
    file.write_text(text.format(WAITS.format("    ")), encoding="utf-8")
    yours = Yours.read([file])
    thread = begun(here, lambda: yours.call("accept", "R1", [1]))
    for seconds in (0, 5, 9, 10, 15, 19, 20, 64):
        watcher.look(100.0 + seconds)
        told = f"{file} has been running for {seconds // 5 * 5} seconds, in deep (line "
        assert own_code.slow().startswith(told) or seconds < PATIENCE
    told = [line.split(" seconds")[0].split()[-1] for line in capsys.readouterr().err.splitlines()]
    assert told == ["5", "10", "20", "60"]  # the terminal less and less often
    go.set()
    thread.join()
    watcher.look(165.0)
    assert own_code.slow() == ""


def test_many_calls_that_come_back_are_not_one_that_does_not(tmp_path: Path, watcher, held, capsys) -> None:
    file, (here, go) = tmp_path / "mine.py", held
    file.write_text("def accept():\n    " + WAITS.format("    "), encoding="utf-8")
    yours = Yours.read([file])
    for call in range(4):
        thread = begun(here, lambda: yours.call("accept", "R1"))
        watcher.look(100.0 + 3 * call)
        go.set()
        thread.join()
        here.clear(), go.clear()
        assert own_code.slow() == ""
    assert capsys.readouterr().err == ""


def test_nothing_is_collected_while_frames_are_asked_for(watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection there crashed Python 3.11 now and then: see `_Watcher._inside`."""
    asking: list[bool] = []
    begun: list[bool] = []
    stack = own_code._stack

    def asked(frame: Any) -> Any:
        asking.append(True)
        try:
            return stack(frame)
        finally:
            asking.pop()

    def note(phase: str, info: dict[str, int]) -> None:
        begun.append(bool(asking) and threading.current_thread() is threading.main_thread())

    def deep(left: int) -> None:
        for _ in range(30):
            watcher.look(100.0) if left == 0 else deep(left - 1)
            if left:
                return

    monkeypatch.setattr(own_code, "_stack", asked)
    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        deep(20)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    assert begun and not any(begun)
    assert gc.isenabled()


def test_a_terminal_that_is_gone_does_not_end_the_watch(tmp_path, watcher, held, monkeypatch) -> None:
    file, (here, go) = tmp_path / "mine.py", held
    file.write_text("def accept():\n    " + WAITS.format("    "), encoding="utf-8")
    thread = begun(here, lambda: Yours.read([file]).call("accept", "R1"))
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr("sys.stderr", gone)
    for seconds in (0, PATIENCE):
        watcher.look(100.0 + seconds)
    assert own_code.slow().startswith(str(file))
    go.set()
    thread.join()
    watcher.look(165.0)
    assert own_code.slow() == ""
