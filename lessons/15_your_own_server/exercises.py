"""What lesson 15 asks for, and its open cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from numbers import Real
from types import ModuleType
from typing import Any

import msgspec

from lessons.grading import Exercise, expect
from lessons.grading.shared import whole
from lessons.grading.subscriber import Block, Rank, record_fault
from lessons.grading.words import shown
from minirad.fleet import blocks as engine
from minirad.fleet import order
from minirad.fleet.wire import Cleared, Record, Removed, Stored, decode

# ---------------------------------------------------------------------- read_batch

FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip

Sent = dict[str, Any]


def stored(hashes: Sequence[Any], parent: Any, tokens: Sequence[int] | None, size: int, **more: Any) -> Sent:
    """A BlockStored with its fields by name; those that are not given are not there."""
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": tokens,
        "block_size": size, **more,
    }  # fmt: skip


def removed(hashes: Sequence[Any], **more: Any) -> Sent:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


CLEARED: Sent = {"type": "AllBlocksCleared"}


def as_list(event: Sent, fields: int = 8) -> list[Any]:
    """The same event as a list, up to so many fields after its type."""
    return [event["type"], *(event.get(name) for name in FIELDS[event["type"]][:fields])]


def as_salted_list(event: Sent, salt: str) -> list[Any]:
    """The same as SGLang 0.5.18 and 0.5.19 tell it of a request with a salt."""
    return [*as_list(event, 6), {"cache_salt": salt}]


def read(impl: ModuleType, sent: Any, hint: int = 0, as_if: Any = None) -> None:
    """read_batch of what was sent, against the engine's decoder; as_if: what it is worth, if not itself."""
    payload = msgspec.msgpack.encode(sent)
    ours = decode(msgspec.msgpack.encode(as_if) if as_if is not None else payload)
    what = f"read_batch of {sent}"
    found = impl.read_batch(payload)
    right = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], list)
    expect(right, f"{what} returned {shown(found)}; it should be (time, list of records)")
    right = isinstance(found[0], Real) and found[0] == ours.ts
    expect(right, f"{what} gave the time {shown(found[0])}; it is {ours.ts}", hint=hint)
    for place, (mine, theirs) in enumerate(zip(found[1], ours.events, strict=False), start=1):
        wrong = record_fault(mine)
        expect(not wrong, f"{what}: record {place} is {shown(mine)}: {wrong}", hint=hint)
        kind = type(theirs).__name__
        right = type(mine) is type(theirs)
        expect(right, f"{what}: record {place} should be a {kind}, it is {shown(mine)}", hint=hint)
        for part in [field.name for field in fields(theirs)]:
            got, wanted = getattr(mine, part), getattr(theirs, part)
            words = f"{what}: {part} of record {place} ({kind}) should be {wanted}, it is {shown(got)}"
            expect(got == wanted, words, hint=hint)
    count = len(ours.events)
    expect(len(found[1]) == count, f"{what} gave {len(found[1])} records; it should be {count}", hint=hint)


ONE = stored([11, 12], None, [1, 2, 3, 4], 2, lora_id=None, medium="GPU")
NEXT = stored([13], 12, [5, 6], 2, lora_id=None, medium="CPU")
GONE = removed([13], medium="CPU")


def maps_in_a_list(impl: ModuleType) -> None:
    """A batch as SGLang sends it: a list, with events that are maps."""
    read(impl, [17.5, [ONE, NEXT, GONE, CLEARED], 0])
    read(impl, [18.5, []])


def maps_in_a_map(impl: ModuleType) -> None:
    """A batch as vLLM sends it: a map, with events that are maps."""
    read(impl, {"ts": 17.5, "events": [ONE, GONE, NEXT], "data_parallel_rank": 0})
    read(impl, {"events": [CLEARED], "ts": 2})


def lists_in_a_list(impl: ModuleType) -> None:
    """A batch as vLLM sent it up to 0.23: lists all the way down."""
    read(impl, [17.5, [as_list(ONE), as_list(NEXT), as_list(GONE), as_list(CLEARED)], 1], hint=1)


def lists_and_maps_in_one(impl: ModuleType) -> None:
    """Events that are lists in a map, and beside them some that are maps."""
    read(impl, {"ts": 17.5, "events": [as_list({**ONE, "lora_name": "law"}), NEXT, as_list(GONE)]}, hint=1)


def lists_of_all_lengths(impl: ModuleType) -> None:
    """Lists that end early, and some that go on beyond what we know."""
    short = [as_list(ONE, 4), as_list(NEXT, 6), as_list(GONE, 1)]
    read(impl, [1.0, short], hint=1)
    long = [*as_list(ONE), 0, "full_attention", None]
    read(impl, [1.0, [long, [*as_list(GONE), 0], [*as_list(CLEARED), 7]], 0, "more"], hint=1)


def fields_that_are_missing(impl: ModuleType) -> None:
    """Maps with no more than what must be there."""
    bare = {name: ONE[name] for name in ("type", "block_hashes", "token_ids", "block_size")}
    read(impl, [1.0, [bare, removed([11])]])


def what_nobody_knows(impl: ModuleType) -> None:
    """Fields and events of tomorrow are passed over."""
    more = {"locality": "near", "session_id": "s", "a_field": [1, {"x": None}]}
    read(impl, [1.0, [{**ONE, **more}, {"type": "BlockMoved", "to": "CPU"}, ["BlockSeen", [11], 3], GONE]])


def tokens_that_are_not_told(impl: ModuleType) -> None:
    """A copy in another medium, without its tokens; and a medium that is not named."""
    read(impl, [1.0, [stored([11, 12], None, [], 2, medium="CPU"), stored([13], 12, None, 0, medium="DISK")]])
    read(impl, [1.0, [stored([11], None, [1, 2], 2), {**NEXT, "medium": None}, removed([11], medium=None)]])


def sizes_that_are_not_so(impl: ModuleType) -> None:
    """Tokens that do not fill the blocks: that event is passed over."""
    few, many = stored([11, 12], None, [1, 2, 3], 2), stored([11, 12], None, [1, 2, 3, 4], 1)
    for wrong in (few, many):
        read(impl, [1.0, [wrong, GONE, ONE]], hint=2)


def spaces_of_blocks(impl: ModuleType) -> None:
    """Adapters, salts and extra keys."""
    read(
        impl,
        [1.0, [{**ONE, "lora_name": "law"}, {**NEXT, "cache_salt": "school"}, {**NEXT, "lora_name": ""}]],
    )
    read(impl, [1.0, [{**ONE, "lora_name": "law", "extra_keys": [["law", "image"], None]}]])
    read(impl, [1.0, [{**NEXT, "cache_salt": "b", "extra_keys": [["a"]], "lora_name": "c"}]])
    read(impl, [1.0, [{**ONE, "extra_keys": [None, None]}, {**ONE, "extra_keys": [["a", "b"], ["b"]]}]])
    read(impl, [1.0, [{**ONE, "lora_id": 7}]], as_if=[1.0, [ONE]])  # less than the engine makes of it


def salts_in_lists(impl: ModuleType) -> None:
    """A map with the salt where a list has the adapter's name, as SGLang 0.5.18 and 0.5.19 sent it."""
    read(impl, [1.0, [as_salted_list(ONE, "school"), as_list(NEXT, 6), as_list(GONE)], 0])
    more = [as_salted_list({**NEXT, "medium": None}, "law"), as_list({**NEXT, "lora_name": "law"})]
    read(impl, {"ts": 2.5, "events": more})


def names_of_all_kinds(impl: ModuleType) -> None:
    """Hashes that are negative, large, or bytes."""
    read(impl, [1.0, [stored([-5, 2**63 + 1], 0, [1, 2], 1), removed([0, -5])]])
    read(impl, [1.0, [stored([b"\x01\x02"], b"\xff\x00", [7], 1), removed([b"\x01\x02"])]])


# ---------------------------------------------------------------------- store, remove


class Pair:
    """A dict that the student's functions keep, and the engine's forest; both hear the same."""

    def __init__(self, impl: ModuleType, part: str) -> None:
        self.impl, self.part = impl, part
        self.own: dict[Any, Block] = {}
        self.forest = engine.RankBlocks()
        self.said: list[str] = []

    def take(self, event: Record, hint: int = 0) -> None:
        """Both take an event; one of the other kind is done for the student."""
        name = "store" if isinstance(event, Stored) else "remove"
        self.said.append(in_words(event))
        self.forest.take(event)
        if name == self.part:
            getattr(self.impl, name)(self.own, event)
            self.compare(name, hint)
        else:
            bring_in_line(self.own, self.forest)

    def compare(self, name: str, hint: int = 0) -> None:
        """The first difference in words."""
        before = "; ".join(self.said[-6:-1])
        where = f"{'... ' if len(self.said) > 6 else ''}{before}{'; then ' if before else ''}{self.said[-1]}"
        wrong = difference(self.own, self.forest)
        expect(not wrong, f"after {where}: {wrong}", hint=hint)


def named(name: Any) -> str:
    """A block's name, short: bytes in hex."""
    return name.hex() if isinstance(name, bytes) else shown(name)


def in_words(event: Record) -> str:
    """An event, short."""
    if isinstance(event, Cleared):
        return "Cleared()"
    names = f"[{', '.join(map(named, event.hashes))}]"
    if isinstance(event, Removed):
        return f"Removed({names}, {event.medium})"
    tokens = [list(row) for row in event.tokens] if event.tokens else "tokens not told"
    space = f", {event.spaces}" if event.spaces else ""
    return f"Stored({names} after {named(event.parent)}, {tokens}, {event.medium}{space})"


def of_engine(block: engine.Block) -> Block:
    """A block of the engine's forest as the student keeps it."""
    return Block(block.parent, block.tokens, block.own, set(block.media | block.maybe), block.seen)


def bring_in_line(own: dict[Any, Block], forest: engine.RankBlocks) -> None:
    """What the other function would have done: blocks that stay are changed, not made anew."""
    for name in [name for name in own if name not in forest.blocks]:
        del own[name]
    for name, theirs in forest.blocks.items():
        right = of_engine(theirs)
        mine = own.get(name)
        if mine is None or (mine.parent, mine.tokens, mine.space, mine.seen) != (
            right.parent, right.tokens, right.space, right.seen,
        ):  # fmt: skip
            own[name] = right
            continue
        for medium in mine.media - right.media:
            mine.media.discard(medium)
        for medium in right.media - mine.media:
            mine.media.add(medium)


def difference(own: Any, forest: engine.RankBlocks) -> str:
    """Where a student's dict differs from the engine's forest; "" if it does not."""
    if not isinstance(own, dict):
        return f"blocks is {shown(own)}"
    for name, theirs in forest.blocks.items():
        right = of_engine(theirs)
        kind = "block" if right.media else "hole" if right.seen else "placeholder"
        if name not in own:
            return f"{kind} {named(name)} should be in blocks, and is not"
        mine = own[name]
        if not isinstance(mine, Block):
            return f"blocks[{named(name)}] is {shown(mine)}, which is no Block"
        for part in ("parent", "tokens", "space", "media", "seen"):
            ours, rights = getattr(mine, part), getattr(right, part)
            if ours != rights:
                return f"{part} of {kind} {named(name)} should be {shown(rights)}, it is {shown(ours)}"
    extra = [name for name in own if name not in forest.blocks]
    return f"block {named(extra[0])} should not be in blocks: it is {shown(own[extra[0]])}" if extra else ""


def told(
    hashes: Sequence[Any], parent: Any, medium: str = "GPU", space: str = "", tokens: bool = True
) -> Stored:
    """Blocks of two tokens each: block 12 has the tokens 120 and 121."""
    rows = tuple((10 * name, 10 * name + 1) for name in hashes) if tokens else ()
    return Stored(tuple(hashes), parent, rows, 2, medium, spaces=((space,),) * len(hashes) if space else ())


def play(impl: ModuleType, part: str, events: Sequence[Record], hint: int = 0) -> None:
    """The same events for the student's part and the engine."""
    pair = Pair(impl, part)
    for event in events:
        pair.take(event, hint)


def a_prompt_in_two_parts(impl: ModuleType) -> None:
    """Blocks that follow each other, and more that follow these; another prompt beside."""
    play(impl, "store", [told([11, 12, 13], None), told([14, 15], 13), told([16], 12), told([17], None)])


def a_copy_in_host_memory(impl: ModuleType) -> None:
    """Blocks that are told again, in another medium and in the same, with and without their tokens."""
    play(impl, "store", [told([11, 12], None), told([11, 12], None, "CPU")])
    play(impl, "store", [told([11, 12], None), told([12], None, "CPU", tokens=False)])
    pair = Pair(impl, "store")
    pair.take(told([11, 12], None))
    impl.store(pair.own, told([11, 12], None))
    pair.said.append("the same once more")
    pair.compare("store")


def a_late_start(impl: ModuleType) -> None:
    """A block whose parent was never told: an orphan; and then its parent is."""
    orphan = told([13, 14], 12)
    play(impl, "store", [orphan], hint=1)
    play(impl, "store", [orphan, told([15], 12), told([11, 12], None)], hint=1)
    play(impl, "store", [orphan, told([12], 11), told([11], None)], hint=1)
    play(impl, "store", [told([1], 0), told([0], None)], hint=1)


def a_hole_that_is_filled(impl: ModuleType) -> None:
    """A block was removed below which one stays; it is told again."""
    hole = [told([11, 12], None), Removed((11,))]
    play(impl, "store", [*hole, told([11], None, "CPU"), told([13], 11)])
    play(impl, "store", [*hole, told([11], None, "CPU", tokens=False)], hint=2)


def told_as_something_else(impl: ModuleType) -> None:
    """A block that is known is told with another parent, tokens and space: it keeps its own."""
    other = Stored((12,), None, ((7, 8),), 2, "CPU", spaces=(("a",),))
    play(impl, "store", [told([11, 12], None), other], hint=2)


def spaces_are_kept(impl: ModuleType) -> None:
    """Blocks of two tenants."""
    play(
        impl,
        "store",
        [told([11, 12], None, space="a"), told([13], None, space="b"), told([14], 12, space="a")],
    )
    image = Stored((21, 22), None, ((1, 2), (3, 4)), 2, spaces=((), ("image",)))
    play(impl, "store", [image])


def copies_of_what_is_not_known(impl: ModuleType) -> None:
    """A copy without tokens of blocks that were never told: no block is made of it."""
    copies = (
        (told([11, 12], None, "CPU", tokens=False), ()),
        (told([11, 12, 13], 10, "CPU", tokens=False), (told([13], 12, "CPU"),)),
    )
    for copy, worth in copies:
        pair = Pair(impl, "store")
        pair.take(told([13], 12))
        impl.store(pair.own, copy)
        for event in worth:
            pair.forest.take(event)
        pair.said.append(in_words(copy))
        pair.compare("store", hint=2)


def a_leaf_leaves(impl: ModuleType) -> None:
    """The last block of a prompt leaves, and then the one before it."""
    play(impl, "remove", [told([11, 12, 13], None), Removed((13,)), Removed((12,)), Removed((11,))])
    play(impl, "remove", [told([11, 12, 13], None), Removed((13, 12, 11))])


def one_medium_of_two(impl: ModuleType) -> None:
    """A block that is in two media leaves one of them, then the other."""
    copy = told([11, 12], None, "CPU")
    play(impl, "remove", [told([11, 12], None), copy, Removed((12, 11)), Removed((12,), "CPU")])


def a_hole_stays(impl: ModuleType) -> None:
    """A block leaves and something follows it; then that leaves, too."""
    play(impl, "remove", [told([11, 12, 13], None), told([14], 12), Removed((12,)), Removed((13,))], hint=1)
    play(impl, "remove", [told([11, 12, 13], None), Removed((11, 12)), Removed((13,))], hint=1)
    play(impl, "remove", [told([11, 12], None), told([14], 11), Removed((11, 12, 14))], hint=1)
    play(impl, "remove", [told([11, 12, 13], None), Removed((12,)), Removed((11,))])


def an_orphan_leaves(impl: ModuleType) -> None:
    """What follows a placeholder leaves: then the placeholder has nobody to stay for."""
    play(
        impl,
        "remove",
        [told([13, 14], 12), told([15], 12), Removed((15,)), Removed((13,)), Removed((14,))],
        hint=1,
    )


def removals_of_what_is_not_there(impl: ModuleType) -> None:
    """Names that are not known, and media that a block is not in."""
    play(
        impl,
        "remove",
        [told([13], 12), Removed((99, 12, 13), "CPU"), Removed((12,)), Removed((98, 13))],
        hint=2,
    )


def everything_is_cleared(impl: ModuleType) -> None:
    """Cleared: nothing is left, and it begins anew."""
    copy = told([12], 11, "CPU")
    play(
        impl,
        "remove",
        [told([11, 12], None), told([21], 20), copy, Cleared(), told([31], None), Removed((31,))],
    )


# ---------------------------------------------------------------------- order


RANK = [field.name for field in fields(Rank)]


class Log(Rank):
    """A rank that writes down what it is told."""

    def __init__(self, replay: bool) -> None:
        super().__init__(replay)
        self.log: list[str] = []

    def deliver(self, seq: int, payload: bytes) -> None:
        self.log.append(f"deliver {seq} {shown(payload)}")

    def lost(self, first: int, last: int) -> None:
        self.log.append(f"lost {first} to {last}")

    def restart(self) -> None:
        self.log.append("restart")

    def ask(self, first: int) -> None:
        self.log.append(f"ask from {first}")


class Ours:
    """What the engine's Order tells, in the same words."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def deliver(self, seq: int, payload: bytes, replayed: bool) -> None:
        self.log.append(f"deliver {seq} {shown(payload)}")

    def gap(self, first: int, last: int, why: str) -> None:
        self.log.append(f"lost {first} to {last}")

    def restart(self, why: str) -> None:
        self.log.append("restart")

    def trouble(self, why: str) -> None:
        """Changes nothing."""

    def ask(self, start: int) -> None:
        self.log.append(f"ask from {start}")


class Stream:
    """One publisher, and two who listen: the student's functions and the engine's Order.

    A message is known by its number and by which publisher sent it, b"A" at first, b"B" after it began anew.
    keeps: how many messages its buffer has.
    """

    def __init__(self, impl: ModuleType, replay: bool = True, keeps: int = 1000) -> None:
        self.impl, self.keeps = impl, keeps
        self.listener = Ours()
        self.order = order.Order(self.listener, replay)
        self.rank = Log(replay)
        self.sent: list[bytes] = []
        self.epoch = 0
        self.answer: list[tuple[int, bytes]] | None = None  # what of it is still to come
        self.story: list[str] = []

    # ------------------------------------------------------------ what happens

    def connect(self, hint: int = 0) -> None:
        self._both("connected", "connected", "connected", hint)

    def send(self, *arrives: bool, hint: int = 0) -> None:
        """A message for each; it arrives or is lost."""
        for each in arrives or (True,):
            number = len(self.sent)
            self.sent.append(b"%c%d" % (65 + self.epoch, number))
            if each:
                self._both("live", "live", f"live {number}", hint, number, self.sent[-1])

    def begin_anew(self) -> None:
        """Another publisher is there, with nothing sent so far."""
        self.epoch, self.sent = self.epoch + 1, []
        self.story.append("the publisher begins anew")

    def make_answer(self) -> None:
        """The answer to the newest question is made now, if it was not: what is sent later is not in it."""
        if self.order.asking and self.answer is None:
            oldest = max(self._asked_for(), len(self.sent) - self.keeps)
            self.answer = [(number, self.sent[number]) for number in range(oldest, len(self.sent))]

    def reply(self, most: int = 1000, hint: int = 0) -> None:
        """So many messages of the answer, and its end if there are fewer."""
        for _ in range(most):
            self.make_answer()
            if self.answer:
                number, payload = self.answer.pop(0)
                self._both("answer", "answer", f"answer {number}", hint, number, payload)
            elif self.answer is not None:
                self.answer = None
                self._both("answered", "answers_end", "end of the answer", hint)

    def another_rank(self) -> None:
        """The student goes on with another rank that has the same values: there is no other memory."""
        rank = Log(self.rank.replay)
        for name in RANK:
            setattr(rank, name, getattr(self.rank, name))
        self.rank = rank
        self.story.append("from here on another rank with the same values")

    # ------------------------------------------------------------ both are told

    def _both(self, mine: str, theirs: str, what: str, hint: int, *message: Any) -> None:
        self.story.append(what)
        before, after = len(self.rank.log), len(self.listener.log)
        questions = self._questions()
        getattr(self.order, theirs)(*message, 0.0)
        getattr(self.impl, mine)(self.rank, *message)
        if self._questions() > questions:
            self.answer = None  # what comes of the earlier answer is thrown away
        story = " | ".join(self.story[-12:])
        story = f"{'... | ' if len(self.story) > 12 else ''}{story}"
        where = f"{mine}{'' if self.rank.replay else ' (no replay)'}, after {story}"
        told, right = self.rank.log[before:], self.listener.log[after:]
        words = f"{where}: should tell {_listed(right)}; it told {_listed(told)}"
        expect(told == right, words, hint=hint)
        state = {"last": self.order.last, "asking": self.order.asking, "newest": self.order._live}
        for name, right_is in state.items():
            mine_is = getattr(self.rank, name)
            words = f"{where}: rank.{name} should be {right_is}, it is {shown(mine_is)}"
            expect(mine_is == right_is, words, hint=hint)

    def _asked_for(self) -> int:
        return int(next(line for line in reversed(self.listener.log) if line.startswith("ask")).split()[-1])

    def _questions(self) -> int:
        return sum(line.startswith("ask") for line in self.listener.log)


def _listed(log: Sequence[str]) -> str:
    return ", ".join(log) if log else "nothing"


def nothing_is_lost(impl: ModuleType) -> None:
    """One message after the other, with a replay and without."""
    for replay in (True, False):
        stream = Stream(impl, replay)
        stream.connect()
        stream.reply()
        stream.send(True, True, True)


def you_came_late(impl: ModuleType) -> None:
    """The first message that you see is number 3."""
    stream = Stream(impl, replay=False)
    stream.send(False, False, False)
    stream.connect()
    stream.send(True, True)
    stream = Stream(impl)
    stream.send(False, False, False)
    stream.connect()
    stream.send(True, True)
    stream.reply()
    stream.send(True)


def you_came_too_late(impl: ModuleType) -> None:
    """The buffer has no longer what was sent first."""
    stream = Stream(impl, keeps=2)
    stream.send(False, False, False, False)
    stream.connect()
    stream.reply()
    stream.send(True)


def a_gap(impl: ModuleType) -> None:
    """Messages are lost on the way, and asked for."""
    stream = Stream(impl)
    stream.connect()
    stream.reply()
    stream.send(True, False, False, True, hint=1)
    stream.reply(hint=1)
    stream.send(True)
    stream = Stream(impl, replay=False)
    stream.connect()
    stream.send(True, False, False, True, True)


def live_ones_wait(impl: ModuleType) -> None:
    """Live messages come while the answer comes: some of them are in it, some are not."""
    stream = Stream(impl)
    stream.connect()
    stream.send(True, hint=1)
    stream.reply(1)
    stream.send(True, True, hint=1)
    stream.reply(hint=1)
    stream.send(True)


def lost_while_you_wait(impl: ModuleType) -> None:
    """A message is lost while the answer comes, and newer than the answer: you ask once more."""
    for another in (False, True):
        stream = Stream(impl)
        stream.send(False, False)
        stream.connect()
        stream.reply(1)
        stream.send(False, True, True, hint=2)
        if another:
            stream.another_rank()
        stream.reply(hint=2)
        stream.send(True)


def asking_does_not_help(impl: ModuleType) -> None:
    """What is missing is not in the buffer any more: it is lost, and nobody asks for ever."""
    stream = Stream(impl, keeps=1)
    stream.connect()
    stream.reply()
    stream.send(True, False, False, True, True, hint=2)
    stream.reply(hint=2)
    stream.send(True)


def lost_while_nothing_is_new(impl: ModuleType) -> None:
    """The answer says nothing new, and meanwhile a message is lost: you ask once more."""
    stream = Stream(impl)
    stream.connect()
    stream.reply()
    stream.send(True, True)
    stream.connect()
    stream.reply(1)
    stream.send(False, True, True, hint=2)
    stream.reply(hint=2)
    stream.send(True)


def a_connection_breaks_while_you_wait(impl: ModuleType) -> None:
    """What was held may be of the publisher before."""
    stream = Stream(impl)
    stream.connect()
    stream.reply()
    stream.send(True, False, True)
    stream.begin_anew()
    stream.send(False)
    stream.connect(hint=1)
    stream.reply(hint=1)
    stream.send(True)
    stream = Stream(impl)
    stream.send(False)
    stream.connect()
    stream.send(True, True)
    stream.begin_anew()
    stream.send(True, True, hint=1)
    stream.reply(hint=1)
    stream.send(True)


def another_publisher(impl: ModuleType) -> None:
    """The publisher begins anew: seen by a live number, by the answer's first message, and by its end."""
    stream = Stream(impl)
    stream.connect()
    stream.reply()
    stream.send(True, True)
    stream.begin_anew()
    stream.send(True, hint=1)
    stream.reply(hint=1)
    stream.send(True)
    for count in (1, 3):  # its answer ends before the last message, or has another one there
        stream.begin_anew()
        stream.send(*[False] * count)
        stream.connect(hint=1)
        stream.reply(hint=1)
        stream.send(True)


def messages_that_wait_for_another_publisher(impl: ModuleType) -> None:
    """It is the answer that shows that the publisher began anew: what is held is of the new one."""
    stream = Stream(impl, keeps=3)
    stream.connect()
    stream.make_answer()
    stream.send(True, True)  # are held, and have their turn at the end of the answer
    stream.reply(hint=2)
    stream.begin_anew()
    stream.send(False, False, False, True, hint=1)
    stream.reply(1, hint=1)
    stream.send(False, False, True)
    stream.reply(hint=2)
    stream = Stream(impl)
    stream.connect()
    stream.reply()
    stream.send(True, True)
    stream.begin_anew()
    stream.send(False, False, True, True, hint=1)
    stream.reply(1, hint=1)  # another one: 2 and 3 stay held, and 3 is the newest
    stream.begin_anew()
    stream.send(False, False, False, True, hint=1)  # 3 once more: yet another one
    stream.reply(hint=2)


def an_answer_that_is_empty(impl: ModuleType) -> None:
    """There is a buffer, and nothing in it: without a new reason nobody asks again."""
    for waits in ((True,), (False, True)):
        stream = Stream(impl)
        stream.connect()
        stream.reply()
        stream.send(False, False, True, hint=1)
        stream.answer = []
        stream.send(*waits, hint=2)
        stream.reply(hint=2)
    stream = Stream(impl)
    stream.connect()
    stream.reply()
    stream.send(True, True)
    stream.begin_anew()
    stream.send(False, True, hint=1)
    stream.answer = []
    stream.reply(hint=2)


def another_publisher_without_a_replay(impl: ModuleType) -> None:
    """The same where nobody can be asked."""
    stream = Stream(impl, replay=False)
    stream.connect()
    stream.send(True, True, True)
    stream.begin_anew()
    stream.connect()
    stream.send(False, True, True)


# ---------------------------------------------------------------------- hit


def forest_of(*events: Record) -> dict[Any, Block]:
    """What is known after these events."""
    forest, own = engine.RankBlocks(), {}
    for event in events:
        forest.take(event)
    bring_in_line(own, forest)
    return own


def hits(
    impl: ModuleType,
    own: dict[Any, Block],
    asked: Sequence[tuple[Sequence[int], tuple[str, ...], int]],
    what: str,
) -> None:
    """hit of each (tokens, space), which should be the third; blocks stay as they are."""
    before = {
        name: (block.parent, block.tokens, block.space, set(block.media), block.seen)
        for name, block in own.items()
    }
    for tokens, space, wanted in asked:
        got = impl.hit(own, tokens, space) if space else impl.hit(own, tokens)
        words = f"{what}: hit of {list(tokens)}{f' in space {space}' if space else ''} is {shown(got)}"
        expect(whole(got) == wanted, f"{words}; it should be {wanted}")
    after = {
        name: (block.parent, block.tokens, block.space, set(block.media), block.seen)
        for name, block in own.items()
    }
    expect(before == after, f"{what}: hit changed blocks; they should stay as they are")


def tokens_of(*names: int) -> list[int]:
    """The tokens of blocks as `told` has them."""
    return [token for name in names for token in (10 * name, 10 * name + 1)]


def whole_blocks(impl: ModuleType) -> None:
    """Prompts that agree with what is there for a while, for all of it, and for nothing."""
    own = forest_of(told([11, 12, 13], None), told([14], 12))
    asked = [
        (tokens_of(11, 12, 13), 6), (tokens_of(11, 12, 13, 99), 6), (tokens_of(11, 12, 14), 6),
        (tokens_of(11, 12), 4), (tokens_of(11, 12)[:3], 2), (tokens_of(11)[:1], 0), (tokens_of(12, 13), 0),
        (tokens_of(11, 13), 2), (tokens_of(11, 11), 2), ([110, 9], 0), ([], 0),
    ]  # fmt: skip
    hits(impl, own, [(tokens, (), wanted) for tokens, wanted in asked], "blocks 11 12 13, and 14 after 12")


def holes_end_it(impl: ModuleType) -> None:
    """A hole in the middle, and a copy in host memory."""
    own = forest_of(told([11, 12, 13], None), Removed((12,)))
    hits(impl, own, [(tokens_of(11, 12, 13), (), 2)], "blocks 11 12 13, and 12 is a hole")
    own = forest_of(told([11, 12, 13], None), told([12], None, "CPU", tokens=False), Removed((12,)))
    hits(impl, own, [(tokens_of(11, 12, 13), (), 6)], "blocks 11 12 13, and 12 is in host memory only")
    own[12].media.clear()
    hits(impl, own, [(tokens_of(11, 12, 13), (), 2)], "the same blocks, and 12 left host memory, too")


def orphans_are_not_hit(impl: ModuleType) -> None:
    """What follows a placeholder, and what follows it once it is told."""
    own = forest_of(told([13, 14], 12))
    asked: list[Any] = [(tokens_of(13, 14), (), 0), (tokens_of(12, 13), (), 0)]
    hits(impl, own, asked, "blocks 13 14 after 12, which was never told")
    own = forest_of(told([13, 14], 12), told([11, 12], None))
    asked = [(tokens_of(11, 12, 13, 14), (), 8), (tokens_of(13, 14), (), 0)]
    hits(impl, own, asked, "blocks 13 14 after 12, and then 11 12")


def any_number_is_a_name(impl: ModuleType) -> None:
    """A block that is called 0, with one behind it."""
    hits(impl, forest_of(told([0, 1], None)), [(tokens_of(0, 1), (), 4)], "blocks 0 1")


def spaces_are_apart(impl: ModuleType) -> None:
    """The same tokens for two tenants."""
    rows = ((1, 2), (3, 4))
    one, two = (
        Stored((name, name + 1), None, rows, 2, spaces=((space,),) * 2)
        for name, space in ((1, "a"), (5, "b"))
    )
    own = forest_of(one, two, Removed((6,)))
    asked: list[Any] = [
        ([1, 2, 3, 4], ("a",), 4),
        ([1, 2, 3, 4], ("b",), 2),
        ([1, 2, 3, 4], (), 0),
        ([1, 2], ("a", "b"), 0),
    ]
    hits(impl, own, asked, "[1 2] [3 4] in space ('a',), [1 2] in space ('b',)")
    own = forest_of(Stored((1, 2), None, rows, 2, spaces=(("a", "b"), ("a", "b", "image"))))
    asked = [([1, 2, 3, 4], ("a", "b"), 2), ([1, 2], ("b", "a"), 0), ([1, 2], ("a",), 0)]
    hits(impl, own, asked, "[1 2] in space ('a', 'b'), then [3 4] in space ('a', 'b', 'image')")


EXERCISES = [
    Exercise(
        "read_batch", 3,
        [
            maps_in_a_list, maps_in_a_map, lists_in_a_list, lists_and_maps_in_one, lists_of_all_lengths,
            fields_that_are_missing, what_nobody_knows, tokens_that_are_not_told, sizes_that_are_not_so,
            spaces_of_blocks, salts_in_lists, names_of_all_kinds,
        ],
        hints=(
            "Make one shape of two: turn a list into a map with the same names first, and read maps only.",
            "dict(zip(names, event[1:])) stops where the shorter of the two ends: so it takes short lists "
            "and long ones.",
            "Compare len(token_ids) with block_size * len(block_hashes) before you cut; where tokens are "
            "not told, there is nothing to compare.",
        ),
    ),
    Exercise(
        "store", 2,
        [
            a_prompt_in_two_parts, a_copy_in_host_memory, a_late_start, a_hole_that_is_filled,
            told_as_something_else, spaces_are_kept, copies_of_what_is_not_known,
        ],
        hints=(
            "Walk through event.hashes with a variable for the block before: event.parent at first, then "
            "each name.",
            "A parent that is not in blocks gets Block(None, (), (), set(), False) there. When it is told "
            "itself, it is in blocks and not seen: treat it like a new one.",
            "Ask first: is it known and seen? Then only its media change. Else: are its tokens told? If "
            "not, leave it.",
        ),
    ),
    Exercise(
        "remove", 2,
        [
            a_leaf_leaves, one_medium_of_two, a_hole_stays, an_orphan_leaves, removals_of_what_is_not_there,
            everything_is_cleared,
        ],
        hints=(
            "First take the medium away. Then ask whether the block is in any, and whether any block has it "
            "as parent.",
            "When a block goes, look at its parent: is that in no medium, and was this the last that "
            "followed it? Then it goes too, and so on upwards.",
            "Take the medium away only where the name is in blocks and the medium in its media; a "
            "placeholder has none.",
        ),
    ),
    Exercise(
        "order", 4,
        [
            nothing_is_lost, you_came_late, you_came_too_late, a_gap, live_ones_wait, lost_while_you_wait,
            asking_does_not_help, lost_while_nothing_is_new, another_publisher,
            messages_that_wait_for_another_publisher, a_connection_breaks_while_you_wait,
            an_answer_that_is_empty, another_publisher_without_a_replay,
        ],
        hints=(
            "Write three helpers first: one that asks, one that begins anew, one that gives a message its "
            "turn. The four functions are short then.",
            "Compare with rank.last (what was delivered) or with rank.newest (what came live)? A message "
            "that an answer had already is no new publisher, and a live message that is held was not "
            "delivered yet.",
            "At the end of an answer: while something is held, look at the first. If its number is beyond "
            "rank.last + 1 and rank.again is True, ask and return with held as it is; else it has its turn.",
        ),
        functions=("connected", "live", "answer", "answered"),
    ),
    Exercise(
        "hit", 1,
        [whole_blocks, holes_end_it, orphans_are_not_hit, any_number_is_a_name, spaces_are_apart],
        hints=(
            "Begin with parent None and 0 tokens. Look for a block with this parent and the next tokens; go "
            "on from it.",
            "A placeholder has parent None, too, and its () are the beginning of every prompt: ask for "
            "seen, or for media.",
        ),
    ),
]  # fmt: skip
