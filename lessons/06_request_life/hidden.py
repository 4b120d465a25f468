"""Hidden cases of lesson 06: first some that are the same for every student, then random ones."""

from __future__ import annotations

from random import Random
from types import ModuleType
from typing import Any

import numpy as np

from lessons.grading import expect, sibling
from lessons.grading.game import said
from minirad.cache.allocator import PageAllocator
from minirad.cache.radix_cache import RadixCache
from minirad.config import SamplingParams, ScheduleOptions
from minirad.events import EventBus
from minirad.schedule.cache_manager import CacheManager
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Scheduler

exercises = sibling(__file__, "exercises")
solution = sibling(__file__, "solution")


# ---------------------------------------------------------------------- the same for everybody


def lives_of_everybody(impl: ModuleType) -> None:
    """Requests that share beginnings, with pages of 1, 2, 3 and 4 that are used again and again."""
    _small_lives(impl, impl, solution)
    _live(impl, Random("everybody's"), unfinished=impl, finished=solution)


def ends_of_everybody(impl: ModuleType) -> None:
    """The same, and how they end."""
    _small_lives(impl, solution, impl)
    _live(impl, Random("everybody's"), unfinished=solution, finished=impl)


def _small_lives(impl: ModuleType, unfinished: ModuleType, finished: ModuleType) -> None:
    """Duplicates with something new behind them, with a tail, behind something protected."""
    for page, greedy in ((3, True), (3, False), (1, True), (4, False)):
        world = exercises.World(page, greedy)
        prompt = list(range(1, 3 * page + 1))
        one, two = world.admit("R1", prompt), world.admit("R2", prompt)
        about = f"two requests with one prompt, pages of {page}" + (", a greedy tree" if greedy else "")
        for request, more in ((two, [90, 91]), (one, [])):  # page 1 was another's before
            world.compute(request, [*prompt[: 2 * page], *more])
        world.commit(unfinished, one, False, f"{about}: R1")
        world.commit(unfinished, two, False, f"{about}: R2, two tokens longer")
        three = world.admit("R3", [*prompt[:page], 80])
        world.compute(three, [*prompt[len(three.tokens) : page], 80])
        world.compute(one, prompt[2 * page :])
        world.commit(unfinished, one, False, f"{about}: R1 a page later")
        four = world.admit("R4", [*prompt[: 2 * page], 70], cached=page)
        world.compute(four, [*prompt[page : 2 * page], 70])
        five = world.admit("R5", prompt[:page])
        world.compute(five, prompt[:page])
        world.commit(unfinished, five, False, f"{about}: R5, all of it cached, computes its page again")
        for request in (four, three, two, five):
            world.commit(finished, request, True, f"{about}: {request.name} ends")
        six = world.admit("R6", prompt[:page])
        world.compute(six, prompt[:page])
        for request in (six, one):
            world.commit(finished, request, True, f"{about}: {request.name} ends")


def plans_of_everybody(impl: ModuleType) -> None:
    """Pages of 3, chunks that are no whole pages, prompts that fit exactly; each question twice."""
    for lengths, cached, chunk, page in [
        ([7], [6], 4, 3), ([6], [6], 4, 3), ([5], [5], 2, 3), ([9, 4], [9, 3], 5, 3), ([7, 2], [4, 0], 3, 4),
        ([11, 3, 1], [0, 3, 0], 5, 4), ([4, 4, 4, 4], [0, 0, 0, 0], 4, 1), ([8, 8], [0, 0], 8, 2),
        ([12], [0], 3, 1), ([3, 5, 2], [0, 5, 2], 2, 1), ([100_000], [70_001], 8192, 16), ([], [], 3, 3),
    ]:  # fmt: skip
        for _ in range(2):
            _plans(impl, lengths, cached, chunk, page)
    random_plans(impl, Random("everybody's"))


def owners_of_everybody(impl: ModuleType) -> None:
    """Pages of 3, slots in any order, rows that only read, three requests on one page, long names."""
    for count, page, free, tree, rows in [
        (3, 3, [3], [4, 8, 3], {}),
        (3, 3, [], [8, 4], {"R10": ([5, 3], 0), "R9": ([3, 4, 5], 3), "R2": ([3], 0)}),
        (2, 2, [1], [2], {"R1": ([3, 2], 0)}),
        (2, 4, [2], [], {"R1": ([4, 5, 9], 2), "a": ([10], 0), "z": ([8, 4], 2)}),
        (4, 3, [4], [3, 9], {"R1": ([3, 4, 5, 8, 7], 2)}),
        (2, 1, [], [2, 1], {"free": ([], 0), "B": ([1], 1)}),
    ]:
        _owners(impl, count, page, free, tree, rows)
    random_owners(impl, Random("everybody's"))


# ---------------------------------------------------------------------- random


def random_lives(impl: ModuleType, rng: Random) -> None:
    """Requests that come, grow by a few tokens at a time and share beginnings."""
    _live(impl, rng, unfinished=impl, finished=solution)


def random_ends(impl: ModuleType, rng: Random) -> None:
    """The same, and how they end."""
    _live(impl, rng, unfinished=solution, finished=impl)


def _live(impl: ModuleType, rng: Random, unfinished: ModuleType, finished: ModuleType) -> None:
    for page in (1, 2, 3, 4):
        world = exercises.World(page, greedy=rng.random() < 0.5)
        known: list[list[int]] = []
        prompts: dict[str, list[int]] = {}
        for turn in range(11):
            if len(world.live) < 3 and rng.random() < 0.6:
                prompt = _prompt(rng, known, page)
                known.append(prompt)
                request = world.admit(f"R{turn}", prompt)
                prompts[request.name] = prompt
            if not world.live:
                continue
            batch = rng.sample(world.live, rng.randint(1, len(world.live)))
            for request in batch:
                done = len(request.tokens)
                prompt = prompts[request.name]
                more = prompt[done : done + rng.randint(1, 4)] or [rng.randrange(3)]
                world.compute(request, more)
            for request in batch:
                about = f"random requests with pages of {page}, {request.name} with tokens {request.tokens}"
                if len(request.tokens) >= len(prompts[request.name]) and rng.random() < 0.4:
                    world.commit(finished, request, True, about)
                else:
                    world.commit(unfinished, request, False, about)


def _prompt(rng: Random, known: list[list[int]], page: int) -> list[int]:
    tail = [rng.randrange(3) for _ in range(rng.randint(1, 3 * page + 2))]
    if not known or rng.random() < 0.2:
        return tail
    head = rng.choice(known)
    return head[: rng.randint(0, len(head))] + (tail if rng.random() < 0.7 else tail[:1])


def random_plans(impl: ModuleType, rng: Random) -> None:
    """Random prompts and hits."""
    for _ in range(75):
        page, chunk = rng.choice((1, 2, 3, 4, 8)), rng.randint(1, 20)
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(0, 6))]
        cached = [rng.randint(0, size) // page * page for size in lengths]
        _plans(impl, lengths, cached, chunk, page)


def _plans(impl: ModuleType, lengths: list[int], cached: list[int], chunk: int, page: int) -> None:
    given = list(lengths), list(cached)
    got = [[tuple(int(n) for n in piece) for piece in step]
           for step in impl.plan_chunks(*given, chunk, page)]  # fmt: skip
    wanted = solution.plan_chunks(lengths, cached, chunk, page)
    call = f"plan_chunks({lengths}, {cached}, chunk_tokens={chunk}, page_size={page})"
    expect(got == wanted, f"{call} gave {said(got)} instead of {said(wanted)}")
    expect(given == (lengths, cached), f"{call} must leave both lists as they are; they are {given} now")


def as_the_engine_does(impl: ModuleType, rng: Random) -> None:
    """What minirad's own scheduler does with the same prompts (nothing cached, fcfs)."""
    for _ in range(4):
        page, chunk = rng.choice((1, 2, 4)), rng.randint(3, 16)
        lengths = [rng.randint(1, 30) for _ in range(4)]
        scheduled = _scheduled(lengths, chunk, page)
        got = [[tuple(int(n) for n in piece) for piece in step]
               for step in impl.plan_chunks(lengths, [0] * len(lengths), chunk, page)]  # fmt: skip
        call = f"plan_chunks({lengths}, nothing cached, chunk_tokens={chunk}, page_size={page})"
        expect(got == scheduled, f"{call} gave {got}; the engine's scheduler does {scheduled}")


def _scheduled(lengths: list[int], chunk: int, page: int) -> list[list[tuple[int, int, int]]]:
    bus, cache = EventBus(), RadixCache(page)
    rows = ReqToTokenPool(8, 64)
    manager = CacheManager(cache, PageAllocator(64 * page, page), rows, bus)
    scheduler = Scheduler(manager, "fcfs", chunk, bus, ScheduleOptions())
    for number, size in enumerate(lengths):
        prompt = np.arange(size, dtype=np.int64) + 100 * number
        params = SamplingParams(max_new_tokens=1)
        scheduler.waiting.append(Request(str(number), prompt, params, 0, number))
    steps = []
    while scheduler.has_work:
        batch = scheduler.next_batch()
        assert batch is not None
        pieces = list(zip(batch.requests, batch.starts, strict=True))
        steps.append([(int(request.id), start, request.kv_len) for request, start in pieces])
        for request, _ in pieces:
            manager.commit(request, finished=False)
            if request.computed:
                manager.release(request, "tail")
                scheduler.finish(request)
    return steps


def random_owners(impl: ModuleType, rng: Random) -> None:
    """Random books, some of them broken."""
    for _ in range(30):
        page, count = rng.choice((1, 2, 3, 4)), rng.randint(1, 12)
        pages = list(range(1, count + 1))
        free = rng.sample(pages, rng.randint(0, count))
        tree = [s for p in rng.sample(pages, rng.randint(0, count)) for s in range(p * page, (p + 1) * page)]
        rng.shuffle(tree)
        rows = {}
        for name in ("R3", "R1", "R2")[: rng.randint(0, 3)]:
            row = [rng.choice(pages) * page + rng.randrange(page) for _ in range(rng.randint(0, 6))]
            rows[name] = (row, rng.randint(0, len(row)))
        _owners(impl, count, page, free, tree, rows)


def _owners(impl: ModuleType, count: int, page: int, free: list[int], tree: list[int], rows: Any) -> None:
    got = impl.page_owners(count, page, list(free), list(tree), dict(rows))
    wanted = solution.page_owners(count, page, free, tree, rows)
    what = f"{count} pages of {page}; free {free}, tree slots {tree}, rows {rows}"
    exercises._same(got, wanted, what)


HIDDEN = {
    "commit_unfinished": [lives_of_everybody, random_lives],
    "commit_finished": [ends_of_everybody, random_ends],
    "plan_chunks": [plans_of_everybody, random_plans, as_the_engine_does],
    "page_owners": [owners_of_everybody, random_owners],
}
