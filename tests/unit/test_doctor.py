"""The prompt doctor: where prompts part, what it costs, and savings that are counted, not guessed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minirad.doctor import diagnose, early_breaks
from minirad.model.classroom import corpus
from minirad.simulate import from_workload
from minirad.traces import tokenizer
from minirad.workloads import WORKLOADS, load

RULES = "You are a careful assistant. Answer in English and keep it short. Never invent facts. "
TEXT = tokenizer()


class Letters:
    """A token for each letter."""

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# ---------------------------------------------------------------------- two prompts


def test_a_time_in_front_of_the_rules() -> None:
    a, b = (f"The time is {time}. {RULES}Hello there" for time in ("12:01", "15:01"))
    found = diagnose(a, b, TEXT)
    ids = TEXT.encode(a), TEXT.encode(b)
    assert found.tokens == tuple(map(len, ids))
    assert found.position == found.shared == common(*ids)
    assert found.token == ("2", "5")
    assert found.before.endswith("The time is 1")
    assert all(text.startswith(":01") for text in found.after)
    assert found.lost >= len(TEXT.encode(RULES)) - 2
    assert found.better is not None
    assert [part.strip() for part in found.better.moved] == ["The time is 15:01."]
    # The saving is what a cache would count.
    reordered = TEXT.encode(found.better.first), TEXT.encode(found.better.second)
    assert found.better.shared == common(*reordered)
    grown = len(reordered[1]) - found.tokens[1]
    assert found.better.tokens == len(reordered[1])
    assert found.better.saved == found.better.shared - found.shared - max(grown, 0) > 20
    assert sorted(found.better.second.split()) == sorted(b.split())
    said = found.describe()
    assert "The time is 1«5»:01" in said
    assert f"saves {found.better.saved} tokens" in said
    assert asdict(found)["better"]["parts"] == "sentences"


def test_whole_lines_are_moved_where_that_is_enough() -> None:
    a, b = (f"Id: {number}\n{RULES}\nWhat is {number} + 1?" for number in (7, 8))
    better = diagnose(a, b, TEXT).better
    assert better is not None
    assert (better.parts, better.moved) == ("lines", ("Id: 8\n",))
    assert better.second == f"{RULES}\nId: 8\nWhat is 8 + 1?"


def test_nothing_is_moved_behind_what_closes_a_chat_prompt() -> None:
    def prompt(time: str) -> str:
        said = [corpus.message("system", f"It is {time}.\n{RULES}"), corpus.message("user", "Hello")]
        return corpus.chat_text(said, add_generation_prompt=True)

    better = diagnose(prompt("noon"), prompt("midnight"), TEXT).better
    assert better is not None
    assert better.second.endswith("Hello\nIt is midnight.\n<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("a", "b", "position", "shared"),
    [
        ("Hello", "Hello", None, None),  # equal: but for the last token, which is always computed
        ("Hello", "Hello there", None, None),
        ("", "Hello", 0, 0),
        ("Hello", "", 0, 0),
        ("Hello", "Goodbye", 0, 0),
    ],
)
def test_edges(a: str, b: str, position: int | None, shared: int | None) -> None:
    found, length = diagnose(a, b, TEXT), len(TEXT.encode(a))
    assert found.position == (length if position is None else position)
    assert found.shared == (min(length, found.tokens[1] - 1) if shared is None else shared)
    assert found.equal == (a == b)
    assert found.better is None
    assert found.describe()


def test_questions_behind_the_same_rules_are_as_good_as_it_gets() -> None:
    found = diagnose(f"{RULES}Who are you?", f"{RULES}What color is snow?", TEXT)
    assert found.better is None
    assert "no other order" in found.describe()


@settings(max_examples=80, deadline=None)
@given(
    *[st.lists(st.sampled_from(["One. ", "Two is here.", "3!\n", "<|im_end|>\n", "four"]), max_size=7)] * 2
)
def test_another_order_loses_nothing_and_saves_what_it_says(a: list[str], b: list[str]) -> None:
    found = diagnose("".join(a), "".join(b), TEXT)
    if found.better is not None:
        for text, parts in ((found.better.first, a), (found.better.second, b)):
            assert sorted("".join(text.split())) == sorted("".join("".join(parts).split()))
        ids = [TEXT.encode(text) for text in (found.better.first, found.better.second)]
        assert found.better.shared == min(common(*ids), len(ids[1]) - 1)
        assert found.better.tokens == len(ids[1])
        grown = max(len(ids[1]) - found.tokens[1], 0)
        assert found.better.saved == found.better.shared - found.shared - grown > 0


PARTS = [
    "Rules apply. ",
    "Today is Monday. ",
    "Today is Tuesday. ",
    "It is 09:14.\n",
    "Id: 7\n",
    "So be it.",
    "a",
]
PROMPT = st.lists(st.sampled_from([*PARTS, RULES, "<|im_end|>\n"]), max_size=6).map("".join)


@settings(max_examples=150, deadline=None)
@given(PROMPT, PROMPT, st.sampled_from([1, 2, 4, 8, 16]))
@example("It is 09:14. Answer shortly. Go.", "It is 09:15. Answer shortly. Go.", 8)
def test_no_more_is_saved_than_was_lost_or_equal_in_no_whole_page(a: str, b: str, page_size: int) -> None:
    found = diagnose(a, b, TEXT, page_size)
    assert found.lost == diagnose(a, b, TEXT).lost, "whatever the page size"
    assert 0 <= found.shared <= found.position <= found.position + found.lost <= found.tokens[1]
    if found.better is not None:
        assert found.better.saved <= found.lost + found.position - found.shared
        computed = found.tokens[1] - found.shared, found.better.tokens - found.better.shared
        assert computed[0] - computed[1] >= found.better.saved
        assert ("more than were lost" in found.describe()) == (found.better.saved > found.lost)


@pytest.mark.parametrize("day", ["{} is Monday", "It is 09:1{}"])
def test_what_is_saved_is_said_to_be_lost(day: str) -> None:
    a, b = (f"System rules apply. {day.format(one)}. Answer shortly." for one in (4, 5))
    found = diagnose(a, b, TEXT)
    assert found.better is not None and 0 < found.better.saved <= found.lost
    alike = common(TEXT.encode(a)[::-1], TEXT.encode(b)[::-1])  # ". Answer shortly."
    assert found.lost >= alike > 0
    said = found.describe()
    assert f"lost: {found.lost} tokens of B behind that point are in A, too" in said
    assert f"B would find {found.better.shared} of its {found.better.tokens} tokens then in the cache" in said


def test_a_page_that_is_filled_saves_more_than_was_lost_and_this_is_said() -> None:
    a, b = (f"System rules apply. Today is {day}. Answer shortly." for day in ("Monday", "Tuesday"))
    found = diagnose(a, b, TEXT, page_size=4)
    assert found.better is not None and found.better.saved == found.lost + 1
    assert found.outcome.endswith(
        "(at least 1 token more than were lost: equal in front, but in no whole page)"
    )
    assert "more than were lost" not in diagnose(a, b, TEXT).describe()


@pytest.mark.parametrize(
    ("length", "page_size", "said"),
    [
        (18, 1, "B finds all but its last token in the cache; the last is always computed"),
        (17, 4, "B finds all but its last token in the cache; the last is always computed"),
        (
            18,
            4,
            "finds 16 of its 18 tokens in the cache, as whole pages are matched and the last token is always",
        ),
        (
            16,
            4,
            "finds 12 of its 16 tokens in the cache, as whole pages are matched and the last token is always",
        ),
        (
            3,
            4,
            "finds 0 of its 3 tokens in the cache, as whole pages are matched and the last token is always",
        ),
        (1, 1, "B finds 0 of its 1 token in the cache, as the last token is always computed"),
        (0, 1, "B finds 0 of its 0 tokens in the cache"),
    ],
)
def test_of_equal_prompts_whole_pages_are_found(length: int, page_size: int, said: str) -> None:
    found = diagnose("x" * length, "x" * length, Letters(), page_size)
    assert found.equal and found.position == length
    assert found.shared == max(length - 1, 0) // page_size * page_size
    assert said in found.describe()
    assert ("all but its last" in found.describe()) == (0 < found.shared == length - 1)


@pytest.mark.parametrize(
    ("a", "b", "verdict", "loss"),
    [
        (
            "abcd1",
            "abcd2",
            "they part at token 4; B finds 4 of its 5 tokens in the cache",
            "nothing, for no 8",
        ),
        (
            "abcde1",
            "abcde2",
            "B finds 4 of its 6 tokens in the cache, as whole pages are matched",
            "nothing, for",
        ),
        (
            "abcde1",
            "abcde",
            "B finds 4 of its 5 tokens in the cache, as the last token is",
            "for B ends there",
        ),
        ("abcde", "abcdef", "B finds 4 of its 6 tokens in the cache, as whole pages are", "for A ends there"),
        (
            "abcd",
            "xbcd",
            "they part at token 0; B finds 0 of its 4 tokens in the cache",
            "3 tokens of B behind",
        ),
    ],
)
def test_why_no_more_is_found_is_said(a: str, b: str, verdict: str, loss: str) -> None:
    found = diagnose(a, b, Letters(), page_size=4)
    assert verdict in found.verdict and loss in found.loss
    assert found.verdict.endswith("in the cache") == (found.position == found.shared)


def test_sharing_goes_by_whole_pages() -> None:
    a, b = f"{RULES}Who are you?", f"{RULES}What color is snow?"
    exact = diagnose(a, b, TEXT).shared
    assert diagnose(a, b, TEXT, page_size=16).shared == exact // 16 * 16
    with pytest.raises(ValueError, match="page size must be at least 1, got 0"):
        diagnose(a, b, TEXT, page_size=0)


# ---------------------------------------------------------------------- many prompts


def stamped(count: int, seed: int = 0) -> list[np.ndarray]:
    """Prompts with a time in front of the rules; half of them ask one thing, half another."""
    rng = random.Random(seed)
    times = [f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}" for _ in range(count)]
    asks = ("Who are you?", "What color is snow?")
    texts = [f"It is {time} now. {RULES}{asks[n % 2]}" for n, time in enumerate(times)]
    return [np.array(TEXT.encode(text)) for text in texts]


def shared_one_by_one(rows: list[np.ndarray]) -> int:
    seen: set[bytes] = set()
    total = 0
    for row in rows:
        prefixes = [row[: size + 1].tobytes() for size in range(len(row))]
        total += sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    return total


def test_a_stamp_in_front_is_named_with_its_place_and_its_price() -> None:
    rows = stamped(30)
    (found,) = early_breaks(rows, TEXT.decode)
    assert found.requests == 30
    assert found.before == "It is "[: len(found.before)]
    assert all(":" in text for text in found.varying)
    assert found.after.startswith(" now. You are a careful")
    assert found.where == ("prompt 1", "prompt 2", "prompt 3")
    assert found.tokens == sum(map(len, rows))
    assert found.cached == shared_one_by_one(rows)
    # Without the stamps in front, all but the first share the rules.
    assert found.could >= found.cached + 28 * len(TEXT.encode(RULES)) * 0.9
    assert f"part at token {found.position}" in found.describe()


def test_families_are_found_among_others() -> None:
    others = [np.array(TEXT.encode(f"{word} and nothing else")) for word in corpus.WORDS[:30]]
    mixed = [row for pair in zip(stamped(30), others, strict=True) for row in pair]
    (found,) = early_breaks(mixed, TEXT.decode, [f"line {number}" for number in range(60)])
    assert found.requests == 30
    assert found.where == ("line 0", "line 2", "line 4")


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "none"])
def test_well_built_prompts_are_left_alone(name: str) -> None:
    source = from_workload(load(name), TEXT)
    assert early_breaks([prompt.key.tokens for prompt in source.prompts], TEXT.decode) == []


def test_a_stamp_at_the_very_beginning_is_found_whatever_comes_first() -> None:
    front = [row[len(TEXT.encode("It is ")) :] for row in stamped(30)]
    others = [np.array(TEXT.encode(f"{word} and nothing else")) for word in corpus.WORDS[:30]]
    found = early_breaks([*others, *front], TEXT.decode)
    assert found[0].position == 0
    assert found[0].requests == 30
    assert found[0].before == ""


def test_few_and_short_prompts() -> None:
    assert early_breaks([], TEXT.decode) == []
    assert early_breaks([np.array([1, 2, 3])] * 3, TEXT.decode) == []
    assert early_breaks([np.array([1]), np.array([2]), np.array([1, 2])], TEXT.decode) == []


@pytest.mark.parametrize("seed", range(4))
def test_random_prompts_break_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 3, rng.integers(1, 90)) for _ in range(40)]
    for found in early_breaks(rows, lambda ids: str(list(ids))):
        assert found.saved > 0
        assert found.could <= found.tokens
