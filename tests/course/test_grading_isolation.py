"""What a submission may do to itself, and to nobody else: each costs its own exercise, which is named.

A small lesson of three exercises a, b, c. One function misbehaves; the other two must keep their points.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from lessons.grading.isolate import Limits, _Child, _environment, grade
from lessons.grading.run import Result
from lessons.grading.spec import Lesson, load_lesson

SPEC = """
from lessons.grading import Exercise, expect

def case(name):
    def run(impl):
        got = getattr(impl, name)()
        expect(got == 1, f"{name}() gave {got!r}", hint=int(got == 2))
    return run

EXERCISES = [Exercise(name, 1, [case(name)], hints=("return 1", "one less"), seconds=3) for name in "abc"]
"""
GOOD = "def {}():\n    return 1\n"
LIMITS = Limits(memory_mb=300, output=1 << 18, file_mb=1)


@pytest.fixture
def lesson(tmp_path: Path) -> Lesson:
    folder = tmp_path / "07_small"
    folder.mkdir()
    (folder / "exercises.py").write_text(SPEC, encoding="utf-8")
    return load_lesson(folder)


def graded(
    lesson: Lesson, tmp_path: Path, bad: str = "", top: str = "", limits: Limits = LIMITS
) -> list[Result]:
    """bad: the body of b; top: what stands at the top of the file."""
    work = tmp_path / "submission"
    work.mkdir(exist_ok=True)
    body = "".join(f"    {line}\n" for line in (bad or "return 1").splitlines())
    text = f"{top}\n{GOOD.format('a')}def b():\n{body}{GOOD.format('c')}"
    (work / "exercise.py").write_text(text, encoding="utf-8")
    results = list(grade(lesson, work, limits=limits))
    assert (work / "exercise.py").read_text(encoding="utf-8") == text
    return results


BAD = {
    "endless loop": ("while True: pass", "stuck", "b did not come back within 3 seconds"),
    "loop that swallows everything": (
        "while True:\n    try:\n        while True: pass\n    except BaseException:\n        pass",
        "stuck",
        "did not come back",
    ),
    "stuck in C": ("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", "stuck", "did not come back"),
    "a gigabyte of output": ("while True: print('x' * 100000)", "output", "printed more than"),
    "to stderr and past Python": (
        "import os\nfor _ in range(10000): os.write(2, b'x' * 100000)",
        "output",
        "printed",
    ),
    "sys.exit": ("import sys\nsys.exit(0)", "ended", "sys.exit(0)"),
    "leaves for good": ("import os\nos._exit(0)", "ended", "b ended the process (exit code 0)"),
    "deletes its folder": (
        "import shutil, pathlib\nshutil.rmtree(pathlib.Path(__file__).parent)\nreturn 1",
        "tampered",
        "deleted its own folder",
    ),
    "writes over itself": ("open(__file__, 'w').write('')\nreturn 1", "tampered", "its own file"),
    "patches the grader": (
        "import lessons.grading.spec as s\ns.expect = s.Failure.__init__ = lambda *a: None\nreturn 2",
        "tampered",
        "changed",
    ),
    "patches a built-in": (
        "import builtins\nbuiltins.len = lambda x: 1\nreturn 1",
        "tampered",
        "builtins.len",
    ),
    "writes its own result": (
        'print(\'{"kind": "result", "secret": "", "result": {"points": 9}}\')\nreturn 2',
        "failed",
        "b() gave 2",
    ),
    "reads from the keyboard": ("return input()", "failed", "EOFError"),
    "closes everything": ("import os\nos.closerange(0, 200)\nreturn 1", "ended", "b ended the process"),
    "leaves a thread behind": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(10**6,)).start()\nreturn 2",
        "failed",
        "gave 2",
    ),
}


SECONDS = ("loop that swallows everything", "stuck in C")  # as long as the endless loop, each


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SECONDS)) for name in BAD]
)
def test_it_costs_its_own_points_only(lesson: Lesson, tmp_path: Path, name: str) -> None:
    bad, status, words = BAD[name]
    results = graded(lesson, tmp_path, bad)
    assert [(r.exercise, r.points) for r in sorted(results, key=lambda r: r.exercise)] == [
        ("a", 1),
        ("b", 0),
        ("c", 1),
    ]
    found = next(r for r in results if r.exercise == "b")
    assert found.status == status and words in found.words, found


def test_the_hint_is_the_one_that_the_case_chose(lesson: Lesson, tmp_path: Path) -> None:
    hints = [graded(lesson, tmp_path, f"return {wrong}")[1].hint for wrong in (3, 2)]
    assert hints[0].startswith("return 1") and hints[1].startswith("one less")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is limited on Linux only")
def test_memory_is_limited(lesson: Lesson, tmp_path: Path) -> None:
    slow = Limits(seconds=2, memory_mb=300)  # 300 MB are written before it happens
    results = graded(lesson, tmp_path, "x = []\nwhile True: x.append(bytearray(1 << 24))", limits=slow)
    assert [(r.status, r.points) for r in results] == [("passed", 1), ("memory", 0), ("passed", 1)]


@pytest.mark.skipif(os.name != "posix", reason="file sizes are limited where `resource` is")
def test_files_are_limited(lesson: Lesson, tmp_path: Path) -> None:
    results = graded(lesson, tmp_path, "open('big', 'wb').write(bytes(1 << 22))\nreturn 1")
    assert [r.points for r in results] == [1, 0, 1] and "OSError" in results[1].words


@pytest.mark.parametrize(
    ("top", "status", "words"),
    [
        ("while True: pass", "stuck", "when it was imported"),
        ("import sys; sys.exit()", "failed", "cannot be imported: SystemExit"),
        ("import os; os._exit(5)", "ended", "when it was imported (exit code 5)"),
        ("def broken(:", "failed", "exercise.py cannot be imported: SyntaxError: "),
        ("1 / 0", "failed", "exercise.py, line 1 cannot be imported: ZeroDivisionError"),
        (
            "import json\njson.loads('\\n\\n{')",
            "failed",
            "exercise.py, line 2 cannot be imported: JSONDecodeError",
        ),
        ("import no_such_module", "failed", "ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_imported(
    lesson: Lesson, tmp_path: Path, top: str, status: str, words: str
) -> None:
    results = graded(lesson, tmp_path, top=top, limits=Limits(seconds=0.02 if status == "stuck" else 5.0))
    assert [(r.exercise, r.points, r.status) for r in results] == [(name, 0, status) for name in "abc"]
    assert words in results[0].words


def test_a_missing_file(lesson: Lesson, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    results = list(grade(lesson, tmp_path / "empty"))
    assert [r.points for r in results] == [0, 0, 0] and "there is no exercise.py" in results[0].words


def test_own_files_beside_it_can_be_imported_and_hide_nothing(lesson: Lesson, tmp_path: Path) -> None:
    work = tmp_path / "submission"
    work.mkdir()
    (work / "helper.py").write_text("ONE = 1\n", encoding="utf-8")
    (work / "random.py").write_text("raise RuntimeError('the wrong random')\n", encoding="utf-8")
    results = graded(lesson, tmp_path, "import helper, random\nrandom.random()\nreturn helper.ONE")
    assert [r.points for r in results] == [1, 1, 1]


def test_what_it_printed_is_shown_with_the_failure(lesson: Lesson, tmp_path: Path) -> None:
    results = graded(lesson, tmp_path, "print('here I am')\nreturn 2")
    assert "here I am" in results[1].output and results[1].line == 4


def test_what_it_printed_may_come_late(
    lesson: Lesson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and output come by two pipes, and a thread reads each when it has its turn."""
    read = _Child._output

    def late(child: _Child) -> None:
        time.sleep(1.5)
        read(child)

    monkeypatch.setattr(_Child, "_output", late)
    results = graded(lesson, tmp_path, "print('here I am')\nreturn 2")
    assert "here I am" in results[1].output and "here I am" not in results[2].output


FORGED = """import sys
frame = sys._getframe()
while "send" not in frame.f_locals: frame = frame.f_back
send = frame.f_locals["send"]
send("result", exercise="c", status="passed"), send("result", exercise=["b"]), send("result"), send("start")
send("start", exercise="c"), send("ready"), send("unreadable", words=3), send(None), send("unreadable")
send("result", exercise="b", status="9" * 9999, words=7, pictures=[1, [2, 3], ["x"], ["y", {}]])
return 1"""


def test_forged_messages_give_no_points_and_end_nothing(lesson: Lesson, tmp_path: Path) -> None:
    results = graded(lesson, tmp_path, FORGED)
    assert [(r.exercise, r.points, r.status) for r in results] == [
        ("a", 1, "passed"), ("b", 0, "tampered"), ("c", 1, "passed"),
    ]  # fmt: skip
    assert len(results[1].words) < 500 and results[1].pictures == [("y", {})]


@pytest.mark.skipif(os.name != "posix", reason="there is no fork")
def test_a_fork_does_not_count_twice(lesson: Lesson, tmp_path: Path) -> None:
    results = graded(lesson, tmp_path, "import os\nreturn 1 if os.fork() else 2")
    assert [(r.exercise, r.points) for r in results] == [("a", 1), ("b", 1), ("c", 1)]


def test_a_process_that_ends_between_two_exercises_costs_none(lesson: Lesson, tmp_path: Path) -> None:
    """As a thread of b's may do: the process is gone as soon as b's result is sent."""
    bad = """import os, sys
frame = sys._getframe()
while "send" not in frame.f_locals: frame = frame.f_back
send = frame.f_locals["send"]
write, dumps = send.__defaults__
def last(line): write(line), write.__self__.flush(), os._exit(0)
send.__defaults__ = last, dumps
return 1"""
    results = graded(lesson, tmp_path, bad)
    assert [(r.exercise, r.points) for r in results] == [("a", 1), ("b", 1), ("c", 1)]


def test_secrets_do_not_reach_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "x")
    monkeypatch.setenv("MY_API_KEY", "x")
    assert not {"GITHUB_TOKEN", "MY_API_KEY"} & set(_environment(tmp_path))


def test_only_what_was_asked_for_runs(lesson: Lesson, tmp_path: Path) -> None:
    graded(lesson, tmp_path)
    assert [r.exercise for r in grade(lesson, tmp_path / "submission", only=["b"])] == ["b"]
