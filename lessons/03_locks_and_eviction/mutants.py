"""Plausible wrong solutions of lesson 03."""

from __future__ import annotations

import heapq
from typing import Any

from lessons.grading import Mutant

_INC, _DEC, _EVICT = "def inc_lock_ref", "def dec_lock_ref", "def evict"


def _collect_each_time(tree: Any, num_tokens: int) -> int:
    """The textbook's way: all leaves into a new heap at every call."""
    leaves = [n for n in tree.nodes() if not n.children and not n.lock_ref and n is not tree.root]
    heap = [(tree.key(leaf), leaf.id, leaf) for leaf in leaves]
    heapq.heapify(heap)
    freed = 0
    while freed < num_tokens and heap:
        leaf = heapq.heappop(heap)[2]
        parent = leaf.parent
        tree.remove(leaf)
        freed += len(leaf.tokens)
        if parent is not tree.root and not parent.children and not parent.lock_ref:
            heapq.heappush(heap, (tree.key(parent), parent.id, parent))
    tree.evictable_size -= freed
    return freed


def _upward_collapse(tree: Any, num_tokens: int) -> int:
    """Takes a victim's parents along while they are free, however young they are."""
    freed = 0
    while freed < num_tokens and tree.heap:
        key, _, leaf = heapq.heappop(tree.heap)
        if leaf.children or leaf.lock_ref or leaf.parent is None:
            continue
        if key != tree.key(leaf):
            heapq.heappush(tree.heap, (tree.key(leaf), leaf.id, leaf))
            continue
        while leaf is not tree.root and not leaf.children and not leaf.lock_ref:
            parent = leaf.parent
            tree.remove(leaf)
            freed += len(leaf.tokens)
            leaf = parent
    tree.evictable_size -= freed
    return freed


def _always_the_oldest(tree: Any, num_tokens: int) -> int:
    """Knows no policy but lru."""
    freed = 0
    while freed < num_tokens:
        leaves = [n for n in tree.nodes() if not n.children and not n.lock_ref and n is not tree.root]
        if not leaves:
            break
        leaf = min(leaves, key=lambda leaf: (leaf.last_access, leaf.id))
        tree.remove(leaf)
        freed += len(leaf.tokens)
    tree.evictable_size -= freed
    return freed


def _greedy(tree: Any, num_tokens: int) -> int:
    """Takes the oldest node, locked or not, leaf or not, with all that hangs below it."""
    freed = 0
    while freed < num_tokens:
        nodes = [node for node in tree.nodes() if node is not tree.root]
        if not nodes:
            break
        todo = [min(nodes, key=lambda node: (tree.key(node), node.id))]
        for node in todo:
            todo += node.children.values()
        for node in reversed(todo):
            tree.remove(node)
            freed += len(node.tokens)
    tree.evictable_size -= freed
    return freed


MUTANTS = [
    # ------------------------------------------------------------ inc_lock_ref
    Mutant(
        "inc_lock_ref",
        "the node itself is left out",
        "    moved = 0\n",
        "    moved, node = 0, node.parent or node\n",
        after=_INC,
    ),
    Mutant(
        "inc_lock_ref", "only the node itself", "        node = node.parent\n", "        break\n", after=_INC
    ),
    Mutant(
        "inc_lock_ref",
        "the root is locked, too",
        "    tree.evictable_size -= moved\n",
        "    node.lock_ref += 1\n    tree.evictable_size -= moved\n",
        after=_INC,
    ),
    Mutant(
        "inc_lock_ref",
        "moves tokens at every lock",
        "        if node.lock_ref == 0:\n",
        "        if True:\n",
        after=_INC,
    ),
    Mutant(
        "inc_lock_ref",
        "looks after adding instead of before",
        "        if node.lock_ref == 0:\n            moved += len(node.tokens)\n        node.lock_ref += 1\n",
        "        node.lock_ref += 1\n        if node.lock_ref == 0:\n            moved += len(node.tokens)\n",
    ),
    Mutant("inc_lock_ref", "a lock is a flag", "        node.lock_ref += 1\n", "        node.lock_ref = 1\n"),
    Mutant(
        "inc_lock_ref",
        "counts nodes instead of tokens",
        "moved += len(node.tokens)",
        "moved += 1",
        after=_INC,
    ),
    Mutant(
        "inc_lock_ref", "protected_size is forgotten", "    tree.protected_size += moved\n", "", after=_INC
    ),
    Mutant(
        "inc_lock_ref", "evictable_size is forgotten", "    tree.evictable_size -= moved\n", "", after=_INC
    ),
    Mutant(
        "inc_lock_ref",
        "stops at the first node that is locked",
        "        node.lock_ref += 1\n",
        "        else:\n            node.lock_ref += 1\n            break\n        node.lock_ref += 1\n",
    ),
    Mutant("inc_lock_ref", "returns nothing", "    return moved\n", "    return None\n", after=_INC),
    # ------------------------------------------------------------ dec_lock_ref
    Mutant(
        "dec_lock_ref",
        "the node itself is left out",
        "    moved = 0\n",
        "    moved, node = 0, node.parent or node\n",
        after=_DEC,
    ),
    Mutant(
        "dec_lock_ref", "only the node itself", "        node = node.parent\n", "        break\n", after=_DEC
    ),
    Mutant(
        "dec_lock_ref",
        "moves tokens at every unlock",
        "        if node.lock_ref == 0:\n",
        "        if True:\n",
        after=_DEC,
    ),
    Mutant(
        "dec_lock_ref",
        "looks before subtracting",
        "        node.lock_ref -= 1\n        if node.lock_ref == 0:\n            moved += len(node.tokens)\n",
        "        if node.lock_ref == 0:\n            moved += len(node.tokens)\n        node.lock_ref -= 1\n",
    ),
    Mutant(
        "dec_lock_ref", "unlocks altogether", "        node.lock_ref -= 1\n", "        node.lock_ref = 0\n"
    ),
    Mutant(
        "dec_lock_ref",
        "never refuses",
        "    if node.parent is not None and node.lock_ref == 0:\n",
        "    if False:\n",
    ),
    Mutant(
        "dec_lock_ref",
        "refuses the root",
        "node.parent is not None and node.lock_ref == 0",
        "node.lock_ref == 0",
    ),
    Mutant(
        "dec_lock_ref",
        "refuses after the fact",
        "    if node.parent is not None and node.lock_ref == 0:\n"
        '        raise ValueError(f"{node} is not locked")\n',
        "    if node.parent is not None and node.lock_ref == 0:\n"
        "        node.lock_ref -= 1\n        raise ValueError\n",
    ),
    Mutant(
        "dec_lock_ref",
        "sizes move the wrong way",
        "    tree.evictable_size += moved\n    tree.protected_size -= moved\n",
        "    tree.evictable_size -= moved\n    tree.protected_size += moved\n",
    ),
    Mutant(
        "dec_lock_ref", "protected_size is forgotten", "    tree.protected_size -= moved\n", "", after=_DEC
    ),
    Mutant(
        "dec_lock_ref",
        "returns the size of the node",
        "    return moved\n",
        "    return len(node.tokens)\n",
        after=_DEC,
    ),
    # ------------------------------------------------------------ evict
    Mutant("evict", "greedy: locks are ignored", " or leaf.lock_ref > 0", ""),
    Mutant(
        "evict",
        "stale keys: what was used again goes all the same",
        "        if key != tree.key(leaf):\n            offer(tree, leaf)\n            continue\n",
        "",
    ),
    Mutant(
        "evict",
        "stale entries are thrown away",
        "            offer(tree, leaf)\n            continue\n",
        "            tree.heap[:] = [entry for entry in tree.heap if entry[2] is not leaf]\n"
        "            continue\n",
    ),
    Mutant(
        "evict",
        "the parent is never offered",
        "        if parent is not tree.root and not parent.children:\n            offer(tree, parent)\n",
        "",
    ),
    Mutant(
        "evict",
        "the parent is offered too early",
        "parent is not tree.root and not parent.children",
        "parent is not tree.root and len(parent.children) == 1",
    ),
    Mutant(
        "evict",
        "newest first",
        "heapq.heappop(tree.heap)",
        "max(tree.heap)\n        tree.heap.remove((key, _, leaf))",
    ),
    Mutant("evict", "one leaf too many", "while freed < num_tokens and", "while freed <= num_tokens and"),
    Mutant(
        "evict",
        "one leaf per call",
        "        tree.remove(leaf)\n        freed += len(leaf.tokens)\n",
        "        tree.remove(leaf)\n        freed += max(len(leaf.tokens), num_tokens)\n",
    ),
    Mutant("evict", "counts leaves instead of tokens", "freed += len(leaf.tokens)", "freed += 1"),
    Mutant("evict", "evictable_size is forgotten", "    tree.evictable_size -= freed\n", "", after=_EVICT),
    Mutant(
        "evict",
        "tokens become protected",
        "    tree.evictable_size -= freed\n",
        "    tree.evictable_size -= freed\n    tree.protected_size += freed\n",
        after=_EVICT,
    ),
    Mutant(
        "evict",
        "ties the other way round",
        "(tree.key(node), node.id, node)",
        "(tree.key(node), -node.id, node)",
    ),
    Mutant(
        "evict",
        "always the oldest, whatever the policy",
        replaces={"evict": _always_the_oldest, "offer": lambda tree, node: None},
    ),
    Mutant(
        "evict",
        "all leaves are collected at every call",
        replaces={"evict": _collect_each_time, "offer": lambda tree, node: None},
    ),
    Mutant("evict", "eager upward collapse", replaces={"evict": _upward_collapse}),
    Mutant("evict", "from the top: a node with all below it", replaces={"evict": _greedy}),
    Mutant(
        "evict",
        "a key that became smaller is missed",
        replaces={
            "offer": lambda tree, node: (
                None
                if any(entry[2] is node for entry in tree.heap)
                else heapq.heappush(tree.heap, (tree.key(node), node.id, node))
            )
        },
    ),
    # ------------------------------------------------------------ policies
    Mutant("policies", "lru by creation (that is fifo)", "return node.last_access", "return node.created"),
    Mutant(
        "policies", "lru the wrong way round (mru)", "return node.last_access", "return -node.last_access"
    ),
    Mutant("policies", "lru by id", "return node.last_access", "return node.id"),
    Mutant(
        "policies",
        "lfu without the second criterion",
        "return node.hits, node.last_access",
        "return node.hits",
        after="def lfu_key",
    ),
    Mutant(
        "policies",
        "lfu: most hits first",
        "return node.hits, node.last_access",
        "return -node.hits, node.last_access",
    ),
    Mutant(
        "policies",
        "lfu: the criteria swapped",
        "return node.hits, node.last_access",
        "return node.last_access, node.hits",
    ),
    Mutant(
        "policies",
        "lfu: newest first among equals",
        "return node.hits, node.last_access",
        "return node.hits, -node.last_access",
    ),
    Mutant("policies", "slru: proven after three hits", "node.hits >= 2", "node.hits >= 3"),
    Mutant("policies", "slru: proven after one hit", "node.hits >= 2", "node.hits > 0"),
    Mutant(
        "policies", "slru: the proven ones first", "return node.hits >= 2, node", "return node.hits < 2, node"
    ),
    Mutant(
        "policies",
        "slru orders by hits within a group",
        "return node.hits >= 2, node.last_access",
        "return node.hits >= 2, node.hits, node.last_access",
    ),
    # ------------------------------------------------------------ claim_collapse
    *(
        Mutant(
            "claim_collapse",
            about,
            'return [("insert", [1]), ("insert", [1, 2]), ("insert", [3]), ("match", [1])], 2',
            f"return {answer}",
        )
        for about, answer in {
            "nothing": ([], 1),
            "leaves only": ([("insert", [1]), ("insert", [2]), ("insert", [3])], 2),
            "the parent is the oldest": ([("insert", [1]), ("insert", [1, 2]), ("insert", [3])], 2),
            "only one leaf has to go": (
                [("insert", [1]), ("insert", [1, 2]), ("insert", [3]), ("match", [1])],
                1,
            ),
            "everything goes": ([("insert", [1]), ("insert", [1, 2]), ("insert", [3]), ("match", [1])], 3),
            "a chain": ([("insert", [1]), ("insert", [1, 2]), ("insert", [1, 2, 3]), ("match", [1])], 2),
            "the other leaf was used, too": (
                [("insert", [1]), ("insert", [1, 2]), ("insert", [3]), ("match", [1]), ("match", [3])],
                2,
            ),
            "more is freed one way": (
                [("insert", [1]), ("insert", [1, 2]), ("insert", [8, 9]), ("match", [1])],
                2,
            ),
            "no moves": (None, 2),
            "an unknown move": ([("evict", [1])], 1),
        }.items()
    ),
]


def _instead(breaks: str, name: str, about: str, code: str) -> Mutant:
    """`code` defines `name`; the right function is at hand as _right_<name>."""
    return Mutant(breaks, about, f"def {name}(", f"{code.strip()}\n\n\ndef _right_{name}(")


def _offer_if_unlocked(tree: Any, node: Any) -> None:
    if not node.lock_ref:
        heapq.heappush(tree.heap, (tree.key(node), node.id, node))


def _evict_whatever_is_locked(tree: Any, num_tokens: int) -> int:
    freed = 0
    while freed < num_tokens and tree.heap:
        key, _, leaf = heapq.heappop(tree.heap)
        if leaf.children or leaf.parent is None:
            continue
        if key != tree.key(leaf):
            _offer_if_unlocked(tree, leaf)
            continue
        parent = leaf.parent
        tree.remove(leaf)
        freed += len(leaf.tokens)
        if parent is not tree.root and not parent.children:
            _offer_if_unlocked(tree, parent)
    tree.evictable_size -= freed
    return freed


def _key(name: str, about: str, value: str) -> Mutant:
    return _instead("policies", name, f"{name}: {about}", f"def {name}(node):\n    return {value}")


MUTANTS += [
    # ------------------------------------------------------------ inc_lock_ref
    _instead(
        "inc_lock_ref",
        "inc_lock_ref",
        "locking counts as use, at the end of the path",
        """
def inc_lock_ref(tree, node):
    node.last_access = tree.now if node.parent is not None else 0
    return _right_inc_lock_ref(tree, node)
""",
    ),
    Mutant(
        "inc_lock_ref",
        "locking counts as a hit",
        "        node.lock_ref += 1\n",
        "        node.lock_ref += 1\n        node.hits += 1\n",
    ),
    # a second tree in the same process: its ids begin at 1 too
    _instead(
        "inc_lock_ref",
        "inc_lock_ref",
        "notes in a global which ids are locked",
        """
_LOCKED = set()


def inc_lock_ref(tree, node):
    moved = 0
    while node.parent is not None:
        if node.lock_ref == 0 and (node.id, len(node.tokens)) not in _LOCKED:
            moved += len(node.tokens)
            _LOCKED.add((node.id, len(node.tokens)))
        node.lock_ref += 1
        node = node.parent
    tree.evictable_size -= moved
    tree.protected_size += moved
    return moved
""",
    ),
    # ------------------------------------------------------------ dec_lock_ref
    # unlock what is not locked, and look at the sizes
    _instead(
        "dec_lock_ref",
        "dec_lock_ref",
        "the sizes have changed when it refuses",
        """
def dec_lock_ref(tree, node):
    if node.parent is not None and node.lock_ref == 0:
        tree.evictable_size += len(node.tokens)
        tree.protected_size -= len(node.tokens)
        raise ValueError("not locked")
    return _right_dec_lock_ref(tree, node)
""",
    ),
    # unlock an unlocked leaf below a node that another leaf's request holds
    _instead(
        "dec_lock_ref",
        "dec_lock_ref",
        "goes from the top down, and has unlocked what is above when it refuses",
        """
def dec_lock_ref(tree, node):
    path, moved = [], 0
    while node.parent is not None:
        path.append(node)
        node = node.parent
    for step in reversed(path):
        if step.lock_ref == 0:
            raise ValueError("not locked")
        step.lock_ref -= 1
        if step.lock_ref == 0:
            moved += len(step.tokens)
            tree.evictable_size += len(step.tokens)
            tree.protected_size -= len(step.tokens)
    return moved
""",
    ),
    _instead(
        "dec_lock_ref",
        "dec_lock_ref",
        "the sizes above have changed when it refuses",
        """
def dec_lock_ref(tree, node):
    if node.parent is not None and node.lock_ref == 0:
        step = node.parent
        while step.parent is not None:
            if step.lock_ref == 1:
                tree.evictable_size += len(step.tokens)
                tree.protected_size -= len(step.tokens)
            step = step.parent
        raise ValueError("not locked")
    return _right_dec_lock_ref(tree, node)
""",
    ),
    _instead(
        "dec_lock_ref",
        "dec_lock_ref",
        "counts as used when it refuses",
        """
def dec_lock_ref(tree, node):
    if node.parent is not None and node.lock_ref == 0:
        node.last_access = tree.now
    return _right_dec_lock_ref(tree, node)
""",
    ),
    # one request ends at an inner node, another one below it is unlocked
    _instead(
        "dec_lock_ref",
        "dec_lock_ref",
        "a node above is locked as often as its children: requests that end there are forgotten",
        """
def dec_lock_ref(tree, node):
    if node.parent is None or node.lock_ref == 0:
        return _right_dec_lock_ref(tree, node)
    moved, end = 0, node
    while node.parent is not None:
        before = node.lock_ref
        below = sum(child.lock_ref for child in node.children.values())
        node.lock_ref = node.lock_ref - 1 if node is end else below
        if before and node.lock_ref == 0:
            moved += len(node.tokens)
        node = node.parent
    tree.evictable_size += moved
    tree.protected_size -= moved
    return moved
""",
    ),
    Mutant(
        "dec_lock_ref",
        "unlocking takes a hit back",
        "        node.lock_ref -= 1\n",
        "        node.lock_ref -= 1\n        node.hits = max(node.hits - 1, 0)\n",
    ),
    # ------------------------------------------------------------ offer and evict
    # two leaves with one key; the one with the larger id was offered first
    Mutant(
        "evict",
        "ties go by who was offered first",
        "heapq.heappush(tree.heap, (tree.key(node), node.id, node))",
        "tree.offers = getattr(tree, 'offers', 0) + 1\n"
        "    heapq.heappush(tree.heap, (tree.key(node), tree.offers, node))",
    ),
    # under mru: a leaf that was used again has a smaller key
    _instead(
        "evict",
        "offer",
        "one entry per leaf, corrected only when it comes up: wrong for keys that become smaller",
        """
def offer(tree, node):
    if not any(entry[-1] is node for entry in tree.heap):
        _right_offer(tree, node)
""",
    ),
    # key -hits: [1 2] and [3] come in, [1] is matched (the upper half's id is 3): [2] [1] [3] have to go
    Mutant(
        "evict",
        "a parent comes in under its child's key",
        "            offer(tree, parent)\n",
        "            heapq.heappush(tree.heap, (key, parent.id, parent))\n",
    ),
    # two trees at the same time
    _instead(
        "evict",
        "offer",
        "one heap for all trees",
        """
_HEAP = []


def offer(tree, node):
    tree.heap = _HEAP
    _right_offer(tree, node)
""",
    ),
    # a leaf that is offered and locked afterwards
    Mutant(
        "evict",
        "locks are looked at when a leaf is offered, not when it goes",
        replaces={"offer": _offer_if_unlocked, "evict": _evict_whatever_is_locked},
    ),
    # a parent that was used long ago
    Mutant(
        "evict",
        "a parent counts as used when its child goes",
        "            offer(tree, parent)\n",
        "            parent.last_access = tree.now\n            offer(tree, parent)\n",
    ),
    # ------------------------------------------------------------ policies: right for small numbers
    # hits 1, last used at 200, against hits 2, last used at 50
    *(
        _key("lfu_key", f"a weight of {weight:,} for a hit", f"node.hits * {weight} + node.last_access")
        for weight in (100, 10**6)
    ),
    # ticks of 10**9 and one more
    _key(
        "lfu_key", "the age as a fraction that floats cannot hold", "node.hits - 1 / (node.last_access + 1)"
    ),
    _key("lfu_key", "compared as text", "f'{node.hits}:{node.last_access:09d}'"),
    _key("lru_key", "the clock turns at 65,536", "node.last_access & 0xFFFF"),
    _key("lru_key", "a float32", "__import__('numpy').float32(node.last_access)"),
    # hits 4 used at 5, hits 2 used at 9
    _key("slru_key", "a segment for every two hits", "node.hits // 2, node.last_access"),
    _key("slru_key", "a weight of 1,000,000 for the proven", "node.last_access + 10**6 * (node.hits >= 2)"),
]
