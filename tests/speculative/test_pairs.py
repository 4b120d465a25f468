"""Why a draft head wants pairs: its key and value of a token depend on the next token as well.

So of two texts that part behind token n, the target's KV of token n may be shared and the head's may not. A
tree of pairs shares just what is equal: played here over branches, early ends, retractions and tiers, and
every slot of tree and rows compared with what its tokens give alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draft_support import (
    Game,
    Guide,
    engine_of,
    fresh_hidden,
    fresh_kv,
    replies,
    require_kv_as_computed_alone,
    write_head,
)
from support import drive, one_slow

from minirad.attention.metadata import BatchEntry, build_metadata
from minirad.config import SamplingParams
from minirad.model.llama import LlamaModel
from minirad.tiers.disk import DiskTier


@pytest.fixture(scope="module")
def head(tiny_model: LlamaModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("heads") / "head", tiny_model)


@pytest.mark.parametrize("pairs", [True, False])
def test_at_a_fork_pairs_are_equal_and_tokens_are_not(
    tiny_model: LlamaModel, head: Path, pairs: bool
) -> None:
    """Two prompts part behind the eighth token: the second one finds the first one's KV."""
    stem = [5, 9, 13, 17, 21, 25, 29, 33]
    engine = engine_of(tiny_model, head, speculative="eagle", bigram_keys=pairs)
    engine.generate([[*stem, 40, 41]], SamplingParams(max_new_tokens=1))
    engine.add_request([*stem, 50, 51], SamplingParams(max_new_tokens=9, ignore_eos=True))
    engine.step()
    request = engine.scheduler.running[0]
    assert request.cached_tokens == len(stem) - pairs  # of eight tokens in common seven pairs are
    tokens = request.tokens.tolist()
    last = len(stem) - 1
    slot = int(engine.rows.rows[request.row, last])
    model, drafter = engine.model, engine.runner.drafter
    keys, values, features = fresh_kv(drafter.head, tokens)
    kept = [engine.pool.k[-1][slot], engine.pool.v[-1][slot]]
    # What the head says at the end reads that slot: computed once more over what lies in the pool.
    entry = BatchEntry(request.row, len(tokens) - 2, len(tokens) - 1)
    metadata = build_metadata(engine.rows.rows, [entry], 1, "cpu")
    hidden = fresh_hidden(model, tokens)[-2:-1]
    behind = torch.tensor(tokens[-1:])
    feature = drafter.head.forward(behind, hidden, metadata, engine.pool, engine.attention)
    said = [drafter.head.logits(each)[0] for each in (feature, features[-1:])]
    differ = [
        float((kept[0] - keys[-1][last]).abs().max()),
        float((kept[1] - values[-1][last]).abs().max()),
        float((said[0] - said[1]).abs().max()),
    ]
    if pairs:
        assert max(differ) < 1e-4
    else:
        assert min(differ) > 1e-2
    for layer in range(model.config.layers):  # the target's own KV may be shared either way
        assert torch.allclose(engine.pool.k[layer][slot], keys[layer][last], atol=1e-5)


GAMES = [
    {"kv_tokens": 256},
    {"kv_tokens": 64},
    {"kv_tokens": 256, "page_size": 4, "chunk_tokens": 8, "mixed": True},
    {"kv_tokens": 64, "page_size": 4, "mixed": True},
    {"kv_tokens": 128, "page_size": 16},
    {"kv_tokens": 64, "host_kv_tokens": 128},
    {"kv_tokens": 64, "page_size": 4, "host_kv_tokens": 64, "host_write": "write_back"},
]


@pytest.mark.parametrize("config", one_slow(2, GAMES), ids=[str(at) for at in range(len(GAMES))])
def test_all_that_is_shared_is_what_its_tokens_give_alone(
    tiny_model: LlamaModel, head: Path, config: dict[str, Any]
) -> None:
    branched = retracted = loaded = looked = 0
    config = {"load_back_threshold": 1, **config}
    for seed in (1, 2):
        game = Game(seed, n=1 + seed)
        plain = game.play(engine_of(tiny_model, head, **config))
        engine = engine_of(tiny_model, head, speculative="eagle", **config)
        Guide(engine, replies(game.prompts, plain), 0.7)
        steps = [0]

        def look(engine: Any, steps: list[int] = steps) -> None:
            nonlocal looked
            steps[0] += 1
            if steps[0] % 13 == 0:
                engine.cache_manager.wait_for_copies()
                looked += require_kv_as_computed_alone(engine)

        game.play(engine, look)
        engine.cache_manager.wait_for_copies()
        looked += require_kv_as_computed_alone(engine)
        branched += sum(params.n > 1 for params in game.params)
        retracted += engine.stats.retractions + engine.stats.preemptions
        loaded += engine.cache_manager.loaded_tokens
    assert branched and looked > 200
    assert retracted or config["kv_tokens"] > 64
    assert loaded or "host_kv_tokens" not in config


def test_samples_that_part_at_the_first_token_have_heads_of_their_own(
    tiny_model: LlamaModel, head: Path
) -> None:
    """Some end with their first token, and are in the tree before the others go on."""
    prompt = [5, 9, 13, 17, 21]
    for page in (1, 4):
        engine = engine_of(tiny_model, head, speculative="eagle", page_size=page, max_running=8)
        for new in (1, 2, 8):
            params = SamplingParams(max_new_tokens=new, n=6, temperature=2.0, seed=new, ignore_eos=True)
            engine.add_request(prompt, params)
            outputs = drive(engine)
            assert len({out.token_ids[0] for out in outputs}) > 2
            require_kv_as_computed_alone(engine)


def test_a_disk_knows_whose_head_its_kv_is_of(
    tiny_model: LlamaModel, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process with this head finds it and goes on with it; with another head, or none, not."""
    monkeypatch.setattr(DiskTier, "read_wait", 60.0)  # what is read late is a miss
    other = write_head(tmp_path / "other", tiny_model, seed=1)
    prompt = [3 + 7 * at % 55 for at in range(80)]
    config = {"host_kv_tokens": 128, "disk_dir": tmp_path / "disk", "load_back_threshold": 1}
    first = ((head, "eagle", 0), (other, "eagle", 0), (None, "ngram", 0))
    for folder, source, hit in (*first, (head, "eagle", 64), (other, "eagle", 64)):
        engine = engine_of(tiny_model, folder, speculative=source, **config)
        output = engine.generate([prompt], SamplingParams(max_new_tokens=6, ignore_eos=True))[0]
        assert output.cached_tokens == hit
        if source == "eagle":
            assert require_kv_as_computed_alone(engine) > 80
        assert engine.cache.close(60)  # all is written
