"""/metrics says what the engine's own counters say, in Prometheus' format, and times as clients see them."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_support import ASK, Collected, Desk, new_engine

from minirad.config import SamplingParams
from minirad.server.metrics import Metrics
from minirad.server.service import Service, Spec


def read(text: str) -> dict[str, float]:
    """Every sample by its name and labels, as Prometheus' own parser reads it."""
    return {
        sample.name
        + "".join(f",{name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.fixture(scope="module")
def engine() -> Any:
    return new_engine(kv_tokens=128, max_running=4)


def test_the_numbers_are_the_engines(engine: Any) -> None:
    desk = Desk(engine)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    prompts = [engine.encode(text) for text in (ASK, ASK, ASK[:30] + " x", "a " * 20)]
    got = [Collected(desk.service, Spec((prompt,), (params,))) for prompt in prompts]
    for _ in range(3):
        desk.service.turn()
    now = read(desk.ask("/metrics").text)
    assert now["minirad_requests_running"] == len(engine.scheduler.live) > 0
    assert now["minirad_requests_waiting"] == len(engine.scheduler.waiting)
    assert now["minirad_kv_tokens,state=in_use"] > 0 and 0 < now["minirad_kv_usage"] <= 1
    desk.turns()
    gone = Collected(desk.service, Spec((prompts[0],), (params,)))
    desk.service.turn()
    desk.service.cancel(gone.ticket)
    desk.turns()
    desk.ask("/v1/completions", {"prompt": []})
    desk.ask("/v1/models/x")
    desk.ask("/strange/path")
    now, stats = read(desk.ask("/metrics").text), engine.stats
    tokens = sum(len(each.of(0)[-1].output.token_ids) for each in got) + 1
    assert now["minirad_prompt_tokens_total"] == stats.first.tokens
    assert now["minirad_cached_tokens_total,tier=device"] == stats.first.cached > 0
    assert now["minirad_cache_hit_rate"] == pytest.approx(stats.hit_rate)
    assert now["minirad_evicted_tokens_total,tier=device"] == engine.cache_manager.evicted_tokens > 0
    assert now["minirad_retractions_total"] == stats.retractions
    assert now["minirad_generated_tokens_total"] == tokens == 121
    assert now["minirad_time_to_first_token_seconds_count"] == now["minirad_reply_seconds_count"] == 5
    assert now["minirad_inter_token_seconds_count"] == tokens - 5
    assert now["minirad_replies_total,finish_reason=length"] == 4
    assert now["minirad_replies_total,finish_reason=abort"] == 1
    assert now["minirad_http_requests_total,path=/v1/completions,status=400"] == 1
    assert now["minirad_http_requests_total,path=/v1/models,status=404"] == 1
    assert now["minirad_http_requests_total,path=other,status=404"] == 1
    slots = [now[f"minirad_kv_tokens,state={state}"] for state in ("free", "evictable", "in_use")]
    assert sum(slots) == 128 and slots[2] == now["minirad_kv_usage"] == 0
    assert now["minirad_steps_total"] == engine.steps


def test_tokens_are_told_by_tier(engine: Any) -> None:
    tiered = new_engine(engine.model, engine.tokenizer, kv_tokens=64, host_kv_tokens=256, max_running=2)
    metrics = Metrics()
    service = Service(tiered, metrics=metrics)
    params = SamplingParams(max_new_tokens=2)
    rows = [list(range(start, start + 40)) for start in (100, 200, 300, 100)]
    for row in rows:
        Collected(service, Spec((tiered.encode(row),), (params,)))
        while service.turn():
            pass
    now = read(metrics.text().decode())
    assert now["minirad_cached_tokens_total,tier=host"] > 30
    assert now["minirad_cached_tokens_total,tier=host"] + now["minirad_cached_tokens_total,tier=device"] == (
        tiered.stats.first.cached
    )
    service.use(engine)
    assert "tier=host" not in "".join(read(metrics.text().decode()))


def test_a_server_without_metrics_says_so(engine: Any) -> None:
    desk = Desk(engine)
    desk.app._api.metrics = None
    assert desk.ask("/metrics").status_code == 404
    assert Metrics().text()  # of no engine yet
