"""evidence/partial.py: less is given of each match, and nothing else changes."""

from __future__ import annotations

import pytest
from conftest import CheckedEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from minirad import EngineConfig, RadixCache, RadixKey, SamplingParams
from minirad.evidence.partial import PartialCache
from minirad.model.llama import LlamaModel

TOKENS = st.lists(st.integers(0, 2), max_size=9)
REPLY = SamplingParams(max_new_tokens=6, ignore_eos=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(TOKENS, max_size=6), TOKENS, st.floats(0, 1), st.sampled_from((1, 2, 3)))
def test_the_first_part_of_the_match_is_given(
    inserted: list[list[int]], asked: list[int], kept: float, page: int
) -> None:
    whole, part = RadixCache(page), PartialCache(kept, page)
    for number, tokens in enumerate(inserted):
        slots = [100 * number + at for at in range(len(tokens))]
        for tree in (whole, part):
            tree.insert(RadixKey(tokens), slots)
    key = RadixKey(asked)
    full, given_, looked = whole.match_prefix(key), part.peek(key), part.find(key).length
    match = part.match_prefix(key)
    part.check()
    assert match.length == given_ == looked
    assert match.length % page == 0 and match.length <= kept * full.length + 1e-6
    assert match.length > kept * full.length - page - 1e-6
    assert match.slots.tolist() == full.slots[: match.length].tolist()
    assert part.total_size == whole.total_size


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.75, 1.0])
def test_replies_are_the_same_and_less_is_hit(tiny_model: LlamaModel, kept: float, page: int) -> None:
    prompts = [[*range(5, 37), 40 + at, *range(3)] for at in range(6)]
    said, hits = [], []
    for tree in (PartialCache(kept, page), RadixCache(page)):
        config = EngineConfig(
            device="cpu", kv_tokens=120, page_size=page, max_running=3, chunk_tokens=16, poison_freed=True
        )  # fmt: skip
        engine = CheckedEngine(config, tree, model=tiny_model)
        first = engine.generate([prompts[0]], REPLY)
        rest = engine.generate(prompts[1:], REPLY)
        said.append([out.token_ids for out in first + rest])
        hits.append([out.cached_tokens for out in rest])
    assert said[0] == said[1]
    assert hits[1] == [32] * 5
    assert hits[0] == [int(32 * kept) // page * page] * 5


def test_the_share_changes_while_it_runs() -> None:
    tree, key = PartialCache(0.5), RadixKey(range(8))
    tree.insert(key, range(8))
    assert tree.peek(key) == 4
    tree.kept = 1
    assert tree.peek(key) == 8
    for wrong in (-0.1, 1.5, float("nan"), "half"):
        with pytest.raises(ValueError, match="kept must be"):
            tree.kept = wrong  # type: ignore[assignment]
    assert tree.kept == 1
