"""Something to read, which makes prompts as long as the paper's: what the classroom Llama knows."""

from __future__ import annotations

import random

from minirad.model.classroom import corpus


def paragraph(rng: random.Random) -> str:
    """A story, or four solved questions: about 95 tokens for the classroom Llama, 75 words."""
    if rng.random() < 0.5:
        return corpus.story(rng, rng.choice(corpus.ANIMALS))
    return solved_questions(rng)


def solved_questions(rng: random.Random, count: int = 4) -> str:
    """Questions with their answers, numbered."""
    return corpus.few_shot_header(corpus.few_shot_examples(count, rng)).strip()


def paragraphs(rng: random.Random, count: int, *last: str) -> str:
    """That many of them, and then what is said last, with blank lines between."""
    return "\n\n".join([*(paragraph(rng) for _ in range(count)), *last])
