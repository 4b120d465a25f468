"""What lesson 12 asks for, and its open cases."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from random import Random
from types import ModuleType
from typing import Any

from lessons.grading import Exercise, expect
from lessons.grading.fleets import WORKERS, Game, Held, Run, Watched, chats, play, texts
from lessons.grading.ranks import (
    FIELDS,
    PLANTS,
    Node,
    Rank0,
    Stamps,
    another_process,
    everyone,
    first_difference,
    plain,
    rank,
    shuffled,
    written,
)
from lessons.grading.router import StudentPolicy, Worker
from lessons.grading.shared import as_ints, whole
from lessons.grading.words import shown
from minirad.route.policies import make_policy
from minirad.route.simulated import max_of_mean

# ---------------------------------------------------------------------- trees that the student is given


def node(first: int, count: int = 2, *children: Node, **more: Any) -> Node:
    """A node of `count` tokens from `first` on; slots are those numbers times ten."""
    tokens = list(range(first, first + count))
    return Node(tokens, [10 * token for token in tokens], list(children), **more)


def small_tree() -> Node:
    """Two branches, two namespaces, three levels."""
    left = node(20, 3, node(30, 2, hits=1, last_access=7), node(40, 1, lock_ref=1), hits=2, last_access=8)
    right = node(50, 2, node(60, 2, last_access=3), last_access=8)
    other = node(50, 2, namespace="ada", last_access=5)
    return Node([], [], [left, right, other], lock_ref=1, hits=9, last_access=8)


# ---------------------------------------------------------------------- digest


def the_digest(impl: ModuleType, root: Node, what: str) -> bytes:
    """The student's digest of a tree, which must be 16 bytes and leave the tree as it is."""
    before = written(root)
    got = impl.digest(root)
    expect(isinstance(got, bytes), f"digest of {what} returned {shown(got)}; it should be bytes", hint=2)
    expect(len(got) == 16, f"digest of {what} returned {len(got)} bytes; it should be 16", hint=2)
    expect(written(root) == before, f"digest changed the tree it was given ({what}); it must stay as it is")
    return got


def same_digest(impl: ModuleType, one: Node, other: Node, what: str, hint: int = 0) -> None:
    first, second = the_digest(impl, one, what), the_digest(impl, other, what)
    expect(first == second, f"{what}: the trees are alike, and the digests are not", hint=hint)


def other_digest(impl: ModuleType, one: Node, other: Node, what: str, hint: int = 0) -> None:
    first, second = the_digest(impl, one, what), the_digest(impl, other, what)
    expect(first != second, f"{what}: the trees differ, and the digests are equal", hint=hint)


def digest_of_equals(impl: ModuleType) -> None:
    """A tree, and the same once more."""
    same_digest(impl, small_tree(), small_tree(), "a tree of seven nodes, made twice")
    same_digest(impl, Node(), Node(), "a tree of a root alone, made twice")
    other_digest(impl, Node(), small_tree(), "a root alone beside a tree of seven nodes")


def digest_of_another_order(impl: ModuleType) -> None:
    """The same tree with children in another order, and other names."""
    what = "a tree, and the same with its children in another order and other names"
    for number in range(8):
        same_digest(impl, small_tree(), shuffled(small_tree(), Random(number)), what, hint=1)
    twins = [node(50, 2), node(50, 2, namespace="ada"), node(50, 2, namespace="bob")]
    for order in (twins, twins[::-1], twins[1:] + twins[:1]):
        what = "three namespaces with the same tokens below the root, in another order"
        same_digest(impl, Node(children=twins), Node(children=order), what, hint=1)


def digest_of_each_field(impl: ModuleType) -> None:
    """One field of one node is another."""
    for at, there in enumerate(everyone(small_tree())):
        for name in FIELDS[2:]:
            changed = small_tree()
            setattr(everyone(changed)[at], name, getattr(there, name) + 1)
            other_digest(impl, small_tree(), changed, f"{name} of {there} is one more")
        for name in ("tokens", "slots") if there.tokens else ():
            changed = small_tree()
            getattr(everyone(changed)[at], name)[-1] += 1
            other_digest(impl, small_tree(), changed, f"the last of the {name} of {there} is one more")
    changed = small_tree()
    changed.children[2].namespace = "bob"
    other_digest(impl, small_tree(), changed, "a node in the namespace 'bob' instead of 'ada'")
    for name, said in (("slots", "200, 210, 220"), ("tokens", "20, 21, 22")):
        turned = small_tree()
        getattr(turned.children[0], name).reverse()
        other_digest(impl, small_tree(), turned, f"{name} {said} the other way round")
    later = small_tree()
    for each in everyone(later):
        each.last_access += 5
    other_digest(impl, small_tree(), later, "last_access of every node is five more")


def digest_looks_again(impl: ModuleType) -> None:
    """A tree that is changed, and changed back: nothing is remembered from call to call."""
    root = small_tree()
    first = the_digest(impl, root, "a tree of seven nodes")
    for each in everyone(root):
        each.hits += 1
        changed = the_digest(impl, root, "a tree of seven nodes")
        words = f"hits of {each} became one more since the last call, and the digest is the same"
        expect(changed != first, words)
        each.hits -= 1
    words = "the tree is again as it was at first, and the digest is not"
    expect(the_digest(impl, root, "a tree of seven nodes") == first, words)


def digest_of_where_things_end(impl: ModuleType) -> None:
    """Trees that are written alike if nothing says where a thing ends."""
    pairs = [
        (Node([1, 23], [5, 6]), Node([12, 3], [5, 6]), "tokens 1, 23 and 12, 3"),
        (Node([1], [2], lock_ref=3), Node([1], [2], hits=3), "lock_ref 3 and hits 3"),
        (Node([1], [2], lock_ref=1, hits=11), Node([1], [2], lock_ref=11, hits=1), "1, 11 and 11, 1"),
        (Node([1, 2], [3, 4]), Node([1, 2, 3], [4]), "tokens 1, 2 and slots 3, 4; and 1, 2, 3 and 4"),
        (Node([1, 2], [3, 4]), Node([1, 2], [3, 4], [Node()]), "without a child and with an empty one"),
        (Node([5], [6]), Node([261], [6]), "tokens 5 and 261"),
        (Node([5], [6]), Node([65541], [6]), "tokens 5 and 65541"),
        (Node([5], [6]), Node([5], [65542]), "slots 6 and 65542"),
    ]
    for one, other, what in pairs:
        other_digest(impl, Node(children=[one]), Node(children=[other]), what, hint=2)


def digest_of_shapes(impl: ModuleType) -> None:
    """The same nodes, hung up otherwise."""
    chain = Node(children=[node(1, 2, node(3, 2, node(5, 2)))])
    pairs = [
        (chain, Node(children=[node(1, 2, node(3, 2), node(5, 2))]), "a child of a child, and two children"),
        (chain, Node(children=[node(1, 2, node(3, 2)), node(5, 2)]), "a node that hangs below another one"),
        (chain, Node(children=[node(1, 4, node(5, 2))]), "tokens 1, 2, 3, 4 on one node instead of two"),
        (Node(children=[node(1, 2, node(7, 2)), node(3, 2, node(9, 2))]),
         Node(children=[node(1, 2, node(9, 2)), node(3, 2, node(7, 2))]), "two nodes that changed parents"),
    ]  # fmt: skip
    for one, other, what in pairs:
        other_digest(impl, one, other, what)


def digest_in_another_process(impl: ModuleType) -> None:
    """The same tree in a process in which texts have other hashes (PYTHONHASHSEED)."""
    found = set()
    for salt in range(1, 6):
        root = small_tree()
        with another_process(impl, salt) as text:
            for each in everyone(root):
                each.namespace = text(each.namespace)
            found.add(bytes(the_digest(impl, root, "a tree of seven nodes")))
    words = "the same tree has another digest in another process: is Python's hash in it, or a set's order?"
    expect(len(found) == 1, words, hint=1)


def digest_of_two_engines(impl: ModuleType) -> None:
    """Two engines that took the same requests, and something planted in one of them."""
    one = plain(rank().cache)
    same_digest(impl, one, plain(rank().cache), "two engines after the same requests")
    for name, plant in PLANTS.items():
        other = rank()
        plant(other.cache)
        other_digest(impl, one, plain(other.cache), f"two engines; in one of them was planted: {name}")


# ---------------------------------------------------------------------- find_divergence


def run_find(impl: ModuleType, mine: Node, theirs: Node, what: str) -> None:
    """One search: what is found, and with how many messages."""
    digest, wanted = Stamps(), first_difference(mine, theirs)
    ask, before = Rank0(theirs, digest), written(mine)
    got = impl.find_divergence(mine, lambda path: ask(path), digest)
    expect(written(mine) == before, f"{what}: find_divergence changed the tree; it must stay as it is")
    if wanted is None:
        expect(got is None, f"{what}, alike: find_divergence returned {shown(got)}, not None")
    else:
        says = f"{what}: find_divergence returned {shown(got)}; the first difference is {wanted!r}"
        known = isinstance(got, tuple) and len(got) == 2 and isinstance(got[0], tuple)
        expect(known, f"{says} (a tuple of a path, which is a tuple of steps, and a word)")
        hint = 1 if got[0] != wanted[0] else 0
        expect((got[0], got[1]) == wanted, says, hint=hint)
    path, word = wanted or ((), "")
    most = 1 + len(path) - word.startswith("only")
    expect(
        len(ask.asked) <= most,
        f"{what}: {len(ask.asked)} messages to rank 0, about {shown(ask.asked)}; {most} are enough",
        hint=2,
    )


def find_nothing(impl: ModuleType) -> None:
    """Trees that are alike, also in another order."""
    run_find(impl, small_tree(), small_tree(), "a tree of seven nodes, twice")
    run_find(impl, Node(), Node(), "a root alone, twice")
    for number in range(4):
        run_find(impl, shuffled(small_tree(), Random(number)), small_tree(), "a tree in another order")


def find_each_field(impl: ModuleType) -> None:
    """One field of one node is another."""
    for at, there in enumerate(everyone(small_tree())):
        for name in FIELDS[2:]:
            changed = small_tree()
            setattr(everyone(changed)[at], name, getattr(there, name) + 1)
            run_find(impl, changed, small_tree(), f"{name} of {there} is one more here")
        for name in ("tokens", "slots") if there.tokens else ():
            changed = small_tree()
            getattr(everyone(changed)[at], name).append(99)
            run_find(impl, changed, small_tree(), f"{there} has 99 as one more of its {name} here")


def find_the_first_field(impl: ModuleType) -> None:
    """Several fields of one node are others."""
    for at in range(7):
        for first in range(len(FIELDS)):
            changed = small_tree()
            there = everyone(changed)[at]
            for name in FIELDS[first:]:
                old = getattr(there, name)
                setattr(there, name, [*old, 99] if isinstance(old, list) else old + 1)
            run_find(impl, changed, small_tree(), f"{', '.join(FIELDS[first:])} of {there} are others here")


def find_a_missing_node(impl: ModuleType) -> None:
    """A node that one rank has, and the other one has not."""
    for at, there in enumerate(everyone(small_tree())):
        for below in range(len(there.children)):
            less = small_tree()
            gone = everyone(less)[at].children.pop(below)
            run_find(impl, less, small_tree(), f"{gone} is missing here")
            run_find(impl, small_tree(), less, f"{gone} is missing on rank 0")


def find_the_first_of_several(impl: ModuleType) -> None:
    """Several differences: above before below, smaller steps before larger ones."""
    whole = small_tree()
    for first in range(7):
        for second in range(first + 1, 7):
            for order in range(2):
                changed = small_tree()
                for at in (first, second):
                    everyone(changed)[at].hits += 1
                mine = shuffled(changed, Random(order))
                run_find(
                    impl, mine, whole, f"hits of {everyone(whole)[first]} and of {everyone(whole)[second]}"
                )
    more = small_tree()
    more.children += [node(10, 2), node(70, 2, namespace="ada")]
    more.children[0].hits += 1
    run_find(impl, more, whole, "a node [10, 11] only here, and hits of [20, 21, 22]")
    run_find(impl, whole, more, "a node [10, 11] only there, and hits of [20, 21, 22]")
    numbers = Node(children=[node(first, 1) for first in (9, 10, 100)])
    for first, second in ((9, 10), (9, 100), (10, 100)):
        changed = copy.deepcopy(numbers)
        for each in changed.children:
            each.hits += each.tokens[0] in (first, second)
        run_find(impl, changed, numbers, f"hits of [{first}] and of [{second}]")


def find_with_few_messages(impl: ModuleType) -> None:
    """A wide tree and a deep one: one message for each level."""
    wide = Node(children=[node(1000 * n, 2, *(node(10 * m, 2) for m in range(1, 9))) for n in range(1, 9)])
    changed = copy.deepcopy(wide)
    changed.children[6].children[5].slots[1] = 7
    run_find(impl, changed, wide, "72 nodes, and a slot of one at the second level")
    deep = node(1, 2)
    for number in range(2, 20):
        deep = node(number, 2, deep, node(number + 500, 1))
    changed = copy.deepcopy(Node(children=[deep]))
    everyone(changed)[19].lock_ref = 1
    run_find(impl, changed, Node(children=[deep]), "a chain of 19 nodes, and a lock at its end")


# ---------------------------------------------------------------------- account


@dataclass(frozen=True)
class Route:
    """What became of a request."""

    worker: int
    tokens: int
    cached: int
    held: list[int | None]


def check_account(
    impl: ModuleType, routes: list[Route], workers: int, wanted: dict[str, Any], what: str
) -> None:
    """The student's numbers beside those that are right."""
    before = copy.deepcopy(routes)
    got = impl.account(routes, workers)
    expect(routes == before, f"{what}: account changed the routes; they must stay as they are")
    expect(isinstance(got, dict), f"{what}: account returned {shown(got)}; it should be a dictionary")
    missing = [name for name in wanted if name not in got]
    expect(not missing, f"{what}: {', '.join(missing)} is missing in what account returned")
    for name, value in wanted.items():
        said = f"{what}: {name} is {shown(got[name])}; it should be {value!r}"
        if isinstance(value, float):
            number = isinstance(got[name], Real)
            expect(number and abs(got[name] - value) < 1e-9, said)
        elif isinstance(value, list):
            expect(as_ints(got[name], f"{what}: account, {name}") == value, said)
        else:
            expect(whole(got[name]) == value, said, hint=1 if name == "regret" else 0)


def account_by_hand(impl: ModuleType) -> None:
    """Three requests to two workers."""
    routes = [Route(0, 10, 0, [0, 0]), Route(1, 90, 60, [0, 60]), Route(1, 20, 8, [18, 10])]
    wanted = {"hit_rate": 68 / 120, "computed": [10, 42], "imbalance": 42 * 2 / 52, "regret": 8}
    check_account(impl, routes, 2, wanted, "three requests to two workers")


def account_of_idle_workers(impl: ModuleType) -> None:
    """Workers that got nothing."""
    routes = [Route(2, 10, 4, [None, 0, 4, 0])] * 3
    wanted = {"hit_rate": 0.4, "computed": [0, 0, 18, 0], "imbalance": 4.0, "regret": 0}
    check_account(impl, routes, 4, wanted, "three requests to the third of four workers")


def account_of_nothing(impl: ModuleType) -> None:
    """No request; and one that had nothing to compute."""
    nothing = {"hit_rate": 0.0, "computed": [0, 0, 0], "imbalance": 1.0, "regret": 0}
    check_account(impl, [], 3, nothing, "no request, three workers")
    routes = [Route(1, 10, 10, [0, 10])]
    wanted = {"hit_rate": 1.0, "computed": [0, 0], "imbalance": 1.0, "regret": 0}
    check_account(impl, routes, 2, wanted, "one request of which everything was cached")


def account_of_the_dead(impl: ModuleType) -> None:
    """What a dead worker holds is not regretted; and held is not cached."""
    routes = [Route(1, 10, 2, [None, 3, 5]), Route(2, 10, 9, [9, None, 10]), Route(0, 30, 0, [0, None, None])]
    wanted = {"hit_rate": 11 / 50, "computed": [30, 8, 1], "imbalance": 30 * 3 / 39, "regret": 2}
    check_account(impl, routes, 3, wanted, "three workers, of which some were not alive")


def account_of_a_fleet(impl: ModuleType) -> None:
    """A real router, and simulated workers with real trees."""
    watched = Watched(make_policy("cache-aware"))
    run = play(watched, texts(Random("account"), 24))
    compare_account(impl, watched, run)


def compare_account(impl: ModuleType, watched: Watched, run: Run) -> None:
    """What account says of a run, beside what the simulation itself has counted."""
    routes = [
        Route(worker, tokens, cached, held)
        for (worker, tokens, cached), held in zip(run.served, watched.held, strict=True)
    ]
    computed = [sum(t - c for w, t, c in run.served if w == at) for at in range(WORKERS)]
    wanted = {
        "hit_rate": run.hit_rate, "computed": computed, "imbalance": max_of_mean(computed) or 1.0,
        "regret": run.regret,
    }  # fmt: skip
    check_account(impl, routes, WORKERS, wanted, f"{len(routes)} requests behind {watched.inner.name}")


# ---------------------------------------------------------------------- the router: simulated workers


def ask(router: Held, tokens: Sequence[int], loads: Sequence[int | None]) -> int:
    """Asks, and sends; a load of None: not alive."""
    views = [Worker(f"w{at}", load is not None, load or 0) for at, load in enumerate(loads)]
    worker, _ = router.choose(list(tokens), views)
    router.sent(worker, list(tokens))
    return worker


def router_of_strangers(impl: ModuleType) -> None:
    """Prompts of which nobody was sent anything: the least loaded, in turn."""
    router = Held(impl, "prompts that nobody knows")
    for number in range(9):
        ask(router, range(100 * number, 100 * number + 20), [0, 0, 0])
    for number, loads in enumerate([[3, 1, 2], [1, 3, 1], [9, 9, 0], [0, 9, 9], [2, 2, 1]]):
        ask(router, range(5000 + 100 * number, 5000 + 100 * number + 20), loads)
    for number in range(6):
        ask(router, range(8000 + 100 * number, 8000 + 100 * number + 20), [7, None, 7])


def router_of_known_prompts(impl: ModuleType) -> None:
    """A prompt goes where its beginning was sent."""
    router = Held(impl, "prompts that were sent before")
    heads = [list(range(1000 * n, 1000 * n + 40 * n)) for n in range(1, 7)]
    for head in heads:
        ask(router, [*head, 1], [0, 0, 0])
    for turn in range(3):
        for number in (3, 0, 5, 1, 4, 2, 2):
            ask(router, [*heads[number], 7 + turn, 8], [0, 0, 0])
            ask(router, [*heads[number], 7 + turn, 9], [3, 2, 3])


def router_of_other_beginnings(impl: ModuleType) -> None:
    """Prompts that are alike from their second token on: no beginning in common."""
    router = Held(impl, "prompts that differ in their first token alone")
    for number in range(6):
        ask(router, [number, *range(100, 140)], [0, 0, 0])
    ask(router, [6, *range(100, 140)], [3, 3, 0])
    ask(router, [7, *range(100, 140)], [0, 3, 3])


def router_under_load(impl: ModuleType) -> None:
    """One prompt is all that is asked: no worker gets too many."""
    for workers, start in ((3, 0), (4, 6), (2, 40)):
        router = Held(impl, "the same prompt again and again, and nobody answers")
        loads = [start] * workers
        for _ in range(30):
            loads[ask(router, range(30), loads)] += 1
    for dead in range(3):
        router = Held(impl, "the same prompt again and again, and one worker is dead")
        now: list[int | None] = [6, 5, 7]
        ask(router, range(30), now)
        now[dead] = None
        for _ in range(12):
            at = ask(router, range(30), now)
            now[at] = (now[at] or 0) + 1


def router_looks_below(impl: ModuleType) -> None:
    """Whoever was sent most has too many in flight: the next one that was sent nearly as much."""
    router = Held(impl, "two workers know a prompt, one of them has too many requests in flight")
    for loads in ([0, 9, 9], [9, 0, 9]):
        ask(router, range(50), loads)
    for loads in ([9, 4, 4], [4, 9, 4], [14, 9, 9], [9, 14, 9]):
        ask(router, range(50), loads)
    router = Held(
        impl, "who was sent the whole prompt has too many requests in flight, who was sent most not"
    )
    ask(router, range(50), [0, 9, 9])
    ask(router, [*range(45), *range(90, 140)], [9, 0, 9])
    ask(router, range(50), [9, 4, 3])


def router_forgets(impl: ModuleType) -> None:
    """A worker that died holds nothing any more; the others still do."""
    router = Held(impl, "a worker died, and is back")
    prompts = [list(range(100 * n, 100 * n + 30)) for n in range(1, 4)]
    where = [ask(router, prompt, [0, 0, 0]) for prompt in prompts]
    router.forget(where[1])
    for at in (2, 0):
        ask(router, [*prompts[at], 5], [0, 0, 0])
    loads = [0, 0, 0]
    loads[where[1]] = 3
    back = ask(router, prompts[1], loads)
    expect(back != where[1], f"worker {back} was forgotten, and has the most requests in flight")
    router.forget(2)
    router.forget(2)
    for prompt in prompts:
        ask(router, [*prompt, 6], [1, 1, 1])


def router_believes_what_was_sent(impl: ModuleType) -> None:
    """What was chosen counts only when it is sent; and each Router begins anew."""
    router = Held(impl, "chosen again and again, and nothing is sent")
    views = [Worker(f"w{at}", True, 2) for at in range(4)]
    for _ in range(8):
        router.choose(list(range(20)), views)
    router.sent(3, list(range(20)))
    for _ in range(3):
        router.choose([*range(20), 7], views)
    router = Held(impl, "a second Router, which was sent nothing")
    for _ in range(4):
        router.choose(list(range(20)), views)


@cache
def rates(name: str, seed: str) -> tuple[Game, float, float]:
    """A game, and the hit rates of round-robin and cache-aware."""
    game = GAMES[name](Random(seed))
    return game, *(play(make_policy(each), game).hit_rate for each in ("round-robin", "cache-aware"))


GAMES: dict[str, Callable[[Random], Game]] = {
    "texts": texts, "common": lambda rng: texts(rng, common=12), "chats": chats,
}  # fmt: skip


def play_router(impl: ModuleType, names: Sequence[str], seed: str) -> None:
    """Games for a student's Router: hits in all, and the largest share in each."""
    gained = least = 0.0
    for name in names:
        game, turns, ours = rates(name, seed)
        run = play(StudentPolicy(make=lambda what=game.name: Held(impl, what), strict=True), game)
        expect(
            run.largest_share <= 2 / 3,
            f"{game.name}: one of {WORKERS} workers got {run.largest_share:.0%} of the requests; "
            "more than two thirds must not go to one",
            hint=1,
        )
        gained, least = gained + run.hit_rate - turns, least + (ours - turns) / 2
    expect(
        gained >= least,
        f"{', '.join(names)}: over round-robin your hit rate gains {gained / len(names):+.1%} in the mean; "
        f"it should be {least / len(names):+.1%} or more, half of what cache-aware gains",
    )


def router_of_simulated_workers(impl: ModuleType) -> None:
    """Four simulated workers: questions about some texts, all of which begin alike."""
    play_router(impl, ["common"], "open")


EXERCISES = [
    Exercise(
        "digest", 3,
        [digest_of_equals, digest_of_another_order, digest_of_each_field, digest_looks_again,
         digest_of_where_things_end, digest_of_shapes, digest_in_another_process, digest_of_two_engines],
        hints=(
            "What comes in are a node's own fields, and one digest of each child: whoever has the children's "
            "digests need not look at their trees.",
            "In which order do the children come in? Sort their digests, and feed one after the other.",
            "`repr((namespace, tokens, slots, lock_ref, hits, last_access))` has brackets and "
            "commas, which say where a thing ends. Feed `hashlib.blake2b(digest_size=16)` with it.",
        ),
    ),
    Exercise(
        "find_divergence", 3,
        [find_nothing, find_each_field, find_the_first_field, find_a_missing_node, find_the_first_of_several,
         find_with_few_messages],
        hints=(
            "If a node's own fields are equal and its digest is not, something below it differs: a child has "
            "another digest, or is on one side only.",
            "Make `here = {(child.namespace, child.tokens[0]): child}`, and go through the sorted steps of "
            "both sides. The first that is missing on one side or has another digest is on the path.",
            "`told = ask(path)` stands once, at the top of a loop. Where a child is missing on one side, "
            "that is the answer: nobody needs to be asked about it.",
        ),
    ),
    Exercise(
        "account", 2,
        [account_by_hand, account_of_idle_workers, account_of_nothing, account_of_the_dead,
         account_of_a_fleet],
        hints=(
            "Sum up first, divide once at the end; `computed` begins as `[0] * workers`.",
            "Regret: the maximum of what those alive held, less what the chosen one held. `cached` has no "
            "part in it.",
        ),
    ),
    Exercise(
        "Router", 4,
        [router_of_strangers, router_of_known_prompts, router_of_other_beginnings, router_under_load,
         router_looks_below, router_forgets, router_believes_what_was_sent, router_of_simulated_workers],
        hints=(
            "Remember for each worker the prompts that were sent there, and compare with each of them.",
            "First leave out who is dead or has too many in flight. Among the rest take the longest match, "
            "if it is a good part of the prompt (say half); else the least loaded.",
            "Among equals: remember in which choice each worker was chosen last, and take `min(..., "
            "key=lambda at: (load, last choice))`.",
        ),
    ),
]  # fmt: skip
