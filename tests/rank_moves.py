"""What tests have other ranks do: functions that a RankPair runs there, and what is sent along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters:
    """A tokenizer of single letters: token 0 says "a"."""

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join(LETTERS[token] for token in ids)


class EveryOther:
    """A mask: ids of one parity alone, which changes with each token; after `free` tokens anything goes."""

    def __init__(self, vocab: int, free: int) -> None:
        self.vocab, self.free = vocab, free

    def allowed(self, count: int) -> list[int]:
        """The ids that may come after so many."""
        every = range(self.vocab)
        return list(every) if count >= self.free else [token for token in every if (token + count) % 2]

    def __call__(self, output: list[int]) -> Any:
        if len(output) >= self.free:
            return None
        row = torch.zeros(self.vocab, dtype=torch.bool)
        row[self.allowed(len(output))] = True
        return row


class FailsAt(EveryOther):
    """A mask whose answer to `free` tokens is an error, or no mask at all."""

    def __init__(self, vocab: int, free: int, wrong: Any) -> None:
        super().__init__(vocab, free)
        self.wrong = wrong

    def __call__(self, output: list[int]) -> Any:
        if len(output) < self.free:
            return super().__call__(output)
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return self.wrong
