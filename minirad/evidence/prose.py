"""Something to read: true sentences of the classroom Llama's lessons, to make prompts as long as the paper's."""

from __future__ import annotations

import random
from typing import Final

from minirad.model.classroom import corpus


def _all_sentences() -> list[str]:
    days = corpus.DAYS
    return [
        *(f"The capital of {country} is {city}." for country, city in corpus.CAPITALS.items()),
        *(f"{thing[0].upper()}{thing[1:]} is {color}." for thing, color in corpus.THING_COLORS.items()),
        *(f"A {animal} says {sound}." for animal, sound in corpus.SOUNDS.items()),
        *(f"The opposite of {word} is {other}." for word, other in corpus.OPPOSITES.items()),
        *(f"{after} comes after {day}." for day, after in zip(days, days[1:] + days[:1], strict=True)),
    ]


_SENTENCES: Final = _all_sentences()


def sentences(rng: random.Random, count: int) -> list[str]:
    """`count` different sentences (at most 79), of about 9 tokens each for the classroom Llama."""
    return rng.sample(_SENTENCES, count)
