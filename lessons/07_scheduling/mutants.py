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


def _instead(breaks: str, name: str, about: str, code: str) -> Mutant:
    """`code` defines `name`; the right function is at hand as _right_<name>."""
    return Mutant(breaks, about, f"def {name}(", f"{code.strip()}\n\n\ndef _right_{name}(")


def _queue_first(about: str, line: str) -> Mutant:
    """admit, with something done to the queue before."""
    return Mutant("admit", about, "    admitted = []\n", f"    admitted = []\n    {line}\n")


MUTANTS += [
    # ------------------------------------------------------------ lpm_order
    # match 3 of 4 tokens against match 5 of 50
    Mutant(
        "lpm_order",
        "the share that matches, not the length",
        _KEY,
        "(-request.priority, -match(request) / max(len(request.tokens), 1), request.arrival)",
    ),
    # a match of more than 1000 tokens; arrivals above 1000
    Mutant(
        "lpm_order",
        "a priority weighs 1000 tokens",
        _KEY,
        "(-1000 * request.priority - match(request), request.arrival)",
    ),
    Mutant(
        "lpm_order",
        "a token weighs 1000 arrivals",
        _KEY,
        "(-request.priority, -1000 * match(request) + request.arrival)",
    ),
    Mutant(
        "lpm_order",
        "priorities up to 9",
        _KEY,
        "(-min(request.priority, 9), -match(request), request.arrival)",
    ),
    # a queue of one, which is changed afterwards
    _instead(
        "lpm_order",
        "lpm_order",
        "one request is the queue itself",
        """
def lpm_order(queue, match):
    return queue if len(queue) < 2 else _right_lpm_order(queue, match)
""",
    ),
    _instead(
        "lpm_order",
        "lpm_order",
        "remembers the match at the request",
        """
def lpm_order(queue, match):
    for request in queue:
        if not hasattr(request, "matched"):
            request.matched = match(request)
    return _right_lpm_order(queue, lambda request: request.matched)
""",
    ),
    # ------------------------------------------------------------ dfs_order
    # a node with no requests and no children
    _instead(
        "dfs_order",
        "_wanted",
        "an empty node has no earliest arrival",
        """
def _wanted(node):
    def arrivals(each):
        return [r.arrival for r in each.requests] + [a for child in each.children for a in arrivals(child)]

    found = arrivals(node)
    return -len(found), min(found)
""",
    ),
    # arrivals above 1000
    Mutant(
        "dfs_order",
        "a request weighs 1000 arrivals",
        "sorted(root.children, key=_wanted)",
        "sorted(root.children, key=lambda each: 1000 * _wanted(each)[0] + _wanted(each)[1])",
    ),
    # three levels, the earliest at the lowest
    _instead(
        "dfs_order",
        "_wanted",
        "the earliest arrival of two levels",
        """
def _wanted(node):
    near = [r.arrival for each in (node, *node.children) for r in each.requests]
    return _right__wanted(node)[0], min(near, default=float("inf"))
""",
    ),
    # the same tree again, with a request more
    _instead(
        "dfs_order",
        "_wanted",
        "remembers weights at the nodes",
        """
def _wanted(node):
    if not hasattr(node, "wanted"):
        node.wanted = _right__wanted(node)
    return node.wanted
""",
    ),
    # ------------------------------------------------------------ admit
    # a queue that is in no order of arrival
    _queue_first("sorts the queue by arrival", "queue = sorted(queue, key=lambda request: request.arrival)"),
    # a queue of eleven
    _queue_first("ten at most", "queue = queue[:10]"),
    Mutant(
        "admit",
        "takes the admitted out of the queue",
        "    return admitted, free\n",
        "    if isinstance(queue, list):\n        queue[:] = queue[len(admitted) :]\n"
        "    return admitted, free\n",
    ),
    _instead(
        "admit",
        "admit",
        "who was refused once is not tried again",
        """
def admit(queue, tree, free, reserve):
    known = tree.__dict__.setdefault("refused", [])
    admitted, left = _right_admit([r for r in queue if r not in known], tree, free, reserve)
    known += [r for r in queue if r not in admitted][:1]
    return admitted, left
""",
    ),
    Mutant(
        "admit",
        "exactly enough is not enough when something has to be evicted",
        f"if {_FITS}:",
        f"if {_FITS} or (need > free and {_FITS.replace('<', '==')}):",
    ),
    # who comes after the first: reserve
    Mutant(
        "admit",
        "of new_tokens only the largest joins the reserve",
        "reserve += request.new_tokens",
        "reserve = max(reserve, request.new_tokens)",
    ),
    Mutant(
        "admit",
        "evicts the reserve too",
        "free += tree.evict(need - free)",
        "free += tree.evict(need - free + (reserve if tree.evictable > need - free + reserve else 0))",
    ),
    Mutant(
        "admit",
        "no lock is held where all is computed anew",
        "        admitted.append(request)\n",
        "        admitted.append(request)\n        if matched <= 1:\n            tree.unlock(node)\n",
        after=_ADMIT,
    ),
    # ------------------------------------------------------------ fair: count_passes
    _instead(
        "fair",
        "count_passes",
        "compares with the last of the admitted only",
        """
def count_passes(waiting, admitted):
    _right_count_passes(waiting, admitted[-1:])
""",
    ),
    _instead(
        "fair",
        "count_passes",
        "counts to nine",
        """
def count_passes(waiting, admitted):
    _right_count_passes([request for request in waiting if request.passes < 9], admitted)
""",
    ),
    _instead(
        "fair",
        "count_passes",
        "the same step is not counted twice: the same admitted, no pass",
        """
_LAST = []


def count_passes(waiting, admitted):
    if _LAST != [r.name for r in admitted]:
        _right_count_passes(waiting, admitted)
    _LAST[:] = [r.name for r in admitted]
""",
    ),
    # ------------------------------------------------------------ fair: fair_order
    *(
        Mutant(
            "fair", about, "(-request.priority, not due, 0 if due else -match(request), request.arrival)", key
        )
        for about, key in (
            # a match of 1000 tokens and more
            (
                "to be due weighs 1000 tokens",
                "(-request.priority, -1000 if due else -match(request), request.arrival)",
            ),
            (
                "the share that matches",
                "(-request.priority, not due, 0 if due else -match(request) / "
                "max(len(request.tokens), 1), request.arrival)",
            ),
            ("equals by name", "(-request.priority, not due, 0 if due else -match(request), request.name)"),
            (
                "nobody below priority 0 becomes due",
                "(-request.priority, not (due and request.priority >= 0), 0 if due else "
                "-match(request), request.arrival)",
            ),
        )
    ),
    Mutant(
        "fair",
        "nobody is due when the limit is above 9",
        "request.passes >= limit",
        "request.passes >= limit and limit < 10",
    ),
    _instead(
        "fair",
        "fair_order",
        "the due of the highest priority only",
        """
def fair_order(queue, match, limit):
    order = _right_fair_order(queue, match, limit)
    top = [r for r in order if r.priority == order[0].priority]
    return top + _right_fair_order([r for r in order if r not in top], match, limit or 1 << 60)
""",
    ),
]
