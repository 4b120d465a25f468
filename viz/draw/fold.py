"""Which nodes of a large tree are drawn: the heaviest subtrees and what happened just now.

Works on arrays (view.table) and looks only at children of what is drawn, so it takes milliseconds for 100,000
nodes. Small trees are folded by warmth instead (tree.py).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from viz.trace import View
from viz.view.columns import Table

LARGE = 3000  # nodes; from here on a tree is folded by weight
CARDS = 48  # of a large tree, beside those that were opened
OPENED = 40  # cards more for each time that a parent is opened
HOT = 24  # of the nodes to which something happened, the latest
CALM = frozenset(("cached", "host", "stale", "hole", "unseen"))


class Heaviest:
    """The places (in `table`) that are drawn, and what hangs from a fold because its parent is not drawn.

    folds: place of a drawn parent (len(table): the root), nodes below it that are not drawn, their tokens.
    """

    def __init__(self, view: View, opened: Collection[int], cards: int) -> None:
        ghosts = [node for number, node in view.ghosts.items() if number not in view.nodes]
        self.table: Table = view.table.with_ghosts(ghosts)
        self._below, self._root = self.table.below, len(self.table)
        self.shown: set[int] = {self._root}
        self.hanging: dict[int, int] = {}  # place -> the nearest parent that is drawn
        hidden = self._show_hot(self._hot(view), cards * 2 // 3)
        self._fill({self._root}, cards)
        self._open(opened)
        self._hang([place for place in hidden if place not in self.shown])
        self.folds = self._folded()

    def _hot(self, view: View) -> list[int]:
        """Where the latest of the nodes stand to which something happened, or that are in use."""
        hot = [number for number in view.marked if view.status[number] not in CALM]
        places = self.table.places(np.array(sorted(hot), np.int64))
        places = places[places < self._root]
        focus = np.isin(self.table.id[places], np.array(sorted(view.focus), np.int64))
        order = np.lexsort((self.table.id[places], self.table.last_access[places], focus))
        latest: list[int] = places[order[: -HOT - 1 : -1]].tolist()
        return latest

    def _show_hot(self, hot: Sequence[int], room: int) -> list[int]:
        """Shows them with all above them, as far as there is room; those for which there is none."""
        left = []
        for place in hot:
            path: list[int] = []
            while place not in self.shown and len(path) + len(self.shown) <= room:
                path.append(place)
                place = int(self.table.above[place])
            if place in self.shown:
                self.shown.update(path)
            else:
                left.append(path[0] if path else place)
        return left

    def _fill(self, parents: Iterable[int], room: int) -> None:
        """Below these parents (and what is drawn below them) shows next always the heaviest subtree."""
        heap: list[tuple[int, int]] = []
        for parent in parents:
            self._offer(heap, parent, room)
        while heap and len(self.shown) <= room:
            _, place = heapq.heappop(heap)
            if place not in self.shown:
                self.shown.add(place)
                self._offer(heap, place, room)

    def _offer(self, heap: list[tuple[int, int]], parent: int, room: int) -> None:
        """Puts children of a parent up for choice: the heaviest, and further down what is drawn already."""
        stack = [parent]
        while stack:
            children = self._below.children(stack.pop())
            if len(children) > room:
                heaviest = np.argpartition(-self._below.tokens[children], room)[:room]
                drawn = np.array([place for place in children.tolist() if place in self.shown], np.int64)
                children = np.concatenate([children[heaviest], drawn])
            for place in children.tolist():
                if place in self.shown:
                    stack.append(place)
                else:
                    heapq.heappush(heap, (-int(self._below.tokens[place]), place))

    def _open(self, opened: Collection[int]) -> None:
        """Shows some more below each opened parent that is drawn, also below those that this brings."""
        times = Counter(opened)
        numbers = np.array(sorted(number for number in times if number), np.int64)
        places = [place for place in self.table.places(numbers).tolist() if place < self._root]
        left = {place: times[int(self.table.id[place])] for place in places}
        if 0 in times:
            left[self._root] = times[0]
        while due := left.keys() & self.shown:
            for place in sorted(due):
                more = OPENED * left.pop(place)
                room = len(self.shown) + more - 1
                children = self._below.children(place).tolist()
                hidden = [child for child in children if child not in self.shown]
                hidden.sort(key=lambda child: (-int(self._below.tokens[child]), child))
                self.shown.update(hidden[:more])
                self._fill(hidden[:more], room)

    def _hang(self, places: Sequence[int]) -> None:
        if not places:
            return
        self.shown.update(places)
        drawn = np.zeros(self._root + 1, bool)
        drawn[list(self.shown)] = True
        nearest = np.append(self.table.above, self._root)
        for _ in range(self._root.bit_length() + 1):
            nearest = np.where(drawn[nearest], nearest, nearest[nearest])
        for place in places:
            if drawn[self.table.above[place]]:
                continue  # its parent hangs, too
            if drawn[nearest[place]]:
                self.hanging[place] = int(nearest[place])
            else:  # it is its own ancestor
                self.shown.discard(place)

    def _folded(self) -> list[tuple[int, int, int]]:
        nodes, tokens = self._below.nodes, self._below.tokens
        left = {place: [int(nodes[place]), int(tokens[place])] for place in self.shown}
        for place in self.shown:
            if place != self._root:
                parent = self.hanging.get(place, int(self.table.above[place]))
                left[parent][0] -= int(nodes[place])
                left[parent][1] -= int(tokens[place])
        for place in self.shown - {self._root}:  # itself
            left[place][0] -= 1
            left[place][1] -= int(self.table.units[place])
        return [(place, count, total) for place, (count, total) in sorted(left.items()) if count > 0]

    def id(self, place: int) -> int:
        """The number of the node at a place; 0 for the root."""
        return int(self.table.id[place]) if place < self._root else 0
