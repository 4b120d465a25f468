"""The sampler: exact where it is exact, by chi-square where it is random, always repeatable."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from minirad.model.sampler import position_uniform, prompt_logprobs, sample

torch.set_num_threads(1)


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def draws(logits: torch.Tensor, params: Params, count: int, seed: int = 1) -> list[int]:
    uniforms = [position_uniform(seed, 0, i) for i in range(count)]
    return sample(logits.expand(count, -1), [params] * count, uniforms)[0]


def chi_square(tokens: list[int], probs: torch.Tensor) -> float:
    counts, n = Counter(tokens), len(tokens)
    assert all(probs[t] > 0 for t in counts), "a token of probability 0 was drawn"
    kept = [(counts[i], p * n) for i, p in enumerate(probs.tolist()) if p > 0]
    return sum((seen - expected) ** 2 / expected for seen, expected in kept)


def test_greedy_takes_the_maximum_and_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    tokens, logprobs = sample(logits, [Params(temperature=0)] * 2, [0.9, 0.9])
    assert tokens == [1, 0]
    assert logprobs[0] == pytest.approx(torch.log_softmax(logits[0], 0)[1].item(), abs=1e-6)
    assert logprobs[1] == pytest.approx(math.log(1 / 4), abs=1e-6)


def test_draws_follow_the_distribution_at_any_temperature() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -30.0])
    for temperature in (0.5, 1.0, 2.0):
        probs = torch.softmax(logits / temperature, 0)
        tokens = draws(logits, Params(temperature), 4000)
        probs[5] = 0.0  # about 1e-14: never drawn, no cell of its own
        assert chi_square(tokens, probs) < 18.47  # 4 degrees of freedom, p = 0.001


def test_each_token_owns_a_half_open_interval() -> None:
    uniforms = [0.0, 0.2499, 0.25, 0.5, 0.75, 1 - 2**-53]
    tokens, _ = sample(torch.zeros(6, 4), [Params()] * 6, uniforms)
    assert tokens == [0, 0, 1, 2, 3, 3]


def test_top_k_keeps_exactly_k() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, -1.0])
    kept = torch.tensor([False, True, True, True, False, False])  # among equals the lowest ids
    probs = torch.softmax(logits.masked_fill(~kept, -math.inf), 0)
    assert chi_square(draws(logits, Params(top_k=3), 3000), probs) < 13.82  # 2 df
    assert set(draws(logits, Params(temperature=5.0, top_k=1), 50)) == {1}
    everything = draws(logits, Params(top_k=99), 100)
    assert everything == draws(logits, Params(), 100)


def test_top_p_keeps_the_fewest_that_reach_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(draws(logits, Params(top_p=0.39), 200)) == {0}
    assert set(draws(logits, Params(top_p=0.5), 200)) == {0, 1}
    assert set(draws(logits, Params(top_p=0.95), 400)) == {0, 1, 2, 3}
    assert set(draws(logits, Params(top_p=1e-9), 50)) == {0}
    probs = torch.tensor([4.0, 3.0, 0.0, 0.0]) / 7
    assert chi_square(draws(logits, Params(top_p=0.5), 2000), probs) < 10.83  # 1 df


def test_top_p_equals_sorting_the_whole_vocabulary() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5000, generator=generator) * 3
    for top_p in (0.3, 0.9, 0.99):
        ranked = torch.softmax(logits.double(), 0).sort(descending=True)
        count = int((ranked.values.cumsum(0) - ranked.values < top_p).sum())
        nucleus = set(ranked.indices[:count].tolist())
        # uniforms just inside both ends hit the lowest and the highest id of the kept set
        ends, _ = sample(logits.expand(2, -1), [Params(top_p=top_p)] * 2, [0.0, 1 - 1e-12])
        assert ends == [min(nucleus), max(nucleus)]
        assert set(draws(logits, Params(top_p=top_p), 500)) <= nucleus


def test_top_k_comes_before_top_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # of the two kept, token 0 holds 4/7 = 0.571 of the probability
    assert set(draws(logits, Params(top_k=2, top_p=0.55), 200)) == {0}
    assert set(draws(logits, Params(top_k=2, top_p=0.6), 200)) == {0, 1}


def test_masks_hold_for_greedy_and_random_rows() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0, 2.0]]).expand(3, -1)
    mask = torch.tensor([False, True, True, False])
    params = [Params(temperature=0), Params(temperature=0), Params(temperature=3.0)]
    tokens, logprobs = sample(logits, params, [0.5, 0.5, 0.999], [None, mask, mask])
    assert tokens[:2] == [0, 1] and tokens[2] in (1, 2)
    # the model's own probability, not the one after masking
    assert logprobs[1] == pytest.approx(torch.log_softmax(logits[0], 0)[1].item(), abs=1e-6)
    for p in (Params(), Params(top_k=2), Params(top_p=0.5)):
        uniforms = [i / 100 for i in range(100)]
        drawn, _ = sample(logits[:1].expand(100, -1), [p] * 100, uniforms, [mask] * 100)
        assert set(drawn) <= {1, 2}


def test_an_empty_mask_names_the_request() -> None:
    masks = [None, torch.zeros(4, dtype=torch.bool)]
    with pytest.raises(ValueError, match="request 1 allows no token"):
        sample(torch.zeros(2, 4), [Params()] * 2, [0.1, 0.2], masks)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("masked", [False, True])
def test_nan_logits_show_in_the_log_probability_of_their_row_alone(temperature: float, masked: bool) -> None:
    logits = torch.zeros(3, 4)
    logits[2, 1] = math.nan
    masks = [None, torch.ones(4, dtype=torch.bool), None] if masked else None
    _, logprobs = sample(logits, [Params(temperature=temperature)] * 3, [0.3] * 3, masks)
    assert [math.isnan(each) for each in logprobs] == [False, False, True]


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_k": 5, "top_p": 0.9}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-308, 1e-300, 1e-30, 1e-9])
def test_a_tiny_temperature_is_the_limit_that_it_means(temperature: float, limits: dict) -> None:
    logits = torch.randn((4, 50), generator=torch.Generator().manual_seed(0)) * 40
    allow = torch.arange(50) % 3 > 0
    for masks in (None, [None, allow, None, allow]):
        tiny = sample(logits, [Params(temperature=temperature, **limits)] * 4, [0.0, 0.3, 0.7, 0.99], masks)
        assert tiny == sample(logits, [Params(temperature=0)] * 4, [0.0] * 4, masks)


def test_mismatched_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits, 1 params, 2 uniforms"):
        sample(torch.zeros(2, 4), [Params()], [0.1, 0.2])


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(12, 1000, generator=generator) * 2
    params = [Params(0.8, 0.9, 50 * (i % 3)) for i in range(12)]
    uniforms = [position_uniform(7, 0, i) for i in range(12)]
    together, logprobs = sample(logits, params, uniforms)
    for i in range(12):
        alone, logprob = sample(logits[i : i + 1], params[i : i + 1], uniforms[i : i + 1])
        assert alone == together[i : i + 1]
        assert logprob[0] == pytest.approx(logprobs[i], abs=1e-6)
    order = torch.randperm(12, generator=generator).tolist()
    shuffled, _ = sample(logits[order], [params[i] for i in order], [uniforms[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_uniforms_are_fixed_for_ever() -> None:
    """Recordings and lessons quote sampled text, so these numbers are part of the interface."""
    assert position_uniform(0, 0, 0) == position_uniform(0, 0, 0)
    assert [round(position_uniform(1, 2, i), 6) for i in range(3)] == [
        0.900611,
        0.719073,
        0.910899,
    ]
    numbers = {position_uniform(s, n, p) for s in range(12) for n in range(12) for p in range(12)}
    assert len(numbers) == 12**3
    assert position_uniform(-1, 0, 0) != position_uniform(1, 0, 0)
    assert 0 <= position_uniform(2**70, 3, 2**40) < 1


def test_uniforms_are_uniform_over_positions_and_seeds() -> None:
    for values in (
        [position_uniform(3, 0, i) for i in range(5000)],
        [position_uniform(i, 0, 3) for i in range(5000)],
        [position_uniform(3, i, 3) for i in range(5000)],
    ):
        counts = Counter(int(v * 20) for v in values)
        assert sum((counts[i] - 250) ** 2 / 250 for i in range(20)) < 43.82  # 19 df, p = 0.001


def test_prompt_logprobs() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    got = prompt_logprobs(logits, torch.tensor([3, 0, 8, 1]))
    expected = torch.log_softmax(logits, -1)[range(4), [3, 0, 8, 1]]
    assert got == pytest.approx(expected.tolist(), abs=1e-6)
