"""The benchmarks of drafts, adapters and the disk tier: what they count, not how long it took."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minirad.__main__ import main
from minirad.bench import adapters, disk, speculative, tiers
from minirad.tiers.disk import DiskTier

pytestmark = pytest.mark.slow


def run(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["bench", *words, "--reps", "1", "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    return found


def test_drafts_save_passes_and_change_no_reply(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(capsys, "speculative", "--kinds", "facts,lists", "--draft-tokens", "4", "--at-once", "1,2",
               "--prompts", "2", "--new-tokens", "14")  # fmt: skip
    ways = {("none", 0), ("ngram", 4), ("eagle", 4)}
    assert len(rows) == 2 * 2 * len(ways) and {(row["drafts"], row["most"]) for row in rows} == ways
    by = {(row["prompts"], row["at_once"], row["drafts"], row["most"]): row for row in rows}
    for (kind, at_once, drafts, most), row in by.items():
        plain = by[kind, at_once, "none", 0]
        assert row["other_replies"] == 0 and row["tokens"] == plain["tokens"] and row["seconds"] > 0
        assert 1 <= row["tokens_a_pass"] <= most + 1 and row["accepted"] <= row["drafted"]
        assert row["tokens_a_pass"] > 1.2 or drafts == "none" or kind == "facts"
        assert row["drafted"] == by[kind, 3 - at_once, drafts, most]["drafted"], (
            "who runs beside changes none"
        )
    assert plain["times_as_fast"] == 1
    text = speculative.as_table(rows).splitlines()
    assert text[0].split()[:2] == ["prompts", "at"] and "eagle 4" in text[-1]


def test_other_replies_are_counted() -> None:
    one = {
        "tokens": 3,
        "seconds": 1.0,
        "replies": [[1, 2], [3]],
        "tokens_a_pass": 1.0,
        "drafted": 0,
        "accepted": 0,
        "forced": 0,
        "steps": 9,
    }
    two = {**one, "replies": [[1, 9], [3]], "seconds": 0.5, "steps": 4}
    said = speculative.summary(("facts", 1, speculative.Way("ngram", 2)), [two], [one])
    assert said["other_replies"] == 1 and said["times_as_fast"] == 2 and said["steps_saved"] == 5


def test_jump_forward_saves_passes_where_a_grammar_forces_much(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance", reason="needs the extra 'grammar'")
    rows = run(capsys, "speculative", "--kinds", "records,schema,facts", "--draft-tokens", "3",
               "--at-once", "2", "--prompts", "2", "--new-tokens", "80")  # fmt: skip
    by = {(row["prompts"], row["drafts"], row["jump"]): row for row in rows}
    ways = [(drafts, jump) for drafts in ("none", "ngram", "eagle") for jump in (False, True)]
    assert set(by) == {("facts", drafts, False) for drafts, _ in ways} | {
        (kind, *way) for kind in ("records", "schema") for way in ways
    }
    for (kind, drafts, jump), row in by.items():
        plain = by[kind, drafts, False]
        assert row["other_replies"] == 0 and row["tokens"] == plain["tokens"]
        assert row["seconds_low"] <= row["seconds"] <= row["seconds_high"]
        assert bool(row["forced"]) == jump
        if jump:
            assert row["tokens_a_pass"] > 2.5 and row["forced"] > row["tokens"] / 2
            assert row["steps"] < plain["steps"] and row["steps_saved"] > by[kind, "none", False]["steps"] / 2
    assert "eagle 3 + jump" in speculative.as_table(rows)


def test_every_number_of_adapters_in_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(capsys, "adapters", "--adapters", "1,3", "--requests", "4", "--prompt-tokens", "6",
               "--new-tokens", "4")  # fmt: skip
    names = [row["adapters"] for row in rows]
    assert names == [adapters.PLAIN, "none of them asked for", "1 in a batch", "3 in a batch"]
    assert {row["steps"] for row in rows} == {3}, "the first token comes with the prompts"
    assert rows[0]["prefill_times"] == rows[0]["decode_times"] == 1
    assert all(row["decode_seconds"] > 0 and row["prefill_seconds"] > 0 for row in rows)
    assert len(adapters.as_table(rows).splitlines()) == 2 + len(rows)


def test_a_second_engine_reads_what_the_first_one_wrote(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tiers.documents(2, 140, 2)
    monkeypatch.setattr(disk, "documents", lambda: small)
    monkeypatch.setattr(DiskTier, "read_wait", 60.0)  # what is read late is computed
    rows = run(capsys, "disk", "--workloads", "documents")
    by = {(row["tiers"], row["engine"]): row for row in rows}
    assert len(by) == 6 and {row["prompt_tokens"] for row in rows} == {rows[0]["prompt_tokens"]}
    for name in (disk.NONE, disk.HOST):  # nothing is left of the first engine
        assert by[name, "first"]["computed"] == by[name, "second"]["computed"]
        assert by[name, "second"]["read"] == by[name, "first"]["written"] == 0
    first, second = by[disk.DISK, "first"], by[disk.DISK, "second"]
    assert first["read"] == 0 and first["computed"] == by[disk.HOST, "first"]["computed"]
    assert second["read"] >= 2 * 128 and second["computed"] <= first["computed"] - 2 * 128
    assert first["written"] >= second["read"] and first["written_bytes"] > 0
    assert len(disk.as_table(rows).splitlines()) == 2 + len(rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("speculative --kinds poems", "unknown kind of prompts 'poems'"),
        ("speculative --draft-tokens 2,none", "a whole number, 1 or more, is needed, not 'none'"),
        ("adapters --adapters 0", "a whole number, 1 or more, is needed, not '0'"),
        ("adapters --model smollm2-135m", "needs --lora"),
        ("adapters --lora nowhere", "nowhere is no directory"),
        ("disk --workloads nonsense", "nonsense"),
        ("disk --folder nowhere", "nowhere"),
    ],
)
def test_what_cannot_be_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split()]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in told
