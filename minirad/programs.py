"""A library of small programs, and each of them as a workload.

What they ask is from the classroom Llama's lessons; other models can be asked it as well. The control
flow takes what a reply is worth, but breaks on none: a simulation answers in ids without text.

    from minirad.frontend import run
    run(engine, self_consistency, corpus.PROBLEMS[0]).value
    run_many(engine, programs()["tree-of-thought"].jobs)
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from minirad.frontend import Job, Program, State
from minirad.model.classroom import corpus


async def multi_turn_chat(
    s: State, questions: Sequence[str], system: str = corpus.SYSTEM_PROMPT
) -> list[str]:
    """A chat: every turn finds all of the turns before in the cache. Returns the replies."""
    s.system(system)
    replies = []
    for number, question in enumerate(questions, start=1):
        s.user(question)
        replies.append(await s.gen(f"reply {number}", max_new_tokens=40))
    return replies


async def few_shot_batch(s: State, questions: Sequence[str], examples: int = 6) -> list[str]:
    """Plain-text questions behind the same solved examples, answered side by side."""
    s += corpus.few_shot_header(corpus.few_shot_examples(examples, random.Random("few-shot")))
    branches = await s.fork(len(questions))
    for branch, question in zip(branches, questions, strict=True):
        branch += corpus.few_shot_question(examples + 1, question)
        branch.gen("answer", max_new_tokens=8, stop="\n")
    await branches.join()
    return [answer.strip() for answer in s["answer"]]


async def self_consistency(s: State, question: str, samples: int = 5, temperature: float = 0.7) -> str:
    """Several sampled ways to an answer, and the answer most of them agree on (Wang et al. 2023)."""
    s.system(corpus.SYSTEM_PROMPT)
    s.user(question)
    s.assistant()  # so that the branches share the opening of the reply, too
    branches = await s.fork(samples)
    for branch in branches:
        branch.gen("way", max_new_tokens=110, temperature=temperature)
    await branches.join()
    votes = Counter(last_number(way) for way in s["way"])
    return votes.most_common(1)[0][0]  # among equals the one that was seen first


async def tree_of_thought(s: State, problem: str, depth: int = 4, width: int = 3, keep: int = 2) -> str:
    """Solves a problem thought by thought: `width` ways on from each state, the best `keep` go on.

    Yao et al. (2023) have the model grade its thoughts. The classroom Llama was never taught to grade,
    so a thought is worth its mean log-probability, and a way the sum of its thoughts.
    """
    s.system(corpus.SYSTEM_PROMPT)
    s.user(problem)
    s.assistant("Let us solve it step by step.")
    s["worth"] = 0.0
    kept = [s]
    for _ in range(depth):
        forks = [await fork for fork in [state.fork(width) for state in kept]]
        ways = [branch for fork in forks for branch in fork]
        for way in ways:
            way.gen("thought", max_new_tokens=32, temperature=0.8, stop=".")
        for fork in forks:
            await fork.join()
        for way in ways:
            way["worth"] += way.said("thought").score
        kept = sorted(ways, key=lambda way: -way["worth"])[:keep]
    return await kept[0].gen("answer", max_new_tokens=32)


async def outline_of(s: State, points: int) -> list[str]:
    """So many animals, as the model names them in a chat."""
    s.system(corpus.SYSTEM_PROMPT)
    outline = []
    for number in range(points):
        s.user("Name an animal.")
        reply = await s.gen(f"point {number + 1}", max_new_tokens=16, temperature=1.0)
        words = re.findall("[a-z]+", reply) or [corpus.ANIMALS[number]]
        outline.append(words[-1])
    return outline


async def skeleton_of_thought(s: State, points: int = 3) -> str:
    """First an outline, then all of its points at the same time (Ning et al. 2024).

    The outline is what the classroom Llama can make up itself: some animals; a point says its sound.
    """
    outline = await outline_of(s, points)
    branches = await s.fork(points)
    for branch, animal in zip(branches, outline, strict=True):
        branch.user(f"What does a {animal} say?")
        branch.gen("sentence", max_new_tokens=16)
    await branches.join()
    return " ".join(s["sentence"])


RECORD: Final = (
    r'\{"name": "[A-Z][a-z]{1,9}", "age": \d{1,2}, "species": "(human|robot)", '
    r'"address": \{"city": "(Paris|Rome|Lima)", "country": "[A-Z][a-z]{3,9}"\}\}'
)
"""What a record looks like; the name and the age are for the model to say, much of the rest is forced."""


async def json_record(s: State, name: str, age: int) -> str:
    """A record of a person as JSON that matches RECORD."""
    s.system(corpus.SYSTEM_PROMPT)
    s.user(f"Write JSON for {name}, age {age}.")
    return await s.gen("record", max_new_tokens=96, regex=RECORD)


async def agent(s: State, questions: Sequence[str], prompt: str = corpus.AGENT_PROMPT) -> list[str]:
    """One of several agents with the same long prompt; they meet in the tree, not in a fork."""
    return await multi_turn_chat(s, questions, prompt)


def last_number(text: str) -> str:
    """The last number of a text, as digits; the text itself if it has none."""
    numbers: list[str] = re.findall(r"\d+", text)
    return numbers[-1] if numbers else text


def long_agent_prompt(examples: int = 103) -> str:
    """The agents' prompt with solved questions behind it: about 2,500 tokens for a usual tokenizer."""
    pairs = corpus.few_shot_examples(examples, random.Random("handbook"))
    return f"{corpus.AGENT_PROMPT}\n\n{corpus.few_shot_header(pairs).strip()}"


# ---------------------------------------------------------------------- as workloads

_TALKS: Final = (
    ("Hello", "My name is Ada.", "What is my name?", "Thanks!"),
    ("Hi", "What is the capital of France?", "What color is the sky?"),
    ("Hello", "What does a dog say?", "What can you do?"),
)
_SHOTS: Final = (
    "What is the capital of Italy?", "What color is snow?", "What does a cow say?",
    "What is the opposite of big?", "What day comes after Monday?", "What is the capital of Peru?",
)  # fmt: skip
_TASKS: Final = (
    ("Who are you?", "What is the capital of Japan?"),
    ("What color is grass?", "What does a bee say?"),
    ("What is the opposite of fast?", "Thank you"),
    ("What is the capital of Egypt?",),
    ("What day comes after Friday?",),
)


def _agents(name: str, title: str, prompt: str, kv_tokens: int) -> Program:
    jobs = tuple(Job(agent, (task, prompt), arrival=4 * number) for number, task in enumerate(_TASKS))
    return Program(name, title, jobs, kv_tokens)


def programs() -> dict[str, Program]:
    """Every program of the library as a workload, by name."""
    several = (
        Program(
            "multi-turn", "Programs: chats of several turns",
            tuple(Job(multi_turn_chat, (talk,), arrival=6 * at) for at, talk in enumerate(_TALKS)), 220,
        ),
        Program("few-shot-batch", "Program: a few-shot batch", (Job(few_shot_batch, (_SHOTS,)),), 320),
        Program(
            "vote", "Programs: self-consistency, sampled and voted on",
            tuple(Job(self_consistency, (corpus.PROBLEMS[at],), arrival=90 * at) for at in range(2)), 700,
        ),
        Program(
            "tree-of-thought", "Program: a tree of thought",
            (Job(tree_of_thought, (corpus.PROBLEMS[0],)),), 400,
        ),
        Program(
            "skeleton-of-thought", "Program: an outline, then its points",
            (Job(skeleton_of_thought),), 200,
        ),
        Program(
            "records", "Programs: records as JSON",
            tuple(Job(json_record, (corpus.NAMES[at], 7 + 11 * at), arrival=5 * at) for at in range(6)), 400,
        ),
        _agents("agent-team", "Programs: agents with one prompt of 250 tokens", corpus.AGENT_PROMPT, 400),
        _agents(
            "agent-team-long", "Programs: agents with one prompt of 2,500 tokens", long_agent_prompt(), 3200
        ),
    )  # fmt: skip
    return {program.name: program for program in several}
