"""Every lesson that has exercises: stubs score nothing, right solutions everything, wrong ones not all.

Solutions and mutants run in this process; tests/course/test_grading_isolation.py has the child processes.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lessons.grading import Exercise, Failure, student_cache
from lessons.grading.isolate import about_the_file
from lessons.grading.mutants import Mutant, load_mutants
from lessons.grading.progress import progress, remember
from lessons.grading.report import github_annotations, gradescope, summary, table
from lessons.grading.report import text as report_text
from lessons.grading.run import Result, grade_module, run_exercise, verdict
from lessons.grading.show import page
from lessons.grading.spec import (
    ROOT,
    Case,
    Lesson,
    find_folder,
    lesson_folders,
    load_file,
    load_lesson,
    signature_drift,
    solved_functions,
    todo_functions,
)
from minirad.errors import InvariantError

LESSONS = {folder.name: load_lesson(folder) for folder in lesson_folders()}
WRONG = [(lesson, mutant) for lesson in LESSONS.values() for mutant in load_mutants(lesson)]
WITH_AN_ENGINE = ("08_nine_steps",)  # for each case, and for seconds
every_lesson = pytest.mark.parametrize("lesson", LESSONS.values(), ids=LESSONS)


def test_the_lessons_are_there() -> None:
    assert {"02_radix_tree", "03_locks_and_eviction"} <= set(LESSONS)


@every_lesson
def test_stubs_score_nothing_and_say_todo(lesson: Lesson) -> None:
    results = grade_module(lesson, load_file(lesson.folder / "exercise.py"))
    assert [(r.status, r.points) for r in results] == [("todo", 0.0)] * len(results)
    assert all(r.words.startswith("todo") for r in results)


@every_lesson
def test_the_reference_gets_full_marks(lesson: Lesson) -> None:
    results = grade_module(lesson, load_file(lesson.folder / "solution.py"), "ada")
    assert [r for r in results if not r.passed] == []
    assert sum(r.points for r in results) == lesson.points > 0


def with_a_seed(case: Case) -> bool:
    """Whether a case is another one for every student."""
    return len(inspect.signature(case).parameters) > 1


def only(exercise: Exercise, wanted: Callable[[Case], bool]) -> Exercise:
    """The exercise with some of its cases."""
    return dataclasses.replace(exercise, cases=[case for case in exercise.cases if wanted(case)])


def students(lesson: Lesson) -> list[str]:
    """Forty ids; ten where each runs an engine for seconds."""
    return [f"student {number}" for number in range(10 if lesson.name in WITH_AN_ENGINE else 40)]


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute on a quiet machine
@every_lesson
def test_no_student_id_makes_a_right_solution_wrong(lesson: Lesson) -> None:
    """The cases that are the same for all are in the tests above and below."""
    exercises = [only(exercise, with_a_seed) for exercise in lesson.exercises]
    assert any(exercise.cases for exercise in exercises)
    for path in (lesson.folder / "solution.py", *sorted(lesson.folder.glob("alternative*.py"))):
        module = load_file(path)
        for exercise, student in itertools.product(exercises, students(lesson)):
            assert run_exercise(lesson, exercise, module, student).passed, (path.name, student, exercise.name)


@pytest.mark.parametrize(
    ("lesson", "path"),
    [
        pytest.param(each, path, marks=[pytest.mark.slow] if path.stem != "alternative" else [])
        for each in LESSONS.values()
        for path in sorted(each.folder.glob("alternative*.py"))
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else value.name,
)
def test_a_solution_built_otherwise_gets_full_marks(lesson: Lesson, path: Path) -> None:
    results = grade_module(lesson, load_file(path))
    assert [r for r in results if not r.passed] == []


@pytest.mark.parametrize(("lesson", "mutant"), WRONG, ids=[f"{each.name}-{m.about}" for each, m in WRONG])
def test_mutants_lose_the_points_of_what_they_break(lesson: Lesson, mutant: Mutant) -> None:
    seedless = only(lesson.exercise(mutant.breaks), lambda case: not with_a_seed(case))
    result = run_exercise(lesson, seedless, mutant.build(lesson))
    assert result.status == "failed", f"some students get away with it: {mutant.about}"
    assert result.points == 0 and result.words


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute on a quiet machine
@every_lesson
def test_no_student_id_lets_a_mutant_through(lesson: Lesson) -> None:
    # Lesson 08 runs an engine for each; that its mutants fall without a seed (above) says the same.
    ids = ["ada", "bob"] if lesson.name in WITH_AN_ENGINE else students(lesson)
    let_through = [
        (mutant.breaks, mutant.about, student)
        for mutant in load_mutants(lesson)
        for student in passes_with(lesson, mutant, ids)
    ]
    assert let_through == []


def passes_with(lesson: Lesson, mutant: Mutant, ids: list[str]) -> list[str]:
    """Students who get the points with this. What caught it for one is tried first for the next."""
    exercise = lesson.exercise(mutant.breaks)
    cases, passed = list(exercise.cases), []
    for student in ids:
        impl = mutant.build(lesson)
        for case in list(cases):
            found = run_exercise(lesson, dataclasses.replace(exercise, cases=[case]), impl, student)
            if found.status == "failed":
                cases.remove(case)
                cases.insert(0, case)
                break
        else:
            passed.append(student)
    return passed


@every_lesson
def test_every_exercise_has_mutants_enough(lesson: Lesson) -> None:
    count = Counter(mutant.breaks for mutant in load_mutants(lesson))
    enough = 8 if lesson.name < "09" else 10
    assert {each.name: count[each.name] for each in lesson.exercises if count[each.name] < enough} == {}


@every_lesson
def test_stubs_and_solutions_are_called_alike(lesson: Lesson) -> None:
    assert signature_drift(lesson) == []


@every_lesson
def test_a_lesson_has_its_pages(lesson: Lesson) -> None:
    for name in ("README.md", "exercise.py", "exercises.py", "test_lesson.py", "teacher.md"):
        assert (lesson.folder / name).is_file(), f"{lesson.name} has no {name}"


def one_line(text: str) -> str:
    """Without what only Markdown needs."""
    return " ".join(text.replace("`", "").split())


@every_lesson
def test_every_exercise_has_hints_and_the_page_folds_the_same(lesson: Lesson) -> None:
    page = (lesson.folder / "README.md").read_text(encoding="utf-8")
    folds = re.findall(r"<details><summary>(\w+): [^<]+</summary>\n\n(.+?)</details>", page, re.DOTALL)
    hints = [(each.name, one_line(hint)) for each in lesson.exercises for hint in each.hints]
    if lesson.name < "10":
        assert [(name, one_line(text)) for name, text in folds] == hints
    assert {name for name, _ in folds} >= {each.name for each in lesson.exercises}
    assert all(len(each.hints) in (2, 3) for each in lesson.exercises)


@every_lesson
def test_a_lesson_asks_for_a_prediction(lesson: Lesson) -> None:
    """On its page, and in its notebook before the first picture, behind the imports alone."""
    page = (lesson.folder / "README.md").read_text(encoding="utf-8")
    assert re.search(r"Predict first: [^.]+\?", page)
    text = (ROOT.parent / "notebooks" / f"{lesson.name}.md").read_text(encoding="utf-8")
    cells = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    at = next(at for at, cell in enumerate(cells) if f'predict(\n    "{lesson.name[:2]}"' in cell
              or f'predict("{lesson.name[:2]}"' in cell)  # fmt: skip
    for before in cells[:at]:
        imports = (ast.Import, ast.ImportFrom, ast.Expr)  # and torch.set_num_threads(1)
        assert all(isinstance(node, imports) for node in ast.parse(before).body), before
    answers = [cell for cell in cells[at + 1 :] if ".answer(" in cell]
    assert answers and all("assert " in cell for cell in answers)


def test_a_failure_says_the_hint_that_fits_and_where_the_next_one_is() -> None:
    lesson = load_lesson(find_folder("01"))
    exercise = lesson.exercise("reusable_prefix")
    right = load_file(lesson.folder / "solution.py").reusable_prefix
    said = []
    for wrong in (
        lambda cached, prompt, page_size=1: 1,
        lambda cached, prompt, page_size=1: right([*cached, 0], [*prompt, 0], page_size),
        lambda cached, prompt, page_size=1: right(cached, prompt),
    ):
        said.append(run_exercise(lesson, exercise, SimpleNamespace(reusable_prefix=wrong)).hint)  # type: ignore[arg-type]
    where = "the next: lessons/01_kv_cache/README.md"
    ends = [f" (1 of 3; {where})", f" (2 of 3; {where})", " (3 of 3)"]
    assert said == [hint + end for hint, end in zip(exercise.hints, ends, strict=True)]


@every_lesson
def test_open_cases_do_not_need_what_is_withheld(lesson: Lesson) -> None:
    text = (lesson.folder / "exercises.py").read_text(encoding="utf-8")
    for name in ("solution", "hidden", "mutants"):
        assert not re.search(rf'"{name}(\.py)?"|import {name}', text)


# ---------------------------------------------------------------------- the machinery


def made_lesson(tmp_path: Path, exercise: str, solution: str, spec: str) -> Lesson:
    for name, text in (("exercise", exercise), ("solution", solution), ("exercises", spec)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    return load_lesson(tmp_path)


ONE = "from lessons.grading import Exercise\nEXERCISES = [Exercise('f', 1, [])]\n"


@pytest.mark.parametrize(
    ("stub", "solution"),
    [
        ("def f(a): ...", "def f(a, b): ..."),
        ("def f(a): ...", "def f(b): ..."),
        ("def f(a, b=1): ...", "def f(a, b=2): ..."),
        ("def f(a, *, b): ...", "def f(a, b): ..."),
        ("def f(a: int): ...", "def f(a: str): ..."),
        ("def g(a): ...", "def f(a): ..."),
    ],
)
def test_signature_drift_is_found(tmp_path: Path, stub: str, solution: str) -> None:
    assert signature_drift(made_lesson(tmp_path, stub, solution, ONE))
    assert not signature_drift(made_lesson(tmp_path, solution, solution, ONE))


def test_stubs_are_known_by_their_bodies() -> None:
    text = 'def a():\n    "text"\n    raise NotImplementedError("todo")\ndef b():\n    return 1\n'
    text += "def c():\n    raise ValueError\nasync def d():\n    raise NotImplementedError\n"
    assert todo_functions(text) == {"a", "d"}
    assert solved_functions(text.encode(), "abcd") == ["b", "c"]


def test_a_fault_costs_points_only_once() -> None:
    lesson = load_lesson(find_folder("02"))
    broken = load_file(lesson.folder / "solution.py")
    broken.common_prefix = lambda a, b, page_size=1: 0
    assert [r.exercise for r in grade_module(lesson, broken) if not r.passed] == ["common_prefix"]


def test_what_a_case_raises_becomes_words() -> None:
    def boom(impl: object) -> None:
        """While adding."""
        raise ValueError("no such thing")

    def leave(impl: object) -> None:
        """While leaving."""
        raise SystemExit(3)

    def fail(impl: object) -> None:
        raise Failure("three instead of four", [("a tree", "text")])

    lesson = Lesson(Path("x"), "x", ())
    impl = SimpleNamespace(f=print)
    found = [run_exercise(lesson, Exercise("f", 1, [case]), impl) for case in (boom, leave, fail)]  # type: ignore[arg-type]
    assert [(r.status, r.words) for r in found] == [
        ("failed", "While adding: ValueError: no such thing"),
        ("ended", "While leaving: it called sys.exit(3)"),
        ("failed", "three instead of four"),
    ]
    assert "no function g" in run_exercise(lesson, Exercise("g", 1, [fail]), impl).words  # type: ignore[arg-type]


def test_the_same_student_gets_the_same_cases_and_another_one_others() -> None:
    seen: list[float] = []
    lesson = Lesson(Path("x"), "x", ())
    exercise = Exercise("f", 1, [lambda impl, rng: seen.append(rng.random())])
    for student in ("ada", "ada", "bob"):
        run_exercise(lesson, exercise, SimpleNamespace(f=print), student)  # type: ignore[arg-type]
    assert seen[0] == seen[1] != seen[2]


# ---------------------------------------------------------------------- reports


def some_results() -> list[Result]:
    lesson = load_lesson(find_folder("03"))
    mutant = next(m for m in load_mutants(lesson) if m.about.startswith("stale keys"))
    return grade_module(lesson, mutant.build(lesson))


def test_reports_name_the_exercise_and_the_case() -> None:
    results = some_results()
    words = "after touching A (the oldest unlocked leaf was B), evict(2) freed A, B; B, C had to go"
    assert "evict" in table(results) and "7/10" in table(results)
    graded = gradescope(results)
    assert graded["score"] == 7 and words in json.dumps(graded)
    assert f"| failed: {words} |" in summary(results)
    (line,) = github_annotations(results)
    assert line.startswith("::error file=lessons/03_locks_and_eviction/exercise.py,line=")
    assert words in line and "\n" not in line


def test_the_failing_tree_is_drawn() -> None:
    html = page(some_results())
    assert html.count("<svg") == 2 and "after your code" in html


def test_progress_is_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIRAD_PROGRESS", str(tmp_path / "progress.json"))
    name = "03_locks_and_eviction"
    assert progress().points(name) == (0, 10)
    remember(some_results())
    assert progress().points(name) == (7, 10)
    assert "7 of 10" in progress()._repr_html_() and "7 of 10 points, 4 of 5 exercises" in repr(progress())
    (tmp_path / "progress.json").write_text("not JSON", encoding="utf-8")
    assert progress().points(name) == (0, 10)


def test_what_is_wrong_with_the_file_is_said_once() -> None:
    lesson = load_lesson(find_folder("02"))
    results = list(about_the_file(lesson, lesson.exercises, "failed", "exercise.py, line 3 is no Python", 3))
    told = [report_text(results), json.dumps(gradescope(results)), summary(results), page(results)]
    assert [words.count("line 3 is no Python") for words in told] == [1, 1, 1, 1]
    assert not any("Hint" in words for words in told)
    (line,) = github_annotations(results)
    assert "exercise.py,line=3,title=02_radix_tree%3A failed::exercise.py, line 3" in line


def test_words_are_bounded_and_can_be_written() -> None:
    lesson = load_lesson(find_folder("02"))
    found = verdict(lesson, lesson.exercises[0], "failed", "\ud800\x1b[2J\u202e" + "x" * 20_000_000)
    assert found.words.startswith(r"\ud800\x1b[2J\u202ex") and len(found.words) < 5000
    report = json.dumps(gradescope([found]), ensure_ascii=False) + page([found]) + summary([found])
    assert report.encode("utf-8") and "\x1b" not in report


@pytest.mark.parametrize(
    ("number", "name", "returned", "words"),
    [
        ("02", "split_node", "half", "after split_node returned 'half': AttributeError"),
        ("02", "match_prefix", 7, "match_prefix([1, 2]) returned 7; it should be (slots, node)"),
        ("03", "lru_key", None, "after lru_key returned None: TypeError"),
        ("04", "alloc_extend", 3.5, "it returned 3.5, which is no list of numbers"),
        ("04", "page_table", None, "returned None, which is no table"),
        ("06", "plan_chunks", [None], "after plan_chunks returned [None]: TypeError"),
        ("07", "lpm_order", "abc", "after lpm_order returned 'abc': AttributeError"),
    ],
)
def test_a_wrong_type_is_shown(number: str, name: str, returned: object, words: str) -> None:
    lesson = load_lesson(find_folder(number))
    impl = load_file(lesson.folder / "solution.py")
    exercise = next(each for each in lesson.exercises if name in (*each.asks_for, each.name))
    setattr(impl, name, lambda *args, **more: returned)
    exercise = dataclasses.replace(exercise, cases=exercise.cases[:1]) if number == "03" else exercise
    assert words in run_exercise(lesson, exercise, impl).words


def test_sizes_that_were_not_kept_are_said_in_full() -> None:
    lesson = load_lesson(find_folder("03"))
    impl = load_file(lesson.folder / "solution.py")
    right = impl.evict

    def forgets(tree: Any, count: int) -> int:
        freed = right(tree, count)
        tree.evictable_size += freed
        return int(freed)

    impl.evict = forgets
    assert run_exercise(lesson, lesson.exercise("evict"), impl).words == (
        "after A, B and C came in this order, evict(1) left evictable_size at 3; "
        "it should be 2 (3 before, 1 token went)"
    )


# ---------------------------------------------------------------------- the engine on a student's tree


def write_part(tmp_path: Path, lesson: str, *names: str) -> Path:
    """A student's file in which only these functions are written."""
    folder = find_folder(lesson)
    done = (folder / "solution.py").read_text(encoding="utf-8")
    stubs = "".join(
        f"\n\ndef {name}(*a):\n    raise NotImplementedError('todo')\n"
        for name in todo_functions((folder / "exercise.py").read_text(encoding="utf-8")) - set(names)
    )
    path = tmp_path / f"{lesson}.py"
    path.write_text(done + stubs, encoding="utf-8")
    return path


PROMPTS = [
    [5, 6, 7, 8, 9],
    [5, 6, 7, 20, 21, 22],
    [30, 31, 32, 33],
    [5, 6, 7, 8, 9, 10],
    [30, 31, 40],
    [50] * 9,
]


@pytest.mark.parametrize(
    ("lesson", "names"),
    [
        ("02", ("match_prefix",)),
        ("02", ("common_prefix", "split_node", "match_prefix")),
        ("02", ("common_prefix", "split_node", "match_prefix", "insert")),
        ("03", ("inc_lock_ref", "dec_lock_ref")),
        ("03", ("inc_lock_ref", "dec_lock_ref", "offer", "evict", "lru_key")),
    ],
)
@pytest.mark.parametrize("page_size", [1, 2])
def test_the_engine_runs_on_it(make_engine, tmp_path: Path, lesson: str, names, page_size: int) -> None:
    from minirad.config import SamplingParams

    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    own = make_engine(
        student_cache(write_part(tmp_path, lesson, *names), page_size), kv_tokens=24, page_size=page_size
    )
    ours = make_engine(kv_tokens=24, page_size=page_size)
    for prompt in PROMPTS:
        a, b = (engine.generate([prompt], params)[0] for engine in (own, ours))
        assert a.token_ids == b.token_ids
        assert a.cached_tokens == b.cached_tokens or page_size > 1
    assert set(names) - {"lru_key"} <= set(own.cache.parts)


def test_a_broken_tree_says_which_invariant_and_is_drawn(make_engine, tmp_path: Path) -> None:
    from minirad import Recorder
    from minirad.config import SamplingParams

    path = write_part(tmp_path, "02", "common_prefix", "split_node", "match_prefix", "insert")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("    node.slots = node.slots[at:]\n", ""), encoding="utf-8")
    engine = make_engine(student_cache(path))
    with Recorder(engine) as recording:
        engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=2, ignore_eos=True))
        with pytest.raises(InvariantError, match=r"after your \w+: n1 has 2 tokens, but 5 slots"):
            engine.generate([PROMPTS[1]], SamplingParams(max_new_tokens=2))
    assert recording.frames and "slots" in engine.cache.broken


def test_nothing_written_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing is written yet"):
        student_cache(find_folder("02") / "exercise.py")
    with pytest.raises(ValueError, match="not there"):
        student_cache("no/such/file.py")


def test_namespaces_stay_apart_without_the_students_doing(tmp_path: Path) -> None:
    from minirad import RadixKey

    cache = student_cache(write_part(tmp_path, "02", "common_prefix", "split_node", "match_prefix", "insert"))
    cache.insert(RadixKey([1, 2, 3]), [10, 11, 12])
    cache.insert(RadixKey([1, 2, 3], extra_key="b"), [20, 21, 22])
    assert cache.match_prefix(RadixKey([1, 2], extra_key="b")).slots.tolist() == [20, 21]
    assert cache.peek(RadixKey([1, 2], extra_key="c")) == 0
    assert [list(node.key) for node in cache.walk()][1:] == [[1, 2, 3], [1, 2], [3]]


@pytest.mark.parametrize("granularity", ["event", "step"])
def test_a_recording_of_it_can_be_seen_at_any_moment(make_engine, tmp_path: Path, granularity: str) -> None:
    from minirad import Recorder
    from minirad.config import SamplingParams
    from viz.trace import Trace

    names = ("common_prefix", "split_node", "match_prefix", "insert")
    engine = make_engine(student_cache(write_part(tmp_path, "02", *names)))
    with Recorder(engine) as recording:
        for prompt in PROMPTS:
            engine.generate([prompt], SamplingParams(max_new_tokens=3, ignore_eos=True))
    trace = Trace(recording, lambda tokens: str(list(tokens)))
    for index in range(trace.count(granularity)):
        nodes = trace.view(granularity, index).nodes
        assert all(node["parent"] != number for number, node in nodes.items()), index


def test_the_live_page_takes_it_and_shows_where_it_broke(tmp_path: Path, capsys) -> None:
    from viz.live import main

    names = ("common_prefix", "split_node", "match_prefix", "insert")
    path, page_file = write_part(tmp_path, "02", *names), tmp_path / "run.html"
    asked = ["--cache", str(path), "--export", str(page_file), "--steps", "40", "--workload", "chat"]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as editors on Windows save it
    assert main(asked) == 0
    text = path.read_text(encoding="utf-8-sig")
    path.write_text(text.replace("    node.slots = node.slots[at:]\n", ""), encoding="utf-8")
    assert main(asked) == 1 and page_file.exists()
    assert "your tree broke: after your match_prefix: n1 has" in capsys.readouterr().err
    assert main(["--cache", str(find_folder("02") / "exercise.py")]) == 2
    assert "nothing is written yet" in capsys.readouterr().err
