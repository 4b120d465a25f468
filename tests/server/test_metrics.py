"""/metrics says what the engine's own counters say, in Prometheus' format, and times as clients see them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_support import ASK, Collected, Desk, new_engine

from minirad.config import SamplingParams
from minirad.observe import events as ev
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
    desk.app.state.api.metrics = None
    assert desk.ask("/metrics").status_code == 404
    assert Metrics().text()  # of no engine yet


@pytest.mark.parametrize("seed", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_random_load_is_counted_as_its_events_tell(engine: Any, seed: int) -> None:
    """Several samples, clients that leave, a pool too small, a host tier: each counter beside the events."""
    rng = random.Random(seed)
    played = new_engine(
        engine.model, engine.tokenizer, kv_tokens=96, host_kv_tokens=150, host_write="write_back",
        max_running=3,
    )  # fmt: skip
    told: list[ev.Event] = []
    played.bus.subscribe(None, told.append)
    desk, open_ones = Desk(played), []
    for _ in range(24):
        start, params = rng.choice((100, 300, 500)), SamplingParams(
            max_new_tokens=rng.randint(1, 30), n=rng.choice((1, 1, 2, 3)), ignore_eos=True, temperature=1.0,
            seed=rng.randrange(99),
        )  # fmt: skip
        prompt = [*range(start, start + rng.randint(4, 30)), rng.randint(10, 900)]
        open_ones.append(Collected(desk.service, Spec((played.encode(prompt),), (params,))))
        for _ in range(rng.randrange(8)):
            desk.service.turn()
        if rng.random() < 0.2:
            desk.service.cancel(rng.choice(open_ones).ticket)
        now = read(desk.metrics.text().decode())
        assert now["minirad_requests_running"] == len(played.scheduler.live)
        assert now["minirad_requests_waiting"] == len(played.scheduler.waiting)
    desk.turns()
    _compare(read(desk.metrics.text().decode()), told)


def _compare(now: dict[str, float], told: list[ev.Event]) -> None:
    def of(kind: Any) -> list[Any]:
        return [event for event in told if isinstance(event, kind)]

    first = [event for event in of(ev.RequestAdmitted) if event.attempt == 1]
    back = of(ev.RequestRetracted)
    ended = of(ev.RequestFinished)
    cached = now["minirad_cached_tokens_total,tier=device"] + now["minirad_cached_tokens_total,tier=host"]
    assert cached == sum(event.cached for event in first) > 0 < now["minirad_cached_tokens_total,tier=host"]
    assert now["minirad_cache_hit_rate"] == pytest.approx(cached / now["minirad_prompt_tokens_total"])
    assert now["minirad_retractions_total"] == sum(not event.by for event in back) > 0
    assert now["minirad_preemptions_total"] == sum(bool(event.by) for event in back)
    evicted = [event for kind in (ev.NodeEvicted, ev.NodeDemoted) for event in of(kind)]
    assert now["minirad_evicted_tokens_total,tier=device"] == sum(len(event.slots) for event in evicted) > 0
    assert now["minirad_evicted_tokens_total,tier=host"] == sum(len(e.host_slots) for e in of(ev.HostEvicted))
    assert now["minirad_replies_total,finish_reason=length"] == len(ended)
    asked = sum(event.n for event in of(ev.RequestAdded))
    assert now.get("minirad_replies_total,finish_reason=abort", 0) == asked - len(ended)
    _counts_what_it_says(now, "time_to_first_token_seconds")
    between = _counts_what_it_says(now, "inter_token_seconds")
    begun = now["minirad_time_to_first_token_seconds_count"]
    assert begun + between == now["minirad_generated_tokens_total"]
    whole = _counts_what_it_says(now, "reply_seconds")
    replies = sum(value for name, value in now.items() if name.startswith("minirad_replies_total"))
    assert whole == replies


def _counts_what_it_says(now: dict[str, float], name: str) -> float:
    """A histogram's buckets grow, and the last one is its count; returns that."""
    rows = [value for key, value in now.items() if key.startswith(f"minirad_{name}_bucket")]
    count = now[f"minirad_{name}_count"]
    assert rows == sorted(rows) and rows[-1] == count > 0 <= now[f"minirad_{name}_sum"]
    return count
