"""Lesson 08: make a story happen. Fill in the three functions; README.md says what and why.

    pytest lessons/08_nine_steps        grades this file

You return data, the real engine runs it (page size 1, eviction policy lru, classroom Llama), and the
grader looks at what became of the tree.

A story is (steps, kv_tokens). kv_tokens is the size of the pool. steps is a list of lists of `Ask`: all
of one step are sent together and run to their end before the next step begins.

    Ask(of="chat 1", turn="U1", text="Hello", params=reply(4))

of      the conversation that it belongs to: "chat 1", "chat 2", ... or "few-shot"
turn    its name
text    a chat's next message, or a whole few-shot prompt

What the engine gets for the first message of a chat is `first_prompt(system, text)`. For a later one it
is all token ids so far, then `next_prompt(text)`. A few-shot prompt is sent as it is, without the system
prompt.

Both arguments of each function are the grader's:

system  the system prompt of all chats. You do not know it: every student gets others, shorter and longer.
encode  encode(text) -> list of token ids. Use it to count.
"""

from __future__ import annotations

from collections.abc import Callable

from minirad.config import SamplingParams
from minirad.figure3 import Ask

Story = tuple[list[list[Ask]], int]
Encode = Callable[[str], list[int]]


def first_prompt(system: str, text: str) -> str:
    """What a chat's first message becomes."""
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


def next_prompt(text: str) -> str:
    """What is put behind the history for a later message.

    Where a reply did not end by itself, its <|im_end|> is put in before this: one token more.
    """
    return f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def reply(tokens: int, n: int = 1) -> SamplingParams:
    """A reply of exactly so many tokens, whatever they say; n > 1: n of them, sampled.

    They are sampled so hot that no two begin alike (if they did, they would share an edge), and make no
    sense.

    All but the last of them get KV: a request with p prompt tokens leaves p + tokens - 1 in the tree.
    """
    hot = 10.0 if n > 1 else 0.0
    return SamplingParams(max_new_tokens=tokens, ignore_eos=True, n=n, temperature=hot, seed=1)


def split_story(system: str, encode: Encode) -> Story:
    """Two steps, one request in each, from two different chats.

    The first leaves one edge. The second, from the other chat, splits that edge where the two part.
    Nothing is evicted, and in the end the pool is full to the last slot: kv_tokens is exactly what is
    needed.
    """
    raise NotImplementedError("todo: split_story")


def forget_story(system: str, encode: Encode) -> Story:
    """Four steps, one request in each: turns U1 and U2 of "chat 1", V1 of "chat 2", U3 of "chat 1".

    In steps 1 and 2 nothing is evicted. In step 3 exactly one node is evicted: chat 1's second turn (U2
    with its reply). Its first turn stays. In step 4 chat 1 comes back: everything up to the end of its
    first turn is cached, and the second turn has to be computed again.
    """
    raise NotImplementedError("todo: forget_story")


def nine_steps(system: str, encode: Encode) -> Story:
    """The paper's figure with texts of your own: nine steps, ten requests.

    1  nothing (an empty list)
    2  U1 of "chat 1"        one edge
    3  U2 of "chat 1"        a child below it
    4  V1 of "chat 2"        the edge is split where the chats part
    5  V2 of "chat 2"        exactly U2 is evicted
    6  Q1 of "few-shot"      a new edge below the root; nothing is evicted
    7  Q2, Q3, Q4            together; the edge is split; nothing is evicted
    8  U3 of "chat 1"        U2 is computed again; exactly V2 and V1 are evicted
    9  A of "few-shot"       the same prompt as Q2, with at least 3 samples; exactly Q1, Q3 and Q4 are evicted

    All few-shot prompts begin alike and end differently. `minirad.figure3.STEPS` tells the same story with
    other texts and real replies; the grader uses `minirad.figure3.check_story`.
    """
    raise NotImplementedError("todo: nine_steps")
