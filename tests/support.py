"""Shared by the engine's tests: a tree that tells nothing, a cold reference, a model with a script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from minirad import events as ev
from minirad.cache.radix_cache import RadixCache
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel
from minirad.outputs import GenerationOutput


class PlainCache:
    """The least that the engine asks of a tree: no events, no `lock_cost`, no `grow`, no `snapshot`."""

    def __init__(self, page_size: int = 1) -> None:
        self._inner = RadixCache(page_size)
        self.page_size = page_size

    def peek(self, key: Any) -> int:
        return self._inner.peek(key)

    def match_prefix(self, key: Any) -> Any:
        return self._inner.match_prefix(key)

    def insert(self, key: Any, slots: Any) -> Any:
        return self._inner.insert(key, slots)

    def inc_lock_ref(self, node: Any) -> int:
        return self._inner.inc_lock_ref(node)

    def dec_lock_ref(self, node: Any) -> int:
        return self._inner.dec_lock_ref(node)

    def evict(self, num_tokens: int) -> Any:
        return self._inner.evict(num_tokens)

    def walk(self) -> Iterator[Any]:
        return self._inner.walk()

    def reset(self) -> None:
        self._inner.reset()

    def check(self) -> None:
        self._inner.check()

    @property
    def evictable_size(self) -> int:
        return self._inner.evictable_size

    @property
    def protected_size(self) -> int:
        return self._inner.protected_size


class ColdReference:
    """The same model in an engine that shares nothing, one request at a time; remembers what it said."""

    def __init__(self, model: LlamaModel) -> None:
        self._engine = Engine(EngineConfig(kv_tokens=512, radix_cache=False), model=model)
        self._known: dict[Any, GenerationOutput] = {}

    def __call__(self, prompt: Sequence[int], params: SamplingParams, index: int = 0) -> GenerationOutput:
        key = (tuple(prompt), params, index)
        if key not in self._known:
            self._known[key] = self._engine.generate([list(prompt)], params)[index]
        return self._known[key]

    def require_equal(self, prompt: Sequence[int], params: SamplingParams, output: GenerationOutput) -> None:
        """Tokens equal, log-probabilities within float32's reach: a wrong KV slot shows in these first."""
        wanted = self(prompt, params, output.index)
        assert output.token_ids == wanted.token_ids, (list(prompt), params, output, wanted)
        assert output.finish_reason == wanted.finish_reason
        for ours, theirs in (
            (output.logprobs, wanted.logprobs),
            (output.prompt_logprobs, wanted.prompt_logprobs),
        ):
            assert len(ours) == len(theirs), (output, wanted)
            for a, b in zip(ours, theirs, strict=True):
                same = a is b if a is None or b is None else abs(a - b) <= 1e-5
                assert same, (list(prompt), params, output, wanted)


class ScriptedModel(LlamaModel):
    """Computes real KV, and then says what the script wants at each position of every request."""

    def __init__(self, config: Any, weights: Any, script: dict[int, int]) -> None:
        super().__init__(config, weights)
        self.script = script

    @torch.inference_mode()
    def forward(self, token_ids: Any, metadata: Any, pool: Any, backend: Any, logit_index: Any) -> Any:
        logits = super().forward(token_ids, metadata, pool, backend, logit_index)
        for row, position in enumerate(metadata.positions[logit_index].tolist()):
            token = self.script.get(position + 1)
            if token is not None:
                logits[row] = torch.where(torch.arange(logits.shape[1]) == token, 0.0, -50.0)
        return logits


def drive(engine: Engine, limit: int = 500) -> list[GenerationOutput]:
    """Steps until nothing is left to do; fails rather than going on for ever."""
    outputs = []
    for _ in range(limit):
        if not engine.has_work:
            return outputs
        outputs += engine.step().finished
    raise AssertionError(f"still at work after {limit} steps: {engine.snapshot()}")


def listen(engine: Engine, *kinds: type[ev.Event]) -> list[Any]:
    """A list that fills with the engine's events of these kinds (none given: all)."""
    heard: list[Any] = []
    for kind in kinds or (None,):
        engine.bus.subscribe(kind, heard.append)
    return heard
