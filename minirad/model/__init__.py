"""What is computed: the Llama model, its loading, the sampler; names load when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minirad.model.llama import LlamaConfig, LlamaModel
    from minirad.model.load import load_model, load_tokenizer, load_weights, resolve_model
    from minirad.model.sampler import position_uniform, prompt_logprobs, sample

__all__ = [
    "LlamaConfig",
    "LlamaModel",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "position_uniform",
    "prompt_logprobs",
    "resolve_model",
    "sample",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it, at its first use."""
    if name in ("LlamaConfig", "LlamaModel"):
        module = "llama"
    elif name in ("position_uniform", "prompt_logprobs", "sample"):
        module = "sampler"
    elif name in __all__:
        module = "load"
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
