"""Hidden cases of lesson 09: first some that are the same for every student, then random games.

All of them run beside the engine's own tree, cache manager and scheduler.
"""

from __future__ import annotations

from random import Random
from types import ModuleType
from typing import Any

from lessons.grading import expect, sibling
from minirad.config import SamplingParams

open_cases = sibling(__file__, "exercises")

# ---------------------------------------------------------------------- the same for everybody


def long_prompts(impl: ModuleType) -> None:
    """Hundreds of pages, large token ids; the second half goes another way."""
    for page_size in (1, 3):
        twins = open_cases.Twins(impl, page_size)
        tokens = [2**31 - 1 - 7 * i for i in range(110 * page_size + 2)]
        twins.run(tokens, [*tokens[: 57 * page_size], *tokens], tokens, tokens[::-1])


def many_side_by_side(impl: ModuleType) -> None:
    """Five requests with beginnings in common run at once, and end in another order than they began."""
    for page_size in (1, 2, 4):
        twins = open_cases.Twins(impl, page_size)
        trunk = [i % 3 for i in range(4 * page_size)]
        for name, cut in zip("ABCDE", (4, 1, 3, 4, 2), strict=True):
            twins.begin(name, [*trunk[: cut * page_size], *range(9, 9 + page_size), ord(name)])
        for name in "DBEAC":
            twins.end(name)
        twins.run([*trunk, 5], [*trunk[:page_size], *range(9, 9 + 2 * page_size)])


def pages_of_zeros(impl: ModuleType) -> None:
    """Token 0, and pages that are all alike: only their place tells them apart."""
    for page_size in (1, 2, 3):
        twins = open_cases.Twins(impl, page_size)
        twins.run(
            *([0] * length for length in (1, 4 * page_size, 2 * page_size, 7 * page_size, 5 * page_size + 1))
        )
        twins.run([0] * page_size + [1] * page_size, [1] * page_size + [0] * page_size, [1] * 3 * page_size)


def interleaved_indexes(impl: ModuleType) -> None:
    """Two indexes with the same page size, and requests that are under way in both."""
    one, two = open_cases.Twins(impl, 2), open_cases.Twins(impl, 2)
    for name, tokens in (("A", [1, 2, 3, 4, 5]), ("B", [1, 2, 3, 4, 6, 7]), ("C", [1, 2])):
        one.begin(name, tokens)
        two.begin(name, tokens[::-1])
    for name in "BCA":
        two.end(name)
        one.end(name)
    one.run([1, 2, 3, 4, 6, 7, 8], [7, 6, 4, 3])
    two.run([1, 2, 3, 4, 6, 7, 8], [7, 6, 4, 3])


def accounts_of_many_sizes(impl: ModuleType) -> None:
    """Prompts and replies that end anywhere in a page; hints without a reply; the same request thrice."""
    trunk = list(range(1, 13))
    for page_size in (3, 5):
        requests = [(trunk[:cut], [40 + cut, *trunk[: cut % 4]]) for cut in (12, 7, 10, 5, 9)]
        requests += [(trunk, ()), (trunk, [52, 1]), ([*trunk, 52, 1], [8]), (trunk[:6], [7, 8, 9])]
        open_cases.check_account(impl, page_size, requests)


def replies_are_found_too(impl: ModuleType) -> None:
    """A prompt that is longer than an earlier prompt by a part of its reply, or by all of it."""
    prompt, reply = [1, 2, 3, 4, 5], [6, 7, 8, 9]
    for page_size in (2, 3):
        for taken in (0, 1, 3, 4):
            requests = [
                (prompt, reply),
                ([*prompt, *reply[:taken], 50], [1]),
                ([*prompt, *reply[:taken]], [2, 3]),
            ]
            open_cases.check_account(impl, page_size, requests)


def forks_of_many(impl: ModuleType) -> None:
    """Nine samples; long prompts; a leader whose pages came out of the tree, in no order."""
    before = [
        list(range(30, 50)),
        list(range(8)),
        [*range(8), 70, 71, 72],
        [*range(8), 70, 71, 72, 73, 74, 75],
    ]
    for page_size in (2, 5):
        for length in (13, 14, 15, 19, 20):
            fork = [*range(8), 70, 71, 72, *range(200, 200 + length)][:length]
            open_cases.fork_both(impl, page_size, fork, 9, before)
    open_cases.fork_both(impl, 7, range(300), 3)


def room_runs_out(impl: ModuleType) -> None:
    """Some samples get the last pages, the others none."""
    for page_size, length, spare in ((4, 5, 1), (3, 8, 2), (2, 1, 3), (16, 17, 1), (4, 8, 1), (1, 5, 1)):
        open_cases.fork_both(impl, page_size, range(length), 6, spare=spare)


def pages_of_large_forks(impl: ModuleType) -> None:
    """Long prompts, many samples, and replies over several pages."""
    for prompt, samples, page_size, steps in (
        (1000, 2, 16, 3), (96, 7, 16, 20), (95, 4, 16, 20), (97, 4, 16, 4), (1, 6, 3, 9), (2, 3, 3, 9),
        (3, 3, 3, 9), (50, 1, 7, 9),
    ):  # fmt: skip
        open_cases.check_pages(impl, prompt, samples, page_size, steps)


def measured_on_stranger_engines(impl: ModuleType) -> None:
    """Forks that copy more, on a warm engine, with no new token, in chunks."""
    engine_of, check, replies = open_cases.engine_of, open_cases.check_samples, open_cases.replies
    warm = open_cases.generous(engine_of(4))
    warm.generate([list(range(9))], replies(2, 3))
    check(impl, "a warm engine that was changed", warm, range(13), replies(1, 4))
    check(impl, "pages of 4, nothing new", engine_of(4), range(7), replies(0, 3))
    some = replies(2, 5, ignore_eos=False, seed=5)
    check(
        impl,
        "a changed engine (replies end when they like)",
        open_cases.generous(engine_of(3)),
        range(8),
        some,
    )
    check(impl, "an engine without a radix tree", engine_of(2, radix_cache=False), range(5), some)
    check(impl, "an engine with 3 rows", engine_of(4, max_running=3), range(6), replies(1, 3))


def measured_twice(impl: ModuleType) -> None:
    """The same engine, measured again: only what is new counts."""
    engine = open_cases.engine_of(4)
    for prompt in (range(11), range(11), range(5)):
        open_cases.check_samples(
            impl, "an engine that was measured before", engine, prompt, open_cases.replies(2, 3)
        )
    engine = open_cases.engine_of(4)
    for prefix in (range(11), range(11), range(6)):
        open_cases.check_branches(
            impl, "an engine that was measured before", engine, prefix, [[50, 51], [60]]
        )


def branches_of_long_prefixes(impl: ModuleType) -> None:
    """Prefixes of every length, ends that begin like what the tree has, one branch and eight."""
    for length in range(1, 10):
        engine = open_cases.engine_of(4)
        engine.generate([[*range(length), 30, 31, 32, 33, 34, 35]], open_cases.replies(1))
        ends: list[Any] = [[30, 31, 32, 33, 34], [30], [30, 31, 32, 99], [5]][: 1 + length % 4]
        open_cases.check_branches(impl, "a warm engine", engine, range(length), ends)
    open_cases.check_branches(
        impl, "pages of 16", open_cases.engine_of(16), range(45), [[60 + i] for i in range(8)]
    )


# ---------------------------------------------------------------------- random


def _sequence(rng: Random, known: list[list[int]], longest: int, ids: int = 3) -> list[int]:
    """At least one token; often the beginning of a known sequence with something else behind it."""
    tail = [rng.randrange(ids) for _ in range(rng.randrange(1, longest + 1))]
    head = list(rng.choice(known)) if known and rng.random() < 0.75 else []
    tokens = head[: rng.randrange(len(head) + 1)] + (tail if rng.random() < 0.8 or not head else [])
    return tokens or tail


def random_requests(impl: ModuleType, rng: Random) -> None:
    """Requests begin and end at random, a few at a time."""
    for page_size in (1, 2, 3, 4):
        twins, known = open_cases.Twins(impl, page_size), list[list[int]]()
        for number in range(14):
            tokens = _sequence(rng, known, 4 * page_size)
            known.append(tokens)
            twins.begin(f"R{number}", tokens)
            while twins.running and (len(twins.running) > 3 or rng.random() < 0.45):
                twins.end(rng.choice(list(twins.running)))
        for name in list(twins.running):
            twins.end(name)


def random_accounts(impl: ModuleType, rng: Random) -> None:
    """Chats, repeats and strangers."""
    for page_size in rng.sample((1, 2, 3, 4, 5, 8), 3):
        known, requests = list[list[int]](), []
        for _ in range(rng.randrange(3, 8)):
            prompt = _sequence(rng, known, 3 * page_size)
            reply = [
                rng.randrange(3) for _ in range(rng.choice((0, 1, 1, 2, 3, rng.randrange(2 * page_size + 1))))
            ]
            requests.append((prompt, reply))
            known.append([*prompt, *reply])
        open_cases.check_account(impl, page_size, requests)


def random_forks(impl: ModuleType, rng: Random) -> None:
    """Forks of any length, in pools of any state; and the pages that run then."""
    for _ in range(8):
        page_size = rng.choice((1, 2, 3, 4, 8))
        known: list[list[int]] = []
        for _ in range(rng.randrange(4)):
            known.append(_sequence(rng, known, 3 * page_size))
        prompt = _sequence(rng, known, 3 * page_size)
        spare = rng.choice((-1, -1, 0, 1, 2))
        open_cases.fork_both(impl, page_size, prompt, rng.randrange(2, 6), known, spare)
    for _ in range(3):
        page_size = rng.choice((1, 2, 4, 8))
        open_cases.check_pages(impl, rng.randrange(1, 4 * page_size), rng.randrange(1, 6), page_size)


def random_measurements(impl: ModuleType, rng: Random) -> None:
    """Engines of all kinds, cold or warm."""
    for _ in range(4):
        page_size = rng.choice((1, 2, 4, 8))
        engine = open_cases.engine_of(page_size, radix_cache=rng.random() < 0.8)
        if page_size > 1 and rng.random() < 0.4:
            engine = open_cases.generous(engine)
        known: list[list[int]] = []
        for _ in range(rng.randrange(3)):
            known.append(_sequence(rng, known, 3 * page_size))
            engine.generate([known[-1]], open_cases.replies(rng.randrange(3)))
        prompt = _sequence(rng, known, 3 * page_size)
        what = f"an engine with pages of {page_size}"
        if rng.random() < 0.5:
            params: SamplingParams = open_cases.replies(
                rng.randrange(1, 4),
                rng.randrange(2, 6),
                ignore_eos=rng.random() < 0.5,
                seed=rng.randrange(99),
            )
            open_cases.check_samples(impl, what, engine, prompt, params)
        else:
            ends = [_sequence(rng, known, 2 * page_size) for _ in range(rng.randrange(1, 5))]
            open_cases.check_branches(impl, what, engine, prompt, ends)


def three_experiments_again(impl: ModuleType) -> None:
    """Asked twice, the same answer: experiments are no accident."""
    first, second = impl.claims_tried(), impl.claims_tried()
    expect(first == second, f"claims_tried returned {first!r:.200} and then {second!r:.200}")


HIDDEN = {
    "whole_pages": [long_prompts, many_side_by_side, pages_of_zeros, interleaved_indexes, random_requests],
    "page_account": [accounts_of_many_sizes, replies_are_found_too, random_accounts],
    "fork": [forks_of_many, room_runs_out, pages_of_large_forks, random_forks],
    "measure": [measured_on_stranger_engines, measured_twice, branches_of_long_prefixes, random_measurements],
    "claims_tried": [three_experiments_again],
}
