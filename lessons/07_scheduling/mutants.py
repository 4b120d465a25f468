"""Plausible wrong solutions of lesson 07."""

from __future__ import annotations

from lessons.grading import Mutant

_LPM = "def lpm_order"
_DFS = "def dfs_order"
_WANTED = "def _wanted"
_ADMIT = "def admit"
_PASSES = "def count_passes"
_FAIR = "def fair_order"
_KEY = "(-request.priority, -match(request), request.arrival)"
_NEED = "need = len(request.tokens) - min(matched, len(request.tokens) - 1)"
_FITS = "free + tree.evictable < need + request.new_tokens + reserve"


def _lpm_sorts_the_queue(queue, match):
    queue.sort(key=lambda request: (-request.priority, -match(request), request.arrival))
    return queue


def _lpm_by_comparison(queue, match):
    order = []
    for request in sorted(queue, key=lambda each: each.arrival):
        place = 0
        while place < len(order) and (
            (order[place].priority, match(order[place])) >= (request.priority, match(request))
        ):
            place += 1
        order.insert(place, request)
    return order


def _dfs_breadth_first(root):
    order, level = [], [root]
    while level:
        order += sorted((r for node in level for r in node.requests), key=lambda r: r.arrival)
        level = [child for node in level for child in node.children]
    return order


def _admit_matches_first(queue, tree, free, reserve):
    found = [(request, *tree.match(request)) for request in queue]
    admitted = []
    for request, matched, node in found:
        need = len(request.tokens) - min(matched, len(request.tokens) - 1)
        try:
            tree.lock(node)
        except AssertionError:
            continue
        if free + tree.evictable < need + request.new_tokens + reserve:
            tree.unlock(node)
            break
        if need > free:
            free += tree.evict(need - free)
        free -= need
        reserve += request.new_tokens
        admitted.append(request)
    return admitted, free


def _admit_counts_first(queue, tree, free, reserve):
    admitted = []
    for request in queue:
        matched, node = tree.match(request)
        need = len(request.tokens) - min(matched, len(request.tokens) - 1)
        if free + tree.evictable < need + request.new_tokens + reserve:
            break
        tree.lock(node)
        if need > free:
            free += tree.evict(need - free)
        free -= need
        reserve += request.new_tokens
        admitted.append(request)
    return admitted, free


def _count_each(waiting, admitted):
    for request in waiting:
        rank = (-request.priority, request.arrival)
        request.passes += sum((-other.priority, other.arrival) > rank for other in admitted)


MUTANTS = [
    # ------------------------------------------------------------ lpm
    Mutant("lpm_order", "shortest match first", _KEY, "(-request.priority, match(request), request.arrival)"),
    Mutant("lpm_order", "first come, first served", _KEY, "(-request.priority, request.arrival)"),
    Mutant("lpm_order", "priorities forgotten", _KEY, "(-match(request), request.arrival)"),
    Mutant(
        "lpm_order", "smaller priority first", _KEY, "(request.priority, -match(request), request.arrival)"
    ),
    Mutant(
        "lpm_order",
        "a long match beats a priority",
        _KEY,
        "(-match(request), -request.priority, request.arrival)",
    ),
    Mutant("lpm_order", "ties in the order of the list", _KEY, "(-request.priority, -match(request))"),
    Mutant(
        "lpm_order", "ties: the latest first", _KEY, "(-request.priority, -match(request), -request.arrival)"
    ),
    Mutant(
        "lpm_order",
        "everything turned round by reverse=True",
        "sorted(queue, key=lambda request: (-request.priority, -match(request), request.arrival))",
        "sorted(queue, key=lambda r: (r.priority, match(r), r.arrival), reverse=True)",
    ),
    Mutant("lpm_order", "sorts the queue that it was given", replaces={"lpm_order": _lpm_sorts_the_queue}),
    Mutant("lpm_order", "asks again at every comparison", replaces={"lpm_order": _lpm_by_comparison}),
    # ------------------------------------------------------------ dfs
    Mutant(
        "dfs_order",
        "own requests first",
        "    return order + sorted(root.requests, key=lambda request: request.arrival)",
        "    return sorted(root.requests, key=lambda request: request.arrival) + order",
    ),
    Mutant(
        "dfs_order",
        "children in the order of the list",
        "sorted(root.children, key=_wanted)",
        "root.children",
    ),
    Mutant("dfs_order", "the lightest branch first", "return -weight, earliest", "return weight, earliest"),
    Mutant("dfs_order", "by earliest arrival only", "return -weight, earliest", "return 0, earliest"),
    Mutant("dfs_order", "ties in the order of the list", "return -weight, earliest", "return -weight, 0"),
    Mutant(
        "dfs_order",
        "the weight counts children, not requests",
        "weight = len(node.requests)",
        "weight = len(node.children)",
    ),
    Mutant("dfs_order", "the weight forgets what is below", "        weight -= lighter\n", ""),
    Mutant(
        "dfs_order",
        "the earliest arrival forgets what is below",
        "        earliest = min(earliest, arrival)\n",
        "",
    ),
    Mutant(
        "dfs_order",
        "own requests not sorted",
        "sorted(root.requests, key=lambda request: request.arrival)",
        "list(root.requests)",
    ),
    Mutant(
        "dfs_order",
        "requests inside the tree are forgotten",
        "    return order + sorted(root.requests, key=lambda request: request.arrival)",
        "    return order or sorted(root.requests, key=lambda request: request.arrival)",
    ),
    Mutant("dfs_order", "breadth first", replaces={"dfs_order": _dfs_breadth_first}),
    # ------------------------------------------------------------ admit
    Mutant("admit", "the room is counted before the lock", replaces={"admit": _admit_counts_first}),
    Mutant("admit", "never locked", "        tree.lock(node)\n", "", after=_ADMIT),
    Mutant(
        "admit",
        "the lock of a refused request is kept",
        "            tree.unlock(node)\n            break",
        "            break",
        after=_ADMIT,
    ),
    Mutant(
        "admit",
        "the need is evicted, not the shortfall",
        "free += tree.evict(need - free)",
        "free += tree.evict(need)",
    ),
    Mutant(
        "admit",
        "always evicts",
        "        if need > free:\n            free += tree.evict(need - free)\n",
        "        free += tree.evict(max(need - free, 1)) if tree.evictable else 0\n",
    ),
    Mutant(
        "admit",
        "room is made for the reserve, too",
        "        if need > free:\n            free += tree.evict(need - free)\n",
        "        if need + reserve > free:\n            free += tree.evict(need + reserve - free)\n",
    ),
    Mutant(
        "admit",
        "smaller ones pass one that does not fit",
        "            tree.unlock(node)\n            break",
        "            tree.unlock(node)\n            continue",
        after=_ADMIT,
    ),
    Mutant(
        "admit", "a prompt that is cached whole needs nothing", _NEED, "need = len(request.tokens) - matched"
    ),
    Mutant("admit", "the match does not count", _NEED, "need = len(request.tokens)"),
    Mutant(
        "admit",
        "as the paper prints it: the reserve does not grow",
        "        reserve += request.new_tokens\n",
        "",
    ),
    Mutant("admit", "the free slots are not used up", "        free -= need\n", ""),
    Mutant("admit", "the reserve is forgotten", _FITS, "free + tree.evictable < need + request.new_tokens"),
    Mutant("admit", "its own reply is forgotten", _FITS, "free + tree.evictable < need + reserve"),
    Mutant(
        "admit",
        "free slots only, as if nothing could be evicted",
        _FITS,
        "free < need + request.new_tokens + reserve",
    ),
    Mutant(
        "admit",
        "takes the slots of its reply, too",
        "        free -= need\n",
        "        free -= need + request.new_tokens\n",
    ),
    Mutant(
        "admit",
        "off by one: the last slot stays free",
        _FITS,
        "free + tree.evictable <= need + request.new_tokens + reserve",
    ),
    Mutant(
        "admit",
        "evicted as many as asked for, it believes",
        "            free += tree.evict(need - free)\n",
        "            tree.evict(need - free)\n            free = need\n",
    ),
    Mutant("admit", "everybody matched at the start", replaces={"admit": _admit_matches_first}),
    # ------------------------------------------------------------ fair
    Mutant("fair", "counts every one that passed, not the step", replaces={"count_passes": _count_each}),
    Mutant(
        "fair",
        "counts every step of waiting",
        "        if any((-other.priority, other.arrival) > rank for other in admitted):",
        "        if admitted:",
    ),
    Mutant(
        "fair",
        "counts also when nobody was admitted",
        "        if any((-other.priority, other.arrival) > rank for other in admitted):",
        "        if all((-other.priority, other.arrival) > rank for other in admitted):",
    ),
    Mutant(
        "fair",
        "being overtaken by a larger priority counts",
        "(-other.priority, other.arrival) > rank for",
        "other.arrival > request.arrival for",
    ),
    Mutant(
        "fair",
        "only the first of those admitted is looked at",
        "for other in admitted):",
        "for other in admitted[:1]):",
    ),
    Mutant(
        "fair",
        "notes who passed instead of who was passed",
        "            request.passes += 1\n",
        "            admitted[0].passes += 1\n",
    ),
    Mutant(
        "fair",
        "one pass too many is allowed",
        "due = request.passes >= limit",
        "due = request.passes > limit",
    ),
    Mutant("fair", "who is due comes last", "not due, 0 if due", "due, 0 if due"),
    Mutant(
        "fair", "who is due is still ordered by match", "0 if due else -match(request)", "-match(request)"
    ),
    Mutant(
        "fair",
        "a due request passes a larger priority",
        "(-request.priority, not due, 0",
        "(not due, -request.priority, 0",
    ),
    Mutant("fair", "the others first come, first served", "0 if due else -match(request)", "0"),
    Mutant("fair", "plain lpm", "due = request.passes >= limit", "due = False"),
    Mutant(
        "fair",
        "passes as a bonus to the match",
        "not due, 0 if due else -match(request)",
        "False, -match(request) - 10 * request.passes",
    ),
]
