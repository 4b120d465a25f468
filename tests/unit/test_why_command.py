"""`python -m minirad why`: a log for each cause, the answer that it must give, and what would help."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minirad import simulate
from minirad.__main__ import main
from minirad.cache.node import RadixKey
from minirad.logs import LogReader, PromptTokenizer, tokenized
from minirad.why.history import Cache, Entry, answers, hits
from minirad.why.repairs import joined, outcomes, proposals, room_for

SYSTEM = (
    "You help people of the town library.\nToday is {day}.\nAnswer in one line, and in plain words.\n"
    "Never say what you do not know. If a book is not there, say where else it may be found."
)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"What to call for {name} of the library"}}
    for name in ("books", "people", "rooms", "hours")
]

NEXT = "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"  # behind a reply


def chat(*said: str, day: str = "Monday", **more: Any) -> dict[str, Any]:
    """A request: system prompt, and messages of user and assistant in turn."""
    messages = [{"role": "system", "content": SYSTEM.format(day=day)}]
    for number, text in enumerate(said):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    return {"messages": messages, **more}


def written(path: Path, records: Sequence[Any]) -> Path:
    lines = [each if isinstance(each, str) else json.dumps(each) for each in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def text() -> PromptTokenizer:
    return PromptTokenizer()


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on records (lines of a log) and gives its JSON."""

    def run(records: Sequence[Any], *options: str) -> dict[str, Any]:
        path = written(tmp_path / "log.jsonl", records)
        assert main(["why", str(path), "--json", *options]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        for answer in report["answers"]:
            assert sum(loss["tokens"] for loss in answer["losses"]) == answer["computed"]
        assert sum(each["tokens"] for each in report["causes"]) == report["computed"]
        return report

    return run


def losses(report: dict[str, Any]) -> list[str]:
    return [loss["cause"] for loss in report["answers"][0]["losses"]]


# ---------------------------------------------------------------------- one log for each cause


def test_never_seen(ask: Any) -> None:
    report = ask([chat("Where are the maps?")])
    assert losses(report) == ["new"] and report["cached"] == 0
    assert report["answers"][0]["say"].startswith("line 1 finds 0 of ")


def test_a_chat_goes_on_behind_its_reply(ask: Any) -> None:
    reply = {"choices": [{"message": {"content": "On the second floor."}}]}
    turns = [
        chat("Where are the maps?", response=reply),
        chat("Where are the maps?", "On the second floor.", "And the atlases?"),
    ]
    report = ask(turns)
    (loss,) = report["answers"][0]["losses"]
    assert (loss["cause"], loss["other"]) == ("new", "line 1")
    # all of the turn before and its reply, but for the token that ended it
    without = ask(turns, "--prompts-only")
    assert report["cached"] > without["cached"]
    first = ask(turns[:1])["tokens"]
    assert without["cached"] == first and report["cached"] >= first + 4


def test_a_reply_that_only_the_next_turn_has(ask: Any) -> None:
    said = ["Where are the maps?", "On the second floor, behind the stairs.", "And the atlases?"]
    turns = [chat(said[0], session="s"), chat(*said, session="s")]
    with_reply = chat(said[0], session="s", response={"choices": [{"message": {"content": said[1]}}]})
    assert (
        ask(turns)["cached"] == ask([with_reply, turns[1]])["cached"] > ask(turns, "--prompts-only")["cached"]
    )
    (loss,) = ask(turns)["answers"][0]["losses"]
    assert (loss["cause"], loss["other"]) == ("new", "line 1")
    apart = [chat(said[0], session="s"), chat(*said, session="t")]
    assert ask(apart)["cached"] == ask(turns, "--prompts-only")["cached"]


@pytest.mark.parametrize("capacity", [None, 60, 150])
def test_a_history_and_a_replay_hit_alike(capacity: int | None) -> None:
    rng = np.random.default_rng(4)
    entries: list[Entry] = []
    for number in range(80):
        old = entries[rng.integers(len(entries))] if entries and rng.random() < 0.7 else None
        ids = rng.integers(3, 6, rng.integers(1, 8)) if old is None else old.ids
        more = np.concatenate((rng.integers(3, 6, rng.integers(0, 5)), [1, 3])) if old is not None else []
        reply = rng.integers(3, 6, rng.integers(0, 2) * 3)
        ids = np.concatenate((ids, more)).astype(np.int64)[:50]
        session = f"s{rng.integers(3)}" if old is None else old.session
        entries.append(Entry(f"line {number}", ids, None, reply, None, session))
    for page in (1, 4):
        for closes in (None, 1):
            cache = Cache(capacity, page, "lru", closes)
            assert [answer.cached for answer in answers(entries, cache)] == hits(entries, cache)
    assert sum(hits(entries, Cache(capacity, closes=1))) > sum(hits(entries, Cache(capacity)))


def test_where_a_date_is_other(ask: Any, text: PromptTokenizer) -> None:
    report = ask([chat("Where are the maps?"), chat("Where are the maps?", day="Friday")])
    (loss,) = report["answers"][0]["losses"]
    before = text.decode(text.encode(f"<|im_start|>system\n{SYSTEM.split('{')[0]}"))
    assert (loss["cause"], loss["other"], loss["part"]) == ("differs", "line 1", "message 1 (system)")
    assert before.endswith(loss["before_text"]) and loss["character"] <= len(before)
    assert loss["ours_text"].startswith("Friday") and loss["theirs_text"].startswith("Monday")
    assert report["partings"] == [{"where": "a message (system)", "tokens": loss["tokens"], "requests": 1}]
    repair = next(each for each in report["repairs"] if each["name"] == "lines")
    assert repair["saved"] > 0
    assert {"pair", "lines"} <= {each["name"] for each in report["answers"][0]["repairs"]}


def test_evicted_and_how_much_larger_the_cache_must_be(ask: Any, text: PromptTokenizer) -> None:
    asked = [chat("Where are the maps?"), {"prompt": list(range(50, 100))}, chat("Where are the maps?")]
    size = ask(asked[:1])["tokens"]
    capacity = size + 20
    report = ask(asked, "--cache", str(capacity))
    evicted, last = report["answers"][0]["losses"]
    assert (evicted["cause"], evicted["tokens"], last["cause"]) == ("evicted", size - 1, "last")
    (left,) = evicted["left"]
    assert (left["medium"], left["by"], left["policy"]) == ("GPU", ["line 2"], "lru")
    assert evicted["used"] == 1 and left["when"] == 2
    room = report["answers"][0]["room"]
    assert room["more"] == room["capacity"] - capacity > 0
    assert ask(asked, "--cache", str(room["capacity"]))["cached"] == size - 1
    assert ask(asked, "--cache", str(room["capacity"] - 1))["cached"] < size - 1
    assert [each["saved"] for each in report["repairs"]] == [size - 1], "one size is enough to be named"


def test_another_salt(ask: Any) -> None:
    report = ask([chat("Where?", cache_salt="a"), chat("Where?", cache_salt="b")])
    size = report["tokens"] // 2
    first, last = report["answers"][0]["losses"]
    assert (first["cause"], first["tokens"], last["cause"]) == ("namespace", size - 1, "last")
    assert "cache_salt" in first["say"] and "(by line 1)" in first["say"]
    assert [(each["name"], each["saved"]) for each in report["repairs"]] == [("salt", size - 1)]


@pytest.mark.parametrize("names", [("model",), ("model", "lora_path")])
def test_another_model_or_adapter_is_no_salt(ask: Any, names: tuple[str, ...]) -> None:
    """Its KV is of no use whatever the namespace: only the salt may be proposed away."""
    one, other = ({name: f"{name} {each}" for name in names} for each in "ab")
    report = ask([chat("Where?", **one), chat("Where?", **other)])
    assert report["answers"][0]["cause"] == "namespace" and report["repairs"] == []
    salted = [chat("Where?", cache_salt=salt, **model) for salt in "st" for model in (one, other)]
    report = ask(salted)
    size = report["tokens"] // 4
    assert [(each["name"], each["saved"]) for each in report["repairs"]] == [("salt", 2 * (size - 1))]


@pytest.mark.parametrize("kind", ["codex", "responses"])
def test_a_reply_of_several_items_is_all_there_in_the_next_turn(ask: Any, kind: str) -> None:
    """Two calls are one reply and two messages: that they are spelled so is no miss."""
    calls = [
        {"type": "function_call", "call_id": f"c{each}", "name": "read", "arguments": f"{each}.py"}
        for each in "ab"
    ]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Both."}]}
    results = [{"type": "function_call_output", "call_id": f"c{each}", "output": "x = 1"} for each in "ab"]
    if kind == "responses":
        records: list[Any] = [
            {"request": {"input": "Read both."}, "response": {"id": "r1", "output": [thought, *calls]}},
            {"request": {"input": results, "previous_response_id": "r1"}},
        ]
    else:
        asked = {"type": "message", "role": "user", "content": "Read both."}
        done = {"type": "message", "role": "assistant", "content": "Done."}
        items = [asked, thought, *calls, *results, done]
        records = [{"type": "session_meta", "payload": {"id": "S"}}]
        records += [{"type": "response_item", "payload": each} for each in items]
    report = ask(records, "--all")
    assert [each["cause"] for each in report["answers"]] == ["new", "new"]
    assert report["partings"] == []


@pytest.mark.parametrize(
    "said", [{"function_call": {"name": "read", "arguments": "{}"}}, {"refusal": "That I will not say."}]
)
def test_a_reply_without_a_content_is_in_the_cache(ask: Any, said: dict[str, Any]) -> None:
    asked = [{"role": "user", "content": "Read it."}]
    reply = {"role": "assistant", "content": None, **said}
    first = {"request": {"messages": asked}, "response": {"choices": [{"message": reply}]}}
    report = ask([first, {"messages": [*asked, reply, {"role": "user", "content": "x"}]}])
    end = report["answers"][0]["tokens"] - len(PromptTokenizer().ids(NEXT))
    assert report["answers"][0]["cached"] == end


def test_an_answer_that_is_not_understood_is_named(ask: Any) -> None:
    """A stream's pieces, say: the next turn seems to miss what was generated."""
    pieces = {"choices": [{"delta": {"content": "ye"}}]}
    report = ask([{"request": chat("Where?"), "response": each} for each in (pieces, [pieces])])
    assert report["notes"] == ["not understood: response (no reply is read from it) (2)"]


def test_nothing_of_a_log_is_raw_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2J\x9b31m\u202e\x07"
    records: list[Any] = [
        {"messages": [{"role": role, "content": evil}], evil: 1, "session": evil, "cache_salt": evil}
        for role in ("user", evil, f"{evil}s")
    ]
    records += [{evil: 1}, {"messages": evil}, {"messages": [{"role": evil, "content": "\ud800"}]}]
    log = written(tmp_path / "log.jsonl", records)
    for arguments in (["why", "--all"], ["simulate", "--malformed", "skip"], ["simulate"]):
        main([*arguments, str(log)])
        told = capsys.readouterr()
        text = "".join(told).replace("\n", "")
        assert text and text.isprintable(), arguments


def test_what_is_moved_to_the_end_is_spelled_as_people_would(ask: Any) -> None:
    """No line break more than the prompt had: the saving is that of the repaired log, to the token."""
    common, days = "Answer briefly and never guess. Cite your sources.", ("Monday", "Friday")
    logs = [
        [
            {"messages": [{"role": "system", "content": each.format(day)}, {"role": "user", "content": day}]}
            for day in days
        ]
        for each in (f"Today is {{}}.\n{common}", f"{common}\nToday is {{}}.")
    ]
    before, after = map(ask, logs)
    saved = {each["name"]: each["saved"] for each in before["repairs"]}
    assert saved["lines"] == before["computed"] - after["computed"] > 0


def test_an_empty_salt_is_none(ask: Any) -> None:
    report = ask([chat("Where?", cache_salt=""), chat("Where?", cache_salt=None), chat("Where?")])
    assert report["cached"] == 2 * (report["tokens"] // 3 - 1)


def test_whole_pages_and_the_last_token(ask: Any) -> None:
    report = ask([{"prompt": list(range(40))}] * 2, "--page-size", "16")
    assert report["cached"] == 32
    assert [(loss["cause"], loss["tokens"]) for loss in report["answers"][0]["losses"]] == [
        ("page", 7), ("last", 1),
    ]  # fmt: skip


def test_larger_than_the_whole_cache(ask: Any) -> None:
    report = ask([{"prompt": list(range(40))}] * 2, "--cache", "30")
    assert losses(report) == ["large"] and report["causes"][0]["tokens"] == 80
    assert report["repairs"][0]["saved"] == 39 and report["repairs"][0]["capacity"] == 60
    later = ask([{"prompt": list(range(40))}, {"prompt": [*range(20), 900, 901]}], "--cache", "30")
    assert [(loss["cause"], loss["tokens"]) for loss in later["answers"][0]["losses"]] == [
        ("large", 20), ("differs", 2),
    ]  # fmt: skip


def test_tools_in_another_order(ask: Any) -> None:
    turned = [TOOLS[2], TOOLS[0], TOOLS[1], TOOLS[3]]
    more = [TOOLS[0], TOOLS[3], TOOLS[1], TOOLS[2], {"type": "function", "function": {"name": "a new one"}}]
    report = ask([chat("Where?", tools=tools) for tools in (TOOLS, turned, more)])
    (loss,) = report["answers"][0]["losses"]
    assert (loss["cause"], loss["part"]) == ("differs", "tools")
    repair = next(each for each in report["repairs"] if each["name"] == "tools")
    assert repair["requests"] == 2 and repair["saved"] > 0.4 * report["computed"]


def test_a_summary_before_what_was_kept(ask: Any) -> None:
    """After a compaction the first messages are there as before, but behind a new one."""
    said = ["Where are the maps? " * 4, "On the second floor. " * 4, "And the atlases?", "Beside them."]
    head = chat(*said, "Thanks. And the novels?", session="s")
    compacted = chat("A summary of all that was said before.", "I see.", *said[:2], "Now?", session="s")
    report = ask([head, compacted])
    assert losses(report) == ["differs"]
    repair = next(each for each in report["repairs"] if each["name"] == "messages")
    assert repair["saved"] > 20 and repair["requests"] == 1


def test_blocks_of_a_trace(ask: Any) -> None:
    def line(*ids: int) -> dict[str, Any]:
        return {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": list(ids)}

    report = ask([line(1, 2, 3), line(1, 2, 9)])
    assert report["unit"] == "block" and losses(report) == ["differs"] and report["cached"] == 2
    assert "2 of 3 blocks" in report["answers"][0]["say"]


# ---------------------------------------------------------------------- how it is asked


def test_what_was_asked_before_is_in_another_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = written(tmp_path / "old.jsonl", [chat("Where are the maps?")] * 2)
    typed = tmp_path / "typed.txt"
    reader = tokenized(LogReader(log), PromptTokenizer())
    typed.write_text(next(iter(reader)).request.text, encoding="utf-8")
    assert main(["why", str(typed), "--log", str(log), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 3 and losses(report) == ["last"]
    lines = json.dumps(chat("Where are the novels?")).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert main(["why", "-", "--log", str(log)]) == 0
    said = capsys.readouterr().out
    assert "old.jsonl, line 1: ..." in said and "line 1: " in said and "because" in said
    assert f"{log}, and - behind it: 3 requests, " in said


def test_all_of_a_log_the_worst_first_and_malformed_lines_between(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [chat(f"Where is book {number}?", day="May" if number == 3 else "June") for number in range(5)]
    log = written(tmp_path / "log.jsonl", [good[0], "no JSON", good[1], '{"model": "m"}', *good[2:]])
    assert main(["why", str(log), "--all", "--top", "2"]) == 0
    out, err = capsys.readouterr()
    told = [line for line in out.splitlines() if line.startswith("line ")]
    assert [line.split(":")[0] for line in told] == ["line 1", "line 6"]
    assert "line 2: no JSON" in err and "line 4: " in err and err.count("left out") == 2
    assert "... and 3 more, which computed no more than these" in out
    page = tmp_path / "page.html"
    assert main(["why", str(log), "--all", "--html", str(page)]) == 0
    assert " more, which" not in capsys.readouterr().out and "... and " not in page.read_text("utf-8")
    written(log, [chat(f"Where is book {number}?") for number in range(14)])
    for top in ("2", "12"):  # a page has room for ten
        assert main(["why", str(log), "--all", "--top", top, "--html", str(page)]) == 0
        assert f"<li>... and {14 - min(int(top), 10)} more</li>" in page.read_text("utf-8")


def test_the_page_and_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from viz.why import figure, write_html

    log = written(tmp_path / "log.jsonl", [chat("Where?", day=day) for day in ("May", "June", "July")])
    assert main(["why", str(log), "--cache", "90", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    page = tmp_path / "why.html"
    write_html(report, page)
    text = page.read_text(encoding="utf-8")
    assert "Plotly.newPlot" in text and "differs from what was seen" in text and 'src="http' not in text
    drawn = figure(report)
    assert list(drawn.data[0].x) == [each["tokens"] for each in report["causes"]]
    assert sum(sum(bar.y) for bar in drawn.data[2:]) == report["tokens"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cache", "many"], "--cache must be inf or a number of tokens, 1 or more, got 'many'"),
        (["--cache", "8", "--page-size", "16"], "16 or more, got '8'"),
        (["--page-size", "0"], "a whole number, 1 or more, is needed, not '0'"),
        (["--eviction-policy", "best"], "unknown eviction policy 'best'"),
        (["--format", "fig"], "unknown format 'fig'"),
        (["--html", "page.pdf"], "--html: a file's name must end in .html"),
        (["--log", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--all", "--request", "line 1"], "not allowed with argument --all"),
        (["--top", "3"], "--top 3 goes with --all only"),
    ],
)
def test_mistakes_are_one_line(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(tmp_path / "log.jsonl", [chat("Where?")])
    try:
        code = main(["why", str(log), *options])
    except SystemExit as error:
        code = int(str(error.code))
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1 and said in err


def test_a_log_without_a_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path / "log.jsonl", ["", '{"messages": []}'])
    assert main(["why", str(log)]) == 2
    assert "there is no request in " in capsys.readouterr().err
    assert main(["why", "-", "--log", "-"]) == 2
    assert "cannot both be standard input" in capsys.readouterr().err


# ---------------------------------------------------------------------- to the token


def computed_naively(entries: Sequence[Entry], page: int) -> int:
    """Tokens that a cache without limit computes: all prefixes of whole pages, in a set."""
    there: set[tuple[Any, ...]] = set()
    total = 0
    for entry in entries:
        ids, hit = entry.ids.tolist(), 0
        while hit + page < len(ids) and (entry.namespace, *ids[: hit + page]) in there:
            hit += page
        total += len(ids) - hit
        whole = [*ids, *entry.reply.tolist()]
        there |= {(entry.namespace, *whole[:end]) for end in range(page, len(whole) + 1, page)}
    return total


def computed_by_simulate(entries: Sequence[Entry], cache: Cache) -> int:
    """The same of a limited cache, by `minirad simulate` itself."""
    prompts = tuple(
        simulate.Prompt(RadixKey(each.ids, each.namespace), len(each.ids), 0, 0, each.name)
        for each in entries
    )
    source = simulate.Source("log", "openai", prompts, lambda: None)  # type: ignore[arg-type,return-value]
    row = simulate.run_replay(source, cache.capacity, cache.page_size, cache.eviction_policy, 0)
    return row.prompt - row.len_rule


@pytest.mark.parametrize("cache", [Cache(), Cache(None, 4), Cache(400), Cache(400, 16, "lfu")])
def test_what_a_repair_saves_is_what_it_says(cache: Cache, tmp_path: Path, text: PromptTokenizer) -> None:
    rng = np.random.default_rng(5)
    days = [f"day {number}" for number in range(4)]
    records = []
    for number in range(24):
        tools = [TOOLS[each] for each in rng.permutation(4)[: rng.integers(2, 5)]]
        turns = [f"Where is book {rng.integers(4)}?"] * (1 + 2 * int(rng.integers(2)))
        records.append(
            chat(*turns, day=days[rng.integers(4)], tools=tools, session=f"s{number % 3}",
                 cache_salt=["a", "b"][rng.integers(2)])
        )  # fmt: skip
    log = written(tmp_path / "log.jsonl", records)
    entries = [
        Entry(each.request.where, each.ids, each.request.extra_key, source=each)
        for each in tokenized(LogReader(log), text)
    ]

    def encode(parts: Sequence[Any]) -> Any:
        return joined([text.ids(part.text) for part in parts])

    before = answers(entries, cache)
    assert [answer.cached for answer in before] == hits(entries, cache)
    computed = [answer.missed for answer in before]
    causes = sorted({cause for answer in before for cause in answer.by_cause()})
    found = {(each.name, each.capacity): each for each in outcomes(entries, computed, causes, cache, encode)}
    changed = list(proposals(entries, cache, causes, encode))
    assert {each.name for each in changed} >= {"salt", "tools", "lines", "last"}
    assert len(found) >= 3
    for each in changed:
        outcome = found.get((each.name, each.cache.capacity))
        if outcome is not None:
            entries_then = list(each.entries())
            now = computed_by_simulate(entries_then, each.cache)
            if each.cache.capacity is None:
                assert now == computed_naively(entries_then, cache.page_size)
            assert outcome.saved == sum(computed) - now == sum(outcome.of)


def test_the_smallest_cache_is_found_by_replaying() -> None:
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, 50, rng.integers(20, 60)) for _ in range(12)]
    entries = [Entry(f"line {number}", rows[number % 12]) for number in range(25)]
    for page in (1, 4):
        cache = Cache(200, page)
        wanted = hits(entries, Cache(None, page))[-1]
        room = room_for(entries, 24, cache)
        assert room is not None and room % page == 0
        assert hits(entries, Cache(room, page))[-1] == wanted > hits(entries, Cache(room - page, page))[-1]
    assert room_for(entries, 24, Cache(5_000)) is None
