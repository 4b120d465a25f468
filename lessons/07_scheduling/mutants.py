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
    Mutant(
        "lpm_order",
        "the least left to compute, not the longest match",
        _KEY,
        "(-request.priority, len(request.tokens) - match(request), request.arrival)",
    ),
    # a queue that is not in the order of arrival
    Mutant("lpm_order", "equal matches in the queue's order", _KEY, "(-request.priority, -match(request))"),
    Mutant("lpm_order", "equal matches by name", _KEY, "(-request.priority, -match(request), request.name)"),
    Mutant(
        "lpm_order",
        "equal matches by length",
        _KEY,
        "(-request.priority, -match(request), len(request.tokens), request.arrival)",
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
        "a token weighs 1,000,000 arrivals",
        _KEY,
        "(-request.priority, -(10**6) * match(request) + request.arrival)",
    ),
    # priorities 1, 2; -1, 0
    Mutant(
        "lpm_order",
        "two classes: priority or none",
        _KEY,
        "(-(request.priority > 0), -match(request), request.arrival)",
    ),
    Mutant(
        "lpm_order",
        "no priority below 0",
        _KEY,
        "(-max(request.priority, 0), -match(request), request.arrival)",
    ),
    Mutant(
        "lpm_order",
        "priorities up to 9",
        _KEY,
        "(-min(request.priority, 9), -match(request), request.arrival)",
    ),
    # an empty queue
    _instead(
        "lpm_order",
        "lpm_order",
        "nobody has no highest priority",
        """
def lpm_order(queue, match):
    order, rest = [], list(queue)
    top, low = max(r.priority for r in rest), min(r.priority for r in rest)
    for priority in range(top, low - 1, -1):
        order += _right_lpm_order([r for r in rest if r.priority == priority], match)
    return order
""",
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
    # the same queue after the tree has changed
    _instead(
        "lpm_order",
        "lpm_order",
        "remembers matches by name",
        """
_KNOWN = {}


def lpm_order(queue, match):
    return _right_lpm_order(queue, lambda request: _KNOWN.setdefault(request.name, match(request)))
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
    # two requests with the same tokens
    _instead(
        "lpm_order",
        "lpm_order",
        "asks once per prompt, and leaves the second of two equal ones out",
        """
def lpm_order(queue, match):
    seen = {}
    for request in queue:
        seen.setdefault((tuple(request.tokens), request.priority), request)
    return _right_lpm_order(list(seen.values()), match)
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
    # three levels
    _instead(
        "dfs_order",
        "_wanted",
        "the weight counts two levels",
        """
def _wanted(node):
    weight = len(node.requests) + sum(len(child.requests) for child in node.children)
    return -weight, _right__wanted(node)[1]
""",
    ),
    _instead(
        "dfs_order",
        "_wanted",
        "the weight counts nodes",
        """
def _wanted(node):
    def nodes(each):
        return 1 + sum(nodes(child) for child in each.children)

    return -nodes(node), _right__wanted(node)[1]
""",
    ),
    _instead(
        "dfs_order",
        "_wanted",
        "the weight counts nodes that have requests",
        """
def _wanted(node):
    def nodes(each):
        return bool(each.requests) + sum(nodes(child) for child in each.children)

    return -nodes(node), _right__wanted(node)[1]
""",
    ),
    _instead(
        "dfs_order",
        "_wanted",
        "the weight counts tokens",
        """
def _wanted(node):
    def tokens(each):
        return sum(len(r.tokens) for r in each.requests) + sum(tokens(child) for child in each.children)

    return -tokens(node), _right__wanted(node)[1]
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
    _instead(
        "dfs_order",
        "_wanted",
        "the first child's earliest arrival where a node has no requests of its own",
        """
def _wanted(node):
    weight, earliest = _right__wanted(node)
    if not node.requests and node.children:
        earliest = _wanted(node.children[0])[1]
    return weight, earliest
""",
    ),
    _instead(
        "dfs_order",
        "_wanted",
        "the latest arrival",
        """
def _wanted(node):
    def all_of(each):
        return [r.arrival for r in each.requests] + [a for child in each.children for a in all_of(child)]

    return _right__wanted(node)[0], max(all_of(node), default=float("inf"))
""",
    ),
    _instead(
        "dfs_order",
        "_wanted",
        "among equals the queue's order",
        """
def _wanted(node):
    return _right__wanted(node)[0], 0
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
    Mutant(
        "dfs_order",
        "a node's own requests by name",
        "sorted(root.requests, key=lambda request: request.arrival)",
        "sorted(root.requests, key=lambda request: request.name)",
    ),
    Mutant(
        "dfs_order",
        "a node's own requests first where it has one child",
        "    return order + sorted(root.requests, key=lambda request: request.arrival)\n",
        "    own = sorted(root.requests, key=lambda request: request.arrival)\n"
        "    return own + order if len(root.children) == 1 else order + own\n",
    ),
    Mutant(
        "dfs_order",
        "empties the nodes",
        "    return order + sorted(root.requests, key=lambda request: request.arrival)\n",
        "    root.requests.sort(key=lambda request: request.arrival)\n"
        "    order += root.requests\n    root.requests.clear()\n    return order\n",
    ),
    # a tree deeper than 64
    _instead(
        "dfs_order",
        "dfs_order",
        "goes down eight levels",
        """
def dfs_order(root, depth=0):
    order = []
    for child in sorted(root.children, key=_wanted) if depth < 8 else ():
        order += dfs_order(child, depth + 1)
    return order + sorted(root.requests, key=lambda request: request.arrival)
""",
    ),
    # ------------------------------------------------------------ admit
    # a queue that is in no order of arrival
    _queue_first("sorts the queue by arrival", "queue = sorted(queue, key=lambda request: request.arrival)"),
    _queue_first(
        "sorts the queue by priority", "queue = sorted(queue, key=lambda request: -request.priority)"
    ),
    _queue_first("sorts the queue by name", "queue = sorted(queue, key=lambda request: request.name)"),
    _queue_first(
        "sorts the queue by length", "queue = sorted(queue, key=lambda request: len(request.tokens))"
    ),
    _queue_first("sorts the queue by passes", "queue = sorted(queue, key=lambda request: -request.passes)"),
    _queue_first(
        "takes the longest match of the first two",
        "queue = [*sorted(queue[:2], key=lambda r: -tree.match(r)[0]), *queue[2:]]",
    ),
    # a queue of eleven
    _queue_first("ten at most", "queue = queue[:10]"),
    _queue_first("four at most", "queue = queue[:4]"),
    # the queue afterwards
    _queue_first(
        "empties the queue",
        "if isinstance(queue, list):\n        queue, old = list(queue), queue\n        old.clear()",
    ),
    Mutant(
        "admit",
        "takes the admitted out of the queue",
        "    return admitted, free\n",
        "    if isinstance(queue, list):\n        queue[:] = queue[len(admitted) :]\n"
        "    return admitted, free\n",
    ),
    # a second call
    _instead(
        "admit",
        "admit",
        "the reserve grows from call to call",
        """
_RESERVE = [0]


def admit(queue, tree, free, reserve):
    admitted, left = _right_admit(queue, tree, free, reserve + _RESERVE[0])
    _RESERVE[0] += sum(request.new_tokens for request in admitted)
    return admitted, left
""",
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
    # exactly enough
    Mutant("admit", "exactly enough is not enough", f"if {_FITS}:", f"if {_FITS.replace('<', '<=')}:"),
    Mutant(
        "admit",
        "exactly enough is not enough when something has to be evicted",
        f"if {_FITS}:",
        f"if {_FITS} or (need > free and {_FITS.replace('<', '==')}):",
    ),
    Mutant(
        "admit",
        "one too few is enough when nothing has to be evicted",
        f"if {_FITS}:",
        f"if {_FITS} - (need <= free and reserve > 0):",
    ),
    # whole leaves go: more than was asked for
    Mutant(
        "admit",
        "as if exactly the shortfall had gone",
        "free += tree.evict(need - free)",
        "tree.evict(need - free)\n            free = need",
    ),
    Mutant(
        "admit",
        "as if at most the shortfall had gone",
        "free += tree.evict(need - free)",
        "free += min(tree.evict(need - free), need - free)",
    ),
    # more is evictable than the first lock left
    _instead(
        "admit",
        "admit",
        "the room is counted once, before the first lock",
        """
def admit(queue, tree, free, reserve):
    admitted, room = [], free + tree.evictable - reserve
    for request in queue:
        matched, node = tree.match(request)
        tree.lock(node)
        need = len(request.tokens) - min(matched, len(request.tokens) - 1)
        if room < need + request.new_tokens or free + tree.evictable < need:
            tree.unlock(node)
            break
        if need > free:
            free += tree.evict(need - free)
        free -= need
        room -= need + request.new_tokens
        admitted.append(request)
    return admitted, free
""",
    ),
    # all cached: one token is computed
    Mutant(
        "admit",
        "nothing is computed when all is cached, and the free slots are enough",
        _NEED,
        _NEED + "\n        need -= matched == len(request.tokens) and free > 0",
    ),
    Mutant(
        "admit",
        "a request of one token is free",
        _NEED,
        _NEED + "\n        need = 0 if len(request.tokens) == 1 else need",
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
        "the reserve grows by one request's new_tokens only",
        "reserve += request.new_tokens",
        "reserve += request.new_tokens if len(admitted) < 1 else 0",
    ),
    Mutant(
        "admit",
        "evicts the reserve too",
        "free += tree.evict(need - free)",
        "free += tree.evict(need - free + (reserve if tree.evictable > need - free + reserve else 0))",
    ),
    Mutant(
        "admit",
        "evicts room for the request's new tokens too",
        "free += tree.evict(need - free)",
        "free += tree.evict(need - free + request.new_tokens)",
    ),
    # lock at the root
    Mutant(
        "admit",
        "locks only what matches something",
        "        tree.lock(node)\n",
        "        if matched:\n            tree.lock(node)\n",
        after=_ADMIT,
    ),
    Mutant(
        "admit",
        "no lock is held where all is computed anew",
        "        admitted.append(request)\n",
        "        admitted.append(request)\n        if matched <= 1:\n            tree.unlock(node)\n",
        after=_ADMIT,
    ),
    # ------------------------------------------------------------ fair: count_passes
    # nobody was admitted
    _instead(
        "fair",
        "count_passes",
        "nobody has no last one",
        """
def count_passes(waiting, admitted):
    last = max(admitted, key=lambda r: (-r.priority, r.arrival))
    _right_count_passes(waiting, [last])
""",
    ),
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
        "compares with the first of the admitted only",
        """
def count_passes(waiting, admitted):
    _right_count_passes(waiting, admitted[:1])
""",
    ),
    _instead(
        "fair",
        "count_passes",
        "compares with the one that came last, whatever its priority",
        """
def count_passes(waiting, admitted):
    if admitted:
        _right_count_passes(waiting, [max(admitted, key=lambda r: r.arrival)])
""",
    ),
    _instead(
        "fair",
        "count_passes",
        "compares with the least important one only, and its first",
        """
def count_passes(waiting, admitted):
    if admitted:
        _right_count_passes(waiting, [min(admitted, key=lambda r: (r.priority, r.arrival))])
""",
    ),
    _instead(
        "fair",
        "count_passes",
        "counts to one",
        """
def count_passes(waiting, admitted):
    for request in waiting:
        before = request.passes
        _right_count_passes([request], admitted)
        request.passes = max(before, min(request.passes, 1))
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
    _instead(
        "fair",
        "count_passes",
        "only the first who waits is passed",
        """
def count_passes(waiting, admitted):
    _right_count_passes(sorted(waiting, key=lambda r: (-r.priority, r.arrival))[:1], admitted)
""",
    ),
    _instead(
        "fair",
        "count_passes",
        "who is not passed begins at 0 again",
        """
def count_passes(waiting, admitted):
    for request in waiting:
        before = request.passes
        _right_count_passes([request], admitted)
        if request.passes == before and admitted:
            request.passes = 0
""",
    ),
    # ------------------------------------------------------------ fair: fair_order
    *(
        Mutant(
            "fair", about, "(-request.priority, not due, 0 if due else -match(request), request.arrival)", key
        )
        for about, key in (
            (
                "the due by how often they were passed",
                "(-request.priority, not due, -request.passes if due else -match(request), request.arrival)",
            ),
            ("the due by match", "(-request.priority, not due, -match(request), request.arrival)"),
            # a match of 1000 tokens and more
            (
                "to be due weighs 1000 tokens",
                "(-request.priority, -1000 if due else -match(request), request.arrival)",
            ),
            (
                "to be due weighs a million tokens",
                "(-request.priority, -(10**6) if due else -match(request), request.arrival)",
            ),
            (
                "the share that matches",
                "(-request.priority, not due, 0 if due else -match(request) / "
                "max(len(request.tokens), 1), request.arrival)",
            ),
            ("equals in the queue's order", "(-request.priority, not due, 0 if due else -match(request))"),
            (
                "the due in the queue's order",
                "(-request.priority, not due, 0 if due else -match(request), 0 if due else request.arrival)",
            ),
            ("equals by name", "(-request.priority, not due, 0 if due else -match(request), request.name)"),
            (
                "two classes: priority or none",
                "(-(request.priority > 0), not due, 0 if due else -match(request), request.arrival)",
            ),
            (
                "nobody below priority 0 becomes due",
                "(-request.priority, not (due and request.priority >= 0), 0 if due else "
                "-match(request), request.arrival)",
            ),
        )
    ),
    Mutant(
        "fair",
        "due exactly at the limit, not beyond it",
        "request.passes >= limit",
        "request.passes == limit or limit == 0",
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
        "only one is brought forward",
        """
def fair_order(queue, match, limit):
    if limit == 0:
        return _right_fair_order(queue, match, limit)
    order = _right_fair_order(queue, match, 1 << 60)
    due = [r for r in order if r.passes >= limit and r.priority == order[0].priority]
    first = sorted(due, key=lambda r: r.arrival)[:1]
    return first + [r for r in order if r not in first]
""",
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
    _instead(
        "fair",
        "fair_order",
        "who was due begins at 0 again",
        """
def fair_order(queue, match, limit):
    order = _right_fair_order(queue, match, limit)
    for request in order:
        request.passes = request.passes if request.passes < limit else 0
    return order
""",
    ),
    _instead(
        "fair",
        "fair_order",
        "asks for the match also of those who are due, and twice",
        """
def fair_order(queue, match, limit):
    for request in queue:
        match(request)
    return _right_fair_order(queue, match, limit)
""",
    ),
    _instead(
        "fair",
        "fair_order",
        "sorts the queue itself",
        """
def fair_order(queue, match, limit):
    order = _right_fair_order(queue, match, limit)
    if isinstance(queue, list):
        queue[:] = order
    return order
""",
    ),
    _instead(
        "fair",
        "fair_order",
        "the queue itself when there is nothing to order",
        """
def fair_order(queue, match, limit):
    return queue if len(queue) < 2 else _right_fair_order(queue, match, limit)
""",
    ),
    _instead(
        "fair",
        "fair_order",
        "nobody has no highest priority",
        """
def fair_order(queue, match, limit):
    top = max(request.priority for request in queue)
    first = [request for request in queue if request.priority == top]
    rest = [request for request in queue if request.priority != top]
    return _right_fair_order(first, match, limit) + _right_fair_order(rest, match, limit)
""",
    ),
    _instead(
        "fair",
        "fair_order",
        "the limit of the first call stays",
        """
_LIMIT = []


def fair_order(queue, match, limit):
    _LIMIT.append(limit)
    return _right_fair_order(queue, match, _LIMIT[0])
""",
    ),
    _instead(
        "fair",
        "fair_order",
        "remembers matches by name",
        """
_SEEN = {}


def fair_order(queue, match, limit):
    return _right_fair_order(queue, lambda request: _SEEN.setdefault(request.name, match(request)), limit)
""",
    ),
]
