"""Lesson 08 once more, built otherwise: texts as long as they have to be, and one table of sizes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from minirad.config import SamplingParams
from minirad.figure3 import Ask

Story = tuple[list[list[Ask]], int]
Encode = Callable[[str], list[int]]


def reply(tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=tokens, ignore_eos=True, n=n, temperature=10.0 if n > 1 else 0.0, seed=9
    )


def _chat(system: str, text: str) -> str:
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


def _alike(prompts: list[list[int]]) -> int:
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))


def _so_long(tokens: int, encode: Encode) -> str:
    """A text of at least so many tokens."""
    text = "Tell me"
    while len(encode(text)) < tokens:
        text += " more about pears"
    return text


def split_story(system: str, encode: Encode) -> Story:
    texts = [encode(_chat(system, word)) for word in ("What is rain?", "Tell me a story.")]
    pool = sum(map(len, texts)) - _alike(texts) + 2 * (6 - 1)
    chat = [
        Ask("chat 7", "first", "What is rain?", reply(6)),
        Ask("chat 3", "other", "Tell me a story.", reply(6)),
    ]
    return [[chat[0]], [chat[1]]], pool


def forget_story(system: str, encode: Encode) -> Story:
    long = _so_long(60, encode)
    one = len(encode(_chat(system, "Hi"))) + 2
    two = len(encode(long)) + 20  # at most: marks and reply
    steps = [("chat 1", "U1", "Hi"), ("chat 1", "U2", long), ("chat 2", "V1", long), ("chat 1", "U3", "Bye")]
    return [[Ask(of, turn, text, reply(3))] for of, turn, text in steps], one + two + 25


def nine_steps(system: str, encode: Encode) -> Story:
    head = "Say the opposite.\n\nWord 1: hot\nOpposite 1: cold\n\nWord 2:"
    queries = [f"{head} {word}\nOpposite 2:" for word in ("big", "fast", "old", "dark")]
    tokens = [encode(query) for query in queries]
    shared = _alike(tokens)
    own = [len(each) - shared + 5 for each in tokens]
    few = shared + sum(own)
    margin = 12
    story = _so_long(few + 60 + margin, encode)
    problem = _so_long(len(encode(story)) + 80, encode)
    sizes = {"U1": len(encode(_chat(system, "Hi"))) + 2}
    for turn, text in (("U2", problem), ("U3", "Bye")):
        sizes[turn] = len(encode(f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")) + 4
    pool = sizes["U1"] + sizes["U2"] + sizes["U3"] + few + 3
    asks = {
        "U1": Ask("chat 1", "U1", "Hi", reply(3)), "U2": Ask("chat 1", "U2", problem, reply(3)),
        "V1": Ask("chat 2", "V1", "What is a pear?", reply(10)), "V2": Ask("chat 2", "V2", story, reply(3)),
        "U3": Ask("chat 1", "U3", "Bye", reply(3)),
        "A": Ask("few-shot", "A", queries[1], reply((own[0] + own[2] + 8) // 4 + 1, n=4)),
    }  # fmt: skip
    for at, query in enumerate(queries, start=1):
        asks[f"Q{at}"] = Ask("few-shot", f"Q{at}", query, reply(6))
    order = ["", "U1", "U2", "V1", "V2", "Q1", "Q2 Q3 Q4", "U3", "A"]
    return [[asks[turn] for turn in step.split()] for step in order], pool
