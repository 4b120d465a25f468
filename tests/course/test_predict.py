"""Predictions: the question in a notebook, what it says to a guess, and what the progress file keeps."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lessons.grading import progress as kept
from lessons.grading.progress import progress
from lessons.grading.spec import load_lesson
from viz import predict as module
from viz.predict import Prediction, predict

CHOICES = ["none", "3", "6"]
read_once = cache(load_lesson)  # all lessons take half a second to read


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIRAD_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setattr(module, "_shown", set())
    monkeypatch.setattr(kept, "load_lesson", read_once)
    return tmp_path / "progress.json"


def asked(lesson: str = "09", **more: Any) -> Prediction:
    more = more or {"choices": CHOICES}
    return predict(lesson, "How many slots are copied?", **more)


def answered(guess: Prediction, answer: object, capsys: pytest.CaptureFixture[str], **more: Any) -> str:
    """What answer() prints, in one line."""
    capsys.readouterr()
    guess.answer(answer, **more)
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lesson": "9", "choices": CHOICES}, "two digits"),
        ({"lesson": "09"}, "one of the two"),
        ({"lesson": "09", "choices": CHOICES, "number": "slots"}, "one of the two"),
        ({"lesson": "09", "choices": ["one"]}, "two different choices"),
        ({"lesson": "09", "choices": ["a", "b", "a"]}, "two different choices"),
    ],
)
def test_a_question_that_nobody_can_answer_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        predict(given.pop("lesson"), "How many?", **given)


def test_right_and_wrong_guesses_get_their_replies(capsys, file: Path) -> None:
    replies = {"3": "one copy each would do if ...", "none": "whose page is it?"}
    for lesson, said, words in (
        ("01", "6", "You predicted right: 6. two need one"),
        ("02", "3", "You predicted 3. The answer: 6. one copy each would do if ... two need one"),
        ("03", "none", "You predicted none. The answer: 6. whose page is it? two need one"),
    ):
        guess = asked(lesson)
        guess.commit(said)
        assert capsys.readouterr().out == f"Committed: {said}. Now run the cells below.\n"
        assert answered(guess, 6, capsys, because="two need one", wrong=replies) == words
    rows = json.loads(file.read_text(encoding="utf-8"))["predictions"]
    assert {key: (row["guess"], row["right"]) for key, row in rows.items()} == {
        "01": ("6", True),
        "02": ("3", False),
        "03": ("none", False),
    }
    assert all(len(row["when"]) == len("2026-11-29 18:00") for row in rows.values())
    assert progress().predicted == (1, 3)
    assert repr(progress()).endswith("\n1 of 3 predicted right")
    assert "<p>1 of 3 predicted right</p>" in progress()._repr_html_()


def test_nothing_is_said_and_written_where_nothing_was_predicted(capsys, file: Path) -> None:
    told = answered(asked(), "6", capsys, because="two need one", wrong={"3": "no"})
    assert told == "The answer: 6. (Nothing was predicted.) two need one"
    assert not file.exists() and "predicted" not in repr(progress()) + progress()._repr_html_()
    asked("02").commit("3")  # predicted, and not answered yet
    assert "predicted" not in repr(progress())


def test_numbers_are_read_as_people_write_them(capsys) -> None:
    guess = asked("10", number="tokens")
    guess.commit("1,400 tokens")
    assert guess.guess == "1,400"
    replies = [(lambda n: n > 2000, "far too many"), (lambda n: n > 1000, "a little too many")]
    assert answered(guess, 1396, capsys, wrong=replies) == (
        "You predicted 1,400 tokens. The answer: 1,396 tokens. a little too many"
    )
    near = asked("11", number="tokens")
    near.commit(1400)
    assert (
        answered(near, 1396, capsys, within=4)
        == "You predicted 1,400 tokens, and that is right. The answer: 1,396 tokens."
    )
    half = asked("12", number="%")
    half.commit(" .5%")
    assert half.guess == "0.5"
    for wrong in ("many", "", "1,40", "0,5", "nan", "1e400", "inf", "9" * 30, "-3", -3, "3 pages"):
        with pytest.raises(ValueError, match="is no number of tokens"):
            asked("13", number="tokens").commit(wrong)


def test_the_first_prediction_counts(capsys, file: Path) -> None:
    guess = asked()
    guess.commit("3")
    guess.commit("6")
    assert "You committed to 3 before, and that is what counts." in capsys.readouterr().out
    assert answered(guess, "6", capsys).startswith("You predicted 3. The answer: 6.")
    again = asked()  # the cell is run once more, or the kernel is new
    again.commit("6")
    assert again.guess == "3" and "You committed to 3 before" in capsys.readouterr().out
    assert "(Counted is what came the first time: wrong.)" in answered(again, "3", capsys)
    assert progress().predicted == (0, 1)


def test_who_has_seen_the_answer_does_not_count_as_right(capsys, file: Path) -> None:
    guess = asked()
    answered(guess, "6", capsys)
    for late in (guess, asked()):
        late.commit("6")
        assert "not counted, because you had seen the answer" in capsys.readouterr().out
        assert answered(late, "6", capsys).endswith(
            "(Not counted: the answer had been shown before you committed.)"
        )
    assert not file.exists() and progress().predicted == (0, 0)


def test_what_is_no_answer_is_refused_by_name(capsys) -> None:
    with pytest.raises(ValueError, match="'12' is none of the choices: none, 3, 6"):
        asked().commit("12")
    with pytest.raises(ValueError, match="'7' is none of the choices"):
        asked().answer(7)
    with pytest.raises(ValueError, match=r"none of the choices: \['five'\]"):
        asked().answer("6", wrong={"five": "no"})


def test_further_questions_of_a_lesson_have_a_name(capsys) -> None:
    first, second = asked(), asked(choices=CHOICES, name="tails")
    first.commit("6")
    second.commit("3")
    answered(first, "6", capsys)
    answered(second, "6", capsys)
    assert {key: row["right"] for key, row in kept.predictions().items()} == {"09": True, "09/tails": False}


@pytest.mark.parametrize(
    "text",
    [
        "not JSON", "[]", "null", '{"predictions": 3}', '{"predictions": [1]}', "[" * 100_000,
        '{"predictions": {"09": "6"}}', '{"predictions": {"09": {"guess": 6, "right": true, "when": ""}}}',
        '{"predictions": {"09": {"guess": "6", "right": "yes", "when": ""}}}',
        '{"predictions": {"09": {"guess": "of an older notebook", "right": null, "when": ""}}}',
        '{"02_radix_tree": "solved", "03_locks_and_eviction": {"evict": 3, "policies": {"points": "all"}}}',
        '{"02_radix_tree": {"insert": {"points": 2, "of": 2, "status": "passed", "when": ""}}}', "\udcff",
    ],
)  # fmt: skip
def test_a_broken_or_older_file_never_fails(text: str, file: Path, capsys) -> None:
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "points" in repr(progress()) and progress().predicted == (0, 0)
    guess = asked()
    guess.commit("6")
    answered(guess, "6", capsys)
    assert progress().predicted == (1, 1)
    assert progress().points("02_radix_tree")[0] == (2 if '"of": 2' in text else 0)


def test_a_file_that_cannot_be_written_is_no_reason_to_fail(file: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("MINIRAD_PROGRESS", str(file / "no" / "such" / "folder.json"))
    guess = asked()
    guess.commit("6")
    assert "right" in answered(guess, "6", capsys)


def test_without_a_widget_the_question_is_text(monkeypatch) -> None:
    other = asked("13")
    text = repr(asked())
    assert text.startswith("Predict: How many slots are copied?\n  ( ) none\n  ( ) 3\n  ( ) 6\n")
    assert text.endswith('guess.commit("one of these")')
    assert "\n  ____ tokens\n" in repr(asked("10", number="tokens"))
    shell = SimpleNamespace(user_ns={"_": other, "tails": other, "guess": asked("12")})
    monkeypatch.setattr(module, "get_ipython", lambda: shell)
    assert repr(other).endswith('or: tails.commit("one of these")')
    guess = asked("11")
    bundle, _ = guess._repr_mimebundle_()
    assert bundle["text/plain"] == repr(guess) and "application/vnd.jupyter.widget-view+json" in bundle


@pytest.mark.parametrize(
    ("more", "wrong", "words"),
    [
        ({"choices": CHOICES}, "", "choose one first"),
        ({"choices": CHOICES}, "12", "'12' is none of the choices: none, 3, 6"),
        ({"number": "slots"}, "", "type a number first"),
        ({"number": "slots"}, "-3", "'-3' is no number of slots: write it as 1400 or 0.5"),
        ({"number": "slots"}, "many", "'many' is no number of slots: write it as 1400 or 0.5"),
    ],
)
def test_the_button_commits(more: dict[str, Any], wrong: str, words: str) -> None:
    guess = asked("09", **more)
    guess._repr_mimebundle_()
    widget = guess._widget
    assert widget is not None and widget.state == {"guess": "", "words": ""}
    widget.received({"commit": wrong})
    assert widget.state == {"guess": "", "words": words} and not guess.guess
    widget.received("nonsense")
    widget.received({"commit": "3"})
    assert guess.guess == "3" == kept.predictions()["09"]["guess"]
    assert widget.state == {"guess": "3", "words": "Committed: 3. Now run the cells below."}
    again = asked("09", **more)
    again._repr_mimebundle_()
    assert again._widget is not None
    assert again._widget.state == {"guess": "3", "words": "You committed to 3."}


def test_a_commit_in_a_cell_is_shown_by_the_button() -> None:
    guess = asked()
    guess._repr_mimebundle_()
    guess.commit("6")
    assert guess._widget is not None and guess._widget.state["guess"] == "6"
