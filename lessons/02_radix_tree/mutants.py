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
