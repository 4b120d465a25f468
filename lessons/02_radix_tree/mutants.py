"""Plausible wrong solutions of lesson 02."""

from __future__ import annotations

from lessons.grading import Mutant

_COMMON = "def common_prefix"
_SPLIT = "def split_node"
_MATCH = "def match_prefix"
_INSERT = "def insert"

MUTANTS = [
    # ------------------------------------------------------------ common_prefix
    Mutant(
        "common_prefix", "not rounded to pages", "return length // page_size * page_size", "return length"
    ),
    Mutant(
        "common_prefix",
        "pages instead of tokens",
        "return length // page_size * page_size",
        "return length // page_size",
    ),
    Mutant(
        "common_prefix",
        "rounded up",
        "return length // page_size * page_size",
        "return -(-length // page_size) * page_size",
    ),
    Mutant("common_prefix", "one too many", "return length // page_size", "return (length + 1) // page_size"),
    Mutant("common_prefix", "one too few", "return length // page_size", "return (length - 1) // page_size"),
    Mutant(
        "common_prefix",
        "the ends are not looked at",
        "while length < len(a) and length < len(b) and",
        "while",
    ),
    Mutant(
        "common_prefix", "the shorter one's last token is left out", "length < len(b)", "length < len(b) - 1"
    ),
    Mutant("common_prefix", "compared by identity", "a[length] == b[length]", "a[length] is b[length]"),
    Mutant(
        "common_prefix",
        "as if both began alike where they meet again",
        replaces={
            "common_prefix": lambda a, b, page_size=1: (
                sum(x == y for x, y in zip(a, b, strict=False)) // page_size * page_size
            )
        },
    ),
    Mutant(
        "common_prefix",
        "only each page's first token is compared",
        replaces={
            "common_prefix": lambda a, b, page_size=1: next(
                (
                    i
                    for i in range(0, min(len(a), len(b)) // page_size * page_size, page_size)
                    if a[i] != b[i]
                ),
                min(len(a), len(b)) // page_size * page_size,
            )
        },
    ),
    # ------------------------------------------------------------ split_node
    Mutant(
        "split_node",
        "the new node is the lower half (returns the old one)",
        "return upper\n",
        "return node\n",
    ),
    Mutant(
        "split_node",
        "the parent keeps its old child",
        "node.parent.children[tuple(upper.tokens[:page])] = upper",
        "pass",
    ),
    Mutant(
        "split_node",
        "the upper half does not know the lower",
        "upper.children[tuple(node.tokens[:page])] = node",
        "pass",
    ),
    Mutant("split_node", "the lower half still points to its old parent", "    node.parent = upper\n", ""),
    Mutant("split_node", "slots are not cut", "node.slots = node.slots[at:]", "pass"),
    Mutant(
        "split_node",
        "the upper half keeps all slots",
        "node.slots[:at], node.parent)",
        "node.slots, node.parent)",
    ),
    Mutant(
        "split_node",
        "off by one: a token is in both halves",
        "node.tokens = node.tokens[at:]",
        "node.tokens = node.tokens[at - 1 :]",
    ),
    Mutant(
        "split_node",
        "filed under the old first page",
        "upper.children[tuple(node.tokens[:page])]",
        "upper.children[tuple(upper.tokens[:page])]",
    ),
    Mutant(
        "split_node",
        "filed under one token, not a page",
        "upper.children[tuple(node.tokens[:page])]",
        "upper.children[tuple(node.tokens[:1])]",
    ),
    Mutant(
        "split_node", "the upper half is not locked", "upper.lock_ref = node.lock_ref", "upper.lock_ref = 0"
    ),
    Mutant("split_node", "the upper half counts as new", "upper.created = node.created", "pass"),
    Mutant("split_node", "hits are lost", "upper.hits = node.hits", "pass"),
    Mutant("split_node", "the lower half keeps its old time", "    node.last_access = tree.now\n", ""),
    Mutant(
        "split_node",
        "the upper half takes over the old time",
        "upper.last_access = tree.now",
        "upper.last_access = node.last_access",
    ),
    # ------------------------------------------------------------ match_prefix
    Mutant(
        "match_prefix",
        "a match inside a node is given up",
        "child = split_node(tree, child, shared)",
        "return slots, node",
    ),
    Mutant(
        "match_prefix", "no split: slots of the whole node", "if shared < len(child.tokens):", "if False:"
    ),
    Mutant(
        "match_prefix",
        "split where nothing is left over",
        "if shared < len(child.tokens):",
        "if shared <= len(child.tokens) and len(child.tokens) > tree.page_size:",
    ),
    Mutant(
        "match_prefix",
        "off by one page at the split",
        "split_node(tree, child, shared)",
        "split_node(tree, child, max(shared - tree.page_size, tree.page_size))",
    ),
    Mutant(
        "match_prefix",
        "page size forgotten in the comparison",
        "common_prefix(child.tokens, rest, tree.page_size)",
        "common_prefix(child.tokens, rest)",
    ),
    Mutant("match_prefix", "looked up by one token", "tuple(rest[: tree.page_size])", "tuple(rest[:1])"),
    Mutant("match_prefix", "stale time stamps", "        child.last_access = tree.now\n", ""),
    Mutant(
        "match_prefix",
        "only the end of the path is touched",
        "        child.last_access = tree.now\n",
        "        child.last_access = tree.now if len(rest) == len(child.tokens) else child.last_access\n",
    ),
    Mutant(
        "match_prefix",
        "the root is touched instead of the path",
        "        child.last_access = tree.now\n",
        "        node.last_access = tree.now\n",
    ),
    Mutant(
        "match_prefix",
        "hands out the node's own list",
        "        slots.extend(child.slots)\n",
        "        slots = child.slots if not slots else slots + child.slots\n",
    ),
    Mutant(
        "match_prefix",
        "forgets the slots above",
        "slots.extend(child.slots)",
        "slots = list(child.slots)",
        after=_MATCH,
    ),
    Mutant(
        "match_prefix",
        "returns the parent of the end",
        "            return slots, node",
        "            return slots, node.parent or node",
        after=_MATCH,
    ),
    # ------------------------------------------------------------ insert
    Mutant(
        "insert",
        "the incomplete page goes in, too",
        "whole = len(tokens) // tree.page_size * tree.page_size",
        "whole = len(tokens)",
    ),
    Mutant(
        "insert",
        "one page too few",
        "whole = len(tokens) // tree.page_size * tree.page_size",
        "whole = max(len(tokens) // tree.page_size - 1, 0) * tree.page_size",
    ),
    Mutant(
        "insert",
        "the slots are not advanced",
        "slots[prefix_len:], node)",
        "slots[: whole - prefix_len], node)",
    ),
    Mutant(
        "insert",
        "the whole sequence becomes the leaf",
        "tokens[prefix_len:], slots[prefix_len:]",
        "tokens, slots",
    ),
    Mutant("insert", "says how many are new", "return prefix_len, leaf", "return whole - prefix_len, leaf"),
    Mutant("insert", "returns the leaf's parent", "return prefix_len, leaf", "return prefix_len, node"),
    Mutant(
        "insert",
        "an empty leaf where all was there",
        "    if prefix_len == whole:\n        return prefix_len, node\n",
        "",
    ),
    Mutant(
        "insert",
        "the leaf hangs from the root",
        "node.children[tuple(leaf.tokens[: tree.page_size])] = leaf",
        "tree.root.children[tuple(leaf.tokens[: tree.page_size])] = leaf",
        after=_INSERT,
    ),
    Mutant(
        "insert",
        "the parent does not learn of the leaf",
        "    node.children[tuple(leaf.tokens[: tree.page_size])] = leaf\n",
        "",
        after=_INSERT,
    ),
    Mutant(
        "insert", "filed under one token", "tuple(leaf.tokens[: tree.page_size])", "tuple(leaf.tokens[:1])"
    ),
    Mutant(
        "insert",
        "new slots take the place of the tree's",
        "    if prefix_len == whole:",
        "    node.slots = slots[whole - len(node.slots) :] if prefix_len == whole else node.slots\n"
        "    if prefix_len == whole:",
    ),
    Mutant(
        "insert",
        "one leaf per page",
        "    leaf = tree.new_node(",
        "    if whole - prefix_len > tree.page_size:\n"
        "        insert(tree, tokens[: whole - tree.page_size], slots[: whole - tree.page_size])\n"
        "        return prefix_len, insert(tree, tokens, slots)[1]\n"
        "    leaf = tree.new_node(",
    ),
    # ------------------------------------------------------------ claim_two_subtrees
    *(
        Mutant("claim_two_subtrees", about, "return [[1, 2], [1, 2, 3]]", f"return {prompts}")
        for about, prompts in {
            "nothing": [],
            "one prompt": [[1, 2, 3]],
            "two that part": [[1, 2], [1, 3]],
            "two that share nothing": [[1], [2]],
            "the same one twice": [[1, 2], [1, 2]],
            "three that part at one place": [[1, 2, 3], [1, 2, 4], [1, 2, 5]],
            "parts twice": [[1, 2, 3], [1, 2, 4], [1, 5]],
            "tokens instead of prompts": [1, 2, 3],
            "only the root has one child": [[1, 2], [1, 3], [1, 4]],
            "the longer one parts at the shorter one's end": [[1, 2], [1, 2, 3], [1, 2, 4]],
        }.items()
    ),
]


def _instead(name: str, about: str, code: str) -> Mutant:
    """`code` defines `name`; the right function is at hand as _right_<name>."""
    return Mutant(name, about, f"def {name}(", f"{code.strip()}\n\n\ndef _right_{name}(")


def _split_inside(name: str, about: str, lines: str) -> Mutant:
    """`name` walks down and splits on its own; `lines` come after a split that is right in all else."""
    code = f"""
def _cut(tree, node, at):
    times = node.created, node.last_access
    upper = tree.new_node(node.tokens[:at], node.slots[:at], node.parent)
    upper.lock_ref, upper.hits = node.lock_ref, node.hits
    upper.priority, upper.created = node.priority, node.created
    node.parent.children[tuple(upper.tokens[: tree.page_size])] = upper
    node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
    node.last_access = tree.now
    upper.children[tuple(node.tokens[: tree.page_size])] = node
    {lines}
    return upper


def match_prefix(tree, tokens):
    node, slots = tree.root, []
    while True:
        rest = tokens[len(slots) :]
        child = node.children.get(tuple(rest[: tree.page_size]))
        if child is None:
            return slots, node
        shared = common_prefix(child.tokens, rest, tree.page_size)
        if shared < len(child.tokens):
            child = _cut(tree, child, shared)
        child.last_access = tree.now
        slots.extend(child.slots)
        node = child
"""
    if name == "match_prefix":
        return _instead(name, about, code)
    code = code.replace("def match_prefix(", "def _walk(")
    new = "found, node = _walk(tree, tokens)"
    body = f"""
def insert(tree, tokens, slots):
    whole = len(tokens) // tree.page_size * tree.page_size
    tokens, slots = tokens[:whole], slots[:whole]
    {new}
    prefix_len = len(found)
    if prefix_len == whole:
        return prefix_len, node
    leaf = tree.new_node(tokens[prefix_len:], slots[prefix_len:], node)
    node.children[tuple(leaf.tokens[: tree.page_size])] = leaf
    return prefix_len, leaf
"""
    return _instead("insert", about, code + "\n" + body)


_FORGOTTEN = [
    # a node that is locked, hit, old or important, and a match or an insert that ends inside it
    ("loses the lock", "upper.lock_ref = 0"),
    ("takes the lock of the node above", "upper.lock_ref = upper.parent.lock_ref"),
    ("loses the hits", "upper.hits = 0"),
    ("loses the priority", "upper.priority = 0"),
]

MUTANTS += [
    # ------------------------------------------------------------ common_prefix, right for some inputs
    # [1] and [257]
    Mutant(
        "common_prefix",
        "only the last eight bits are compared",
        "a[length] == b[length]",
        "a[length] & 255 == b[length] & 255",
    ),
    # [16777216] and [16777217]
    _instead(
        "common_prefix",
        "compared as float32",
        """
def common_prefix(a, b, page_size=1):
    import numpy as np

    return _right_common_prefix(np.float32(a), np.float32(b), page_size)
""",
    ),
    # [5] and [2**31 + 5]
    Mutant(
        "common_prefix",
        "the bit above 2**31 is not compared",
        "a[length] == b[length]",
        "a[length] & 0x7FFFFFFF == b[length] & 0x7FFFFFFF",
    ),
    # [1, 23] and [12, 3]
    _instead(
        "common_prefix",
        "compared as one text of digits",
        """
def common_prefix(a, b, page_size=1):
    shorter = min(len(a), len(b))
    for length in range(shorter, 0, -1):
        if "".join(map(str, a[:length])) == "".join(map(str, b[:length])):
            return length // page_size * page_size
    return 0
""",
    ),
    # [1, 2, 3, 4, 5] and [1, 9, 3, 4, 5]
    _instead(
        "common_prefix",
        "bisected, as if nothing were alike after the first difference",
        """
def common_prefix(a, b, page_size=1):
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[middle - 1] == b[middle - 1] else (low, middle - 1)
    return low // page_size * page_size
""",
    ),
    # two prompts of 2500 tokens that are alike
    _instead(
        "common_prefix",
        "a call per token: no long prompts",
        """
def common_prefix(a, b, page_size=1):
    def alike(at):
        return 1 + alike(at + 1) if at < len(a) and at < len(b) and a[at] == b[at] else 0

    return alike(0) // page_size * page_size
""",
    ),
    # ------------------------------------------------------------ split_node
    # a node with priority -1
    Mutant(
        "split_node",
        "no priority below 0",
        "upper.priority = node.priority",
        "upper.priority = max(node.priority, 0)",
    ),
    # ids above 255
    Mutant(
        "split_node",
        "the lower half is filed under eight bits of its tokens",
        "upper.children[tuple(node.tokens[:page])] = node",
        "upper.children[tuple(t & 255 for t in node.tokens[:page])] = node",
    ),
    # a parent that was not just used
    Mutant(
        "split_node",
        "the parent counts as used too",
        "node.last_access = tree.now",
        "node.last_access = node.parent.parent.last_access = tree.now",
    ),
    # ------------------------------------------------------------ match_prefix
    *(_split_inside("match_prefix", f"its own split {about}", lines) for about, lines in _FORGOTTEN),
    # a match that ends inside a locked node
    Mutant(
        "match_prefix",
        "a locked node is not split: the match ends before it",
        "            child = split_node(tree, child, shared)\n",
        "            if child.lock_ref:\n                return slots, node\n"
        "            child = split_node(tree, child, shared)\n",
    ),
    # a match through a locked node
    Mutant(
        "match_prefix",
        "what is locked does not become younger",
        "child.last_access = tree.now",
        "child.last_access = child.last_access if child.lock_ref else tree.now",
    ),
    # any match: tree.match counts the hit
    Mutant(
        "match_prefix",
        "counts a hit by itself",
        "child.last_access = tree.now",
        "child.last_access, child.hits = tree.now, child.hits + 1",
    ),
    # the same question twice, with an insert in between, or of another tree
    _instead(
        "match_prefix",
        "remembers answers",
        """
_KNOWN = {}


def match_prefix(tree, tokens):
    key = (id(tree), tuple(tokens))
    if key not in _KNOWN:
        _KNOWN[key] = _right_match_prefix(tree, tokens)
    slots, node = _KNOWN[key]
    while node.parent is not None:
        node.last_access, node = tree.now, node.parent
    return list(slots), _KNOWN[key][1]
""",
    ),
    # 300 is in the tree, 44 is asked for; 65541 and 5
    *(
        Mutant(
            "match_prefix",
            f"children are found by {bits} bits of their tokens",
            "child = node.children.get(tuple(rest[: tree.page_size]))\n",
            "page = tree.page_size\n"
            "        child = next((c for c in node.children.values() if len(rest) >= page and "
            f"all((x ^ y) % 2**{bits} == 0 for x, y in zip(c.tokens[:page], rest))), None)\n"
            "        rest = [*(child.tokens[:page] if child else ()), *rest[page:]] if child else rest\n",
        )
        for bits in (8, 32)
    ),
    # a path of more than eight nodes
    Mutant(
        "match_prefix",
        "goes down eight nodes and no further",
        "    while True:\n        rest",
        "    for _ in range(9):\n        if _ == 8:\n            return slots, node\n        rest",
    ),
    # ------------------------------------------------------------ insert
    *(_split_inside("insert", f"its own split {about}", lines) for about, lines in _FORGOTTEN),
    # insert below a node that is locked, hit, important, old
    *(
        Mutant(
            "insert",
            f"the leaf inherits {what} from its parent",
            "    return prefix_len, leaf\n",
            f"    leaf.{what} = node.{what}\n    return prefix_len, leaf\n",
        )
        for what in ("lock_ref", "hits")
    ),
    # any insert below a node: only a look-up counts a hit
    Mutant(
        "insert",
        "an insert counts as a hit of its path",
        "    return prefix_len, leaf\n",
        "    while node.parent is not None:\n        node.hits, node = node.hits + 1, node.parent\n"
        "    return prefix_len, leaf\n",
    ),
    # insert, remove a leaf (an eviction), insert twice: two nodes have one id
    Mutant(
        "insert",
        "ids are counted, and used again after an eviction",
        "    return prefix_len, leaf\n",
        "    leaf.id = max(each.id for each in tree.nodes() if each is not leaf) + 1\n"
        "    return prefix_len, leaf\n",
    ),
    # tokens above 32767, slots above 32767
    Mutant(
        "insert",
        "slots are kept as int16",
        "    return prefix_len, leaf\n",
        "    leaf.slots = [(slot + 2**15) % 2**16 - 2**15 for slot in leaf.slots]\n"
        "    return prefix_len, leaf\n",
    ),
]
