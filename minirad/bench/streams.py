"""Request streams for measuring a prefix cache: what is looked up, and what is in it afterwards.

Tokens are random numbers: a cache cannot tell. The shapes are those in which real engines meet
prefixes: conversations, a shared instruction, nothing in common, more than fits, and prefixes that
part anywhere. Every stream comes out the same each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minirad.cache.radix_cache import Slots

VOCABULARY = 128_000
SEED = 1234
Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests in order, each a prompt and what is to be cached at its end (prompt and reply).

    pool_tokens: how many KV slots there are; None: more than enough.
    """

    name: str
    requests: list[tuple[Slots, Slots]]
    pool_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        """Tokens to cache if nothing were shared."""
        return sum(len(full) for _, full in self.requests)

    def head(self, count: int | None) -> Stream:
        """The first `count` requests (None: all)."""
        return Stream(self.name, self.requests[:count], self.pool_tokens)


def _tokens(rng: Rng, count: int) -> Slots:
    return rng.integers(1, VOCABULARY, count)


def _prompts_only(name: str, prompts: list[Slots], pool_tokens: int | None = None) -> Stream:
    return Stream(name, [(prompt, prompt) for prompt in prompts], pool_tokens)


def chat(rng: Rng) -> Stream:
    """64 conversations of 16 turns in turn, below one system prompt of 2,500 tokens.

    Every turn adds 32 to 256 tokens of the user's and as many of the reply.
    """
    system = _tokens(rng, 2500)
    histories = [system] * 64
    requests = []
    for _ in range(16):
        for session, history in enumerate(histories):
            question = _tokens(rng, int(rng.integers(32, 257)))
            reply = _tokens(rng, int(rng.integers(32, 257)))
            prompt = np.concatenate((history, question))
            histories[session] = np.concatenate((prompt, reply))
            requests.append((prompt, histories[session]))
    return Stream("chat", requests)


def fewshot(rng: Rng) -> Stream:
    """1,000 questions of 200 tokens below the same 2,000 tokens of examples."""
    examples = _tokens(rng, 2000)
    return _prompts_only("fewshot", [np.concatenate((examples, _tokens(rng, 200))) for _ in range(1000)])


def noshare(rng: Rng) -> Stream:
    """2,000 prompts of 1,024 tokens with nothing in common: what a cache costs when it never helps."""
    return _prompts_only("noshare", [_tokens(rng, 1024) for _ in range(2000)])


def evict(rng: Rng) -> Stream:
    """5,000 prompts of 512 to 2,048 tokens through a pool of 200,000 slots.

    Each begins with one of 256 prefixes of 128 to 1,024 tokens, whose popularity falls by Zipf's law
    (exponent 1.1), so that some stay in the cache and others come back too late.
    """
    prefixes = [_tokens(rng, int(rng.integers(128, 1025))) for _ in range(256)]
    weights = 1.0 / np.arange(1, 257) ** 1.1
    weights /= weights.sum()
    prompts = []
    for _ in range(5000):
        prefix = prefixes[rng.choice(256, p=weights)]
        length = int(rng.integers(512, 2049))
        tail = _tokens(rng, max(0, length - len(prefix)))
        prompts.append(np.concatenate((prefix[:length], tail)))
    return _prompts_only("evict", prompts, 200_000)


def split(rng: Rng) -> Stream:
    """3,000 prompts that follow one of 8 texts of 2,048 tokens up to a random place, then 64 of their own.

    Almost every one splits a node, so the tree becomes deep.
    """
    texts = [_tokens(rng, 2048) for _ in range(8)]
    prompts = list(texts)
    for _ in range(3000):
        text = texts[rng.integers(0, 8)]
        cut = int(rng.integers(1, 2048))
        prompts.append(np.concatenate((text[:cut], _tokens(rng, 64))))
    return _prompts_only("split", prompts)


STREAMS: dict[str, Callable[[Rng], Stream]] = {
    "chat": chat,
    "fewshot": fewshot,
    "noshare": noshare,
    "evict": evict,
    "split": split,
}


def stream(name: str) -> Stream:
    """A stream by its name; ValueError names the ones there are."""
    if name not in STREAMS:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(STREAMS)}")
    return STREAMS[name](np.random.default_rng(SEED))
