"""What lesson 14 asks for, and its open cases. What a right answer is, the engine's own tree says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import torch

from lessons.grading import Exercise, Failure, expect
from lessons.grading.policy import (
    Request,
    found,
    found_block_by_block,
    found_by_lru,
    random_requests,
    trace,
)
from lessons.grading.shared import whole
from lessons.grading.words import shown
from minirad.cache.node import Node
from minirad.cache.radix_cache import RadixKey
from minirad.kv.kv_pool import KVPool

Needed = Sequence[Sequence[int | None]]

# ---------------------------------------------------------------------- needed_sizes


def sizes_by_hand(impl: ModuleType) -> None:
    """A few requests, by hand."""
    for requests, wanted, hint in (
        ([[1], [2], [1]], [[None], [None], [2]], 1),
        ([[1], [1]], [[None], [1]], 0),
        ([[1], [2], [3], [2], [1]], [[None], [None], [None], [2], [3]], 1),
        ([[1], [2], [2], [2], [1]], [[None], [None], [1], [1], [2]], 1),  # twice since: counts once
        ([[1, 2], [1, 2]], [[None, None], [1, 2]], 1),  # the first block was used last
        ([[1, 2], [3], [1, 2]], [[None, None], [None], [2, 3]], 1),
        ([[1, 2], [3, 2]], [[None, None], [None, None]], 0),  # behind another beginning it is another block
        ([[1, 2, 5], [1, 2, 6], [1, 2, 5]], [[None] * 3, [1, 2, None], [1, 2, 4]], 1),
        ([[1, 1, 1], [1, 1]], [[None] * 3, [1, 2]], 0),
        ([[], [7], [], [7, 8]], [[], [None], [], [1, None]], 0),
    ):
        _same_sizes(impl, requests, wanted, hint)  # type: ignore[arg-type]


def sizes_of_a_stream(impl: ModuleType) -> None:
    """Requests that come one by one, and can be read once only."""
    requests = [[1, 2], [3], [1, 2], [1, 4]]
    wanted = [[None, None], [None], [2, 3], [1, None]]
    got = impl.needed_sizes(iter(requests))
    words = f"needed_sizes of an iterator over {requests} returned {shown(got)}; it should be {wanted}"
    expect(_plain(got) == wanted, words)


def sizes_as_the_engine(impl: ModuleType) -> None:
    """A small game: the engine's tree, one block a node, is run at every size."""
    play_sizes(impl, random_requests(Random(14), 14, 4))


def play_sizes(impl: ModuleType, requests: list[list[int]]) -> None:
    """Held against the engine at each size, from the longest request to one that finds all."""
    kept = [list(request) for request in requests]
    needed = _plain(impl.needed_sizes(requests))
    expect(requests == kept, f"needed_sizes changed the requests that it was given: {kept} became {requests}")
    shape = [len(request) for request in requests]
    expect(
        isinstance(needed, list) and list(map(_length, needed)) == shape,
        f"needed_sizes of {requests} returned {shown(needed)}; it should be a list of lists with {shape} "
        "numbers",
    )
    expect(
        all(number is None or type(number) is int for row in needed for number in row),
        f"needed_sizes of {requests} returned {shown(needed)}; only whole numbers and None belong there",
    )
    for size, hits in engine_runs(requests):
        for place, (row, hit) in enumerate(zip(needed, hits, strict=True)):
            finds = [number is not None and number <= size for number in row]
            wanted = [at < hit for at in range(len(row))]
            expect(
                finds == wanted,
                f"requests {requests}, a cache of {size} blocks: of request number {place + 1}, "
                f"{requests[place]}, the engine finds the first {hit} blocks; by your numbers {row} it would "
                f"find {sum(finds)}",
                hint=1 if hit else 0,
            )


def engine_runs(requests: Sequence[Request]) -> Iterator[tuple[int, list[int]]]:
    """(size, hits of each request), from the longest request up to a cache that holds everything."""
    most = found_block_by_block(requests, 10**6)
    size = max([1, *map(len, requests)])
    while True:
        hits = found_block_by_block(requests, size)
        yield size, hits
        if hits == most:
            yield size + 1, most
            return
        size += 1


def _same_sizes(
    impl: ModuleType, requests: list[list[int]], wanted: list[list[int | None]], hint: int
) -> None:
    got = _plain(impl.needed_sizes([list(request) for request in requests]))
    words = f"needed_sizes({requests}) returned {shown(got)}; it should be {wanted}"
    expect(got == wanted, words, hint=hint)


def _plain(value: Any) -> Any:
    """Tuples and numpy's arrays as lists, numpy's numbers as Python's own: a right answer may be built so."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _length(row: Any) -> int:
    return len(row) if isinstance(row, list) else -1


# ---------------------------------------------------------------------- hit_curve


def curve_by_hand(impl: ModuleType) -> None:
    """Some numbers, by hand."""
    needed = [[None, None], [2, 7], [3, 5], [3]]
    for sizes, wanted in (
        ([2], [1]),
        ([3, 4, 5, 6, 7], [3, 3, 4, 4, 5]),
        ([10**9, 2, 5, 5], [5, 1, 4, 4]),
        ([], []),
    ):
        got = _plain(impl.hit_curve([list(row) for row in needed], list(sizes)))
        expect(got == wanted, f"hit_curve({needed}, {sizes}) returned {shown(got)}; it should be {wanted}")
    for empty in ([], [[]], [[None]]):
        got = _plain(impl.hit_curve(empty, [1, 4]))
        expect(got == [0, 0], f"hit_curve({empty}, [1, 4]) returned {shown(got)}; it should be [0, 0]")


def curve_refuses(impl: ModuleType) -> None:
    """A cache that does not hold the longest request."""
    for needed, sizes, bad in (
        ([[None], [1, None, None], [2]], [3, 2], 2),
        ([[None, None, None, None], [1, 2]], [10, 4, 3], 3),
        ([[None, None]], [1], 1),
    ):
        try:
            got = impl.hit_curve(needed, sizes)
        except ValueError as error:
            words = f"hit_curve({needed}, {sizes}) raised ValueError({str(error)!r})"
            expect(str(bad) in str(error), f"{words}: it should name the size {bad}", hint=1)
        else:
            longest = max(map(len, needed))
            raise Failure(
                f"hit_curve({needed}, {sizes}) returned {shown(got)}; the longest request has {longest} "
                f"blocks, so a size of {bad} should raise ValueError",
                hint=1,
            )


def curve_as_the_engine(impl: ModuleType) -> None:
    """A small game: the engine's tree, one block a node, at several sizes."""
    play_curve(impl, random_requests(Random(15), 12, 4), Random(15))


def play_curve(impl: ModuleType, requests: list[list[int]], rng: Random) -> None:
    """Held against the engine at all sizes, in a random order, some of them twice."""
    runs = dict(engine_runs(requests))
    needed = needed_by_engine(requests, runs)
    sizes = [*runs, *rng.choices(list(runs), k=3)]
    rng.shuffle(sizes)
    wanted = [sum(runs[size]) for size in sizes]
    kept = [list(row) for row in needed]
    got = _plain(impl.hit_curve(needed, sizes))
    words = f"hit_curve({kept}, {sizes}) returned {shown(got)}; the engine's tree finds {wanted}"
    expect(got == wanted, words)
    expect(needed == kept, f"hit_curve changed the lists that it was given: {kept} became {needed}")


def needed_by_engine(
    requests: Sequence[Request], runs: Mapping[int, Sequence[int]]
) -> list[list[int | None]]:
    """For each block the first of the sizes at which the engine found it."""
    return [
        [next((size for size in sorted(runs) if at < runs[size][place]), None) for at in range(len(request))]
        for place, request in enumerate(requests)
    ]


# ---------------------------------------------------------------------- claim_inclusion


def the_claim(impl: ModuleType) -> None:
    """The requests and sizes that you return, played on the engine's tree."""
    returned = impl.claim_inclusion()
    shape = isinstance(returned, tuple | list) and len(returned) == 3
    expect(shape, f"claim_inclusion returned {shown(returned)}; it should be (requests, small, large)")
    requests, small, large = map(_plain, returned)
    what = f"{shown(requests)}, {shown(small)}, {shown(large)}"
    for name, size in (("small", small), ("large", large)):
        expect(type(size) is int, f"claim_inclusion returned {what}: {name} should be a whole number")
    expect(small < large, f"claim_inclusion returned {what}: small should be less than large")
    expect(
        isinstance(requests, list) and 1 <= len(requests) <= 8,
        f"claim_inclusion returned {what}: at most eight requests, and at least one",
    )
    for request in requests:
        fine = isinstance(request, list) and 1 <= len(request) <= 8
        fine = fine and all(type(each) is int and 0 <= each < 2**31 for each in request)
        expect(
            fine, f"claim_inclusion: {shown(request)} should be a list of one to eight block ids (0 or more)"
        )
        expect(
            len(request) <= small,
            f"claim_inclusion: {request} does not fit into {small} blocks: the engine refuses it",
        )
    keys = list(map(RadixKey, requests))
    less, more = found(keys, small), found(keys, large)
    expect(
        less > more,
        f"claim_inclusion: on {requests} the engine finds {less} blocks with room for {small}, and {more} "
        f"with room for {large}; the larger cache should find less",
        hint=1 if less == more else 0,
    )


# ---------------------------------------------------------------------- victim_key

SECOND_HALF = (3_008, 6_015)  # numbers of its first and last request


def leaf(
    number: int,
    *,
    tokens: Sequence[int],
    last_access: int,
    created: int,
    hits: int,
    above: int = 0,
    lock: int = 0,
) -> Node:
    """A leaf as the engine makes them; above: how many blocks stand before it, and its parent's numbers."""
    root = Node(0, None, None, b"", b"", RadixKey(()))
    parent = root
    if above:
        key = RadixKey(range(above))
        parent = Node(number + 1, root, None, key.data, bytes(8 * above), key)
    parent.hits = parent.created = parent.last_access = above
    key = RadixKey(tokens)
    made = Node(number, parent, None, key.data, bytes(8 * len(key)), key)
    made.last_access, made.created, made.hits, made.lock_ref = last_access, created, hits, lock
    made.priority = above
    parent.children = dict.fromkeys(range(above + 1), made)
    return made


def key_of_a_leaf(impl: ModuleType) -> None:
    """The same five numbers give the same key, whatever else there is about a leaf."""
    for number, size, used, came, hits in ((5, 3, 12, 6, 1), (9, 40, 1_200, 700, 0), (7, 1, 88, 2, 30)):
        play_key(impl, Random(number), number, size, used, came, hits)


def play_key(impl: ModuleType, rng: Random, number: int, size: int, used: int, came: int, hits: int) -> None:
    """Asks for the keys of leaves that differ in what a key must not look at, and of others in between."""
    keys = []
    numbers = f"id {number}, {size} blocks, last_access {used}, created {came}, hits {hits}"
    for above, largest in enumerate((1, 100, 50_000, 2**31)):
        tokens = [rng.randrange(largest) for _ in range(size)]
        more = {"above": above, "lock": rng.randrange(2)}
        node = leaf(number, tokens=tokens, last_access=used, created=came, hits=hits, **more)
        before = _fields(node)
        keys.append(impl.victim_key(node))
        expect(_fields(node) == before, f"victim_key changed the leaf that it was given ({numbers})")
        other = leaf(
            number + 1, tokens=tokens[:1], last_access=used + 2, created=came + 2, hits=rng.randrange(9)
        )
        impl.victim_key(other)
    words = (
        f"victim_key gave one leaf ({numbers}) the keys {', '.join(map(shown, keys))}: they should be equal"
    )
    expect(all(key == keys[0] for key in keys), words, hint=0)


def watched(key: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The key; every 61st time a leaf that agrees in the five numbers has to have the same one."""
    calls = count()

    def asked(node: Node) -> Any:
        value = key(node)
        if next(calls) % 61 == 0:
            used, came, hits = node.last_access, node.created, node.hits
            twin = leaf(node.id, tokens=range(len(node)), last_access=used, created=came, hits=hits, above=2)
            numbers = f"id {node.id}, {len(node)} blocks, last_access {used}, created {came}, hits {hits}"
            again = key(twin)
            expect(
                again == value,
                f"victim_key gave two leaves that agree in their five numbers ({numbers}) the keys "
                f"{shown(value)} and {shown(again)}: they should be equal",
            )
        return value

    return asked


def _fields(node: Node) -> list[Any]:
    return [getattr(node, name) for name in Node.__slots__ if name != "parent"]


def key_on_a_piece(impl: ModuleType) -> None:
    """Requests 1,501 to 3,000 of the public trace, in a cache of 1,800 blocks."""
    beats_lru(impl, 1_501, 3_000, 1_800, 0.15)


def beats_lru(impl: ModuleType, first: int, last: int, capacity: int, margin: float) -> None:
    """Runs the engine's tree under the student's policy; margin: how much more than lru's it must find."""
    theirs = found_by_lru(first, last, capacity)
    ours = found(trace()[first - 1 : last], capacity, watched(impl.victim_key))
    least = f"at least {margin:.0%} more" if margin > 0 else f"not more than {-margin:.0%} less"
    far = ours < theirs * (1 + margin / 2)
    expect(
        ours >= theirs * (1 + margin),
        f"requests {first:,} to {last:,} in a cache of {capacity:,} blocks: lru finds {theirs:,} blocks, "
        f"your policy {ours:,} ({ours / theirs - 1:+.1%}); {least} is asked for",
        hint=2 if margin <= 0 else 0 if far else 1,
    )


# ---------------------------------------------------------------------- gigabytes


@dataclass(frozen=True)
class Model:
    """A model's config.json, and the KV pool that the engine makes for it."""

    config: dict[str, Any]
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Of the pool's tensors."""
        pool = KVPool(self.layers, 2, self.kv_heads, self.head_dim, dtype=self.dtype, device="cpu")
        return sum(tensor.nbytes for tensor in (*pool.k, *pool.v)) // pool.num_slots


def config(layers: int, heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    """The config.json of some Llama."""
    return dict(
        model_type="llama", vocab_size=1_000, hidden_size=hidden, intermediate_size=4 * hidden,
        num_hidden_layers=layers, num_attention_heads=heads, **more,
    )  # fmt: skip


HALF, SINGLE = torch.float16, torch.float32
MODELS = (
    Model(  # Llama 3 8B
        config(32, 32, 4096, num_key_value_heads=8, head_dim=128, torch_dtype="bfloat16"),
        32, 8, 128, torch.bfloat16,
    ),
    Model(  # SmolLM2 135M
        config(30, 9, 576, num_key_value_heads=3, torch_dtype="bfloat16"), 30, 3, 64, torch.bfloat16
    ),
    Model(config(4, 4, 160, num_key_value_heads=2, head_dim=64, dtype="float16"), 4, 2, 64, HALF),
    Model(config(2, 4, 32), 2, 4, 8, SINGLE),
    Model(config(3, 4, 32, num_key_value_heads=1, head_dim=10, dtype="float32"), 3, 1, 10, SINGLE),
    Model(config(3, 8, 32, num_key_value_heads=2, dtype="float16", torch_dtype="float32"), 3, 2, 4, HALF),
    Model(
        config(5, 6, 48, num_key_value_heads=2, head_dim=None, dtype=None, torch_dtype="float16"),
        5, 2, 8, HALF,
    ),
    Model(config(4, 2, 20, num_key_value_heads=None, head_dim=6, torch_dtype=None), 4, 2, 6, SINGLE),
)  # fmt: skip


def bytes_of_models(impl: ModuleType) -> None:
    """Models of several shapes, against the engine's own pool."""
    for model in MODELS:
        play_bytes(impl, model)


def play_bytes(impl: ModuleType, model: Model) -> None:
    """Held against the tensors of the engine's pool."""
    wanted = model.bytes_per_token
    beside = ("model_type", "vocab_size", "intermediate_size")
    asked = {name: value for name, value in model.config.items() if name not in beside}
    got = impl.kv_bytes_per_token(dict(model.config))
    expect(
        whole(got) == wanted,
        f"kv_bytes_per_token of a model with {asked} returned {shown(got)}; the engine's pool takes "
        f"{wanted:,} bytes for a token",
    )


def gigabytes_by_hand(impl: ModuleType) -> None:
    """Some numbers, by hand. Blocks of 400 MB: 2, 5, 7, 10 of them fit into 1, 2, 3, 4 gigabytes."""
    block = 400_000_000
    steep = [[None, 1], [2, 9], [9, 9], [10, 10]]
    for needed, worth, price, wanted, why in (
        ([[None], [1], [2]], 10, 5, 1, "1 gigabyte finds both blocks"),
        ([[None], [1], [2]], 10, 20, 0, "1 gigabyte saves 20 and costs 20: with none it is as much"),
        ([[None], [1], [2], [4], [5]], 10, 5, 2, "2 gigabytes hold 5 blocks, not 2 times 2"),
        (steep, 10, 4, 4, "with 3 gigabytes nothing is won, with 4 very much"),
        ([[None], [1], [8]], 10, 2, 4, "a gigabyte is 10**9 bytes: 3 hold 7 blocks, 4 hold 10"),
        ([[None], [1], [20], [20], [20], [20]], 10, 3, 8, "8 gigabytes hold 20 blocks and find 5"),
        ([[None], [1], [500], [500]], 1_000, 3, 200, "200 gigabytes hold 500 blocks and find 3"),
        ([[None], [1], [1], [3]], 10, 10, 1, "the second gigabyte saves just what it costs"),
        ([[None], [1], [9]], 7, 0, 4, "memory costs nothing, but what lies idle does not pay either"),
        ([[None], [1]], 0, 3, 0, "a found block is worth nothing"),
        ([[None], [None, None]], 10, 1, 0, "nothing can be found"),
        ([], 10, 1, 0, "there are no requests"),
    ):
        got = impl.gigabytes_deserved([list(row) for row in needed], block, worth, price)
        words = f"gigabytes_deserved({needed}, {block}, {worth}, {price}) returned {shown(got)}"
        words += f"; it should be {wanted}: {why}"
        expect(not isinstance(got, bool) and whole(got) == wanted, words, hint=1)


def gigabytes_as_the_engine(impl: ModuleType) -> None:
    """A small game: the engine's tree is run with each number of gigabytes."""
    for seed, block in ((1, 240_000_000), (2, 190_000_000)):
        rng = Random(seed)
        play_gigabytes(impl, random_requests(rng, 16, 4, 3), block, rng)


def play_gigabytes(impl: ModuleType, requests: list[list[int]], block: int, rng: Random) -> None:
    """Held against what the engine's tree finds with 0, 1, 2, ... gigabytes, until it finds all."""
    runs = dict(engine_runs(requests))
    needed = needed_by_engine(requests, runs)
    hits = [0]
    while hits[-1] < sum(runs[max(runs)]):
        room = len(hits) * 10**9 // block
        hits.append(sum(found_block_by_block(requests, room)))
    for _ in range(3):
        worth, price = rng.randrange(1, 9), rng.randrange(12)
        gains = [hit * worth - number * price for number, hit in enumerate(hits)]
        wanted = gains.index(max(gains))
        got = impl.gigabytes_deserved([list(row) for row in needed], block, worth, price)
        expect(
            not isinstance(got, bool) and whole(got) == wanted,
            f"gigabytes_deserved({needed}, {block}, {worth}, {price}) returned {shown(got)}: with 0, 1, 2, "
            f"... gigabytes the engine's tree finds {hits} blocks, so it should be {wanted}",
            hint=1,
        )


# ---------------------------------------------------------------------- the table

Cases = Sequence[Callable[..., None]]


def exercise(
    name: str, points: float, cases: Cases, *hints: str, functions: tuple[str, ...] = ()
) -> Exercise:
    return Exercise(name, points, cases, hints=hints, functions=functions)


EXERCISES = [
    exercise(
        "needed_sizes",
        3,
        [sizes_by_hand, sizes_of_a_stream, sizes_as_the_engine],
        "A block is its id together with the block before it: give each such pair a number of its own, in a "
        "dictionary.",
        "Keep a row of all blocks, the most recently used first: the place in it is the answer. Look up the "
        "whole request first; then take its blocks, from the last to the first, out of the row and put each "
        "in front.",
        "Quicker: the times of last use in a sorted list. A new time comes last, an old one is found by "
        "bisection, and the place is the number of times that are not older.",
    ),
    exercise(
        "hit_curve",
        1,
        [curve_by_hand, curve_refuses, curve_as_the_engine],
        "A cache of c blocks finds every block whose number is c or less. None is no number.",
        "The longest request is the longest list in `needed`; a size below it raises ValueError with the "
        "size in it.",
    ),
    exercise(
        "claim_inclusion",
        2,
        [the_claim],
        "Which look-up makes something count as just used that it did not ask for? See what a split does.",
        "A look-up that ends inside a leaf cuts it in two and makes both halves young. Let only the larger "
        "cache still have that leaf: what else has to go there for it, and is asked for last?",
    ),
    exercise(
        "victim_key",
        3,
        [key_of_a_leaf, key_on_a_piece],
        "The key is made of these alone: len(node), node.last_access, node.created, node.hits, node.id. "
        "Under lru nearly all prompts go just before they come back: whom could you let go at once, so that "
        "the rest can stay?",
        "Begin with node.last_access: a hit may count as if the leaf had been used some hundreds of ticks "
        "later. Then: who takes the room of many others? And must all newcomers that nobody hit yet go "
        "equally soon?",
        "In a large cache lru is not bad: what was used just now should stay there, long or not. 20 ticks "
        "off for each block are enough, 100 too many.",
    ),
    exercise(
        "gigabytes",
        3,
        [bytes_of_models, gigabytes_by_hand, gigabytes_as_the_engine],
        "A key and a value, for each layer and each KV head, of head_dim numbers of so many bytes.",
        "`g * 10**9 // block_bytes` blocks fit into g gigabytes. Try every g from 0 until everything is "
        "found: where the next one does not pay, ten more may.",
        functions=("kv_bytes_per_token", "gigabytes_deserved"),
    ),
]  # fmt: skip
