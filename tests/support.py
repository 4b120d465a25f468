"""Shared by the tests: engines that check themselves, a tree that tells nothing, a cold reference."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minirad.attention.gather import GatherAttention
from minirad.attention.metadata import BatchEntry, build_metadata
from minirad.cache.radix_cache import RadixCache
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.errors import HostCopyError
from minirad.model.llama import LlamaConfig, LlamaModel
from minirad.model.sampler import position_uniform, prompt_logprobs, sample
from minirad.observe import events as ev
from minirad.outputs import GenerationOutput, StepReport
from minirad.tiers.host_tier import HostTier

ROOT = Path(__file__).resolve().parents[1]  # of the repository

TINY: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "eos_token_id": 2, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "hidden_act": "silu",
}  # fmt: skip


# Each policy's key, written down apart from the code under test: smallest first, ties by node id.
EVICTION_KEYS: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "lru": lambda n: (n.last_access,),
    "lfu": lambda n: (n.hits, n.last_access),
    "fifo": lambda n: (n.created,),
    "mru": lambda n: (-n.last_access,),
    "filo": lambda n: (-n.created,),
    "priority": lambda n: (n.priority, n.last_access),
    "slru": lambda n: (int(n.hits >= 2), n.last_access),
    "brrip": lambda n: (n.last_access + 600 * (2 * min(n.hits, 4) + int(n.created % 5 == 0)),),
}


def tiny_config(**changes: object) -> LlamaConfig:
    return LlamaConfig.from_dict({**TINY, **changes})


class CheckedEngine(Engine):
    """An engine that checks every invariant after every step."""

    def step(self) -> StepReport:
        report = super().step()
        self.check()
        return report

    def advance(self) -> None:
        super().advance()
        if self.overlap is None or self.overlap.in_flight is None:
            self.check()


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
    """What a model says to a prompt alone: no tree, no scheduler, no reuse, and the attention to read.

    A reply is judged in one forward pass of prompt and reply: if at each place the token is the one that the
    model draws after all before it, the model says just this reply. `within`: of log-probabilities.
    """

    def __init__(self, model: LlamaModel, within: float = 1e-5) -> None:
        self.model, self.within = model, within
        self._engine = Engine(EngineConfig(kv_tokens=512, radix_cache=False), model=model)
        self._known: dict[Any, list[GenerationOutput]] = {}
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, prompt: Sequence[int], params: SamplingParams, index: int = 0) -> GenerationOutput:
        """The whole reply, from an engine that shares nothing, one request at a time."""
        key = (tuple(prompt), params)
        if key not in self._known:
            self._known[key] = self._engine.generate([list(prompt)], params)
        return self._known[key][index]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [n, vocab] of the next token after each of n tokens."""
        key = tuple(tokens)
        if key not in self._logits:
            rows = np.arange(1, len(key) + 1)[None]
            metadata = build_metadata(rows, [BatchEntry(0, 0, len(key))], 1, self.model.device)
            pool, index = self.model.new_pool(len(key) + 1), torch.arange(len(key))
            forward = self.model.forward
            self._logits[key] = forward(torch.tensor(key), metadata, pool, GatherAttention(), index)
        return self._logits[key]

    def require_equal(
        self, prompt: Sequence[int], params: SamplingParams, output: GenerationOutput,
        allowed: Callable[[Sequence[int]], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Tokens equal, log-probabilities within float32's reach: a wrong KV slot shows in these first.

        allowed: the mask that the request had, for a reply so far.
        """
        assert not params.stop and (params.temperature == 0 or params.seed is not None), "not to be judged"
        text, start, told = [*prompt, *output.token_ids], len(prompt), (list(prompt), params, output)
        logits = self.logits(text)
        seed, places = params.seed or 0, range(start, len(text))
        uniforms = [position_uniform(seed, output.index, place) for place in places]
        masks = allowed and [allowed(output.token_ids[:at]) for at in range(len(uniforms))]
        each = [params] * len(uniforms)
        tokens, logprobs = sample(logits[start - 1 : len(text) - 1], each, uniforms, masks)
        assert output.token_ids == tokens, (told, tokens)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.model.config.eos_ids)}
        first = next((at for at, token in enumerate(tokens, 1) if token in ends), None)
        wanted = (first, "stop") if first else (params.max_new_tokens, "length")
        assert (len(tokens), output.finish_reason, output.error) == (*wanted, ""), (told, wanted)
        assert output.logprobs == pytest.approx(logprobs, rel=0, abs=self.within), (told, logprobs)
        if params.logprob_start is None:
            assert output.prompt_logprobs == [], told
            return
        after = torch.tensor(text[1:start], dtype=torch.int64)
        known = [None, *prompt_logprobs(logits[: start - 1], after)][params.logprob_start :]
        said = output.prompt_logprobs
        assert len(said) == len(known) and [each is None for each in said] == [
            each is None for each in known
        ], told
        pairs = [pair for pair in zip(said, known, strict=True) if pair[0] is not None]
        assert all(abs(a - b) <= self.within for a, b in pairs), (told, known)


class TransformersReference:
    """transformers' own Llama with a model's weights: what it would say next, at any place of any text."""

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        self._config, self._weights = config, weights
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @cached_property
    def _model(self) -> Any:
        import transformers  # four seconds, where somebody asks: these are made when a file is collected

        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**self._config)).eval()
        model.load_state_dict(self._weights, strict=False)
        model.tie_weights()
        return model

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [n, vocab] of the next token after each of n tokens."""
        key = tuple(tokens)
        if key not in self._known:
            if len(self._known) > 20_000:
                self._known.clear()
            self._known[key] = self._model(torch.tensor([key])).logits[0].float()
        return self._known[key]

    def agrees(self, tokens: Sequence[int], token: int, allowed: torch.Tensor | None = None) -> bool:
        """Whether `token` is what comes next after `tokens`, or as likely as that within rounding.

        allowed: bool `[vocab]`, the tokens that may come.
        """
        after = self.logits(tokens)[-1]
        if allowed is not None:
            after = after.masked_fill(~allowed, -torch.inf)
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

    def __getattr__(self, name: str) -> Any:  # fence, and what a disk tier asks for
        return getattr(self._inner, name)


class _LateCopy:
    def __init__(self, inner: Any, polls: int, arrives: bool) -> None:
        self._inner, self._polls, self._arrives = inner, polls, arrives

    def done(self) -> bool:
        self._polls -= 1
        return self._polls < 0

    def wait(self) -> bool:
        self._polls = 0
        return self._inner.wait() and self._arrives


class ToldTier:
    """The engine's HostTier with a side stream that is as slow as it may be.

    Copies end in their order, each when told (or waited for); until then none of its data has moved. A
    load's data, and that of all copies begun before it, moves at the latest when `fence` is called.
    Those begun next can be made to fail: at their start, or (backups) at their end.
    happened: counts what was refused.
    """

    def __init__(self, inner: HostTier, happened: Counter[str]) -> None:
        self._inner, self._happened = inner, happened
        self._moves: list[Any] = []  # of every copy begun; None once it is made, or will never be
        self._moved = 0
        self._fence_at = 0
        self.told = 0  # so many of the copies begun may have ended
        self.refuse_backups = self.refuse_loads = self.lose_backups = 0

    def backup(self, device_slots: Any, host_slots: Any) -> _ToldCopy:
        if self.refuse_backups:
            self.refuse_backups -= 1
            self._happened["(backup refused)"] += 1
            raise HostCopyError("no backup, as the test wishes")
        arrives = self.lose_backups == 0
        self.lose_backups -= not arrives
        source, target = device_slots.copy(), host_slots.copy()
        self._moves.append((self._inner.backup, source, target) if arrives else None)
        return _ToldCopy(self, len(self._moves), arrives)

    def load(self, host_slots: Any, device_slots: Any) -> _ToldCopy:
        if self.refuse_loads:
            self.refuse_loads -= 1
            self._happened["(load refused)"] += 1
            raise HostCopyError("no load, as the test wishes")
        self._moves.append((self._inner.load, host_slots.copy(), device_slots.copy()))
        self._fence_at = len(self._moves)
        return _ToldCopy(self, len(self._moves), True)

    def fence(self) -> None:
        self.move(self._fence_at)

    def move(self, number: int) -> None:
        """Moves the data of the first `number` copies that were begun."""
        for at in range(self._moved, number):
            if self._moves[at] is not None:
                make, source, target = self._moves[at]
                make(source, target)
                self._moves[at] = None
        self._moved = max(self._moved, number)

    def copied(self, host_slots: Any) -> torch.Tensor:
        """What lies in host slots; the tree asks for what was copied whole only."""
        return self._inner.copied(host_slots)

    def fill(self, host_slots: Any, kv: torch.Tensor) -> None:
        self._inner.fill(host_slots, kv)

    def fetched(self, device_slots: Any) -> torch.Tensor:
        self.move(self._fence_at)  # a GPU's stream has them in order
        return self._inner.fetched(device_slots)

    def tell(self, count: int) -> None:
        """So many further copies may end, of those that are begun."""
        self.told = min(self.told + count, len(self._moves))


class _ToldCopy:
    """The `number`-th copy of a ToldTier."""

    def __init__(self, tier: ToldTier, number: int, arrives: bool) -> None:
        self._tier, self._number, self._arrives = tier, number, arrives

    def done(self) -> bool:
        return self._number <= self._tier.told

    def wait(self) -> bool:
        self._tier.move(self._number)
        return self._arrives


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


def one_slow(of: int, values: Iterable[Any]) -> list[Any]:
    """For parametrize: the last of each so many is slow: the default run has the kind, the slow one all."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        if at % of == of - 1
        else value
        for at, value in enumerate(values)
    ]


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


def refuses_a_file_as_out(
    main: Callable[[list[str]], int], command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command whose --out is a folder says so in one line where a file is named, and leaves it alone."""
    taken = folder / "taken"
    taken.write_text("something", encoding="utf-8")
    for out in (taken, taken / "below"):
        assert main(["--out", str(out)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"python -m {command}: ") and str(out) in err and err.count("\n") == 1
    assert taken.read_text(encoding="utf-8") == "something"
