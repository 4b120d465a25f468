"""The teacher's commands: a classroom repository, and grades for a folder of submissions."""

from __future__ import annotations

import codecs
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lessons.__main__ import _lessons, main
from lessons.grading.classroom import GIVEN, MACHINERY, WITHHELD, write_classroom
from lessons.grading.gradescope import write_autograder
from lessons.grading.run import Result, verdict
from lessons.grading.spec import ROOT, Lesson, find_folder, lesson_folders
from lessons.grading.submission import Refused, find_lesson, read_source

pytestmark = pytest.mark.slow

TREE, LOCKS = "02_radix_tree", "03_locks_and_eviction"


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "core.autocrlf=false"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose last commit holds the files of this one as they are now."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    folder = tmp_path_factory.mktemp("checkout") / "minirad"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache", ".ipynb_checkpoints")
    for name in (*GIVEN, "README.md"):
        source = ROOT.parent / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copyfile(source, folder / name)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "all")
    return folder


@pytest.fixture
def checkout(committed: Path, tmp_path: Path) -> Path:
    """A clone of it, to be spoilt."""
    git(tmp_path, "clone", "-q", "--shared", str(committed), "checkout")
    return tmp_path / "checkout"


@pytest.fixture(autouse=True)
def own_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MINIRAD_PROGRESS", str(tmp_path / "progress.json"))
    return tmp_path / "progress.json"


def hand_in(folder: Path, student: str, inside: str = "", **faults: tuple[str, str]) -> None:
    """A submission of lessons 02 and 03: the solutions, with replacements in one of them."""
    for lesson in (TREE, LOCKS):
        place = folder / student / inside / lesson
        place.mkdir(parents=True)
        text = (find_folder(lesson) / "solution.py").read_text(encoding="utf-8")
        for old, new in faults.values():
            text = text.replace(old, new)
        (place / "exercise.py").write_text(text, encoding="utf-8")


def test_perfect_half_and_stuck_in_one_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, target = tmp_path / "handed in", tmp_path / "grades.csv"
    hand_in(folder, "ada")
    hand_in(folder, "bob", "lessons", a=("return node.last_access", "return -node.last_access"))
    hand_in(folder, "cy", "repo-main/lessons", a=("    page = tree.page_size\n", "    while True: pass\n"))
    (folder / "=dan").mkdir()
    lessons = ["02", "03"]
    assert (
        main(["collect", str(folder), "--csv", str(target), "--patience", "0.6", "--lessons", *lessons]) == 0
    )
    rows = {row["student"]: row for row in csv.DictReader(target.open(encoding="utf-8-sig"))}
    assert {name: row["points"] for name, row in rows.items()} == {
        "ada": "20",
        "bob": "18",
        "cy": "18",
        "'=dan": "0",
    }
    assert rows["ada"]["of"] == "20" and rows["ada"]["remarks"] == ""
    assert rows["bob"]["03 policies (2)"] == "0" and "lru_key lets them go" in rows["bob"]["remarks"]
    assert rows["cy"]["remarks"].startswith(
        "02 split_node: stuck: split_node did not come back within 6 seconds"
    )
    assert rows["cy"]["02 insert (2)"] == "2"
    assert "there is no exercise.py" in rows["'=dan"]["remarks"]
    assert "ada" in capsys.readouterr().out


def test_collect_wants_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", str(tmp_path / "none")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["collect", str(tmp_path / "empty")]) == 2
    assert "one per student" in capsys.readouterr().err


def test_what_a_folder_holds_instead_of_a_lesson_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bare exercise.py counts where one lesson is asked for; a zip, another name or nothing never does."""
    folder, target = tmp_path / "in", tmp_path / "grades.csv"
    solution = (find_folder(TREE) / "solution.py").read_bytes()
    for name in ("Björn/exercise.py", "cy/lessons.zip", "dan/lessons/02/exercise.py", "dan/lessons/3.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(solution)
    (folder / "eve").mkdir()
    for lessons, points in ((["02"], "10"), (["02", "01"], "0")):
        assert main(["collect", str(folder), "--csv", str(target), "--lessons", *lessons]) == 0
        told = capsys.readouterr().err
        rows = {row["student"]: row for row in csv.DictReader(target.open(encoding="utf-8-sig"))}
        assert {name: row["points"] for name, row in rows.items()} == {
            "Björn": points,
            "cy": "0",
            "dan": "0",
            "eve": "0",
        }
        for name, holds in {"cy": "lessons.zip", "dan": "lessons/02, lessons/3.py", "eve": "nothing"}.items():
            remark = f"no lesson was found in {name}, which holds {holds}"
            assert rows[name]["remarks"].startswith(f"{remark}; 02") and f"look at it: {remark}\n" in told
    assert "no lesson was found in Björn, which holds exercise.py" in rows["Björn"]["remarks"]
    main(["grade", "02", "--submission", str(folder / "cy")])
    assert "no lesson was found in cy, which holds lessons.zip" in capsys.readouterr().err


def test_a_spreadsheet_reads_names_right(tmp_path: Path) -> None:
    """Excel takes a table without the mark for another encoding; one that was read is merged all the same."""
    for name in ("Björn", "Zoë"):
        (tmp_path / name / name).mkdir(parents=True)
        command = ["collect", str(tmp_path / name), "--csv", str(tmp_path / f"{name}.csv"), "--lessons", "02"]
        assert main(command) == 0
    tables = [str(tmp_path / f"{name}.csv") for name in ("Björn", "Zoë")]
    assert main(["merge", *tables, "--csv", str(tmp_path / "all.csv")]) == 0
    for table, names in ((tables[0], ["Björn"]), (tmp_path / "all.csv", ["Björn", "Zoë"])):
        data = Path(table).read_bytes()
        assert data.count(codecs.BOM_UTF8) == 1 and data.startswith(codecs.BOM_UTF8 + b"student,")
        assert [line.split(",")[0] for line in data.decode().splitlines()[1:]] == names


@pytest.mark.parametrize("inside", ["lessons", "Lessons", TREE])
def test_one_students_folder_is_no_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: str
) -> None:
    (tmp_path / "ada" / inside).mkdir(parents=True)
    table = tmp_path / "grades.csv"
    assert main(["collect", str(tmp_path / "ada"), "--csv", str(table)]) == 2
    assert f"is one student's folder: it holds {inside}." in capsys.readouterr().err and not table.exists()


def test_a_classroom_has_no_solutions_and_grades_itself(tmp_path: Path, committed: Path) -> None:
    out = tmp_path / "classroom"
    write_classroom(out, source=committed)
    given = [path for path in (out / "lessons").rglob("*") if path.parent.name != "grading"]
    assert [path for path in given if path.name in WITHHELD] == []
    for folder in lesson_folders():
        for name in ("README.md", "exercise.py", "exercises.py", "test_lesson.py"):
            assert (out / "lessons" / folder.name / name).is_file() == (folder / name).is_file()
    assert (out / "notebooks" / "00_tour.ipynb").exists() == (
        ROOT.parent / "notebooks/00_tour.ipynb"
    ).exists()
    assert (out / "notebooks/common.py").is_file() and (out / "viz/predict.py").is_file()
    assert (out / "minirad/model/classroom/weights").is_dir() and (
        out / ".github/workflows/grade.yml"
    ).is_file()
    shutil.copyfile(find_folder(TREE) / "solution.py", out / "lessons" / TREE / "exercise.py")
    clean = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MINIRAD_PROGRESS")
    }
    command = [sys.executable, "-m", "lessons", "grade", "--json", "results.json", "--due", "02"]
    done = subprocess.run(command, cwd=out, env=clean, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "due: 02_radix_tree: done" in done.stdout, done.stdout + done.stderr
    graded = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert graded["score"] == 10
    others = [test for test in graded["tests"] if not test["name"].startswith(TREE)]
    assert [test for test in others if not test["output"].startswith("todo")] == []  # open cases suffice
    noted = json.loads((out / ".minirad-progress.json").read_text(encoding="utf-8"))
    assert noted[TREE]["insert"]["status"] == "passed"  # its own lessons ran, not this repository's


def test_a_classroom_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="exists already"):
        write_classroom(tmp_path)
    with pytest.raises(ValueError, match="lies inside"):
        write_classroom(ROOT / "classroom")


def test_the_command_lists_and_grades(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own_progress: Path
) -> None:
    assert main([]) == 0
    assert f"{TREE}" in capsys.readouterr().out
    hand_in(tmp_path / "in", "ada")
    results = tmp_path / "results.json"
    assert main(["grade", "02", "--submission", str(tmp_path / "in" / "ada"), "--json", str(results)]) == 0
    assert not own_progress.exists()  # another's points are not the learner's
    assert json.loads(results.read_text(encoding="utf-8"))["score"] == 10
    assert "10/10" in capsys.readouterr().out
    assert main(["grade", "99"]) == 2
    assert "there is no lesson '99'" in capsys.readouterr().err


@pytest.mark.parametrize("linked", [False, True])
def test_results_do_not_overwrite_a_submission(
    linked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hand_in(tmp_path / "in", "ada")
    exercise = find_lesson(tmp_path / "in" / "ada", TREE)[0] / "exercise.py"
    before, target = exercise.read_bytes(), exercise
    if linked:
        target = tmp_path / "results.json"
        target.hardlink_to(exercise)
    for words in (
        ("grade", "02", "--submission", str(tmp_path / "in" / "ada"), "--json", str(target)),
        ("collect", str(tmp_path / "in"), "--lessons", "02", "--csv", str(exercise)),
        ("merge", str(exercise), "--csv", str(exercise)),
    ):
        assert main(words) == 2
        said = capsys.readouterr()
        assert said.err.count("\n") == 1 and ("must end in" in said.err or "is read by" in said.err)
        assert exercise.read_bytes() == before


def test_on_github_it_annotates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    hand_in(tmp_path / "in", "bob", a=("length // page_size * page_size", "length"))
    assert main(["grade", "02", "--submission", str(tmp_path / "in" / "bob")]) == 1
    out = capsys.readouterr().out
    assert "::error file=exercise.py,line=" in out and "common_prefix([1, 2, 3, 4, 5]" in out
    assert "### 8 of 10 points" in page.read_text(encoding="utf-8")


def test_pytest_grades_a_lesson(tmp_path: Path, committed: Path) -> None:
    """The learner's way, on a copy whose exercise is half done."""
    out = tmp_path / "classroom"
    write_classroom(out, source=committed)
    text = (find_folder(TREE) / "solution.py").read_text(encoding="utf-8")
    broken = text.replace("        child.last_access = tree.now\n", "")
    (out / "lessons" / TREE / "exercise.py").write_text(broken, encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"lessons/{TREE}",
        f"lessons/{LOCKS}",
    ]
    done = subprocess.run(command, cwd=out, env=clean, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout
    for words in (
        "match_prefix 0/3 failed",
        "insert 2/2 passed",
        "total 7/20",
        "last_access of node",
        "Hint: `last_access = tree.now` for every node on the path",
        "todo: inc_lock_ref",
    ):
        assert words in " ".join(done.stdout.split()), done.stdout
    assert "Traceback" not in done.stdout


# ---------------------------------------------------------------------- what a classroom is made of


def test_a_classroom_holds_nothing_of_the_teachers_own(tmp_path: Path, checkout: Path) -> None:
    stub = (checkout / "lessons" / TREE / "exercise.py").read_bytes()
    solution = (checkout / "lessons" / TREE / "solution.py").read_text(encoding="utf-8")
    mine = ("02_radix_tree/solution_old.py", "02_radix_tree/try/exercise.py", "grading/mine.py", "notes.md")
    for name in ("02_radix_tree/exercise.py", *mine):
        place = checkout / "lessons" / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(solution, encoding="utf-8")
    (checkout / "notebooks" / "02_solved.ipynb").write_text("{}", encoding="utf-8")
    notes = " ".join(write_classroom(tmp_path / "one", source=checkout).notes)
    assert "without your changes: lessons/02_radix_tree/exercise.py" in notes
    assert all(f"lessons/{name}" in notes.partition("not in git")[2] for name in mine)
    git(checkout, "add", "-A", "--", *(f"lessons/{name}" for name in mine), "notebooks")
    git(checkout, "commit", "-qm", "all my files")
    notes = " ".join(write_classroom(tmp_path / "two", source=checkout).notes)
    assert all(f"lessons/{name}" in notes.partition("no part of the course")[2] for name in mine)
    for out in (tmp_path / "one", tmp_path / "two"):
        assert (out / "lessons" / TREE / "exercise.py").read_bytes() == stub
        assert not any((out / "lessons" / name).exists() for name in mine)
        assert not (out / "notebooks" / "02_solved.ipynb").exists()
    git(checkout, "commit", "-qam", "solved")
    with pytest.raises(ValueError, match=r"02_radix_tree/exercise.py is solved .*common_prefix"):
        write_classroom(tmp_path / "three", source=checkout)
    shutil.rmtree(checkout / ".git")
    with pytest.raises(ValueError, match="is no git checkout"):
        write_classroom(tmp_path / "three", source=checkout)
    assert not (tmp_path / "three").exists()


def test_the_list_of_the_machinery_is_whole() -> None:
    assert {path.name for path in (ROOT / "grading").glob("*.py")} == MACHINERY


def test_the_workflow_uploads_and_is_about_what_is_due(tmp_path: Path, committed: Path) -> None:
    yaml = pytest.importorskip("yaml")
    index = "https://example.org/whl/cpu"
    write_classroom(tmp_path / "plain", source=committed)
    write_classroom(tmp_path / "due", [TREE, LOCKS], index, source=committed)
    steps = {}
    for name in ("plain", "due"):
        text = (tmp_path / name / ".github/workflows/grade.yml").read_text(encoding="utf-8")
        steps[name] = yaml.safe_load(text)["jobs"]["grade"]["steps"]
        upload = steps[name][-1]
        assert upload["if"] == "always()" and upload["with"]["path"] == "results.json"
        assert (index in (tmp_path / name / "README.md").read_text(encoding="utf-8")) == (name == "due")
    runs = {name: [step["run"] for step in each if "run" in step] for name, each in steps.items()}
    assert runs["plain"][-1] == "python -m lessons grade --json results.json"
    assert runs["due"][-1] == "python -m lessons grade --json results.json --due 02,03"
    assert runs["due"][0].startswith("pip install 'torch>=") and runs["due"][0].endswith(index)
    assert not any("index-url" in run for run in runs["plain"])


@pytest.mark.parametrize(
    "index", ["ftp://x/y", "x", "https://", "https://a/b c", "https://a/$(id)", "https://me:pw@host/", "'"]
)
def test_an_index_that_is_none(tmp_path: Path, committed: Path, index: str) -> None:
    with pytest.raises(ValueError, match="--torch-index takes"):
        write_classroom(tmp_path / "out", (), index, source=committed)


# ---------------------------------------------------------------------- the command line

WRONG_WORDS: dict[str, tuple[str, ...]] = {
    "no command": ("grad",),
    "no lesson": ("grade", "99"),
    "no lesson due": ("grade", "01", "--due", "99"),
    "due, not graded": ("grade", "01", "--due", "02"),
    "due nothing": ("classroom", "out", "--due", ""),
    "no patience": ("grade", "01", "--patience", "0"),
    "patience nan": ("grade", "01", "--patience", "nan"),
    "no folder": ("grade", "01", "--submission", "none"),
    "no folder for results": ("grade", "01", "--json", "none/results.json"),
    "no such user": ("grade", "01", "--user", "no-such-user"),
    "root": ("grade", "01", "--user", "root"),
    "nothing to collect": ("collect", "none"),
    "no table": ("merge", "none.csv"),
    "classroom there": ("classroom", "."),
    "zip nowhere": ("gradescope", "none/out.zip"),
    "index": ("gradescope", "out.zip", "--torch-index", "x y"),
}


@pytest.mark.parametrize("name", WRONG_WORDS)
def test_a_mistake_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    try:
        code = main(WRONG_WORDS[name])
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    assert code == 2 and said.err.count("\n") == 1 and not said.out, said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "inside", ["lessons", "", "minirad-main/lessons", "a/b/lessons", "my folder", "lessons/lessons"]
)
def test_grade_and_collect_find_the_same(tmp_path: Path, inside: str) -> None:
    student = tmp_path / "ada"
    for place in (inside, ".git/lessons", "__MACOSX/lessons", ".venv/lessons"):
        (student / place / LOCKS).mkdir(parents=True)
        (student / place / LOCKS / "exercise.py").write_text(place, encoding="utf-8")
    found, remark = find_lesson(student, LOCKS)
    assert remark == ""
    assert (found / "exercise.py").read_text(encoding="utf-8") == inside
    assert find_lesson(student / inside / LOCKS, LOCKS) == (student / inside / LOCKS, "")


def test_of_several_the_nearest_to_the_top_is_taken(tmp_path: Path) -> None:
    for place in ("old/lessons", "lessons", "a"):
        (tmp_path / place / TREE).mkdir(parents=True)
        (tmp_path / place / TREE / "exercise.py").touch()
    name = tmp_path.name
    remark = f"{name}/lessons/{TREE} was graded, not {name}/a/{TREE}, {name}/old/lessons/{TREE}"
    assert find_lesson(tmp_path, TREE) == (tmp_path / "lessons" / TREE, f"of several {TREE} {remark}")
    (tmp_path / "exercise.py").touch()
    assert find_lesson(tmp_path, LOCKS) == (tmp_path / LOCKS, "")
    assert find_lesson(tmp_path, LOCKS, alone=True) == (tmp_path, "")


def test_capitals_make_no_difference(tmp_path: Path) -> None:
    place = tmp_path / "LESSONS" / TREE.upper()
    place.mkdir(parents=True)
    (place / "exercise.py").touch()
    found, remark = find_lesson(tmp_path, TREE)
    assert found.samefile(place) and remark == ""
    assert find_lesson(place, TREE) == (place, "")


def test_a_closed_pipe_ends_quietly_and_says_not_that_all_passed() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "lessons"], stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (2, b"")


@pytest.mark.skipif(os.name != "posix", reason="no such signals there")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
@pytest.mark.parametrize("words", ["collect {0} --csv {1} --lessons 01", "grade 01 --submission {0}/ada"])
def test_who_ends_the_grader_ends_the_submission(tmp_path: Path, name: str, words: str) -> None:
    """Else a loop without an end runs on for ever, and its folder stays."""
    place, trace, temporary = tmp_path / "handed in" / "ada", tmp_path / "child", tmp_path / "temporary"
    for folder in (place, temporary):
        folder.mkdir(parents=True)
    loop = f"import os, pathlib\nat = pathlib.Path({str(trace)!r})\n"
    loop += "at.with_suffix('.new').write_text(str(os.getpid()))\nat.with_suffix('.new').rename(at)\n"
    (place / "exercise.py").write_text(f"{loop}while True: pass\n")
    asked = [each.format(place.parent, tmp_path / "grades.csv") for each in words.split()]
    process = subprocess.Popen(
        [sys.executable, "-m", "lessons", *asked, "--patience", "60"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not trace.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(trace.read_text())
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=60)
    said = "interrupted" if name == "SIGINT" else f"ended by {name}"
    assert (process.returncode, err) == (128 + getattr(signal, name), f"python -m lessons: {said}\n")
    assert list(temporary.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_choice_among_several_is_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the table, on stderr, and in what Gradescope shows: both are named."""
    folder, target, shown = tmp_path / "in", tmp_path / "grades.csv", tmp_path / "results.json"
    for one in ("ada", "bob"):
        (folder / "team" / one / TREE).mkdir(parents=True)
        (folder / "team" / one / TREE / "exercise.py").touch()
    told = f"of several {TREE} team/ada/{TREE} was graded, not team/bob/{TREE}"
    assert main(["collect", str(folder), "--csv", str(target), "--lessons", "02"]) == 0
    assert f"look at it: {told}\n" in capsys.readouterr().err
    (row,) = csv.DictReader(target.open(encoding="utf-8-sig"))
    assert row["remarks"].startswith(f"{told}; 02")
    main(["grade", "02", "--submission", str(folder / "team"), "--json", str(shown)])
    assert f"look at it: {told}\n" in capsys.readouterr().err
    assert json.loads(shown.read_text(encoding="utf-8"))["output"] == f"0 of 10 points\n{told}"


def test_lessons_may_be_named_as_due_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in" / "ada").mkdir(parents=True)
    tables = []
    folders = f"{find_folder('01')},{find_folder(TREE)}"
    for words in (["1,02"], ["01", "02"], ["02_radix_tree, 1", "2"], [folders]):
        table = tmp_path / "grades.csv"
        assert main(["collect", str(tmp_path / "in"), "--csv", str(table), "--lessons", *words]) == 0
        [row] = csv.DictReader(table.open(encoding="utf-8-sig"))
        tables.append(sorted(row))
        table.unlink()
    assert all(table == tables[0] for table in tables)
    assert all(any(column.startswith(number) for column in tables[0]) for number in ("01", "02"))
    (tmp_path / "a,b" / TREE).mkdir(parents=True)  # by its path
    assert [lesson.name for lesson in _lessons([str(tmp_path / "a,b" / TREE)])] == [TREE]
    for wrong in ("02,", "02,99", ","):
        assert main(["collect", str(tmp_path / "in"), "--lessons", wrong]) == 2
        assert "there is no lesson" in capsys.readouterr().err


def test_a_file_saved_as_utf_16_is_told_the_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    solution = find_folder(TREE) / "solution.py"
    (tmp_path / TREE).mkdir()
    (tmp_path / TREE / "exercise.py").write_text(solution.read_text(encoding="utf-8"), encoding="utf-16")
    main(["grade", "02", "--submission", str(tmp_path)])
    told = capsys.readouterr()
    assert "exercise.py cannot be imported: ValueError: it is not saved as UTF-8" in told.out + told.err
    assert "0/10" in told.out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in" / "ada").mkdir(parents=True)
    table = tmp_path / "grades.csv"
    assert main(["collect", str(tmp_path / "in"), "--csv", str(table), "--lessons", "02"]) == 0
    for words in (
        ["merge", str(table), "--csv", "/dev/full"],
        ["collect", str(tmp_path / "in"), "--csv", "/dev/full", "--lessons", "02"],
        ["grade", "02", "--json", "/dev/full"],
    ):
        capsys.readouterr()
        assert main(words) == 2
        assert "/dev/full" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "head", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\n# M\xfcller\n"], ids=["byte-order mark", "coding"]
)
def test_a_source_is_read_as_python_reads_it(tmp_path: Path, head: bytes) -> None:
    folder = find_folder("01")
    place = tmp_path / "in" / "ada" / folder.name
    place.mkdir(parents=True)
    (place / "exercise.py").write_bytes(head + (folder / "solution.py").read_bytes())
    table = tmp_path / "grades.csv"
    assert main(["collect", str(tmp_path / "in"), "--csv", str(table), "--lessons", "01"]) == 0
    assert [row["points"] for row in csv.DictReader(table.open(encoding="utf-8-sig"))] == ["8"]


def test_what_is_no_student_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handed_in = tmp_path / "in"
    for name in ("ada", "__MACOSX", ".git"):
        (handed_in / name).mkdir(parents=True)
    (handed_in / "bob.zip").touch()
    if os.name == "posix":
        os.symlink("ada", handed_in / "eve")
    table = tmp_path / "grades.csv"
    assert main(["collect", str(handed_in), "--csv", str(table), "--lessons", "01"]) == 0
    assert [row["student"] for row in csv.DictReader(table.open(encoding="utf-8-sig"))] == ["ada"]
    said = capsys.readouterr().err
    assert "bob.zip (no folder)" in said and "MACOSX" not in said
    assert os.name != "posix" or "eve (a link)" in said


def test_what_cannot_be_read_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is put into the system's mouth."""

    def lstat(file: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lessons.grading.submission.os.lstat", lstat)
    with pytest.raises(Refused, match=r"exercise.py cannot be read: Permission denied"):
        read_source(tmp_path, tmp_path)
    monkeypatch.undo()
    with pytest.raises(Refused, match=r"there is no exercise.py in "):
        read_source(tmp_path, tmp_path)


def test_where_the_grader_itself_fails_the_row_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def grade(lesson: Lesson, folder: Path, *args: Any, root: Path) -> Iterator[Result]:
        if root.name == "bob":
            raise OSError(28, "No space left on device")
        yield from (verdict(lesson, exercise, "passed") for exercise in lesson.exercises)

    for name in ("ada", "bob", "zoe"):
        (tmp_path / "in" / name).mkdir(parents=True)
    monkeypatch.setattr("lessons.grading.collect.grade", grade)
    table = tmp_path / "grades.csv"
    assert main(["collect", str(tmp_path / "in"), "--csv", str(table), "--lessons", "01"]) == 0
    rows = {row["student"]: row for row in csv.DictReader(table.open(encoding="utf-8-sig"))}
    assert {name: row["points"] for name, row in rows.items()} == {"ada": "8", "bob": "0", "zoe": "8"}
    assert "NOT GRADED" in rows["bob"]["remarks"] and "No space left" in rows["bob"]["remarks"]
    monkeypatch.undo()
    monkeypatch.setattr("lessons.grading.isolate.START", "raise ImportError('numpy is not installed')")
    hand_in(tmp_path / "two", "ada")
    assert main(["collect", str(tmp_path / "two"), "--csv", str(table), "--lessons", "02"]) == 2
    assert "own process did not start" in capsys.readouterr().err


# ---------------------------------------------------------------------- merging


def table_of(path: Path, *rows: str, header: str = "student,points,of,01 f (2),remarks") -> Path:
    path.write_text("\n".join([header, *rows, ""]), encoding="utf-8")
    return path


def test_tables_are_merged(tmp_path: Path) -> None:
    one = table_of(tmp_path / "1.csv", "zoe,2,2,2,", '\'=cmd(),0,2,0,"a, b"')
    two = table_of(tmp_path / "2.csv", "ada,0,2,0,todo")
    three = table_of(tmp_path / "3.csv")
    out = tmp_path / "all.csv"
    assert main(["merge", str(one), str(two), str(three), "--csv", str(out)]) == 0
    rows = list(csv.DictReader(out.open(encoding="utf-8-sig")))
    assert [row["student"] for row in rows] == ["'=cmd()", "ada", "zoe"] and rows[0]["remarks"] == "a, b"
    assert out.read_bytes().startswith(b"\xef\xbb\xbfstudent,") and out.read_bytes().count(b"\r\n") == 4


def test_a_merge_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, out = table_of(tmp_path / "1.csv", "zoe,2,2,2,"), tmp_path / "all.csv"
    out.write_text("of last year", encoding="utf-8")

    opened = Path.open

    def limited(path: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        file = opened(path, mode, *args, **more)
        return mock.MagicMock(wraps=file, write=full) if "w" in mode else file

    def full(data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", limited)
    assert main(["merge", str(one), "--csv", str(out)]) == 2
    assert f"No space left on device: '{out}'" in capsys.readouterr().err
    monkeypatch.undo()
    assert out.read_text(encoding="utf-8") == "of last year"


@pytest.mark.parametrize(
    ("rows", "header", "words"),
    [
        (("ada,9,2,9,",), None, "do not add up"),
        (("ada,2,2,1,",), None, "do not add up"),
        (("ada,nan,2,nan,",), None, "do not add up"),
        (("ada,1,2",), None, "do not add up"),
        (("bob,2,2,2,",), None, "bob is in"),
        ((), "student,points,of,02 f (2),remarks", "other columns"),
        ((), "name,grade", "no table of"),
        ((), "", "no table of"),
        ((), "\0", "no table of"),
    ],
)
def test_a_table_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: tuple[str, ...], header: str | None, words: str
) -> None:
    bob = table_of(tmp_path / "bob.csv", "bob,1,2,1,")
    bad = table_of(tmp_path / "bad.csv", *rows, **({} if header is None else {"header": header}))
    assert main(["merge", str(bob), str(bad), "--csv", str(tmp_path / "out.csv")]) == 2
    said = capsys.readouterr().err
    assert words in said and "bad.csv" in said and said.count("\n") == 1
    assert not (tmp_path / "out.csv").exists()
    assert main(["merge", str(bob), "--csv", str(bob)]) == 2
    assert bob.read_text(encoding="utf-8").count("bob,1") == 1


# ---------------------------------------------------------------------- Gradescope


def test_the_autograder_holds_what_it_needs(tmp_path: Path, committed: Path) -> None:
    out = tmp_path / "autograder.zip"
    write_autograder(out, [TREE], "https://example.org/whl/cpu", source=committed)
    with zipfile.ZipFile(out) as archive:
        names = set(archive.namelist())
        setup, run = (archive.read(name).decode() for name in ("setup.sh", "run_autograder"))
        modes = {entry.filename: entry.external_attr >> 16 & 0o777 for entry in archive.infolist()}
    assert modes["setup.sh"] == modes["run_autograder"] == 0o755
    assert {f"course/lessons/{TREE}/{name}.py" for name in ("hidden", "solution", "exercises")} <= names
    extra = {f"course/lessons/{TREE}/{name}" for name in ("alternative.py", "mutants.py", "teacher.md")}
    assert not names & (extra | {"course/lessons/TEACHERS.md", f"course/lessons/{TREE}/exercise.py"})
    assert "--index-url https://example.org/whl/cpu\n" in setup and "useradd --system" in setup
    assert "lessons grade 02 --submission" in run
    for text in (setup, run):
        assert subprocess.run(["bash", "-n"], input=text.encode(), check=False).returncode == 0
    with pytest.raises(ValueError, match="exists already"):
        write_autograder(out, source=committed)


SPY = """
import os, pathlib, sys
tried = [f"uid {os.getuid()}"]
for name in ("LESSON/solution.py", "LESSON/hidden.py"):
    tried.append(str(os.access(pathlib.Path("HOME/source/course/lessons") / name, os.R_OK)))
    try:
        (pathlib.Path("HOME/source/course/lessons") / name).read_text()
        tried.append("read")
    except PermissionError:
        tried.append("refused")
for name in ("results/results.json", "submission/x", "source/course/x"):
    try:
        (pathlib.Path("HOME") / name).write_text("x")
        tried.append("written")
    except PermissionError:
        tried.append("refused")
try:
    os.setuid(0)
    tried.append("root")
except PermissionError:
    tried.append("refused")
tried += [name for name in sys.modules if "solution" in name or "hidden" in name]
raise RuntimeError(" ".join(tried))
"""


def python_for_everybody(folder: Path, uid: int) -> str:
    """A Python that another user can run, with this one's packages; skips where there is none."""
    folder.chmod(0o755)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = Path(torch.__file__).parents[1]
    for python in (f"/usr/bin/python{version}", sys.executable):
        made = folder / f"python {Path(python).name}"
        command = [python, "-m", "venv", "--without-pip", str(made)]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            (site,) = made.glob("lib/python*/site-packages")
            (site / "all.pth").write_text(str(packages), encoding="utf-8")
            tried = f"import os; os.setgid({uid}); os.setuid({uid}); import subprocess, numpy"
            command = [str(made / "bin" / "python"), "-c", tried]
            if subprocess.run(command, cwd="/", capture_output=True, check=False).returncode == 0:
                return str(made / "bin" / "python")
    pytest.skip("another user can run no Python of this version here")


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="only root can run as another user"
)
def test_another_user_reads_no_solution_and_an_honest_one_gets_his_points(committed: Path) -> None:
    import pwd

    nobody = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory(prefix="autograder-") as temporary:  # pytest's are for root alone
        home = Path(temporary)
        python = python_for_everybody(home, nobody.pw_uid)
        write_autograder(home / "a.zip", [find_folder("01").name, TREE], source=committed)
        with zipfile.ZipFile(home / "a.zip") as archive:
            archive.extractall(home / "source")
        for name in ("submission", "results"):
            (home / name).mkdir()
        hand_in(home, "submission", "lessons")
        place = home / "submission" / "lessons" / find_folder("01").name
        place.mkdir()
        (place / "exercise.py").write_text(
            SPY.replace("HOME", str(home)).replace("LESSON", TREE), encoding="utf-8"
        )
        script = home / "source" / "run_autograder"
        script.write_text(script.read_text(encoding="utf-8").replace("--user submission", "--user nobody"))
        env = {**os.environ, "AUTOGRADER": str(home), "MINIRAD_PYTHON": python}
        done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        graded = json.loads((home / "results" / "results.json").read_text(encoding="utf-8"))
        assert graded["score"] == 10  # lesson 02 of 02, nothing of the spy's 01
        said = graded["tests"][0]["output"]
        uid = nobody.pw_uid
        assert said.endswith(f"RuntimeError: uid {uid} False refused False refused" + " refused" * 4), said
        (home / "source" / "course" / "lessons" / TREE / "hidden.py").chmod(0o644)
        command = [python, "-m", "lessons", "grade", "02", "--user", "nobody"]
        done = subprocess.run(
            command, cwd=home / "source" / "course", env=env, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 2 and "hidden.py can be read by others" in done.stderr
