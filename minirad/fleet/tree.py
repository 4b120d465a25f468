"""All ranks' blocks as one radix tree, kept up to date, and told as few events.

Where blocks of several ranks have the same content, they are one *cell* of the tree: cells are known by their
parent, tokens and namespace (ranks of vLLM hash with different seeds), and by the hash only where tokens are
not told. A *node* is a run of cells that the same ranks hold in the same media, and of which each has one
successor only.

    tree = FleetTree()
    tree.take(0, Stored(...))        # any number of them
    events = tree.changes(tick=17)   # what a ReplayState needs to come from before to now: net changes

`take` only notes which cells changed. `changes` looks at these and at their neighbours, so that its cost is
what changed and not how large the tree is. What it tells is in such an order that each event fits the state
that it meets: nodes are divided, left, shortened, held otherwise, stored, moved, left (what had something to
be moved away from it), joined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from typing import Any

from minirad.errors import require
from minirad.fleet.blocks import Block, Listener, RankBlocks, Space
from minirad.fleet.wire import Hash, Record
from minirad.observe.event import Event
from minirad.observe.fleet_events import (
    LONGEST_TEXT,
    MAYBE,
    NodeDivided,
    NodeExtended,
    NodeHeld,
    NodeLeft,
    NodeLost,
    NodeMoved,
    NodeShortened,
    NodesJoined,
    NodeStored,
    count_blocks,
    held_texts,
    is_lost,
)
from minirad.observe.snapshot import State

Key = tuple[Any, ...]
Held = tuple[tuple[int, str], ...]  # (rank, "CPU+GPU"), ranks in their order

_NO_LETTER = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(slots=True, eq=False)
class Cell:
    """A block of the merged tree. users: each rank's block with this content, or several of them by hash.

    held: as of the last `changes`. node: the run it is in; up, down: its neighbours there. dead: it left the
    tree, as nobody has such a block any more.
    """

    above: Cell | None
    key: Key
    tokens: tuple[int, ...]
    size: int
    pairs: bool
    space: Space
    seen: bool
    users: dict[int, Block | dict[Hash, Block]] = field(default_factory=dict)
    kids: dict[Key, Cell] = field(default_factory=dict)
    held: Held = ()
    node: Node | None = None
    up: Cell | None = None
    down: Cell | None = None
    dead: bool = False


@dataclass(slots=True, eq=False)
class Node:
    """A run of cells, as it was told. above: the number of its parent; kids: how many nodes are below it."""

    id: int
    above: int
    first: Cell
    last: Cell
    units: int
    blocks: int
    namespace: int
    held: Held
    created: int
    last_access: int
    kids: int = 0


@dataclass(slots=True)
class _Rank:
    """What a rank's forest tells the tree."""

    tree: FleetTree
    number: int

    def placed(self, block: Block) -> None:
        """A block is new, or stands elsewhere, or has other tokens; then so does all that is below it."""
        self.tree._place(self.number, block)

    def held(self, block: Block) -> None:
        """A block's media changed."""
        self.tree._dirty[block.place] = None

    def gone(self, block: Block) -> None:
        """A block left the forest."""
        self.tree._leave(self.number, block)

    def cleared(self, blocks: list[Block]) -> None:
        """All blocks of the forest are gone."""
        for block in blocks:
            self.tree._leave(self.number, block)


class FleetTree:
    """All ranks in one radix tree. ranks: each rank's forest; sums: blocks of each rank by medium.

    blocks: what makes a rank's forest (a learner's own, lessons/grading/subscriber.py).
    """

    def __init__(self, blocks: Callable[[Listener], RankBlocks] = RankBlocks) -> None:
        self._blocks = blocks
        self.ranks: dict[int, RankBlocks] = {}
        self.sums: dict[int, State] = {}
        self.nodes: dict[int, Node] = {}
        self.spaces: list[str] = [""]
        self._top: dict[Key, Cell] = {}
        self._dirty: dict[Cell, None] = {}
        self._next = 1
        self._tick = 0
        self._events: list[Event] = []
        self._space_of: dict[Space, list[int]] = {(): [0, 0]}  # its number, how many nodes are in it
        self._free_spaces: list[int] = []
        self._texts: dict[tuple[frozenset[str], frozenset[str]], str] = {}

    # ------------------------------------------------------------ what ranks tell

    def rank(self, number: int) -> RankBlocks:
        """A rank's forest; a new one where nothing was told of this rank."""
        if number not in self.ranks:
            self.ranks[number] = self._blocks(_Rank(self, number))
            self.sums[number] = {"media": {}, "maybe": 0}
        return self.ranks[number]

    def take(self, rank: int, event: Record) -> None:
        """Moves a rank's forest on by one event."""
        self.rank(rank).take(event)

    def clear(self, rank: int) -> None:
        """A rank holds nothing any more (it began anew)."""
        self.rank(rank).clear()

    def _place(self, rank: int, block: Block) -> None:
        """A block belongs to the cell with its content from now on, and with it what is below it."""
        todo = [block]
        while todo:
            block = todo.pop()
            old, cell = block.place, self._cell_for(block)
            if old is cell:
                continue
            block.place, block.tokens = cell, cell.tokens  # equal ones are kept once
            users = cell.users
            known = users.get(rank)
            if known is None:
                users[rank] = block
            elif isinstance(known, dict):
                known[block.hash] = block
            else:
                users[rank] = {known.hash: known, block.hash: block}
            self._dirty[cell] = None
            if old is None:
                continue
            self._remove_user(old, rank, block)
            if old.users or old.space != cell.space:
                todo.extend(block.children())
            else:
                self._move(old, cell, todo)

    def _cell_for(self, block: Block) -> Cell:
        """The cell with a block's content; its parent's cell is known."""
        above: Cell | None = None if block.above is None else block.above.place
        own = block.space if above is None else block.space[len(above.space) :]
        key: Key = block.tokens
        if not key:
            key = (block.seen, block.hash, block.size, own)
        elif own or block.pairs:
            key = (key, block.pairs, own)
        kids = self._top if above is None else above.kids
        cell = kids.get(key)
        if cell is None:
            cell = Cell(above, key, block.tokens, block.size, block.pairs, block.space, block.seen)
            kids[key] = cell
            if above is not None:
                self._dirty[above] = None
        return cell

    def _move(self, old: Cell, new: Cell, todo: list[Block]) -> None:
        """All that is below `old`, which nobody else has, is below `new`; what is there already: `todo`."""
        for key, cell in list(old.kids.items()):
            if not cell.users:
                continue
            if key in new.kids:
                for block in cell.users.values():
                    todo.extend(block.values() if isinstance(block, dict) else (block,))
            else:
                del old.kids[key]
                new.kids[key] = cell
                cell.above = new
                self._dirty[cell] = self._dirty[old] = self._dirty[new] = None

    def _leave(self, rank: int, block: Block) -> None:
        cell, block.place = block.place, None
        self._remove_user(cell, rank, block)

    def _remove_user(self, cell: Cell, rank: int, block: Block) -> None:
        known = cell.users[rank]
        if isinstance(known, dict):
            del known[block.hash]
            if len(known) == 1:
                cell.users[rank] = next(iter(known.values()))
        else:
            del cell.users[rank]
        self._dirty[cell] = None

    # ------------------------------------------------------------ what becomes of the nodes

    def changes(self, tick: int) -> list[Event]:
        """Events that lead from the state after the last call to the present one; tick: of this moment."""
        self._tick, self._events = tick, []
        self._bury()
        dirty, self._dirty = list(self._dirty), {}
        self._cut(dirty)
        gone = self._tell_shorter(dirty)
        for cell in dirty:
            if cell.node is not None and not cell.dead and cell.node.held != cell.held:
                self._tell_held(cell.node, cell.held)
        for cell in dirty:
            if cell.node is None and not cell.dead:
                self._tell_new(cell)
        for cell in dirty:
            if cell.node is not None and not cell.dead:
                self._tell_moved(cell)
        self._tell_left(gone)
        for cell in dirty:
            if not cell.dead:
                self._join(cell)
                if len(cell.kids) == 1:
                    self._join(next(iter(cell.kids.values())))
        require(not gone, "what left the tree has something below it")
        for cell in dirty:  # no circles of references are left behind: the collector has nothing to do
            if cell.dead:
                cell.above = cell.node = cell.up = cell.down = None
        events, self._events = self._events, []
        return events

    def _bury(self) -> None:
        """Cells that nobody has leave the tree; for the others it is noted anew who holds them."""
        todo = list(self._dirty)
        for cell in todo:  # grows meanwhile
            if cell.users:
                cell.held = self._held(cell)
            elif not cell.dead:
                cell.dead = True
                above = cell.above
                del (self._top if above is None else above.kids)[cell.key]
                if above is not None and above not in self._dirty:
                    self._dirty[above] = None
                    todo.append(above)

    def _held(self, cell: Cell) -> Held:
        found = []
        for rank, user in cell.users.items():
            if isinstance(user, dict):
                media = frozenset().union(*(block.media for block in user.values()))
                maybe = frozenset().union(*(block.maybe for block in user.values()))
            else:
                media, maybe = user.media, user.maybe
            if media or maybe:
                found.append((rank, self._media_text(media, maybe)))
        if len(found) > 1:
            found.sort()
        return tuple(found)

    def _media_text(self, media: frozenset[str], maybe: frozenset[str]) -> str:
        text = self._texts.get((media, maybe))
        if text is None:
            if len(self._texts) > 1000:
                self._texts.clear()
            names = sorted({_NO_LETTER.sub("_", medium)[:32] or "_" for medium in media})
            text = self._texts[media, maybe] = "+".join(names) if media else MAYBE
        return text

    @staticmethod
    def _is_joined(cell: Cell) -> bool:
        """A cell and the one above it are of one node."""
        above = cell.above
        return (
            above is not None and len(above.kids) == 1 and above.held == cell.held and above.seen
            and above.space == cell.space and above.pairs == cell.pairs
            and bool(above.tokens) == bool(cell.tokens)
        )  # fmt: skip

    def _cut(self, dirty: list[Cell]) -> None:
        """Divides the nodes of which a part leaves, or differs from its neighbour."""
        for cell in dirty:
            if cell.node is not None:
                if cell.up is not None and self._must_part(cell.up, cell):
                    self._divide(cell.up, cell)
                if cell.down is not None and self._must_part(cell, cell.down):
                    self._divide(cell, cell.down)

    def _must_part(self, upper: Cell, lower: Cell) -> bool:
        if lower.dead:
            return False  # they leave together, or the lower end does: `_tell_shorter`
        if upper.dead:
            return True
        return lower.above is not upper or not self._is_joined(lower)

    def _divide(self, end: Cell, begin: Cell) -> None:
        """The node of both is two nodes from now on. Costs what the smaller part has."""
        node = end.node
        assert node is not None
        up: Cell | None = end
        down: Cell | None = begin
        blocks = units_up = units_down = 0
        while up is not None and down is not None:
            blocks, units_up, units_down = blocks + 1, units_up + up.size, units_down + down.size
            up, down = up.up, down.down
        end.down = begin.up = None
        number, self._next = self._next, self._next + 1
        made = Node(
            number, node.above, node.first, end, units_up, blocks, node.namespace, node.held, node.created,
            node.last_access, 1,
        )  # fmt: skip
        if up is None:  # the upper part is the smaller one
            upper, lower = made, node
            lower.first = begin
        else:
            made.first, made.last, made.units, made.id, made.kids = (
                begin,
                node.last,
                units_down,
                node.id,
                node.kids,
            )
            upper, lower = node, made
            upper.last, upper.id, upper.kids = end, number, 1
        other = lower if made is upper else upper
        other.units, other.blocks = other.units - made.units, other.blocks - made.blocks
        lower.above = number
        self.nodes[upper.id], self.nodes[lower.id] = upper, lower
        self._label(made)
        self._space_of_node(node, 1)
        self._events.append(NodeDivided(upper.id, lower.id, upper.units, upper.blocks, self._tick))

    def _join(self, cell: Cell) -> None:
        """The node of a cell and the one above it are one node, if they have to be."""
        above, node = cell.above, cell.node
        if above is None or above.node is node or not self._is_joined(cell):
            return
        upper, lower = above.node, node
        assert upper is not None and lower is not None
        self._events.append(NodesJoined(upper.id, lower.id, self._tick))
        self._space_of_node(upper, -1)
        above.down, cell.up = cell, above
        del self.nodes[upper.id]
        kept, other = (lower, upper) if lower.blocks >= upper.blocks else (upper, lower)
        self._label(other, kept)
        kept.id, kept.above, kept.first, kept.last = lower.id, upper.above, upper.first, lower.last
        kept.units, kept.blocks, kept.kids = (
            upper.units + lower.units,
            upper.blocks + lower.blocks,
            lower.kids,
        )
        kept.created = min(upper.created, lower.created)
        kept.last_access = max(upper.last_access, lower.last_access)
        self.nodes[kept.id] = kept

    @staticmethod
    def _label(node: Node, new: Node | None = None) -> None:
        """The cells of a node know that they are of it (of `new`)."""
        cell: Cell | None = node.first
        last = node.last
        while cell is not None:
            cell.node = new or node
            cell = None if cell is last else cell.down

    # ------------------------------------------------------------ what is told

    def _tell_held(self, node: Node, held: Held) -> None:
        was, now = dict(node.held), dict(held)
        node.held = held
        for rank in sorted(was.keys() | now.keys()):
            before, after = was.get(rank, ""), now.get(rank, "")
            if before == after:
                continue
            lost = is_lost(before, after)
            kind = NodeLost if lost else NodeHeld
            self._events.append(kind(node.id, rank, before, after, node.blocks, self._tick))
            if not lost:
                node.last_access = self._tick
            count_blocks(self.sums[rank], before, -node.blocks)
            count_blocks(self.sums[rank], after, node.blocks)

    def _tell_shorter(self, dirty: list[Cell]) -> dict[int, Node]:
        """Nodes leave, and ends of nodes; returns those from below which something has to be moved first."""
        dead = [cell for cell in dirty if cell.dead and cell.node is not None]
        gone = {cell.node.id: cell.node for cell in dead if cell.node is not None and cell.node.first.dead}
        self._tell_left(gone)
        for cell in dead:
            above, node = cell.up, cell.node
            if node is None or above is None or above.dead:
                continue
            if node.kids:
                self._divide(above, cell)
                lower: Node | None = cell.node  # the lower part of it by now
                assert lower is not None
                gone[lower.id] = lower
                continue
            blocks, units = node.blocks, node.units
            at: Cell | None = cell
            while at is not None:
                node.blocks, node.units, at.node = node.blocks - 1, node.units - at.size, None
                at = at.down
            node.last, above.down, cell.up = above, None, None
            blocks, units = blocks - node.blocks, units - node.units
            self._events.append(NodeShortened(node.id, units, blocks, self._tick))
            for rank, media in node.held:
                count_blocks(self.sums[rank], media, -blocks)
        return gone

    def _tell_left(self, gone: dict[int, Node]) -> None:
        """Nodes that left and have nothing below them; of others, what is below has to be moved first."""
        for number in list(gone):
            node = gone.get(number)
            while node is not None and not node.kids:
                del gone[node.id], self.nodes[node.id]
                held = held_texts(node.held)
                self._events.append(NodeLeft(node.id, held, node.blocks, self._tick))
                for rank, media in node.held:
                    count_blocks(self.sums[rank], media, -node.blocks)
                self._space_of_node(node, -1)
                if node.above:
                    self.nodes[node.above].kids -= 1
                node = gone.get(node.above)

    def _tell_new(self, cell: Cell) -> None:
        """A cell that is in no node yet, after those above it."""
        path: list[Cell] = []
        at: Cell | None = cell
        while at is not None and at.node is None:
            path.append(at)
            at = at.above
        for cell in reversed(path):
            if cell.node is None:
                self._tell_run(cell)

    def _tell_run(self, cell: Cell) -> None:
        """The new cells from this one on that are of one node; the one above it is in a node."""
        run = [cell]
        while len(run[-1].kids) == 1:
            (below,) = run[-1].kids.values()
            if below.node is not None or not self._is_joined(below):
                break
            below.up, run[-1].down = run[-1], below
            run.append(below)
        tokens = tuple(chain.from_iterable(each.tokens for each in run))
        units = sum(each.size for each in run)
        above = cell.above.node if cell.above is not None else None
        if above is not None and self._is_joined(cell):
            node = above
            cell.up, node.last.down = node.last, cell
            node.last = run[-1]
            node.units, node.blocks, node.last_access = node.units + units, node.blocks + len(run), self._tick
            self._events.append(NodeExtended(node.id, tokens, units, len(run), self._tick))
        else:
            node = self._new_node(run, units, above, tokens)
        for each in run:
            each.node = node
        for rank, media in node.held:
            count_blocks(self.sums[rank], media, len(run))

    def _new_node(self, run: list[Cell], units: int, above: Node | None, tokens: tuple[int, ...]) -> Node:
        cell, number, tick = run[0], self._next, self._tick
        self._next += 1
        parent = above.id if above is not None else 0
        namespace = self._namespace(cell.space)
        node = Node(number, parent, cell, run[-1], units, len(run), namespace, cell.held, tick, tick)
        self.nodes[number] = node
        if above is not None:
            above.kids += 1
        self._events.append(
            NodeStored(
                number, parent, tokens, units, len(run), cell.pairs, namespace, self.spaces[namespace],
                cell.seen, held_texts(cell.held), tick,
            )
        )  # fmt: skip
        return node

    def _tell_moved(self, cell: Cell) -> None:
        node = cell.node
        assert node is not None
        if node.first is not cell:
            return
        parent = 0
        if cell.above is not None:
            assert cell.above.node is not None
            parent = cell.above.node.id
        if parent != node.above:
            for number, kids in ((node.above, -1), (parent, 1)):
                if number:
                    self.nodes[number].kids += kids
            node.above = parent
            self._events.append(NodeMoved(node.id, parent, self._tick))

    # ------------------------------------------------------------ namespaces

    def _namespace(self, space: Space) -> int:
        """The number of a namespace, in which there is one node more."""
        known = self._space_of.get(space)
        if known is None:
            number = heappop(self._free_spaces) if self._free_spaces else len(self.spaces)
            text = ", ".join(space)
            text = text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
            self.spaces[number : number + 1] = [text]
            known = self._space_of[space] = [number, 0]
        known[1] += 1
        return known[0]

    def _space_of_node(self, node: Node, nodes: int) -> None:
        """So many nodes more (fewer) are in a node's namespace; one without nodes gives its number back."""
        space = node.first.space
        known = self._space_of[space]
        known[1] += nodes
        if not known[1] and space:
            del self._space_of[space]
            heappush(self._free_spaces, known[0])

    # ------------------------------------------------------------ as data

    def snapshot(self) -> State:
        """Spaces, sums and nodes as of the last `changes`, in the shape of a state's tree."""
        return {
            "spaces": list(self.spaces),
            "sums": {rank: {**sums, "media": dict(sums["media"])} for rank, sums in self.sums.items()},
            "nodes": [self._node(self.nodes[number]) for number in sorted(self.nodes)],
        }

    def _node(self, node: Node) -> State:
        cells = list(_cells(node))
        return {
            "id": node.id, "parent": node.above,
            "tokens": list(chain.from_iterable(cell.tokens for cell in cells)), "units": node.units,
            "blocks": node.blocks, "pairs": node.first.pairs, "slots": [], "namespace": node.namespace,
            "lock_ref": 0, "last_access": node.last_access, "created": node.created, "hits": 0, "priority": 0,
            "held": {str(rank): media for rank, media in node.held}, "seen": node.first.seen,
        }  # fmt: skip

    def check(self) -> None:
        """Everything recomputed, between `changes` and the next event (for tests)."""
        require(not self._dirty and not self._events, "there are changes that were not told")
        found: dict[int, int] = {}
        cells = 0
        todo = list(self._top.values())
        while todo:
            cell = todo.pop()
            cells += 1
            require(bool(cell.users) and not cell.dead, f"a cell with key {cell.key} that nobody has")
            require(cell.held == self._held(cell), f"cell {cell.key} is held by {cell.held}")
            node = cell.node
            require(node is not None and self.nodes.get(node.id) is node, f"cell {cell.key} is in no node")
            assert node is not None
            inside = cell.above is not None and cell.above.node is node
            require(inside == self._is_joined(cell), f"n{node.id} is not a run as long as it can be")
            require(cell.up is (cell.above if inside else None), f"n{node.id} is not in order")
            require(inside or node.first is cell, f"n{node.id} does not begin with {cell.key}")
            if not inside:
                above = cell.above.node.id if cell.above is not None and cell.above.node is not None else 0
                require(node.above == above, f"n{node.id} is below n{node.above}, not n{above}")
                found[above] = found.get(above, 0) + 1
            for child in cell.kids.values():
                require(child.above is cell, f"cell {child.key} does not know its parent")
            todo.extend(cell.kids.values())
        for node in self.nodes.values():
            run = list(_cells(node))
            cells -= len(run)
            sizes = len(run), sum(cell.size for cell in run), found.get(node.id, 0)
            require((node.blocks, node.units, node.kids) == sizes, f"n{node.id} is not {sizes}")
            require(node.held == node.first.held, f"n{node.id} is told as held by {node.held}")
        require(cells == 0, f"{cells} cells are in no node")
        spaces = sum(count for _, count in self._space_of.values())
        require(spaces == len(self.nodes), f"{spaces} nodes in namespaces, {len(self.nodes)} nodes")


def _cells(node: Node) -> Iterator[Cell]:
    cell: Cell | None = node.first
    while cell is not None:
        yield cell
        cell = cell.down
