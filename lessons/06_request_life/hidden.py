"""Random cases of lesson 06."""

from __future__ import annotations

from random import Random
from types import ModuleType

import numpy as np

from lessons.grading import expect, sibling
from minirad.cache.allocator import PageAllocator
from minirad.cache.radix_cache import RadixCache
from minirad.config import SamplingParams, ScheduleOptions
from minirad.events import EventBus
from minirad.schedule.ownership import SlotOwnership
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Scheduler

exercises = sibling(__file__, "exercises")
solution = sibling(__file__, "solution")


def random_lives(impl: ModuleType, rng: Random) -> None:
    """Requests that come, grow by a few tokens at a time and share beginnings."""
    _live(impl, rng, unfinished=impl, finished=solution)


def random_ends(impl: ModuleType, rng: Random) -> None:
    """The same, and how they end."""
    _live(impl, rng, unfinished=solution, finished=impl)


def _live(impl: ModuleType, rng: Random, unfinished: ModuleType, finished: ModuleType) -> None:
    for page in (1, 1, 2, 4):
        world = exercises.World(page, greedy=rng.random() < 0.5)
        known: list[list[int]] = []
        prompts: dict[str, list[int]] = {}
        for turn in range(24):
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
    for _ in range(150):
        page, chunk = rng.choice((1, 1, 2, 4, 8)), rng.randint(1, 20)
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(0, 6))]
        cached = [rng.randint(0, size) // page * page for size in lengths]
        _plans(impl, lengths, cached, chunk, page)


def _plans(impl: ModuleType, lengths: list[int], cached: list[int], chunk: int, page: int) -> None:
    got = [[tuple(int(n) for n in piece) for piece in step]
           for step in impl.plan_chunks(list(lengths), list(cached), chunk, page)]  # fmt: skip
    wanted = solution.plan_chunks(lengths, cached, chunk, page)
    call = f"plan_chunks({lengths}, {cached}, chunk_tokens={chunk}, page_size={page})"
    expect(got == wanted, f"{call} gave {got} instead of {wanted}")


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
    ownership = SlotOwnership(cache, PageAllocator(64 * page, page), rows, bus)
    scheduler = Scheduler(ownership, "fcfs", chunk, bus, ScheduleOptions())
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
            ownership.commit(request, finished=False)
            if request.computed:
                ownership.release(request, "tail")
                scheduler.finish(request)
    return steps


def random_owners(impl: ModuleType, rng: Random) -> None:
    """Random books, some of them broken."""
    for _ in range(60):
        page, count = rng.choice((1, 2, 4)), rng.randint(1, 12)
        pages = list(range(1, count + 1))
        free = rng.sample(pages, rng.randint(0, count))
        tree = [s for p in rng.sample(pages, rng.randint(0, count)) for s in range(p * page, (p + 1) * page)]
        rows = {}
        for name in ("R3", "R1", "R2")[: rng.randint(0, 3)]:
            row = [rng.choice(pages) * page + rng.randrange(page) for _ in range(rng.randint(0, 6))]
            rows[name] = (row, rng.randint(0, len(row)))
        got = impl.page_owners(count, page, list(free), list(tree), dict(rows))
        wanted = solution.page_owners(count, page, free, tree, rows)
        what = f"{count} pages of {page}; free {free}, tree slots {tree}, rows {rows}"
        exercises._same(got, wanted, what)


HIDDEN = {
    "commit_unfinished": [random_lives],
    "commit_finished": [random_ends],
    "plan_chunks": [random_plans, as_the_engine_does],
    "page_owners": [random_owners],
}
