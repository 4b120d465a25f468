"""Shared by the tests of drafts: a random head, engines whose drafts are as good as wanted, and games."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import TINY, CheckedEngine

from minirad.attention.gather import GatherAttention
from minirad.attention.metadata import BatchEntry, build_metadata
from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.model.llama import LlamaModel
from minirad.outputs import GenerationOutput
from minirad.schedule.request import Request
from minirad.speculative.head import ARCHITECTURE, DraftHead, HeadConfig

VOCAB = TINY["vocab_size"]
SOURCES = ("ngram", "eagle")


def write_head(folder: Path, model: LlamaModel, seed: int = 0, **changes: int) -> Path:
    """A random draft head for a model, as files; changes: of its sizes."""
    c = model.config
    sizes = {
        "hidden_size": c.hidden, "intermediate_size": c.intermediate, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, **changes,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"architectures": [ARCHITECTURE], **sizes}), encoding="utf-8"
    )
    same = {"hidden": sizes["hidden_size"], "intermediate": sizes["intermediate_size"], "layers": 1}
    same |= {"heads": sizes["num_attention_heads"], "kv_heads": sizes["num_key_value_heads"]}
    shape = HeadConfig(
        **{name: getattr(c, name) for name in c.__dataclass_fields__} | same | {"head_dim": sizes["head_dim"]}
    )
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in shape.tensor_shapes().items():
        weights[name] = torch.randn(size, generator=generator) * 0.3 + float("norm" in name)
    save_file(weights, folder / "model.safetensors")
    return folder


class Guide:
    """Makes an engine's drafts right with a given probability: it knows what the replies will be.

    replies: whole token lists by (prompt, sample's index). The drafter does all that it does, and its own
    drafts stand where they are not made right; with probability 0 all are wrong.
    """

    def __init__(
        self, engine: Any, replies: dict[tuple[tuple[int, ...], int], list[int]], right: float
    ) -> None:
        self._replies, self._right, self._rng = replies, right, random.Random(0)
        drafter = engine.runner.drafter
        self._draft, self._propose, self._ngram = drafter.draft, drafter.propose, drafter.source == "ngram"
        drafter.draft, drafter.propose = self.draft, self.propose

    def propose(self, request: Request, most: int) -> int:
        found = self._propose(request, most)
        return most if self._ngram else found

    def draft(self, requests: list[Request], counts: list[int]) -> list[list[int]]:
        drafts = self._draft(requests, counts)
        return [self._guided(*each) for each in zip(requests, counts, drafts, strict=True)]

    def _guided(self, request: Request, count: int, draft: list[int]) -> list[int]:
        reply = self._replies.get((tuple(request.prompt.tolist()), request.index), [])
        begin = len(request.output)
        draft = [*draft, *(self._rng.randrange(VOCAB) for _ in range(count - len(draft)))]
        for at, token in enumerate(reply[begin : begin + count]):
            if self._rng.random() < self._right:
                draft[at] = token
            elif not self._right:
                draft[at] = (token + 1) % VOCAB
        return draft


def replies(prompts: Sequence[Sequence[int]], outputs: Sequence[GenerationOutput]) -> Any:
    """What a Guide knows, of outputs in any order; prompts: of R1, R2, ..."""
    return {(tuple(prompts[int(out.request_id[1:]) - 1]), out.index): list(out.token_ids) for out in outputs}


NEAR = 1e-4  # between the two best: another machine's arithmetic may take the other one


def require_same(
    plain: Sequence[GenerationOutput], drafted: Sequence[GenerationOutput], within: float = 1e-4
) -> set[tuple[str, int]]:
    """The same outputs, whatever the order: tokens, texts, ends, log-probabilities.

    Returns those (ids, samples) that part at a near tie, and are compared up to it only: one at most.
    """

    def by_name(outputs: Sequence[GenerationOutput]) -> dict[tuple[str, int], GenerationOutput]:
        return {(out.request_id, out.index): out for out in outputs}

    one, other = by_name(plain), by_name(drafted)
    assert set(one) == set(other)
    parted = set()
    for name, a in one.items():
        b = other[name]
        told = (name, a, b)
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        upto = next((at for at, (x, y) in enumerate(pairs) if x != y), None)
        if upto is not None and abs(a.logprobs[upto] - b.logprobs[upto]) <= NEAR:
            parted.add(name)
        else:
            assert a.token_ids == b.token_ids and (a.text, a.finish_reason) == (b.text, b.finish_reason), told
            assert a.error == b.error and len(a.logprobs) == len(b.logprobs), told
        assert b.logprobs[:upto] == pytest.approx(a.logprobs[:upto], rel=0, abs=within), told
        assert [each is None for each in a.prompt_logprobs] == [each is None for each in b.prompt_logprobs], (
            told
        )
        numbers = [[each or 0.0 for each in out.prompt_logprobs] for out in (a, b)]
        assert numbers[1] == pytest.approx(numbers[0], rel=0, abs=within), told
    assert len(parted) <= 1, parted
    return parted


def engine_of(model: LlamaModel, head: Path | None, tokenizer: Any = None, **config: Any) -> CheckedEngine:
    """A checked engine; `speculative` in the config: with drafts, of this head."""
    config = {"kv_tokens": 256, "max_running": 4, "poison_freed": True, **config}
    if config.get("speculative") == "eagle":
        config = {"draft_model": head, **config}
    return CheckedEngine(EngineConfig(**config), model=model, tokenizer=tokenizer)


def random_params(rng: random.Random, **changes: Any) -> SamplingParams:
    """Any sampling: lengths from 0, temperatures, samples, log-probabilities, stop tokens."""
    params = SamplingParams(
        max_new_tokens=rng.choice([0, 1, 2, 3, 8, 12, 20]),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 0.8]),
        ignore_eos=rng.random() < 0.5,
        n=rng.choice([1, 1, 1, 2, 3]),
        seed=rng.choice([None, 7]),
        logprob_start=rng.choice([None, None, 0, 2]),
        stop_token_ids=rng.choice([(), (), (3, 11, 17, 40)]),
    )
    return replace(params, **changes)


# ---------------------------------------------------------------------- what lies in the pool


def fresh_kv(head: DraftHead, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V `[layers, n, kv_heads, head_dim]` of n tokens computed alone, the head's layer last; and the
    head's features `[n - 1, hidden]`: its unit of the last token is known to nobody."""
    model, size, backend = head.target, len(tokens), GatherAttention()
    pool = model.new_pool(size + 1, head.layers)
    hidden = fresh_hidden(model, tokens, pool)
    metadata = build_metadata(np.arange(1, size + 1)[None], [BatchEntry(0, 0, size - 1)], 1, model.device)
    features = head.forward(torch.tensor(tokens[1:]), hidden[:-1], metadata, pool, backend)
    slots = torch.arange(1, size + 1)
    return torch.stack([k[slots] for k in pool.k]), torch.stack([v[slots] for v in pool.v]), features


@torch.inference_mode()
def fresh_hidden(model: LlamaModel, tokens: Sequence[int], pool: Any = None) -> torch.Tensor:
    """Hidden states `[n, hidden]` of n tokens computed alone; their KV in slots 1, 2, ... of the pool."""
    size, backend = len(tokens), GatherAttention()
    pool = pool or model.new_pool(size + 1)
    metadata = build_metadata(np.arange(1, size + 1)[None], [BatchEntry(0, 0, size)], 1, model.device)
    backend.plan(metadata, pool)
    return model.through_layers(model.embed[torch.tensor(tokens)], metadata, pool, backend)


def tree_paths(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Of every leaf of a tree of pairs: its tokens (one more than slots) and its slots, from the root.

    Slots end where nothing is on the device any more.
    """
    nodes = {node["id"]: node for node in engine.cache.snapshot()["nodes"]}
    inner = {node["parent"] for node in nodes.values()}
    found = []
    for leaf in nodes:
        if leaf in inner:
            continue
        path, at = [], leaf
        while at in nodes:
            path.append(nodes[at])
            at = nodes[at]["parent"]
        flat = [token for node in reversed(path) for token in node["tokens"]]
        slots = [slot for node in reversed(path) for slot in node["slots"]]
        found.append(([*flat[::2], flat[-1]], slots))
    return found


def rows_of(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """The same of every request that has a row; of a prompt that was computed to its end the last unit is not
    known yet."""
    return [
        (
            request.tokens.tolist(),
            engine.rows.rows[request.row, : min(request.kv_len, request.length - 1)].tolist(),
        )
        for request in engine.scheduler.live
    ]


def require_kv_as_computed_alone(engine: Any, within: float = 1e-4) -> int:
    """Every slot of tree and rows holds what its tokens give alone, in all layers. Returns how many."""
    head, pool, looked = engine.runner.drafter.head, engine.pool, 0
    for tokens, slots in [*tree_paths(engine), *rows_of(engine)]:
        if not slots:
            continue
        keys, values, _ = fresh_kv(head, tokens)
        index = torch.tensor(slots)
        for at in range(pool.num_layers):
            for kept, fresh in ((pool.k[at][index], keys[at]), (pool.v[at][index], values[at])):
                worst = float((kept - fresh[: len(slots)]).abs().max())
                assert worst < within, (at, worst, tokens)
        looked += len(slots)
    return looked


def watch_ends(engine: Any) -> list[str]:
    """From now on each request that ends has KV for all but its last token, as without drafts. Their ids."""
    finish, ended = engine.results.finish, []

    def watched(request: Request, reason: str) -> None:
        if reason in ("stop", "length") and request.output and request.row >= 0:
            assert request.kv_len == request.length - 1, (request, reason)
            ended.append(request.id)
        finish(request, reason)

    engine.results.finish = watched
    return ended


# ---------------------------------------------------------------------- games


class Mask:
    """Forbids a third of the tokens, another third at each place; notes for which places it was asked."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at, self.asked = fails_at, []

    def __call__(self, output: list[int]) -> Any:
        self.asked.append(len(output))
        if len(output) == self.fails_at:
            raise RuntimeError("as the test wishes")
        if len(output) % 4 == 3:
            return None
        return (torch.arange(VOCAB) + len(output) + sum(output)) % 3 != 0


class Game:
    """Requests that come over several steps: of many lengths and kinds, with beginnings in common."""

    def __init__(self, seed: int, requests: int = 8, **fixed: Any) -> None:
        self.rng = rng = random.Random(seed)
        stem = [rng.randrange(3, VOCAB) for _ in range(24)]
        self.prompts = []
        for _ in range(requests):
            own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(3, 14))]
            self.prompts.append(stem[: rng.choice([0, 7, 17, 24])] + own)
        self.params = [random_params(rng, **fixed) for _ in self.prompts]
        self.priorities = [rng.choice([0, 0, 0, 2]) for _ in self.prompts]
        self.masked = {at: rng.choice([-1, -1, 3]) for at in range(requests) if rng.random() < 0.3}
        self.steps = [rng.choice([0, 1, 3]) for _ in self.prompts]

    def play(self, engine: Any, look: Any = lambda engine: None, steps: int = 800) -> list[GenerationOutput]:
        """All outputs. look: called after each step."""
        outputs: list[GenerationOutput] = []
        self.masks = {at: Mask(fails_at) for at, fails_at in self.masked.items()}

        def step() -> None:
            outputs.extend(engine.step().finished)
            assert all(request.kv_len == request.length - 1 for request in engine.scheduler.running)
            look(engine)

        for at, (prompt, params, priority) in enumerate(
            zip(self.prompts, self.params, self.priorities, strict=True)
        ):
            engine.add_request(prompt, params, priority=priority, token_mask=self.masks.get(at))
            for _ in range(self.steps[at]):
                step()
        for _ in range(steps):
            if not engine.has_work:
                return outputs
            step()
        raise AssertionError(f"still at work: {engine.snapshot()}")


class Fault(Exception):
    """As the test wishes."""


def breaking(owner: Any, name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has some calls of `owner.name` fail: before or after the work, or by Ctrl-C."""
    real, calls = getattr(owner, name), [0]

    def faulty(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        due = calls[0] % 4 == 2 and calls[0] < 20
        if due and how == "before":
            raise Fault
        if due and how == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
        found = real(*arguments, **named)
        if due and how == "after":
            raise Fault
        return found

    monkeypatch.setattr(owner, name, faulty)


def stepping_on(engine: Any) -> list[int]:
    """Has a step that failed made again, and all checked in between; counts the failures."""
    raised, step = [0], engine.step

    def guarded() -> Any:
        while True:
            try:
                return step()
            except (Fault, KeyboardInterrupt):
                raised[0] += 1
                engine.check()
                assert all(request.kv_len == request.length - 1 for request in engine.scheduler.running)

    engine.step = guarded
    return raised


def nobody_is_pushed_out(engine: Any, said: str) -> None:
    """Room for several tokens a pass must not retract a request."""
    inside = [False]
    with_drafts, retract = engine._with_drafts, engine.scheduler.retract

    def watched(batch: Any) -> Any:
        inside[0] = True
        found = with_drafts(batch)
        inside[0] = False
        return found

    def retracted(request: Any) -> None:
        assert not inside[0], said
        retract(request)

    engine._with_drafts, engine.scheduler.retract = watched, retracted
