"""What machine.py asks this folder for, by name: the drafter that a configuration wants."""

from __future__ import annotations

from minirad.config import EngineConfig
from minirad.model.llama import LlamaModel
from minirad.speculative.eagle import EagleDrafter
from minirad.speculative.jump import NoDrafter
from minirad.speculative.ngram import NgramDrafter
from minirad.speculative.runner import Drafter

__all__ = ["drafter"]


def drafter(config: EngineConfig, model: LlamaModel) -> Drafter:
    """The drafter for this model; ValueError for a draft head that does not fit it."""
    if config.speculative is None:
        return NoDrafter()
    return NgramDrafter(config) if config.speculative == "ngram" else EagleDrafter(config, model)
