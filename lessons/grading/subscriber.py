"""A student's functions as what follows a server's KV events.

    python -m viz.live --connect tcp://127.0.0.1:5557 --subscriber lessons/15_your_own_server/exercise.py

What is written of lesson 15 takes the engine's place, the rest is the engine's own: `read_batch` that of
fleet/wire.Decoder, `store` and `remove` that of fleet/blocks.RankBlocks, the four of `order` (all of them or
none) that of fleet/order.Order. The page draws what they make of the messages, right or wrong; where they
raise or return what cannot be drawn, following ends with a sentence that names the function and the moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lessons.grading.spec import students_file
from lessons.grading.words import said, shown
from minirad.fleet import blocks, order
from minirad.fleet.wire import Batch, Cleared, Decoder, Hash, Record, Removed, Stored
from minirad.own_code import last_line

ORDER = ("connected", "live", "answer", "answered")
PARTS = ("read_batch", "store", "remove", *ORDER)


@dataclass(slots=True)
class Block:
    """A block as lesson 15 keeps it.

    parent: name of the block that it follows, None where it begins a prompt. space: what names its namespace.
    media: where it is. seen: False where only its name was told, as another one's parent.
    """

    parent: Hash | None
    tokens: tuple[int, ...]
    space: tuple[str, ...]
    media: set[str]
    seen: bool = True


@dataclass
class Rank:
    """What lesson 15's `order` keeps of a rank; a subclass says what becomes of what it tells."""

    replay: bool
    last: int = -1
    payload: bytes = b""
    newest: int = -1
    asking: bool = False
    held: list[tuple[int, bytes]] = field(default_factory=list)
    top: int = -1
    again: bool = False

    def deliver(self, seq: int, payload: bytes) -> None:
        """Message number seq is the next one."""
        raise NotImplementedError

    def lost(self, first: int, last: int) -> None:
        """Messages first to last will never come."""
        raise NotImplementedError

    def restart(self) -> None:
        """The publisher began anew."""
        raise NotImplementedError

    def ask(self, first: int) -> None:
        """Asks for all messages from `first` on."""
        raise NotImplementedError


class SubscriberBroke(Exception):
    """A student's function raised, or gave what cannot be drawn; the message is one sentence."""


class Subscriber:
    """What is written in a file, each in the engine's place. parts: the student's functions by name."""

    broke = SubscriberBroke

    def __init__(self, file: Path, parts: dict[str, Callable[..., Any]]) -> None:
        self.file = file
        self.missing = [name for name in PARTS if name not in parts]
        if not set(ORDER) <= parts.keys():  # one state, one author
            parts = {name: part for name, part in parts.items() if name not in ORDER}
        self.parts = parts

    @property
    def line(self) -> str:
        """What is used and what is not written yet, in one line."""
        line = f"your subscriber: {', '.join(self.parts)}"
        if self.missing:
            line += f"; not written yet, so the engine's own: {', '.join(self.missing)}"
        if 0 < len(set(ORDER) & set(self.missing)) < len(ORDER):
            line += f" (of {', '.join(ORDER)} all are needed)"
        return line

    def call(self, name: str, moment: str, *arguments: Any) -> Any:
        """Calls a student's function; SubscriberBroke, which names it and the moment, where it raises."""
        try:
            return self.parts[name](*arguments)
        except (SubscriberBroke, KeyboardInterrupt):
            raise
        except BaseException as error:
            found = last_line(error, str(self.file))
            where = f" ({self.file.name}, line {found[1]})" if found else ""
            raise SubscriberBroke(f"your {name} raised {said(error)}{where}, at {moment}") from error

    def decoder(self) -> Decoder:
        """Reads a rank's payloads."""
        return StudentDecoder(self) if "read_batch" in self.parts else Decoder()

    def order(self, listener: order.Listener, replay: bool) -> order.Order:
        """Puts a rank's messages into their order."""
        return StudentOrder(self, listener, replay) if "live" in self.parts else order.Order(listener, replay)

    def blocks(self, listener: blocks.Listener | None = None) -> blocks.RankBlocks:
        """Keeps a rank's blocks."""
        written = {"store", "remove"} & self.parts.keys()
        return StudentBlocks(self, listener) if written else blocks.RankBlocks(listener)


def student_subscriber(path: str | Path) -> Subscriber:
    """The functions of an exercise file that are written.

    ValueError for a file that cannot be loaded, or in which everything is still to do.
    """
    file, (own, todo) = Path(path), students_file(path)
    found = Subscriber(
        file, {name: own[name] for name in PARTS if name not in todo and callable(own.get(name))}
    )
    if not found.parts:
        some = "" if set(ORDER) <= set(found.missing) else f"; of {', '.join(ORDER)} all are needed"
        raise ValueError(
            f"{file}: nothing is written yet that could follow a server ({', '.join(PARTS)}){some}"
        )
    return found


# ---------------------------------------------------------------------- reading


class StudentDecoder(Decoder):
    """The student reads; what lesson 15 leaves out (pairs of tokens, other cache groups) the engine does."""

    def __init__(self, subscriber: Subscriber) -> None:
        super().__init__()
        self._subscriber = subscriber

    def decode(self, payload: bytes) -> Batch:
        """The next payload; WireError where nothing can be read in it."""
        ours = super().decode(payload)
        if any(getattr(each, "pairs", False) or getattr(each, "other_group", False) for each in ours.events):
            return ours
        moment = f"a message of {len(payload)} bytes with {len(ours.events)} events"
        found = self._subscriber.call("read_batch", moment, payload)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], list)):
            raise SubscriberBroke(
                f"your read_batch returned {shown(found)}, which is no (time, list), at {moment}"
            )
        ts, records = found
        if type(ts) not in (int, float) or not 0 <= ts < 1e14:
            raise SubscriberBroke(f"your read_batch returned the time {shown(ts)}, at {moment}")
        for record in records:
            if wrong := record_fault(record):
                raise SubscriberBroke(f"your read_batch returned {shown(record)}: {wrong}, at {moment}")
        return replace(ours, ts=float(ts), events=tuple(records))


def record_fault(record: Any) -> str:
    """What is wrong with a record as such, in words; "" for nothing."""
    if isinstance(record, Cleared):
        return ""
    if not isinstance(record, Stored | Removed):
        return "no Stored, Removed or Cleared"
    if not isinstance(record.hashes, tuple) or not all(type(name) in (int, bytes) for name in record.hashes):
        return "hashes must be a tuple of ints or bytes"
    if not isinstance(record.medium, str) or not record.medium:
        return 'medium must be a text, such as "GPU"'
    if isinstance(record, Removed):
        return ""
    if record.parent is not None and type(record.parent) not in (int, bytes):
        return "parent must be a block's name or None"
    if not isinstance(record.tokens, tuple) or len(record.tokens) not in (0, len(record.hashes)):
        return "tokens must be (), or a tuple with one tuple for each block"
    if not all(_is_row(row, int) and row for row in record.tokens):
        return "the tokens of a block must be a tuple of ints"
    if not isinstance(record.spaces, tuple) or len(record.spaces) not in (0, len(record.hashes)):
        return "spaces must be (), or a tuple with one tuple for each block"
    return (
        ""
        if all(_is_row(row, str) for row in record.spaces)
        else "the space of a block must be a tuple of texts"
    )


def _is_row(row: Any, kind: type) -> bool:
    return isinstance(row, tuple) and all(type(each) is kind for each in row)


# ---------------------------------------------------------------------- keeping


class StudentBlocks(blocks.RankBlocks):
    """A rank's forest that is what the student's dict says. What is not written the forest does itself."""

    def __init__(self, subscriber: Subscriber, listener: blocks.Listener | None) -> None:
        super().__init__(listener)
        self._subscriber = subscriber
        self._own: dict[Hash, Block] = {}

    def clear(self) -> None:
        """Nothing is left."""
        super().clear()
        self._own.clear()

    def take(self, event: Record) -> None:
        """Moves the student's dict on by one event, and the forest with it; or the other way round."""
        name = "store" if isinstance(event, Stored) else "remove"
        left_out = getattr(event, "pairs", False) or getattr(event, "other_group", False)
        if name not in self._subscriber.parts or left_out:
            super().take(event)
            self._own = {block.hash: _as_block(block) for block in self.blocks.values()}
            return
        if isinstance(event, Stored):
            self.stored += len(event.hashes)
        elif isinstance(event, Removed):
            self.removed += len(event.hashes)
        moment = _moment(event)
        self._subscriber.call(name, moment, self._own, event)
        self._follow(f"your {name} left", moment)

    def _follow(self, who: str, moment: str) -> None:
        """The forest becomes what the dict says. SubscriberBroke where that is no forest."""
        if wrong := forest_fault(self._own):
            raise SubscriberBroke(f"{who} {wrong}, at {moment}")
        for name in parents_first(self._own):
            theirs, block = self._own[name], self.blocks.get(name)
            if not theirs.seen:
                continue  # comes with what follows it
            if block is None or _content(_as_block(block)) != _content(theirs):
                size = len(theirs.tokens) or 1
                pairs = block is not None and block.pairs
                block = self._new(block, name, theirs.parent, theirs.tokens, size, pairs, theirs.space)
                if block is None:
                    raise SubscriberBroke(f"{who} more than {blocks.MOST_BLOCKS} blocks, at {moment}")
            self._set_media(block, frozenset(theirs.media))
        gone = [block for name, block in self.blocks.items() if name not in self._own]
        for block in gone:
            self._set_media(block, blocks.NOWHERE)
        for block in gone:
            if block.hash in self.blocks:
                self._drop(block)

    def _set_media(self, block: blocks.Block, media: frozenset[str]) -> None:
        if block.media | block.maybe != media:
            block.media, block.maybe, block.told = media, blocks.NOWHERE, None
            self.maybe.pop(block.hash, None)
            self._listener.held(block)


def forest_fault(own: Any) -> str:
    """Why a student's dict is no forest of blocks, in words; "" if it is."""
    if not isinstance(own, dict):
        return f"{shown(own)} in the place of the dict"
    if wrong := next(
        (f"{_named(name)} as {shown(block)}" for name, block in own.items() if not _is_block(block)), ""
    ):
        return f"block {wrong}"
    followed = Counter(block.parent for block in own.values())
    for name, block in own.items():
        if block.parent is not None and block.parent not in own:
            return f"block {_named(name)}, which follows {_named(block.parent)}, and that is not in blocks"
        if not block.media and not followed[name]:
            kind = "placeholder" if not block.seen else "hole"
            return f"block {_named(name)} as a {kind} that nothing follows"
        if not block.seen and (block.media or block.tokens or block.parent is not None):
            return f"placeholder {_named(name)} as {shown(block)}"
    return "" if len(parents_first(own)) == len(own) else "blocks that follow themselves"


def parents_first(own: dict[Hash, Block]) -> list[Hash]:
    """Names of all blocks that hang below a beginning or a placeholder, parents before what follows them."""
    below: dict[Hash | None, list[Hash]] = {}
    for name, block in own.items():
        below.setdefault(block.parent, []).append(name)
    found = list(below.get(None, ()))
    for name in found:  # grows meanwhile
        found += below.get(name, ())
    return found


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, Block) and (block.parent is None or type(block.parent) in (int, bytes))
        and _is_row(block.tokens, int) and _is_row(block.space, str)
        and isinstance(block.media, set) and all(type(medium) is str for medium in block.media)
    )  # fmt: skip


def _as_block(block: blocks.Block) -> Block:
    return Block(block.parent, block.tokens, block.own, set(block.media | block.maybe), block.seen)


def _content(block: Block) -> tuple[Any, ...]:
    return block.parent, block.tokens, block.space, block.seen


def _moment(event: Record) -> str:
    if isinstance(event, Cleared):
        return "AllBlocksCleared"
    first = f"the first {_named(event.hashes[0])}" if event.hashes else "none"
    return f"Block{type(event).__name__} of {len(event.hashes)} blocks in {event.medium}, {first}"


def _named(name: Any) -> str:
    return name.hex() if isinstance(name, bytes) else shown(name)


# ---------------------------------------------------------------------- order


class _LiveRank(Rank):
    """A rank of the page: what the student tells is handed on."""

    owner: StudentOrder
    delivered = -1

    def deliver(self, seq: int, payload: bytes) -> None:
        self.owner.told("deliver", type(seq) is int and type(payload) is bytes and seq > self.delivered, seq)
        self.delivered = seq
        self.owner.delivers(seq, payload)

    def lost(self, first: int, last: int) -> None:
        right = type(first) is type(last) is int and self.delivered < first <= last
        self.owner.told("lost", right, first, last)
        self.delivered = last
        why = (
            "the student's order says that they are lost"
            if self.replay
            else "there is no replay endpoint to ask"
        )
        self.owner.listener.gap(first, last, why)

    def restart(self) -> None:
        self.delivered = -1
        self.owner.listener.restart("the student's order says so")

    def ask(self, first: int) -> None:
        self.owner.told("ask", self.replay and type(first) is int and 0 <= first < 1 << 53, first)
        self.owner.asked()
        self.owner.listener.ask(first)


class StudentOrder(order.Order):
    """The student's four functions where an Order is: the clock, silences and patience are the engine's."""

    def __init__(self, subscriber: Subscriber, listener: order.Listener, replay: bool) -> None:
        super().__init__(listener, replay)
        self.listener, self._subscriber = listener, subscriber
        self.answering = -1  # the number of the message of an answer that is being taken
        self._now, self._doing = 0.0, ""
        self._rank = _LiveRank(replay)
        self._rank.owner = self

    def connected(self, now: float) -> None:
        """There is a connection, the first one or another."""
        self.up, self._heard = True, now
        self._call("connected", now, "a connection")

    def live(self, seq: int, payload: bytes, now: float) -> None:
        """A live message."""
        self._heard, self._wait = now, order.SILENCE
        self._call("live", now, f"live message {seq}", seq, payload)

    def answer(self, seq: int, payload: bytes, now: float) -> None:
        """A message of the answer."""
        if self.asking:
            self._heard = self._asked = now
            self.answering = seq
            self._call("answer", now, f"message {seq} of an answer", seq, payload)
            self.answering = -1

    def answers_end(self, now: float) -> None:
        """The answer is complete."""
        if self.asking:
            self._heard = self._asked = now
            self._call("answered", now, "the end of an answer")

    def _ask(self, now: float) -> None:
        """The engine wants to know whether anything was missed; asking goes as after a connection."""
        self._call("connected", now, "a silence")

    def _settle(self, now: float, why: str) -> None:
        """No answer came: it is over, and says nothing of the publisher."""
        self._rank.top, self._rank.again = max(self._rank.top, self._rank.last), False
        self._call("answered", now, why)

    def delivers(self, seq: int, payload: bytes) -> None:
        """The next message, of an answer or a live one."""
        replayed = seq == self.answering
        if replayed:
            self.checking, self._wait = False, order.SILENCE
        self.listener.deliver(seq, payload, replayed)

    def asked(self) -> None:
        """A question is put."""
        self._asked = self._now

    def told(self, what: str, right: bool, *numbers: Any) -> None:
        """SubscriberBroke where the student told what cannot be."""
        if not right:
            words = f"rank.{what}({', '.join(map(shown, numbers))})"
            before = (
                f"after message {self._rank.delivered}" if what != "ask" else f"with replay {self._replay}"
            )
            raise SubscriberBroke(f"your {self._doing} called {words} {before}")

    def _call(self, name: str, now: float, moment: str, *arguments: Any) -> None:
        self._now, self._doing = now, f"{name}, at {moment},"
        self._subscriber.call(name, moment, self._rank, *arguments)
        if not isinstance(self._rank.last, int) or not isinstance(self._rank.asking, bool):
            state = f"rank.last {shown(self._rank.last)}, rank.asking {shown(self._rank.asking)}"
            raise SubscriberBroke(f"your {name} left {state}, at {moment}")
        self.last, self.asking = self._rank.last, self._rank.asking
        self.checking = self.checking and self.asking
