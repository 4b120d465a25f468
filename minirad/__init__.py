"""minirad: see RadixAttention. A small, complete serving engine whose every cache decision is an event.

Names are loaded when first used: `from minirad import RadixCache` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minirad.cache.radix_cache import RadixCache, RadixKey
    from minirad.config import EngineConfig, SamplingParams
    from minirad.engine import Engine
    from minirad.errors import InvariantError
    from minirad.model.load import resolve_model
    from minirad.observe.recorder import Recorder
    from minirad.observe.recording import Recording
    from minirad.outputs import GenerationOutput, StepReport

_HOME = {
    "Engine": "engine",
    "EngineConfig": "config",
    "GenerationOutput": "outputs",
    "InvariantError": "errors",
    "RadixCache": "cache.radix_cache",
    "RadixKey": "cache.radix_cache",
    "Recorder": "observe.recorder",
    "Recording": "observe.recording",
    "SamplingParams": "config",
    "StepReport": "outputs",
    "resolve_model": "model.load",
}

__all__ = [
    "Engine",
    "EngineConfig",
    "GenerationOutput",
    "InvariantError",
    "RadixCache",
    "RadixKey",
    "Recorder",
    "Recording",
    "SamplingParams",
    "StepReport",
    "resolve_model",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Loads a public name from its module at its first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'minirad' has no attribute {name!r}")
    value = getattr(import_module(f"minirad.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
