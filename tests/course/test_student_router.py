"""A learner's Router as a policy: before simulated workers, in the page, and what is said where it errs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest

from lessons.grading.fleets import chats, play
from lessons.grading.router import StudentPolicy, add_policy, student_router
from lessons.grading.spec import Failure, find_folder
from minirad.route.policies import POLICIES, NoWorker, WorkerView, make_policy

FOLDER = find_folder("12")
PROMPT = np.arange(20)


@pytest.fixture
def solved() -> Iterator[str]:
    """The solution's path, as the name of a policy."""
    path = str(FOLDER / "solution.py")
    with mock.patch.dict(POLICIES):
        add_policy(path)
        yield path


def fleet(*loads: int | None) -> list[WorkerView]:
    return [WorkerView(f"w{at}", load is not None, load or 0) for at, load in enumerate(loads)]


class Says:
    """A Router whose choose returns, or raises, one thing."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def choose(self, tokens: Any, workers: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def sent(self, worker: int, tokens: Any) -> None:
        """Nothing is remembered."""

    def forget(self, worker: int) -> None:
        raise KeyError(worker)


def test_a_right_one_is_a_policy_like_the_others(solved: str) -> None:
    game = chats(Random("a game"), 40)
    ours = play(make_policy(solved), game)
    turns, aware = (play(make_policy(name), game) for name in ("round-robin", "cache-aware"))
    assert ours.hit_rate > turns.hit_rate + 0.9 * (aware.hit_rate - turns.hit_rate) > turns.hit_rate + 0.1
    policy = make_policy(solved)
    first = policy.choose(PROMPT, fleet(0, 0, 0))
    policy.sent(first.worker, PROMPT)
    again = policy.choose(PROMPT, fleet(1, 1, 1))
    assert again.worker == first.worker and again.matches[again.worker] == 20 and "20 of 20" in again.reason
    assert policy.choose(PROMPT, fleet(1, 1, 1), "ada").worker != first.worker, "another namespace"
    policy.forget(first.worker)
    assert policy.choose(PROMPT, fleet(1, 1, 1)).matches == (0, 0, 0)
    with pytest.raises(NoWorker):
        policy.choose(PROMPT, fleet(None, None))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ValueError("no idea"), "at request 1 your choose raised ValueError: no idea"),
        (1, "at request 1 your choose returned 1, not (worker, why)"),
        ((7, "so"), "your choose chose worker 7; they have the numbers 0 to 2"),
        ((True, "so"), "your choose chose worker True"),
        ((1, "so"), "your choose chose worker 1, which is not alive"),
        ((0, ""), "your choose gave '' as the reason, not a line of text"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_it_must_not_do_is_said_and_all_goes_on(answer: Any, said: str) -> None:
    policy = StudentPolicy(make=lambda: Says(answer))
    choice = policy.choose(PROMPT, fleet(3, None, 2))
    assert choice.worker == 2 and choice.reason.startswith("the least loaded: at request 1 your choose ")
    assert said in choice.reason and said in policy.broken and "\n" not in choice.reason
    strict = StudentPolicy(make=lambda: Says(answer), strict=True)
    with pytest.raises(Failure) as raised:
        strict.choose(PROMPT, fleet(3, None, 2))
    assert said in raised.value.words


def test_what_is_not_asked_for_an_answer_may_fail_too() -> None:
    policy = StudentPolicy(make=lambda: Says((0, "the first")))
    assert policy.choose(PROMPT, fleet(0, 0)).reason == "the first"
    policy.forget(1)
    assert policy.broken == "at request 1 your forget raised KeyError: 1"
    broken = StudentPolicy(make=lambda: 1 / 0)
    assert "your __init__ raised ZeroDivisionError" in broken.broken
    assert broken.choose(PROMPT, fleet(2, 1)).worker == 1


def test_what_cannot_be_a_router_is_refused_in_one_line(tmp_path: Path) -> None:
    stub = (FOLDER / "exercise.py").read_text(encoding="utf-8")
    done = (FOLDER / "solution.py").read_text(encoding="utf-8")
    forget = done.replace("self._prompts.pop(worker, None)", "raise NotImplementedError")
    for text, said in (
        (stub, "Router.__init__ is not written yet"),
        (forget, "Router.forget is not written yet"),
        ("x = 1", "has no class Router"),
        ("def broken(:", "cannot be loaded: SyntaxError"),
        ("import sys; sys.exit()", "cannot be loaded: SystemExit"),
    ):
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=said.replace("(", r"\(")):
            student_router(tmp_path / "mine.py")
    with pytest.raises(ValueError, match="is not there"):
        student_router(tmp_path / "other.py")


def test_the_command_line_takes_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("anywidget", reason="needs the extra 'viz'")
    from viz.live import main

    assert main(["--workers", "2", "--route", str(FOLDER / "exercise.py")]) == 2
    assert capsys.readouterr().err.strip().endswith("exercise.py: Router.__init__ is not written yet")
    assert main(["--workers", "2", "--route", "nowhere.py"]) == 2
    assert "nowhere.py is not there" in capsys.readouterr().err
