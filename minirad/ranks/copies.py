"""Copies between the tiers, on several ranks: rank 0 decides, the others do likewise.

On a GPU it is a matter of time which copies have ended when a step begins, and of luck whether one can begin.
So rank 0 says with each message how many have ended so far, and the others wait for these; and of each copy
it says whether it began, and whether it arrived: at once in the middle of a step, else with the next message.
A rank that is lost then is told of by the next comparison: a tree in the middle of evicting would be torn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from minirad.cache.node import Slots
from minirad.errors import HostCopyError, RankLost, RanksDiffer

COPY = 3  # steps.py: what the ranks meet for


class AgreedCopier:
    """A Copier (tiers/hiradix_cache.py) around a rank's own, `inner`.

    meet: gives every rank's few bytes to every rank (steps.py).
    live: a step is running on all ranks. decisions: on rank 0 those that the others were not told yet, on
    the others those that were told and are not due yet. ended: how many copies have ended, as rank 0 said.
    """

    def __init__(self, inner: Any, rank: int, meet: Callable[[int, bytes], list[bytes]]) -> None:
        self.inner, self.rank, self.meet = inner, rank, meet
        self.live = False
        self.decisions: deque[bool] = deque()
        self.ended = 0
        self._begun = 0
        self._under_way: deque[AgreedCopy] = deque()

    def backup(self, device_slots: Slots, host_slots: Slots) -> AgreedCopy:
        return self._begin(lambda: self.inner.backup(device_slots, host_slots))

    def load(self, host_slots: Slots, device_slots: Slots) -> AgreedCopy:
        return self._begin(lambda: self.inner.load(host_slots, device_slots))

    def fence(self) -> None:
        self.inner.fence()

    def _begin(self, begin: Callable[[], Any]) -> AgreedCopy:
        copy, problem = None, None
        try:
            copy = begin()
        except Exception as error:
            problem = error
        if not self.decide(copy is not None):
            if copy is not None:
                copy.wait()
            raise HostCopyError(f"it could not begin: {problem or 'on rank 0'}")
        if copy is None:
            raise RuntimeError(f"a copy between the tiers began on rank 0, and not here: {problem}")
        self._begun += 1
        self._under_way.append(AgreedCopy(self, copy, self._begun))
        return self._under_way[-1]

    def decide(self, mine: bool) -> bool:
        """What rank 0 says; there, what is so, and everywhere once the ranks have lost each other."""
        if self.rank == 0 and not self.live:
            self.decisions.append(mine)
            return mine
        if self.rank != 0 and self.decisions:
            return self.decisions.popleft()
        try:
            return bool(self.meet(COPY, bytes([mine]))[0][0])
        except (RankLost, RanksDiffer):
            return mine

    def count(self) -> int:
        """Rank 0: how many have ended by now."""
        for copy in self._under_way:
            if copy.number > self.ended:
                if not copy.inner.done():
                    break
                self.ended = copy.number
        return self.ended

    def over(self, copy: AgreedCopy) -> None:
        self._under_way.remove(copy)


class AgreedCopy:
    """A Copy that has ended where rank 0 said so."""

    def __init__(self, copier: AgreedCopier, inner: Any, number: int) -> None:
        self._copier, self.inner, self.number = copier, inner, number

    def done(self) -> bool:
        return self.number <= self._copier.ended

    def wait(self) -> bool:
        try:
            arrived = bool(self.inner.wait())
        except Exception:
            arrived = False
        self._copier.over(self)
        return self._copier.decide(arrived)
