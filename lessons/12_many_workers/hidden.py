"""Cases of lesson 12 that students do not get: many trees, the engine's own digest, random games."""

from __future__ import annotations

import copy
import re
from itertools import product
from random import Random
from types import ModuleType
from typing import Any

from lessons.grading import expect, sibling
from lessons.grading.fleets import WORKERS, Held, Watched, chats, play, texts
from lessons.grading.ranks import (
    FIELDS,
    PLANTS,
    Node,
    described,
    everyone,
    plain,
    rank,
    shuffled,
)
from minirad.ranks import digest as engines
from minirad.route.oracle import judge
from minirad.route.policies import POLICIES, make_policy
from minirad.route.simulated import max_of_mean
from minirad.simulate import ModelFreeEngine

exercises = sibling(__file__, "exercises")
node = exercises.node

# ---------------------------------------------------------------------- many trees


def zoo() -> list[Node]:
    """Small trees; no two of them are alike."""
    found = [Node()]
    leaves = [node(1, 1), node(1, 2), node(1, 2, hits=1), node(1, 2, last_access=1), node(1, 2, lock_ref=1)]
    leaves += [node(12, 1), node(1, 2, namespace="1"), node(1, 2, namespace="None"), node(2**31 - 3, 2)]
    leaves += [
        Node([1, 2], slots) for slots in ([10, 21], [20, 10], [1, 2], [10, 2**40], [10, 2**40 + 2**32])
    ]
    leaves += [node(1, 2, hits=2**33), node(1, 2, hits=2**33 + 2**32), node(1, 2, last_access=2**62)]
    leaves += [node(1, 2, node(3, 1)), node(1, 2, node(3, 1, hits=1)), node(1, 2, node(4, 1)), node(1, 3)]
    leaves += [node(1, 2, node(3, 1), node(4, 1)), node(1, 2, node(3, 1, node(4, 1)))]
    leaves += [node(1, 2, node(3, 1, node(4, 1)), node(5, 1)), node(1, 2, node(3, 1), node(4, 1, node(5, 1)))]
    found += [Node(children=[leaf]) for leaf in leaves]
    found += [Node(children=[leaf, node(90, 2)]) for leaf in leaves]
    found += [Node(children=[leaf, node(90, 2, namespace="ada")]) for leaf in leaves[:6]]
    found += [Node(children=[leaf], **{name: 1}) for leaf in leaves[:3] for name in FIELDS[2:]]
    below = [node(7, 1), node(8, 1), node(7, 1, hits=1)]
    found += [Node(children=[node(1, 1, a), node(2, 1, b)]) for a, b in product(below, below)]
    return found


def digests_of_many(impl: ModuleType) -> None:
    """Many small trees: each has a digest of its own, also in another order."""
    seen: dict[bytes, Node] = {}
    for number, root in enumerate(zoo()):
        got = exercises.the_digest(impl, root, "a small tree")
        words = (
            f"two trees that differ have one digest: {described(root)}; and {described(seen.get(got, root))}"
        )
        expect(got not in seen, words, hint=2)
        seen[got] = root
        again = exercises.the_digest(impl, shuffled(root, Random(number)), "a small tree")
        expect(again == got, f"a small tree in another order has another digest: {described(root)}", hint=1)
    columns = {bytes(each[place] for each in seen) for place in range(16)}
    expect(len(columns) == 16, "some bytes of a digest say only what others say: it is shorter than 16 bytes")
    for place in range(16):
        values = len({each[place] for each in seen})
        expect(values > 20, f"byte {place} of the digests of {len(seen)} trees has only {values} values")


def digest_of_wide_and_deep(impl: ModuleType) -> None:
    """Wide: 120 children; deep: a chain of two hundred nodes."""
    wide = Node(children=[node(1000 + 2 * n, 2, last_access=n % 3) for n in range(120)])
    exercises.same_digest(impl, wide, shuffled(wide, Random(1)), "120 children in another order", hint=1)
    changed = copy.deepcopy(wide)
    changed.children[87].hits = 1
    exercises.other_digest(impl, wide, changed, "120 children, of one of them hits is one more")
    chains = []
    for hits in (0, 1):
        chain = node(5, 2, hits=hits)
        for number in range(190):
            chain = node(2 * number, 2, chain)
        chains.append(Node(children=[chain]))
    exercises.other_digest(impl, *chains, "two chains of 191 nodes, at the end of one of them hits is 1")


def digest_of_engines_that_differ(impl: ModuleType) -> None:
    """Every plant at several moments."""
    _ranks(impl, exercises_prompts(Random(5), 6), 11, list(PLANTS))


def exercises_prompts(rng: Random, count: int) -> list[tuple[list[int], str | None]]:
    """Prompts with beginnings in common, some in a namespace."""
    heads = [[rng.randrange(200) for _ in range(rng.randint(2, 6))] for _ in range(3)]
    heads.append(list(heads[0]))
    found = []
    for _ in range(count):
        at = rng.randrange(len(heads))
        tokens = heads[at][: rng.randint(1, 6)] + [rng.randrange(200) for _ in range(rng.randint(1, 5))]
        found.append((tokens, "ada" if at == 3 else None))
    return found


def parts(engine: ModelFreeEngine) -> dict[str, Any]:
    """What the engine's own digest sees of nodes, without the order of children."""
    nodes = copy.deepcopy(engines.parts_of(engine)["nodes"])
    for each in nodes.values():
        each["first child"] = -1
    return {"books": {}, "requests": {}, "nodes": nodes}


def _ranks(impl: ModuleType, prompts: list[Any], steps: int, plants: list[str]) -> None:
    """Two engines; the student's digest beside the engine's own."""
    one = rank(prompts, steps)
    mine, theirs = exercises.the_digest(impl, plain(one.cache), "an engine's tree"), parts(one)
    for name in ["nothing", *plants]:
        other = rank(prompts, steps)
        if name in PLANTS:
            PLANTS[name](other.cache)
        equal = parts(other) == theirs
        got = exercises.the_digest(impl, plain(other.cache), "an engine's tree")
        words = (
            f"two engines after {steps} steps of {prompts}; planted in one of them: {name}. The engine's own "
            f"digest says that their nodes are {'equal' if equal else 'different'}, yours says the opposite"
        )
        expect((got == mine) == equal, words)


def digest_of_random_engines(impl: ModuleType, rng: Random) -> None:
    """Random requests to two engines, and random plants."""
    for _ in range(2):
        plants = rng.sample(list(PLANTS), 2)
        _ranks(impl, exercises_prompts(rng, rng.randint(3, 6)), rng.randint(5, 15), plants)


def digest_of_another_history(impl: ModuleType, rng: Random) -> None:
    """The same prompts put into two trees in another order, then used in one order."""
    from minirad.cache.radix_cache import RadixCache, RadixKey

    prompts = [tokens for tokens, _ in exercises_prompts(rng, 7)]
    roots = []
    for order in (prompts, rng.sample(prompts, len(prompts))):
        tree = RadixCache()
        for tokens in order:
            tree.insert(
                RadixKey(tokens), [hash(tuple(tokens[: at + 1])) % 2**20 for at in range(len(tokens))]
            )
        for tokens in prompts:
            tree.match_prefix(RadixKey(tokens))
        for each in tree.walk():
            each.hits = each.lock_ref = 0
        roots.append(plain(tree))
    what = f"two trees, into which {prompts} were put in another order"
    exercises.same_digest(impl, *roots, what, hint=1)


# ---------------------------------------------------------------------- find_divergence


def find_in_many(impl: ModuleType) -> None:
    """Every small tree beside every other one."""
    trees = zoo()[:40:2] + zoo()[41::3]
    for at, (mine, theirs) in enumerate(product(trees, trees)):
        if at % 3 == 0:
            exercises.run_find(
                impl, mine, theirs, f"{described(mine)} here, and {described(theirs)} on rank 0"
            )


def find_as_the_engine_does(impl: ModuleType, rng: Random) -> None:
    """Two engines, and one plant: the engine's own sentence names the same node and field."""
    for _ in range(4):
        prompts, steps = exercises_prompts(rng, rng.randint(3, 6)), rng.randint(5, 15)
        ranks = [rank(prompts, steps) for _ in range(2)]
        name = rng.choice(list(PLANTS))
        PLANTS[name](ranks[1].cache)
        theirs, mine = (plain(each.cache) for each in ranks)
        said = engines.difference(None, *map(parts, ranks), 1)
        what = f"two engines after {steps} steps of {prompts}, and planted here: {name}"
        exercises.run_find(impl, mine, theirs, what)
        found = impl.find_divergence(mine, exercises.Rank0(theirs, digest := exercises.Stamps()), digest)
        here = _named(mine if found[1] != "only there" else theirs, found[0])
        number = re.search(r" (n\d+|the root)\b", said)
        assert number is not None, said
        words = f"{what}: you found {here.name} ({found[1]}); the engine says: {said}"
        expect(number[1] in (here.name, "the root") and (found[1] in said or "only" in found[1]), words)


def _named(root: Node, path: Any) -> Node:
    for step in path:
        root = next(each for each in root.children if (each.namespace, each.tokens[0]) == step)
    return root


def random_divergences(impl: ModuleType, rng: Random) -> None:
    """Trees of engines with several differences."""
    for _ in range(6):
        engine = rank(exercises_prompts(rng, rng.randint(3, 7)), rng.randint(5, 15))
        theirs = plain(engine.cache)
        mine = shuffled(theirs, rng)
        for _ in range(rng.randint(0, 4)):
            _change(mine, rng)
        exercises.run_find(impl, mine, theirs, f"{described(mine)} here, and {described(theirs)} on rank 0")


def _change(root: Node, rng: Random) -> None:
    """One difference, of any kind."""
    there = rng.choice(everyone(root))
    kind = rng.choice((*FIELDS, "more", "less"))
    if kind == "more":
        there.children.append(node(900 + rng.randrange(90), 1))
    elif kind == "less" and there.children:
        there.children.pop(rng.randrange(len(there.children)))
    elif kind in ("tokens", "slots"):
        getattr(there, kind).append(7)
    elif kind in FIELDS:
        setattr(there, kind, getattr(there, kind) + 1)


# ---------------------------------------------------------------------- account


def accounts_of_many(impl: ModuleType) -> None:
    """Small and large requests, all kinds of fleets."""
    random_accounts(impl, Random("everybody's"))
    for name in ("round-robin", "least-loaded"):
        watched = Watched(make_policy(name))
        exercises.compare_account(impl, watched, play(watched, chats(Random(name), 14)))


def random_accounts(impl: ModuleType, rng: Random) -> None:
    """Random routes; regret as the engine's oracle judges it."""
    for _ in range(20):
        workers, routes, regret = rng.randint(1, 5), [], 0
        for _ in range(rng.randint(1, 8)):
            tokens = rng.choice((1, 9, 10, 99, 1000))
            held = [rng.choice((None, 0, rng.randint(0, tokens), tokens)) for _ in range(workers)]
            at = rng.randrange(workers)
            held[at] = held[at] or 0
            routes.append(exercises.Route(at, tokens, rng.choice((0, tokens // 2, tokens - 1, tokens)), held))
            regret += judge([each or 0 for each in held], [each is not None for each in held], at).regret
        computed = [sum(r.tokens - r.cached for r in routes if r.worker == at) for at in range(workers)]
        wanted = {
            "hit_rate": sum(r.cached for r in routes) / sum(r.tokens for r in routes), "computed": computed,
            "imbalance": max_of_mean(computed) or 1.0, "regret": regret,
        }  # fmt: skip
        exercises.check_account(impl, routes, workers, wanted, f"{routes}, {workers} workers")


def accounts_of_fleets(impl: ModuleType, rng: Random) -> None:
    """Another policy before simulated workers."""
    watched = Watched(make_policy(rng.choice([name for name in POLICIES if name != "events"])))
    exercises.compare_account(impl, watched, play(watched, texts(rng, 18)))


# ---------------------------------------------------------------------- the router


def walk(impl: ModuleType, rng: Random, what: str, moves: int) -> None:
    """Prompts, answers, deaths in any order, before workers that are not simulated."""
    workers = rng.randint(1, 5)
    router = Held(impl, what)
    loads, dead = [rng.randrange(4)] * workers, set[int]()
    known = [[rng.randrange(10**6) for _ in range(rng.randint(8, 40))] for _ in range(4)]
    for _ in range(moves):
        move = rng.random()
        if move < 0.1 and len(dead) < workers - 1:
            at = rng.choice([at for at in range(workers) if at not in dead])
            router.forget(at)
            dead.add(at)
            loads[at] = 0
        elif move < 0.2 and dead:
            dead.discard(rng.choice(sorted(dead)))
        elif move < 0.45:
            at = rng.randrange(workers)
            loads[at] = max(loads[at] - rng.randint(1, 4), 0)
        else:
            tokens = _prompt(rng, known)
            seen: list[int | None] = [None if at in dead else load for at, load in enumerate(loads)]
            loads[exercises.ask(router, tokens, seen)] += 1
            if rng.random() < 0.7:
                known.append(tokens)


def _prompt(rng: Random, known: list[list[int]]) -> list[int]:
    if rng.random() < 0.3:
        return [rng.randrange(10**6) for _ in range(rng.randint(1, 40))]
    tokens = rng.choice(known)
    return tokens[: rng.randint(1, len(tokens))] + [rng.randrange(10**6) for _ in range(rng.randint(0, 12))]


def router_of_everybody(impl: ModuleType) -> None:
    """Some hundred prompts, answers and deaths."""
    for number in range(8):
        walk(impl, Random(f"everybody's {number}"), "prompts, answers and deaths", 40)


def random_walks(impl: ModuleType, rng: Random) -> None:
    """The same with other prompts for each student."""
    for _ in range(6):
        walk(impl, rng, "prompts, answers and deaths", 40)


def random_games(impl: ModuleType, rng: Random) -> None:
    """Four simulated workers, and one of the games."""
    exercises.play_router(impl, [rng.choice(list(exercises.GAMES))], str(rng.random()))


def the_same_again(impl: ModuleType, rng: Random) -> None:
    """The same calls to two Routers."""
    prompts = [_prompt(rng, [list(range(30))]) for _ in range(20)]
    loads = [[rng.randrange(5) for _ in range(WORKERS)] for _ in prompts]
    first, second = (
        [exercises.ask(router, *each) for each in zip(prompts, loads, strict=True)]
        for router in (Held(impl, "two Routers, the same calls") for _ in range(2))
    )
    expect(first == second, f"two Routers, the same calls: {first} and {second}")


HIDDEN = {
    "digest": [digests_of_many, digest_of_wide_and_deep, digest_of_engines_that_differ,
               digest_of_random_engines, digest_of_another_history],
    "find_divergence": [find_in_many, find_as_the_engine_does, random_divergences],
    "account": [accounts_of_many, random_accounts, accounts_of_fleets],
    "Router": [router_of_everybody, random_walks, random_games, the_same_again],
}  # fmt: skip
