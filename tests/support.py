"""Shared by the engine's tests: a tree that tells nothing, a cold reference, a model with a script."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from minirad import events as ev
from minirad.cache.radix_cache import RadixCache
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.errors import HostCopyError
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


class TransformersReference:
    """transformers' own Llama with a model's weights: what it would say next, at any place of any text."""

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        import transformers

        self._model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
        self._model.load_state_dict(weights, strict=False)
        self._model.tie_weights()
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [n, vocab] of the next token after each of n tokens."""
        key = tuple(tokens)
        if key not in self._known:
            if len(self._known) > 20_000:
                self._known.clear()
            self._known[key] = self._model(torch.tensor([key])).logits[0].float()
        return self._known[key]

    def agrees(self, tokens: Sequence[int], token: int) -> bool:
        """Whether `token` is what comes next after `tokens`, or as likely as that within rounding."""
        after = self.logits(tokens)[-1]
        return bool(after[token] >= after.max() - 1e-4)


class LateCopier:
    """A Copier around another one: copies end later, some cannot begin, some backups fail at their end."""

    def __init__(self, inner: Any, seed: int, failing: float = 0.15) -> None:
        self._inner, self._rng, self._failing = inner, random.Random(seed), failing

    def _may_fail(self) -> None:
        if self._rng.random() < self._failing:
            raise HostCopyError("as the test wishes")

    def backup(self, device_slots: Any, host_slots: Any) -> Any:
        self._may_fail()
        arrives = self._rng.random() >= self._failing
        return _LateCopy(self._inner.backup(device_slots, host_slots), self._rng.randrange(5), arrives)

    def load(self, host_slots: Any, device_slots: Any) -> Any:
        self._may_fail()
        return _LateCopy(self._inner.load(host_slots, device_slots), self._rng.randrange(5), True)

    def fence(self) -> None:
        self._inner.fence()


class _LateCopy:
    def __init__(self, inner: Any, polls: int, arrives: bool) -> None:
        self._inner, self._polls, self._arrives = inner, polls, arrives

    def done(self) -> bool:
        self._polls -= 1
        return self._polls < 0

    def wait(self) -> bool:
        self._polls = 0
        return self._inner.wait() and self._arrives


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
