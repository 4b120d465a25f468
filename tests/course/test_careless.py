"""What a careless hand writes: numbers of another make, a `yield` too many, an error from deep inside.

A right solution whose numbers are numpy's stays right; a wrong one is told which of its functions it was.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lessons.grading.cache import StudentCache, student_cache
from lessons.grading.drafting import Yours
from lessons.grading.router import StudentPolicy, student_router
from lessons.grading.run import grade_module, run_exercise
from lessons.grading.shared import as_ints, whole
from lessons.grading.spec import Exercise, Failure, Lesson, expect, lesson_folders, load_file, load_lesson
from lessons.grading.subscriber import Subscriber, SubscriberBroke, student_subscriber
from minirad.cache.node import RadixKey
from minirad.errors import InvariantError, require
from minirad.own_policy import join as join_policy
from minirad.own_policy import policy_from

ALL = [load_lesson(folder) for folder in lesson_folders()]
LESSONS = [lesson for lesson in ALL if lesson.name >= "09"]
ANSWERING = [lesson for lesson in ALL if lesson.name[:2] != "08"]  # whose answers configure an engine


# ---------------------------------------------------------------------- numbers


class SaysEqual:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


@pytest.mark.parametrize("value", [3, 3.0, np.int64(3), np.float32(3), np.array(3)])
def test_a_whole_number_may_be_of_any_make(value: Any) -> None:
    assert whole(value) == 3 and type(whole(value)) is int


@pytest.mark.parametrize(
    "value", [2.5, math.nan, math.inf, "3", b"3", None, np.array([3]), [3], 3j, SaysEqual(), np.True_]
)
def test_what_is_no_whole_number(value: Any) -> None:
    assert whole(value) is None
    with pytest.raises(Failure, match="which is no list of numbers"):
        as_ints([1, value], "f")


def test_an_error_within_a_generator_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        as_ints((1 // each for each in (1, 0)), "f")
    for no_list in (None, 7, "abc"):
        with pytest.raises(Failure, match="f: it returned"):
            as_ints(no_list, "f")


def of_numpy(value: Any) -> Any:
    """The same with numpy's numbers, in whatever it is built of."""
    if type(value) in (int, float):
        return np.int64(value) if isinstance(value, int) and abs(value) < 2**63 else np.float64(value)
    if type(value) in (list, tuple):
        return type(value)(map(of_numpy, value))
    if type(value) is dict:
        return {name: of_numpy(each) for name, each in value.items()}
    return value


def answering(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def answer(*arguments: Any, **more: Any) -> Any:
        return of_numpy(function(*arguments, **more))

    @functools.wraps(function)
    async def answer_later(*arguments: Any, **more: Any) -> Any:
        return of_numpy(await function(*arguments, **more))

    return answer_later if inspect.iscoroutinefunction(function) else answer


def with_numpy(lesson: Lesson) -> ModuleType:
    """The lesson's solution, of which every function that is asked for answers in numpy's numbers."""
    module = load_file(lesson.folder / "solution.py")
    for exercise in lesson.exercises:
        for name in exercise.asks_for:
            asked = getattr(module, name)
            if not isinstance(asked, type):
                setattr(module, name, answering(asked))
            elif hasattr(asked, "choose"):
                asked.choose = answering(asked.choose)
    return module


@pytest.mark.parametrize("lesson", ANSWERING, ids=lambda lesson: lesson.name[:2])
def test_a_right_solution_may_answer_in_numbers_of_numpy(lesson: Lesson) -> None:
    results = grade_module(lesson, with_numpy(lesson), "ada")
    assert [(each.exercise, each.words) for each in results if not each.passed] == []


# ---------------------------------------------------------------------- what is said


def within_a_generator(impl: Any) -> None:
    """A game."""
    for _ in (impl.f(each) for each in (1, 2)):
        pass


def plainly(impl: Any) -> None:
    """A game."""
    done: list[int] = []
    got = impl.f(done)
    expect(bool(done), f"nothing was done, f gave {type(got).__name__}")


@pytest.mark.parametrize(
    ("body", "case", "words"),
    [
        ("return next(iter([]))", within_a_generator, "A game: StopIteration (mine.py, line 2, in f)"),
        ("raise SystemExit(3)", plainly, "A game: it called sys.exit(3) (mine.py, line 2, in f)"),
        ("return f(x)", plainly, 
         "A game: it called itself too deep (RecursionError) (mine.py, line 2, in f)"),
        ("yield x.append(1)", plainly,
         "nothing was done, f gave generator (nothing of f has run: it has a `yield`)"),
        ("return (each for each in x)", plainly, "nothing was done, f gave generator"),
        ("return None", plainly, "nothing was done, f gave NoneType"),
    ],
)  # fmt: skip
def test_words_name_the_function(tmp_path: Path, body: str, case: Any, words: str) -> None:
    (tmp_path / "mine.py").write_text(f"def f(x):\n    {body}\n", encoding="utf-8")
    found = run_exercise(
        Lesson(tmp_path, "", ()), Exercise("f", 1, [case]), load_file(tmp_path / "mine.py"), "ada"
    )
    assert found.words == words


def test_the_file_of_another_lesson_is_recognized(tmp_path: Path) -> None:
    twelve, thirteen = (next(e for e in LESSONS if e.name.startswith(number)) for number in ("12", "13"))
    impl = load_file(thirteen.folder / "exercise.py")
    words = run_exercise(twelve, twelve.exercise("digest"), impl).words
    assert words == (
        "there is no function digest in the file; it has space_of, outdated, to_pairs, to_tokens, ..."
    )
    (tmp_path / "mine.py").write_text("x = 1\n", encoding="utf-8")
    words = run_exercise(twelve, twelve.exercise("digest"), load_file(tmp_path / "mine.py")).words
    assert words == "there is no function digest in the file"


def test_an_async_function_that_nobody_awaits(tmp_path: Path) -> None:
    for more, words in (("", "it is an `async def`"), ("; yield", "it is an `async def` with a `yield`")):
        (tmp_path / "mine.py").write_text(f"async def f(x):\n    x.append(1){more}\n", encoding="utf-8")
        found = run_exercise(
            Lesson(tmp_path, "", ()), Exercise("f", 1, [plainly]), load_file(tmp_path / "mine.py"), "ada"
        )
        assert found.words.endswith(f"(nothing of f has run: {words})")


@pytest.mark.parametrize("returned", [None, "", [], ()])
def test_a_room_that_is_neither_there_nor_not(returned: Any) -> None:
    lesson = next(each for each in LESSONS if each.name.startswith("10"))
    impl = load_file(lesson.folder / "solution.py")
    impl.make_host_room = lambda tiers, count: returned
    words = run_exercise(lesson, lesson.exercise("make_host_room"), impl).words
    assert f"returned {returned!r}, which is neither True nor False" in words


def test_what_says_that_it_equals_everything_is_no_number() -> None:
    for lesson in LESSONS:
        for exercise in lesson.exercises:
            for name in exercise.asks_for:
                impl = load_file(lesson.folder / "solution.py")
                if isinstance(getattr(impl, name), type) or inspect.iscoroutinefunction(getattr(impl, name)):
                    continue
                if "-> int" not in str(inspect.signature(getattr(impl, name))).replace("'", ""):
                    continue
                setattr(impl, name, lambda *_, **__: SaysEqual())
                short = dataclasses.replace(exercise, cases=[c for c in exercise.cases if takes_no_rng(c)])
                assert not run_exercise(lesson, short, impl).passed, name


LIARS = """
import functools, numpy

def liar(base):
    lies = {"__eq__": lambda *_: True, "__ne__": lambda *_: False, "__hash__": lambda _: 1}
    return type("Liar", (base,), lies)

OF, LIED = {base: liar(base) for base in (int, float, str, list, tuple, dict, set)}, []

def lying(function, *arguments, **more):
    right = function(*arguments, **more)
    if right is None:
        return None
    LIED.append(right)
    if WITHIN and isinstance(right, (list, tuple)):
        lies = [liar(object)()] * len(right)
        return numpy.array(lies, dtype=object) if WITHIN == "array" else type(right)(lies)
    return OF[type(right)](right) if type(right) in OF else liar(object)()
"""


@pytest.mark.slow
@pytest.mark.parametrize("within", ["", "list", "array"])
@pytest.mark.parametrize("lesson", ALL, ids=lambda lesson: lesson.name[:2])
def test_what_says_that_it_is_right_is_no_answer(lesson: Lesson, within: str, tmp_path: Path) -> None:
    """Each function in turn, whatever its answer is, in a file as a learner hands it in."""
    source = (lesson.folder / "solution.py").read_text(encoding="utf-8")
    for exercise in lesson.exercises:
        for name in exercise.asks_for:
            lied = f"WITHIN = {within!r}\n{LIARS}\n{name} = functools.partial(lying, {name})\n"
            (tmp_path / "mine.py").write_text(f"{source}\n{lied}", encoding="utf-8")
            impl = load_file(tmp_path / "mine.py")
            if inspect.iscoroutinefunction(inspect.unwrap(getattr(impl, name).args[0])):
                continue  # the engine awaits it, and what it computes is compared
            result = run_exercise(lesson, exercise, impl)
            assert result.passed == (not impl.LIED), (name, result.words)


def test_an_own_object_may_say_what_it_is_equal_to(tmp_path: Path) -> None:
    """A learner keeps it, and is given it again; so may be what others have an == for."""
    (tmp_path / "mine.py").write_text(
        "import collections, dataclasses, fractions, functools, typing, numpy, torch\n"
        "class Own:\n    def __eq__(self, other): return self is other\n"
        "class Careless:\n    def __eq__(self, other): return self.x == other.x\n"
        "@dataclasses.dataclass\nclass Data:\n    x: int = 1\n"
        "class Named(typing.NamedTuple):\n    x: int = 1\n"
        "class Much(list): pass\n"
        "loop = [1]\nloop.append(loop)\n"
        "@functools.cache\n"
        "def f(): return [Own(), Careless(), Data(), Named(), Much([1]), loop, {1: {2}}, numpy.float64(1),\n"
        "    collections.Counter(), collections.OrderedDict(), fractions.Fraction(1), numpy.ones(2), Own,\n"
        "    torch.ones(2), numpy.True_, None, range(2)]\n",
        encoding="utf-8",
    )

    def case(impl: Any) -> None:
        expect(len(impl.f()) == 17, "all of them")

    found = run_exercise(Lesson(tmp_path, "", ()), Exercise("f", 1, [case]), load_file(tmp_path / "mine.py"))
    assert found.passed, found.words


def takes_no_rng(case: Callable[..., None]) -> bool:
    return len(inspect.signature(case).parameters) == 1


# ---------------------------------------------------------------------- files that drive the page


READERS = [student_cache, student_router, student_subscriber, lambda path: Yours.read([path]), join_policy]
ENDINGS = [
    "import sys; sys.exit(0)",
    "class E(Exception):\n    __str__ = 3\nraise E",
    "class E(BaseException):\n    pass\nraise E",
]


@pytest.mark.parametrize("text", ENDINGS)
@pytest.mark.parametrize("read", READERS)
def test_a_file_that_ends_python_is_refused_in_one_line(tmp_path: Path, text: str, read: Any) -> None:
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.py cannot be loaded: (SystemExit: 0|E)"):
        read(str(tmp_path / "mine.py"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("read", READERS)
def test_a_file_that_an_editor_saved_as_utf_16_is_refused_with_the_cure(
    tmp_path: Path, read: Any, encoding: str
) -> None:
    (tmp_path / "mine.py").write_text("def victim_key(node):\n    return 1\n", encoding=encoding)
    with pytest.raises(
        ValueError, match=r"mine\.py cannot be loaded: .*not saved as UTF-8.*save it as UTF-8"
    ):
        read(str(tmp_path / "mine.py"))


@pytest.mark.parametrize("read", READERS)
def test_a_file_with_a_nul_in_it_is_told_where(tmp_path: Path, read: Any) -> None:
    """It may be UTF-8 all the same: to save it as that would be no cure."""
    (tmp_path / "mine.py").write_bytes(b"# one\nNAME = 'a\0b'\n\n\ndef victim_key(node):\n    return 1\n")
    with pytest.raises(ValueError, match=r"mine\.py cannot be loaded: .*a NUL character is in line 2"):
        read(str(tmp_path / "mine.py"))


class Mine(BaseException):
    """No Exception, and no SystemExit either."""


def calls(error: BaseException, file: Path) -> list[Callable[[], Any]]:
    """A call of a function that raises this, for each of those who call a learner's functions."""

    def leave(*_: Any) -> None:
        raise error

    policy = StudentPolicy(make=lambda: SimpleNamespace(sent=leave, forget=leave))
    return [
        lambda: Yours({"accept": leave}).call("accept", "R1"),
        lambda: Subscriber(file, {"store": leave}).call("store", "the first"),
        lambda: StudentCache(parts={"match_prefix": leave}).match_prefix(RadixKey([1])),
        lambda: policy_from(str(file), leave, "mine"),
        lambda: policy.forget(0) or require(not policy.broken, policy.broken),
    ]


@pytest.mark.parametrize("error", [SystemExit(3), Mine(3), GeneratorExit(3)])
def test_a_function_that_ends_python_is_a_sentence(tmp_path: Path, error: BaseException) -> None:
    name = type(error).__name__
    for call in calls(error, tmp_path / "mine.py"):
        with pytest.raises((InvariantError, SubscriberBroke, ValueError), match=f"raised {name}: 3"):
            call()


def test_ctrl_c_in_a_learners_function_is_ctrl_c(tmp_path: Path) -> None:
    for call in calls(KeyboardInterrupt(), tmp_path / "mine.py"):
        with pytest.raises(KeyboardInterrupt):
            call()
