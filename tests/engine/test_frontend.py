"""A chat's history is token ids: every turn hits everything that came before."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
from llama2style import EOS, make_model

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.frontend import ChatSession, State, run


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


# ---------------------------------------------------------------------- templates, against transformers'

TEMPLATES = {
    "llama-2": """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}\
{% endif %}{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama-3": """{{ bos_token }}{% for message in messages %}\
{{ '[' + message['role'] + ']\\n\\n' + message['content'] | trim + eos_token }}{% endfor %}\
{% if add_generation_prompt %}{{ '[assistant]\\n\\n' }}{% endif %}""",
    "chatml": """{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "mistral": """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}\
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ message['content'] + eos_token }}{% else %}{{ raise_exception('only user and assistant') }}{% endif %}\
{% endfor %}""",
    "zephyr": """{% for message in messages %}\n{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}\n{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
}
ASKED = ("hi", " the b\n", "so? ")
REPLIES = ("yo", "a b.", "é 好")


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = make_model(tmp_path_factory.mktemp("templates"))
    return Engine(EngineConfig(model=path, kv_tokens=1024, device="cpu"))


@pytest.fixture(params=sorted(TEMPLATES))
def templated(request: pytest.FixtureRequest, llama2: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(llama2.tokenizer, "chat_template", TEMPLATES[request.param])
    return llama2


def rendered(engine: Engine, said: list[tuple[str, str]], tokenize: bool = True) -> Any:
    messages = [{"role": role, "content": text} for role, text in said]
    return engine.tokenizer.apply_chat_template(
        messages,
        tokenize=tokenize,
        add_generation_prompt=True,
        **({"return_dict": False} if tokenize else {}),
    )


def between(engine: Engine) -> str:
    """What this template writes before a reply, behind its own opening of the turn (Llama 2's space)."""
    asked = rendered(engine, [("user", "Q")], tokenize=False)
    whole = rendered(engine, [("user", "Q"), ("assistant", "REPLY"), ("user", "Q")], tokenize=False)
    return str(whole[len(asked) :].split("REPLY")[0])


@pytest.mark.parametrize("system", [None, "be the b ", " a"])
def test_a_chat_is_what_the_template_makes_of_the_same_messages(
    templated: Engine, system: str | None
) -> None:
    """Turn by turn, and token by token: the replies are those that the template would have written."""
    engine = templated
    said: list[tuple[str, str]] = [] if system is None else [("system", system)]
    try:
        rendered(engine, [*said, ("user", "hi")])
    except Exception:
        with pytest.raises(ValueError, match="no place for a system prompt"):
            ChatSession(engine, system)
        return
    chat = ChatSession(engine, system)
    for user, reply in zip(ASKED, REPLIES, strict=True):
        said.append(("user", user))
        prompt = chat.prompt(user)
        assert prompt == rendered(engine, said)
        ids = engine.texts.encode(between(engine) + reply, prompt[-1])
        for ends in ([EOS], [EOS, EOS], []):  # however it ended: the template closes it
            chat.tokens = prompt + ids + ends
            after = chat.prompt("x")
            assert after == rendered(engine, [*said, ("assistant", reply), ("user", "x")])
            assert not any(pair == (EOS, EOS) for pair in pairwise(after))
            assert after[: len(prompt) + len(ids)] == prompt + ids  # the history is never tokenised again
        said.append(("assistant", reply))


@pytest.mark.parametrize("system", [None, "be the b "])
def test_a_program_writes_the_same_chat(templated: Engine, system: str | None) -> None:
    async def program(s: State) -> str:
        if system is not None:
            s.system(system)
        s.user(ASKED[1])
        await s.gen("reply", max_new_tokens=3)
        s.user(ASKED[2])
        s.assistant()
        return s.text

    said = [("system", system)] if system is not None else []
    try:
        wanted = rendered(templated, [*said, ("user", ASKED[1])], tokenize=False)
    except Exception:
        return
    text, state = (outcome := run(templated, program)).value, outcome.state
    assert text is not None
    chat = ChatSession(templated, system)
    chat.send(ASKED[1], SamplingParams(max_new_tokens=3))
    assert state.tokens == chat.prompt(ASKED[2])
    shown = templated.tokenizer.decode(templated.texts.encode(wanted))
    assert text.startswith(shown)


def test_a_template_that_leaves_a_text_out_is_refused(
    llama2: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for template in (
        "{{ 'nothing' }}",
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m.content | lower }}{% endfor %}",
    ):
        monkeypatch.setattr(llama2.tokenizer, "chat_template", template)
        with pytest.raises(ValueError, match="the chat template cannot be used"):
            ChatSession(llama2)


# ---------------------------------------------------------------------- turns that are not answered


@pytest.mark.parametrize("how", ["send", "stream"])
def test_an_unanswered_turn_is_dropped(how: str) -> None:
    engine = Engine(EngineConfig(kv_tokens=64))
    engine.generate([7] * 60, SamplingParams(max_new_tokens=0))
    pin = engine.pin([7] * 60)
    session = ChatSession(engine, None)
    if how == "send":
        output = session.send("Hello")
        assert (output.finish_reason, output.token_ids) == ("error", [])
    else:
        (piece,) = session.stream("Hello")
        assert (piece.token_id, piece.finish_reason) == (None, "error")
        assert "pinned" in piece.error
    assert session.tokens == []
    engine.unpin(pin)
    stream = session.stream("Hello", SamplingParams(max_new_tokens=8))
    engine.abort(next(stream).request_id)
    assert [piece.finish_reason for piece in stream] == ["abort"]
    assert session.tokens == []
    engine.check()


# ---------------------------------------------------------------------- text that is no Unicode


@pytest.mark.parametrize("bad", ["a\ud800b", "\udcff"])
def test_text_that_is_no_unicode_is_refused_by_place(engine: Engine, bad: str) -> None:
    async def user(s: State) -> None:
        s.user(bad)

    async def plain(s: State) -> None:
        s += bad

    async def prefilled(s: State) -> None:
        s.user("Hi")
        s.assistant(bad)

    async def select(s: State) -> None:
        s.user("Hi")
        await s.select("x", ("yes", bad))

    async def regex(s: State) -> None:
        s.user("Hi")
        await s.gen("x", regex=bad)

    async def stop(s: State) -> None:
        s.user("Hi")
        await s.gen("x", stop=bad)

    session = ChatSession(engine)
    for named, call in (
        ("the user's message", lambda: session.send(bad)),
        ("the user's message", lambda: list(session.stream(bad))),
        ("the system prompt", lambda: ChatSession(engine, bad)),
        ("the user's message", lambda: run(engine, user)),
        ("a program's text", lambda: run(engine, plain)),
        ("a program's text", lambda: run(engine, prefilled)),
        ("select 'x': a choice", lambda: run(engine, select)),
        ("a stop text", lambda: run(engine, stop)),
        *((("the regex", lambda: run(engine, regex)),) if find_spec("llguidance") else ()),
    ):
        with pytest.raises(ValueError, match=f"{named} is no valid text: character"):
            call()
    assert session.tokens == [] and not engine.has_work
    engine.check()
