"""Request logs and transcripts as people have them: the requests in each, and all that cannot be read named.

Beside each log of tests/logs/ stands what is expected of it; `python tests/unit/test_logs.py` writes these
files anew, to be read before they are committed.
"""

from __future__ import annotations

import copy
import gzip
import io
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from minirad.__main__ import main
from minirad.logs import (
    LoggedRequest,
    LogReader,
    Part,
    PromptTokenizer,
    apis,
    claude_code,
    detect,
    records,
    tokenized,
    tokens,
)
from minirad.logs.reader import FORMATS, KINDS
from minirad.logs.writing import message, names, opening, raw
from minirad.traces import read_trace

LOGS = Path(__file__).parent.parent / "logs"
SAMPLES = sorted(path for path in LOGS.iterdir() if path.suffix in (".json", ".jsonl"))


def written(request: LoggedRequest) -> str:
    """A request as it stands in the files of expected ones."""
    around = {
        "reply": request.reply, "time": request.time, "session": request.session,
        "namespace": dict(request.namespace) or None, "id": request.id,
        "usage": request.usage and tuple(request.usage), "reply_tokens": request.reply_tokens,
        "blocks": request.blocks, "tokens": request.tokens, "incomplete": request.incomplete or None,
        "not understood": list(request.not_understood) or None,
    }  # fmt: skip
    lines = [f"== {request.where} (line {request.line}), {request.kind}"]
    lines += [f"   {name}: {value!r}" for name, value in around.items() if value is not None]
    for part in request.parts:
        mark = " (breakpoint)" if part.breakpoint else ""
        lines.append(f"   [{part.name}]{mark} {part.text if part.ids is None else list(part.ids)!r}")
    return "\n".join(lines)


def everything(log: LogReader) -> str:
    found = [written(request) for request in log]
    lines = [f"format: {log.format}", *found, *log.summary()]
    return "\n".join(lines).replace(log.name, "LOG") + "\n"


def expected(path: Path) -> str:
    return path.with_suffix(".expected").read_text(encoding="utf-8")


def lines_of(path: Path, *lines: Any) -> Path:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def read(path: Path, **how: Any) -> list[LoggedRequest]:
    return list(LogReader(path, **how))


# ---------------------------------------------------------------------- one log of each format


def test_there_are_twelve_of_all_kinds() -> None:
    kinds = {request.kind for path in SAMPLES for request in LogReader(path)}
    assert len(SAMPLES) >= 12 and kinds == set(KINDS)
    assert {detect(path) for path in SAMPLES} == set(FORMATS) - {"workload"}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_the_requests_of_a_log(path: Path) -> None:
    assert everything(LogReader(path)) == expected(path)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_compressed_and_through_a_pipe_it_is_the_same(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "no-suffix-says-so"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert everything(LogReader(packed)) == expected(path)
    assert everything(LogReader(io.BytesIO(path.read_bytes()))) == expected(path)
    assert LogReader(packed).size == packed.stat().st_size


def test_a_log_can_be_read_twice() -> None:
    log = LogReader(LOGS / "gateway.jsonl")
    assert everything(log) == everything(log)


def test_replies_of_a_batch_are_in_its_output_file() -> None:
    log = LogReader(LOGS / "openai_batch.jsonl", outputs=[LOGS / "openai_batch_output.jsonl"])
    found = list(log)
    assert [(each.id, each.reply) for each in found] == [
        ("a", "One."),
        ("b", "Two."),
        ("d", "Four, no more."),
    ]
    assert found[2].usage == (35, 20, 5)


@pytest.mark.parametrize(("name", "trace"), [("burstgpt.csv", "BurstGPT"), ("azure.csv", "Azure")])
def test_lengths_alone_are_no_requests(name: str, trace: str) -> None:
    for ask in (detect, read_trace, lambda path: next(iter(LogReader(path)))):
        with pytest.raises(ValueError, match=f"{name} is a trace as {trace}'s: it holds lengths only"):
            ask(LOGS / name)


@pytest.mark.parametrize("prompt", [[1, "x"], [1, 2, "x", None], ["a", "x", 1], [[1, 2], "x", 1], [1, [2]]])
def test_what_is_wrong_in_a_prompt_is_named(tmp_path: Path, prompt: Any) -> None:
    """Of a list the one that does not go with the first."""
    ids = isinstance(prompt[0], int)
    wrong = next(each for each in prompt if isinstance(each, int) != ids)
    log = LogReader(lines_of(tmp_path / "log.jsonl", {"prompt": prompt}))
    assert list(log) == [] and repr(wrong) in log.left_out[0].why.rpartition("such")[2]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("head", ["", "\ufeff", "\n"])
def test_lengths_are_known_by_any_line_ends(tmp_path: Path, head: str, end: str) -> None:
    path = tmp_path / "trace.csv"
    lines = (LOGS / "azure.csv").read_text(encoding="utf-8").splitlines()
    path.write_bytes((head + end.join(lines)).encode())
    with pytest.raises(ValueError, match=r"trace\.csv is a trace as Azure's"):
        next(iter(LogReader(path)))


@pytest.mark.parametrize("word", ["simulate", "why"])
@pytest.mark.parametrize(
    "text", ["a,b\rc,d\n", "a,b\r", '"a,\rb\n', "a," + "b" * 200_000, '"a,' + "b" * 200_000, "a,\0b\n", ","]
)
def test_a_table_that_is_no_log_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, text: str
) -> None:
    (tmp_path / "table.csv").write_bytes(text.encode())
    assert main([word, str(tmp_path / "table.csv")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "table.csv" in err


# ---------------------------------------------------------------------- what stands in prompts


def test_a_top_level_system_is_part_of_the_prompt_and_counted(tmp_path: Path) -> None:
    said = {"model": "claude-x", "messages": [{"role": "user", "content": "Hello"}]}
    path = lines_of(tmp_path / "a.jsonl", said, {**said, "system": "You are careful. " * 20})
    short, long = read_trace(path).requests
    text = PromptTokenizer()
    assert long.tokens - short.tokens == len(
        text.encode(message("", "system", "You are careful. " * 20).text)
    )


def test_tools_and_formats_are_written_in_the_order_given(tmp_path: Path) -> None:
    said = {"messages": [{"role": "user", "content": "Hi"}]}
    tools = [{"b": 1, "a": {"z": 2, "y": "ü"}}]
    path = lines_of(
        tmp_path / "a.jsonl", {**said, "tools": tools, "response_format": {"type": "json_object"}}
    )
    (request,) = read(path)
    assert [part.name for part in request.parts] == [
        "tools",
        "response_format",
        "message 1 (user)",
        "opening",
    ]
    assert '[{"b": 1, "a": {"z": 2, "y": "ü"}}]' in request.parts[0].text


def test_a_moving_breakpoint_changes_no_text(tmp_path: Path) -> None:
    block = {"type": "text", "text": "Long context"}
    asked = [
        {"system": [mark], "messages": [{"role": "user", "content": [mark]}]}
        for mark in (block, {**block, "cache_control": {"type": "ephemeral"}})
    ]
    plain, marked = read(lines_of(tmp_path / "a.jsonl", *asked))
    assert plain.text == marked.text
    assert [part.breakpoint for part in marked.parts] == [True, True, False]


def test_data_stands_for_itself_by_a_digest(tmp_path: Path) -> None:
    def picture(data: str) -> dict[str, Any]:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        return {
            "system": "s",
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
        }

    first, same, other = read(
        lines_of(tmp_path / "a.jsonl", *map(picture, ("A" * 9999, "A" * 9999, "B" * 9999)))
    )
    assert first.text == same.text != other.text and len(first.text) < 300
    assert first.not_understood == ("tokens of a block 'image' (a digest stands for its data)",)


def test_turns_of_a_transcript_begin_with_the_turn_before() -> None:
    """But for what compaction, a rewind and cleared results change."""
    turns = [each for each in LogReader(LOGS / "claude_code.jsonl") if each.session == "S"]
    begun = [
        later.text.startswith(earlier.text.removesuffix(earlier.parts[-1].text))
        for earlier, later in itertools.pairwise(turns)
    ]
    assert begun == [True, True, False, False]  # the last two: a result was cleared, a compaction


def test_answers_further_back_than_is_kept_are_missed_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apis, "MOST_REMEMBERED", 3000)
    lines = []
    for number in range(20):
        asked = {"input": "x" * 100, **({"previous_response_id": f"r{number - 1}"} if number else {})}
        output = [{"type": "message", "role": "assistant", "content": "y" * 100}]
        lines.append({"request": asked, "response": {"id": f"r{number}", "output": output}})
    lines.append({"request": {"input": "again", "previous_response_id": "r0"}})
    found = read(lines_of(tmp_path / "a.jsonl", *lines))
    assert [bool(each.incomplete) for each in found].count(True) >= 1
    assert "'r0', which is not in this log" in found[-1].incomplete
    assert len(found[3].parts) == 8  # three turns of two, the question, the opening


def test_a_session_longer_than_is_kept_says_what_it_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claude_code, "MOST_KEPT", 600)
    found = list(LogReader(LOGS / "claude_code.jsonl"))
    assert len(found) == 6 and any("is in no line before it" in each.incomplete for each in found)


# ---------------------------------------------------------------------- malformed among good ones


def test_every_line_is_a_request_or_named(tmp_path: Path) -> None:
    log = LogReader(LOGS / "gateway.jsonl")
    where = [request.line for request in log]
    assert sorted(where + [each.line for each in log.left_out]) == list(range(1, 13))
    assert log.left_out_count == 8 and log.requests == 4


@pytest.mark.parametrize("path", [p for p in SAMPLES if p.suffix == ".jsonl"], ids=lambda path: path.stem)
def test_rubbish_between_the_lines_changes_no_request(path: Path, tmp_path: Path) -> None:
    good = path.read_text(encoding="utf-8").splitlines()
    rubbish = ["{", "]", '"x"', "null", "[" * 2000, '{"a": ' + "9" * 5000 + "}", '{"x": 1}', "\ufeff\x00"]
    mixed = [line for pair in zip(good, itertools.cycle(rubbish)) for line in pair]
    log = LogReader(lines_of(tmp_path / path.name, *mixed))
    plain = LogReader(path)
    assert [(each.parts, each.reply) for each in log] == [(each.parts, each.reply) for each in plain]
    assert log.left_out_count - plain.left_out_count == len(good)


def test_stop_stops_at_the_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gateway.jsonl, line 2: no JSON"):
        read(LOGS / "gateway.jsonl", malformed="stop")
    with pytest.raises(ValueError, match="malformed must be one of skip, stop, not 'no'"):
        LogReader("x", malformed="no")
    with pytest.raises(ValueError, match="unknown format 'csv'"):
        LogReader("x", "csv")


def test_simulate_reads_on_if_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(LOGS / "gateway.jsonl")]) == 2
    assert "line 2: no JSON" in capsys.readouterr().err
    assert main(["simulate", str(LOGS / "gateway.jsonl"), "--malformed", "skip"]) == 0
    said = capsys.readouterr()
    assert "4 requests" in said.out
    for number in (2, 3, 4, 6, 7, 8, 9, 11):
        assert f"line {number}: " in said.err
    assert main(["simulate", str(LOGS / "anthropic.jsonl")]) == 0
    assert "not understood: body.context_management (1), block 'hologram' (1)" in capsys.readouterr().err


def test_a_damaged_archive_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    lines = "\n".join(json.dumps({"prompt": f"{number} {number * 7919}"}) for number in range(5000))
    path.write_bytes(gzip.compress(lines.encode())[:-2000])
    log = LogReader(path)
    assert 0 < len(list(log)) < 5000
    assert "it cannot be read on" in log.left_out[-1].why


def test_an_archive_that_is_cut_is_never_taken_for_an_empty_one(tmp_path: Path) -> None:
    packed = gzip.compress(b"\n" * 300 + b'{"prompt": "a"}\n')  # its text begins behind the header
    for cut in range(2, len(packed)):
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(packed[:cut])
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz, the end: it cannot be read on"):
            list(LogReader(path, malformed="stop"))


def test_a_line_that_is_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_BYTES", 1 << 20)
    path = lines_of(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b" * (3 << 20)}, {"prompt": "c"})
    log = LogReader(path)
    assert [each.text for each in log] == ["a", "c"]
    assert log.left_out == [(2, "line 2", "longer than 1 MiB")]


def test_only_what_is_asked_for_is_read() -> None:
    class Endless(io.RawIOBase):
        given = 0

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            self.given += 1
            return b'{"prompt": "again"}\n' * 100

    stream = Endless()
    found = list(itertools.islice(LogReader(stream), 5))  # type: ignore[arg-type]
    assert len(found) == 5 and stream.given < 5


def test_what_it_is_called_where_it_cannot_be_told(tmp_path: Path) -> None:
    path = lines_of(
        tmp_path / "x.jsonl", {"x": 1}, "rubbish", {"messages": [{"role": "user", "content": "Hi"}]}
    )
    assert detect(path) == "openai"
    with pytest.raises(ValueError, match=r"line 1: unknown format \('x'\)"):
        detect(lines_of(tmp_path / "y.jsonl", {"x": 1}))
    with pytest.raises(ValueError, match="is a workload"):
        read(lines_of(tmp_path / "w.json", "{", '"sessions": []', "}"))
    assert read(lines_of(tmp_path / "empty.jsonl")) == []
    (request,) = read(lines_of(tmp_path / "one.json", "{", '"prompt":', '"Hi"', "}"))
    assert (request.where, request.text) == ("object 1", "Hi")


# ---------------------------------------------------------------------- lists, in pieces


@given(st.data())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_list_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    values = data.draw(
        st.lists(st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8,
        ))
    )  # fmt: skip
    indent = data.draw(st.sampled_from([None, 0, 2]))
    monkeypatch.setattr(records, "CHUNK", data.draw(st.integers(1, 40)))
    text = json.dumps(values, indent=indent, ensure_ascii=data.draw(st.booleans())).encode(
        "utf-8", "surrogatepass"
    )
    try:
        text.decode()
    except UnicodeDecodeError:
        return  # a lone surrogate, as is
    with records.opened(io.BytesIO(text)) as (stream, _):
        found = list(records.records(stream))
    assert [each.value for each in found] == values and all(not each.why for each in found)
    assert [each.where for each in found] == [f"entry {number}" for number in range(1, len(values) + 1)]


@given(st.binary(max_size=200), st.sampled_from([b"", b"[", b"{\n", b"\x1f\x8b", b"\xef\xbb\xbf"]))
@settings(max_examples=80, deadline=None)
def test_any_bytes_are_records_or_say_why_not(data: bytes, start: bytes) -> None:
    with records.opened(io.BytesIO(start + data)) as (stream, _):
        for record in records.records(stream):
            assert record.why or record.value is not None or b"null" in data


# ---------------------------------------------------------------------- hostile records

DEEP: Any = "x"
for _ in range(300):
    DEEP = [DEEP]
HOSTILE = st.sampled_from([
    None, True, 0, -1, 10**400, 1.5, math.nan, math.inf, 1e300, "", "x", "\ud800", "<|im_start|>", "9" * 50,
    [], {}, [[]], [None], [{}], {"type": 3}, {"type": None}, {"type": []}, DEEP, {"role": {}}, {"a": DEEP},
    "u1", "2026-13-45T99:00:00Z",
])  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = changed(value[path[0]], path[1:], new)
    return value


PARSED = {path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()
                      if line.startswith("{") and line.endswith("}")]
          for path in SAMPLES if path.suffix == ".jsonl"}  # fmt: skip
PARSED["sharegpt"] = json.loads((LOGS / "sharegpt.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(PARSED))
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_wrong_types_everywhere(name: str, data: st.DataObject) -> None:
    """A line in which anything is anything: never an exception, and nothing is lost without a word."""
    lines = list(PARSED[name])
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.integers(0, len(lines) - 1))
        path = data.draw(st.sampled_from(list(places(lines[number]))))
        lines[number] = changed(lines[number], path, data.draw(HOSTILE))
    format = data.draw(st.sampled_from([None, detect(next(p for p in SAMPLES if p.stem == name))]))
    text = "\n".join(json.dumps(line) for line in lines)
    log = LogReader(io.BytesIO(text.encode()), format)
    try:
        found = list(log)
    except ValueError as error:
        assert format is None and ("unknown format" in str(error) or "is a workload" in str(error))
        return
    if log.format not in ("claude-code", "codex"):
        seen = {request.line for request in found} | {each.line for each in log.left_out}
        talks = {
            number
            for number, line in enumerate(lines, start=1)
            if isinstance(line, dict) and "conversations" in line
        }
        assert seen | talks == set(range(1, len(lines) + 1))
    for request in found:
        assert isinstance(request.text.encode(), bytes) and written(request)
        assert request.parts or request.blocks is not None
    log.summary()


FIELDS = names(
    "type payload uuid parentUuid message content role messages prompt input system tools hash_ids text "
    "input_length output_length timestamp conversations from value request body response output id model "
    "sessionId item replacement_history num_turns"
)
RECORDS = st.recursive(
    HOSTILE,
    lambda inner: (
        st.dictionaries(st.sampled_from(sorted(FIELDS)), inner, max_size=6) | st.lists(inner, max_size=3)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("format", [format for format in FORMATS if format != "workload"])
@given(lines=st.lists(RECORDS, max_size=6))
@settings(max_examples=50, deadline=None)
def test_records_of_a_forced_format_may_be_anything(format: str, lines: list[Any]) -> None:
    lines = ["the first line", *lines]  # so that it is a file of lines
    log = LogReader(io.BytesIO("\n".join(map(json.dumps, lines)).encode()), format)
    found = list(log)
    if format not in ("claude-code", "codex", "sharegpt"):
        seen = {request.line for request in found} | {each.line for each in log.left_out}
        assert seen == set(range(1, len(lines) + 1))


# ---------------------------------------------------------------------- sessions that were really held


class Agent:
    """Holds a session as Claude Code does, writes its file, and keeps what the model saw at each reply."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.lines, self.saw = draw, [], []
        self.count, self.leaf = 0, None
        self.said: list[tuple[str, str]] = []  # role, text
        self.points: list[tuple[str | None, list[tuple[str, str]]]] = []  # where one may rewind to

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def line(self, kind: str, parent: str | None, message: Any, **more: Any) -> str:
        uuid = self.name("n")
        told = {"message": message} if message else {}
        self.lines.append(
            {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "S", **told, **more}
        )
        return uuid

    def ask(self) -> None:
        if self.points and self.draw(st.integers(0, 5)) == 0:  # rewind
            self.leaf, said = self.draw(st.sampled_from(self.points))
            self.said = list(said)
        self.points.append((self.leaf, list(self.said)))
        text = self.name("question ")
        self.leaf = self.line("user", self.leaf, {"role": "user", "content": text})
        self.said.append(("user", text))

    def reply(self) -> None:
        """A text and calls of tools, a line each; results hang off their call's line, or off the last."""
        identity, calls = self.name("msg_"), self.draw(st.integers(0, 3))
        apart, early = self.draw(st.booleans()), self.draw(st.booleans())
        self.saw.append(list(self.said))
        blocks: list[Any] = [{"type": "text", "text": self.name("answer ")}]
        blocks += [
            {"type": "tool_use", "id": self.name("call"), "name": "ls", "input": {}} for _ in range(calls)
        ]
        texts, results, waiting = [], [], []
        for block in blocks:
            told = {"role": "assistant", "id": identity, "model": "claude-x", "content": [block]}
            self.leaf = self.line("assistant", self.leaf, told)
            texts.append(block["text"] if block["type"] == "text" else json.dumps(block))
            if block["type"] == "tool_use":
                waiting.append((block["id"], self.leaf))
                if early and apart:
                    results += [self.result(*waiting.pop())]
        for call, line in waiting:
            results += [self.result(call, line if apart else str(self.leaf))]
            if not apart:
                self.leaf = results[-1][0]
        if apart and results:
            self.leaf = results[-1][0]
        self.said.append(("assistant", "\n".join(texts)))
        self.said += [("user", text) for _, text in results]
        if not calls:
            self.ask()

    def result(self, call: str, parent: str) -> tuple[str, str]:
        text = self.name("result ")
        block = {"type": "tool_result", "tool_use_id": call, "content": text}
        uuid = self.line("user", parent, {"role": "user", "content": [block]})
        return uuid, f"<tool_result {call}>\n{text}\n</tool_result>\n"

    def compact(self) -> None:
        more = {"subtype": "compact_boundary", "logicalParentUuid": self.leaf}
        boundary = self.line("system", None, None, **more)
        text = self.name("summary ")
        self.leaf = self.line("user", boundary, {"role": "user", "content": text}, isCompactSummary=True)
        self.said, self.points = [("user", text)], []
        self.ask()

    def clear(self) -> None:
        """Some results are emptied, from here on in this branch."""
        calls = [text.split()[1].rstrip(">") for _, text in self.said if text.startswith("<tool_result")]
        gone = [call for call in calls if self.draw(st.booleans())]
        more = {"subtype": "microcompact_boundary", "microcompactMetadata": {"compactedToolIds": gone}}
        self.leaf = self.line("system", self.leaf, None, **more)
        empty = {f"<tool_result {c}>\n{claude_code.CLEARED}\n</tool_result>\n" for c in gone}
        begun = {text.split("\n")[0]: text for text in empty}
        self.said = [(role, begun.get(text.split("\n")[0], text)) for role, text in self.said]

    def other(self) -> None:
        """Lines that were never sent, some of them with a place in the tree."""
        if self.draw(st.booleans()):
            self.leaf = self.line("progress", self.leaf, None, data={"type": "hook_progress"})
        self.lines.append({"type": "file-history-snapshot", "messageId": "x", "snapshot": {}})


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_the_model_saw_at_each_reply(data: st.DataObject) -> None:
    agents = [Agent(data.draw) for _ in range(data.draw(st.integers(1, 2)))]
    for agent in agents:
        agent.ask()
        for _ in range(data.draw(st.integers(1, 8))):
            step = data.draw(st.sampled_from(["reply", "reply", "reply", "compact", "clear", "other"]))
            getattr(agent, step)()
    mine, *others = [agent.lines for agent in agents]
    for number, lines in enumerate(others):  # a subagent's lines lie among those of the session
        for line in lines:
            told = line.get("message", {})
            message = {**told, "id": f"s{told['id']}"} if "id" in told else told
            renamed = {key: f"s{line[key]}" for key in ("uuid", "parentUuid") if line.get(key)}
            extra = {"message": message} if message else {}
            line.update(isSidechain=True, agentId=f"A{number}", **renamed, **extra)
    mixed = data.draw(st.permutations([0] * len(mine) + [1] * sum(map(len, others))))
    queues = [iter(mine), itertools.chain(*others)]
    text = "\n".join(json.dumps(next(queues[which])) for which in mixed)
    log = LogReader(io.BytesIO(text.encode()), "claude-code")
    found = list(log)
    for name, agent in zip(("S", "S/A0"), agents, strict=False):
        saw = [
            [
                (part.text.split("\n")[0].removeprefix("<|im_start|>"), apis.spoken(part))
                for part in each.parts[:-1]
            ]
            for each in found
            if each.session == name
        ]
        assert saw == agent.saw
    assert not log.left_out and not log.not_understood and not any(each.incomplete for each in found)


def test_a_result_that_comes_late_stands_where_it_was_asked_for(tmp_path: Path) -> None:
    def line(uuid: str, parent: str | None, role: str, content: Any, **more: Any) -> dict[str, Any]:
        told = {"role": role, "model": "claude-x", "content": content, **more}
        return {"type": role, "uuid": uuid, "parentUuid": parent, "sessionId": "S", "message": told}

    def call(name: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": name, "name": "ls", "input": {}}

    def result(name: str) -> list[Any]:
        return [{"type": "tool_result", "tool_use_id": name, "content": f"of {name}"}]

    path = lines_of(
        tmp_path / "s.jsonl",
        line("u1", None, "user", "Go"),
        line("a1", "u1", "assistant", [call("A")], id="m1"),
        line("a2", "a1", "assistant", [call("B")], id="m1"),
        line("rB", "a2", "user", result("B")),
        line("a3", "rB", "assistant", "Wait", id="m2"),
        line("rA", "a1", "user", result("A")),
        line("u2", "a3", "user", "Now?"),
        line("a4", "u2", "assistant", "Yes", id="m3"),
    )
    names = [
        [apis.spoken(part).split("\n")[0] for part in each.parts[:-1] if "of " in part.text]
        for each in LogReader(path)
    ]
    assert names == [[], ["<tool_result B>"], ["<tool_result B>", "<tool_result A>"]]


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_what_the_model_saw_in_a_rollout(data: st.DataObject) -> None:
    """Turns, calls of tools, turns taken back, and histories replaced: each prompt is the history by then."""
    lines: list[Any] = [{"type": "session_meta", "payload": {"id": "R", "instructions": "Help."}}]
    history: list[str] = []
    turns: list[int] = []  # where in the history each turn begins
    saw = []

    def item(text: str, **payload: Any) -> None:
        lines.append({"type": "response_item", "payload": payload})
        history.append(text)

    def words(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    for number in range(data.draw(st.integers(1, 8))):
        step = data.draw(st.sampled_from(["turn", "turn", "context", "back", "compact"]))
        if step == "context":
            item(text := f"<environment_context>{number}", **words("user", text))
        elif step == "back" and turns:
            count = data.draw(st.integers(1, 3))
            lines.append({"type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": count}})
            del history[turns[max(0, len(turns) - count)] :], turns[max(0, len(turns) - count) :]
        elif step == "compact":
            history, turns = [f"summary {number}"], [0]
            payload = {"message": "", "replacement_history": [words("user", history[0])]}
            lines.append({"type": "compacted", "payload": payload})
        else:
            turns.append(len(history))
            item(text := f"question {number}", **words("user", text))
            for call in range(data.draw(st.integers(0, 2))):
                saw.append(list(history))
                told = {"type": "function_call", "name": "ls", "arguments": f"{number} {call}"}
                item(json.dumps(told), **told, call_id="c", id="x")
                item(f"output {call}", type="function_call_output", call_id="c", output=f"output {call}")
            saw.append(list(history))
            item(text := f"answer {number}", **words("assistant", text))
    log = LogReader(io.BytesIO("\n".join(map(json.dumps, lines)).encode()))
    found = [[apis.spoken(part) for part in request.parts[:-1]] for request in log]
    assert log.format == "codex" and found == [["Help.", *said] for said in saw]


# ---------------------------------------------------------------------- tokens


def tokenizer_file(path: Path, kind: str) -> Path:
    """A small tokenizer of one of the kinds that there are."""
    made = Tokenizer(models.BPE(unk_token=None))
    text = [
        path.read_text(encoding="utf-8") for path in (LOGS / "claude_code.jsonl", LOGS / "anthropic.jsonl")
    ]
    if kind in ("bytes", "lstrip"):
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    elif kind == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind in ("bytes", "lstrip") else []
    made.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    if kind == "lstrip":
        made.add_special_tokens([AddedToken("<|im_start|>", lstrip=True, special=True, normalized=False)])
    made.enable_truncation(3)  # would cut every prompt, if it were not switched off
    made.save(str(path))
    return path


KINDS_OF_TOKENIZERS = ("classroom", "bytes", "metaspace", "prepend", "lstrip")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptTokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    found = {
        kind: PromptTokenizer(tokenizer_file(folder / f"{kind}.json", kind))
        for kind in KINDS_OF_TOKENIZERS[1:]
    }
    return {"classroom": PromptTokenizer(), **found}


TEXTS = st.text(st.sampled_from("ab \n\t<|>▁é") | st.characters(exclude_categories=["Cs"]), max_size=12)
CONTENTS = TEXTS | st.sampled_from(
    ["\n", " \n ", "<|im_end|>", "<|im_start|>user\n", "def f():\n    return 1\n"]
)


@pytest.mark.parametrize("kind", KINDS_OF_TOKENIZERS)
@given(contents=st.lists(CONTENTS, max_size=5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_tokens_of_a_prompt_are_those_of_its_parts(
    tokenizers: dict[str, PromptTokenizer], kind: str, contents: list[str]
) -> None:
    text = tokenizers[kind]
    assert text.by_parts == (kind != "lstrip")
    parts = [message(f"message {number}", "user", each) for number, each in enumerate(contents)]
    request = LoggedRequest("f", 1, "line 1", "chat", (*parts, opening()))
    (found,) = tokenized([request], text)
    assert found.ids.tolist() == text.encode(request.text)
    ends = [len(text.encode("".join(p.text for p in request.parts[: n + 1]))) for n in range(len(parts) + 1)]
    assert found.ends.tolist() == ends


@pytest.mark.parametrize("path", [p for p in SAMPLES if p.stem != "mooncake"], ids=lambda path: path.stem)
def test_samples_by_parts_and_whole(path: Path) -> None:
    text = PromptTokenizer()
    for each in tokenized(LogReader(path), text):
        if each.request.parts[0].ids is None:
            assert each.ids.tolist() == text.encode(each.request.text)
            assert each.ends[-1] == len(each.ids) and len(each.ends) == len(each.request.parts)
        else:
            assert each.ids.tolist() == list(each.request.parts[0].ids)
        with pytest.raises(ValueError, match="read-only"):
            each.ids[0] = 1


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 4), st.lists(st.integers(0, 3), max_size=3)), max_size=12
    )
)
@settings(max_examples=50, deadline=None)
def test_turns_that_share_an_array_never_change_each_other(turns: list[tuple[int, int, list[int]]]) -> None:
    """Turns that grow, shrink and branch, of several sessions."""
    text, histories = CLASSROOM, [[], [], []]
    requests = []
    for session, kept, new in turns:
        said = histories[session][:kept] + [message("m", "user", f"\n{n} apples") for n in new]
        histories[session] = said
        requests.append(
            LoggedRequest("f", 1, "", "chat", (*said, opening("\n" * len(new))), session=f"s{session}")
        )
    found = list(tokenized(requests, text))
    assert [each.ids.tolist() for each in found] == [text.encode(each.text) for each in requests]


CLASSROOM = PromptTokenizer()


def test_turns_share_an_array_and_texts_are_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = ("user", "assistant")
    parts = [message(f"message {n}", roles[n % 2], f"apples {n} and pears") for n in range(800)]
    turns = [(*parts[:n], opening()) for n in range(1, 800, 2)]
    requests = [LoggedRequest("f", 1, "", "chat", turn, session="s") for turn in turns]
    asked: list[str] = []
    text = PromptTokenizer()
    prepare = text.prepare
    monkeypatch.setattr(text, "prepare", lambda texts: (asked.extend(texts := list(texts)), prepare(texts)))
    monkeypatch.setattr(tokens, "MOST_AT_ONCE", 7)
    found = list(tokenized(requests, text))
    assert sorted(asked) == sorted({part.text for part in [*parts[:799], opening()]})
    arrays = {id(each.ids.base) for each in found}
    assert len(arrays) < 20  # each half as long again as the one before
    assert found[-1].ids.tolist() == text.encode(requests[-1].text)


def test_the_cache_keeps_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MOST_CACHED", 1000)
    monkeypatch.setattr(tokens, "AT_ONCE", 500)
    text = PromptTokenizer()
    requests = [LoggedRequest("f", n, "", "completions", (raw(f"{n} apples " * 10),)) for n in range(100)]
    for each in tokenized(requests, text):
        assert each.ids.tolist() == text.encode(each.request.text)
        assert text._size <= 2500
    assert sum(map(len, text._ids)) == text._size


def test_which_part_a_token_lies_in() -> None:
    (each,) = tokenized(itertools.islice(LogReader(LOGS / "openai_chat.jsonl"), 1), CLASSROOM)
    names = [each.part_at(position)[0].name for position in range(len(each.ids))]
    assert [name for name, _ in itertools.groupby(names)] == [part.name for part in each.request.parts]
    part, offset = each.part_at(int(each.ends[2]) - 1)
    assert (
        part.name == "message 1 (system)"
        and CLASSROOM.decode(CLASSROOM.encode(part.text)[: offset + 1]) == part.text
    )
    for position in (-1, len(each.ids)):
        with pytest.raises(IndexError):
            each.part_at(position)


def test_a_part_without_a_marker_is_no_part() -> None:
    request = LoggedRequest("f", 1, "", "chat", (raw("a"), raw("b")))
    with pytest.raises(ValueError, match="does not begin with a role marker"):
        list(tokenized([request], CLASSROOM))
    ids = LoggedRequest("f", 1, "", "chat", (Part("prompt", ids=(3, 4)), opening()))
    (found,) = tokenized([ids], CLASSROOM)
    assert found.ids.tolist() == [3, 4, *CLASSROOM.encode(opening().text)]


def test_transcripts_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    for name, count in (("claude_code.jsonl", 6), ("codex.jsonl", 5), ("openai_responses.jsonl", 3)):
        assert main(["simulate", str(LOGS / name), "--json"]) == 0
        (report,) = json.loads(capsys.readouterr().out)
        assert report["requests"] == count
        assert 0 < report["rows"][-1]["cached"] < report["prompt"]


def test_a_bar_is_drawn_on_a_terminal_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(LogReader(LOGS / "codex.jsonl").with_progress())) == 5
    assert capsys.readouterr().err == ""


if __name__ == "__main__":
    for sample in SAMPLES:
        sample.with_suffix(".expected").write_text(everything(LogReader(sample)), encoding="utf-8")
