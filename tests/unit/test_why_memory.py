"""The tree with a memory, told by hand: blocks that leave in any order, what is forgotten or refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from minirad.why import Asked, Departure, Memory, why
from minirad.why.words import Words

BLOCK = 4


def asked(tokens: Any, namespace: Any = None, page_size: int = 1, **more: Any) -> Asked:
    return Asked.of(tokens, namespace, page_size, "R9", **more)


def told(
    memory: Memory, tokens: Any, namespace: Any = None, page_size: int = 1
) -> list[tuple[str, int, int]]:
    answer = why(memory, asked(tokens, namespace, page_size))
    assert sum(loss.tokens for loss in answer.losses) == answer.missed
    return [(loss.cause, loss.start, loss.tokens) for loss in answer.losses]


class Blocks:
    """A cache of blocks as vLLM's: each may leave by itself, from each of two media. As naive as can be."""

    def __init__(self, seed: int) -> None:
        self.rng, self.memory = random.Random(seed), Memory()
        self.held: dict[tuple[Any, ...], set[str]] = {}
        self.left: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
        self.now = 0

    def put(self, space: str, tokens: list[int]) -> None:
        """A prompt's whole blocks come to the device, a few of them to the host as well."""
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            key = (space, *tokens[:end])
            for medium in ("GPU", *(("CPU",) if self.rng.random() < 0.2 else ())):
                if medium not in self.held.setdefault(key, set()):
                    self.held[key].add(medium)
                    self.left[key] = [each for each in self.left.get(key, []) if each[1] != medium]
                    self.memory.came(space, tokens[:end], end - BLOCK, when=self.now, by="R1", medium=medium)

    def drop(self) -> None:
        key = self.rng.choice([key for key, media in self.held.items() if media] or [()])
        if key:
            medium = self.rng.choice(sorted(self.held[key]))
            self.held[key].remove(medium)
            self.left[key].append((self.now, medium))
            left = Departure(self.now, "evicted", medium)
            self.memory.left(key[0], list(key[1:]), len(key) - 1 - BLOCK, left)

    def causes(self, space: str, tokens: list[int]) -> list[str]:
        """Of each block that is computed; a rest that is no block is not judged."""
        keys = [(space, *tokens[:end]) for end in range(BLOCK, len(tokens), BLOCK)]
        hit = 0
        while hit < len(keys) and "GPU" in self.held.get(keys[hit], ()):
            hit += 1
        elsewhere = 0
        for other in {"a", "b"} - {space}:
            mine = [(other, *key[1:]) for key in keys]
            at = 0
            while at < len(mine) and "GPU" in self.held.get(mine[at], ()):
                at += 1
            elsewhere = max(elsewhere, at)
        known = max([at + 1 for at, key in enumerate(keys) if key in self.held], default=0)
        found = []
        for at in range(hit, len(keys)):
            media = self.held.get(keys[at])
            if media:
                host = all(self.held.get(key) == {"CPU"} for key in keys[hit : at + 1])
                found.append("host" if host else "hole")
            elif media is not None:
                found.append("evicted")
            else:
                found.append("namespace" if at < elsewhere and elsewhere > known else "not here")
        return found


def test_blocks_that_leave_in_any_order() -> None:
    seen: dict[str, int] = {}
    for seed in range(30):
        blocks = Blocks(seed)
        rng = blocks.rng
        texts = [[rng.randrange(3) for _ in range(24)] for _ in range(2)]
        for blocks.now in range(60):
            tokens = rng.choice(texts)[: rng.randrange(4, 25)] + [
                rng.randrange(3) for _ in range(rng.randrange(4))
            ]
            space = rng.choice("aab")
            answer = why(blocks.memory, asked(tokens, space, BLOCK), blocks.now)
            by_token = [loss.cause for loss in answer.losses for _ in range(loss.tokens)]
            wanted = blocks.causes(space, tokens)
            for at, cause in enumerate(wanted):
                mine = by_token[at * BLOCK : (at + 1) * BLOCK]
                fine = ("new", "differs", "page", "last") if cause == "not here" else (cause,)
                assert set(mine) <= set(fine), (seed, blocks.now, answer, wanted)
                seen[cause] = seen.get(cause, 0) + 1
            assert answer.cached == (len(tokens) - 1) // BLOCK * BLOCK - BLOCK * len(wanted)
            if rng.random() < 0.6:
                blocks.put(space, tokens)
            for _ in range(rng.randrange(4)):
                blocks.drop()
    assert all(seen[cause] > 20 for cause in ("hole", "host", "evicted", "namespace", "not here")), seen


def test_an_eviction_is_told_with_when_why_and_the_last_use() -> None:
    memory = Memory()
    memory.came(None, range(8), when=1, by="R1")
    memory.used(None, range(8), when=3, by="R2")
    memory.left(None, range(8), 4, Departure(9, "evicted", by=("R7",), policy="lru"))
    answer = why(memory, asked([*range(8), 50, 51]), 12)
    assert (answer.cached, answer.matched, answer.common) == (4, 4, 8)
    evicted, new = answer.losses
    assert (evicted.cause, evicted.start, evicted.tokens, evicted.other) == ("evicted", 4, 4, "R1")
    assert (evicted.used, evicted.user, evicted.left[0].by) == (3, "R2", ("R7",))
    assert (new.cause, new.start, new.tokens, new.other) == ("new", 8, 2, "R1")
    assert Words().sentence(answer) == (
        "R9 finds 4 of 10 tokens in the cache; computed are 4 that were evicted from the device in step 9 "
        "for R7 by lru, 6 steps after their last use by R2; 2 never seen, behind what R1 had"
    )


def test_both_tiers_of_what_went_step_by_step() -> None:
    memory = Memory()
    memory.came(None, range(4), when=1, by="R1")
    memory.came(None, range(4), when=2, medium="CPU")
    memory.left(None, range(4), 0, Departure(5, "evicted", "GPU"))
    assert told(memory, range(5)) == [("host", 0, 4), ("new", 4, 1)]
    memory.left(None, range(4), 0, Departure(8, "evicted", "CPU", along=True))
    (evicted, _) = why(memory, asked(range(5))).losses
    assert [(left.when, left.medium) for left in evicted.left] == [(5, "GPU"), (8, "CPU")]
    memory.came(None, range(4), when=9, by="R4")
    assert why(memory, asked(range(5))).cached == 4
    assert memory.record(None, range(4)).left[0].medium == "CPU"  # not back on the host


def test_flushes_and_new_weights_take_everything() -> None:
    memory = Memory()
    for space in "ab":
        memory.came(space, range(6), when=1, by="R1")
    memory.gone(4, "weights", ["a"])
    assert told(memory, range(6), "a") == [("weights", 0, 5), ("last", 5, 1)]
    assert why(memory, asked(range(6), "b")).cached == 5
    memory.gone(5, "flushed")
    assert told(memory, range(6), "b") == [("flushed", 0, 5), ("last", 5, 1)]
    assert told(memory, range(6), "a") == [("weights", 0, 5), ("last", 5, 1)], "it left by the weights"


def test_a_computation_that_runs_and_then_comes_to_nothing() -> None:
    memory = Memory()
    memory.began(None, range(8), when=1, by="R1")
    assert told(memory, range(9)) == [("running", 0, 8), ("new", 8, 1)]
    assert told(memory, [0, 1, 2, 3, 9]) == [("running", 0, 4), ("differs", 4, 1)]
    memory.ended("R1", 2, "aborted")
    assert told(memory, range(9)) == [("aborted", 0, 8), ("new", 8, 1)]
    memory.ended("R1", 2, "aborted")  # twice does no harm


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_and_the_last_token(page_size: int) -> None:
    memory = Memory()
    memory.came(None, range(8), when=1, by="R1")
    if page_size == 1:
        assert told(memory, range(8)) == [("last", 7, 1)]
        assert told(memory, [0, 1, 2, 3, 4, 5, 9, 9]) == [("differs", 6, 2)]
    else:
        assert told(memory, range(8), page_size=4) == [("page", 4, 3), ("last", 7, 1)]
        assert told(memory, [0, 1, 2, 3, 4, 5, 9, 9], page_size=4) == [("page", 4, 2), ("differs", 6, 2)]
    answer = why(memory, asked(range(8), None, page_size, usable=5))
    assert [loss.cause for loss in answer.losses] == (["page"] if page_size == 4 else []) + [
        "logprobs",
        "last",
    ]


def test_where_two_prompts_part_is_shown() -> None:
    memory = Memory()
    memory.came(None, [*range(20), 70, 71], when=1, by="R1")
    memory.came(None, [*range(20), 80, 81], when=2, by="R2")
    (loss,) = why(memory, asked([*range(20), 90, 91])).losses
    assert (loss.cause, loss.other, loss.ours, loss.theirs) == ("differs", "R2", (90, 91), (80, 81))
    assert loss.before == tuple(range(8, 20))
    words = Words(lambda ids: "".join(f"<{token}>" for token in ids))
    before, ours, theirs = words.parting(loss)
    assert before.endswith("<19><") and ours == "90><91>" and theirs == "80><81>"


def test_what_was_there_before_the_memory_begins() -> None:
    """A stream that is followed from its middle tells of tokens behind others that it never told of."""
    memory = Memory()
    memory.came("a", range(8), 4, when=1, by="R1")
    assert told(memory, range(9), "a") == [("unknown", 0, 4), ("hole", 4, 4), ("new", 8, 1)]
    memory.came("b", range(6), when=2, by="R2")
    assert told(memory, range(9), "a") == [("unknown", 0, 4), ("hole", 4, 4), ("new", 8, 1)]
    assert told(memory, range(9), "c") == [("namespace", 0, 6), ("new", 6, 3)]
    memory.came("b", range(12), when=3, by="R3")
    wanted = [("namespace", 0, 4), ("hole", 4, 4), ("namespace", 8, 4), ("new", 12, 1)]
    assert told(memory, range(13), "a") == wanted


def test_what_goes_on_is_told_from_where_it_does() -> None:
    """Also after the run behind the place was divided further down."""
    memory = Memory()
    memory.came(None, [1, 2], when=1, by="R1")
    memory.came(None, [1, 2, 5, 6, 7, 8], when=2, by="R2")
    memory.came(None, [1, 2, 5, 6, 9], when=3, by="R3")
    (loss,) = why(memory, asked([1, 2, 3])).losses
    assert (loss.cause, loss.theirs[0]) == ("differs", 5)


def test_what_is_forgotten_is_said_to_be() -> None:
    memory = Memory(most=2_000)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 1000, 100) for _ in range(60)]
    for number, prompt in enumerate(prompts):
        memory.came("a", prompt, when=number, by=f"R{number}")
        memory.left("a", prompt, 50, Departure(number, "evicted"))
        if number % 2:
            memory.left("a", prompt[:50], 0, Departure(number, "evicted"))
    assert memory.forgotten and memory.forgot_beginning
    held = sum(len(prompt[:50]) + 16 for prompt in prompts[::2])
    assert memory.kept <= max(2_000, held + 400)
    assert told(memory, prompts[0], "a") == [("forgotten", 50, 50)], "the part that is in the cache is kept"
    assert told(memory, prompts[1], "a") == [("forgotten", 0, 100)]
    assert told(memory, prompts[59], "a") == [("evicted", 0, 99), ("last", 99, 1)]
    parted = [*prompts[58][:30], 2000]
    assert told(memory, parted, "a") == [("differs", 30, 1)], "nothing was forgotten there"


def test_a_bound_holds_for_many_namespaces_of_one_text() -> None:
    memory = Memory(most=5_000)
    for number in range(2_000):
        memory.came(number, range(30), when=number)
        memory.gone(number, "evicted", [number])
    assert memory.kept <= 5_000
    assert len(memory.root.children) == 1


def test_what_is_no_path_is_refused() -> None:
    memory = Memory(2)
    with pytest.raises(ValueError, match="no whole number of units"):
        memory.came(None, [1, 2, 3], when=0)
    with pytest.raises(ValueError, match="the prompt is empty"):
        asked([])
    with pytest.raises(ValueError, match="width must be at least 1"):
        Memory(0)
    with pytest.raises(ValueError, match="most must be at least 1"):
        Memory(most=0)


def test_pairs_of_tokens() -> None:
    memory = Memory(2)
    first = Asked.of([1, 2, 3, 4, 5], pairs=True)
    assert len(first.data) == 4 * 8 and (first.length, first.usable) == (5, 4)
    memory.came(None, first.data, when=1, by="R1")
    answer = why(memory, first)
    assert answer.cached == 4 and [(loss.cause, loss.tokens) for loss in answer.losses] == [("last", 1)]
    other = why(memory, Asked.of([1, 2, 3, 9, 9], pairs=True))
    assert other.cached == 2 and [(loss.cause, loss.tokens) for loss in other.losses] == [("differs", 3)]
