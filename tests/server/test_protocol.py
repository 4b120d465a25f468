"""A body becomes a request, or all that is wrong with it is named at once; nothing else comes out of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirad.server.protocol import ApiError, Chat, chat, completion

TALK = [{"role": "user", "content": "Hi"}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:"}}


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def refusal(parse: Any, data: bytes) -> ApiError:
    with pytest.raises(ApiError) as told:
        parse(data)
    assert told.value.status == 400 and told.value.kind == "invalid_request_error"
    return told.value


# ------------------------------------------------------------------ what is taken


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_come_in_four_shapes(prompt: Any, wanted: Any) -> None:
    assert completion(body(prompt=prompt)).prompt == wanted


def test_what_was_left_out_is_called_missing() -> None:
    for parse, name in ((completion, "prompt"), (chat, "messages")):
        for data in (body(), body(**{name: None})):
            assert str(refusal(parse, data)) == f"{name}: is missing"


def test_the_defaults_are_openais() -> None:
    asked = completion(body(prompt="a", temperature=None, n=None, stop=None))
    assert (asked.temperature, asked.top_p, asked.n, asked.stops, asked.stream) == (1.0, 1.0, 1, (), False)


def test_a_content_of_text_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]
    assert chat(body(messages=[{"role": "user", "content": parts}])).messages == [
        {"role": "user", "content": "What is 2+2?"}
    ]


def test_a_reply_as_it_was_sent_can_be_sent_back() -> None:
    reply = {
        "role": "assistant", "content": "4", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None,
    }  # fmt: skip
    asked = chat(body(messages=[{"role": "developer", "content": "Be short."}, *TALK, reply, *TALK]))
    assert [each["role"] for each in asked.messages] == ["system", "user", "assistant", "user"]
    assert asked.messages[2] == {"role": "assistant", "content": "4"}
    assert chat(body(messages=[*TALK, {"role": "assistant", "content": None}])).messages[1]["content"] == ""


def test_what_changes_nothing_is_passed_over() -> None:
    harmless = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "tools": [],
        "tool_choice": "none", "parallel_tool_calls": True, "presence_penalty": 0, "frequency_penalty": 0.0,
        "logit_bias": {}, "modalities": ["text"], "prompt_cache_key": "x",
    }  # fmt: skip
    assert isinstance(chat(body(messages=TALK, **harmless)), Chat)
    assert completion(body(prompt="a", best_of=2, n=2, suffix="", min_p=0)).n == 2


def test_stream_options_ask_for_the_usage() -> None:
    assert completion(body(prompt="a", stream=True, stream_options={"include_usage": True})).include_usage
    assert not completion(body(prompt="a", stream=True, stream_options={})).include_usage


# ------------------------------------------------------------------ what is refused


def test_all_that_is_wrong_is_named_in_one_answer() -> None:
    told = refusal(
        chat,
        body(
            messages=[*TALK, {"role": "tool", "content": 3}, "x", {"role": "user", "content": [PICTURE]}],
            temperature="hot", top_p=0, tools=[{}], presence_penalty=1.5, foo=1, n=0, stop=["a", ""],
        ),
    )  # fmt: skip
    for name in ("messages[1].role", "messages[1].content", "messages[2]", "messages[3].content[0].type",
                 "temperature", "top_p", "tools", "presence_penalty", "foo", "n", "stop[1]"):  # fmt: skip
        assert f"{name}: " in str(told), name
    assert told.param == "temperature"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [[1 << 40]]}, "prompt[0][0]"),
        ({"prompt": [[1], "a"]}, "prompt[0]"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "min_p": 0.1}, "min_p"),
        ({"prompt": "a", "logit_bias": {"5": 3}}, "logit_bias"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "seed": 1 << 70}, "seed"),
        ({"prompt": "a", "temperature": 2.1}, "temperature"),
        ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "a", "messages": TALK}, "messages"),
    ],
)
def test_a_field_is_named(fields: dict[str, Any], param: str) -> None:
    told = refusal(completion, body(**fields))
    assert told.param == param and str(told).startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{**TALK[0], "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": TALK, "max_tokens": 0}, "max_tokens"),
        ({"messages": TALK, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": TALK, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": TALK, "logprobs": 3}, "logprobs"),
        ({"messages": TALK, "response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"messages": TALK, "response_format": {"type": "json_schema"}},
            "response_format.json_schema.schema",
        ),
        ({"messages": TALK, "audio": {"voice": "x"}}, "audio"),
        ({"messages": TALK, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"messages": TALK, "prompt": "a"}, "prompt"),
    ],
)
def test_a_field_of_a_chat_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat, body(**fields)).param == param


DEEP = [b"[" * 100_000, b'{"a":' * 50_000]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"3", b'"a"', b"\xff", b"null", b'{"prompt": NaN}', *DEEP]
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    assert "JSON" in str(refusal(completion, data))
    assert "JSON" in str(refusal(chat, data))


def test_a_long_list_of_mistakes_is_cut() -> None:
    told = str(refusal(completion, body(prompt="a", **{f"x{at}": at for at in range(5000)})))
    assert told.endswith("and 4980 more") and len(told) < 2000


# ------------------------------------------------------------------ whatever comes

FIELDS = (
    "prompt", "messages", "n", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "seed", "echo",
    "temperature", "top_p", "max_tokens", "response_format", "tools", "best_of", "model", "x",
)  # fmt: skip
KEYS = st.sampled_from(["role", "content", "type", "text", "include_usage", "json_schema"])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
ROLES = st.sampled_from(["user", "system", "assistant", "tool", "", None, 3])
ANYTHING = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)  # fmt: skip
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": ANYTHING}), max_size=3)
BODIES = st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=6) | st.fixed_dictionaries(
    {"prompt": st.text(max_size=4), "messages": MESSAGES}, optional=dict.fromkeys(FIELDS[2:], ANYTHING)
)


@settings(max_examples=50, deadline=None)
@given(BODIES | ANYTHING)
def test_only_a_request_or_a_refusal_comes_out(data: Any) -> None:
    for parse in (completion, chat):
        try:
            asked = parse(json.dumps(data).encode("utf-8", "surrogatepass"))
        except ApiError as told:
            assert told.status == 400 and json.loads(told.body())["error"]["message"]
        else:
            assert asked.n >= 1 and 0 <= asked.temperature <= 2


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,0123truefalsn', max_size=40).map(str.encode))
def test_bytes_are_a_request_or_a_refusal(data: bytes) -> None:
    for parse in (completion, chat):
        with pytest.raises(ApiError):
            parse(data)


@pytest.mark.parametrize("field", ["prompt", "stop"])
def test_half_of_a_surrogate_pair_is_named(field: str) -> None:
    """What a client in JavaScript sends of an emoji that it cut in half."""
    data = body(**{"prompt": "a", field: "b\ud83d"})
    assert rb"\ud83d" in data, "it travels as ASCII"
    assert (
        str(refusal(completion, data))
        == "the body holds half of a surrogate pair, '\\ud83d', which is no text"
    )
    assert str(refusal(completion, data[:-1])).startswith("the body is no JSON: ")
    assert completion(body(prompt="\U0001f600")).prompt == ["\U0001f600"]
