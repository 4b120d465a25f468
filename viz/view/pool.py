"""The owners of the pages of the KV pool, and of host memory, at a position.

Takes time by what is in use, not by the size of the pool: pages that are free are in no list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minirad.observe.event import ReplayState
from minirad.observe.snapshot import State
from viz.trace import Decode, View, has_tiers, ids_as_text, key_tokens, tier_of
from viz.view.columns import Ints, PageOwners


@dataclass(frozen=True, slots=True, eq=False)
class Owner:
    """What some pages belong to. kind: "node", "private" (one request's, not yet the tree's) or "evicted"
    (free since that node left in this step or scene); in host memory the tier of the node that they copy.

    node: 0 for a request. pages: in the order of `tokens`, which fill them page by page (none: not known).
    """

    kind: str
    node: int
    request: str
    locked: bool
    pages: Sequence[int]
    tokens: Sequence[int] = ()

    @property
    def name(self) -> str:
        """n7, R3, or x7 for what n7 left free."""
        return f"{'x' if self.kind == 'evicted' else 'n'}{self.node}" if self.node else self.request

    def texts(self, decode: Decode, page_size: int) -> Iterator[tuple[int, str]]:
        """Each page with what its tokens say."""
        for at, number in enumerate(self.pages):
            tokens = self.tokens[at * page_size : (at + 1) * page_size]
            yield number, decode(tokens) if tokens else ""


@dataclass(frozen=True, slots=True)
class Pool:
    """Pages 1 to `last` (page 0 is a dummy) and their owners; where two name one page, the later has it."""

    page_size: int
    last: int
    owners: tuple[Owner, ...]

    def by_page(self) -> dict[int, Owner]:
        """The owner of each page in use, those past `last` left out."""
        owned: dict[int, Owner] = {}
        for owner in self.owners:
            owned.update(dict.fromkeys(owner.pages, owner))
        return {number: owner for number, owner in owned.items() if 0 < number <= self.last}

    def runs(self) -> list[tuple[Owner | None, int]]:
        """Pages 1 to `last` as runs of one owner (None: free): (owner, how many)."""
        found: list[tuple[Owner | None, int]] = []
        owned, at = self.by_page(), 1
        for number in sorted(owned):
            owner = owned[number]
            if number > at:
                found.append((None, number - at))
            if found and found[-1][0] is owner:
                found[-1] = (owner, found[-1][1] + 1)
            else:
                found.append((owner, 1))
            at = number + 1
        return [*found, (None, self.last + 1 - at)] if at <= self.last else found


def plain(state: State | ReplayState | View) -> State:
    """Any of the three in the shape of `Engine.snapshot()`."""
    if isinstance(state, View):
        return state.state
    return state.snapshot() if isinstance(state, ReplayState) else state


def device_pool(state: State | ReplayState | View) -> Pool:
    """The KV pool; of a View also the pages that were freed by what was evicted in it."""
    ghosts: Mapping[int, State] = state.ghosts if isinstance(state, View) else {}
    state = plain(state)
    size = int(state["tree"]["page_size"])
    private = [
        Owner("private", 0, name, True, list(dict.fromkeys(slot // size for slot in slots)))
        for name, request in state["requests"].items()
        if (slots := request["slots"][request["protected"] :])
    ]
    nodes = [
        Owner("node", node["id"], "", node["lock_ref"] > 0, _pages(node["slots"], size), key_tokens(node))
        for node in state["tree"]["nodes"]
    ]
    gone = [Owner("evicted", node["id"], "", False, _pages(node["slots"], size)) for node in ghosts.values()]
    # A tree on its own has no pool: as many pages as it uses.
    used = max((number for owner in (*private, *nodes) for number in owner.pages), default=0)
    return Pool(size, int(state["kv_tokens"]) // size or used, (*gone, *private, *nodes))


@dataclass(frozen=True, slots=True)
class PageMap:
    """The owner of every page as numbers, for pools of any size: what `device_pool` says, made quickly.

    cells: of pages 1 to the last: a node's id; 0: free; -1, -2, ...: private, of `names`; below -len(names):
    free since a node left, `gone` in order. locked: whether the page cannot be evicted.
    """

    names: tuple[str, ...]
    gone: tuple[int, ...]
    cells: Ints
    locked: npt.NDArray[np.bool_]

    def name(self, code: int) -> str:
        """n7, R3, x7 for what n7 left free, or nothing."""
        if code >= 0:
            return f"n{code}" if code else ""
        at = -code - 1
        return self.names[at] if at < len(self.names) else f"x{self.gone[at - len(self.names)]}"


def page_map(view: View, with_ghosts: bool = True) -> PageMap:
    """The KV pool of a position. Where two own one page, a node has it before a request, and that before a
    node that left."""
    state = view.state
    size, table = int(state["tree"]["page_size"]), view.table
    owners = view.once("cells", lambda: _owners(view, size))
    private = {
        name: np.array(slots, np.int64) // size
        for name, request in state["requests"].items()
        if (slots := request["slots"][request["protected"] :])
    }
    ghosts = view.ghosts if with_ghosts else {}
    left = {number: np.array(_pages(node["slots"], size), np.int64) for number, node in ghosts.items()}
    owned = owners.nonzero()[0]
    # A tree on its own has no pool: as many pages as it uses.
    used = max((int(each.max()) for each in (owned, *private.values()) if len(each)), default=0)
    last = int(state["kv_tokens"]) // size or used
    size_of_all = 1 + max([last, used, *(int(each.max()) for each in left.values() if len(each))])
    cells, locked = np.zeros(size_of_all, np.int64), np.zeros(size_of_all, bool)
    for at, each in enumerate(left.values()):
        cells[each] = -len(private) - at - 1
    for at, each in enumerate(private.values()):
        cells[each], locked[each] = -at - 1, True
    cells[owned] = owners[owned]
    locked[owned] = np.isin(owners[owned], table.id[table.lock_ref > 0])
    return PageMap(tuple(private), tuple(left), cells[1 : last + 1], locked[1 : last + 1])


def _owners(view: View, size: int) -> Ints:
    owners = PageOwners(size)
    owners.update({}, view.nodes, list(view.nodes))
    return owners.cells


def host_pool(state: State | ReplayState | View) -> Pool | None:
    """Host memory; None without a host tier."""
    state = plain(state)
    if not has_tiers(state):
        return None
    size = int(state["tree"]["page_size"])
    owners = [
        Owner(tier_of(node), node["id"], "", False, _pages(node["host"], size), key_tokens(node))
        for node in state["tree"]["nodes"]
        if node["host"]
    ]
    return Pool(size, int(state["tree"]["host_tokens"]) // size, tuple(owners))


def _pages(slots: Sequence[int], size: int) -> list[int]:
    """The pages of a node's slots: it has whole ones."""
    return [slot // size for slot in slots[::size]]


# ---------------------------------------------------------------------- page by page


@dataclass(frozen=True, slots=True)
class PoolPage:
    """One page of the pool. owner: "free", "node" or "private" (one request's, not yet the tree's).

    node, request: the owner. users: requests whose rows read it. locked: it cannot be evicted now.
    text: what its tokens say.
    """

    number: int
    owner: str
    node: int | None = None
    request: str | None = None
    users: tuple[str, ...] = ()
    locked: bool = False
    text: str = ""

    @property
    def label(self) -> str:
        """n7, R3, or nothing."""
        return f"n{self.node}" if self.owner == "node" else self.request or ""


def pages(state: State | ReplayState | View, decode: Decode | None = None) -> list[PoolPage]:
    """Every page of the pool in order, page 0 (a dummy) left out. Without `decode`, text is token ids."""
    state, decode = plain(state), decode or ids_as_text
    pool = device_pool(state)
    users = _users(state, pool.page_size)
    owned: dict[int, PoolPage] = {}
    for owner in pool.owners:
        for number, text in owner.texts(decode, pool.page_size):
            owned[number] = PoolPage(
                number, owner.kind, owner.node or None, owner.request or None,
                tuple(users.get(number, ())), owner.locked, text,
            )  # fmt: skip
    return [owned.get(number) or PoolPage(number, "free") for number in range(1, pool.last + 1)]


def _users(state: State, size: int) -> dict[int, list[str]]:
    """The requests whose rows read a page."""
    users: dict[int, list[str]] = {}
    for name, request in state["requests"].items():
        for number in sorted({slot // size for slot in request["slots"]}):
            users.setdefault(number, []).append(name)
    return users


@dataclass(frozen=True, slots=True)
class HostPage:
    """One page of host memory. tier: what its node's is (viz.trace.TIERS), or "free". node 0: free."""

    number: int
    tier: str = "free"
    node: int = 0
    text: str = ""


def host_pages(state: State | ReplayState | View, decode: Decode | None = None) -> list[HostPage]:
    """Every page of host memory in order, page 0 left out; none without a host tier."""
    pool, decode = host_pool(state), decode or ids_as_text
    if pool is None:
        return []
    owned = {
        number: HostPage(number, owner.kind, owner.node, text)
        for owner in pool.owners
        for number, text in owner.texts(decode, pool.page_size)
    }
    return [owned.get(number) or HostPage(number) for number in range(1, pool.last + 1)]


def runs(numbers: Sequence[int]) -> list[list[int]]:
    """[3, 4, 5, 9] as [[3, 3], [9, 1]]: first and length of each run."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found


def ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers as sorted ranges, first and last: 7 1 2 3 -> [[1, 3], [7, 7]]."""
    return [[first, first + count - 1] for first, count in runs(sorted(set(numbers)))]
