"""What the pages say that a prompt would find is what a request with it gets."""

from __future__ import annotations

import numpy as np
import pytest

from minirad import SamplingParams
from viz.fork import Found, evict_by_hand, what_if

TIERS = ({}, {"host_kv_tokens": 400}, {"host_kv_tokens": 400, "host_write": "write_back"})


@pytest.mark.parametrize("tier", TIERS, ids=["no tier", "write_through", "write_back"])
@pytest.mark.parametrize("page", [1, 4])
def test_a_request_gets_what_was_said(make_engine, page, tier) -> None:
    engine = make_engine(kv_tokens=200, page_size=page, load_back_threshold=1, **tier)
    rng, seen, found = np.random.default_rng(page), [[1, 2, 3]], set()
    for turn in range(30):
        begun = seen[rng.integers(len(seen))]
        prompt = [*begun[: rng.integers(1, len(begun) + 1)], *rng.integers(5, 50, turn % 3 * 4).tolist()]
        if turn % 5 == 4:
            engine.cache_manager.wait_for_copies()
            evict_by_hand(engine, (20, 200)[turn % 2])
        said = what_if(engine, prompt)
        (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=2, ignore_eos=True))
        assert output.cached_tokens == said.hit + said.back, (turn, prompt)
        found.add((said.hit > 0, said.back > 0))
        seen.append([*prompt, *output.token_ids][:30])
        engine.check()
    assert found >= {(False, False), (True, False)} and (not tier or (False, True) in found)
    assert what_if(engine, []) == Found(0, 0)


def test_a_tree_that_finds_in_its_own_way_is_asked_itself(make_engine) -> None:
    """It has no tiers: what it does not give is not loaded back either."""
    engine = make_engine(kv_tokens=200)
    engine.generate([list(range(5, 15))], SamplingParams(max_new_tokens=1))
    find = engine.cache.find

    def half(key, found=None):
        whole = find(key, found)
        whole.length //= 2
        return whole

    engine.cache.find, engine.cache.peek = half, lambda key: half(key).length
    assert what_if(engine, list(range(5, 15))) == Found(engine.peek(list(range(5, 15))), 0)


def test_what_is_too_little_is_not_loaded_back(make_engine) -> None:
    engine = make_engine(kv_tokens=200, host_kv_tokens=400, load_back_threshold=9)
    engine.generate([list(range(5, 15))], SamplingParams(max_new_tokens=1))
    engine.cache_manager.wait_for_copies()
    evict_by_hand(engine, 200)
    assert what_if(engine, list(range(5, 15))) == Found(0, 9)
    engine.cache.load_back_threshold = 10
    assert what_if(engine, list(range(5, 15))) == Found(0, 0)
