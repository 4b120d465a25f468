"""The teacher's commands: a classroom repository, and grades for a folder of submissions."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lessons.__main__ import main
from lessons.grading.classroom import WITHHELD, write_classroom
from lessons.grading.spec import ROOT, find_folder, lesson_folders

TREE, LOCKS = "02_radix_tree", "03_locks_and_eviction"


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
        main(["collect", str(folder), "--csv", str(target), "--patience", "0.3", "--lessons", *lessons]) == 0
    )
    rows = {row["student"]: row for row in csv.DictReader(target.open(encoding="utf-8"))}
    assert {name: row["points"] for name, row in rows.items()} == {
        "ada": "20",
        "bob": "18",
        "cy": "18",
        "'=dan": "0",
    }
    assert rows["ada"]["of"] == "20" and rows["ada"]["remarks"] == ""
    assert rows["bob"]["03 policies (2)"] == "0" and "lru_key lets them go" in rows["bob"]["remarks"]
    assert rows["cy"]["remarks"].startswith(
        "02 split_node: stuck: split_node did not come back within 3 seconds"
    )
    assert rows["cy"]["02 insert (2)"] == "2"
    assert "there is no exercise.py" in rows["'=dan"]["remarks"]
    assert "ada" in capsys.readouterr().out


def test_collect_wants_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", str(tmp_path / "none")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["collect", str(tmp_path / "empty")]) == 2
    assert "one per student" in capsys.readouterr().err


def test_a_classroom_has_no_solutions_and_grades_itself(tmp_path: Path) -> None:
    out = tmp_path / "classroom"
    write_classroom(out)
    given = [path for path in (out / "lessons").rglob("*") if path.parent.name != "grading"]
    assert [path for path in given if path.name in WITHHELD] == []
    for folder in lesson_folders():
        for name in ("README.md", "exercise.py", "exercises.py", "test_lesson.py"):
            assert (out / "lessons" / folder.name / name).is_file() == (folder / name).is_file()
    assert (out / "notebooks" / "00_tour.ipynb").exists() == (
        ROOT.parent / "notebooks/00_tour.ipynb"
    ).exists()
    assert (out / "minirad/model/classroom/weights").is_dir() and (
        out / ".github/workflows/grade.yml"
    ).is_file()
    shutil.copyfile(find_folder(TREE) / "solution.py", out / "lessons" / TREE / "exercise.py")
    clean = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MINIRAD_PROGRESS")
    }
    command = [sys.executable, "-m", "lessons", "grade", "--json", "results.json"]
    done = subprocess.run(command, cwd=out, env=clean, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stdout + done.stderr
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


def test_pytest_grades_a_lesson(tmp_path: Path) -> None:
    """The learner's way, on a copy whose exercise is half done."""
    out = tmp_path / "classroom"
    write_classroom(out)
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
        "Hint: At each node",
        "todo: inc_lock_ref",
    ):
        assert words in " ".join(done.stdout.split()), done.stdout
    assert "Traceback" not in done.stdout
