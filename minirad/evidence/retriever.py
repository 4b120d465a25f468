"""Finds texts by their words: BM25 (Robertson and Zaragoza 2009), the usual measure of keyword search."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

K1, B = 1.5, 0.75  # how soon a repeated word counts no more; how much long texts are held back


def words(text: str) -> list[str]:
    """The words of a text, small letters only."""
    return re.findall(r"[a-z0-9]+", text.lower())


class Retriever:
    """An index over texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        self._counts = [Counter(words(text)) for text in texts]
        self._found_in = Counter(word for counts in self._counts for word in counts)
        self._mean = sum(counts.total() for counts in self._counts) / max(1, len(texts)) or 1.0

    def search(self, query: str, k: int) -> list[str]:
        """The `k` texts that fit best, best first; of equals the earlier one."""
        scores = self.scores(query)
        best = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:k]
        return [self.texts[at] for at in best]

    def scores(self, query: str) -> list[float]:
        """How well each text fits; 0 where no word of the query is in it."""
        return [self._score(counts, words(query)) for counts in self._counts]

    def _score(self, counts: Counter[str], query: Sequence[str]) -> float:
        length = 1 - B + B * counts.total() / self._mean
        return sum(
            self._rarity(word) * counts[word] * (K1 + 1) / (counts[word] + K1 * length) for word in query
        )

    def _rarity(self, word: str) -> float:
        found = self._found_in[word]
        return math.log(1 + (len(self.texts) - found + 0.5) / (found + 0.5))
