"""Chats of four turns, with long questions, and with short or long answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from minirad.evidence.kind import Kind
from minirad.evidence.reading import paragraphs
from minirad.frontend import Job, State
from minirad.model.classroom import corpus


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and the right answer, of which only the opening is part of the prompt."""

    user: str
    reply: str
    opening: str = ""


async def chat(s: State, turns: Sequence[Turn], longest: int) -> list[str]:
    """A chat: every turn finds all of the turns before in the cache."""
    s.system(corpus.SYSTEM_PROMPT)
    replies = []
    for number, turn in enumerate(turns, start=1):
        s.user(turn.user)
        s.assistant(turn.opening)
        said = await s.gen(f"reply {number}", max_new_tokens=longest)
        replies.append((turn.opening + said).strip())
    return replies


def _looked_up(length: int, rng: random.Random) -> Turn:
    """Something long to read, and a question about the end of it: answered in about 7 tokens."""
    facts = corpus.lookup_facts(rng, 6)
    asked = corpus.lookup_turn(facts, rng.choice(list(facts)))
    last = f"{corpus.lookup_text(facts)} {asked.user}"
    return Turn(paragraphs(rng, length, last), asked.reply)


def _solved(length: int, rng: random.Random) -> Turn:
    """Something to read, and a problem: solved in about 90 tokens."""
    problem = corpus.problem_turn(rng)
    return Turn(paragraphs(rng, length, problem.user), problem.reply, "Let us solve it step by step.")


def _jobs(
    count: int, turn: Callable[[int, random.Random], Turn], lengths: Sequence[int], longest: int,
    rng: random.Random,
) -> tuple[Job, ...]:  # fmt: skip
    """Chats of as many turns as there are lengths, in any order: so each chat fits the context."""
    jobs = []
    for _ in range(count):
        turns = tuple(turn(length, rng) for length in rng.sample(lengths, len(lengths)))
        jobs.append(Job(chat, (turns, longest)))
    return tuple(jobs)


def short_jobs(count: int, rng: random.Random) -> tuple[Job, ...]:
    return _jobs(count, _looked_up, (2, 3, 4, 5), 16, rng)


def long_jobs(count: int, rng: random.Random) -> tuple[Job, ...]:
    return _jobs(count, _solved, (1, 2, 2, 3), 128, rng)


def all_right(job: Job, value: Any) -> bool:
    """Every reply, letter for letter."""
    return bool(value == [turn.reply for turn in job.args[0]])


KINDS: Final[Sequence[Kind]] = (
    Kind(
        "chat-short", "Chats of 4 turns, short answers",
        "multi-turn chat (short): 4 turns of 256 to 512 tokens, answers of 4 to 8 tokens",
        "",
        8, short_jobs, all_right,
    ),
    Kind(
        "chat-long", "Chats of 4 turns, long answers",
        "multi-turn chat (long): 4 turns of 256 to 512 tokens, answers of 256 to 512 tokens",
        "turns of 160 to 360 tokens and answers of about 90, for a context of 2,048: a problem and its steps",
        8, long_jobs, all_right,
    ),
)  # fmt: skip
