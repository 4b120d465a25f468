"""Lesson 09: what do pages cost and save, and may a tail be shared? README.md says what and why.

    pytest lessons/09_pages_and_tails        grades this file

The words used here:

page     page_size slots one after the other; slot s lies in page s // page_size. Page 0 is nobody's.
tail     the tokens behind the last whole page: fewer than page_size of them, often none
row      says for each token of one request in which slot it lies. Token i lies at offset i % page_size of
         its page, always.
leader   a request with several samples: the one whose prompt was computed, and from which the others part

Token ids are whole numbers from 0 on. Nothing that you are given is changed unless its text says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minirad.config import SamplingParams
    from minirad.engine import Engine

Tokens = Sequence[int]


def match_pages(index: dict[Any, Any], tokens: Tokens, page_size: int) -> list[int]:
    """The pages that hold the longest beginning of `tokens` that the index knows, in order; [] for none.

    index: empty at first, later as insert_pages left it (see there).
    A page counts only when all of its tokens are alike, and all tokens before it. All of `tokens` may be
    found: that the engine computes one of them again is not your business here. Changes nothing.
    """
    raise NotImplementedError("todo: match_pages")


def insert_pages(index: dict[Any, Any], tokens: Tokens, pages: Sequence[int], page_size: int) -> list[int]:
    """A request has ended: its whole pages go into the index. Returns its pages that are free now.

    index: what it holds and how is yours: no tree is asked for, a dictionary does. But everything that you
        know from one call to the next is in it: there may be several indexes at a time.
    tokens: those of the request that have KV.
    pages: its page table, a number for each page that holds tokens of it, the tail's too: pages[j] holds
        those from j * page_size on. It begins with the pages that the request took from this index: those
        that match_pages gave, or one less (a token at least is always computed, in a page of its own).

    Each page belongs to the index afterwards, or it is free. Free are, in the order of `pages`:
    * duplicates: the index had the same beginning already, in another page (it keeps the one that it has);
    * the page of the tail, if there is one: it is not whole.
    A page that the index had given to the request is no duplicate of itself.
    """
    raise NotImplementedError("todo: insert_pages")


def page_account(page_size: int, requests: Sequence[tuple[Tokens, Tokens]]) -> list[dict[str, int]]:
    """What pages of this size cost each of these requests, in the numbers of the engine.

    requests: prompt and reply of each, served one after another by an engine that was just started and has
    room for all of them: nothing is evicted. (Of one prompt token or more; a reply may be empty.)

    What the engine does with each:
    * It looks the prompt up. Whole pages that are alike need not be computed; but one token of a prompt is
      always computed (the next one needs its logits), and a page is used whole or not at all.
    * All tokens of prompt and reply get KV, except the last token of the reply: it is never fed back.
    * When it ends, all its whole pages with KV are in the tree.

    Returns for each request a dictionary:
        "cached"    prompt tokens that it took from the tree
        "lost"      how many more an engine with pages of one token would have taken, after the same requests
        "entries"   entries of its page table when it ends: pages in which tokens of it have their KV
        "idle"      slots of these pages in which no token of it has its KV
    """
    raise NotImplementedError("todo: page_account")


def fork_tail(
    row: Sequence[int], page_size: int, alloc: Callable[[int], list[int] | None]
) -> tuple[list[int], list[tuple[int, int]]] | None:
    """A further sample parts from its leader. Returns (the sample's row, copies), or None: no room.

    row: the leader's slots, one for each token of the prompt, all of which was just computed. The whole
        pages are the tree's by now, the tail is the leader's own.
    alloc(n): the numbers of n new pages; None, and none is taken, where there are fewer. Take no page
        that is not needed.
    the sample's row: a list of its own; it will grow.
    copies: pairs (from, to) of slots, in the order of the tokens: what must be copied before anybody writes.

    Afterwards leader and sample go on independently: each writes its next token into the slot behind the last
    one of its row, or into a new page where that one is full. Neither may ever see what the other writes.
    What both only read is shared.
    """
    raise NotImplementedError("todo: fork_tail")


def fork_pages(prompt_tokens: int, samples: int, new_tokens: int, page_size: int) -> int:
    """How many pages of the pool are in use while `samples` samples of one prompt run.

    At a moment when each of them has generated `new_tokens` tokens (1 or more), and none has ended. The last
    token generated has no KV yet. Pages that are shared count once. The pool was empty before.
    """
    raise NotImplementedError("todo: fork_pages")


def measure_samples(engine: Engine, prompt: Tokens, params: SamplingParams) -> dict[str, Any]:
    """Runs a prompt with params.n samples (two or more) on this engine, to its end, and says what was copied.

    engine: a real one, but not always the one that you know: with other pages, with little room, without
        a radix tree, or changed in a way that you cannot see. So look at what happens; do not calculate.
        It has no other requests; it may have served some before.

    Returns a dictionary:
        "copied"    a list: for each sample that parted from its leader, how many slots were copied for it,
                    in the order in which they parted
        "waited"    how many samples found no room when they should have parted
        "in_vain"   how many of the copied slots belong to samples that ended before they wrote anything: no
                    token of their own ever got KV

    `with Recorder(engine) as recording: engine.generate(...)` (from minirad) keeps all events, step by step:
    `for frame in recording: for event in frame.events: ...`. See RequestForked, SlotsAllocated and
    RequestFinished in minirad/observe/events.py, and what `generate` returns in minirad/outputs.py.
    """
    raise NotImplementedError("todo: measure_samples")


def measure_branches(engine: Engine, prefix: Tokens, ends: Sequence[Tokens]) -> dict[str, Any]:
    """Forks as a program does it (`fork` of minirad.frontend), and says what was computed.

    1. The prefix alone is sent ahead, as a request that generates nothing (max_new_tokens=0), to its end.
    2. It is pinned (`engine.pin(prefix)`), so that it is not evicted.
    3. All branches are sent together: prefix + end for each of `ends` (none is empty), with
       max_new_tokens=1, to their end.
    4. When all have ended, the pin is given back (`engine.unpin`).

    engine: as in measure_samples.

    Returns a dictionary:
        "hint"      tokens that were computed in step 1
        "again"     a list: for each branch, how many tokens of the prefix it computed
        "own"       a list: for each branch, how many tokens of its end it computed
    """
    raise NotImplementedError("todo: measure_branches")


def claims_tried() -> dict[str, tuple[int, int, int, int]]:
    """Two published claims about forks, tried on the engine, by three experiments.

    "Copy-on-write: the samples of one prompt share all of its pages, also the last one, which is not full. A
    page is copied when a sample is about to write into it, not before."
    "A radix cache never copies a page: the branches of a fork share the prefix by pointing at its slots."

    An experiment is (page_size, prompt_tokens, samples, new_tokens): a prompt of so many tokens that the
    engine has never seen, so many samples of it, each of exactly so many new tokens. The least is
    (1, 1, 1, 1), the most (16, 64, 8, 8).

    Return three:
        "three_twice"   pages of 4; in all, exactly two copies of 3 slots each are made
        "nobody_wrote"  slots are copied, though none of the samples ever writes KV of a token of its own
        "no_copy"       nothing is copied at all, although two or more samples write KV of two or more tokens
                        each, and pages are larger than one slot
    """
    raise NotImplementedError("todo: claims_tried")
