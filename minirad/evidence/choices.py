"""Few-shot questions with four answers to choose from, chosen by `select`."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from minirad.evidence.kind import Kind
from minirad.frontend import Job, State
from minirad.model.classroom import corpus

LETTERS: Final = "ABCD"
_SUBJECTS: Final[tuple[corpus.Turns, ...]] = (
    corpus.capital_turn, corpus.color_turn, corpus.sound_turn, corpus.opposite_turn, corpus.day_turn,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, up to where the answer begins; the answers, and which of them is right (no part of the
    prompt)."""

    text: str
    choices: tuple[str, ...]
    right: int

    @property
    def solved(self) -> str:
        """With its right answer: an example."""
        return self.text + self.choices[self.right]


async def few_shot_choice(s: State, shots: str, question: Question) -> int:
    """The answer that the model finds likeliest behind solved examples, by its place among the answers."""
    s += shots + question.text
    chosen = await s.select("answer", question.choices)
    return question.choices.index(chosen)


def is_right(job: Job, value: Any) -> bool:
    return bool(value == job.args[1].right)


def _among_others(right: str, other: Callable[[], str], rng: random.Random) -> tuple[list[str], int]:
    """Four different texts in any order, and the place of the right one."""
    texts = [right]
    while len(texts) < len(LETTERS):
        text = other()
        if text not in texts:
            texts.append(text)
    rng.shuffle(texts)
    return texts, texts.index(right)


# ---------------------------------------------------------------------- MMLU


def _subject_question(number: int, subject: corpus.Turns, rng: random.Random) -> Question:
    turn = subject(rng)
    answers, right = _among_others(turn.short, lambda: subject(rng).short, rng)
    listed = ", ".join(f"{letter} {answer}" for letter, answer in zip(LETTERS, answers, strict=True))
    text = corpus.few_shot_question(number, f"{listed}. {turn.user}")
    return Question(text, tuple(f" {answer}." for answer in answers), right)


def mmlu_like(count: int, rng: random.Random, shots: int = 5) -> tuple[Job, ...]:
    """Questions of five subjects in turn; those of one subject share its examples."""
    heads = []
    for subject in _SUBJECTS:
        solved = [_subject_question(number, subject, rng).solved for number in range(1, shots + 1)]
        heads.append("Answer the questions.\n\n" + "".join(f"{each}\n\n" for each in solved))
    jobs = []
    for at in range(count):
        place = at % len(_SUBJECTS)
        question = _subject_question(shots + 1, _SUBJECTS[place], rng)
        jobs.append(Job(few_shot_choice, (heads[place], question)))
    return tuple(jobs)


# ---------------------------------------------------------------------- HellaSwag

_ENDING: Final = re.compile(r'(?<=[.]) (?:Then \w+ met|"Is this|A child named).*?[.?](?= [A-Z"])')


def _story_parts(rng: random.Random) -> tuple[str, str]:
    """A story up to where somebody is met, and the sentence that says who is."""
    animal = rng.choice(corpus.ANIMALS)
    story = corpus.story(rng, animal)
    ending = _ENDING.search(story)
    assert ending is not None, story
    return f"A story about a {animal}: {story[: ending.start()]}", ending[0]


def _story_question(rng: random.Random) -> Question:
    text, ending = _story_parts(rng)
    endings, right = _among_others(ending, lambda: _story_parts(rng)[1], rng)
    return Question(text, tuple(endings), right)


def hellaswag_like(count: int, rng: random.Random, shots: int = 20) -> tuple[Job, ...]:
    """Beginnings of stories, each with four ways to go on, behind the same solved ones."""
    head = "".join(f"{_story_question(rng).solved}\n\n" for _ in range(shots))
    return tuple(Job(few_shot_choice, (head, _story_question(rng))) for _ in range(count))


KINDS: Final[Sequence[Kind]] = (
    Kind(
        "mmlu-like", "Multiple choice, 5 examples, 4 answers",
        "MMLU: 5 solved questions (at most 1,536 tokens), then one with 4 answers; one token is decoded",
        "short questions (240 tokens with all examples); `select` compares the answers' texts, since the "
        "classroom Llama knows no letters",
        40, mmlu_like, is_right,
    ),
    Kind(
        "hellaswag-like", "Which ending, 20 examples, 4 endings",
        "HellaSwag: 20 beginnings with their endings (about 2,000 tokens), then one with 4 endings; `select`",
        "about 1,200 tokens of examples, for a context of 2,048",
        8, hellaswag_like, is_right,
    ),
)  # fmt: skip
