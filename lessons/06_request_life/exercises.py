"""What lesson 06 asks for, and its open cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from lessons.grading import Exercise, Failure, expect
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.errors import InvariantError
from minirad.schedule.cache_manager import path_slots

# ---------------------------------------------------------------------- what the student is given


@dataclass(eq=False)
class Request:
    """A request as exercise.py describes it."""

    name: str
    tokens: list[int] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    protected: int = 0
    node: Any = None


class Tree:
    """The engine's tree, which evicts whatever nobody holds as soon as a lock is given back."""

    def __init__(self, page_size: int, greedy: bool = True) -> None:
        self.page_size, self.greedy = page_size, greedy
        self.cache = RadixCache(page_size)
        self.evicted: list[int] = []

    def insert(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[int, Any]:
        result = self.cache.insert(RadixKey(list(tokens)), list(slots))
        return int(result.prefix_len), result.last_node

    def path_slots(self, node: Any) -> list[int]:
        self._alive(node, "path_slots")
        return [int(slot) for slot in path_slots(node)]

    def lock(self, node: Any) -> None:
        self._alive(node, "lock")
        self.cache.inc_lock_ref(node)

    def unlock(self, node: Any) -> None:
        self._alive(node, "unlock")
        try:
            self.cache.dec_lock_ref(node)
        except InvariantError as error:
            raise Failure(f"tree.unlock was called for a node that is not locked: {error}") from error
        if self.greedy:
            self.evict(self.cache.evictable_size)

    def evict(self, tokens: int) -> None:
        self.evicted += self.cache.evict(tokens).slots.tolist()

    def slots(self) -> list[int]:
        return [int(s) for node in self.cache.walk() if node.parent is not None for s in node.slots]

    def own_locks(self, node: Any) -> int:
        """Locks on a node itself, without those that its children's give it."""
        return int(node.lock_ref - sum(child.lock_ref for child in node.children.values()))

    def _alive(self, node: Any, what: str) -> None:
        expect(
            node is self.cache.root or getattr(node, "parent", None) is not None,
            f"tree.{what} was called for a node that is not in the tree any more: once it was unlocked, it "
            "was evicted. Lock the new end first, then let the old one go",
            hint=2,
        )


class World:
    """Requests over one pool and one tree, with the books of every page."""

    def __init__(self, page_size: int, greedy: bool = True) -> None:
        self.page = page_size
        self.tree = Tree(page_size, greedy)
        self.next_page = 1
        self.live: list[Request] = []
        # What all commits freed; a page comes again as soon as it is free, as this one of an earlier request.
        self.freed: list[int] = list(range(page_size, 2 * page_size))
        self.free: set[int] = set(self.freed)
        self.given: set[int] = set()

    def admit(self, name: str, tokens: Sequence[int], cached: int | None = None) -> Request:
        """A new request on what the tree has of its tokens; `cached`: not more than that."""
        match = self.tree.cache.match_prefix(RadixKey(list(tokens)))
        self.tree.lock(match.last_node)
        most = max(len(tokens) - 1, 0) if cached is None else cached
        use = min(match.length, most) // self.page * self.page
        request = Request(name, list(tokens[:use]), match.slots[:use].tolist(), use, match.last_node)
        self.live.append(request)
        return request

    def compute(self, request: Request, tokens: Sequence[int]) -> None:
        """The forward pass over further tokens: each gets a slot, a new page where one begins."""
        for token in tokens:
            begins = len(request.row) % self.page == 0
            slot = self._free_page() * self.page if begins else request.row[-1] + 1
            request.row.append(slot)
            request.tokens.append(token)
            self.given.add(slot)

    def _free_page(self) -> int:
        """The lowest page that is free, or one that was never used."""
        used = {slot // self.page for slot in self.given - self.free}
        page = min({slot // self.page for slot in self.free} - used, default=self.next_page)
        self.next_page = max(self.next_page, page + 1)
        slots = set(range(page * self.page, (page + 1) * self.page))
        self.free -= slots
        self.given -= slots
        return page

    def commit(self, impl: ModuleType, request: Request, finished: bool, about: str) -> None:
        """The student's commit, and everything that must be true after it."""
        where = f"{about}: after commit_{'finished' if finished else 'unfinished'}"
        before = list(request.row)
        tokens, protected, old = list(request.tokens), request.protected, request.node
        known = min(self.tree.cache.peek(RadixKey(tokens)), len(tokens) // self.page * self.page)
        aligned = len(tokens) // self.page * self.page
        all_freed = list(self.freed)
        if finished:
            impl.commit_finished(self.tree, request, all_freed)
        else:
            impl.commit_unfinished(self.tree, request, all_freed)
        hint = int(not finished)  # what is freed
        old_ones, freed = all_freed[: len(self.freed)], all_freed[len(self.freed) :]
        picture = [("the row before", _say(before, tokens)), ("the row after", _say(request.row, tokens))]
        wanted = before[protected:known] + (before[aligned:] if finished else [])
        freed = [int(slot) for slot in freed]
        expect(
            old_ones == self.freed,
            f"{where}: `freed` held {self.freed} before, and begins with {old_ones} now: append, and leave "
            "what is there",
            picture,
            hint,
        )
        for slot in sorted(set(freed)):
            expect(
                freed.count(slot) == 1,
                f"{where}: slot {slot} was freed {freed.count(slot)} times",
                picture,
                hint,
            )
        for position, slot in enumerate(before):
            if (slot in freed) != (slot in wanted):
                raise Failure(f"{where}: {_fate(position, slot, protected, known, aligned)}", picture, hint)
        expect(
            set(freed) == set(wanted),
            f"{where}: freed {freed}, of which not all were in the row",
            picture,
            hint,
        )
        self.freed += freed
        self.free |= {*freed, *self.tree.evicted}
        self.tree.evicted.clear()
        if finished:
            self.live.remove(request)
            self._is_gone(request, where)
        else:
            self._goes_on(request, where, tokens, aligned, before, old)
        self._locks(where, hint=1 if finished else 2)
        self._books(where, picture, hint)

    def _goes_on(
        self, request: Request, where: str, tokens: list[int], aligned: int, before: list[int], old: Any
    ) -> None:
        row = [int(slot) for slot in request.row]
        picture = [("the row before", _say(before, tokens)), ("the row after", _say(row, tokens))]
        expect(list(request.tokens) == tokens, f"{where}: request.tokens was changed", picture)
        expect(
            len(row) == len(before),
            f"{where}: the row has {len(row)} slots for {len(tokens)} tokens",
            picture,
        )
        expect(
            request.protected == aligned,
            f"{where}: protected is {request.protected}; {aligned} tokens are in whole pages of {self.page}",
            picture,
            hint=2,
        )
        end = self.tree.cache.peek(RadixKey(tokens[:aligned]))
        expect(end == aligned, f"{where}: only {end} of {aligned} tokens are in the tree", picture)
        theirs = self.tree.cache.match_prefix(RadixKey(tokens[:aligned]), count_hit=False)
        for position, slot in enumerate(theirs.slots.tolist()):
            expect(
                row[position] == slot,
                f"{where}: row[{position}] is slot {row[position]}, but the tree's slot for that token is "
                f"{slot}: the row reads what is not its own",
                picture,
                hint=1,
            )
        tail = row[aligned:] == before[aligned:]
        expect(tail, f"{where}: the tail's slots must stay in the row", picture, hint=1)
        expect(
            request.node is theirs.last_node,
            f"{where}: request.node is {_node(request.node)}; the whole pages end at "
            f"{_node(theirs.last_node)}",
            picture,
            hint=2,
        )

    def _is_gone(self, request: Request, where: str) -> None:
        for name, wanted in (("row", []), ("protected", 0), ("node", None)):
            got = getattr(request, name)
            expect(
                (list(got) if name == "row" else got) == wanted,
                f"{where}: request.{name} is {got!r} instead of {wanted!r}; a finished request holds nothing",
                hint=2,
            )

    def _locks(self, where: str, hint: int) -> None:
        for node in self.tree.cache.walk():
            if node.parent is None:
                continue
            held = sum(request.node is node for request in self.live)
            own = self.tree.own_locks(node)
            expect(
                own == held,
                f"{where}: {_node(node)} is locked {own} times, and {held} live requests end there",
                hint=hint,
            )

    def _books(self, where: str, picture: list[tuple[str, Any]], hint: int) -> None:
        """Every slot that was ever given out is free, the tree's, or one request's: exactly once."""
        self.tree.cache.check()
        free = self.free
        owners: dict[int, list[str]] = {slot: [] for slot in self.given}
        for slot in self.tree.slots():
            owners[slot].append("the tree")
        for request in self.live:
            for slot in request.row[request.protected :]:
                owners[slot].append(request.name)
        for slot, names in owners.items():
            names += ["free"] if slot in free else []
            who = " and ".join(names) or "nobody, and it is not free: a leak"
            expect(len(names) == 1, f"{where}: slot {slot} belongs to {who}", picture, hint)


def _fate(position: int, slot: int, protected: int, known: int, aligned: int) -> str:
    if position < protected:
        return f"slot {slot} (token {position}) was freed, but it is the tree's, not the request's"
    if position < known:
        return f"slot {slot} (token {position}) was not freed, but the tree has that token: it is a duplicate"
    if position < aligned:
        return f"slot {slot} (token {position}) was freed, but it is new in the tree, which owns it now"
    return (
        f"slot {slot} (token {position}) lies in the tail, behind the last whole page: it is freed when the "
        "request has finished, and only then"
    )


def _say(row: Sequence[int], tokens: Sequence[int]) -> str:
    return "\n".join(f"token {t:4} in slot {s}" for t, s in zip(tokens, row, strict=False)) or "(empty)"


def _node(node: Any) -> str:
    if node is None:
        return "None"
    return "the root" if node.parent is None else f"n{node.id}"


# ---------------------------------------------------------------------- commits


def nothing_shared(impl: ModuleType) -> None:
    """A first request, nobody else."""
    for page in (1, 2):
        world = World(page)
        one = world.admit("R1", [1, 2, 3])
        world.compute(one, [1, 2, 3])
        world.commit(impl, one, False, f"R1 alone, pages of {page}")


def same_prompt_twice(impl: ModuleType) -> None:
    """Two requests computed the same prompt in one step: the second finds the first's KV."""
    world = World(1)
    one, two = world.admit("R1", [1, 2, 3]), world.admit("R2", [1, 2, 3])
    world.compute(one, [1, 2, 3])
    world.compute(two, [1, 2, 3])
    world.commit(impl, one, False, "R1, the first")
    world.commit(impl, two, False, "R2, whose tokens R1 has inserted")
    world.compute(two, [7])
    world.commit(impl, two, False, "R2 after one more token")


def last_token_again(impl: ModuleType) -> None:
    """A prompt that was cached whole: its last token was computed again."""
    world = World(1, greedy=False)
    first = world.admit("R1", [1, 2, 3, 4])
    world.compute(first, [1, 2, 3, 4])
    world.commit(impl, first, False, "R1")
    again = world.admit("R2", [1, 2, 3, 4])
    world.compute(again, [4])
    world.commit(impl, again, False, "R2, which used 3 cached tokens and computed the 4th again")


def tail_stays(impl: ModuleType) -> None:
    """Six tokens on pages of four: a tail of two."""
    world = World(4)
    one = world.admit("R1", [1, 2, 3, 4, 5, 6])
    world.compute(one, [1, 2, 3, 4, 5, 6])
    world.commit(impl, one, False, "six tokens, pages of 4")
    world.compute(one, [7, 8, 9])
    world.commit(impl, one, False, "nine tokens, pages of 4")


def less_than_a_page(impl: ModuleType) -> None:
    """Three tokens on a page of four: nothing can go into the tree."""
    world = World(4)
    one = world.admit("R1", [1, 2, 3])
    world.compute(one, [1, 2, 3])
    world.commit(impl, one, False, "three tokens, pages of 4")


def between_chunks(impl: ModuleType) -> None:
    """A prompt in three chunks; another request shares its beginning meanwhile."""
    world = World(2)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    one = world.admit("R1", prompt)
    world.compute(one, prompt[:3])
    world.commit(impl, one, False, "R1, first chunk of 3 tokens, pages of 2")
    two = world.admit("R2", [1, 2, 9, 9])
    world.compute(two, [9, 9])
    world.compute(one, prompt[3:6])
    world.commit(impl, one, False, "R1, second chunk")
    world.commit(impl, two, False, "R2")
    world.compute(one, prompt[6:])
    world.commit(impl, one, False, "R1, last chunk")


def finished_alone(impl: ModuleType) -> None:
    """A request ends; nobody else runs."""
    for page, size in ((1, 3), (4, 6), (4, 3), (2, 4)):
        world = World(page, greedy=False)
        tokens = list(range(1, size + 1))
        one = world.admit("R1", tokens)
        world.compute(one, tokens)
        world.commit(impl, one, True, f"{size} tokens, pages of {page}")


def finished_duplicate(impl: ModuleType) -> None:
    """Two requests with the same tokens end one after the other."""
    world = World(2, greedy=False)
    one, two = world.admit("R1", [1, 2, 3, 4, 5]), world.admit("R2", [1, 2, 3, 4, 5])
    for request in (one, two):
        world.compute(request, [1, 2, 3, 4, 5])
    world.commit(impl, one, True, "R1, the first to end")
    world.commit(impl, two, True, "R2, whose tokens R1 has inserted")


def finished_among_others(impl: ModuleType) -> None:
    """A request ends while another one goes on, on the same prefix and under a greedy tree."""
    world = World(1)
    one = world.admit("R1", [1, 2, 3])
    world.compute(one, [1, 2, 3])
    two = world.admit("R2", [1, 2, 3])
    world.compute(two, [1, 2, 3, 4])
    world.commit(impl, one, True, "R1, under a tree that evicts what nobody holds")
    world.commit(impl, two, True, "R2")


# ---------------------------------------------------------------------- chunks


def chunks_by_hand(impl: ModuleType) -> None:
    """Small plans."""
    for lengths, cached, chunk, page, wanted in [
        ([5, 3], [0, 0], 4, 1, [[(0, 0, 4)], [(0, 4, 5), (1, 0, 3)]]),
        ([3], [0], 8, 1, [[(0, 0, 3)]]),
        ([4, 4], [0, 0], 4, 1, [[(0, 0, 4)], [(1, 0, 4)]]),
        ([9], [0], 4, 1, [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 9)]]),
        ([5], [5], 4, 1, [[(0, 4, 5)]]),
        ([5], [3], 4, 1, [[(0, 3, 5)]]),
        ([6], [5], 4, 4, [[(0, 4, 6)]]),
        ([8], [8], 4, 4, [[(0, 4, 8)]]),
        ([6], [3], 4, 4, [[(0, 0, 4)], [(0, 4, 6)]]),
        ([2, 2, 2], [0, 1, 2], 3, 1, [[(0, 0, 2), (1, 1, 2)], [(2, 1, 2)]]),
        ([10, 1], [0, 0], 3, 4, [[(0, 0, 3)], [(0, 3, 6)], [(0, 6, 9)], [(0, 9, 10), (1, 0, 1)]]),
        ([], [], 4, 1, []),
        ([1], [0], 1, 1, [[(0, 0, 1)]]),
    ]:
        got = _plain(impl.plan_chunks(list(lengths), list(cached), chunk, page))
        call = f"plan_chunks({lengths}, {cached}, chunk_tokens={chunk}, page_size={page})"
        expect(got == wanted, f"{call} gave {got} instead of {wanted}", hint=2 if any(cached) else 1)
    got = _plain(impl.plan_chunks([2], [1], 4))
    expect(
        got == [[(0, 1, 2)]], f"plan_chunks([2], [1], 4) gave {got}; without a page size a page is one token"
    )


def _plain(steps: Any) -> list[list[tuple[int, ...]]]:
    return [[tuple(int(n) for n in piece) for piece in step] for step in steps]


# ---------------------------------------------------------------------- owners


def owners_by_hand(impl: ModuleType) -> None:
    """A healthy pool of four pages."""
    rows = {"R1": ([4, 5, 8, 9, 10], 2)}
    got = impl.page_owners(4, 4, [3, 4], [4, 5, 6, 7], rows)
    _same(got, {1: ["tree"], 2: ["R1"], 3: ["free"], 4: ["free"]},
          "4 pages of 4; free [3, 4], tree slots 4 to 7, R1's row [4, 5, 8, 9, 10], protected 2")  # fmt: skip


def owners_of_a_leak(impl: ModuleType) -> None:
    """A page that nobody claims, and one that two do."""
    got = impl.page_owners(3, 1, [1], [1], {})
    _same(got, {1: ["free", "tree"], 2: [], 3: []}, "3 pages of 1; page 1 is free and in the tree")
    got = impl.page_owners(2, 2, [], [2, 3], {"R2": ([2, 3, 4], 0), "R1": ([2, 3, 5], 2)})
    _same(got, {1: ["R2", "tree"], 2: ["R1", "R2"]},
          "2 pages of 2; tree slots 2 and 3; rows R1: [2, 3, 5], protected 2, R2: [2, 3, 4], protected 0",
          )  # fmt: skip


def _same(got: Any, wanted: dict[int, list[str]], what: str) -> None:
    expect(isinstance(got, dict), f"{what}: page_owners returned {type(got).__name__}, not a dict")
    for page, names in wanted.items():
        expect(page in got, f"{what}: page {page} is missing; every page from 1 on is to be listed")
        expect(
            list(got[page]) == names, f"{what}: page {page} should have {names}, it has {got[page]!r}", hint=1
        )
    extra = sorted(set(got) - set(wanted))
    expect(not extra, f"{what}: pages {extra} are not among those asked for")


COMMITS = [nothing_shared, same_prompt_twice, last_token_again, tail_stays, less_than_a_page, between_chunks]
ENDS = [finished_alone, finished_duplicate, finished_among_others]

EXERCISES = [
    Exercise(
        "commit_unfinished",
        4,
        COMMITS,
        hints=(
            "Write the row of a request with 9 tokens on pages of 4 on paper: `protected` is 4, and "
            "`tree.insert` says that 8 were there. Which slots are duplicates? Which is the tail? `insert` "
            "says all that you need, you look nothing up.",
            "Between `protected` and `prefix_len` the slots change twice. Read the duplicates out of the "
            "row before you overwrite them, and free those. Then point the row at the tree's slots: "
            "`tree.path_slots(node)` gives all of them from token 0 on, as many as are in whole pages. The "
            "simplest remap takes all of it.",
            "Lock the new end first, then unlock the old one: in between, the path would be held by nobody. "
            "And which slots may the request never free from now on? All in whole pages, its own new ones "
            "among them.",
        ),
    ),
    Exercise(
        "commit_finished",
        3,
        ENDS,
        hints=(
            "Two parts of the row: the duplicates, and the tail behind the last whole page. What is new in "
            "between is the tree's from now on.",
            "The lock to give back is the one that this request took: it is on `request.node`, not on the "
            "node that `insert` returned.",
            "Nothing: an empty row, `protected` 0, no node. So there is no row to remap and no new lock to "
            "take. Insert before you unlock: what nobody holds may go at once.",
        ),
    ),
    Exercise(
        "plan_chunks",
        3,
        [chunks_by_hand],
        hints=(
            "One number: what is left of this step's budget. A new step begins when it is 0 and somebody "
            "still has tokens.",
            "It begins all the same, with as many tokens as the budget has left, whole pages or not. The "
            "next step goes on with it before anybody else.",
            "A prompt that is cached to its end still computes one token, and with pages of 4 that means a "
            "whole page of it: the used part is cut to whole pages after the one token is taken off.",
        ),
    ),
    Exercise(
        "page_owners",
        2,
        [owners_by_hand, owners_of_a_leak],
        hints=(
            "Begin with an empty set for every page, then let free list, tree and rows claim theirs. A list "
            "that is sorted comes last.",
            "Two requests that share a prefix both read its pages. A row claims only what lies behind "
            "`protected`.",
        ),
    ),
]
