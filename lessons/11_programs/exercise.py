"""Lesson 11: programs. Fill in the five functions; README.md says what and why.

    pytest lessons/11_programs        grades this file

Tokens are lists of token ids, as everywhere. In this lesson pages have one token, and no request waits for
another's prefix by itself (the engine's option `in_batch_prefix` is off): what is computed twice is seen.

`fork` and `select` are given a `desk`, behind which the real engine stands:

desk.send(tokens, new_tokens) -> name        puts a request on its way and returns at once. Its answer will
                                             be a reply of so many token ids; with 0 new tokens the prompt
                                             is computed and nothing is said, the answer is [].
desk.score(tokens, start) -> name            the same, but its answer will be the log-probabilities of the
                                             tokens from place `start` (1 or more) on, each as the model
                                             sees it after the tokens before it. Nothing is generated.
desk.wait(names) -> list of answers          lets the engine work until all these requests are done. Others
                                             that are on their way go on meanwhile. The answers come in the
                                             order of `names`.
desk.pin(tokens) -> pin                      holds what the tree has of these tokens *now*: it is not evicted
desk.unpin(pin)                              lets it go

`send` and `score` raise ValueError for what cannot be served (an empty list, more than the pool holds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from minirad.frontend import State


class Desk(Protocol):
    def send(self, tokens: Sequence[int], new_tokens: int) -> str: ...
    def score(self, tokens: Sequence[int], start: int) -> str: ...
    def wait(self, names: Sequence[str]) -> list[list[Any]]: ...
    def pin(self, tokens: Sequence[int]) -> Any: ...
    def unpin(self, pin: Any) -> None: ...


class Thought(Protocol):
    tokens: tuple[int, ...]  # what is added to the text before the model thinks this thought, 1 or more
    new_tokens: int  # how long the model's thought is, 1 or more
    children: tuple[Any, ...]  # thoughts that may follow it


def computed_tokens(prefix: int, own: Sequence[int], chunk: int, hint: bool, parallel: bool) -> int:
    """How many prompt tokens does the engine compute for a fork?

    prefix: how many tokens all branches begin with (1 or more). own: of each branch, how many tokens it adds
    (1 or more); there is one branch at least, and no two branches add the same first token. The tree is empty
    before, and the pool is large.
    chunk: prompt tokens that a step computes at most; any branch (prefix and own tokens) fits into a step.
    hint: the prefix is sent ahead, alone, and the branches only when it is done.
    parallel: the branches are sent all at once; else each is sent when the one before it has its reply.

    A step takes the waiting requests in order, while it has tokens left in its chunk: the last one that it
    takes may get only a part of what it needs, and goes on in the next step. A request finds in the tree
    what *earlier* steps have computed, when a step takes it on for the first time. Not later.

    A prediction: no engine runs in it (nor in `steps`).
    """
    raise NotImplementedError("todo: computed_tokens")


def steps(prefix: int, own: Sequence[int], new_tokens: int, chunk: int, hint: bool, parallel: bool) -> int:
    """In how many steps is a fork done, if every branch generates `new_tokens` (1 or more)?

    The rest as in computed_tokens. The step that computes the end of a prompt also gives the first new token.
    A step either computes prompts or decodes: while any prompt waits or is not done, nobody decodes. A
    decoding step gives one token to each request that runs (there is room for all of them). A hint generates
    nothing: it is done in the step that computes it.
    """
    raise NotImplementedError("todo: steps")


def fork(
    desk: Desk, prefix: Sequence[int], branches: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """Runs branches side by side behind one prefix; returns their replies, in the order of `branches`.

    First the hint: the prefix, alone, without new tokens. When it is done, pin the prefix, so that nobody
    evicts it before its branches have used it. Then send all branches (prefix and own tokens), in order, and
    wait for all of them. The pin is given back when the last branch is done, and not before; it is given
    back as well if anything raises on the way (the error then goes on to the caller).
    Nothing else is sent. An empty prefix needs no hint and no pin. The arguments stay as they are.
    """
    raise NotImplementedError("todo: fork")


def select(desk: Desk, prefix: Sequence[int], choices: Sequence[Sequence[int]]) -> tuple[int, list[float]]:
    """Which of several continuations does the model find likeliest? Nothing is generated.

    Returns (place, scores): the score of each choice, in order, and the place of the best one (of equal
    scores the first). A score is the mean log-probability of the choice's own tokens behind the prefix: the
    sum divided by their number, so that a long choice is not worse for being long.

    The prefix is computed once, as in `fork`: a hint (sent without new tokens), pinned until all is done or
    something raises; then all choices are sent at once.
    ValueError, before anything is sent, for an empty prefix (what would the first token follow?), for no
    choices, for an empty choice, and for two equal ones. The arguments stay as they are.
    """
    raise NotImplementedError("todo: select")


async def explore(
    s: State, thought: Thought, promising: Callable[[list[int]], bool], room: int
) -> list[list[int]]:
    """Thinks a tree of thought, with the fewest computed tokens, and then in as few steps as it can.

    You write a program for the engine's own frontend (`await` where the engine works):

    s += tokens                                      adds tokens to a state
    await s.gen("thought", max_new_tokens=n)         the model goes on; s has what it said, n tokens here
    s.said("thought").token_ids                      what it said
    s.tokens                                         all tokens of the state so far
    branches = await s.fork(n)                       a sequence of n states that go on from here (with a hint,
                                                     pinned)
    await branches.each(program)                     runs program(branch, index) in all branches at once;
                                                     returns the list of what they return
    await branches.join()                            when the branches are done: lets the pin go

    At each thought: add its tokens to the state, and let the model think. If the reply is not
    `promising(token_ids)`, or there are no children, the way ends here. Else all children are explored, each
    in a branch of its own.

    Returns the `tokens` of the state at the end of each way, in the tree's order (a child's ways before
    those of the next child), also of ways that are not promising.

    room: how many slots of the pool are for this thought and all that comes below it. Whoever explores one
    child after another, each to its end, needs room for the longest way only (and has it). A thought whose
    children fit side by side explores them all at once: that is so if its own tokens and those of *all*
    thoughts below it, new ones included, are at most `room`. Else it explores one after another, and each
    child has the room that is left behind this thought's own tokens and new tokens.
    """
    raise NotImplementedError("todo: explore")
