"""Trace files and request logs: read as what they say, refused with the line where they say nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minirad.model.classroom import corpus
from minirad.simulate import read_source
from minirad.text import TextWarning
from minirad.traces import TRACES, Trace, detect, read_trace, tokenizer
from minirad.workloads import chat

GOOD = {"timestamp": 27, "input_length": 1000, "output_length": 600, "hash_ids": [0, 1]}


def written(path: Path, *records: Any) -> Path:
    lines = [each if isinstance(each, (str, bytes)) else json.dumps(each) for each in records]
    path.write_bytes(b"\n".join(each if isinstance(each, bytes) else each.encode() for each in lines))
    return path


def text_of(trace: Trace, number: int = 0) -> str:
    assert trace.tokenizer is not None
    return trace.tokenizer.decode(trace.requests[number].units.tolist())


# ---------------------------------------------------------------------- mooncake


def test_mooncake_ids_are_units_and_times_start_at_nought(tmp_path: Path) -> None:
    last = {"timestamp": 30, "input_length": 1025, "output_length": 0, "hash_ids": [0, 2**63, 10**30]}
    trace = read_trace(written(tmp_path / "t.jsonl", GOOD, "", last))
    assert (trace.format, trace.unit, trace.unit_tokens) == ("mooncake", "block", 512)
    first, second = trace.requests
    assert (first.units.tolist(), first.tokens, first.output_units, first.arrival) == ([0, 1], 1000, 2, 0)
    # Ids wider than a key unit are numbered anew; equal ones stay equal.
    assert (second.units.tolist(), second.output_units, second.arrival) == ([0, 2, 3], 0, 3)
    assert (first.where, second.where) == ("line 1", "line 3")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"timestamp": 1, "input_length"', "no JSON"),
        ("[1, 2]", "an object was expected, not list"),
        ({**GOOD, "timestamp": "noon"}, "timestamp must be a number of milliseconds, 0 or more, not 'noon'"),
        ({**GOOD, "timestamp": float("nan")}, "nan"),
        ({**GOOD, "input_length": -5}, "input_length must be a whole number, 1 or more, not -5"),
        ({**GOOD, "output_length": 1.5}, "output_length must be a whole number, 0 or more, not 1.5"),
        ({**GOOD, "input_length": True}, "not True"),
        ({**GOOD, "hash_ids": [0]}, "input_length 1000 is 2 blocks of 512, but there are 1 hash_ids"),
        ({**GOOD, "hash_ids": [0, "x"]}, "not 'x'"),
        ({**GOOD, "hash_ids": ["x"] * 3}, "but there are 3 hash_ids"),
        ({**GOOD, "hash_ids": 7}, "hash_ids must be a list, not 7"),
        ({"timestamp": 1}, "input_length must be a whole number, 1 or more, not None"),
        (b'{"timestamp": "\xff"}', "no UTF-8 text"),
    ],
)
def test_a_malformed_line_stops_with_its_number(tmp_path: Path, line: Any, words: str) -> None:
    path = written(tmp_path / "t.jsonl", GOOD, line, GOOD)
    with pytest.raises(ValueError, match="line 2") as error:
        read_trace(path)
    assert words in str(error.value)


CUT = '{"prompt": "cut in the middle of an emoji \\ud83d", "session": "s"}'


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (CUT, "character 31 is half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "\\udc00"}]}', "no valid text"),
        ('{"prompt": "fine", "model": "\\ud800"}', "model is no valid text"),
        (b'{"prompt": "a\xff"}', "no UTF-8 text"),
    ],
)
def test_a_line_that_is_no_text_is_named_and_the_others_are_read(
    tmp_path: Path, bad: Any, words: str
) -> None:
    good = {"prompt": "fine"}
    for lines, number in (((bad, good, good), 1), ((good, bad, good), 2)):
        path = written(tmp_path / "log.jsonl", *lines)
        with pytest.warns(TextWarning, match=f"line {number}: .*{words}"):
            trace = read_trace(path)
        assert len(trace.requests) == 2 and len(trace.left_out) == 1
        assert [request.where for request in trace.requests] == [f"line {at}" for at in {1, 2, 3} - {number}]


def test_a_list_and_a_conversation_with_such_text_go_on(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(f'[{{"prompt": "fine"}}, {CUT}, {CUT}]', encoding="utf-8")
    with pytest.warns(TextWarning, match=r"entry 2: .*\(and 1 more\)"):
        assert len(read_trace(path).requests) == 1
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "\ud800"}]
    path = written(
        tmp_path / "t.jsonl", {"conversations": turns}, {"conversations": [*turns[:1], *turns[:1]]}
    )
    with pytest.warns(TextWarning, match="line 1"):
        assert read_trace(path).requests == ()


def test_nothing_but_such_lines_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1: no UTF-8 text"):
        read_trace(written(tmp_path / "t.jsonl", b"\xff", b"\xff\xfe"))


@pytest.mark.parametrize("content", ["", "\n \n", "[]", "\ufeff"])
def test_an_empty_file_is_an_empty_trace(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content, encoding="utf-8")
    assert read_trace(path).requests == ()


def test_a_trace_is_part_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # by its name from anywhere
    first, second = read_trace("mooncake", limit=2).requests
    assert (first.units.tolist(), first.tokens, first.output_units) == (list(range(14)), 6758, 1)
    assert (second.units[:2].tolist(), second.arrival) == ([0, 14], 0)
    by_path = read_trace(TRACES["mooncake"])
    assert (by_path.name, by_path.format, len(by_path.requests)) == ("mooncake", "mooncake", 6015)
    notice = TRACES["mooncake"].with_name("NOTICE").read_text(encoding="utf-8")
    assert "first 6,015" in notice and "Apache License, Version 2.0" in notice
    # A file of that name is still to be had.
    written(tmp_path / "mooncake", GOOD)
    for path in ("./mooncake", Path("mooncake")):
        assert len(read_trace(path).requests) == 1
    assert len(read_source("./mooncake").prompts) == 1
    with pytest.raises(ValueError, match=r"no workload 'moonkake'.*traces: mooncake"):
        read_source("moonkake")


def test_limit_stops_reading(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", GOOD, GOOD, "rubbish")
    calls: list[int] = []
    assert len(read_trace(path, limit=2, progress=lambda: calls.append(1)).requests) == len(calls) == 2
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        read_trace(path, limit=0)


# ---------------------------------------------------------------------- OpenAI-style logs

ASK = {"messages": [{"role": "user", "content": "Hello"}]}
CHATML = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (ASK, CHATML),
        ({"custom_id": "1", "body": ASK}, CHATML),
        ({"request": ASK, "response": None}, CHATML),
        ({"request": json.dumps(ASK)}, CHATML),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}, CHATML),
        ({"prompt": "Hello there"}, "Hello there"),
        ({"prompt": tokenizer().encode("Hello")}, "Hello"),
    ],
)
def test_request_logs(tmp_path: Path, record: Any, text: str) -> None:
    trace = read_trace(written(tmp_path / "log.jsonl", record))
    assert (trace.format, trace.unit, text_of(trace)) == ("openai", "token", text)
    assert trace.requests[0].tokens == len(trace.requests[0].units)


def test_a_log_knows_its_reply_its_time_and_its_model(tmp_path: Path) -> None:
    reply = {"choices": [{"message": {"role": "assistant", "content": "Hi, friend."}}]}
    records = [
        {"request": {**ASK, "model": "a", "max_tokens": 9}, "response": reply, "timestamp": 1.5},
        {"request": {**ASK, "model": "b", "max_tokens": 9}, "timestamp": "1970-01-01T00:00:03Z"},
    ]
    first, second = read_trace(written(tmp_path / "log.jsonl", *records)).requests
    assert first.output == tuple(tokenizer().encode("Hi, friend."))
    assert (first.output_units, second.output, second.output_units) == (len(first.output), None, 9)
    assert (first.arrival, second.arrival) == (0, 1500)
    assert (first.extra_key, second.extra_key) == ("a", "b")


def test_several_prompts_are_several_requests_and_tools_come_first(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"prompt": ["One", "Two"]}, {**ASK, "tools": [{"name": "search"}]})
    trace = read_trace(path)
    assert [text_of(trace, number) for number in (0, 1)] == ["One", "Two"]
    assert text_of(trace, 2).startswith('<|im_start|>system\n[{"name": "search"}]<|im_end|>\n')


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": [{"content": "x"}]}, "message 1 has no role"),
        ({"messages": [{"role": "user"}]}, "message 1 has no content"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [1, "x"]}, "token ids"),
        ({"request": "{"}, "no JSON"),
        ({"body": 3}, "body must be an object, not int"),
        ({"body": {"inputs": "x"}}, "neither messages, prompt nor input (there is 'inputs')"),
        ({**ASK, "created": "yesterday"}, "created is no date: 'yesterday'"),
        ({**ASK, "max_tokens": "many"}, "max_tokens must be a whole number, not 'many'"),
    ],
)
def test_a_malformed_log(tmp_path: Path, record: Any, words: str) -> None:
    with pytest.raises(ValueError, match="line 2") as error:
        read_trace(written(tmp_path / "log.jsonl", ASK, record))
    assert words in str(error.value)


# ---------------------------------------------------------------------- ShareGPT

TALK = {
    "conversations": [
        {"from": "gpt", "value": "Welcome."},
        {"from": "human", "value": "Hello"},
        {"from": "gpt", "value": "Hi."},
        {"from": "human", "value": "Bye"},
        {"from": "gpt", "value": "Goodbye."},
        {"from": "human", "value": "never answered"},
    ]
}


@pytest.mark.parametrize("as_list", [False, True])
def test_conversations(tmp_path: Path, as_list: bool) -> None:
    path = written(tmp_path / "t.json", json.dumps([TALK], indent=1) if as_list else TALK)
    trace = read_trace(path)
    said = [("assistant", "Welcome."), ("user", "Hello"), ("assistant", "Hi."), ("user", "Bye")]
    messages = [corpus.message(role, content) for role, content in said]
    assert trace.format == "sharegpt"
    assert text_of(trace, 0) == corpus.chat_text(messages[:2], add_generation_prompt=True)
    assert text_of(trace, 1) == corpus.chat_text(messages, add_generation_prompt=True)
    assert len(trace.requests) == 2  # what was not answered was not asked
    assert trace.requests[0].session == trace.requests[1].session
    assert trace.requests[1].output == tuple(tokenizer().encode("Goodbye."))


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ("x", "conversations must be a list"),
        ([3], "turn 1 must be an object, not int"),
        ([{"from": "human"}], 'turn 1 needs the texts "from" and "value"'),
    ],
)
def test_a_malformed_conversation(tmp_path: Path, turns: Any, words: str) -> None:
    with pytest.raises(ValueError, match="line 1") as error:
        read_trace(written(tmp_path / "t.jsonl", {"conversations": turns}))
    assert words in str(error.value)


# ---------------------------------------------------------------------- which format, which tokenizer


def test_formats_are_told_apart(tmp_path: Path) -> None:
    chat().save(tmp_path / "w.json")
    assert detect(tmp_path / "w.json") == "workload"
    assert detect(written(tmp_path / "r.jsonl", '{"minirad": 1}')) == "workload"
    with pytest.raises(ValueError, match=r"line 1: unknown format \('x'\)"):
        detect(written(tmp_path / "x.jsonl", {"x": 1}))
    with pytest.raises(ValueError, match="unknown format 'csv'"):
        read_trace(tmp_path / "x.jsonl", format="csv")
    with pytest.raises(ValueError, match="line 1: timestamp"):
        read_trace(tmp_path / "x.jsonl", format="mooncake")


def test_tokenizers_by_directory_and_file() -> None:
    folder = Path(corpus.__file__).parent / "weights"
    ids = tokenizer().encode("What is 1 + 2?")
    assert tokenizer(folder).encode("What is 1 + 2?") == ids
    assert tokenizer(folder / "tokenizer.json").decode(ids) == "What is 1 + 2?"
    with pytest.raises(ValueError, match="no-such-model"):
        tokenizer("./no-such-model")
    with pytest.raises(ValueError, match="is no tokenizer"):
        tokenizer(folder / "config.json")
