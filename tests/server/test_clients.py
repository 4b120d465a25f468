"""The clients that people use, unmodified, against a server process: what they get is what the engine says.

The `openai` client comes with the extra `test`; litellm and `llm` are used where they are installed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest
from running import Server

from minirad.config import EngineConfig, SamplingParams
from minirad.engine import Engine
from minirad.outputs import GenerationOutput

KEY = "sk-of-the-test"
ASKED = "Question 1: What is the capital of France?\nAnswer 1:"
OTHERS = [ASKED.replace("France", land) for land in ("Peru", "Italy", "Japan", "Egypt", "Norway", "Kenya")]
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
CHAT: Any = [SYSTEM, {"role": "user", "content": "What is the capital of France?"}]
LONG = 1500  # tokens: seconds

needs_grammar = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="response_format needs llguidance"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    words = "--kv-tokens", "8192", "--max-running", "4", "--max-queue", "4", "--max-body", "200000"
    running = Server(*words, "--served-model-name", "classroom", key=KEY)
    yield running
    assert running.end() == 0, running.said


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made
    server.wait_for(lambda: busy(server) == 0, 60, "all requests have ended")


def busy(server: Server) -> int:
    """Replies that wait or are made in the server."""
    return int(json.loads(server.get("/health"))["open"])


@contextlib.contextmanager
def aborting(server: Server, replies: int = 1) -> Iterator[None]:
    """So many replies are aborted within: they did not come to their end, however long one waits for it."""

    def aborted() -> float:
        return server.metric("minirad_replies_total", finish_reason="abort")

    before = aborted()
    yield
    server.wait_for(lambda: busy(server) == 0, 60, "it has ended")
    server.wait_for(lambda: aborted() == before + replies, 60, "it was aborted")


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The same model in this process: what the server has to say."""
    return Engine(EngineConfig(kv_tokens=8192, max_running=8))


def direct(engine: Engine, prompt: Any, **params: Any) -> list[GenerationOutput]:
    return engine.generate(prompt, SamplingParams(**params))


def chat_ids(engine: Engine, messages: Any = CHAT) -> list[int]:
    text = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return [int(token) for token in engine.encode(text)]


# ---------------------------------------------------------------------- openai: what it asks


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["classroom"]
    assert client.models.retrieve("classroom").id == "classroom"


def test_a_completion_is_what_the_engine_says(client: openai.OpenAI, engine: Engine) -> None:
    (known,) = direct(engine, ASKED, max_new_tokens=24)
    said = client.completions.create(model="classroom", prompt=ASKED, max_tokens=24, temperature=0)
    assert said.choices[0].text == known.text and said.choices[0].finish_reason == known.finish_reason
    assert said.usage is not None and said.usage.prompt_tokens == known.prompt_tokens
    assert said.usage.completion_tokens == len(known.token_ids)
    assert said.usage.total_tokens == known.prompt_tokens + len(known.token_ids)
    again = client.completions.create(model="classroom", prompt=ASKED, max_tokens=24, temperature=0)
    assert again.choices[0].text == known.text and again.id != said.id
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == known.prompt_tokens - 1


def test_prompts_are_texts_ids_or_lists_of_them(client: openai.OpenAI, engine: Engine) -> None:
    texts = [ASKED, *OTHERS[:2]]
    ids = [[int(token) for token in engine.encode(text)] for text in texts]
    known = [out.text for out in engine.generate(texts, SamplingParams(max_new_tokens=12))]
    for prompt, wanted in ((texts, known), (ids, known), (ids[0], known[:1])):
        said = client.completions.create(model="classroom", prompt=prompt, max_tokens=12, temperature=0)
        assert [choice.index for choice in said.choices] == list(range(len(wanted)))
        assert [choice.text for choice in said.choices] == wanted


def test_a_stream_joins_to_the_whole(client: openai.OpenAI, engine: Engine) -> None:
    (known,) = direct(engine, ASKED, max_new_tokens=24)
    pieces = list(
        client.completions.create(
            model="classroom", prompt=ASKED, max_tokens=24, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert len({piece.id for piece in pieces}) == 1
    *parts, last = pieces
    assert "".join(part.choices[0].text for part in parts) == known.text
    assert len(parts) > 3 and [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (
        len(parts) - 1
    )
    assert parts[-1].choices[0].finish_reason == known.finish_reason
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == len(known.token_ids)
    assert all(part.usage is None for part in parts)


def test_a_chat_and_its_stream(client: openai.OpenAI, engine: Engine) -> None:
    (known,) = direct(engine, chat_ids(engine), max_new_tokens=40)
    said = client.chat.completions.create(
        model="classroom", messages=CHAT, max_completion_tokens=40, temperature=0
    )
    message = said.choices[0].message
    assert (message.role, message.content) == ("assistant", known.text) and "Paris" in known.text
    assert said.choices[0].finish_reason == known.finish_reason == "stop"
    assert said.usage is not None and said.usage.prompt_tokens == known.prompt_tokens
    stream = client.chat.completions.create(
        model="classroom", messages=CHAT, max_tokens=40, temperature=0, stream=True
    )
    pieces = list(stream)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == known.text
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == "stop"


def test_content_may_be_text_parts(client: openai.OpenAI, engine: Engine) -> None:
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
    (known,) = direct(engine, chat_ids(engine), max_new_tokens=40)
    messages: Any = [SYSTEM, {"role": "user", "content": parts}]
    said = client.chat.completions.create(model="classroom", messages=messages, max_tokens=40, temperature=0)
    assert said.choices[0].message.content == known.text


def test_several_turns(client: openai.OpenAI, engine: Engine) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Thanks!"}]
    (known,) = direct(engine, chat_ids(engine, messages), max_new_tokens=20)
    said = client.chat.completions.create(model="classroom", messages=messages, max_tokens=20, temperature=0)
    assert said.choices[0].message.content == known.text


def test_n_samples_with_a_seed(client: openai.OpenAI, engine: Engine) -> None:
    open_ended = [{"role": "user", "content": "Tell me a story."}]
    params: dict[str, Any] = {"n": 3, "temperature": 1.9, "top_p": 0.98, "seed": 7}
    known = direct(engine, chat_ids(engine, open_ended), max_new_tokens=16, **params)
    assert len({out.text for out in known}) > 1
    asked: dict[str, Any] = {"model": "classroom", "messages": open_ended, "max_tokens": 16, **params}
    said = client.chat.completions.create(**asked)
    assert [choice.index for choice in said.choices] == [0, 1, 2]
    assert [choice.message.content for choice in said.choices] == [out.text for out in known]
    assert said.usage is not None
    assert said.usage.completion_tokens == sum(len(out.token_ids) for out in known)
    texts = ["", "", ""]
    for piece in client.chat.completions.create(**asked, stream=True):
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [out.text for out in known]


def test_stop_texts(client: openai.OpenAI, engine: Engine) -> None:
    (known,) = direct(engine, ASKED, max_new_tokens=24)
    stop = known.text.strip()[2:5]
    (stopped,) = direct(engine, ASKED, max_new_tokens=24, stop=(stop,))
    asked: dict[str, Any] = {"model": "classroom", "prompt": ASKED, "max_tokens": 24, "temperature": 0}
    for said in (stop, [stop, "never said"]):
        choice = client.completions.create(**asked, stop=said).choices[0]
        assert choice.text == stopped.text == known.text[: known.text.index(stop)]
        assert choice.finish_reason == "stop"
        pieces = client.completions.create(**asked, stop=said, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == stopped.text


def test_the_length_ends_a_reply(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(model="classroom", messages=CHAT, max_completion_tokens=2)
    assert said.choices[0].finish_reason == "length"
    assert said.usage is not None and said.usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(client: openai.OpenAI, engine: Engine, stream: bool) -> None:
    (known,) = direct(engine, chat_ids(engine), max_new_tokens=8)
    asked: dict[str, Any] = {
        "model": "classroom", "messages": CHAT, "max_tokens": 8, "temperature": 0, "logprobs": True,
        "top_logprobs": 4,
    }  # fmt: skip
    content = []
    if stream:
        for piece in client.chat.completions.create(**asked, stream=True):
            for choice in piece.choices:
                content += (choice.logprobs.content or []) if choice.logprobs else []
    else:
        logprobs = client.chat.completions.create(**asked).choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        content = logprobs.content
    assert [each.logprob for each in content] == pytest.approx(known.logprobs, abs=1e-4)
    text = b"".join(bytes(each.bytes or []) for each in content).decode()
    assert text.startswith(known.text)
    for each in content:
        tops = [top.logprob for top in each.top_logprobs]
        assert len(tops) == 4 and tops == sorted(tops, reverse=True)
        assert tops[0] == pytest.approx(each.logprob) and each.top_logprobs[0].token == each.token


def test_logprobs_of_a_completion(client: openai.OpenAI, engine: Engine) -> None:
    (known,) = direct(engine, ASKED, max_new_tokens=8)
    said = client.completions.create(model="classroom", prompt=ASKED, max_tokens=8, temperature=0, logprobs=3)
    logprobs = said.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert logprobs.token_logprobs == pytest.approx(known.logprobs, abs=1e-4)
    assert "".join(logprobs.tokens).startswith(known.text) and len(logprobs.tokens) == 8
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.top_logprobs is not None and all(len(top) == 3 for top in logprobs.top_logprobs)


class Answer(pydantic.BaseModel):
    capital: Literal["Paris", "Lima", "Rome"]
    sure: bool
    numbers: list[Literal[1, 22]] = pydantic.Field(min_length=2, max_length=2)


@needs_grammar
def test_a_reply_of_a_schema_is_parsed(client: openai.OpenAI) -> None:
    said = client.chat.completions.parse(
        model="classroom", messages=CHAT, response_format=Answer, max_tokens=200, temperature=0
    )
    parsed = said.choices[0].message.parsed
    assert isinstance(parsed, Answer) and len(parsed.numbers) == 2
    with client.chat.completions.stream(
        model="classroom", messages=CHAT, response_format=Answer, max_tokens=200, temperature=0
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == parsed


@needs_grammar
def test_a_reply_of_json(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(
        model="classroom", messages=CHAT, response_format={"type": "json_object"}, max_tokens=400, seed=1
    )
    if said.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(said.choices[0].message.content or ""), dict)
    else:
        assert (said.choices[0].message.content or "").lstrip().startswith("{")


@pytest.mark.slow
def test_many_at_once(server: Server, engine: Engine) -> None:
    """More than may run or wait: the client's own retries obey Retry-After, and each gets its own answer."""
    prompts = [ASKED, *OTHERS] * 4
    known = engine.generate([ASKED, *OTHERS], SamplingParams(max_new_tokens=16))
    wanted = [out.text for out in known] * 4

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=20) as client:

            async def one(prompt: str) -> str:
                said = await client.completions.create(
                    model="classroom", prompt=prompt, max_tokens=16, temperature=0
                )
                return said.choices[0].text

            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(ask()) == wanted


# ---------------------------------------------------------------------- openai: what is refused


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"temperature": -1}, ["temperature"]),
        ({"temperature": -1, "top_p": 7, "n": 0}, ["temperature", "top_p", "n"]),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, ["tools"]),
        ({"logit_bias": {"5": 10}, "presence_penalty": 1.0}, ["logit_bias", "presence_penalty"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         ["messages[0].content[0].type"]),
        ({"messages": []}, ["messages"]),
        ({"top_logprobs": 3}, ["top_logprobs"]),
        ({"max_tokens": 100_000}, ["messages", "100000"]),
        ({"extra_body": {"best_of": 2}}, ["best_of"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_bad_request_that_names_it(
    client: openai.OpenAI, more: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": "classroom", "messages": CHAT, **more})
    assert refused.value.type == "invalid_request_error"
    assert all(name in refused.value.message for name in names), refused.value.message
    assert refused.value.param in names


def test_a_prompt_longer_than_the_context(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context") as refused:
        client.completions.create(model="classroom", prompt=[5] * 3000, max_tokens=1)
    assert "3000" in refused.value.message


def test_harmless_fields_are_taken(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(
        model="classroom", messages=CHAT, max_tokens=2, user="me", metadata={"a": "b"}, store=False,
        service_tier="auto", presence_penalty=0, frequency_penalty=0.0, tools=[], parallel_tool_calls=True,
    )  # fmt: skip
    assert said.choices[0].finish_reason == "length"


def test_a_wrong_key(server: Server) -> None:
    for key in ("wrong", KEY + "x", "ключ".encode().hex()):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            with pytest.raises(openai.AuthenticationError):
                client.completions.create(model="classroom", prompt="x")


def test_what_is_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9") as refused:
        client.chat.completions.create(model="gpt-9", messages=CHAT)
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="classroom", input="x")


def test_a_body_that_is_too_large(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="classroom", prompt="x" * 300_000)
    assert refused.value.status_code == 413 and "200000" in refused.value.message.replace(",", "")


def test_a_full_queue_says_when_to_come_back(client: openai.OpenAI, server: Server, engine: Engine) -> None:
    def long() -> Any:
        return client.completions.create(
            model="classroom", prompt=ASKED, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
        )

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(long) for _ in range(8)]  # 4 run, 4 wait
        server.wait_for(lambda: busy(server) == 8, 60, "eight requests are there")
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="classroom", prompt=ASKED, max_tokens=2)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        for stream in concurrent.futures.as_completed(streams):  # those that waited have begun by then
            stream.result().close()
    server.wait_for(lambda: busy(server) == 0, 60, "what was closed has ended")
    (known,) = direct(engine, ASKED, max_new_tokens=4)
    said = client.completions.create(model="classroom", prompt=ASKED, max_tokens=4, temperature=0)
    assert said.choices[0].text == known.text


def test_closing_a_stream_aborts_it(client: openai.OpenAI, server: Server) -> None:
    with aborting(server):
        stream = client.chat.completions.create(
            model="classroom", messages=CHAT, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        assert busy(server) == 1
        stream.close()


def test_a_cancelled_call_is_aborted(server: Server) -> None:
    async def cancel() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            call = client.completions.create(
                model="classroom", prompt=ASKED, max_tokens=LONG, extra_body={"ignore_eos": True}
            )
            task = asyncio.ensure_future(call)
            while busy(server) == 0:
                await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with aborting(server):
        asyncio.run(cancel())


def test_a_timeout_of_the_client_is_aborted(client: openai.OpenAI, server: Server) -> None:
    impatient = client.with_options(timeout=openai.Timeout(60, read=0.3))  # once it was sent
    with aborting(server), pytest.raises(openai.APITimeoutError):
        impatient.completions.create(
            model="classroom", prompt=ASKED, max_tokens=LONG, extra_body={"ignore_eos": True}
        )


# ---------------------------------------------------------------------- litellm


@pytest.fixture(scope="module")
def litellm() -> Any:
    if importlib.util.find_spec("litellm") is None:
        pytest.skip("litellm is not installed")
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import looks for prices in the net
    module = importlib.import_module("litellm")
    module.telemetry = False
    return module


@pytest.mark.slow
def test_litellm(litellm: Any, server: Server, engine: Engine) -> None:
    (known,) = direct(engine, chat_ids(engine), max_new_tokens=40)
    asked = {"model": "openai/classroom", "api_base": f"{server.url}/v1", "api_key": KEY, "num_retries": 0}
    limits = {"max_tokens": 40, "temperature": 0}
    said = litellm.completion(messages=CHAT, **limits, **asked)
    assert said.choices[0].message.content == known.text
    assert said.usage.prompt_tokens == known.prompt_tokens
    pieces = list(litellm.completion(messages=CHAT, stream=True, **limits, **asked))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == known.text
    (whole,) = direct(engine, ASKED, max_new_tokens=12)
    text = {**asked, "model": "text-completion-openai/classroom"}
    said = litellm.text_completion(prompt=ASKED, max_tokens=12, temperature=0, **text)
    assert said.choices[0].text == whole.text
    for kind, wrong in (
        (litellm.AuthenticationError, {"api_key": "wrong"}),
        (litellm.BadRequestError, {"temperature": -1}),
        (litellm.NotFoundError, {"model": "openai/gpt-9"}),
    ):
        with pytest.raises(kind):
            litellm.completion(**{"messages": CHAT, **limits, **asked, **wrong})


# ---------------------------------------------------------------------- llm


@pytest.fixture
def llm(server: Server, tmp_path: Path) -> Any:
    """Runs the command `llm` with words, and returns what it prints."""
    if importlib.util.find_spec("llm") is None:
        pytest.skip("llm is not installed")
    models = [
        {"model_id": name, "model_name": "classroom", "api_base": f"{server.url}/v1", "supports_schema": True,
         "api_key_name": "minirad", "completion": name == "plain"}
        for name in ("talk", "plain")
    ]  # fmt: skip
    # JSON is YAML
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models), encoding="utf-8")
    (tmp_path / "keys.json").write_text(json.dumps({"minirad": KEY}), encoding="utf-8")
    env = {**os.environ, "LLM_USER_PATH": str(tmp_path)}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "llm", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_llm(llm: Any, engine: Engine) -> None:
    (known,) = direct(engine, chat_ids(engine), max_new_tokens=40)
    question, system = CHAT[1]["content"], CHAT[0]["content"]
    asked = "-m", "talk", "-s", system, "-o", "temperature", "0", "-o", "max_tokens", "40", question
    assert llm(*asked).strip() == known.text.strip()
    assert llm(*asked, "--no-stream").strip() == known.text.strip()
    (whole,) = direct(engine, ASKED, max_new_tokens=12)
    plain = "-m", "plain", "-o", "temperature", "0", "-o", "max_tokens", "12", ASKED
    assert llm(*plain).strip() == whole.text.strip()
    history = [*CHAT, {"role": "assistant", "content": known.text}, {"role": "user", "content": "Thanks!"}]
    (after,) = direct(engine, chat_ids(engine, history), max_new_tokens=40)
    more = "-c", "-o", "temperature", "0", "-o", "max_tokens", "40", "Thanks!"
    assert llm(*asked) and llm(*more).strip() == after.text.strip()


@pytest.mark.slow
@needs_grammar
def test_llm_with_a_schema(llm: Any) -> None:
    schema = json.dumps(Answer.model_json_schema() | {"additionalProperties": False})
    said = llm("-m", "talk", "-o", "max_tokens", "200", "-o", "temperature", "0", "--schema", schema, "Hello")
    assert len(Answer.model_validate_json(said).numbers) == 2
