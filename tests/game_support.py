"""Shared by the games of whole engines: a draft head, two adapters, fresh KV, a disk without threads."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adapter_support import PLAIN, factors_for, write_adapter
from safetensors.torch import save_file

from minirad.attention.gather import GatherAttention
from minirad.attention.metadata import BatchEntry, build_metadata
from minirad.config import AdapterKey
from minirad.engine import Engine
from minirad.model.llama import LlamaConfig, LlamaModel
from minirad.speculative.head import ARCHITECTURE, SIZES, DraftHead, HeadConfig
from minirad.tiers.disk_files import Worker

# Both change most replies of the tiny model; the second also what its keys are made of.
ADAPTERS: dict[str, dict[str, Any]] = {
    "up": {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 3, "lora_alpha": 6},
    "all": {"target_modules": ["k_proj", "v_proj", "o_proj", "gate_proj"], "r": 2, "lora_alpha": 4},
}
SIZE = 0.5  # of their factors


def write_head(folder: Path, model: LlamaModel, seed: int = 0) -> Path:
    """A draft head that mostly guesses the same token again, as the tiny model mostly says."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: getattr(model.config, field) for name, field in SIZES.items()}
    file = folder / "config.json"
    file.write_text(json.dumps({"architectures": [ARCHITECTURE], **sizes}), encoding="utf-8")
    generator, hidden = torch.Generator().manual_seed(seed), model.config.hidden
    weights = {
        name: torch.randn(shape, generator=generator) * 0.1 + float("norm" in name)
        for name, shape in HeadConfig.read(file, model.config).tensor_shapes().items()
    }
    weights["fc.weight"][:, :hidden] += torch.eye(hidden)
    save_file(weights, folder / "model.safetensors")
    return folder


def write_adapters(folder: Path, config: LlamaConfig) -> dict[str, Path]:
    """The directories of ADAPTERS, by name."""
    return {
        name: write_adapter(folder / name, config, seed, settings, SIZE)
        for seed, (name, settings) in enumerate(ADAPTERS.items(), start=1)
    }


def merged(config: LlamaConfig, weights: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """A model's weights with one of ADAPTERS added to its matrices; "" leaves them as they are."""
    if not name:
        return weights
    said, seed = {**PLAIN, **ADAPTERS[name]}, list(ADAPTERS).index(name) + 1
    factors = factors_for(config, said["target_modules"], said["r"], seed, SIZE)
    found = dict(weights)
    for key in [key for key in factors if ".lora_A." in key]:
        target = key.removeprefix("base_model.model.").replace(".lora_A", "")
        b, a = factors[key.replace(".lora_A.", ".lora_B.")], factors[key]
        found[target] = found[target] + said["lora_alpha"] / said["r"] * (b @ a)
    return found


class EverySo:
    """A mask that forbids a third of the tokens, another third each time, or all but one. Notes what it was
    asked, and can tell what is forced."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, said: list[int]) -> torch.Tensor:
        self.asked.append(tuple(said))
        return self.allowed(said)

    def allowed(self, said: Sequence[int]) -> torch.Tensor:
        """Bool `[vocab]`, without a note."""
        if (only := self.only(said)) >= 0:
            return torch.arange(self._vocab) == only
        return torch.arange(self._vocab) % 3 != (len(said) + (said[-1] if len(said) else 0)) % 3

    def only(self, said: Sequence[int]) -> int:
        """The one token that may follow; -1 where there is a choice, as at two of five places."""
        number = hash((len(said), *said))
        return 3 + number % (self._vocab - 3) if number % 5 > 1 else -1

    def forced(self, said: Sequence[int], most: int) -> list[int]:
        """What must follow, `most` tokens at most."""
        found: list[int] = []
        while len(found) < most and (only := self.only([*said, *found])) >= 0:
            found.append(only)
        return found


class HeldWorker(Worker):
    """The thread of a disk tier without a thread: some jobs are done at once, others only when told."""

    rng = random.Random(0)
    holds = 0.0  # how often a job has to wait
    all_of_them: list[HeldWorker] = []  # noqa: RUF012  (of one game)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._held: deque[Callable[[], Any]] = deque()
        self.all_of_them.append(self)

    def submit(self, job: Callable[[], Any]) -> None:
        if self._stopped:
            return
        self._held.append(job)
        if len(self._held) > 1 or self.rng.random() < self.holds:
            return
        self.do_all()

    def do_all(self) -> None:
        while self._held:
            self._held.popleft()()

    def idle(self, seconds: float) -> bool:
        self.do_all()
        return True


class Fresh:
    """Keys and values of whole texts, computed alone by a model (and a draft head, or none)."""

    def __init__(self, model: LlamaModel, head: DraftHead) -> None:
        self.model, self.head = model, head
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def kv(self, tokens: Sequence[int]) -> torch.Tensor:
        """`[n, layers + 1, 2, kv_heads, head_dim]`; the head's layer is 0 at the last token."""
        key = tuple(tokens)
        if key not in self._known:
            if len(self._known) > 5_000:
                self._known.clear()
            self._known[key] = self._computed(key)
        return self._known[key]

    @torch.inference_mode()
    def _computed(self, tokens: Sequence[int]) -> torch.Tensor:
        size, model = len(tokens), self.model
        rows, ids = np.arange(1, size + 1)[None], torch.tensor(tokens)
        pool, backend = model.new_pool(size + 1, 1), GatherAttention()
        metadata = build_metadata(rows, [BatchEntry(0, 0, size)], 1, model.device)
        backend.plan(metadata, pool)
        hidden = model.through_layers(model.embed[ids], metadata, pool, backend)
        if size > 1:
            short = build_metadata(rows, [BatchEntry(0, 0, size - 1)], 1, model.device)
            self.head.forward(ids[1:], hidden[:-1], short, pool, backend)
        pairs = [torch.stack((k[1:], v[1:]), 1) for k, v in zip(pool.k, pool.v, strict=True)]
        return torch.stack(pairs, 1)


def require_kv_as_computed_alone(engine: Engine, fresh: Callable[[str], Fresh], within: float = 1e-4) -> int:
    """Each slot in the tree, on the device and on the host, holds what its tokens give alone.

    fresh: who computes, by an adapter's name or "". A draft head's layer is looked at under keys of pairs:
    under plain keys it hangs on a token that the key does not name. What old weights computed is left out.
    Returns how many slots were looked at.
    """
    cache, pool, looked = engine.cache, engine.pool, 0
    tier = getattr(cache, "copier", None)
    bigram = bool(engine.config.bigram_keys)
    layers = pool.num_layers if bigram else engine.model.config.layers
    for leaf in cache.walk():
        if leaf is cache.root or leaf.outdated or leaf.children:
            continue
        path = cache.path_up(leaf)[::-1]
        flat = np.frombuffer(b"".join(node.edge for node in path), dtype=np.int32)
        tokens = [*flat[::2].tolist(), int(flat[-1])] if bigram else flat.tolist()
        extra_key = leaf.namespace[0]
        name = extra_key.adapter if isinstance(extra_key, AdapterKey) else ""
        wanted, at = fresh(name).kv(tokens), 0
        for node in path:
            expected = wanted[at : at + node.units, :layers]
            places = []
            if node.packed:
                index = torch.from_numpy(node.slots.copy())
                pairs = [torch.stack((k[index], v[index]), 1) for k, v in zip(pool.k, pool.v, strict=True)]
                places.append(torch.stack(pairs, 1)[:, :layers])
            if getattr(node, "backed_up", False):
                places.append(tier.copied(node.host_slots)[:, :layers])
            for found in places:
                far = (found - expected).abs().amax(dim=(2, 3, 4)) if len(found) else torch.zeros(1, 1)
                told = (name, tokens, node.id, at, far.tolist())
                assert bool((far < within).all()), told
                looked += len(found)
            at += node.units
    return looked
