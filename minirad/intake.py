"""A prompt becomes a request, or is refused with a sentence: before anything is queued."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from minirad import errors
from minirad.cache.node import IntSequence, RadixKey
from minirad.config import EngineConfig, drawn_seed, namespace, require_fits, sampling
from minirad.parts import Prompt
from minirad.schedule.request import Request


class Intake:
    """Makes requests for an engine of this configuration and vocabulary."""

    def __init__(self, config: EngineConfig, vocab_size: int, texts: Any) -> None:
        self._config, self._vocab_size, self._texts = config, vocab_size, texts

    def request(
        self, prompt: Prompt, params: Any = None, extra_key: Hashable = None, priority: int = 0,
        token_mask: Any = None, lora: str = "",
    ) -> Request:  # fmt: skip
        """A new request without an id; ValueError for what could never run."""
        errors.mask(token_mask)
        params, priority = sampling(params), errors.whole("priority", priority)
        tokens = self._texts.encode(prompt)
        require_fits(tokens, params, self._config, self._vocab_size)
        self._texts.prepare(params)
        config = self._config
        extra_key = namespace(config, extra_key, lora)
        seed = params.seed if params.seed is not None else drawn_seed(config.seed)
        return Request(
            "", tokens, params, seed, 0, extra_key, priority, token_mask=token_mask,
            is_bigram=bool(config.bigram_keys),
        )  # fmt: skip

    def key(self, tokens: IntSequence, extra_key: Hashable, lora: str) -> RadixKey:
        """Token ids as a tree key."""
        return RadixKey(tokens, namespace(self._config, extra_key, lora), bool(self._config.bigram_keys))
