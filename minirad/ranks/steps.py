"""What is the same on all ranks: the inputs that they take, and a step in which they compare.

    take what rank 0 said -> schedule -> compare the batch -> launch -> read -> commit -> compare all

The batch is compared before it is launched: ranks that compute different batches would wait for each other.
Whatever the ranks exchange in a step says first what it is for: ranks that are at different places would wait
for each other, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minirad.engine import Engine
from minirad.errors import RanksDiffer
from minirad.parts import Result
from minirad.ranks import digest
from minirad.ranks.copies import AgreedCopier
from minirad.ranks.group import Group
from minirad.ranks.masks import with_masks
from minirad.schedule.request import RUNNING, Request
from minirad.schedule.scheduler import Batch

SCHEDULING, COMPUTING, COMMITTING, AGREED = "scheduling", "computing", "committing", "agreed"
BATCH, WHOLE, FAILURE, COPY, MASK = range(5)  # what the ranks meet for


class RankSteps(Engine):
    """An engine of one rank. Everything that ranks do alike; rank 0 tells (engine.py), others follow."""

    group: Group
    number: int
    _phase = AGREED
    _now = 0  # the step that is running, or ran last
    _copier: AgreedCopier | None = None
    _differ = ""  # in what the ranks differ: they have nothing to say to each other any more

    def _on_this_rank(self) -> None:
        """What an engine of one rank does otherwise than one that is alone."""
        self.group.engines.add(self)
        self.runner.launch = with_masks(self.runner.launch, self.group, self.runner.vocab_size, self._meet)
        if hasattr(self.cache, "copier"):
            cache: Any = self.cache
            self._copier = cache.copier = AgreedCopier(cache.copier, self.group.rank, self._meet)

    def let_go(self) -> None:
        """The run is over: a captured step holds on to the group that is about to end."""
        for owner, name in ((self.runner, "graphs"), (self.overlap, "in_flight")):
            if hasattr(owner, name):
                setattr(owner, name, None)

    def _enqueue(self, request: Request) -> None:
        # Numbers are handed out when they are first asked for, and only listeners ask.
        self.cache_manager.tree.namespace_number((request.extra_key, self.config.bigram_keys))
        super()._enqueue(request)

    def _begin(self) -> None:
        self._now, self._phase = self.steps + 1, SCHEDULING
        self.group.place = f"step {self._now}"

    def _step(self) -> Any:
        try:
            report = super()._step()
        except Exception as error:
            self._failed(error)
            raise
        self._send_frames()
        return report

    def _ahead(self) -> None:
        """As `Overlap.advance`, or a whole step where it is not possible."""
        self._begin()
        try:
            assert self.overlap is not None
            self._compare_batch(Batch(self.scheduler.running))
            if self.overlap.advance():
                self._compare_all()
                return
            self.overlap.drain()
        except Exception as error:
            self._failed(error)
            raise
        self._phase = SCHEDULING
        RankSteps._step(self)

    def _drain(self) -> None:
        """Where a rank is lost, a step in flight waits for it on a GPU, for ever: it is not read."""
        if self.group.broken and self.overlap is not None and self.overlap.in_flight is not None:
            flight, self.overlap.in_flight = self.overlap.in_flight, None
            self.scheduler.put_back([each for each in flight.requests if each.status == RUNNING])
        super()._drain()

    def _schedule(self) -> Batch | None:
        batch = super()._schedule()
        try:
            self._compare_batch(batch or Batch())
        except BaseException:  # it has rows and slots already, and is not launched
            if batch is not None:
                self.scheduler.put_back(batch.requests)
            raise
        return batch

    def commit(self, batch: Batch, results: Sequence[Result]) -> None:
        self._phase = COMMITTING
        super().commit(batch, results)

    def _report(self, batch: Batch, seconds: float, before: tuple[int, int, int]) -> Any:
        self._compare_all()
        return super()._report(batch, seconds, before)

    # ------------------------------------------------------------ comparing

    def _compare_batch(self, batch: Batch) -> None:
        self._phase = COMPUTING
        self._require_alike()
        if self.config.rank_digest:
            self._compare(BATCH, digest.of_batch(batch))

    def _compare_all(self) -> None:
        self._phase = AGREED
        self._require_alike()
        if self.config.rank_digest:
            mine = digest.of_engine(self)
            self._compare(WHOLE, mine)
            self._agreed(mine)

    def _compare(self, what: int, mine: bytes, failure: str = "") -> None:
        """RanksDiffer unless every rank has the same."""
        everyone = self._meet(what, mine, failure)
        if any(each != everyone[0] for each in everyone):
            self._find_out(failure)

    def _meet(self, what: int, mine: bytes = b"", failure: str = "") -> list[bytes]:
        """Every rank's few bytes, on every rank; RanksDiffer if they did not all come for the same."""
        self._require_alike()
        everyone = self.group.gather(bytes([what]) + mine.ljust(digest.SIZE, b"\0"))
        if any(each[0] != what for each in everyone):
            self._find_out(failure)
        return [each[1:] for each in everyone]

    def _find_out(self, failure: str) -> None:
        """What each rank has comes together; raises RanksDiffer."""
        try:
            parts = digest.parts_of(self)
        except Exception as error:  # in the middle of a step, after who knows what
            parts, failure = digest.NOTHING, failure or f"{type(error).__name__}: {error}"
        self._differs(self.group.gather_any((parts, failure)))

    def _require_alike(self) -> None:
        """RankLost or RanksDiffer, if that was found before: who caught it may not have known what it was."""
        self.group.require_whole()
        if self._differ:
            raise RanksDiffer(self._differ)

    def _failed(self, error: Exception) -> None:
        """A step went wrong here: while others wait to compare, what differs is found out; else all end."""
        if self.group.broken or self._phase == AGREED or isinstance(error, RanksDiffer):
            return
        if self._phase == COMPUTING or not self.config.rank_digest:
            raise self.group.fail(error) from error
        self._phase = AGREED
        failure = f"{type(error).__name__}: {error}"
        self._compare(FAILURE, digest.of_text(failure), failure)

    def _send_frames(self) -> None:
        """What was recorded goes to rank 0, while somebody watches."""

    def _agreed(self, mine: bytes) -> None:
        """All ranks have the same."""

    def _differs(self, parts: list[tuple[Any, str]]) -> None:
        """They have not; what each has is known."""
