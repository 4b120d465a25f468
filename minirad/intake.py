"""A prompt becomes a request, or is refused with a sentence: before anything is queued."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, cast

import numpy as np

from minirad import errors
from minirad.cache.node import IntSequence, RadixKey, Slots
from minirad.config import EngineConfig, SamplingParams, drawn_seed
from minirad.parts import Prompt, Texts
from minirad.schedule.request import Request


class Intake:
    """Makes requests for an engine of this configuration and vocabulary."""

    def __init__(self, config: EngineConfig, vocab_size: int, texts: Texts) -> None:
        self._config, self._vocab_size, self._texts = config, vocab_size, texts

    def request(
        self, prompt: Prompt, params: Any = None, extra_key: Hashable = None, priority: int = 0,
        token_mask: Any = None,
    ) -> Request:  # fmt: skip
        """A new request without an id; ValueError for what could never run."""
        errors.mask(token_mask)
        params, priority = errors.sampling(params), errors.whole("priority", priority)
        tokens = self.tokens(prompt, params)
        self.key((), extra_key)  # refuses what cannot be hashed
        config = self._config
        seed = params.seed if params.seed is not None else drawn_seed(config.seed)
        return Request(
            "", tokens, params, seed, 0, extra_key, priority, token_mask=token_mask,
            is_bigram=config.bigram_keys,
        )  # fmt: skip

    def requests(self, prompts: Prompt | Sequence[Prompt], params: Any, extra_key: Hashable) -> list[Request]:
        """One for each prompt; params: for all, or one for each."""
        many = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [errors.sampling(params)] * len(many)
        if not isinstance(params, Sequence) or isinstance(params, str):
            errors.sampling(params)  # says what it should have been
        if len(params) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(params)} sampling parameters")
        return [self.request(each, param, extra_key) for each, param in zip(many, params, strict=True)]

    def key(self, tokens: IntSequence, extra_key: Hashable) -> RadixKey:
        """Token ids as a tree key."""
        return RadixKey(tokens, errors.extra_key(extra_key), self._config.bigram_keys)

    def tokens(self, prompt: Prompt, params: SamplingParams) -> Slots:
        """The prompt's ids; ValueError, naming the numbers, if prompt and reply cannot run."""
        config, vocab, tokens = self._config, self._vocab_size, self._texts.encode(prompt)
        assert config.max_context is not None and config.kv_tokens is not None
        if len(tokens) == 0:
            raise ValueError("the prompt is empty: at least one token is needed")
        outside = tokens[(tokens < 0) | (tokens >= vocab)]
        if len(outside):
            raise ValueError(f"token id {outside[0]} is outside the vocabulary of {vocab}")
        new = params.max_new_tokens
        for limit, of in ((config.max_context, "context"), (config.kv_tokens, "KV pool")):
            if len(tokens) + new > limit:
                raise ValueError(
                    f"{len(tokens)} prompt + {new} new tokens = {len(tokens) + new} are more than the {of} "
                    f"of {limit}"
                )
        if params.n > config.max_running:
            raise ValueError(f"n={params.n} samples need as many rows, there are {config.max_running}")
        start = params.logprob_start
        if start is not None and start >= len(tokens):
            raise ValueError(f"logprob_start {start} is past the prompt's {len(tokens)} tokens")
        unknown = [token for token in params.stop_token_ids if token >= vocab]
        if unknown:
            raise ValueError(f"stop_token_ids: token id {unknown[0]} is outside the vocabulary of {vocab}")
        self._texts.prepare(params)
        return tokens


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several: a text is one, and so is a row of ids."""
    errors.prompts(prompts)
    if isinstance(prompts, str) or (
        len(prompts) and not isinstance(prompts[0], str) and np.ndim(prompts[0]) == 0
    ):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))
