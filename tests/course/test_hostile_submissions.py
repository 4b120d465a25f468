"""Two hundred hostile submissions, two hundred rows; the honest students between them get their points.

A small lesson of three exercises a, b, c, each of which returns 1. A dozen kinds run always, all of them
with `-m slow`.
"""

from __future__ import annotations

import csv
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from test_grading_isolation import GOOD, SPEC

from lessons.grading.collect import collect, students_of
from lessons.grading.isolate import Limits
from lessons.grading.spec import Lesson, load_lesson

LIMITS = Limits(seconds=1.0, memory_mb=300, output=1 << 18, file_mb=1)
HONEST = "".join(map(GOOD.format, "abc"))
posix = os.name == "posix"

Build = Callable[[Path], None]  # fills a student's folder, which is there


@pytest.fixture
def lesson(tmp_path: Path) -> Lesson:
    folder = tmp_path / "07_small"
    folder.mkdir()
    (folder / "exercises.py").write_text(SPEC, encoding="utf-8")
    return load_lesson(folder)


# ---------------------------------------------------------------------- kinds


def source(data: str | bytes) -> Build:
    def build(student: Path) -> None:
        (student / "07_small").mkdir()
        (student / "07_small" / "exercise.py").write_bytes(data.encode() if isinstance(data, str) else data)

    return build


def body(text: str) -> Build:
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    return source(f"{GOOD.format('a')}def b():\n{lines}{GOOD.format('c')}")


def linked(target: str) -> Build:
    """exercise.py is a link to there, or the file that a function makes there."""

    def build(student: Path) -> None:
        (student / "07_small").mkdir()
        os.symlink(target, student / "07_small" / "exercise.py")

    return build


def pipe(student: Path) -> None:
    (student / "07_small").mkdir()
    os.mkfifo(student / "07_small" / "exercise.py")


def folder_for_file(student: Path) -> None:
    (student / "07_small" / "exercise.py" / "07_small").mkdir(parents=True)


def linked_folder(student: Path) -> None:
    os.symlink("../honest 0/07_small", student / "07_small")


def hard_link(student: Path) -> None:
    (student / "07_small").mkdir()
    (student / "x.py").write_text("import os; os._exit(3)")
    os.link(student / "x.py", student / "07_small" / "exercise.py")


def deep(student: Path) -> None:
    place = student
    for _ in range(60):
        place = place / "lessons"
    place.mkdir(parents=True)
    (student / "07_small.zip").write_bytes(b"PK\3\4")


def many_files(student: Path) -> None:
    source(HONEST.replace("1", "2"))(student)
    for number in range(5000):
        (student / "07_small" / f"f{number}.py").touch()


def many_folders(student: Path) -> None:
    for number in range(3000):
        (student / f"d{number}").mkdir()


def locked_up(student: Path) -> None:
    source(HONEST.replace("1", "2"))(student)
    (student / "07_small").chmod(0)


def loop_of_links(student: Path) -> None:
    (student / "07_small").mkdir()
    os.symlink("exercise.py", student / "07_small" / "exercise.py")


def large_helpers(student: Path) -> None:
    source("import helper\n" + HONEST)(student)
    (student / "07_small" / "helper.py").write_bytes(b"#" * (5 << 20))


def linked_helper(student: Path) -> None:
    source("import helper\n" + HONEST)(student)
    os.symlink("/dev/zero", student / "07_small" / "helper.py")


def nested_folders(text: str) -> str:
    return f"import os\nfor i in range(3000):\n    os.mkdir('{text}')\n    os.chdir('{text}')\nreturn 2"


def to_every_channel(data: str) -> str:
    """Written past Python to whatever is open: also where results go."""
    loop = "import os\nfor fd in range(3, 20):\n    try: os.write(fd, {})\n    except OSError: pass\nreturn 2"
    return loop.format(data)


RAISED = (
    "ValueError('\\ud800')", "ValueError('x' * 20_000_000)", "ValueError('\\x00\\x1b[2J\\r')",
    "KeyboardInterrupt", "GeneratorExit", "StopIteration", "SystemExit('\\udcff')", "SystemExit(10**5000)",
    "BaseException('x')", "MemoryError", "RecursionError", "NotImplementedError('\\ud800' * 10**7)",
    "AssertionError", "OSError(2, '\\udcff')", "UnicodeDecodeError('a\\ud800', b'', 0, 0, '')",
    "SyntaxError('x', ('f', 10**400, 1, 'z' * 10**7))", "type('E' * 10**6, (Exception,), {})()",
    "type('E', (Exception,), {'__str__': lambda s: 1 / 0})()",
    "type('E', (Exception,), {'__str__': lambda s: 7})()", "type('E\\ud800', (Exception,), {})('=cmd()')",
    "__import__('lessons.grading').grading.Failure(3)",
    "__import__('lessons.grading').grading.Failure('\\ud800')",
    "__import__('lessons.grading').grading.Failure('x', [(1, 2), 3, {4}])",
)  # fmt: skip
METHODS = (
    "repr", "eq", "hash", "len", "bool", "int", "iter", "getattribute", "class", "format", "str", "del",
)  # fmt: skip
DONE_BY_THEM = (
    "1 / 0", "(_ for _ in ()).throw(SystemExit(1))", "'x' * 50_000_000", "'\\ud800'", "f(s)", "None",
)  # fmt: skip
TOPS = (
    "(" * 100_000, "-" * 100_000 + "1", "x = " + "[" * 300, "x = " + "1," * 1_000_000,
    "'''" + "\n" * 1_000_000, "a" + ".b" * 100_000,
    "if 1:\n" + "".join(" " * i + "if 1:\n" for i in range(1, 99)), "\0", "def a(:", "\x0c",
    "# " + "é" * 10**6, "raise RuntimeError('\\udcff')", "raise SystemExit", "raise KeyboardInterrupt",
    "import os; os._exit(0)", "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "import lessons.hidden", "import exercise", "import sys; sys.modules.clear()",
    "import sys; sys.stdout = sys.stderr = None", "import os; os.close(1); os.close(2)",
    "import sys; sys.stdout.flush = lambda: 1 / 0", "import builtins; builtins.__import__ = None",
    "import time; time.monotonic = time.perf_counter = lambda: 'x'",
    "import json; json.dumps = lambda *a, **k: '{}'", "import os; os._exit = lambda code: None",
    "import os; os.write = lambda *a: 0", "import signal; signal.alarm(1)", "import gc; gc.disable()",
    "import threading, os; threading.Timer(0.01, os._exit, [0]).start()", "__file__ = 3",
    "__name__ = a = b = c = None", "a = b = c = 7", "a = b = c = type",
    "def __getattr__(n): raise SystemExit", "from os import *",
    "import os\nwhile os.path.exists(__file__): os.unlink(__file__)",
    "import warnings; warnings.warn('\\ud800' * 10**6)", "import atexit, os; atexit.register(os.abort)",
)  # fmt: skip
BODIES = (
    "while True: print('x' * 100000)", "import os\nos.fork()\nreturn 1", "import os\nos.abort()",
    "import os\nwhile os.fork() == 0: pass\nreturn 2", "open('big', 'wb').write(bytes(1 << 24))",
    "for i in range(3000): open(f'f{i}', 'w')", "import sys\nsys.stdout.close()\nreturn 1",
    "import os\nos.closerange(0, 99)",
    to_every_channel("b'x' * 300000 + b'\\n[[[[{}'"), to_every_channel("b'[' * 300000 + b'\\n'"),
    "def f(): f()\nf()", "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", nested_folders("d"),
    nested_folders("x" * 200),
    "import os\nfor i in range(99): os.makedirs(f'{i}/a')\nfor i in range(99): os.chmod(f'{i}', 0)\nreturn 2",
    "import os, subprocess\nsubprocess.Popen(['sleep', '20'], start_new_session=True)\nreturn 2",
    "return [float('nan')]", "import os\nos.environ.clear()\nreturn 2",
    "import os\nos.chdir('/')\nos.umask(0o777)\nreturn 2", "return 10**5000",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "import faulthandler\nfaulthandler._sigsegv()", "x = []\nx.append(x)\nreturn x",
    "x = 1\nfor i in range(20000): x = [x]\nreturn x",
    "from threading import *\nfor i in range(300): Thread(target=Event().wait, daemon=True).start()\nreturn",
    "import gc\n[o.clear() for o in gc.get_objects() if type(o) is dict]",
    "import sys\nsys.settrace(lambda *a: 1 / 0)\nreturn 2",
    "import time\ntime.monotonic = lambda: float('nan')\nreturn 2",
    "return object.__new__(type('\\ud800', (), {}))",
)  # fmt: skip
SOURCES = (
    b"#" * (5 << 20), b"\xff\xfe" + "x = 1".encode("utf-16-le"), b"# coding: no-such-codec\n",
    b"# coding: utf-7\n+AAA-", b"\x80abc", b"# coding: idna\nx = 1", b"", b"\xef\xbb\xbf", b"\r" * 1000,
    bytes(range(256)) * 99, b"#" * (4 << 20), b"# coding: rot13\n" * 9,
)  # fmt: skip
FILES: tuple[Build, ...] = (
    linked("/dev/zero"), linked("/dev/stdin"), linked("/proc/self/mem"), linked("/nowhere"),
    linked("../../honest 0/07_small/exercise.py"), linked("/etc/passwd"), pipe, folder_for_file,
    linked_folder, hard_link, deep, many_files, many_folders, locked_up, loop_of_links, large_helpers,
    linked_helper, lambda student: None,
)  # fmt: skip
NAMES = (
    b"M\xfcller", b"=cmd()", b"@SUM(A1)", b"+1", b"-1", b"a\nb", b"a,b;c", b'"', b"'", b" = 1", b"\t=1",
    b"a\rb", b"\x1b[2J", b"a b", b"ada", b"Ada", b"ADA", "ad\u0301a".encode(), "\u202ecba".encode(),
    b"--help", b"-", b"%s%n", b"x" * 200, b"\xed\xa0\x80", b"$(id)", b"a\\nb", b"CON", b"{}", b"::error::x",
    b"<b>",
)  # fmt: skip


def kinds() -> list[tuple[bytes, Build]]:
    """(the folder's name, what is in it)."""
    returned = [
        f"def f(s, *a): return {does}\nreturn type('T', (), {{'__{name}__': lambda s, *a: {does}}})()"
        for name in METHODS
        for does in DONE_BY_THEM
    ]
    builds = [
        *(body(f"raise {each}") for each in RAISED), *(source(f"{top}\n{HONEST}") for top in TOPS),
        *map(body, BODIES), *map(source, SOURCES), *FILES, *map(body, returned),
    ]  # fmt: skip
    named = [(name, body("return 2")) for name in NAMES]
    return [*named, *((b"hostile %03d" % number, build) for number, build in enumerate(builds))]


SAMPLE = (
    (b"M\xfcller", source(HONEST.replace("1", "2"))),
    (b"=cmd()\n", body("raise ValueError('\\ud800' * 10**7)")),
    (b"import", source("raise RuntimeError('\\udcff')")), (b"large", source(SOURCES[0])),
    (b"zero", linked("/dev/zero")), (b"pipe", pipe), (b"folder", folder_for_file),
    (b"linked", linked_folder), (b"loop", loop_of_links), (b"forks", body("import os\nos.fork()\nreturn 2")),
    (b"deep", body(nested_folders("d"))), (b"nested", source("(" * 100_000)),
    (b"repr", body(f"return type('T', (), {{'__repr__': lambda s: {DONE_BY_THEM[0]}}})()")),
    (b"__MACOSX", source(HONEST)),
)  # fmt: skip


# ---------------------------------------------------------------------- rows


def grade_all(
    tmp_path: Path, lesson: Lesson, hostile: list[tuple[bytes, Build]], every: int
) -> list[list[str]]:
    """The rows of a class in which `every` so many submissions an honest one stands."""
    handed_in = tmp_path / "handed in"
    handed_in.mkdir()
    for number in range(0, len(hostile), every):
        student = handed_in / f"honest {number}"
        student.mkdir()
        source(HONEST)(student)
    for name, build in hostile:
        student = Path(os.fsdecode(os.path.join(os.fsencode(handed_in), name)))
        student.mkdir()
        build(student)
    students, _ = students_of(handed_in)
    random.Random(1).shuffle(students)
    for _ in collect(students, tmp_path / "grades.csv", [lesson], LIMITS):
        pass
    with (tmp_path / "grades.csv").open(newline="", encoding="utf-8-sig") as file:
        return list(csv.reader(file))


def check(rows: list[list[str]], hostile: int, honest: int) -> None:
    header, *rows = rows
    assert len(rows) == hostile + honest and {len(row) for row in rows} == {len(header)}
    assert [row[:3] for row in rows if row[0].startswith("honest") and row[1] != "3"] == []
    for row in rows:
        assert 0 <= float(row[1]) <= 3
        assert all(cell.isprintable() and cell.lstrip()[:1] not in ("=", "+", "-", "@") for cell in row), row
        assert "NOT GRADED" not in row[-1], row
        assert len(row[-1]) < 2000


@pytest.mark.skipif(not posix, reason="links, pipes and names that are no UTF-8")
def test_each_has_its_row(tmp_path: Path, lesson: Lesson) -> None:
    rows = grade_all(tmp_path, lesson, list(SAMPLE), every=7)
    check(rows, hostile=len(SAMPLE) - 1, honest=2)  # __MACOSX is no student
    said = {row[0]: row[-1] for row in rows}
    assert said["large"].startswith("07: failed: exercise.py is too large: more than 4 MB")
    assert "exercise.py is a link out of the submission" in said["zero"] and "link out" in said["linked"]
    assert "exercise.py is no file" in said["pipe"] and "exercise.py is no file" in said["folder"]
    assert "M\\xfcller" in said and "'=cmd()\\n" in said
    assert r"RuntimeError: \udcff" in said["import"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not posix, reason="links, pipes and names that are no UTF-8")
def test_two_hundred_have_their_rows(tmp_path: Path, lesson: Lesson) -> None:
    hostile = kinds()
    assert len(hostile) >= 200
    check(grade_all(tmp_path, lesson, hostile, every=10), len(hostile), -(-len(hostile) // 10))
