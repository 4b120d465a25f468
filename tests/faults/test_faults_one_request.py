"""What fails for one request ends that request with an error, and changes nothing for the others.

Something is made to fail at each place between the forward pass and the end of commit: logits, masks,
log-probabilities, texts, the tree, branches, copies to the host; for one request among others that share
its beginning. Each time: it ends "error" with a sentence naming it, the books are right after every step,
the others say what they say without it, and nothing computed from NaN can be found by later requests.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from fault_support import UNSAID, VOCAB, Expected, require_nothing_held, small_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import PlainCache

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.errors import HostCopyError
from minirad.kv.kv_pool import KVPool
from minirad.model.llama import LlamaModel
from minirad.observe import events as ev
from minirad.outputs import GenerationOutput

EXAMPLES = int(os.environ.get("MINIRAD_EXAMPLES", "60"))
POISON, UNSPEAKABLE, CURSED = UNSAID  # ids: of a NaN embedding, with no text, that the tree refuses
GREEDY = SamplingParams(max_new_tokens=5, ignore_eos=True)
TEXTS = ([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [5, 6, 7, 8, 20, 21, 22, 23], [30, 31, 32, 33, 34, 35])


class NoText:
    """A tokenizer that cannot say one id: `chr(96 + id)` for all others."""

    all_special_ids = (2,)
    unspeakable = True

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(each) - 96 for each in text]

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        if self.unspeakable and UNSPEAKABLE in ids:
            raise KeyError("this id has no text")
        return "".join(chr(96 + each) for each in ids if each not in self.all_special_ids)


class RefusingTree(PlainCache):
    """A student's tree that fails when it is asked to insert one id."""

    refuses = True

    def insert(self, key: Any, slots: Any) -> Any:
        if self.refuses and CURSED in key.tokens.tolist():
            raise IndexError("the tree refuses this key")
        return super().insert(key, slots)


def poisoned(model: LlamaModel) -> LlamaModel:
    """The embedding of one id becomes NaN: whatever attends to it is NaN from there on."""
    model.embed = model.embed.clone()
    model.embed[POISON] = float("nan")
    return model


CLEAN, SICK = small_model(), poisoned(small_model())
EXPECTED = Expected(CLEAN)


@dataclass(frozen=True)
class Ask:
    """One request of a batch."""

    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0


def innocent(ask: Ask) -> bool:
    """Whether this request says none of the three ids by chance."""
    said = [EXPECTED(ask.prompt, ask.params, index).token_ids for index in range(ask.params.n)]
    return not any(token in UNSAID for tokens in said for token in tokens)


# ---------------------------------------------------------------------- ways to fail


@dataclass(frozen=True)
class Failure:
    """How a request is made to fail: its prompt and mask, and what its error has to speak of."""

    prompt: Callable[[tuple[int, ...], int], tuple[int, ...]]
    mask: Callable[[int], Any] | None
    says: str
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    tree: bool = False


def put_in(token: int) -> Callable[[tuple[int, ...], int], tuple[int, ...]]:
    return lambda prompt, at: (*prompt[: at % (len(prompt) + 1)], token, *prompt[at % (len(prompt) + 1) :])


def says_at(token: int) -> Callable[[int], Any]:
    """A mask that makes its request say `token` as its k-th."""

    def build(k: int) -> Any:
        def mask(output: list[int]) -> Any:
            return np.arange(VOCAB) == token if len(output) == k else None

        return mask

    return build


def fails_at(fail: Callable[[], Any]) -> Callable[[int], Any]:
    """A mask that does something wrong at its k-th token."""

    def build(k: int) -> Any:
        return lambda output: fail() if len(output) == k else None

    return build


def raising(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


class Sly:
    """No array, and no plain error either when somebody wants to make one of it."""

    def __array__(self, *args: Any, **more: Any) -> Any:
        raise RuntimeError("not an array after all")


same: Callable[[tuple[int, ...], int], tuple[int, ...]] = lambda prompt, at: prompt  # noqa: E731
FAILURES = {
    "NaN in the prompt": Failure(put_in(POISON), None, "NaN"),
    "NaN in the prompt, log-probabilities": Failure(put_in(POISON), None, "NaN", logprobs=True),
    "NaN in a decode step": Failure(same, says_at(POISON), "NaN"),
    "mask raises": Failure(same, fails_at(raising(RuntimeError("no such mask"))), "no such mask"),
    "mask raises StopIteration": Failure(same, fails_at(raising(StopIteration("at its end"))), "mask"),
    "mask of another shape": Failure(same, fails_at(lambda: np.ones(VOCAB + 1, dtype=bool)), "mask"),
    "mask of another type": Failure(same, fails_at(lambda: np.ones(VOCAB)), "mask"),
    "mask that is no array": Failure(same, fails_at(Sly), "mask"),
    "mask that forbids all": Failure(same, fails_at(lambda: np.zeros(VOCAB, dtype=bool)), "no token"),
    "text that cannot be made": Failure(same, says_at(UNSPEAKABLE), "no text"),
    "text that cannot be searched": Failure(same, says_at(UNSPEAKABLE), "no text", stop=("zzz",)),
    "tree refuses the prompt": Failure(put_in(CURSED), None, "refuses", tree=True),
    "tree refuses the reply": Failure(same, says_at(CURSED), "refuses", tree=True),
}


# ---------------------------------------------------------------------- the property

params = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(3, 6),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    temperature=st.sampled_from([0.0, 0.0, 0.0, 0.9]),
    logprob_start=st.sampled_from([None, None, 0, 2]),
    ignore_eos=st.just(True),
    seed=st.just(11),
)
prompts = st.builds(
    lambda text, length, end: (*text[:length], *end),
    st.sampled_from(TEXTS),
    st.integers(3, 10),
    st.lists(st.sampled_from([6, 20]), max_size=1),
)
asks = st.builds(Ask, prompts, params, st.sampled_from([0, 0, 0, 1])).filter(innocent)
options = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 4]),
        "chunk_tokens": st.sampled_from([3, 5, 64]),
        "max_running": st.sampled_from([3, 4]),
        "kv_tokens": st.sampled_from([40, 96]),
        "mixed": st.booleans(),
        "in_batch_shared": st.sampled_from([1, 32]),
    }
)


def run(engine: Engine, limit: int = 300) -> list[GenerationOutput]:
    """Steps to the end; none of them raises, and the books are right after each."""
    outputs = []
    for _ in range(limit):
        if not engine.has_work:
            return outputs
        outputs += engine.step().finished
        engine.check()
    raise AssertionError(f"still at work after {limit} steps: {engine.snapshot()['requests']}")


def of(outputs: list[GenerationOutput], rid: str) -> list[GenerationOutput]:
    return sorted((each for each in outputs if each.request_id == rid), key=lambda each: each.index)


def require_failed(outputs: list[GenerationOutput], rid: str, says: str, n: int = 1) -> None:
    """Every sample of this request has ended "error", with one line that names it and the reason."""
    mine = of(outputs, rid)
    assert [each.index for each in mine] == list(range(n)), mine
    for each in mine:
        assert each.finish_reason == "error", each
        assert rid in each.error and says in each.error and "\n" not in each.error, each.error


def make(failure: Failure | None = None, **config: Any) -> Engine:
    tree = RefusingTree(config.get("page_size", 1)) if failure and failure.tree else None
    engine = Engine(EngineConfig(poison_freed=True, **config), tree, model=SICK, tokenizer=NoText())
    engine.check()
    return engine


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    asks=st.lists(asks, min_size=1, max_size=5),
    bad=st.integers(0, 4),
    name=st.sampled_from(sorted(FAILURES)),
    when=st.integers(0, 9),
    later=st.integers(0, 3),
    options=options,
)
def test_what_fails_for_one_request_is_nothing_to_the_others(
    asks: list[Ask], bad: int, name: str, when: int, later: int, options: dict[str, Any]
) -> None:
    failing_among_others(asks, bad % len(asks), name, when, later, options)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("name", sorted(FAILURES))
def test_each_place_that_can_fail(name: str, page: int) -> None:
    """The same for each way to fail: with three samples, in chunks of three, mixed; and in one piece."""
    batch = [Ask(tuple(text), replace(GREEDY, n=n)) for text, n in zip(TEXTS, (3, 1, 1), strict=True)]
    chunked = {"page_size": page, "chunk_tokens": 3, "mixed": True, "max_running": 5, "kv_tokens": 96}
    failing_among_others(batch, 0, name, 2, 1, chunked)
    failing_among_others(batch, 1, name, 3, 0, {"page_size": page, "kv_tokens": 96})


def failing_among_others(
    asks: list[Ask], bad: int, name: str, when: int, later: int, options: dict[str, Any]
) -> None:
    failure = FAILURES[name]
    engine = make(failure, **options)
    ids, spoilt = [], asks[bad]
    for at, ask in enumerate(asks):
        mask, asked = None, ask
        if at == bad:
            k = when % (ask.params.max_new_tokens - 1)
            mask = failure.mask and failure.mask(k)
            start = ask.params.logprob_start
            given = replace(
                ask.params, stop=failure.stop, logprob_start=0 if failure.logprobs else start, temperature=0.0
            )
            asked = spoilt = Ask(failure.prompt(ask.prompt, when), given, ask.priority)
        if at == len(asks) - 1:  # the last one comes when others run
            early = [output for _ in range(later) for output in checked_step(engine)]
        ids.append(
            engine.add_request(list(asked.prompt), asked.params, None, asked.priority, token_mask=mask)
        )
    outputs = early + run(engine)
    for at, (rid, ask) in enumerate(zip(ids, asks, strict=True)):
        if at == bad:
            require_failed(outputs, rid, failure.says, ask.params.n)
            continue
        mine = of(outputs, rid)
        assert [each.index for each in mine] == list(range(ask.params.n)), (rid, outputs)
        for output in mine:
            EXPECTED.require_equal(ask.prompt, ask.params, output)
    assert sorted(Counter(each.request_id for each in outputs)) == sorted(ids)
    require_clean(engine, spoilt)


def checked_step(engine: Engine) -> list[GenerationOutput]:
    finished = engine.step().finished
    engine.check()
    return finished


def require_clean(engine: Engine, spoilt: Ask) -> None:
    """Nothing of NaN is in the tree; once the fault is mended all are served, the one that failed too."""
    prompt = list(spoilt.prompt)
    whole = prompt.index(POISON) if POISON in prompt else len(prompt)
    assert engine.peek(prompt) <= whole
    sick = SICK.embed[POISON].clone()
    engine.tokenizer.unspeakable = False
    if isinstance(engine.cache, RefusingTree):
        engine.cache.refuses = False
    SICK.embed[POISON] = CLEAN.embed[POISON]
    try:
        for again in (prompt, [*prompt[: whole + 1], 9, 9], [*prompt, 9]):
            (output,) = engine.generate([again], GREEDY)
            engine.check()
            EXPECTED.require_equal(again, GREEDY, output)
    finally:
        SICK.embed[POISON] = sick
    require_nothing_held(engine)


# ---------------------------------------------------------------------- NaN


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("at", range(0, 10, 3))
def test_kv_of_nan_is_never_in_the_tree(at: int, chunk: int, page: int) -> None:
    """Not after any chunk, also not while the request still runs: earlier chunks ask for no logits."""
    engine = make(page_size=page, chunk_tokens=chunk, kv_tokens=96)
    prompt = [*TEXTS[0][:at], POISON, *TEXTS[0][at:]]
    good = engine.add_request(TEXTS[1], GREEDY)
    bad = engine.add_request(prompt, GREEDY)
    outputs: list[GenerationOutput] = []
    while engine.has_work:
        outputs += checked_step(engine)
        assert engine.peek(prompt) <= at
    require_failed(outputs, bad, "NaN")
    EXPECTED.require_equal(TEXTS[1], GREEDY, of(outputs, good)[0])
    require_clean(engine, Ask(tuple(prompt), GREEDY))


def test_a_prompt_hint_of_nan_fails_too() -> None:
    """max_new_tokens=0 samples nothing; its KV would be in the tree all the same."""
    engine = make(kv_tokens=96, chunk_tokens=4)
    prompt = [5, 6, POISON, 7, 8, 9]
    (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=0))
    assert output.finish_reason == "error" and "NaN" in output.error and engine.peek(prompt) <= 2
    require_clean(engine, Ask(tuple(prompt), GREEDY))


def test_two_with_one_poisoned_beginning_both_fail() -> None:
    """The second waits for the first's prefix, which never comes; a third shares what is before NaN."""
    engine = make(kv_tokens=96, in_batch_shared=1)
    bad = [engine.add_request([5, 6, 7, POISON, 8, end], GREEDY) for end in (9, 10)]
    good = engine.add_request([5, 6, 7, 8], GREEDY)
    outputs = run(engine)
    for rid in bad:
        require_failed(outputs, rid, "NaN")
    EXPECTED.require_equal([5, 6, 7, 8], GREEDY, of(outputs, good)[0])
    require_clean(engine, Ask((5, 6, 7, POISON, 8, 9), GREEDY))


def test_when_every_logit_is_nan_every_request_ends_and_the_engine_lives() -> None:
    """A broken head: nobody can be served, all are told so; with the head mended all is as ever."""
    model = small_model()
    whole, model.head = model.head, torch.full_like(model.head, float("nan"))
    engine = Engine(EngineConfig(kv_tokens=96, poison_freed=True), model=model)
    ids = [engine.add_request(text, replace(GREEDY, n=n)) for text, n in zip(TEXTS, (1, 2, 1), strict=True)]
    outputs = run(engine)
    for rid, n in zip(ids, (1, 2, 1), strict=True):
        require_failed(outputs, rid, "NaN", n)
    model.head = whole
    for text, output in zip(TEXTS, engine.generate(TEXTS, GREEDY), strict=True):
        EXPECTED.require_equal(text, GREEDY, output)
    require_nothing_held(engine)


@pytest.mark.parametrize("tier", ["write_through", "write_back"])
def test_kv_of_nan_does_not_come_back_from_the_host(tier: str) -> None:
    engine = make(kv_tokens=24, host_kv_tokens=64, host_write=tier, load_back_threshold=1, chunk_tokens=3)
    prompt = [5, 6, 7, 8, POISON, 9, 10, 11]
    (output,) = engine.generate([prompt], GREEDY)
    assert output.finish_reason == "error"
    for text in TEXTS:  # pushes everything out of the device
        EXPECTED.require_equal(text, GREEDY, engine.generate([text], GREEDY)[0])
    require_clean(engine, Ask(tuple(prompt), GREEDY))


def test_generate_and_stream_give_the_error_and_serve_the_rest() -> None:
    engine = make(kv_tokens=96)
    bad = [5, 6, POISON, 7]
    first, second, third = engine.generate([TEXTS[0], bad, TEXTS[1]], GREEDY)
    EXPECTED.require_equal(TEXTS[0], GREEDY, first)
    EXPECTED.require_equal(TEXTS[1], GREEDY, third)
    assert second.finish_reason == "error" and second.request_id in second.error and "NaN" in second.error
    assert "NaN" in stream_error(engine, bad, GREEDY)
    engine.check()
    tokens = [token.token_id for token in engine.stream(TEXTS[0], GREEDY)]
    assert tokens == EXPECTED(TEXTS[0], GREEDY).token_ids
    require_nothing_held(engine)


# ---------------------------------------------------------------------- tiny temperatures


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}])
@pytest.mark.parametrize("temperature", [1e-300, 1e-307, 1e-308, 1e-320, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float, limits: dict[str, Any]) -> None:
    """The limit that it means; today logits / temperature overflow to the last id, or to an exception."""
    engine = make(kv_tokens=96)
    tiny = replace(GREEDY, temperature=temperature, seed=3, **limits)
    asked = {engine.add_request(text, params): (text, GREEDY) for text, params in zip(
        TEXTS, (tiny, GREEDY, tiny), strict=True)}  # fmt: skip
    allowed = np.ones(VOCAB, dtype=bool)
    masked = engine.add_request(TEXTS[0], tiny, token_mask=lambda output: allowed)  # another way to sample
    asked[masked] = (TEXTS[0], GREEDY)
    outputs = run(engine)
    assert len(outputs) == 4
    for output in outputs:
        EXPECTED.require_equal(*asked[output.request_id], output)


# ---------------------------------------------------------------------- branching, copies


class FailingPool(KVPool):
    """A pool that cannot copy a partial page, so many times."""

    failures = 0

    def copy(self, *args: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise MemoryError("no room to copy a page")
        super().copy(*args)


class FailingPoolModel(LlamaModel):
    def new_pool(self, num_slots: int) -> KVPool:
        c = self.config
        return FailingPool(c.layers, num_slots, c.kv_heads, c.head_dim, dtype=self.dtype, device=self.device)


@pytest.mark.parametrize("failures", [1, 2, 9])
@pytest.mark.parametrize("options", [{}, {"mixed": True, "chunk_tokens": 3}])
def test_a_branch_that_cannot_be_made(options: dict[str, Any], failures: int) -> None:
    engine = Engine(
        EngineConfig(page_size=4, kv_tokens=96, max_running=6, poison_freed=True, **options),
        model=small_model(of=FailingPoolModel),
    )
    three = replace(GREEDY, n=3)
    before = engine.add_request([5, 6, 7, 8, 30], GREEDY)
    bad = engine.add_request([5, 6, 7, 8, 9, 10], three)
    after = engine.add_request([40, 41], GREEDY)
    engine.pool.failures = failures
    outputs = run(engine)
    EXPECTED.require_equal([5, 6, 7, 8, 30], GREEDY, of(outputs, before)[0])
    EXPECTED.require_equal([40, 41], GREEDY, of(outputs, after)[0])
    mine = of(outputs, bad)
    assert [each.index for each in mine] == [0, 1, 2]
    assert any(each.finish_reason == "error" for each in mine)
    for each in mine:  # samples that need not fail may go on, and then they are right
        if each.finish_reason == "error":
            assert bad in each.error and "no room to copy" in each.error
        else:
            EXPECTED.require_equal([5, 6, 7, 8, 9, 10], three, each)
    engine.pool.failures = 0
    for output in engine.generate([5, 6, 7, 8, 9, 10], three):
        EXPECTED.require_equal([5, 6, 7, 8, 9, 10], three, output)
    require_nothing_held(engine)


class FailingCopier:
    """A Copier whose n-th copy of one kind raises, when it begins or when it is waited for."""

    def __init__(self, inner: Any, kind: str, at: int, error: Exception) -> None:
        self.inner, self.kind, self.left, self.error = inner, kind, at, error

    def _may_fail(self, kind: str) -> None:
        if kind == self.kind:
            self.left -= 1
            if self.left == 0:
                raise self.error

    def backup(self, device_slots: Any, host_slots: Any) -> Any:
        self._may_fail("backup")
        return _FailingCopy(self, self.inner.backup(device_slots, host_slots))

    def load(self, host_slots: Any, device_slots: Any) -> Any:
        self._may_fail("load")
        return self.inner.load(host_slots, device_slots)

    def fence(self) -> None:
        self.inner.fence()


class _FailingCopy:
    def __init__(self, copier: FailingCopier, inner: Any) -> None:
        self.copier, self.inner = copier, inner

    def done(self) -> bool:
        return self.inner.done()

    def wait(self) -> bool:
        self.copier._may_fail("wait")
        return self.inner.wait()


@pytest.mark.parametrize("error", [HostCopyError("no copy"), OSError("no copy")])
@pytest.mark.parametrize("kind", ["backup", "load", "wait"])
@pytest.mark.parametrize("tier", ["write_through", "write_through_selective", "write_back"])
def test_a_copy_that_fails_costs_one_request_at_most(tier: str, kind: str, error: Exception) -> None:
    """Best is that nobody notices: what was not copied is computed again."""
    for at, page in ((1, 1), (2, 4)):
        config = EngineConfig(
            kv_tokens=24, page_size=page, host_kv_tokens=96, host_write=tier, load_back_threshold=1,
            max_running=3, chunk_tokens=4, poison_freed=True,
        )  # fmt: skip
        engine = Engine(config, model=CLEAN)
        engine.cache.copier = copier = FailingCopier(engine.cache.copier, kind, at, error)
        failed = []
        for _ in range(3):
            asked = {engine.add_request(text, GREEDY): text for text in TEXTS}
            outputs = run(engine)
            assert sorted(asked) == sorted(each.request_id for each in outputs)
            for output in outputs:
                if output.finish_reason == "error":
                    failed.append(output)
                else:
                    EXPECTED.require_equal(asked[output.request_id], GREEDY, output)
        assert len(failed) <= (copier.left <= 0)
        assert all(each.request_id in each.error and "no copy" in each.error for each in failed)
        require_nothing_held(engine)


def test_the_copies_that_are_to_fail_do_happen() -> None:
    """Each kind is reached in the test above (else it would say nothing)."""
    reached: set[str] = set()
    for tier in ("write_through", "write_back"):
        options = {"kv_tokens": 24, "host_kv_tokens": 96, "host_write": tier, "load_back_threshold": 1}
        engine = Engine(EngineConfig(max_running=3, chunk_tokens=4, **options), model=CLEAN)
        for kind in (ev.BackupStarted, ev.LoadStarted):
            engine.bus.subscribe(kind, lambda event: reached.add(type(event).__name__))
        for _ in range(3):
            engine.generate(TEXTS, GREEDY)
    assert reached == {"BackupStarted", "LoadStarted"}


# ---------------------------------------------------------------------- streams that cannot go on


def stream_error(engine: Engine, prompt: Any, params: SamplingParams) -> str:
    return end_of(engine.stream(prompt, params))["error"][0]


def end_of(stream: Any, n: int = 1) -> dict[str, list[str]]:
    """How a stream ends: the errors (a raised one counts) or finish reasons of its samples' last pieces."""
    ends: dict[int, Any] = {}
    try:
        for piece in stream:
            if piece.finish_reason is not None:
                ends[piece.index] = piece
    except ValueError as error:
        return {"error": [str(error)] * n}
    assert sorted(ends) == list(range(n)), "a stream that ends says so for each of its samples"
    found: dict[str, list[str]] = {}
    for piece in ends.values():
        found.setdefault(piece.finish_reason, []).append(getattr(piece, "error", ""))
    return found


def test_a_stream_that_cannot_go_on_says_so() -> None:
    """The pool is pinned: `generate` has the reason, and so has the stream."""
    engine = make(kv_tokens=64)
    engine.generate([7] * 60, SamplingParams(max_new_tokens=0))
    pin = engine.pin([7] * 60)
    (output,) = engine.generate([[5, 6, 7, 8, 9, 10]], GREEDY)
    assert output.finish_reason == "error" and "pinned" in output.error
    assert "pinned" in stream_error(engine, [5, 6, 7, 8, 9, 10], GREEDY)
    engine.check()
    engine.unpin(pin)
    require_nothing_held(engine)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_stream_that_somebody_else_aborts_says_so(n: int) -> None:
    engine = make(kv_tokens=96)
    stream = engine.stream([5, 6, 7], replace(GREEDY, max_new_tokens=8, n=n))
    first = next(stream)
    assert engine.abort(first.request_id)
    engine.check()
    ends = end_of(stream, n)
    assert list(ends) in (["abort"], ["error"]), ends
    require_nothing_held(engine)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_each_sample_that_ends_early_has_an_output(steps: int) -> None:
    """n = 3 aborted before it branched, in the middle of its prompt, or later: three outputs."""
    engine = make(kv_tokens=96, chunk_tokens=4)
    rid = engine.add_request(TEXTS[0], replace(GREEDY, n=3))
    outputs = [output for _ in range(steps) for output in checked_step(engine)]
    assert engine.abort(rid)
    outputs += run(engine)
    assert [(each.index, each.finish_reason) for each in of(outputs, rid)] == [(i, "abort") for i in range(3)]
    require_nothing_held(engine)
