"""Programs that branch: a tree of thought, a skeleton of thought, a judge in several dimensions."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from minirad.evidence.kind import Kind
from minirad.frontend import Job, State
from minirad.model.classroom import corpus
from minirad.programs import last_number, outline_of, tree_of_thought

# ---------------------------------------------------------------------- a tree of thought


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem and its answer (no part of the prompt)."""

    text: str
    answer: str


async def solve(s: State, problem: Problem) -> str:
    """The number that a tree of thought ends with (minirad.programs)."""
    return last_number(await tree_of_thought(s, problem.text))


def problem_jobs(count: int, rng: random.Random) -> tuple[Job, ...]:
    turns = [corpus.problem_turn(rng) for _ in range(count)]
    return tuple(Job(solve, (Problem(turn.user, turn.short),)) for turn in turns)


def is_solved(job: Job, value: Any) -> bool:
    return bool(value == job.args[0].answer)


# ---------------------------------------------------------------------- a skeleton of thought


async def skeleton_of_thought(s: State, points: int) -> list[tuple[str, str]]:
    """First an outline, then all of its points at the same time (Ning et al. 2024).

    The outline: animals; a point is written out as a story. Returns animals with their stories.
    """
    outline = await outline_of(s, points)
    branches = await s.fork(points)
    for branch, animal in zip(branches, outline, strict=True):
        branch.user(f"Write a story about a {animal}.")
        branch.gen("story", max_new_tokens=128)
    await branches.join()
    return list(zip(outline, s["story"], strict=True))


def skeleton_jobs(count: int, rng: random.Random) -> tuple[Job, ...]:
    return tuple(Job(skeleton_of_thought, (5,), seed=rng.randrange(1 << 30)) for _ in range(count))


def tells_of_its_animal(job: Job, value: Any) -> bool:
    """Every point has its story, about its animal and about no other: no name and no sound of one."""
    (points,) = job.args
    return len(value) == points and all(
        _is_about(animal, set(re.findall("[a-z]+", story))) for animal, story in value
    )


def _is_about(animal: str, words: set[str]) -> bool:
    """Which words are animals, and which are sounds."""
    sounds = words & set(corpus.SOUNDS.values())
    return words & set(corpus.ANIMALS) == {animal} and sounds <= {corpus.SOUNDS[animal]}


# ---------------------------------------------------------------------- a judge


@dataclass(frozen=True, slots=True)
class Claim:
    """What an essay says about one question, and whether that is so (no part of the prompt)."""

    question: str
    sentence: str
    true: bool


Essay = tuple[tuple[Claim, ...], ...]  # paragraphs of one subject each

_SUBJECTS: Final[dict[str, corpus.Turns]] = {
    "capitals": corpus.capital_turn,
    "colors": corpus.color_turn,
    "sounds": corpus.sound_turn,
    "opposites": corpus.opposite_turn,
    "days": corpus.day_turn,
    "sums": corpus.sum_turn,
}


async def judge(s: State, essay: Essay) -> int:
    """How many of an essay's paragraphs are without a mistake: branch, solve, merge (Saha et al. 2023).

    In one branch for each paragraph the model answers for itself what the essay claims; these answers are
    the measure. The judgements are merged into the text, and the model adds up the points.
    """
    s.system(corpus.SYSTEM_PROMPT)
    text = "\n\n".join(" ".join(claim.sentence for claim in paragraph) for paragraph in essay)
    s.user(f"Judge this essay:\n\n{text}")
    s.assistant("I judge each paragraph.")
    branches = await s.fork(len(essay))
    solved = await branches.each(lambda branch, index: _solve(branch, essay[index]))
    await branches.join()
    points = [int(replies == [claim.sentence for claim in essay[at]]) for at, replies in enumerate(solved)]
    merged = (f"{' '.join(replies)} Points: {point}." for replies, point in zip(solved, points, strict=True))
    s.assistant("\n\n" + "\n\n".join(merged))
    total = points[0]
    for point in points[1:]:
        s.user(f"What is {point} + {total}?")
        said = last_number(await s.gen("sum", max_new_tokens=16))
        total = int(said) if said.isdigit() else total
    return total


async def _solve(branch: State, paragraph: Sequence[Claim]) -> list[str]:
    replies = []
    for claim in paragraph:
        branch.user(claim.question)
        replies.append((await branch.gen("solution", max_new_tokens=24)).strip())
    return replies


def _essay(rng: random.Random, claims: int = 4) -> Essay:
    paragraphs = []
    for subject in _SUBJECTS.values():
        wrong = rng.randrange(claims) if rng.random() < 0.5 else None
        paragraph = []
        for at in range(claims):
            turn = subject(rng)
            other = turn
            while at == wrong and other.short == turn.short:
                other = subject(rng)
            sentence = turn.reply.replace(turn.short, other.short) if at == wrong else turn.reply
            paragraph.append(Claim(turn.user, sentence, at != wrong))
        paragraphs.append(tuple(paragraph))
    return tuple(paragraphs)


def judge_jobs(count: int, rng: random.Random) -> tuple[Job, ...]:
    return tuple(Job(judge, (_essay(rng),)) for _ in range(count))


def is_fair(job: Job, value: Any) -> bool:
    return bool(value == sum(all(claim.true for claim in paragraph) for paragraph in job.args[0]))


KINDS: Final[Sequence[Kind]] = (
    Kind(
        "tree-of-thought", "A tree of thought on word problems",
        "tree of thought on GSM-8K: 3 ways at each of 3 levels (plan, solve, rate), at most 256 tokens each",
        "4 levels, 3 ways from each of the best 2, thoughts of a sentence (about 20 tokens): the lessons' "
        "problems are solved in 5 sentences",
        6, problem_jobs, is_solved,
    ),
    Kind(
        "skeleton-of-thought", "An outline, then its points side by side",
        "skeleton of thought on tips: an outline of 5 points, each written out in at most 128 tokens",
        "",
        6, skeleton_jobs, tells_of_its_animal,
    ),
    Kind(
        "judge", "A judge in six dimensions: branch, solve, merge",
        "LLM judge with branch-solve-merge: an article, 6 dimensions judged side by side (at most 256 tokens "
        "each), merged into one score",
        "essays of about 200 tokens; a judgement is 4 short answers of the model, to hold the essay against",
        6, judge_jobs, is_fair,
    ),
)  # fmt: skip
