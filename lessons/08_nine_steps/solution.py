"""Lesson 08, solved by counting: every size is known before anything runs."""

from __future__ import annotations

from collections.abc import Callable

from minirad.config import SamplingParams
from minirad.figure3 import Ask

Story = tuple[list[list[Ask]], int]
Encode = Callable[[str], list[int]]


def first_prompt(system: str, text: str) -> str:
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


def next_prompt(text: str) -> str:
    return f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def reply(tokens: int, n: int = 1) -> SamplingParams:
    hot = 10.0 if n > 1 else 0.0
    return SamplingParams(max_new_tokens=tokens, ignore_eos=True, n=n, temperature=hot, seed=1)


def common(one: list[int], other: list[int]) -> int:
    """How many tokens two lists begin with alike."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def split_story(system: str, encode: Encode) -> Story:
    """Two chats part behind the system prompt."""
    first, second = (encode(first_prompt(system, text)) for text in ("Hello", "What can you do?"))
    steps = [[Ask("chat 1", "U1", "Hello", reply(4))], [Ask("chat 2", "V1", "What can you do?", reply(4))]]
    return steps, len(first) + 3 + len(second) - common(first, second) + 3


def forget_story(system: str, encode: Encode) -> Story:
    """Chat 2 needs more than is free; the second turn of chat 1 is the oldest leaf."""
    steps = [
        [Ask("chat 1", "U1", "Hello", reply(4))],
        [Ask("chat 1", "U2", LONG, reply(4))],
        [Ask("chat 2", "V1", LONG, reply(4))],
        [Ask("chat 1", "U3", "Thank you", reply(4))],
    ]
    first = len(encode(first_prompt(system, "Hello"))) + 3
    second, third = (1 + 1 + len(encode(next_prompt(text))) + 3 for text in (LONG, "Thank you"))
    return steps, first + second + third + 4  # the last token of a reply must fit, too, though it gets no KV


LONG = "Otto has four pears in a red basket. Erik comes and gives three pears to Otto. How many are there?"
EXAMPLES = "Answer the questions.\n\nQuestion 1: Name a day.\nAnswer 1: Monday.\n\nQuestion 2: Name a"
WORDS = (" color", " friend", " fruit", " city")
PLENTY = f"{LONG} {LONG} Show every step of your work, and say it once more in the end."


def nine_steps(system: str, encode: Encode) -> Story:
    """The pool holds what must be there after step 8, and two slots more."""
    questions = [f"{EXAMPLES}{word}.\nAnswer 2:" for word in WORDS]
    ids = [encode(text) for text in questions]
    shared = min(common(ids[0], other) for other in ids[1:])
    leaves = [len(each) - shared + 3 for each in ids]  # a question's own part and its reply
    few_shot = shared + sum(leaves)

    def later(text: str, tokens: int) -> int:
        return 2 + len(encode(next_prompt(text))) + tokens - 1

    first = len(encode(first_prompt(system, "Hello"))) + 3
    problem, thanks = later(PLENTY, 4), later("Thank you", 4)
    pool = first + problem + thanks + few_shot + 2
    # Chat 2 must not fit beside U2, but beside all few-shot queries: half-way between the two.
    other, chat = encode(first_prompt(system, "What can you do?")), encode(first_prompt(system, "Hello"))
    abilities = len(other) - common(other, chat) + 3
    room = (few_shot + thanks + 2 + problem + thanks) // 2
    story = room - abilities - later(LONG, 1)
    samples = 3
    need = leaves[0] + leaves[2] + leaves[3] // 2 + 2
    return [
        [],
        [Ask("chat 1", "U1", "Hello", reply(4))],
        [Ask("chat 1", "U2", PLENTY, reply(4))],
        [Ask("chat 2", "V1", "What can you do?", reply(4))],
        [Ask("chat 2", "V2", LONG, reply(story))],
        [Ask("few-shot", "Q1", questions[0], reply(4))],
        [Ask("few-shot", f"Q{at}", questions[at - 1], reply(4)) for at in (2, 3, 4)],
        [Ask("chat 1", "U3", "Thank you", reply(4))],
        [Ask("few-shot", "A", questions[1], reply(need // samples + 1, n=samples))],
    ], pool
