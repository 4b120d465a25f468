"""What is the same on all ranks: the inputs that they take, and a step in which they compare.

    take what rank 0 said -> schedule -> compare the batch -> launch -> read -> commit -> compare all

The batch is compared before it is launched: ranks that compute different batches would wait for each other.
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
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Batch

SCHEDULING, COMPUTING, COMMITTING, AGREED = "scheduling", "computing", "committing", "agreed"


class RankSteps(Engine):
    """An engine of one rank. Everything that ranks do alike; rank 0 tells (engine.py), others follow."""

    group: Group
    number: int
    _phase = AGREED
    _now = 0  # the step that is running, or ran last
    _copier: AgreedCopier | None = None

    def _on_this_rank(self) -> None:
        """What an engine of one rank does otherwise than one that is alone."""
        self.runner.launch = with_masks(self.runner.launch, self.group, self.runner.vocab_size)
        if hasattr(self.cache, "copier"):
            cache: Any = self.cache
            self._copier = cache.copier = AgreedCopier(cache.copier, self.group)

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

    def _schedule(self) -> Batch | None:
        batch = super()._schedule()
        self._compare_batch(batch or Batch())
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
        if self.config.rank_digest:
            self._compare(digest.of_batch(batch))

    def _compare_all(self) -> None:
        self._phase = AGREED
        if self.config.rank_digest:
            mine = digest.of_engine(self)
            self._compare(mine)
            self._agreed(mine)

    def _compare(self, mine: bytes, failure: str = "") -> None:
        """RanksDiffer unless every rank has the same; see `_differs`."""
        everyone = self.group.gather(mine)
        if any(each != everyone[0] for each in everyone):
            parts = self.group.gather_any((digest.parts_of(self), failure))
            self._differs(parts)

    def _failed(self, error: Exception) -> None:
        """A step went wrong here: while others wait to compare, what differs is found out; else all end."""
        if self.group.broken or self._phase == AGREED or isinstance(error, RanksDiffer):
            return
        if self._phase == COMPUTING or not self.config.rank_digest:
            raise self.group.fail(error) from error
        self._phase = AGREED
        failure = f"{type(error).__name__}: {error}"
        self._compare(digest.of_text(failure), failure)

    def _send_frames(self) -> None:
        """What was recorded goes to rank 0, while somebody watches."""

    def _agreed(self, mine: bytes) -> None:
        """All ranks have the same."""

    def _differs(self, parts: list[tuple[Any, str]]) -> None:
        """They have not; what each has is known."""
