"""An engine's parts, put together: what "auto" and None in a config come to on this machine.

Device, number type, attention, pool size, weights, tokenizer. engine.py finds this file by name (rooms.py):
an engine of other parts (simulate.py) needs neither torch nor a model.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import os
import weakref
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from minirad.attention.gather import GatherAttention
from minirad.attention.radix_attention import AttentionBackend
from minirad.cache.prefix_cache import PrefixCache
from minirad.cache.radix_cache import RadixCache
from minirad.config import DEFAULT_KV_TOKENS, MOST_KV_TOKENS, EngineConfig
from minirad.errors import said
from minirad.kv.kv_pool import KVPool
from minirad.model.llama import LlamaModel
from minirad.model.load import load_model, load_tokenizer, resolve_model
from minirad.parts import Parts
from minirad.rooms import room
from minirad.runner import TorchRunner
from minirad.schedule.req_to_token import ReqToTokenPool
from minirad.tokenizing import Tokenizing

CACHE_METHODS = (
    "peek", "match_prefix", "insert", "inc_lock_ref", "dec_lock_ref", "evict", "walk", "reset", "page_size",
    "evictable_size", "protected_size",
)  # fmt: skip


def assemble(config: Any, cache: PrefixCache | None, model: Any, tokenizer: Any) -> Parts:
    """An engine's parts for a configuration; model, tokenizer: ready ones instead of the configured.

    Raises ValueError for arguments that are not what they have to be, and for what this machine lacks.
    """
    check_arguments(config, cache, model)
    config = config or EngineConfig()
    ready = model is not None
    path = None if ready else model_directory(config)
    return put_together(config, cache, model or built_model(config, path), tokenizer, path)


def model_directory(config: EngineConfig) -> Path | None:
    """Where the model lies that the config names; None for random weights."""
    if config.dummy_weights is not None:
        return None
    if config.quantization is not None:
        return Path(room("quant.choose").model_directory(config))
    return resolve_model(config.model)


def put_together(
    config: EngineConfig, cache: PrefixCache | None, model: LlamaModel, tokenizer: Any, path: Path | None
) -> Parts:
    """An engine's parts around a model. path: of the directory that its tokenizer is loaded from."""
    model = getattr(model, "plain", model)  # of another engine, with adapters: those are that engine's
    device = model.device
    fast = fast_parts()
    attention, note = choose_attention(config, model, device, fast)
    config = filled_in(config, model, device, attention.name)
    assert config.kv_tokens is not None and config.max_context is not None
    adapters = folder("adapters", "lora").adapters(config, model) if config.lora else None
    drafter = room("speculative.choose").drafter(config, model) if config.drafting else None
    more = () if drafter is None else (drafter.layers,)
    pool = model.new_pool(config.kv_tokens + config.page_size, *more)
    rows = ReqToTokenPool(config.max_running, config.max_context)
    served = model if adapters is None else adapters.model
    runner = (TorchRunner if fast is None else fast.Runner)(served, pool, attention, rows, config)
    for around in filter(None, (adapters, drafter)):
        runner = around.around(runner)
    load = None if path is None else partial(load_tokenizer, path)
    texts = Tokenizing(tokenizer, load, model.config.eos_ids)
    return Parts(config, runner, choose_cache(cache, config, pool, runner), rows, texts, path, note)


def check_arguments(config: Any, cache: Any, model: Any) -> None:
    """ValueError unless an engine's arguments are what they have to be."""
    if config is not None and not isinstance(config, EngineConfig):
        raise ValueError(f"config must be an EngineConfig or None, got {said(config)}")
    if inspect.isclass(cache):
        raise ValueError(f"cache must be an object, got {said(cache)}: make one, {cache.__name__}(...)")
    missing = [] if cache is None else [name for name in CACHE_METHODS if not hasattr(cache, name)]
    if missing:
        raise ValueError(f"cache must have RadixCache's methods; {said(cache)} has no {', '.join(missing)}")
    if model is not None and not isinstance(model, LlamaModel):
        raise ValueError(
            f"model must be a LlamaModel or None, got {said(model)} (a name goes into the config)"
        )
    if model is not None and config is not None:
        choose_device(config.device, model)  # refuses a model that lies elsewhere


def check_weights(model: Any, served: LlamaModel) -> None:
    """ValueError unless an engine of one model can go on with another: same shape, type and place."""
    if not isinstance(model, LlamaModel):
        raise ValueError(f"the new weights must be a LlamaModel, got {said(model)}")
    # Of a part on one of several ranks the whole model counts.
    new, old = ((getattr(m, "whole", m.config), m.dtype, m.device) for m in (model, served))
    if new != old:
        raise ValueError(f"the new weights are of another model: {new}, this engine serves {old}")


def built_model(config: EngineConfig, path: Path | None) -> LlamaModel:
    """The model that the config names, from its directory, or of its shape with random weights."""
    if config.quantization is not None:
        quantised: LlamaModel = room("quant.choose").built_model(config)
        return quantised
    device = choose_device(config.device, None)
    dtype = choose_dtype(config.dtype, device)
    if config.dummy_weights is not None:
        model: LlamaModel = import_module("minirad.bench.dummy").dummy_model(
            config.dummy_weights, dtype, device
        )
        return model
    assert path is not None
    return load_model(path, dtype, device)


def folder(name: str, wanted: str) -> Any:
    """choose.py of a folder that may have been deleted; ValueError names what was asked for."""
    found = room(f"{name}.choose")
    if found is None:
        raise ValueError(f"{wanted} needs minirad/{name}/, which is not here")
    return found


def fast_parts() -> Any:
    """fast/choose.py; None where the folder was deleted: all works without it, slowly."""
    return room("fast.choose")


def choose_device(name: str, model: LlamaModel | None) -> torch.device:
    """The device that the config names; a ready-made model decides it."""
    if model is not None:  # it lies where it lies
        if name not in ("auto", model.device.type, str(model.device)):
            raise ValueError(f"device {name!r}: the given model lies on {str(model.device)!r}")
        return model.device
    EngineConfig(device=name)  # refuses what names no device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: torch sees no NVIDIA GPU here; use 'cpu' or 'auto'")
    if ":" in name and int(name.partition(":")[2]) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number type that the config names; "auto" goes by the device."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def choose_attention(
    config: EngineConfig, model: LlamaModel, device: torch.device, fast: Any
) -> tuple[AttentionBackend, str]:
    """The backend that the config names; and what is missing, in one sentence, if "auto" fell back."""
    if config.attention == "gather":
        return GatherAttention(), ""
    if fast is not None:
        chosen: tuple[AttentionBackend, str] = fast.choose_attention(config, model, device)
        return chosen
    if config.attention != "auto" or config.cuda_graphs:
        wanted = "cuda_graphs=True" if config.cuda_graphs else f"attention {config.attention!r}"
        raise ValueError(f"{wanted} needs minirad/fast/, which is not here; attention 'gather' does not")
    return GatherAttention(), "minirad/fast/ is not here, so attention is the plain one, and slow."


def kv_tokens_that_fit(model: LlamaModel, device: torch.device) -> int:
    """How many tokens' KV fill most of the memory that a GPU has free now.

    A fifth is left for what a batch computes. A tiny model is not given all of a large card: it
    would not fill it, and the host's lists of free pages grow with it.
    """
    free, _ = torch.cuda.mem_get_info(device)
    c = model.config
    per_token = 2 * c.layers * c.kv_heads * c.head_dim * model.dtype.itemsize
    return min(max(int(free * 0.8) // per_token, DEFAULT_KV_TOKENS), MOST_KV_TOKENS)


def memory_of(device: torch.device) -> int | None:
    """Bytes of memory that a device has in all; None where that cannot be asked."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None


def require_memory(config: EngineConfig, model: LlamaModel, device: torch.device) -> None:
    """ValueError for sizes that this machine has no memory for, before anything is built.

    Memory is handed out lazily: what is too large would be had, and end the process later.
    """
    assert config.kv_tokens is not None and config.max_context is not None
    c, host = model.config, torch.device("cpu")
    layers = c.layers + (config.speculative == "eagle")  # the draft head has KV in the same slots
    per_token = 2 * layers * c.kv_heads * c.head_dim * model.dtype.itemsize
    books = 17 * (config.kv_tokens // config.page_size)  # of each page: free or not, whose, and its place
    for name, where, size in (
        ("kv_tokens", device, (config.kv_tokens + config.page_size) * per_token),
        ("kv_tokens", host, books),
        ("host_kv_tokens", host, config.host_kv_tokens * per_token),
        ("max_running", host, config.max_running * (8 * config.max_context + 100)),
    ):
        memory = memory_of(where)
        if memory is not None and size > memory:
            raise ValueError(
                f"{name} {getattr(config, name)} takes {size / 1e9:,.1f} GB; "
                f"{'this machine' if where == host else str(where)} has {memory / 1e9:,.1f} GB of memory"
            )


def filled_in(config: EngineConfig, model: LlamaModel, device: torch.device, attention: str) -> EngineConfig:
    """The config with every "auto" and None that depends on model and machine replaced."""
    kv_tokens = config.kv_tokens
    if kv_tokens is None:
        kv_tokens = kv_tokens_that_fit(model, device) if device.type == "cuda" else DEFAULT_KV_TOKENS
        kv_tokens = max(kv_tokens // config.page_size, 1) * config.page_size
    limit = model.config.max_position_embeddings
    if config.max_context is not None and config.max_context > limit:
        raise ValueError(f"max_context {config.max_context} is more than the model's {limit}")
    config = dataclasses.replace(
        config,
        device=str(device),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=attention,
        kv_tokens=kv_tokens,
        max_context=config.max_context or limit,
    )
    require_memory(config, model, device)
    return config


def choose_cache(cache: PrefixCache | None, config: EngineConfig, pool: KVPool, runner: Any) -> PrefixCache:
    """The tree: a caller's own, which has to fit the configuration, or ours; with more tiers from tiers/."""
    if cache is not None:
        require_fitting_tree(cache, config)
    elif not config.host_kv_tokens:
        cache = RadixCache(config.page_size, config.eviction_policy)
    else:
        tiers = room("tiers.choose")
        if tiers is None:
            raise ValueError(
                f"host_kv_tokens={config.host_kv_tokens} needs minirad/tiers/, which is not here"
            )
        cache = tiers.choose_cache(config, pool, runner)
    assert cache is not None
    require_own_tree(cache, pool)
    return cache


def require_fitting_tree(cache: PrefixCache, config: EngineConfig) -> None:
    """ValueError unless an engine of this configuration can begin with a caller's tree."""
    if config.host_kv_tokens:
        raise ValueError(
            f"host_kv_tokens={config.host_kv_tokens}: a cache of your own cannot use a host tier"
        )
    if cache.page_size != config.page_size:
        raise ValueError(f"the cache has pages of {cache.page_size}, the engine {config.page_size}")
    held = int(cache.evictable_size) + int(cache.protected_size)
    if held:
        raise ValueError(f"the cache holds {held} tokens already: an engine begins with an empty one")


# The tree of each pool, which lives as long as its engine: a reference, or a number where there can be none.
_trees: weakref.WeakKeyDictionary[KVPool, weakref.ref[Any] | int] = weakref.WeakKeyDictionary()


def require_own_tree(tree: Any, pool: KVPool) -> None:
    """ValueError if another engine has this tree, empty or not: its nodes name slots of one pool only.

    The tree of an engine that is gone may be given to a new one.
    """
    if _is_taken(tree):
        gc.collect()  # who let an engine go need not wait until Python notices
    if _is_taken(tree):
        raise ValueError(f"the cache ({type(tree).__name__}) is another engine's: each needs one of its own")
    try:
        _trees[pool] = weakref.ref(tree)
    except TypeError:  # a class with __slots__; held here, it would stay longer than its engine
        _trees[pool] = id(tree)


def _is_taken(tree: Any) -> bool:
    known = list(_trees.values())
    return any(id(tree) == each if isinstance(each, int) else each() is tree for each in known)
