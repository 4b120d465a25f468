"""What passes between the engine and whatever computes: `launch` begins a batch, `read` waits for it.

    pending = runner.launch(batch)   the forward pass: each layer writes K and V, attention reads them
    results = pending.read()         for each request: what comes next, and whether its KV may be used

runner.py computes at once; fast/ replays captured steps, or launches one before the last was read. A runner
keeps no books: slots were handed out before, and the engine commits what is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from minirad.cache.radix_cache import Slots
from minirad.schedule.scheduler import Batch

NOT_A_NUMBER = "what was computed for it is not a number (NaN); its KV is not kept"


@dataclass(slots=True)
class Result:
    """What a batch's computation says of one of its requests.

    tokens: what comes next, none, one or several, each with its log-probability; none between chunks.
    branches: the same of each further sample that branches off it now (n > 1).
    prompt_logprobs: of the prompt tokens whose log-probability was asked for in this batch.
    error: why it cannot go on, and its KV must not be used; "" if it may.
    """

    tokens: Sequence[tuple[int, float]] = ()
    branches: Sequence[Result] = ()
    prompt_logprobs: Sequence[float] = ()
    error: str = ""


class Pending(Protocol):
    """A batch that was launched."""

    def read(self) -> list[Result]:
        """Waits for it: one result for each request of the batch, in its order."""
        ...


class Runner(Protocol):
    """Computes batches. vocab_size, eos_ids: of its model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...
    def launch(self, batch: Batch) -> Pending: ...
    def copy_slots(self, source: Slots, target: Slots) -> None: ...
    def poison(self, slots: Slots) -> None: ...
