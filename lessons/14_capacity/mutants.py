"""Plausible wrong solutions of lesson 14."""

from __future__ import annotations

import random
import time
from itertools import count

from lessons.grading import Mutant

_NEEDED = "def needed_sizes"
_CURVE = "def hit_curve"
_BYTES = "def kv_bytes_per_token"
_WORTH = "def gigabytes_deserved"
_NAME = "names.setdefault((block, number), len(names) + 1)"
_PLACE = "len(times) - bisect_left(times, last[each])"
_LOOK = f"[{_PLACE} if each in last else None for each in path]"
_COUNTED = "[bisect_right(numbers, size) for size in sizes]"
_STORY = "[[1, 1, 1], [0, 0], [1, 3], [0, 0]], 4, 5"
_KEY = "node.last_access + 600 * leases"
_BUY = "gigabytes * GIGABYTE // block_bytes"


# ---------------------------------------------------------------------- needed_sizes


def _looks_up_one_by_one(requests):
    names, row, found = {}, [], []
    for request in requests:
        needs, block = [], 0
        for number in request:
            block = names.setdefault((block, number), len(names) + 1)
            needs.append(row.index(block) + 1 if block in row else None)
            if block in row:
                row.remove(block)
            row.insert(0, block)
        found.append(needs)
    return found


def _whole_requests_in_the_row(requests):
    row, found = [], []
    for request in map(tuple, requests):
        needs = []
        for end in range(1, len(request) + 1):
            before = 0
            for other in row:
                before += len(other)
                if other[:end] == request[:end]:
                    needs.append(before)
                    break
            else:
                needs.append(None)
        row = [request, *(other for other in row if other != request)]
        found.append(needs)
    return found


def _a_found_block_stays_where_it_is(requests):
    names, row, found = {}, [], []
    for request in requests:
        path, block = [], 0
        for number in request:
            block = names.setdefault((block, number), len(names) + 1)
            path.append(block)
        found.append([row.index(each) + 1 if each in row else None for each in path])
        for each in reversed(path):
            if each not in row:
                row.insert(0, each)
    return found


def _beginnings_in_any_order(requests):
    row, found = [], []
    for request in requests:
        path = [frozenset(request[: end + 1]) for end in range(len(request))]
        found.append([row.index(each) + 1 if each in row else None for each in path])
        for each in reversed(path):
            if each in row:
                row.remove(each)
            row.insert(0, each)
    return found


def _names_in_place_of_ids(requests):
    names, row, found = {}, [], []
    for request in requests:
        block = 0
        for place, number in enumerate(request):
            block = request[place] = names.setdefault((block, number), len(names) + 1)
        found.append([row.index(each) + 1 if each in row else None for each in request])
        for each in reversed(request):
            if each in row:
                row.remove(each)
            row.insert(0, each)
    return found


_seen: dict = {}


def _names_kept_between_calls(requests):
    row, found = _seen.setdefault("row", []), []
    for request in requests:
        path, block = [], 0
        for number in request:
            block = _seen.setdefault((block, number), len(_seen) + 1)
            path.append(block)
        found.append([row.index(each) + 1 if each in row else None for each in path])
        for each in reversed(path):
            if each in row:
                row.remove(each)
            row.insert(0, each)
    return found


# ---------------------------------------------------------------------- hit_curve


def _whole_requests_only(needed, sizes):
    _refuse(needed, sizes)
    whole = [row for row in needed if None not in row]
    return [sum(len(row) for row in whole if max(row, default=0) <= size) for size in sizes]


def _requests_that_found_something(needed, sizes):
    _refuse(needed, sizes)
    return [sum(any(n is not None and n <= size for n in row) for row in needed) for size in sizes]


def _sorts_what_it_was_given(needed, sizes):
    _refuse(needed, sizes)
    sizes.sort()
    return [sum(n is not None and n <= size for row in needed for n in row) for size in sizes]


def _nothing_for_a_small_cache(needed, sizes):
    longest = max(map(len, needed), default=0)
    return [
        0 if size < longest else sum(n is not None and n <= size for row in needed for n in row)
        for size in sizes
    ]


def _refuse(needed, sizes):
    longest = max(map(len, needed), default=0)
    for size in sizes:
        if size < longest:
            raise ValueError(f"a cache of {size} blocks refuses a request of {longest}")


# ---------------------------------------------------------------------- victim_key


def _at_random(node):
    return random.random()


def _by_the_clock(node):
    return node.last_access + time.perf_counter()


_calls = count()


def _counts_its_calls(node):
    return node.last_access + 600 * (next(_calls) % 3 == 0)


_later_calls = count()


def _fair_while_it_is_watched(node):
    number = next(_later_calls)
    return node.last_access + 600 * (2 * min(node.hits, 4) + (number > 500 and number % 3 == 0))


_asked_before: dict = {}


def _remembers_the_leaf(node):
    _asked_before[node.id] = _asked_before.get(node.id, 0) + 1
    return node.last_access + 600 * _asked_before[node.id]


def _marks_the_leaf(node):
    node.hits += 1
    return node.last_access + 600 * min(node.hits, 4)


def _asks_the_parent(node):
    return node.last_access + 600 * (2 * min(node.hits, 4) + (node.created % 3 == 0)) + node.parent.hits


def _a_tuple_for_some(node):
    return (node.hits, node.last_access) if node.hits else node.last_access


MUTANTS = [
    # ------------------------------------------------------------ needed_sizes
    Mutant("needed_sizes", "the block itself does not count: one too small", _PLACE, f"{_PLACE} - 1"),
    Mutant("needed_sizes", "one too large", _PLACE, f"{_PLACE} + 1"),
    Mutant("needed_sizes", "an id is a block, whatever stands before it", _NAME, _NAME.replace("block", "0")),
    Mutant(
        "needed_sizes",
        "a block is its id and the bare id before it",
        "(block, number), len(names) + 1)\n",
        "(path and request[len(path) - 1], number), len(names) + 1)\n",
    ),
    Mutant("needed_sizes", "a block is its id and its place", "(block, number)", "(len(path), number)"),
    Mutant(
        "needed_sizes",
        "a beginning is a set: its order is forgotten",
        replaces={"needed_sizes": _beginnings_in_any_order},
    ),
    Mutant("needed_sizes", "used from the first block to the last", "in reversed(path)", "in path"),
    Mutant(
        "needed_sizes",
        "each block is used as soon as it is looked up",
        replaces={"needed_sizes": _looks_up_one_by_one},
    ),
    Mutant(
        "needed_sizes",
        "counts uses, not different blocks",
        "            if each in last:\n                del times[bisect_left(times, last[each])]\n",
        "",
    ),
    Mutant(
        "needed_sizes",
        "a found block is not moved to the front: fifo",
        replaces={"needed_sizes": _a_found_block_stays_where_it_is},
    ),
    Mutant(
        "needed_sizes",
        "the row is one of requests, not of blocks",
        replaces={"needed_sizes": _whole_requests_in_the_row},
    ),
    Mutant("needed_sizes", "0 in place of None", "else None for", "else 0 for"),
    Mutant(
        "needed_sizes",
        "a new block needs all blocks and one more",
        "else None for",
        "else len(times) + 1 for",
    ),
    Mutant(
        "needed_sizes", "new blocks are left out", f"{_LOOK}", f"[{_PLACE} for each in path if each in last]"
    ),
    Mutant(
        "needed_sizes",
        "empty requests are left out",
        f"found.append({_LOOK})",
        f"found += [{_LOOK}] if path else []",
    ),
    Mutant(
        "needed_sizes",
        "goes through the requests twice",
        "    for request in requests:\n",
        "    longest = max(map(len, requests), default=0)\n    for request in requests if longest else ():\n",
    ),
    Mutant(
        "needed_sizes",
        "writes into the requests that it was given",
        replaces={"needed_sizes": _names_in_place_of_ids},
    ),
    Mutant(
        "needed_sizes",
        "the row is kept between calls",
        replaces={"needed_sizes": _names_kept_between_calls},
    ),
    Mutant("needed_sizes", "one long list for all requests", f"found.append({_LOOK})", f"found += {_LOOK}"),
    Mutant(
        "needed_sizes",
        "a request that was there before as a whole is not used again",
        "        for each in reversed(path):\n",
        "        for each in reversed(path) if None in found[-1] else ():\n",
    ),
    # ------------------------------------------------------------ hit_curve
    Mutant(
        "hit_curve",
        "a number as large as the cache is not found",
        _COUNTED,
        _COUNTED.replace("right", "left"),
    ),
    Mutant(
        "hit_curve",
        "None counts as found everywhere",
        "sorted(number for row in needed for number in row if number is not None)",
        "sorted(number or 0 for row in needed for number in row)",
    ),
    Mutant("hit_curve", "the sizes are put in order", "for size in sizes]", "for size in sorted(sizes)]"),
    Mutant(
        "hit_curve",
        "a size that comes twice is answered once",
        "for size in sizes]",
        "for size in dict.fromkeys(sizes)]",
    ),
    Mutant(
        "hit_curve",
        "sorts the list of sizes that it was given",
        replaces={"hit_curve": _sorts_what_it_was_given},
    ),
    Mutant(
        "hit_curve",
        "a cache that just holds the longest request is refused",
        "if size < longest",
        "if size <= longest",
    ),
    Mutant(
        "hit_curve",
        "the longest request is measured by what was found of it",
        "max(map(len, needed), default=0)",
        "max((sum(number is not None for number in row) for row in needed), default=0)",
    ),
    Mutant(
        "hit_curve",
        "the greatest number is taken for the longest request",
        "max(map(len, needed), default=0)",
        "max((number or 0 for row in needed for number in row), default=0)",
    ),
    Mutant("hit_curve", "no size is refused", "if size < longest", "if size < 0"),
    Mutant("hit_curve", "only the first size is checked", "for size in sizes:", "for size in sizes[:1]:"),
    Mutant(
        "hit_curve",
        "a cache that is too small finds nothing, and nobody hears of it",
        replaces={"hit_curve": _nothing_for_a_small_cache},
    ),
    Mutant(
        "hit_curve",
        "the message does not say the size",
        "a cache of {size} blocks refuses a request of {longest}",
        "the cache is too small",
    ),
    Mutant(
        "hit_curve",
        "the message says the longest request and not the size",
        "a cache of {size} blocks refuses a request of {longest}",
        "a request has {longest} blocks",
    ),
    Mutant("hit_curve", "another error", "raise ValueError", "raise IndexError", after=_CURVE),
    Mutant(
        "hit_curve",
        "no requests: max of nothing",
        "max(map(len, needed), default=0)",
        "max(map(len, needed))",
    ),
    Mutant(
        "hit_curve",
        "requests that were found whole, all others not at all",
        replaces={"hit_curve": _whole_requests_only},
    ),
    Mutant(
        "hit_curve",
        "counts requests, not blocks",
        replaces={"hit_curve": _requests_that_found_something},
    ),
    Mutant(
        "hit_curve", "blocks that need just this size", _COUNTED, "[numbers.count(size) for size in sizes]"
    ),
    Mutant(
        "hit_curve",
        "hit rates in place of hits",
        _COUNTED,
        "[bisect_right(numbers, size) / max(1, len(numbers)) for size in sizes]",
    ),
    # ------------------------------------------------------------ claim_inclusion
    Mutant("claim_inclusion", "nothing is asked for at the end", _STORY, "[[1, 1, 1], [0, 0], [1, 3]], 4, 5"),
    Mutant("claim_inclusion", "small and large changed about", _STORY, _STORY.replace("4, 5", "5, 4")),
    Mutant("claim_inclusion", "one size too large: all stays", _STORY, _STORY.replace("4, 5", "4, 6")),
    Mutant("claim_inclusion", "the small one loses it as well", _STORY, _STORY.replace("4, 5", "3, 5")),
    Mutant(
        "claim_inclusion",
        "asks for what the larger cache kept",
        _STORY,
        "[[1, 1, 1], [0, 0], [1, 3], [1, 1, 1]], 4, 5",
    ),
    Mutant(
        "claim_inclusion",
        "a look-up that ends at a node's end",
        _STORY,
        "[[1, 1, 1], [0, 0], [1, 1, 1], [0, 0]], 4, 5",
    ),
    Mutant(
        "claim_inclusion",
        "the splitting request brings nothing new",
        _STORY,
        "[[1, 1, 1], [0, 0], [1], [0, 0]], 4, 5",
    ),
    Mutant(
        "claim_inclusion",
        "the splitting request comes too early",
        _STORY,
        "[[1, 1, 1], [1, 3], [0, 0], [0, 0]], 4, 5",
    ),
    Mutant(
        "claim_inclusion",
        "leaves of one block: nothing splits",
        _STORY,
        "[[1], [2], [3], [1], [4], [2], [1], [3]], 2, 3",
    ),
    Mutant(
        "claim_inclusion",
        "the smaller cache refuses a request",
        _STORY,
        "[[1, 1, 1], [0, 0, 0, 0], [1, 1, 1]], 3, 4",
    ),
    Mutant(
        "claim_inclusion",
        "an empty request among them",
        _STORY,
        "[[1, 1, 1], [0, 0], [], [1, 3], [0, 0]], 4, 5",
    ),
    Mutant(
        "claim_inclusion",
        "nine requests",
        _STORY,
        "[[9], [8], [7], [6], [5], [1, 1, 1], [0, 0], [1, 3], [0, 0]], 4, 5",
    ),
    Mutant(
        "claim_inclusion",
        "a request of nine blocks",
        _STORY,
        "[[1] * 9, [0] * 6, [1, 3], [0] * 6], 10, 15",
    ),
    Mutant(
        "claim_inclusion",
        "says which cache is worse, and not how large",
        _STORY,
        "[[1, 1, 1], [0, 0], [1, 3], [0, 0]], True, 5",
    ),
    # ------------------------------------------------------------ victim_key
    Mutant("victim_key", "lru", _KEY, "node.last_access"),
    Mutant("victim_key", "lfu", _KEY, "(node.hits, node.last_access)"),
    Mutant("victim_key", "lfu without lru for equal ones", _KEY, "node.hits"),
    Mutant("victim_key", "slru", _KEY, "(node.hits >= 2, node.last_access)"),
    Mutant("victim_key", "fifo", _KEY, "node.created"),
    Mutant("victim_key", "mru", _KEY, "-node.last_access"),
    Mutant("victim_key", "the largest goes first, however often it was used", _KEY, "-len(node)"),
    Mutant("victim_key", "the smallest goes first", _KEY, "len(node)"),
    Mutant("victim_key", "a long leaf stays longer", _KEY, "node.last_access + 20 * len(node)"),
    Mutant("victim_key", "hits alone make a lease", "+ (node.created % 3 == 0)", ""),
    Mutant("victim_key", "every second tick: that is every newcomer", "node.created % 3", "node.created % 2"),
    Mutant("victim_key", "the wrong sign: what was hit goes first", _KEY, "node.last_access - 600 * leases"),
    Mutant("victim_key", "a bonus of some ticks only", _KEY, "node.last_access + 6 * leases"),
    Mutant("victim_key", "at random", replaces={"victim_key": _at_random}),
    Mutant("victim_key", "by the clock", replaces={"victim_key": _by_the_clock}),
    Mutant("victim_key", "counts its calls", replaces={"victim_key": _counts_its_calls}),
    Mutant(
        "victim_key",
        "counts its calls, from the five hundredth on",
        replaces={"victim_key": _fair_while_it_is_watched},
    ),
    Mutant("victim_key", "remembers how often it was asked", replaces={"victim_key": _remembers_the_leaf}),
    Mutant("victim_key", "changes the leaf", replaces={"victim_key": _marks_the_leaf}),
    Mutant(
        "victim_key",
        "reads the parent, of which the heap hears nothing",
        replaces={"victim_key": _asks_the_parent},
    ),
    Mutant(
        "victim_key", "a tuple for some and a number for others", replaces={"victim_key": _a_tuple_for_some}
    ),
    Mutant(
        "victim_key", "no key for newcomers", _KEY, "(node.last_access + 600 * leases) if leases else None"
    ),
    Mutant("victim_key", "hits per tick of its life", _KEY, "node.hits / (node.last_access - node.created)"),
    # ------------------------------------------------------------ gigabytes
    Mutant("gigabytes", "a key and no value", "int(2 * ", "int("),
    Mutant("gigabytes", "query heads keep KV, too", 'config.get("num_key_value_heads") or heads', "heads"),
    Mutant(
        "gigabytes",
        "KV heads are always named",
        'config.get("num_key_value_heads") or heads',
        'config["num_key_value_heads"]',
    ),
    Mutant(
        "gigabytes",
        "KV heads: null is not expected",
        'config.get("num_key_value_heads") or heads',
        'config.get("num_key_value_heads", heads)',
    ),
    Mutant("gigabytes", "head_dim is not read", 'config.get("head_dim") or config', "config", after=_BYTES),
    Mutant(
        "gigabytes",
        "head_dim: null is not expected",
        'config.get("head_dim") or config["hidden_size"] // heads',
        'config.get("head_dim", config["hidden_size"] // heads)',
    ),
    Mutant(
        "gigabytes",
        "the width is shared by the KV heads",
        'config["hidden_size"] // heads',
        'config["hidden_size"] // (config.get("num_key_value_heads") or heads)',
    ),
    Mutant("gigabytes", "one layer", 'config["num_hidden_layers"] * ', ""),
    Mutant("gigabytes", "two bytes, whatever the dtype", "kv_heads * width * size", "kv_heads * width * 2"),
    Mutant("gigabytes", "without a dtype two bytes", 'or "float32"', 'or "float16"'),
    Mutant(
        "gigabytes",
        "torch_dtype is not read",
        'config.get("dtype") or config.get("torch_dtype")',
        'config.get("dtype")',
    ),
    Mutant(
        "gigabytes",
        "dtype is not read",
        'config.get("dtype") or config.get("torch_dtype")',
        'config.get("torch_dtype")',
    ),
    Mutant(
        "gigabytes",
        "torch_dtype before dtype",
        'config.get("dtype") or config.get("torch_dtype")',
        'config.get("torch_dtype") or config.get("dtype")',
    ),
    Mutant(
        "gigabytes",
        "stops where the next gigabyte does not pay",
        "            best, best_gain = gigabytes, gain\n",
        "            best, best_gain = gigabytes, gain\n        else:\n            break\n",
    ),
    Mutant("gigabytes", "rounded for each gigabyte", _BUY, "gigabytes * (GIGABYTE // block_bytes)"),
    Mutant("gigabytes", "blocks that fit in part", _BUY, f"-(-{_BUY})"),
    Mutant("gigabytes", "2**30 bytes", "GIGABYTE = 10**9", "GIGABYTE = 2**30"),
    Mutant("gigabytes", "of equal ones the largest", "gain > best_gain", "gain >= best_gain"),
    Mutant("gigabytes", "one gigabyte at least", "best, best_gain = 0, 0", "best, best_gain = 1, 0"),
    Mutant(
        "gigabytes",
        "one gigabyte at least, at a loss, too",
        "best, best_gain = 0, 0",
        "best, best_gain = 0, float('-inf')",
    ),
    Mutant("gigabytes", "the last gigabyte is not tried", "range(1, most + 1)", "range(1, most)"),
    Mutant(
        "gigabytes",
        "the last, broken gigabyte is not tried",
        "-(-numbers[-1] * block_bytes // GIGABYTE)",
        "numbers[-1] * block_bytes // GIGABYTE",
    ),
    Mutant("gigabytes", "tries a hundred gigabytes", "-(-numbers[-1] * block_bytes // GIGABYTE)", "100"),
    Mutant("gigabytes", "the price is forgotten", " - gigabytes * gigabyte_price", ""),
    Mutant("gigabytes", "the worth is forgotten", "found * block_worth - ", "found - "),
    Mutant(
        "gigabytes",
        "most for the money, not most",
        "found * block_worth - gigabytes * gigabyte_price",
        "(found * block_worth - gigabytes * gigabyte_price) / gigabytes",
    ),
    Mutant("gigabytes", "one block too few fits", "bisect_right(numbers, gig", "bisect_left(numbers, gig"),
    Mutant("gigabytes", "nothing can be found: an empty list's last", " if numbers else 0", ""),
    Mutant(
        "gigabytes",
        "says what is gained, not how many",
        "    return best\n",
        "    return best_gain\n",
        after=_WORTH,
    ),
]
