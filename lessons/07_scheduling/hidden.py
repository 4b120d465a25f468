"""Random cases of lesson 07, most of them against the engine's own policies and scheduler."""

from __future__ import annotations

from random import Random
from types import ModuleType
from typing import Any

import numpy as np

from lessons.grading import expect, sibling
from lessons.grading.cases import outline
from minirad import events as ev
from minirad.cache.allocator import PageAllocator
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.config import SamplingParams, ScheduleOptions
from minirad.schedule import policies
from minirad.schedule import request as engine
from minirad.schedule.ownership import SlotOwnership
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.scheduler import Scheduler

exercises = sibling(__file__, "exercises")
solution = sibling(__file__, "solution")
Request, Node, Tree = exercises.Request, exercises.Node, exercises.Tree


def _queue(rng: Random, size: int) -> tuple[list[Any], Any, str]:
    arrivals = rng.sample(range(100), size)
    queue = [
        Request(f"R{a}", arrival=a, priority=rng.choice((0, 0, 0, 1, -1)), passes=rng.randrange(5))
        for a in arrivals
    ]
    match = exercises.Lengths({request.name: rng.choice((0, 0, 5, rng.randrange(50))) for request in queue})
    said = ", ".join(
        f"{r.name} (match {match.table[r.name]}, priority {r.priority}, passed {r.passes})" for r in queue
    )
    return queue, match, said


def random_lpm(impl: ModuleType, rng: Random) -> None:
    """Random queues."""
    for _ in range(60):
        queue, match, said = _queue(rng, rng.randrange(9))
        wanted = exercises.names(policies.lpm(queue, match))
        exercises.same_order(impl.lpm_order(list(queue), match), wanted, queue, f"lpm_order of {said}")


def random_fair(impl: ModuleType, rng: Random) -> None:
    """Random queues, and whom a step passes."""
    for _ in range(60):
        queue, match, said = _queue(rng, rng.randrange(9))
        limit = rng.randrange(6)
        wanted = exercises.names(policies.fair(limit)(queue, match))
        what = f"fair_order with limit {limit} of {said}"
        exercises.same_order(impl.fair_order(list(queue), match, limit), wanted, queue, what)
        cut = rng.randint(0, len(queue))
        admitted, waiting = queue[:cut], queue[cut:]
        before = [request.passes for request in waiting]
        impl.count_passes(list(waiting), list(admitted))
        for request, old in zip(waiting, before, strict=True):
            passed = any(policies.is_behind(other, request) for other in admitted)
            words = (
                f"count_passes: {request.name} (priority {request.priority}) is left waiting, admitted are "
                f"{[(a.name, a.priority) for a in admitted]}; its passes went from {old} to {request.passes}"
            )
            expect(request.passes == old + passed, words)


def bounded_overtaking(impl: ModuleType, rng: Random) -> None:
    """A crowd over many steps: nobody is passed in more steps than the limit."""
    for limit in (1, 4):
        match = exercises.Lengths({})
        queue: list[Any] = []
        for step in range(60):
            for _ in range(rng.choice((0, 1, 2))):
                name = f"R{len(match.table)}"
                queue.append(Request(name, arrival=len(match.table)))
                match.table[name] = rng.choice((0, 10, 20, 30))
            admitted = list(impl.fair_order(list(queue), match, limit))[:1]
            queue = [request for request in queue if request not in admitted]
            impl.count_passes(queue, admitted)
            for request in queue:
                words = (
                    f"limit {limit}: {request.name} has been passed in {request.passes} steps by step {step}"
                )
                expect(request.passes <= limit, words)


def random_trees(impl: ModuleType, rng: Random) -> None:
    """Trees of random queues, against the engine's own order."""
    for _ in range(25):
        requests = [
            engine.Request(f"R{i}", np.array(_prompt(rng), dtype=np.int64), SamplingParams(), 0, i)
            for i in range(rng.randint(1, 10))
        ]
        root = _tree_of(requests, rng)
        wanted = [r.id for r in policies.dfs_weight(requests, lambda r: len(r.prompt))]
        queue = exercises.everybody(root)
        what = f"dfs_order of the tree of {[(r.id, r.prompt.tolist()) for r in requests]}"
        exercises.same_order(impl.dfs_order(root), wanted, queue, what)


def _prompt(rng: Random) -> list[int]:
    return [rng.randrange(2) for _ in range(rng.randint(1, 5))]


def _tree_of(requests: list[Any], rng: Random) -> Any:
    cache = RadixCache()
    ends = {}
    for request in requests:
        found = cache.insert(RadixKey(request.prompt), np.zeros(len(request.prompt), dtype=np.int64))
        ends[request.id] = found.last_node.id
    made: dict[int, Any] = {}
    for node in cache.walk():
        made[node.id] = Node()
        if node.parent is not None:
            made[node.parent.id].children.append(made[node.id])
    for request in rng.sample(requests, len(requests)):
        made[ends[request.id]].requests.append(Request(request.id, arrival=request.arrival))
    for node in made.values():
        rng.shuffle(node.children)
    return made[cache.root.id]


def random_admissions(impl: ModuleType, rng: Random) -> None:
    """Random queues before random trees."""
    for _ in range(60):
        cached = [[rng.randrange(3) for _ in range(rng.randint(1, 8))] for _ in range(rng.randrange(5))]
        described = []
        for name in "ABCD"[: rng.randint(1, 4)]:
            head = rng.choice(cached)[: rng.randint(1, 8)] if cached and rng.random() < 0.7 else []
            tokens = head + [rng.randrange(5) for _ in range(rng.randint(0 if head else 1, 4))]
            described.append((name, tokens, rng.choice((0, 0, 1, 3))))
        free, reserve = rng.randrange(12), rng.choice((0, 0, 2))
        tree = Tree(*cached)
        queue = [Request(name, list(t), i, new_tokens=new) for i, (name, t, new) in enumerate(described)]
        admitted, left = solution.admit(queue, tree, free, reserve)
        kept = tree.cache.total_size
        exercises.run_admit(
            impl, lambda cached=cached: Tree(*cached), described, free, reserve,
            exercises.names(admitted), left, cached=kept,
        )  # fmt: skip


def as_the_engine_does(impl: ModuleType, rng: Random) -> None:
    """The same queue given to the engine's scheduler, which has one request running."""
    for _ in range(25):
        pool = rng.randint(12, 40)
        cached = [[rng.randrange(2) for _ in range(rng.randint(1, 5))] for _ in range(3)]
        asks = []
        for _ in range(rng.randint(1, 4)):
            head = rng.choice(cached)[: rng.randint(1, 5)]
            asks.append((head + [rng.randrange(3, 6) for _ in range(rng.randint(1, 6))], rng.randint(1, 4)))
        scheduler, running = _running(pool, cached)
        cache, ownership = scheduler.ownership.cache, scheduler.ownership
        twin = Tree()
        twin.cache = _running(pool, cached)[0].ownership.cache  # the same once more
        free, reserve = ownership.allocator.available, sum(map(scheduler.future.slots, running))
        for number, (tokens, new) in enumerate(asks, start=1):
            params = SamplingParams(max_new_tokens=new)
            scheduler.waiting.append(engine.Request(f"R{number}", np.array(tokens), params, 0, number))
        batch = scheduler.next_batch()
        theirs = [r.id for r in batch.admitted] if batch else []
        queue = [Request(f"R{i}", list(t), i, new_tokens=new) for i, (t, new) in enumerate(asks, start=1)]
        admitted, left = impl.admit(queue, twin, free, reserve)
        what = f"{free} free slots, reserve {reserve}, cached {cached}, queue {asks} (tokens, new_tokens)"
        got = exercises.names(admitted)
        expect(got == theirs, f"{what}: admitted {got}; the engine's scheduler admits {theirs}")
        if theirs:  # else the engine decodes in this step, which takes a slot
            words = f"{what}: {left} slots are left; the engine has {ownership.allocator.available}"
            expect(left == ownership.allocator.available, words)
            expect(_leaves(twin.cache) == _leaves(cache), f"{what}: not the same is cached as in the engine")


def _leaves(cache: RadixCache) -> list[list[int]]:
    """What is cached, whatever nodes it is cut into (the engine looks before it splits)."""
    paths = [path for path, _, _ in outline(cache)]
    return [path for path in paths if not any(p[: len(path)] == path and p != path for p in paths)]


def _running(pool: int, cached: list[list[int]]) -> tuple[Scheduler, list[Any]]:
    """A scheduler with a request that runs, and finished ones in its tree."""
    bus = ev.EventBus()
    ownership = SlotOwnership(RadixCache(), PageAllocator(pool), ReqToTokenPool(16, 64), bus)
    options = ScheduleOptions(new_token_ratio=1.0, new_token_decay=0.0)
    scheduler = Scheduler(ownership, "fcfs", 1000, bus, options)
    prompts = [*cached, [9, 9]]
    for number, tokens in enumerate(prompts):
        last = number == len(prompts) - 1
        params = SamplingParams(max_new_tokens=3 if last else 1)
        scheduler.waiting.append(engine.Request(f"r{number}", np.array(tokens), params, 0, -9 + number))
        batch = scheduler.next_batch()
        assert batch is not None
        (request,) = batch.requests
        if last:
            ownership.commit(request, finished=False)
            scheduler.prefilled(request)
            request.append(9, 0.0)
        else:
            ownership.commit(request, finished=True)
            scheduler.finish(request)
    return scheduler, list(scheduler.running)


HIDDEN = {
    "lpm_order": [random_lpm],
    "dfs_order": [random_trees],
    "admit": [random_admissions, as_the_engine_does],
    "fair": [random_fair, bounded_overtaking],
}
