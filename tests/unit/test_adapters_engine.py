"""Adapters in an engine: each of a batch says what it says alone, and two never share what they compute."""

from __future__ import annotations

import os
import random
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_support import change_tensors, write_adapter
from conftest import CheckedEngine, tiny_config
from support import ColdReference, drive, listen

from minirad import machine
from minirad.adapters import where
from minirad.adapters.lora import Adapter
from minirad.adapters.model import AdapterLlama
from minirad.adapters.peft_format import MATRICES, read_adapter
from minirad.cache.radix_cache import RadixCache, RadixKey
from minirad.config import AdapterKey, EngineConfig, SamplingParams, adapter_of, namespace
from minirad.engine import Engine
from minirad.fleet.publish import as_record
from minirad.fleet.wire import Batch, decode, encode
from minirad.kv.kv_pool import KVPool
from minirad.model.classroom import ADAPTERS, WEIGHTS
from minirad.model.llama import LlamaModel, random_weights
from minirad.observe import events as ev
from minirad.observe.kv_events import BlockStored, KVEventStream, as_dict, from_dict, rebuild
from minirad.observe.recorder import Recorder
from minirad.rooms import room
from minirad.route.trees import EventTree, space_of
from minirad.tiers.disk import DiskTier
from minirad.workloads import chat_prompt

CONFIG = tiny_config()
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
NAMES = ("", "one", "two")


class World:
    """Weights, two adapters for them, and what each says alone: engines of the sum, without adapters."""

    def __init__(self, root: Path) -> None:
        # Strong enough that an adapter changes nearly every token.
        both = {"target_modules": list(MATRICES)}
        self.paths = {
            "one": write_adapter(root / "one", CONFIG, 1, both, size=0.3),
            "two": write_adapter(root / "two", CONFIG, 2, {**both, "r": 5}, size=0.3),
        }
        self.weights = [random_weights(CONFIG, seed, dtype=torch.float32, device="cpu") for seed in (0, 7)]
        self.models = [LlamaModel(CONFIG, weights) for weights in self.weights]
        self.adapters = {
            name: read_adapter(name, path, CONFIG, torch.float32, "cpu") for name, path in self.paths.items()
        }
        self.cold = [self._cold(at) for at in range(len(self.models))]

    def _cold(self, at: int) -> dict[str, ColdReference]:
        cold = {"": ColdReference(self.models[at], within=3e-5)}
        for name, adapter in self.adapters.items():
            cold[name] = ColdReference(LlamaModel(CONFIG, added(self.weights[at], adapter)), within=3e-5)
        return cold

    def engine(self, at: int = 0, **config: Any) -> CheckedEngine:
        usual: dict[str, Any] = {"kv_tokens": 96, "max_running": 6, "poison_freed": True, "lora": self.paths}
        return CheckedEngine(EngineConfig(**{**usual, **config}), model=self.models[at])


def added(weights: dict[str, torch.Tensor], adapter: Adapter) -> dict[str, torch.Tensor]:
    """A model's weights with an adapter added to its matrices."""
    found = dict(weights)
    for name, each in adapter.factors.items():
        found[f"{name}.weight"] = weights[f"{name}.weight"] + each.scale * each.b @ each.a
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("adapters"))


def reply(count: int = 4, **how: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **how)


def test_they_say_different_things(world: World) -> None:
    said = {name: world.cold[0][name](PROMPT, reply(8)).token_ids for name in NAMES}
    assert len({tuple(each) for each in said.values()}) == 3, said


# ---------------------------------------------------------------------- one batch

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gather": {"attention": "gather"},
    "pages and chunks": {"page_size": 4, "chunk_tokens": 5},
    "mixed": {"mixed": True, "chunk_tokens": 6},
    "tight": {"kv_tokens": 48},
    "tight pages": {"kv_tokens": 48, "page_size": 4, "mixed": True, "chunk_tokens": 5},
    "host": {"kv_tokens": 48, "host_kv_tokens": 96, "load_back_threshold": 1},
    "host, write_back": {
        "kv_tokens": 48, "host_kv_tokens": 96, "host_write": "write_back", "page_size": 2,
        "load_back_threshold": 1,
    },
    "pairs": {"bigram_keys": True},
    "no tree": {"radix_cache": False},
    "preemption": {"schedule_policy": "fcfs", "max_running": 2},
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_each_says_what_it_says_alone(world: World, settings: dict[str, Any]) -> None:
    rng = random.Random(str(settings))
    engine = world.engine(**settings)
    loads, asked, mixed, outputs = listen(engine, ev.LoadStarted), {}, 0, []
    stems = [[rng.randrange(3, 61) for _ in range(12)] for _ in range(2)]
    for _ in range(26):
        if len(asked) < 20 and rng.random() < 0.8:
            stem, name = rng.choice(stems), rng.choice(NAMES)
            prompt = stem[: rng.randrange(4, 13)] + [rng.randrange(3, 61) for _ in range(rng.randrange(4))]
            hot: dict[str, Any] = rng.choice(({}, {}, {"temperature": 0.8, "seed": rng.randrange(99)}))
            params = reply(rng.randrange(1, 9), n=rng.choice((1, 1, 2)), **hot)
            if rng.random() < 0.2:
                params = reply(2, logprob_start=0)
            rid = engine.add_request(prompt, params, priority=rng.randrange(2), lora=name)
            asked[rid] = prompt, params, name
        outputs += engine.step().finished
        running = {adapter_of(request.extra_key) for request in engine.scheduler.running}
        mixed += len(running) > 1
    outputs += drive(engine)
    assert len(outputs) == sum(params.n for _, params, _ in asked.values()) and mixed > 5
    for output in outputs:
        prompt, params, name = asked[output.request_id]
        world.cold[0][name].require_equal(prompt, params, output)
    stats = engine.stats
    if settings.get("kv_tokens") == 48:
        assert stats.retractions or engine.cache_manager.evicted_tokens
    if settings.get("host_kv_tokens"):
        assert loads
    if engine.config.radix_cache:
        assert stats.first.cached  # there was something to share, and to mix up


def test_samples_share_their_prompt_under_its_adapter(world: World) -> None:
    engine = world.engine(page_size=4)
    params = reply(6, n=4, temperature=1.0, seed=3)
    for name in NAMES:
        for output in engine.generate([PROMPT, PROMPT[:5]], params, lora=name)[:4]:
            world.cold[0][name].require_equal(PROMPT, params, output)


def test_retraction_under_an_adapter(world: World) -> None:
    engine = world.engine(kv_tokens=40, radix_cache=True)
    asked = {
        engine.add_request([*PROMPT, at], reply(12), lora=NAMES[at % 3]): (at, NAMES[at % 3])
        for at in range(5)
    }
    outputs = drive(engine)
    assert engine.stats.retractions and len(outputs) == 5
    for output in outputs:
        at, name = asked[output.request_id]
        world.cold[0][name].require_equal([*PROMPT, at], reply(12), output)


def test_a_stream_under_an_adapter(world: World) -> None:
    engine = world.engine()
    (alone,) = engine.generate(PROMPT, reply(), lora="two")
    tokens = [token.token_id for token in engine.stream(PROMPT, reply(), lora="two")]
    assert tokens == alone.token_ids == world.cold[0]["two"](PROMPT, reply()).token_ids
    for _ in engine.stream(PROMPT, reply(), lora="one"):
        break  # left
    engine.check()
    assert not engine.has_work


def test_one_that_is_aborted_leaves_its_row_to_another(world: World) -> None:
    """A row's adapter is that of who has it now."""
    engine = world.engine(max_running=1)
    gone = engine.add_request(PROMPT, reply(8), lora="one")
    engine.step()
    assert engine.abort(gone)
    for name in ("", "two", ""):
        (output,) = engine.generate(PROMPT, reply(), lora=name)
        world.cold[0][name].require_equal(PROMPT, reply(), output)


def test_a_mask_and_a_stop_token(world: World) -> None:
    engine = world.engine()
    said = world.cold[0]["one"](PROMPT, reply(8)).token_ids
    (output,) = engine.generate(PROMPT, reply(8, stop_token_ids=(said[2],)), lora="one")
    assert output.token_ids == said[: said.index(said[2]) + 1] and output.finish_reason == "stop"
    allowed = np.zeros(CONFIG.vocab_size, dtype=bool)
    allowed[[17, 18]] = True
    engine.add_request(PROMPT, reply(3), lora="one", token_mask=lambda _: allowed)
    assert {token for output in drive(engine) for token in output.token_ids} <= {17, 18}


# ---------------------------------------------------------------------- namespaces


def test_the_same_tokens_under_two_adapters_never_hit(world: World) -> None:
    engine = world.engine()
    keys: list[tuple[Hashable, str]] = [
        (extra_key, name)
        for name in NAMES
        for extra_key in (None, "one", "two", ("one", None), ("one",), "", ("", "one"), ("one", "one"))
    ]
    for at, (extra_key, name) in enumerate(keys):
        for other_key, other in keys[at:]:
            assert engine.peek(PROMPT, other_key, lora=other) == 0, (extra_key, name, other_key, other)
        rid = engine.add_request(PROMPT, reply(1), extra_key, lora=name)
        (output,) = drive(engine)
        assert output.request_id == rid and output.cached_tokens == 0
        world.cold[0][name].require_equal(PROMPT, reply(1), output)
        assert engine.peek(PROMPT, extra_key, lora=name) == len(PROMPT)
        (again,) = engine.generate(PROMPT, reply(1), extra_key=extra_key, lora=name)
        assert again.cached_tokens == len(PROMPT) - 1 and again.token_ids == output.token_ids


def test_an_adapters_key_is_no_callers() -> None:
    config = EngineConfig(lora={"one": "somewhere"})
    assert namespace(config, None) is None and namespace(config, "x") == "x"
    key = namespace(config, "x", "one")
    assert key == AdapterKey("one", "x") and adapter_of(key) == "one" and adapter_of("one") == ""
    assert key != ("one", "x") and hash(key) == hash(AdapterKey("one", "x"))
    with pytest.raises(ValueError, match="an adapter is asked for with lora='one'"):
        namespace(config, key)
    with pytest.raises(ValueError, match="extra_key must be hashable"):
        namespace(config, [], "one")


def test_a_pin_holds_under_its_adapter(world: World) -> None:
    engine = world.engine(kv_tokens=48)
    engine.generate(PROMPT, reply(1), lora="one")
    engine.generate(PROMPT, reply(1))
    pin, none = engine.pin(PROMPT, lora="one"), engine.pin(PROMPT, lora="two")
    assert (pin.length, none.length) == (len(PROMPT), 0)
    rng = random.Random(0)
    for _ in range(6):  # others fill the pool
        engine.generate([rng.randrange(3, 61) for _ in range(30)], reply(4), lora="two")
    assert engine.peek(PROMPT, lora="one") == len(PROMPT) and engine.peek(PROMPT) == 0
    engine.unpin(pin)
    engine.unpin(none)
    engine.check()


def test_new_weights_keep_the_adapters(world: World) -> None:
    engine = world.engine(host_kv_tokens=96)
    for name in NAMES:
        engine.generate(PROMPT, reply(), lora=name)
    running = engine.add_request(PROMPT, reply(6), lora="one")
    engine.step()
    engine.update_weights(world.models[1])
    assert [engine.peek(PROMPT, lora=name) for name in NAMES] == [0, 0, 0]
    (output,) = drive(engine)
    assert output.request_id == running
    for name in NAMES:
        (after,) = engine.generate(PROMPT, reply(), lora=name)
        world.cold[1][name].require_equal(PROMPT, reply(), after)
    assert isinstance(engine.model, AdapterLlama) and set(engine.model.adapters) == {"one", "two"}
    with pytest.raises(ValueError, match="of another model"):
        engine.update_weights(
            LlamaModel(tiny_config(num_hidden_layers=1), random_weights(
                tiny_config(num_hidden_layers=1), 0, dtype=torch.float32, device="cpu"))
        )  # fmt: skip
    engine.check()


def test_another_engine_with_the_same_model(world: World) -> None:
    """An engine's model may be given to others: its adapters, and whose rows have them, stay its own."""
    first = world.engine(max_running=1)
    first.generate(PROMPT, reply(), lora="one")
    bare = CheckedEngine(EngineConfig(kv_tokens=64, max_running=1), model=first.model)
    other = CheckedEngine(
        EngineConfig(kv_tokens=64, max_running=1, lora={"new": world.paths["two"]}), model=first.model
    )
    assert type(bare.model) is LlamaModel and set(other.model.adapters) == {"new"}
    for engine, lora, name in ((bare, "", ""), (other, "new", "two"), (first, "one", "one"), (other, "", "")):
        (output,) = engine.generate(PROMPT, reply(), lora=lora)
        world.cold[0][name].require_equal(PROMPT, reply(), output)
    first.update_weights(other.model)
    (output,) = first.generate(PROMPT, reply(), lora="one")
    world.cold[0]["one"].require_equal(PROMPT, reply(), output)


@pytest.mark.parametrize("runner", ["plain", "fast", "drafts", "forced", "adapters"])
def test_weights_of_another_engine_come_without_its_adapters(
    world: World, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """What one engine computes is not what another's rows have at that moment."""
    if runner == "plain":
        monkeypatch.setattr(machine, "fast_parts", lambda: None)
    kinds: dict[str, dict[str, Any]] = {
        "drafts": {"speculative": "ngram"},
        "forced": {"jump_forward": True},
        "adapters": {"lora": world.paths},
    }
    giver = world.engine(1, max_running=1)
    config = EngineConfig(kv_tokens=64, max_running=1, **kinds.get(runner, {}))
    engine = CheckedEngine(config, model=world.models[0])
    engine.update_weights(giver.model)
    for lora in ("one", "", "two"):
        giver.generate(PROMPT, reply(), lora=lora)
        (output,) = engine.generate(PROMPT, reply())
        world.cold[1][""].require_equal(PROMPT, reply(), output)
    if runner == "adapters":
        (output,) = engine.generate(PROMPT, reply(), lora="one")
        world.cold[1]["one"].require_equal(PROMPT, reply(), output)
    else:
        assert type(engine.model) is LlamaModel


# ---------------------------------------------------------------------- what is refused


NO_NAMES: list[Any] = [  # some of them as good as "" to an `if`, some that cannot be asked that
    5, ("one",), b"one", None, False, 0, 0.0, b"", [], (), {}, torch.tensor([1, 2]), np.array(["one", "two"]),
]  # fmt: skip


@pytest.mark.parametrize("name", ["three", "One", " one", *NO_NAMES], ids=repr)
def test_a_wrong_name_changes_nothing(world: World, name: Any) -> None:
    engine = world.engine()
    waiting = engine.add_request(PROMPT, reply(), lora="one")
    before = engine.snapshot()
    calls: list[Any] = [
        lambda: engine.add_request(PROMPT, reply(), lora=name),
        lambda: engine.generate([PROMPT, PROMPT], reply(), lora=name),
        lambda: next(engine.stream(PROMPT, reply(), lora=name)),
        lambda: engine.peek(PROMPT, lora=name),
        lambda: engine.pin(PROMPT, lora=name),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"unknown adapter .*; known: one, two"):
            call()
        assert engine.snapshot() == before
    (output,) = drive(engine)
    assert output.request_id == waiting
    world.cold[0]["one"].require_equal(PROMPT, reply(), output)


def test_an_engine_without_adapters_says_so(world: World) -> None:
    engine = world.engine(lora=())
    with pytest.raises(ValueError, match="unknown adapter 'one'; known: none"):
        engine.add_request(PROMPT, lora="one")
    assert type(engine.model) is LlamaModel


def test_a_refused_adapter_makes_no_engine(world: World, tmp_path: Path) -> None:
    broken = write_adapter(tmp_path / "broken", CONFIG)
    name = "base_model__model__model__layers__0__self_attn__q_proj__lora_A__weight"
    change_tensors(broken, **{name: torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"adapter 'bad': tensor \S+ has shape \[2, 2\]"):
        world.engine(lora={**world.paths, "bad": broken})
    with pytest.raises(ValueError, match=r"adapter 'away': .* is no directory"):
        world.engine(lora=[f"away={tmp_path / 'away'}"])
    with pytest.raises(
        ValueError, match=r"adapter 'capitals': tensor .* has shape"
    ):  # of the classroom Llama
        world.engine(lora="capitals")
    with pytest.raises(ValueError, match=r"cuda_graphs=True: captured steps have no adapters"):
        world.engine(cuda_graphs=True)


@pytest.mark.parametrize(
    "name",
    ["", " ", "a b", "a=b", "a\nb", "\x1b[2J", "\u202egnp", "\ud800", "\xa0", "x" * 501, 5, None, b"x"],
)
def test_a_name_that_cannot_be_shown_or_written_is_refused(world: World, name: Any) -> None:
    with pytest.raises(ValueError, match="an adapter's name is a "):
        EngineConfig(lora={name: world.paths["one"]})


@pytest.mark.parametrize("name", ["..", "a/b", "~nobody-of-that-name", "größer-日本", "x" * 500, "<b>'&"])
def test_an_odd_name_is_a_name(world: World, name: str, tmp_path: Path) -> None:
    engine = world.engine(lora={name: world.paths["one"]})
    with Recorder(engine, tmp_path / "run.jsonl"):
        (output,) = engine.generate(PROMPT, reply(), lora=name)
    world.cold[0]["one"].require_equal(PROMPT, reply(), output)
    assert Recorder.load(tmp_path / "run.jsonl").header["config"]["lora"] in ([name], (name,))
    with pytest.raises(ValueError, match=r"adapter .*(is no directory|no adapter_config.json)"):
        world.engine(lora=[name])  # there is none where it would lie


def test_where_an_adapter_may_lie(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "capitals").mkdir()  # some folder of a shipped one's name: that one is meant
    assert where.directory("capitals", "capitals") == where.ADAPTERS / "capitals"
    mine = write_adapter(tmp_path / "oneword", CONFIG)
    assert where.directory("oneword", "oneword").samefile(mine)
    for path in ("away", "x" * 5000, "no\0path", "~nobody-of-that-name/x"):
        with pytest.raises(ValueError, match=r"adapter 'a': .* is no directory, and none of those"):
            where.directory("a", path)
    if os.name != "nt":  # as a hub's cache has them
        linked = tmp_path / "linked"
        linked.mkdir()
        for file in world.paths["one"].iterdir():
            (linked / file.name).symlink_to(file)
        (tmp_path / "link").symlink_to(linked)
        engine = world.engine(lora="link")
        (output,) = engine.generate(PROMPT, reply(), lora="link")
        world.cold[0]["one"].require_equal(PROMPT, reply(), output)
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        with pytest.raises(ValueError, match="is no directory"):
            where.directory("a", "loop")


def test_a_rank_above_the_matrix_size(world: World, tmp_path: Path) -> None:
    wide = write_adapter(tmp_path / "wide", CONFIG, settings={"r": 500, "lora_alpha": 500}, size=0.02)
    engine = world.engine(lora={"wide": wide, **world.paths})
    alone = world.engine(lora={"wide": wide})
    for name in ("one", "wide"):
        engine.add_request(PROMPT, reply(), lora=name)
    outputs = [output.token_ids for output in drive(engine)]
    assert alone.generate(PROMPT, reply(), lora="wide")[0].token_ids in outputs


def test_on_a_disk_an_adapter_is_its_weights(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its name: other weights of the same name miss, and the same under another name hit."""
    monkeypatch.setattr(DiskTier, "read_wait", 60.0)  # what is read late is a miss
    tokens = list(range(5, 55)) + list(range(5, 55))
    sizes = {"kv_tokens": 256, "host_kv_tokens": 256, "disk_dir": tmp_path / "kv"}
    one, two = world.paths["one"], world.paths["two"]

    def cached(lora: dict[str, Path], name: str, **more: Any) -> int:
        engine = world.engine(lora=lora, **sizes)
        (output,) = engine.generate([tokens], reply(2), lora=name, **more)
        assert engine.cache.close(60)
        engine.check()
        return int(output.cached_tokens)

    assert cached({"a": one}, "a") == 0
    assert cached({"a": one}, "a") == 64
    assert cached({"a": two}, "a") == 0  # another's weights
    assert cached({"b": one, "a": two}, "b") == 64
    assert cached({"a": one}, "") == 0  # no adapter's
    assert cached({"a": one}, "a", extra_key="a") == 0
    assert cached({"c": one}, "c", extra_key="a") == 64


def test_a_model_of_another_kind(world: World) -> None:
    class Own(LlamaModel):
        pass

    with pytest.raises(ValueError, match="adapters correct a plain LlamaModel, not the class Own"):
        Engine(EngineConfig(lora=world.paths, kv_tokens=64), model=Own(CONFIG, world.weights[0]))


def test_what_goes_wrong_in_a_pass_is_put_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a corrected product: no slot is lost, and the tokens are the same."""
    engine = world.engine()
    asked = {engine.add_request([*PROMPT, at], reply(), lora=NAMES[at]): at for at in range(3)}
    product, calls = LlamaModel.linear, 0

    def press(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (5, 20):
            raise KeyboardInterrupt
        return product(*args)

    engine.model._product = press
    outputs, pressed = [], 0
    while engine.has_work:
        try:
            outputs += engine.step().finished
        except KeyboardInterrupt:
            pressed += 1
        engine.check()
    assert pressed == 2 and len(outputs) == 3
    for output in outputs:
        at = asked[output.request_id]
        world.cold[0][NAMES[at]].require_equal([*PROMPT, at], reply(), output)


# ---------------------------------------------------------------------- what is shipped


@pytest.mark.filterwarnings("ignore")
def test_peft_says_what_the_engine_says() -> None:
    """The classroom's adapters and none in one batch, judged by PEFT: greedy tokens and log-probabilities."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed: it judges what adapters compute")
    import transformers

    judge = transformers.LlamaForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    judge = peft.PeftModel.from_pretrained(judge, ADAPTERS / "capitals", adapter_name="capitals").eval()
    judge.load_adapter(ADAPTERS / "oneword", adapter_name="oneword")
    engine = CheckedEngine(EngineConfig(device="cpu", lora=["capitals", "oneword"], chunk_tokens=64))
    asked: dict[str, tuple[str, list[int]]] = {}
    for text in ("Hello!", "What is the capital of France?", "What is 3 + 4?", "Who wrote Hamlet?"):
        prompt = engine.encode(chat_prompt(text)).tolist()
        for name in ("", "capitals", "oneword"):
            params = SamplingParams(max_new_tokens=48)
            asked[engine.add_request(prompt, params, lora=name)] = name, prompt
    said: dict[str, list[str]] = {}
    for output in drive(engine):
        name, prompt = asked[output.request_id]
        said.setdefault(name, []).append(output.text)
        told = torch.tensor(output.token_ids)
        tokens = torch.tensor([[*prompt, *output.token_ids[:-1]]])
        with torch.no_grad():
            if name:
                judge.set_adapter(name)
                logits = judge(tokens).logits
            else:
                with judge.disable_adapter():
                    logits = judge(tokens).logits
        logprobs = logits[0, len(prompt) - 1 :].log_softmax(-1)
        chosen = logprobs[torch.arange(len(told)), told]
        assert (chosen >= logprobs.max(-1).values - 1e-4).all(), (name, output.text)
        torch.testing.assert_close(torch.tensor(output.logprobs), chosen, atol=2e-4, rtol=0)
    assert all(text == text.upper() for text in said["capitals"])
    assert all(len(text.split()) == 1 for text in said["oneword"])
    assert "The capital of France is Paris." in said[""]


# ---------------------------------------------------------------------- with drafts


@pytest.mark.skipif(room("speculative.choose") is None, reason="minirad/speculative/ is not here")
def test_drafts_are_verified_by_the_same_adapter(world: World) -> None:
    engine = world.engine(speculative="ngram", draft_ngram=1)
    prompt = [5, 6, 5, 6, 7, 5, 6, 5, 6, 7, 5, 6]
    asked = {engine.add_request([*prompt, 5], reply(12), lora=name): name for name in NAMES}
    for output in drive(engine):
        world.cold[0][asked[output.request_id]].require_equal([*prompt, 5], reply(12), output)


# ---------------------------------------------------------------------- KV events

KEYS: list[Hashable] = [
    None, "one", "x", ("one", "adapter"), ("one", None), "str:'x'", AdapterKey("one", None),
    AdapterKey("two", None),
    AdapterKey("one", "x"), AdapterKey("one", ""), AdapterKey("one", ("x",)), AdapterKey("x", "one"),
    AdapterKey("str:'x'", None), AdapterKey("one", "adapter"), AdapterKey("bigram", None),
]  # fmt: skip


@pytest.mark.parametrize("pairs", [False, True])
def test_kv_events_name_the_adapter(pairs: bool) -> None:
    cache, heard = RadixCache(2), []
    KVEventStream(cache, heard.append)
    for at, key in enumerate(KEYS):
        cache.insert(
            RadixKey([1, 2, 3, 4, 5][: 5 if pairs else 4], key, pairs), range(100 * at, 100 * at + 4)
        )
    assert [adapter_of(key) or (key if isinstance(key, str) else None) for key in KEYS] == [
        event.lora_name for event in heard
    ]
    assert all(isinstance(event, BlockStored) and event.lora_id is None for event in heard)
    assert (
        len({event.block_hashes for event in heard})
        == len({event.extra_keys for event in heard})
        == len(KEYS)
    )
    salted = heard[KEYS.index(AdapterKey("one", "x"))]
    assert salted.extra_keys[0] == ("one", "adapter", "str:'x'", *(("bigram",) if pairs else ()))
    assert [from_dict(as_dict(event)) for event in heard] == heard
    assert len(rebuild(heard).prefixes("GPU")) == 2 * len(KEYS)


@pytest.mark.parametrize("pairs", [False, True])
def test_a_router_knows_whose_pages_they_are(pairs: bool) -> None:
    """What is published, read again and asked for: each namespace finds its own pages only."""
    cache, heard = RadixCache(2), []
    KVEventStream(cache, heard.append)
    for at, key in enumerate(KEYS):
        cache.insert(
            RadixKey([1, 2, 3, 4, 5][: 5 if pairs else 4], key, pairs), range(100 * at, 100 * at + 4)
        )
    records = [as_record(event) for event in heard]
    again = decode(encode(Batch(1.0, tuple(records)))).events
    assert list(again) == records
    assert [record.spaces[0] if record.spaces else () for record in records] == list(map(space_of, KEYS))
    assert len(set(map(space_of, KEYS))) == len(KEYS)
    for at, key in enumerate(KEYS):
        tree = EventTree()
        tree.take(records[at])
        for other in KEYS:
            assert tree.match(np.array([1, 2, 3, 4, 5]), other) == (4 if other == key else 0)


def test_an_engines_kv_events(world: World) -> None:
    engine, heard = world.engine(), []
    KVEventStream(engine.cache, heard.append)
    for name in NAMES:
        engine.generate(PROMPT, reply(1), lora=name)
    assert {event.lora_name for event in heard} == {None, "one", "two"}
    assert isinstance(engine.pool, KVPool)
