"""What a model said once need not be computed again, where only the cache's decisions are asked for.

    replies = Replies()
    run(Engine(config), replies)           # the model answers, and `replies.keep` notes what it said
    run(replies.engine(other_config))      # the same engine but for the model: it says what was said before

A reply depends on prompt, parameters and sample, never on what was cached, evicted or batched with it: a test
compares both ways of running. So the tree, the allocator and the scheduler of a second run do exactly what
they would do with the model. A prompt that was not answered before ends that run with `Unsaid`.

Computes nothing, and imports no torch: where the model answers, the caller has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from minirad.cache.radix_cache import RadixCache
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.outputs import GenerationOutput
from minirad.parts import Parts, Result
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.schedule.request import Request
from minirad.schedule.scheduler import Batch
from minirad.tokenizing import Tokenizing

Key = tuple[bytes, SamplingParams, int]


class Unsaid(LookupError):
    """The model has not been asked this."""


class Replies:
    """Replies of one model, by prompt, parameters and sample."""

    def __init__(self) -> None:
        self.first: Engine | None = None  # with the model that said them
        self._said: dict[Key, list[int]] = {}

    def keep(
        self, engine: Engine, prompt: Sequence[int], params: SamplingParams, output: GenerationOutput
    ) -> None:
        """Notes what was said. A sample without a seed of its own hangs on what came before: not noted."""
        self.first = self.first or engine
        if not params.temperature or params.seed is not None:
            self._said[_key(prompt, params, output.index)] = output.token_ids

    def engine(self, config: EngineConfig) -> Engine:
        """An engine that says these replies. ValueError for another model than the one that said them."""
        assert self.first is not None, "nothing has been said yet"
        whole = self.first.config
        if config.model != whole.model:
            raise ValueError(f"these are replies of model {whole.model!r}, not of {config.model!r}")
        config = replace(config, device=whole.device, dtype=whole.dtype, attention=whole.attention,
                         max_context=whole.max_context)  # fmt: skip
        assert config.max_context is not None
        cache = RadixCache(config.page_size, config.eviction_policy)
        rows = ReqToTokenPool(config.max_running, config.max_context)
        texts = Tokenizing(self.first.tokenizer, None, self.first.eos_ids)
        return Engine(parts=Parts(config, Said(self), cache, rows, texts, self.first.model_path))

    def next_token(self, request: Request) -> list[int]:
        """What a sample says next; Unsaid where the model has to be asked."""
        said = self._said.get(_key(request.prompt, request.params, request.index))
        if said is None or len(said) <= len(request.output):
            raise Unsaid(f"request {request.id} asks what was not asked before")
        return said[len(request.output) : len(request.output) + 1]


def _key(prompt: Any, params: SamplingParams, index: int) -> Key:
    return np.asarray(prompt, dtype=np.int64).tobytes(), params, index


class Said:
    """A runner (parts.Runner) that computes nothing. model: of the engine that said it."""

    def __init__(self, replies: Replies) -> None:
        assert replies.first is not None
        self.replies, self.model = replies, replies.first.model
        self.vocab_size: int = replies.first.runner.vocab_size

    def launch(self, batch: Batch) -> Repeated:
        return Repeated(self.replies, batch)

    def overlap(self, engine: Engine) -> None:
        return None

    def copy_slots(self, source: Any, target: Any) -> None:
        pass


class Repeated:
    """A batch that was launched."""

    def __init__(self, replies: Replies, batch: Batch) -> None:
        self.replies, self.batch = replies, batch

    def read(self) -> list[Result]:
        """As a runner's: what comes next, of each request whose prompt is computed and of its branches."""
        return [self._result(request) if request.computed else Result() for request in self.batch.requests]

    def _result(self, request: Request) -> Result:
        samples = [request, *map(request.branch, range(1, 1 + request.unbranched))]
        first, *others = [Result(tuple((t, 0.0) for t in self.replies.next_token(each))) for each in samples]
        first.branches = others
        return first
