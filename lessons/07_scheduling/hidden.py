"""Hidden cases of lesson 07, most of them against the engine's own policies and scheduler.

First some that are the same for every student, then random ones.
"""

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
from minirad.schedule import other_policies, policies
from minirad.schedule import request as engine
from minirad.schedule.cache_manager import CacheManager
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


# ---------------------------------------------------------------------- the same for everybody

MATCHES = (0, 1, 2, 3, 50, 999, 1000, 1001, 5000)
ARRIVALS = (0, 1, 7, 999, 1000, 1001, 10**6, 10**6 + 1, 3 * 10**6, 5, 12, 2000)
PRIORITIES = (-11, -1, 0, 0, 1, 2, 9, 10)
NAMES = ("M", "B", "Zoe", "A", "R10", "R9", "x", "C", "R1", "K", "D", "Y")  # in no order, as arrivals are


def _wide_queue(rng: Random, count: int) -> tuple[list[Any], Any, str]:
    """A queue whose numbers are small and large, with many ties; prompts longer than their match."""
    queue, table, said = [], {}, []
    for name, arrival in zip(rng.sample(NAMES, count), rng.sample(ARRIVALS, count), strict=True):
        match = table[name] = rng.choice((MATCHES, (2, 3), (3, 50))[rng.randrange(3)])
        request = Request(name, [1] * (match + rng.choice((1, 1, 40))), arrival, rng.choice(PRIORITIES))
        request.passes = rng.choice((0, 0, 1, 2, 9, 10, 11, 100))
        queue.append(request)
        said.append(
            f"{name} (came {arrival}, match {match} of {len(request.tokens)}, priority {request.priority}, "
            f"passed {request.passes})"
        )
    if rng.random() < 0.5:
        for request in queue:
            request.priority = queue[0].priority
    return queue, exercises.Lengths(table), ", ".join(said)


def lpm_of_small_queues(impl: ModuleType) -> None:
    """One request; the same requests when the tree has changed; two with the same prompt."""
    queue, match = exercises.queue_of(A=(1, 5))
    exercises._lpm(impl, queue, match, "A", "A alone")
    queue = [Request("B", [1, 2, 3], 1), Request("A", [1, 2, 3], 2), Request("C", [1] * 9, 3)]
    for lengths, wanted in (((1, 2, 0), "ABC"), ((2, 1, 0), "BAC"), ((2, 2, 3), "CBA")):
        match = exercises.Lengths(dict(zip("BAC", lengths, strict=True)))
        exercises._lpm(impl, queue, match, wanted, f"B and A with one prompt, matches of B, A, C {lengths}")


def lpm_of_wide_queues(impl: ModuleType) -> None:
    """Small and large numbers, ties, queues in no order."""
    rng = Random("everybody's")
    for number in range(90):
        queue, match, said = _wide_queue(rng, 2 + number // 12)  # small ones first, for short words
        wanted = exercises.names(policies.lpm(queue, match))
        exercises.same_order(impl.lpm_order(list(queue), match), wanted, queue, f"lpm_order of {said}")


def fair_of_small_queues(impl: ModuleType) -> None:
    """One request; the same requests with another limit, and another tree."""
    exercises._fair(impl, {"A": (1, 5, 0, 0)}, 3, "A")
    queue = [Request("A", [1], 1, passes=2), Request("B", [1], 2, passes=1)]
    for limit, lengths, wanted in (
        (3, (0, 9), "BA"),
        (2, (0, 9), "AB"),
        (3, (9, 0), "AB"),
        (0, (0, 9), "AB"),
    ):
        match = exercises.Lengths(dict(zip("AB", lengths, strict=True)))
        got = impl.fair_order(list(queue), match, limit)
        what = f"fair_order with limit {limit} of A (passed 2) and B (passed 1), matches {lengths}"
        exercises.same_order(got, wanted, queue, what, hint=1)


def fair_of_wide_queues(impl: ModuleType) -> None:
    """Small and large numbers, ties, queues in no order."""
    rng = Random("everybody's")
    for number in range(90):
        queue, match, said = _wide_queue(rng, 2 + number // 12)  # small ones first, for short words
        limit = rng.choice((0, 1, 2, 10, 11, 50))
        given, before = list(queue), [request.passes for request in queue]
        wanted = exercises.names(other_policies.fair(limit)(queue, match))
        got = impl.fair_order(given, match, limit)
        what = f"fair_order with limit {limit} of {said}"
        exercises.same_order(got, wanted, queue, what, hint=1)
        same = given == queue and [request.passes for request in queue] == before
        expect(same, f"{what}: the queue and the passes must stay as they are")


def passes_of_everybody(impl: ModuleType) -> None:
    """Every pair of small queues; and one who is passed thirty times by the same."""
    kinds = [(arrival, priority) for arrival in (1, 2, 3) for priority in (-1, 0, 2)]
    for waiting in kinds:
        for one in kinds:
            for two in kinds:
                _passes(impl, [waiting], [one, two])
    _passes(impl, kinds[::2], kinds[1::2])
    _passes(impl, kinds, [])
    late, again = Request("W", arrival=1), Request("A", arrival=2)
    for step in range(1, 31):
        impl.count_passes([late], [again])
        words = f"W waits, A came later and is admitted, {step} times: passes of W should be {step}"
        expect(late.passes == step, f"{words}, it is {late.passes}")


def _passes(impl: ModuleType, waiting: list[tuple[int, int]], admitted: list[tuple[int, int]]) -> None:
    left = [Request("W", arrival=arrival, priority=p, passes=5) for arrival, p in waiting]
    taken = [Request("A", arrival=arrival, priority=p) for arrival, p in admitted]
    impl.count_passes(left, taken)
    got = [request.passes - 5 for request in left]
    wanted = [int(any(policies.is_behind(other, request) for other in taken)) for request in left]
    what = f"count_passes, waiting {waiting}, admitted {admitted} (arrival, priority)"
    expect(got == wanted, f"{what}: passes should go up by {wanted}, they went up by {got}")


def trees_of_everybody(impl: ModuleType) -> None:
    """Nodes without anybody, deep trees, large arrivals, names in no order; and a tree that grows."""
    came = {"Z": 1, "A": 5000, "B": 2, "C": 3, "D": 9000, "E": 4, "F": 0}
    r = {name: Request(name, [1] * (1 + arrival % 7), arrival) for name, arrival in came.items()}
    empty = Node([], [Node(), Node([], [Node()])])
    exercises._dfs(impl, Node([], [empty, Node()]), "", "nodes without anybody")
    exercises._dfs(
        impl, Node([r["A"], r["Z"]], [Node(), Node([r["B"]])]), "BZA", "an empty child, B, and Z A"
    )
    one, two = Node([r["A"], r["D"]]), Node([r["Z"]])
    exercises._dfs(impl, Node([], [two, one]), "ADZ", "A and D (came 5000, 9000) in one child, Z (came 1)")
    deep, wide = Node([], [Node([], [Node([r["A"], r["F"]])])]), Node([r["Z"]], [Node([r["B"]])])
    exercises._dfs(impl, Node([], [wide, deep]), "FABZ", "A and F (came 0) two levels below, Z above B")
    first, last = Node([r["C"]]), Node([r["Z"]])
    pair = Node([], [first, last])
    exercises._dfs(impl, Node([], [Node([r["B"], r["E"]]), pair]), "ZCBE", "two children of two: B E; C, Z")
    chain, wanted = Node([r["F"]]), "F"
    for _ in range(12):
        chain = Node([], [chain])
    exercises._dfs(impl, Node([r["Z"]], [chain]), wanted + "Z", "F thirteen levels down, Z at the root")
    grows = Node([], [Node([r["Z"]]), Node([r["B"]])])
    exercises._dfs(impl, grows, "ZB", "Z and B in two children")
    grows.children[1].requests.append(r["C"])
    exercises._dfs(impl, grows, "BCZ", "the same tree, when C has come to B")
    random_trees(impl, Random("everybody's"))


def admissions_of_everybody(impl: ModuleType) -> None:
    """Queues in no order of names or numbers, long queues, exact fits, and several calls in turn."""
    none = Tree
    some = lambda: Tree([1, 2, 3, 4], [5, 6], [8, 9, 10])  # noqa: E731
    run = exercises.run_admit
    run(impl, none, [("C", [1, 2, 3], 0), ("A", [4], 0), ("B", [5, 6], 0)], 4, 0, "CA", 0)
    run(impl, none, [("C", [1], 0), ("A", [4] * 9, 0), ("B", [5, 6], 0)], 6, 0, "C", 5)
    run(impl, some, [("B", [20], 0), ("A", [1, 2, 3, 4, 5], 0)], 2, 0, "BA", 0, cached=9)
    run(
        impl,
        none,
        [(name, [number], 0) for number, name in enumerate("LKJIHGFEDCBA")],
        14,
        1,
        "LKJIHGFEDCBA",
        2,
    )
    run(impl, some, [("A", [20] * 9, 0)], 0, 0, "A", 0, cached=0)
    run(impl, some, [("A", [20] * 8, 1)], 0, 0, "A", 1, cached=0)
    run(impl, some, [("A", [20] * 8, 1)], 0, 1, "", 0, cached=9)
    run(impl, some, [("A", [20] * 3, 2)], 1, 4, "A", 2, cached=5)
    run(impl, some, [("A", [20] * 4, 2)], 0, 0, "A", 0, cached=5)
    run(impl, some, [("A", [1, 2, 3, 4, 20], 0), ("B", [5, 6, 21, 22], 0)], 1, 0, "AB", 1, cached=6)
    run(impl, some, [("A", [1, 2, 3, 4, 20], 0), ("B", [5, 6] + [21] * 4, 0)], 1, 0, "A", 0, cached=9)
    run(impl, some, [("A", [20], 0), ("B", [1, 2, 3, 4, 21, 22, 23, 24, 25, 26], 0)], 1, 0, "A", 0, cached=9)
    run(impl, none, [("A", [1], 3), ("B", [2], 2), ("C", [3], 1)], 7, 0, "AB", 5)
    run(impl, none, [("A", [1], 3), ("B", [2], 2), ("C", [3], 1)], 9, 0, "ABC", 6)
    run(impl, some, [("A", [1], 0), ("B", [7], 0)], 5, 0, "AB", 3, cached=9)
    tree = Tree()
    queue = exercises.queue_to_admit([("A", [1, 2, 3], 2), ("B", [4, 5], 1)])
    for free, reserve, wanted, left in ((4, 0, "", 4), (5, 0, "A", 2), (8, 0, "AB", 3), (8, 0, "AB", 3)):
        admitted, got = impl.admit(list(queue), tree, free, reserve)
        what = f"admit of A [1, 2, 3] (+2), B [4, 5] (+1), nothing cached, {free} free, as in the call before"
        expect(exercises.names(admitted) == list(wanted), f"{what}: {wanted or 'nobody'} should be admitted, "
               f"it is {exercises.names(admitted)}")  # fmt: skip
        expect(got == left, f"{what}: {left} slots should be left, it says {got}")
        for request in admitted:
            tree.unlock(tree.match(request)[1])
    random_admissions(impl, Random("everybody's"))
    as_the_engine_does(impl, Random("everybody's"))


# ---------------------------------------------------------------------- random


def random_lpm(impl: ModuleType, rng: Random) -> None:
    """Random queues."""
    for _ in range(30):
        queue, match, said = _queue(rng, rng.randrange(9))
        wanted = exercises.names(policies.lpm(queue, match))
        exercises.same_order(impl.lpm_order(list(queue), match), wanted, queue, f"lpm_order of {said}")


def random_fair(impl: ModuleType, rng: Random) -> None:
    """Random queues, and whom a step passes."""
    for _ in range(30):
        queue, match, said = _queue(rng, rng.randrange(9))
        limit = rng.randrange(6)
        wanted = exercises.names(other_policies.fair(limit)(queue, match))
        what = f"fair_order with limit {limit} of {said}"
        exercises.same_order(impl.fair_order(list(queue), match, limit), wanted, queue, what, hint=1)
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
    for _ in range(12):
        requests = [
            engine.Request(f"R{i}", np.array(_prompt(rng), dtype=np.int64), SamplingParams(), 0, i)
            for i in range(rng.randint(1, 10))
        ]
        root = _tree_of(requests, rng)
        wanted = [r.id for r in other_policies.dfs_weight(requests, lambda r: len(r.prompt))]
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
    for _ in range(20):
        cached = [[rng.randrange(3) for _ in range(rng.randint(1, 8))] for _ in range(rng.randrange(5))]
        described = []
        for name in "ABCD"[: rng.randint(1, 4)]:
            head = rng.choice(cached)[: rng.randint(1, 8)] if cached and rng.random() < 0.7 else []
            tokens = head + [rng.randrange(5) for _ in range(rng.randint(0 if head else 1, 4))]
            described.append((name, tokens, rng.choice((0, 0, 1, 3))))
        free, reserve = rng.randrange(12), rng.choice((0, 0, 2))
        tree = Tree(*cached)
        queue = exercises.queue_to_admit(described)
        admitted, left = solution.admit(queue, tree, free, reserve)
        kept = tree.cache.total_size
        exercises.run_admit(
            impl, lambda cached=cached: Tree(*cached), described, free, reserve,
            exercises.names(admitted), left, cached=kept,
        )  # fmt: skip


def as_the_engine_does(impl: ModuleType, rng: Random) -> None:
    """The same queue given to the engine's scheduler, which has one request running."""
    for _ in range(7):
        pool = rng.randint(12, 40)
        cached = [[rng.randrange(2) for _ in range(rng.randint(1, 5))] for _ in range(3)]
        asks = []
        for _ in range(rng.randint(1, 4)):
            head = rng.choice(cached)[: rng.randint(1, 5)]
            asks.append((head + [rng.randrange(3, 6) for _ in range(rng.randint(1, 6))], rng.randint(1, 4)))
        scheduler, running = _running(pool, cached)
        cache, manager = scheduler.cache_manager.cache, scheduler.cache_manager
        twin = Tree()
        twin.cache = _running(pool, cached)[0].cache_manager.cache  # the same once more
        free, reserve = manager.allocator.available, sum(map(scheduler.future.slots, running))
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
            words = f"{what}: {left} slots are left; the engine has {manager.allocator.available}"
            expect(left == manager.allocator.available, words)
            expect(_leaves(twin.cache) == _leaves(cache), f"{what}: not the same is cached as in the engine")


def _leaves(cache: RadixCache) -> list[list[int]]:
    """What is cached, whatever nodes it is cut into (the engine looks before it splits)."""
    paths = [path for path, _, _ in outline(cache)]
    return [path for path in paths if not any(p[: len(path)] == path and p != path for p in paths)]


def _running(pool: int, cached: list[list[int]]) -> tuple[Scheduler, list[Any]]:
    """A scheduler with a request that runs, and finished ones in its tree."""
    bus = ev.EventBus()
    manager = CacheManager(RadixCache(), PageAllocator(pool), ReqToTokenPool(16, 64), bus)
    options = ScheduleOptions(new_token_ratio=1.0, new_token_decay=0.0)
    scheduler = Scheduler(manager, "fcfs", 1000, bus, options)
    prompts = [*cached, [9, 9]]
    for number, tokens in enumerate(prompts):
        last = number == len(prompts) - 1
        params = SamplingParams(max_new_tokens=3 if last else 1)
        scheduler.waiting.append(engine.Request(f"r{number}", np.array(tokens), params, 0, -9 + number))
        batch = scheduler.next_batch()
        assert batch is not None
        (request,) = batch.requests
        if last:
            manager.commit(request, finished=False)
            scheduler.prefilled(request)
            request.append(9, 0.0)
        else:
            manager.commit(request, finished=True)
            scheduler.finish(request)
    return scheduler, list(scheduler.running)


HIDDEN = {
    "lpm_order": [lpm_of_small_queues, lpm_of_wide_queues, random_lpm],
    "dfs_order": [trees_of_everybody, random_trees],
    "admit": [admissions_of_everybody, random_admissions, as_the_engine_does],
    "fair": [fair_of_small_queues, passes_of_everybody, fair_of_wide_queues, random_fair, bounded_overtaking],
}
