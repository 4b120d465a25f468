"""Questions about documents: some that a retriever has found, and long ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from minirad.evidence.kind import Kind
from minirad.evidence.reading import paragraphs, solved_questions
from minirad.evidence.retriever import Retriever
from minirad.frontend import Job, State
from minirad.model.classroom import corpus


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and its right answer (no part of the prompt)."""

    question: str
    reply: str


def _asked(facts: dict[str, str], rng: random.Random) -> Asked:
    turn = corpus.lookup_turn(facts, rng.choice(list(facts)))
    return Asked(turn.user, turn.reply)


def is_answer(job: Job, value: Any) -> bool:
    """The whole reply, letter for letter."""
    return bool(value == job.args[-1].reply)


# ---------------------------------------------------------------------- retrieval

PASSAGES: Final = 3


async def rag(s: State, library: tuple[str, ...], examples: tuple[tuple[str, str], ...], asked: Asked) -> str:
    """Answers a question out of the passages that a retriever finds for it (DSPy's pipeline).

    examples: prompts with replies, shared by all questions: what DSPy's compiler bootstraps.
    """
    s.system(corpus.SYSTEM_PROMPT)
    for prompt, reply in examples:
        s.user(prompt)
        s.assistant(reply)
    found = Retriever(library).search(asked.question, PASSAGES)
    s.user("\n\n".join(reversed(found)) + f" {asked.question}")  # the best passage next to the question
    return (await s.gen("answer", max_new_tokens=16)).strip()


def rag_jobs(count: int, rng: random.Random) -> tuple[Job, ...]:
    """Questions about one library of eight pages, three people each."""
    facts = corpus.lookup_facts(rng, 24)
    people = list(facts)
    pages = [{name: facts[name] for name in people[at : at + 3]} for at in range(0, 24, 3)]
    library = tuple(f"{solved_questions(rng)}\n\n{corpus.lookup_text(page)}" for page in pages)
    examples = tuple(_example(rng) for _ in range(4))
    return tuple(Job(rag, (library, examples, _asked(facts, rng))) for _ in range(count))


def _example(rng: random.Random) -> tuple[str, str]:
    facts = corpus.lookup_facts(rng, 6)
    asked = _asked(facts, rng)
    return f"{solved_questions(rng)}\n\n{corpus.lookup_text(facts)} {asked.question}", asked.reply


# ---------------------------------------------------------------------- long documents


async def document_question(s: State, document: str, asked: Asked) -> str:
    """Answers a question about a long document, which others ask about as well."""
    s.system(corpus.SYSTEM_PROMPT)
    s.user(f"{document} {asked.question}")
    return (await s.gen("answer", max_new_tokens=16)).strip()


def document_jobs(count: int, rng: random.Random) -> tuple[Job, ...]:
    """Documents with five questions each."""
    jobs: list[Job] = []
    while len(jobs) < count:
        facts = corpus.lookup_facts(rng, 8)
        document = paragraphs(rng, 14, corpus.lookup_text(facts))
        jobs += [Job(document_question, (document, _asked(facts, rng))) for _ in range(5)]
    return tuple(jobs[:count])


KINDS: Final[Sequence[Kind]] = (
    Kind(
        "rag", "Questions, answered out of retrieved passages",
        "DSPy's retrieval pipeline: bootstrapped examples, 3 passages that a retriever finds, "
        "a question of HotpotQA",
        "pages of about 110 tokens, of a library of 8, made here; keyword search (BM25)",
        16, rag_jobs, is_answer,
    ),
    Kind(
        "documents", "Questions about long documents",
        "questions about documents that many share (SGLang's multi-document QA: 10 documents, several "
        "thousand tokens)",
        "documents of about 1,400 tokens, for a context of 2,048",
        20, document_jobs, is_answer,
    ),
)  # fmt: skip
