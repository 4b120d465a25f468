"""What lesson 02 asks for, and its open cases."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from lessons.grading import Exercise, expect, underlay
from lessons.grading.cases import laid, node_at, pictures, spelled, tree_of, whole
from lessons.grading.tree import Node, Tree, name_of, snapshot
from minirad.cache.radix_cache import RadixCache, RadixKey

# ---------------------------------------------------------------------- common_prefix


def prefixes_by_hand(impl: ModuleType) -> None:
    """Two short sequences."""
    for a, b, page, wanted in [
        ([1, 2, 3], [1, 2, 4], 1, 2),
        ([1, 2, 3], [1, 2, 3], 1, 3),
        ([1, 2], [1, 2, 3], 1, 2),
        ([1, 2, 3], [1], 1, 1),
        ([5], [6], 1, 0),
        ([], [1], 1, 0),
        ([], [], 1, 0),
        ([0, 0, 1], [0, 0, 0], 1, 2),
        ([1, 2, 3, 1], [1, 9, 3, 1], 1, 1),
        ([1, 2, 3, 4, 5], [1, 2, 3, 9], 2, 2),
        ([1, 2, 3, 4], [1, 2, 3, 4], 2, 4),
        ([1, 2, 3], [1, 2, 3], 2, 2),
        ([1, 2, 3], [1, 2, 3], 4, 0),
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8], 3, 6),
    ]:
        kept = list(a), list(b)
        got = impl.common_prefix(a, b, page)
        expect(
            got == wanted,
            f"common_prefix({a}, {b}, page_size={page}) gave {got!r}; "
            f"they share {wanted} tokens in whole pages",
            hint=int(page > 1),
        )
        expect((a, b) == kept, "common_prefix must not change the lists that it compares")


def page_size_is_one_unless_said(impl: ModuleType) -> None:
    """Called without a page size."""
    got = impl.common_prefix([7, 8, 9], [7, 8])
    expect(
        got == 2, f"common_prefix([7, 8, 9], [7, 8]) gave {got!r}; without a page size a page is one token"
    )


def large_ids(impl: ModuleType) -> None:
    """Token ids past what small-number tricks survive."""
    a = [100_000, 151_643, 2**31 - 1, 5]
    got = impl.common_prefix(a, [int(str(token)) for token in a[:3]] + [6], 1)
    expect(
        got == 3,
        f"common_prefix of two sequences with large ids gave {got!r} instead of 3: "
        "== compares values, `is` does not",
    )


# ---------------------------------------------------------------------- split_node


def split_by_hand(impl: ModuleType) -> None:
    """Splitting [1 2 3 4 5] after 2 tokens."""
    tree = tree_of([1, 2, 3, 4, 5])
    node = node_at(tree, [1, 2, 3, 4, 5])
    _split(impl, tree, node, 2)


def split_in_the_middle_of_the_tree(impl: ModuleType) -> None:
    """Splitting a node that has a parent, a sibling and children."""
    tree = tree_of([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [1, 2, 9])
    _split(impl, tree, node_at(tree, [1, 2, 3, 4]), 1)


def split_pages(impl: ModuleType) -> None:
    """Splitting a node of three pages of 2 tokens."""
    tree = tree_of([1, 2, 3, 4, 5, 6], page_size=2)
    _split(impl, tree, node_at(tree, [1, 2, 3, 4, 5, 6]), 4)


def split_a_locked_node(impl: ModuleType) -> None:
    """Splitting a node that two requests hold."""
    tree = tree_of([1, 2, 3, 4])
    node = node_at(tree, [1, 2, 3, 4])
    tree.lock(node)
    tree.lock(node)
    _split(impl, tree, node, 3)


def _split(impl: ModuleType, tree: Tree, node: Node, at: int) -> None:
    before, number, parent = snapshot(tree), node.id, node.parent
    tokens, slots, children = list(node.tokens), list(node.slots), dict(node.children)
    node.hits, node.priority, node.created = 7, 3, 1
    tree.now += 5
    lock = node.lock_ref
    upper = impl.split_node(tree, node, at)
    where = f"split_node of {tokens} after {at}"

    def must(condition: bool, words: str, hint: int = 0) -> None:
        expect(condition, f"{where}: {words}", pictures(tree, before), hint)

    must(upper is not None, "it returned nothing; return the upper half")
    must(upper is not node, "it returned the lower half; return the new upper one", 1)
    must(node.id == number, "the node itself must stay the lower half and keep its id", 1)
    for half, name, part in ((upper, "upper", slice(0, at)), (node, "lower", slice(at, None))):
        must(
            _ints(half.tokens) == tokens[part],
            f"the {name} half holds {_ints(half.tokens)} instead of {tokens[part]}",
        )
        must(
            _ints(half.slots) == slots[part],
            f"the {name} half has slots {_ints(half.slots)} instead of {slots[part]}",
        )
        must(
            half.last_access == tree.now,
            f"the {name} half's last_access is {half.last_access}; both halves were just used ({tree.now})",
        )
    must(upper.parent is parent, f"the upper half's parent should be {name_of(parent)}", 2)
    must(node.parent is upper, "the lower half's parent should be the upper half", 2)
    must(list(upper.children.values()) == [node], "the upper half should have one child: the lower half", 2)
    must(dict(node.children) == children, "the lower half should keep the children", 2)
    must(upper in list(parent.children.values()), f"{name_of(parent)} does not know the upper half", 2)
    must(
        node not in list(parent.children.values()),
        f"{name_of(parent)} still has the lower half as its child",
        2,
    )
    for name, wanted in (("lock_ref", lock), ("hits", 7), ("priority", 3), ("created", 1)):
        for half, which in ((upper, "upper"), (node, "lower")):
            got = getattr(half, name)
            must(got == wanted, f"the {which} half's {name} is {got}, the node's was {wanted}", 1)
    tree.evictable_size, tree.protected_size = _sizes(tree)
    whole(tree, where, before, hint=2)


def _sizes(tree: Tree) -> tuple[int, int]:
    sizes = [0, 0]
    for node in tree.nodes():
        sizes[node.lock_ref > 0] += len(node.tokens)
    return sizes[0], sizes[1]


def _ints(values: Any) -> list[int]:
    return [int(value) for value in values]


# ---------------------------------------------------------------------- match_prefix


def match_in_an_empty_tree(impl: ModuleType) -> None:
    """A look-up in an empty tree."""
    _match(impl, tree_of(), [1, 2], [], 0)


def match_whole_nodes(impl: ModuleType) -> None:
    """Matches that end at the end of a node."""
    for tokens, wanted in [
        ([1, 2, 3, 4, 5], [1000, 1001, 1002, 1003, 1004]),
        ([1, 2, 3, 6, 7, 8], [1000, 1001, 1002, 2003, 2004]),
        ([1, 2, 3], [1000, 1001, 1002]),
        ([9], []),
        ([], []),
    ]:
        _match(impl, tree_of([1, 2, 3, 4, 5], [1, 2, 3, 6, 7]), tokens, wanted, 3)


def match_splits(impl: ModuleType) -> None:
    """A match that ends inside a node."""
    tree = tree_of([1, 2, 3, 4, 5], [8])
    _match(impl, tree, [1, 2, 9], [1000, 1001], 3, hint=1)
    node_at(tree, [1, 2])
    _match(impl, tree_of([1, 2, 3, 4, 5], [8]), [1, 2], [1000, 1001], 3, hint=1)


def match_whole_pages(impl: ModuleType) -> None:
    """Matches on pages of 2 tokens."""
    for tokens, wanted, nodes in [
        ([1, 2, 3, 9], [1000, 1001], 2),
        ([1, 2, 3], [1000, 1001], 2),
        ([1, 9, 3, 4], [], 1),
        ([1], [], 1),
        ([1, 2, 3, 4, 5, 6, 7], [1000, 1001, 1002, 1003, 1004, 1005], 1),
    ]:
        _match(impl, tree_of([1, 2, 3, 4, 5, 6], page_size=2), tokens, wanted, nodes, hint=1)


def match_touches_the_path_only(impl: ModuleType) -> None:
    """After a look-up, the nodes on its path are the newest, and no others."""
    tree = laid(tree_of([1, 2, 3], [1, 2, 4], [5]), impl, "match_prefix")
    other = {node.id: node.last_access for node in tree.nodes()}
    before = snapshot(tree)
    tree.match([1, 2, 3])
    path = [[1, 2], [1, 2, 3]]
    for node in tree.nodes():
        if node is tree.root:
            continue
        wanted = tree.now if spelled(node) in path else other[node.id]
        words = (
            f"after a match of [1, 2, 3] at tick {tree.now}, last_access of {name_of(node)} is "
            f"{node.last_access}; it should be {wanted}"
        )
        expect(node.last_access == wanted, words, pictures(tree, before), hint=2)


def match_gives_its_own_list(impl: ModuleType) -> None:
    """Changing the slots that a match returned must not change the tree."""
    tree = tree_of([1, 2, 3])
    slots, node = impl.match_prefix(tree, [1, 2, 3])
    for position in range(len(slots)):
        slots[position] = 0
    expect(
        _ints(node.slots) == [1000, 1001, 1002],
        "the list that match_prefix returned is the node's own: "
        "who changes it changes the tree; return a copy",
        pictures(tree),
        hint=2,
    )


def _match(
    impl: ModuleType, tree: Tree, tokens: list[int], wanted: list[int], nodes: int, hint: int = 0
) -> None:
    before, asked = snapshot(tree), list(tokens)
    tree.now += 1
    answer = impl.match_prefix(tree, tokens)
    where = f"match_prefix({asked}) with pages of {tree.page_size}"
    if tree.page_size == 1:
        where = f"match_prefix({asked})"
    two = isinstance(answer, tuple) and len(answer) == 2
    expect(two, f"{where} returned {answer!r}; it should be (slots, node)")
    slots, node = answer
    expect(hasattr(node, "parent"), f"{where} returned {node!r} in the place of a node")
    shown = pictures(tree, before)
    expect(_ints(slots) == wanted, f"{where} gave slots {_ints(slots)} instead of {wanted}", shown, hint)
    expect(tokens == asked, f"{where} changed the tokens it was given", shown)
    ends = spelled(node)
    words = f"{where} returned {name_of(node)}, whose path spells {ends} instead of {asked[: len(wanted)]}"
    expect(ends == asked[: len(wanted)], words, shown, hint)
    whole(tree, where, before)
    count = len(list(tree.nodes())) - 1
    split = len(before["nodes"]) + (count > len(before["nodes"]))
    expect(
        count <= split,
        f"{where} made {count - len(before['nodes'])} new nodes; a match splits once at most",
        shown,
        hint=1,
    )


# ---------------------------------------------------------------------- insert


def insert_into_an_empty_tree(impl: ModuleType) -> None:
    """The first insert."""
    _insert(impl, tree_of(), [1, 2, 3], 0, [[1, 2, 3]])


def insert_what_is_there(impl: ModuleType) -> None:
    """Inserting what the tree has already."""
    tree = tree_of([1, 2, 3])
    _insert(impl, tree, [1, 2, 3], 3, [[1, 2, 3]])
    kept = _ints(node_at(tree, [1, 2, 3]).slots)
    words = f"the tree had slots [1000, 1001, 1002] for [1, 2, 3] and must keep them; it has {kept}"
    expect(kept == [1000, 1001, 1002], words, pictures(tree), hint=1)


def insert_parts(impl: ModuleType) -> None:
    """Two sequences that part inside a node."""
    tree = tree_of([1, 2, 3, 4])
    _insert(impl, tree, [1, 2, 8, 9], 2, [[1, 2], [1, 2, 3, 4], [1, 2, 8, 9]])
    kept = _ints(node_at(tree, [1, 2, 8, 9]).slots)
    expect(
        kept == [502, 503],
        f"the new leaf [8, 9] should have slots [502, 503], it has {kept}",
        pictures(tree),
        hint=2,
    )


def insert_longer(impl: ModuleType) -> None:
    """Inserting more of what is there: a new leaf below the old one."""
    _insert(impl, tree_of([1, 2]), [1, 2, 3, 4], 2, [[1, 2], [1, 2, 3, 4]])


def insert_shorter(impl: ModuleType) -> None:
    """Inserting the beginning of what is there: a split, and no new leaf."""
    _insert(impl, tree_of([1, 2, 3, 4]), [1, 2], 2, [[1, 2], [1, 2, 3, 4]])


def insert_whole_pages(impl: ModuleType) -> None:
    """Tokens after the last whole page stay out."""
    _insert(impl, tree_of(page_size=4), [1, 2, 3], 0, [])
    _insert(impl, tree_of(page_size=4), [1, 2, 3, 4, 5, 6], 0, [[1, 2, 3, 4]])
    tree = tree_of([1, 2, 3, 4, 5, 6, 7, 8], page_size=4)
    _insert(
        impl,
        tree,
        [1, 2, 3, 4, 5, 6, 9, 9, 9],
        4,
        [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 9, 9]],
    )


def insert_touches(impl: ModuleType) -> None:
    """An insert counts as a use of its path."""
    tree = laid(tree_of([1, 2, 3], [7]), impl, "insert")
    before = snapshot(tree)
    tree.insert([1, 2, 3, 4], [500, 501, 502, 503])
    for tokens in ([1, 2, 3], [1, 2, 3, 4]):
        node = node_at(tree, tokens)
        words = (
            f"after an insert of [1, 2, 3, 4] at tick {tree.now}, last_access of {name_of(node)} is "
            f"{node.last_access}"
        )
        expect(node.last_access == tree.now, words, pictures(tree, before))


def insert_keeps_its_own_slots(impl: ModuleType) -> None:
    """Changing the list of slots afterwards must not change the tree."""
    tree, slots = tree_of(), [500, 501]
    impl.insert(tree, [1, 2], slots)
    slots[:] = [0, 0]
    kept = _ints(node_at(tree, [1, 2]).slots)
    expect(
        kept == [500, 501],
        "the tree shares its list of slots with whoever called insert: keep a copy",
        pictures(tree),
        hint=2,
    )


def _insert(impl: ModuleType, tree: Tree, tokens: list[int], prefix: int, ends: list[list[int]]) -> None:
    before, asked = snapshot(tree), list(tokens)
    laid(tree, impl, "insert")
    page, size = tree.page_size, tree.evictable_size
    tree.now += 1
    answer = impl.insert(tree, tokens, list(range(500, 500 + len(tokens))))
    where = f"insert({asked})" + (f" with pages of {page}" if page > 1 else "")
    two = isinstance(answer, tuple) and len(answer) == 2
    expect(two, f"{where} returned {answer!r}; it should be (prefix_len, node)")
    done, node = answer
    whole_pages = int(page > 1)  # which hint
    expect(hasattr(node, "parent"), f"{where} returned {node!r} in the place of a node")
    shown = pictures(tree, before)
    expect(
        done == prefix,
        f"{where} says that {done!r} tokens were in the tree before; it was {prefix}",
        shown,
        whole_pages,
    )
    stop = len(asked) // page * page
    words = f"{where} returned {name_of(node)}, whose path spells {spelled(node)} instead of {asked[:stop]}"
    expect(spelled(node) == asked[:stop], words, shown, whole_pages)
    found = sorted(spelled(node) for node in tree.nodes() if node is not tree.root)
    expect(
        found == sorted(ends),
        f"{where}: nodes should end after {sorted(ends)}, they end after {found}",
        shown,
        whole_pages or 2,
    )
    tree.evictable_size = size + stop - prefix
    whole(tree, where, before, hint=2)


# ---------------------------------------------------------------------- a claim


def one_child(impl: ModuleType) -> None:
    """Your prompts, inserted into the engine's tree."""
    prompts = impl.claim_two_subtrees()
    good = isinstance(prompts, list) and all(isinstance(prompt, list) for prompt in prompts)
    expect(good, f"claim_two_subtrees() gave {prompts!r}; a list of lists of token ids is asked for")
    expect(
        1 <= len(prompts) <= 4, f"claim_two_subtrees() gave {len(prompts)} prompts; one to four are asked for"
    )
    cache = RadixCache(page_size=1)
    slot = 1
    for prompt in prompts:
        cache.insert(RadixKey(prompt), range(slot, slot + len(prompt)))
        slot += len(prompt)
    counts = [len(node.children) for node in cache.walk() if node is not cache.root]
    words = (
        f"after inserting {prompts}, the nodes below the root have {counts} children: none has exactly one"
    )
    expect(1 in counts, words, [("the engine's tree", cache.snapshot())], hint=int(len(prompts) > 1))


FIRST_TWO = {"common_prefix": underlay.common_prefix, "split_node": underlay.split_node}
EXERCISES = [
    Exercise(
        "common_prefix",
        2,
        [prefixes_by_hand, page_size_is_one_unless_said, large_ids],
        hints=(
            "Walk along both until they differ or one of them ends. How many whole pages that is, is asked "
            "only then.",
            "Round down once, at the end: `length // page_size * page_size`. With pages of 2, `[1, 2, 3]` "
            "and `[1, 2, 3]` share 2 tokens: the third does not fill a page.",
        ),
    ),
    Exercise(
        "split_node",
        2,
        [split_by_hand, split_in_the_middle_of_the_tree, split_pages, split_a_locked_node],
        hints=(
            "Draw parent, upper half and node before you write. Tokens and slots are cut in two, both "
            "halves were just used, and four links change.",
            "A request that holds the node holds the end of its path. If the node kept the upper part, that "
            "request's lock would end too early. So the node stays the lower half, and the new one above it "
            "gets the same `lock_ref`, `hits` and the rest.",
            "The parent's child is now the upper half; the upper half's parent is the parent; the upper "
            "half's child is the node; the node's parent is the upper half. A child is filed under its own "
            "first page, so the node is filed anew.",
        ),
    ),
    Exercise(
        "match_prefix",
        3,
        [
            match_in_an_empty_tree,
            match_whole_nodes,
            match_splits,
            match_whole_pages,
            match_touches_the_path_only,
            match_gives_its_own_list,
        ],
        hints=(
            "At each node, look up the first page of what is left: "
            "`node.children.get(tuple(rest[:page_size]))`. None: done.",
            "`common_prefix(child.tokens, rest, page_size)` is at least one page, since the first page is "
            "equal. If it is all of the child, go on below it; if not, split the child there, take the "
            "upper half, done.",
            "`last_access = tree.now` for every node on the path, whether it was split or not; the root has "
            "no time. The slots go into a list of your own: `child.slots` is the tree's.",
        ),
        stands_on=FIRST_TWO,
    ),
    Exercise(
        "insert",
        2,
        [
            insert_into_an_empty_tree,
            insert_what_is_there,
            insert_parts,
            insert_longer,
            insert_shorter,
            insert_whole_pages,
            insert_touches,
            insert_keeps_its_own_slots,
        ],
        hints=(
            "`match_prefix` does most of the work. What it did not find becomes one leaf below the node "
            "that it returned.",
            "Cut tokens and slots to whole pages before you begin. If the match then found everything, you "
            "are done: what was there keeps its slots.",
            "`tree.new_node(...)` makes it, of the tokens and slots behind the match and with lists of its "
            "own. It is still to be filed among its parent's children, under its first page.",
        ),
        stands_on={**FIRST_TWO, "match_prefix": underlay.match_prefix},
    ),
    Exercise(
        "claim_two_subtrees",
        1,
        [one_child],
        hints=(
            "A node is split where two prompts part. What if they do not part at all?",
            "Let one prompt go on where another one ended. Try it: `RadixCache(page_size=1)`, a few "
            "inserts, and `[(len(node), len(node.children)) for node in cache.walk()]`.",
        ),
    ),
]
