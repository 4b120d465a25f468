"""Adapters over HTTP: each is a model of its own, and in the router's eyes a namespace of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_support import write_adapter
from server_support import ASK, MODEL, Desk, error, new_engine

from minirad.config import AdapterKey, SamplingParams
from minirad.fleet.blocks import Space
from minirad.model.classroom import WEIGHTS
from minirad.model.config import LlamaConfig
from minirad.route.router import Router
from minirad.route.router import Settings as RouterSettings
from minirad.route.trees import space_of
from minirad.server.app import make_app
from minirad.server.settings import Settings


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root, config = tmp_path_factory.mktemp("adapters"), LlamaConfig.from_dir(WEIGHTS)
    lora = {
        name: write_adapter(root / name, config, seed, size=0.3)
        for seed, name in enumerate(("one", "org/two"))
    }
    return new_engine(kv_tokens=1024, max_running=4, lora=lora)


@pytest.fixture(scope="module")
def desk(engine: Any) -> Any:
    with Desk(engine).running() as made:
        yield made
    engine.check()


def test_each_adapter_is_a_model(desk: Desk) -> None:
    base, *adapters = desk.ask("/v1/models").json()["data"]
    assert base["id"] == MODEL and "parent" not in base
    assert [(each["id"], each["parent"]) for each in adapters] == [("one", MODEL), ("org/two", MODEL)]
    assert desk.ask("/v1/models/org/two").json() == adapters[1]
    assert error(desk.ask("/v1/models/three"))["code"] == "model_not_found"


def test_the_model_that_is_named_answers(engine: Any, desk: Desk) -> None:
    twin = new_engine(kv_tokens=1024, max_running=4, lora=dict(engine.config.lora))
    params, said = SamplingParams(max_new_tokens=6), {}
    desk.service.call(lambda each: each.flush_cache()).result(60)  # whoever asked before
    for name in (MODEL, "one", "org/two"):
        (wanted,) = twin.generate(ASK, params, lora="" if name == MODEL else name)
        answer = desk.complete(model=name, max_tokens=6)
        said[name] = answer["choices"][0]["text"]
        assert said[name] == wanted.text and answer["model"] == name
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = desk.complete(model=name, max_tokens=6, stream=True)
        assert "".join(each["choices"][0]["text"] for each in again[:-1]) == wanted.text
        assert {each["model"] for each in again[:-1]} == {name}
        cached = desk.complete(model=name, max_tokens=6)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == wanted.prompt_tokens - 1
    assert len(set(said.values())) == 3
    assert desk.complete(max_tokens=6)["choices"][0]["text"] == said[MODEL]  # none is named
    refused = desk.ask("/v1/completions", {"prompt": ASK, "model": "three"})
    assert refused.status_code == 404 and error(refused)["code"] == "model_not_found"


def test_a_salt_and_an_adapter_together(desk: Desk) -> None:
    def cached(**more: Any) -> int:
        answer = desk.complete(prompt=ASK + " A", max_tokens=1, **more)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    asked: list[dict[str, Any]] = [
        {"model": "one", "cache_salt": "s"}, {"model": "one", "cache_salt": "one"}, {"cache_salt": "one"},
        {"model": "org/two", "cache_salt": "s"}, {"cache_salt": "s"},
    ]  # fmt: skip
    assert [cached(**each) for each in asked] == [0] * 5
    assert all(cached(**each) > 0 for each in asked)


def test_log_probabilities_and_a_schema_under_an_adapter(desk: Desk) -> None:
    answer = desk.complete(model="one", max_tokens=3, logprobs=2, ignore_eos=True)
    assert [len(each) for each in answer["choices"][0]["logprobs"]["top_logprobs"]] == [2, 2, 2]
    pytest.importorskip("llguidance")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["Paris"]}}}
    said = desk.chat("Hello", model="org/two", response_format=schema)["choices"][0]["message"]["content"]
    assert json.loads(said) == "Paris"


def test_the_models_name_is_no_adapters(desk: Desk) -> None:
    with pytest.raises(ValueError, match="the model is served as 'one', but an adapter has that name"):
        make_app(desk.service, Settings("one"))


def test_a_router_looks_for_pages_of_the_adapter_that_is_named(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "one", LlamaConfig.from_dir(WEIGHTS))
    router = Router(RouterSettings(workers=1, engine=("--lora", f"one={adapter}")))

    def space(**more: Any) -> Space:
        body = json.dumps({"prompt": "Hello", **more}).encode()
        return space_of(router._asked("/v1/completions", body).space)

    assert space() == space(model=MODEL) == () and space(cache_salt="one") == ("one",)
    assert space(model="one") == ("one", "adapter") == space_of(AdapterKey("one", None))
    assert space(model="one", cache_salt="s") == space_of(AdapterKey("one", "s"))
