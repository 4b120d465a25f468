"""A question that a notebook asks before it tells: you predict, and the cell below answers.

    guess = predict("09", "How many tail slots does the fork copy?", choices=["none", "3", "6"])
    guess                                      # shows it with a button; guess.commit("6") does as well
    guess.answer(str(copied), because="...", wrong={"3": "..."})      # in the cell that has computed it

The first prediction is the one that counts: it is kept in the learner's progress file
(lessons/grading/progress.py) with whether it was right. Nothing is written unless somebody commits.
"""

from __future__ import annotations

import contextlib
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from IPython import get_ipython

from lessons.grading.progress import predictions, remember_prediction, settle_prediction

Reply = tuple[Callable[[float], object], str]  # a test of a predicted number, and what to say to it
_shown: set[str] = set()  # predictions whose answer this kernel has shown
_MOST = 1e15  # larger is a slip of the hand, and no longer exact
_NUMBER = re.compile(r"(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?")


def predict(
    lesson: str,
    question: str,
    *,
    choices: Sequence[str] | None = None,
    number: str | None = None,
    name: str = "",
) -> Prediction:
    """Asks a question; show what it returns in the last line of a cell.

    lesson: two digits, as "09". choices: the answers to choose from; or number: what is counted, as
    "tokens". name: of a second question of the same lesson. ValueError says what does not fit.
    """
    if not re.fullmatch(r"\d\d", lesson):
        raise ValueError(f"a lesson is named by its two digits, as '09', not by {lesson!r}")
    if (choices is None) == (number is None):
        raise ValueError(f"{question!r} needs choices, or the word for a number: one of the two")
    offered = list(choices or ())
    if choices is not None and (len(set(offered)) < 2 or len(set(offered)) < len(offered)):
        raise ValueError(f"{question!r} needs two different choices or more, not {offered}")
    return Prediction(f"{lesson}/{name}" if name else lesson, question, offered, number or "")


class Prediction:
    """One question and what was predicted. guess: that, as text; "" before anything was committed."""

    def __init__(self, key: str, question: str, choices: Sequence[str], unit: str) -> None:
        self.key, self.question, self.choices, self.unit = key, question, list(choices), unit
        self._widget: _Widget | None = None
        self._late = False
        self.guess = ""
        kept = predictions().get(key, {}).get("guess", "")
        with contextlib.suppress(ValueError):  # kept by an older notebook, which asked something else
            self.guess = self._read(kept) if kept else ""

    # ------------------------------------------------------------ predicting

    def commit(self, guess: object) -> None:
        """Says what you predict, without the button. ValueError where that is no answer to the question."""
        print(self.take(guess))

    def take(self, guess: object) -> str:
        """Commits to a prediction, and returns what that means. ValueError where it is no answer."""
        taken = self._read(guess)
        if self.guess and not self._late:
            return f"You committed to {self.guess} before, and that is what counts."
        self.guess, self._late = taken, self.key in _shown
        if self._late:
            words = (
                f"{taken}: not counted, because you had seen the answer. Run its cell again for the reply."
            )
        else:
            remember_prediction(self.key, taken)
            words = f"Committed: {taken}. Now run the cells below."
        if self._widget is not None:
            self._widget.settle(words)
        return words

    def _read(self, guess: object) -> str:
        text = str(guess).strip()
        if self.choices:
            if text not in self.choices:
                raise ValueError(f"{text!r} is none of the choices: {', '.join(self.choices)}")
            return text
        return _spoken(_number(text.removesuffix(self.unit).strip(), self.unit))

    # ------------------------------------------------------------ answering

    def answer(
        self,
        answer: object,
        *,
        because: str = "",
        wrong: Mapping[str, str] | Sequence[Reply] = (),
        within: float = 0,
    ) -> None:
        """Prints the answer, whether the prediction was right, and what to say to just that prediction.

        answer: what the cell has computed. wrong: choice -> reply; for a number (test, reply), the first
        whose test holds. within: how far off a number may be. ValueError where the two do not fit together.
        """
        right = self._read(answer)
        unknown = [each for each in wrong if self.choices and each not in self.choices]
        if unknown:
            raise ValueError(f"replies to what is none of the choices: {unknown}")
        _shown.add(self.key)
        for line in self._told(right, because, wrong, within):
            print(textwrap.fill(line, 100))

    def _told(
        self, answer: str, because: str, wrong: Mapping[str, str] | Sequence[Reply], within: float
    ) -> list[str]:
        what = f"{answer} {self.unit}".strip()
        if not self.guess:
            return [f"The answer: {what}. (Nothing was predicted.)", *filter(None, [because])]
        hit = self._hits(answer, within)
        said = f"You predicted {self.guess} {self.unit}".strip()
        near = ", and that is right" if hit else ""
        exact = self.guess == answer
        lines = [f"You predicted right: {what}." if exact else f"{said}{near}. The answer: {what}."]
        lines += [] if hit else [self._reply(wrong)]
        if self._late:
            lines.append("(Not counted: the answer had been shown before you committed.)")
        else:
            counted = settle_prediction(self.key, self.guess, hit)
            if counted != hit:
                now = "right" if counted else "wrong"
                lines.append(f"(Counted is what came the first time: {now}.)")
        return [line for line in (*lines, because) if line]

    def _hits(self, answer: str, within: float) -> bool:
        if self.choices:
            return self.guess == answer
        return abs(_number(self.guess) - _number(answer)) <= within

    def _reply(self, wrong: Mapping[str, str] | Sequence[Reply]) -> str:
        if isinstance(wrong, Mapping):
            return wrong.get(self.guess, "")
        guess = _number(self.guess)
        return next((words for test, words in wrong if test(guess)), "")

    # ------------------------------------------------------------ showing

    def __repr__(self) -> str:
        """The question in full, for where no widget is drawn: a terminal, a saved notebook."""
        if self.choices:
            lines = [f"  ( ) {choice}" for choice in self.choices]
            how = f'{self._called()}.commit("one of these")'
        else:
            lines, how = [f"  ____ {self.unit}"], f"{self._called()}.commit(your number)"
        end = f"You committed to {self.guess}." if self.guess else f"Commit with the button, or: {how}"
        return "\n".join([f"Predict: {self.question}", *lines, end])

    def _called(self) -> str:
        """The name that it has in the notebook."""
        shell = get_ipython()
        names = shell.user_ns if shell else {}
        return next((name for name, each in names.items() if each is self and name[0] != "_"), "guess")

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._widget is None:
            self._widget = _Widget(self)
        bundle, about = self._widget._repr_mimebundle_(**kwargs) or ({}, {})
        bundle["text/plain"] = repr(self)
        return bundle, about


def _static(name: str) -> str:
    return (Path(__file__).parent / "static" / name).read_text(encoding="utf-8")


class _Widget(anywidget.AnyWidget):
    """The question with its choices or its number field, a button, and what became of it."""

    _esm = _static("predict.js")
    _css = _static("predict.css")
    asked = traitlets.Dict().tag(sync=True)
    state = traitlets.Dict({"guess": "", "words": ""}).tag(sync=True)

    def __init__(self, prediction: Prediction) -> None:
        asked = {"question": prediction.question, "choices": prediction.choices, "unit": prediction.unit}
        super().__init__(asked=asked)
        self.prediction = prediction
        self.on_msg(lambda _, message, __: self.received(message))
        if prediction.guess:
            self.settle(f"You committed to {prediction.guess}.")

    def received(self, message: object) -> None:
        """The button was pressed: {"commit": what was chosen or typed}."""
        guess = message.get("commit") if isinstance(message, dict) else None
        try:
            if not guess:
                raise ValueError("choose one first" if self.prediction.choices else "type a number first")
            self.prediction.take(guess)  # settles
        except ValueError as error:
            self.state = {"guess": "", "words": str(error)}

    def settle(self, words: str) -> None:
        """Shows what was committed; the button has done its work."""
        self.state = {"guess": self.prediction.guess, "words": words}


def _number(text: str, unit: str = "") -> float:
    """A count or share as it is typed, with or without commas between thousands. ValueError names it."""
    value = float(text.replace(",", "")) if text and _NUMBER.fullmatch(text) else math.nan
    if not value < _MOST:  # nan is not, either
        raise ValueError(f"{text!r} is no number{f' of {unit}' if unit else ''}: write it as 1400 or 0.5")
    return value


def _spoken(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:.6g}"
