"""One request, seen by the scheduler: tokens, three lengths, and what it holds.

    0 ...... protected_len ...... kv_len ...... len(tokens)
      tree's slots      own slots       not computed yet

`tokens` is the prompt and what was generated so far. All but the last sampled token get KV in time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minirad.cache.radix_cache import RadixKey, Slots
from minirad.config import SamplingParams

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"

TokenMask = Callable[[list[int]], Any]  # generated ids -> bool row of allowed ids, or None


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way. Samples of an n > 1 request are Requests of their own once they part."""

    id: str
    prompt: Slots
    params: SamplingParams
    seed: int
    arrival: int
    extra_key: Hashable = None
    priority: int = 0
    index: int = 0
    group: str = ""  # the id that add_request gave out
    token_mask: TokenMask | None = None
    is_bigram: bool = False  # tree keys are pairs of tokens
    listener: Any = None  # told of each token and of each sample's end (generate.py)

    status: str = WAITING
    row: int = -1
    node: Any = None  # the locked end of the tree path that the row points into
    leaf: Any = None  # the leaf that this request inserted and may grow
    protected_len: int = 0
    kv_len: int = 0
    ahead: int = 0  # slots at the end of kv_len for tokens that were launched and not read yet
    cached_tokens: int = 0  # prompt tokens that came from the cache, at the first admission
    attempts: int = 0
    passes: int = 0  # steps in which it was left waiting and one behind it admitted
    has_waited: bool = False  # for another request's prefix, since it was queued
    found: Any = None  # the last look at the tree (Prefix)
    found_at: Any = None  # the tree's state when that was looked up for the order
    finish_reason: str = ""
    error: str = ""
    reply: Any = None  # what it says so far (text.ReplyText), where that is asked for before its end
    draft: Any = None  # what speculative/ keeps of it between two steps
    added_at: float = 0.0
    first_token_at: float = 0.0

    unbranched: int = field(init=False)  # samples (n > 1) that branch off when its prompt is computed
    length: int = field(init=False)  # prompt and generated tokens
    output: list[int] = field(init=False, default_factory=list)
    output_logprobs: list[float] = field(init=False, default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    _buffer: Slots = field(init=False, repr=False)
    _key: RadixKey | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._buffer = np.append(self.prompt, np.zeros(self.params.max_new_tokens, dtype=np.int64))
        self.length = len(self.prompt)
        self.unbranched = 0 if self.index else self.params.n - 1
        self.group = self.group or self.id

    @property
    def tokens(self) -> Slots:
        """Prompt and generated tokens; a view, not to be kept."""
        return self._buffer[: self.length]

    def branch(self, index: int) -> Request:
        """A further sample of an n > 1 request, whose prompt has just been computed; holds nothing yet."""
        return Request(
            f"{self.group}.{index}", self.prompt, self.params, self.seed, self.arrival, self.extra_key,
            self.priority, index, self.group, self.token_mask, self.is_bigram, self.listener,
            added_at=self.added_at, attempts=self.attempts, cached_tokens=self.cached_tokens,
            prompt_logprobs=list(self.prompt_logprobs),
        )  # fmt: skip

    def key(self, length: int | None = None) -> RadixKey:
        """The first `length` tokens (None: all) as a tree key.

        The last one is kept: a waiting request is looked up at every step, and its tokens stay.
        """
        length = self.length if length is None else length
        if self._key is None or len(self._key) + self.is_bigram != length:  # n tokens: n - 1 pairs
            self._key = RadixKey(self.tokens[:length], self.extra_key, self.is_bigram)
        return self._key

    def committed_key(self) -> RadixKey:
        """The tree key of what has KV, one unit a slot.

        The unit of a pair needs the token after it, too: that of the last slot is known when the next
        chunk's tokens or a sampled token are there, and else left out.
        """
        return self.key(min(self.kv_len + 1, self.length) if self.is_bigram else self.kv_len)

    def append(self, token: int, logprob: float) -> None:
        """Takes a sampled token on."""
        self._buffer[self.length] = token
        self.length += 1
        self.output.append(token)
        self.output_logprobs.append(logprob)

    @property
    def last_token(self) -> int:
        """The newest token: what a decode step computes."""
        return int(self._buffer[self.length - 1])

    @property
    def usable_prefix(self) -> int:
        """How many cached slots may be used at most: one token is always computed.

        A wanted log-probability of prompt token p needs the logits of token p-1, so that one has to
        be computed too; but only once, also if the request is retracted between.
        """
        computed_next = self.next_logprob if self.next_logprob < len(self.prompt) else self.length
        return max(computed_next - 1, 0)

    @property
    def next_logprob(self) -> int:
        """Position of the first prompt token whose log-probability is wanted and not known yet."""
        start = self.params.logprob_start
        return len(self.prompt) if start is None else start + len(self.prompt_logprobs)

    @property
    def computed(self) -> bool:
        """All tokens have KV: the next one can be sampled."""
        return self.kv_len == self.length
