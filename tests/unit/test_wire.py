"""KV events as others send them: recorded bytes of every shape, and bytes that no honest sender sends."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirad.fleet import wire
from minirad.fleet.wire import Batch, Cleared, Decoder, Removed, Stored, WireError, decode, encode, hash_name

pack = msgspec.msgpack.encode


def event(**fields: Any) -> dict[str, Any]:
    """A BlockStored of two blocks of two tokens, with other fields."""
    usual = {
        "type": "BlockStored", "block_hashes": [5, 6], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
        "block_size": 2, "lora_id": None, "medium": "GPU",
    }  # fmt: skip
    return {**usual, **fields}


def read(*events: Any) -> Batch:
    return decode(pack([1.5, list(events), 0]))


# ------------------------------------------------------------ recorded

# [1.5, [["BlockStored", [-1], null, [7, 8], 2, null]]]: SGLang's first, trailing defaults left out
OLD_SGLANG = "92 cb3ff8000000000000 91 96 ab426c6f636b53746f726564 91ff c0 920708 02 c0"
# {"ts": 1.5, "events": [{"type": "BlockRemoved", "block_hashes": [h'00ff'], "medium": "CPU"}],
#  "data_parallel_rank": 3}: vLLM's newest
NEW_VLLM = (
    "83 a27473 cb3ff8000000000000 a66576656e7473 91 83 a474797065 ac426c6f636b52656d6f766564"
    " ac626c6f636b5f686173686573 91 c40200ff a66d656469756d a3435055"
    " b2646174615f706172616c6c656c5f72616e6b 03"
)


def test_bytes_of_an_old_sglang() -> None:
    assert decode(bytes.fromhex(OLD_SGLANG)) == Batch(1.5, (Stored((-1,), None, ((7, 8),), 2),), None)


def test_bytes_of_a_new_vllm() -> None:
    assert decode(bytes.fromhex(NEW_VLLM)) == Batch(1.5, (Removed((b"\x00\xff",), "CPU"),), 3)


def test_vllm_positional_in_its_order() -> None:
    keys = [["lora-a", "salt"], ["lora-a"]]
    sent = ["BlockStored", [5, 6], 4, [1, 2, 3, 4], 2, None, None, "lora-a", keys]
    sent += [0, "full_attention", None, "tomorrow"]
    batch = decode(pack([1, [sent, ["BlockRemoved", [5], None, 0], ["AllBlocksCleared"]], 2]))
    spaces = (("lora-a", "salt"), ("lora-a",))
    stored = Stored((5, 6), 4, ((1, 2), (3, 4)), 2, "GPU", spaces=spaces)
    assert batch == Batch(1.0, (stored, Removed((5,)), Cleared()), 2, unknown=1)


def test_sglang_positional_with_its_salt() -> None:
    sent = ["BlockStored", [5], None, [1, 2], 2, None, "CPU_PINNED", {"cache_salt": "s"}]
    assert read(sent).events == (Stored((5,), None, ((1, 2),), 2, "CPU_PINNED", spaces=(("s",),)),)


def test_sglang_maps_with_pairs_of_bigram_keys() -> None:
    sent = event(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]], cache_salt="s", session_id="x", lora_name="l")
    stored = Stored((5, 6), None, ((1, 2, 2, 3), (3, 4, 4, 5)), 2, pairs=True, spaces=(("l", "s"),) * 2)
    assert read(sent) == Batch(1.5, (stored,), 0)


@pytest.mark.parametrize("rank", ["attn_dp_rank", "data_parallel_rank"])
def test_a_batch_as_a_map(rank: str) -> None:
    assert decode(pack({"ts": 2, "events": [], rank: 4, "x": 1})) == Batch(2.0, (), 4, unknown=1)


def test_hashes_of_all_kinds_keep_their_own_form() -> None:
    names = [(1 << 64) - 1, -(1 << 63), bytes(range(32))]
    removed = read({"type": "BlockRemoved", "block_hashes": names}).events[0]
    assert isinstance(removed, Removed) and list(removed.hashes) == names
    assert list(map(hash_name, names)) == [
        "18446744073709551615",
        "-9223372036854775808",
        bytes(range(32)).hex(),
    ]


def test_copies_without_tokens() -> None:
    copies = event(token_ids=[], block_size=0, medium="CPU", block_hashes=[5, 6, 5])
    assert read(copies).events == (Stored((5, 6), None, (), 0, "CPU"),)


def test_namespaces_have_each_part_once_and_are_bounded() -> None:
    keys = [["image", 3], b"\x01", 7, 7, "l" * 500]
    stored = read(event(block_hashes=[5], token_ids=[1, 2], extra_keys=[keys], lora_id=9)).events[0]
    assert isinstance(stored, Stored)
    assert stored.spaces[0][:4] == ("lora 9", "image@3", "01", "7") and len(stored.spaces[0]) == 5
    assert all(len(part) <= wire.LONGEST_TEXT for part in stored.spaces[0])
    other = read(event(block_hashes=[5], token_ids=[1, 2], lora_name="l" * 501)).events[0]
    assert isinstance(other, Stored) and other.spaces[0][-1] != stored.spaces[0][-1]


def test_other_cache_groups_are_marked_and_remembered() -> None:
    decoder = Decoder()

    def groups(*events: dict[str, Any]) -> list[bool]:
        records = decoder.decode(pack([1, list(events), 0])).events
        return [record.other_group for record in records if not isinstance(record, Cleared)]

    gone = {"type": "BlockRemoved", "block_hashes": [5]}
    assert groups(gone, {**gone, "group_idx": 0}, {**gone, "group_idx": 1}) == [False, False, True]
    window = event(group_idx=0, kv_cache_spec_kind="sliding_window", token_ids=[1])  # not one row a block
    full = event(group_idx=1, kv_cache_spec_kind="full_attention")
    assert groups(window, full, {**full, "group_idx": 2}) == [True, False, True]
    assert groups(*({**gone, "group_idx": index} for index in range(3))) == [True, False, True]
    assert groups(event(kv_cache_spec_kind="mamba"), event(kv_cache_spec_kind="mla_attention")) == [
        True,
        False,
    ]


def test_what_is_written_is_read_again() -> None:
    batch = Batch(
        3.0,
        (
            Stored((1, 2), None, ((1, 2, 3, 4), (5, 6, 7, 8)), 2, pairs=True, spaces=(("a",), ("a",))),
            Stored((3,), 2, ((9, 9),), 2, spaces=(("a", "b"),)), Stored((b"x",), 3, (), 0, "CPU"),
            Removed((-1,), "DISK", True), Cleared(),
        ),
        3,
    )  # fmt: skip
    assert decode(encode(batch)) == batch


# ------------------------------------------------------------ hostile

GOOD = Removed((1,))
BAD_EVENTS = [
    3, None, "BlockStored", [], {}, [["BlockStored"]], {"type": None}, {"type": [1]}, ["BlockStored"],
    ["BlockRemoved", 5], ["BlockRemoved", [True]], ["BlockRemoved", [1.0]], ["BlockRemoved", ["text"]],
    ["BlockRemoved", [b""]], ["BlockRemoved", [b"x" * 65]], ["BlockRemoved", [1], 7],
    ["BlockRemoved", [1], ""],
    ["BlockRemoved", [1], "m" * 201], ["BlockRemoved", [1], "GPU", -1], ["BlockRemoved", [1], "GPU", 1 << 40],
    event(block_size=1 << 60), event(block_size=0), event(block_size=-2), event(block_size=True),
    event(block_size=2.0), event(block_size=None), event(block_size=3), event(token_ids=[1, 2, 3]),
    event(token_ids=[1, 2, 3, -4]), event(token_ids=[1, 2, 3, 1 << 60]), event(token_ids=[1, 2, 3, None]),
    event(token_ids=[1, 2, 3, True]), event(token_ids=[[1, 2], [3, 4], 5, 6]),
    event(token_ids=[[1], [2], [3], [4]]),
    event(token_ids=[[[1], 2]] * 4), event(token_ids="1234"), event(token_ids={1: 2}),
    event(parent_block_hash=[]), event(parent_block_hash=5), event(block_hashes=[5, 5]),
    event(extra_keys=[None]), event(extra_keys=[["x"], 3]), event(extra_keys=[[{}], None]),
    event(extra_keys="ab"),
    event(cache_salt=[[1], 2]), event(token_ids=[], block_size=1 << 60),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_EVENTS, ids=lambda bad: str(bad)[-60:])
def test_a_malformed_event_is_left_out_and_said(bad: Any) -> None:
    batch = read(bad, ["BlockRemoved", [1]])
    assert batch.events == (GOOD,) and batch.unknown == 1
    assert batch.trouble and "\n" not in batch.trouble and len(batch.trouble) < 400


def test_an_event_of_tomorrow_is_counted() -> None:
    assert read({"type": "BlockMoved", "x": 1}, ["BlockMoved", 1], ["AllBlocksCleared", 1]) == Batch(
        1.5, (Cleared(),), 0, unknown=3
    )


@pytest.mark.parametrize("ts", [float("nan"), float("inf"), -1, "now", None, 1e300, True])
def test_a_time_that_is_none_does_not_cost_the_batch(ts: Any) -> None:
    batch = decode(pack([ts, [["BlockRemoved", [1]]], 0]))
    assert batch.ts == 0.0 and batch.events == (GOOD,) and batch.unknown == 1 and "time" in batch.trouble


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xffx", b"\x81\x80\x01", b"\x92\x01", b"\x92\x01\x02", b"\x93\x01\x80\x00", b"\x01",
        b"\xa1\xff", b"\x92\x01\x91\xa3\xed\xa0\x80", b"\x80", b"\x90\x90", b"\xd6\xff\x00", b"<html>",
        b"\xc7\x0c\xff" + b"\xff" * 12, bytes.fromhex(OLD_SGLANG)[:-3], bytes.fromhex(NEW_VLLM)[:-1],
    ],
)  # fmt: skip
def test_garbage_is_one_sentence(payload: bytes) -> None:
    with pytest.raises(WireError) as caught:
        decode(payload)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_media_and_groups_are_bounded() -> None:
    decoder = Decoder()
    for at in range(100):
        decoder.decode(pack([1, [["BlockRemoved", [1], f"medium {at}"]], 0]))
    assert len(decoder._media) == wire.MOST_MEDIA
    assert decoder.decode(pack([1, [["BlockRemoved", [1], "medium 3"]], 0])).events == (
        Removed((1,), "medium 3"),
    )


WORDS = ["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU"]
KEYS = ["type", "ts", "events", "cache_salt", *wire._STORED]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=5) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=12,
)  # fmt: skip
# A good event with one field of any value, or a value alone.
EVENTS = VALUES | st.tuples(st.sampled_from(KEYS), VALUES).map(lambda field: event(**{field[0]: field[1]}))


def _check(batch: Batch) -> None:
    """What follows from the types of a batch, whoever sent it."""
    assert 0 <= batch.ts < 1e15
    for record in batch.events:
        if isinstance(record, Stored) and record.tokens:
            width = record.block_size * (2 if record.pairs else 1)
            assert len(record.tokens) == len(record.hashes) and {len(block) for block in record.tokens} == {
                width
            }
        if isinstance(record, Stored) and record.spaces:
            assert len(record.spaces) == len(record.hashes)
    assert decode(encode(batch)).events == batch.events or any(
        isinstance(record, Stored) and record.other_group for record in batch.events
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(VALUES, st.lists(EVENTS, max_size=3), VALUES)
def test_any_values_are_read_or_refused(ts: Any, events: list[Any], rank: Any) -> None:
    _check(decode(pack([ts, events, rank])))
    with contextlib.suppress(WireError):
        _check(decode(pack({"events": ts, "ts": rank})))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=60), st.integers(0, 200), st.sampled_from([OLD_SGLANG, NEW_VLLM]))
def test_any_bytes_are_read_or_refused(more: bytes, at: int, recorded: str) -> None:
    good = bytes.fromhex(recorded)
    before, after = good[: at % len(good)], good[at % len(good) + 1 :]
    for payload in (more, before + more, before + more + after):
        with contextlib.suppress(WireError):
            _check(decode(payload))


def test_times_are_doubles_also_where_they_are_whole() -> None:
    assert decode(b"\x93\xca" + struct.pack(">f", 2.5) + b"\x90\xc0").ts == 2.5
