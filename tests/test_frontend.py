"""A chat's history is token ids: every turn hits everything that came before."""

from __future__ import annotations

import pytest

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.frontend import ChatSession


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(kv_tokens=2048))


@pytest.mark.parametrize("max_new_tokens", [64, 3])  # replies that end by themselves, and cut ones
def test_each_turn_hits_all_of_the_turns_before(engine: Engine, max_new_tokens: int) -> None:
    engine.flush_cache()
    session = ChatSession(engine)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    for turn in ("Hello", "My name is Ada.", "What is my name?"):
        known = len(session.tokens)
        output = session.send(turn, params)
        engine.check()
        # The last sampled token has no KV, so it is computed with the next turn.
        assert output.cached_tokens == max(known - 1, 0)


def test_the_history_is_what_the_template_makes_of_it(engine: Engine) -> None:
    session = ChatSession(engine)
    first = session.send("Hello", SamplingParams(max_new_tokens=64))
    assert first.finish_reason == "stop"
    prompt = session.prompt("Thank you")
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "Thank you"},
    ]
    whole = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert engine.tokenizer.decode(prompt) == whole


def test_streaming_a_turn_gives_the_same_history(engine: Engine) -> None:
    sent, streamed = ChatSession(engine), ChatSession(engine)
    sent.send("What is the capital of France?")
    text = "".join(token.text for token in streamed.stream("What is the capital of France?"))
    assert streamed.tokens == sent.tokens
    assert text and text in engine.decode(streamed.tokens)


def test_a_turn_that_is_refused_changes_nothing(engine: Engine) -> None:
    session = ChatSession(engine)
    session.send("Hello")
    before = list(session.tokens)
    with pytest.raises(ValueError, match="more than the"):
        session.send("word " * 3000)
    assert session.tokens == before
    assert session.send("Hello").cached_tokens > 0


def test_a_tokenizer_without_a_template_is_refused(tiny_model: object) -> None:
    class Plain:
        chat_template = None

    engine = Engine(EngineConfig(kv_tokens=64), model=tiny_model, tokenizer=Plain())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no chat template"):
        ChatSession(engine)
