"""What an engine is made of, as the engine sees it: `machine.py` puts a Llama's parts together.

    pending = runner.launch(batch)   the forward pass: each layer writes K and V, attention reads them
    results = pending.read()         for each request: what comes next, and whether its KV may be used

The plain runner (runner.py) computes at once; fast/ replays captured steps, or launches one before the last
was read; simulate.py computes nothing and answers given tokens. A runner keeps no books: slots were handed
out before, and the engine commits what is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minirad.cache.node import IntSequence, Slots
from minirad.cache.prefix_cache import PrefixCache
from minirad.config import EngineConfig
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.scheduler import Batch

NOT_A_NUMBER = "what was computed for it is not a number (NaN); its KV is not kept"

Prompt = str | IntSequence


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
    """Computes batches. vocab_size: of its model."""

    vocab_size: int

    def launch(self, batch: Batch) -> Pending: ...
    def overlap(self, engine: Any) -> Any: ...
    def copy_slots(self, source: Slots, target: Slots) -> None: ...


@dataclass(frozen=True)
class Parts:
    """What an engine works with.

    config: with every "auto" filled in; note: what is missing if that fell back. rows: the runner's table of
    slots. texts: prompts to token ids, replies to text, and where a reply ends (tokenizing.py).
    """

    config: EngineConfig
    runner: Any  # a Runner; with model, pool and attention where it has these
    cache: PrefixCache
    rows: ReqToTokenPool
    texts: Any  # a tokenizing.Tokenizing
    model_path: Any = None
    note: str = ""
