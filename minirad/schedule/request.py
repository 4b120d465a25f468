"""One request, seen by the scheduler: tokens, three lengths, and what it holds.

    0 ...... protected_len ...... kv_len ...... len(tokens)
      tree's slots      own slots       not computed yet

`tokens` is the prompt and what was generated so far. All but the last sampled token get KV in time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from minirad.cache.radix_cache import RadixKey, Slots
from minirad.config import SamplingParams
from minirad.errors import require
from minirad.text import ReplyText

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"

TokenMask = Callable[[list[int]], Any]  # generated ids -> bool row of allowed ids, or None


class Listener(Protocol):
    """Whoever streams a request: told of each token, and of each sample's end."""

    def token(self, request: Request, token: int) -> None: ...
    def ended(self, output: Any) -> None: ...


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
    listener: Listener | None = None

    status: str = WAITING
    row: int = -1
    node: Any = None  # the locked end of the tree path that the row points into
    leaf: Any = None  # the leaf that this request inserted and may grow
    protected_len: int = 0
    kv_len: int = 0
    ahead: int = 0  # slots at the end of kv_len for tokens that were launched and not read yet
    cached_tokens: int = 0  # prompt tokens that came from the cache, at the first admission
    attempts: int = 0
    branched: bool = False  # its further samples (n > 1) go their own ways
    passes: int = 0  # steps in which it was left waiting and somebody behind it admitted
    has_waited: bool = False  # for another request's prefix, since it was queued
    peeked: int = 0  # the match found for ordering, when the tree was in state `peeked_at`
    peeked_at: int = -1
    finish_reason: str = ""
    error: str = ""
    reply: ReplyText | None = None  # what it says so far, where that is asked for before its end
    added_at: float = 0.0
    first_token_at: float = 0.0

    length: int = field(init=False)  # prompt and generated tokens
    output: list[int] = field(init=False, default_factory=list)
    output_logprobs: list[float] = field(init=False, default_factory=list)
    prompt_logprobs: list[float | None] = field(init=False, default_factory=list)
    _buffer: Slots = field(init=False, repr=False)
    _key: RadixKey | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        room = len(self.prompt) + self.params.max_new_tokens
        self._buffer = np.empty(max(room, len(self.prompt)), dtype=np.int64)
        self._buffer[: len(self.prompt)] = self.prompt
        self.length = len(self.prompt)
        self.group = self.group or self.id

    @property
    def tokens(self) -> Slots:
        """Prompt and generated tokens; a view, not to be kept."""
        return self._buffer[: self.length]

    def branch(self, index: int) -> Request:
        """A further sample of an n > 1 request, whose prompt has just been computed; holds nothing yet."""
        sample = Request(
            f"{self.group}.{index}", self.prompt, self.params, self.seed, self.arrival, self.extra_key,
            self.priority, index, self.group, self.token_mask, self.is_bigram, self.listener,
        )  # fmt: skip
        sample.added_at, sample.attempts = self.added_at, self.attempts
        sample.cached_tokens, sample.prompt_logprobs = self.cached_tokens, list(self.prompt_logprobs)
        return sample

    def key(self, length: int | None = None) -> RadixKey:
        """The first `length` tokens (None: all) as a tree key.

        The key of all is kept while they are the same: a waiting request is looked up at every step.
        """
        if length is not None and length != self.length:
            return RadixKey(self.tokens[:length], self.extra_key, self.is_bigram)
        if self._key is None or len(self._key) + self.is_bigram != self.length:  # n tokens: n - 1 pairs
            self._key = RadixKey(self.tokens, self.extra_key, self.is_bigram)
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
    def unbranched(self) -> int:
        """Samples that will branch off this request when its prompt is computed."""
        return 0 if self.index or self.branched else self.params.n - 1

    @property
    def usable_prefix(self) -> int:
        """How many cached slots may be used at most: one token is always computed.

        A wanted log-probability of prompt token p needs the logits of token p-1, so that one has to
        be computed too; but only once, also if the request is retracted between.
        """
        limit = self.length - 1
        if self.next_logprob < len(self.prompt):
            limit = min(limit, max(self.next_logprob - 1, 0))
        return limit

    @property
    def next_logprob(self) -> int:
        """Position of the first prompt token whose log-probability is wanted and not known yet."""
        start = self.params.logprob_start
        return len(self.prompt) if start is None else start + len(self.prompt_logprobs)

    @property
    def computed(self) -> bool:
        """All tokens have KV: the next one can be sampled."""
        return self.kv_len == self.length

    def check(self) -> None:
        """The one assertion about the three lengths."""
        ordered = 0 <= self.protected_len <= self.kv_len <= self.length
        require(ordered, f"{self.id}: {self.protected_len} <= {self.kv_len} <= {self.length} fails")
