"""Lesson 15: your own server. Fill in the functions; README.md says what and why.

    pytest lessons/15_your_own_server                         grades this file
    python -m viz.live --connect tcp://127.0.0.1:5557 --subscriber lessons/15_your_own_server/exercise.py

You are given (minirad/fleet/wire.py), as what `read_batch` returns and the others take:

Stored(hashes, parent, tokens, block_size, medium, spaces=spaces)      blocks came into a medium
    hashes       tuple of the blocks' names, each an int or bytes. Each block follows the one before it
                 (but where tokens are not told: there they need not)
    parent       name of the block that the first one follows; None where it begins a prompt
    tokens       tuple of the tokens of each block, tuples of ints; () where they are not told
    spaces       tuple of the space of each block, tuples of texts; () where no block has one
Removed(hashes, medium)      blocks left a medium
Cleared()                    nothing is left, in no medium

and (the beginning of lessons/grading/subscriber.py):

Block(parent, tokens, space, media, seen)     a block as you keep it; parent a name or None, tokens and space
    tuples, media a set of texts ("GPU", "CPU", ...), seen False where only its name was told

What you keep of a server is a dict `blocks` from the name of a block to its Block. Two kinds of blocks in it
are in no medium (their media are empty):
    a hole           was removed from its last medium while something follows it
    a placeholder    something follows it, but it was never told itself: Block(None, (), (), set(), False)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec  # noqa: F401  msgspec.msgpack.decode(payload) turns bytes into lists, dicts, ints, texts

from lessons.grading.subscriber import Block
from minirad.fleet.wire import Cleared, Hash, Record, Removed, Stored


class Rank(Protocol):
    replay: bool
    last: int
    payload: bytes
    newest: int
    asking: bool
    held: list[tuple[int, bytes]]
    top: int
    again: bool

    def deliver(self, seq: int, payload: bytes) -> Any: ...
    def lost(self, first: int, last: int) -> Any: ...
    def restart(self) -> Any: ...
    def ask(self, first: int) -> Any: ...


def read_batch(payload: bytes) -> tuple[float, list[Record]]:
    """One message of a server, whichever of the servers sent it: (its time in seconds, what it tells).

    payload: msgpack. Inside is a batch, in one of two shapes:

        [time, events]   or   [time, events, rank], or longer      a list (SGLang; vLLM up to 0.23)
        {"ts": time, "events": events, ...}                        a map (vLLM since)

    An event is a map with a "type", or a list that begins with it and goes on with the fields in this order:

        BlockStored         block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium,
                            lora_name, extra_keys
        BlockRemoved        block_hashes, medium
        AllBlocksCleared

    Maps and lists occur in either shape of batch, also both in one. block_hashes are always told, and of a
    BlockStored also token_ids and block_size. Any other field of a map may be missing, and so may those at
    the end of a list. Fields, and types of events, that you do not know are passed over: a server of
    tomorrow sends more than one of today.

    Stored   tokens: token_ids is one list for all blocks, each has block_size of them. None or [] means
             that tokens are not told: then tokens is (). A medium that is missing or None is "GPU".
             spaces: of a block, in this order and each text once: lora_name, cache_salt, and what
             extra_keys has for this block. extra_keys is a list with an entry for each block, None or a
             list of texts. None and "" name nothing. lora_id is for older servers: leave it out.
             A list has no place for cache_salt, but SGLang 0.5.18 and 0.5.19 tell it all the same: where
             a list has lora_name, they have a map {"cache_salt": salt}, and no adapter.
    Removed  as it is told; its medium as above.

    Do not believe a size: a BlockStored whose tokens do not fill its blocks exactly is passed over, and the
    rest of the batch is read all the same. The events come in the order in which they were told.
    """
    raise NotImplementedError("todo: read_batch")


def store(blocks: dict[Hash, Block], event: Stored) -> None:
    """Blocks came into event.medium: `blocks` is what it was told so far, and knows it afterwards.

    A block that is new gets its parent, tokens, space (() where event.spaces is ()) and the medium. If the
    block that it follows is not known, a placeholder takes its place: what follows is an *orphan*.
    A placeholder that is told at last becomes such a block; what follows it goes on following it.
    A block that is known and seen (a hole is) keeps its parent, tokens and space, and is in this medium, too.

    Where tokens are not told (event.tokens is ()), the blocks are copies of blocks that are known and seen:
    these are in this medium, too. What is not known, or a placeholder, stays as it was: no block is made of
    it.
    """
    raise NotImplementedError("todo: store")


def remove(blocks: dict[Hash, Block], event: Removed | Cleared) -> None:
    """Blocks left event.medium, or all left all media (Cleared; then no placeholder is left either).

    A block that is in another medium still is there. One that is in none and has something that follows it
    stays as a hole. Else it leaves `blocks`, and so do holes and placeholders above it which nothing follows
    now: one after the other, up to one that stays.
    What is not known, or not in this medium, is passed over. Names come in any order.
    """
    raise NotImplementedError("todo: remove")


# The next four are one exercise, `order`: the messages of one rank in their order.
#
# A publisher numbers its messages from 0 on. They come live, in order, and some get lost. It keeps the newest
# in a buffer which may be asked for (the *replay*), if it has one. You are given `rank`, on which you call
#
# rank.deliver(seq, payload)    message number seq is the next one. Each number once, in order
# rank.lost(first, last)        messages first to last will never come (both included)
# rank.restart()                the publisher began anew: nothing that was delivered so far counts
# rank.ask(first)               asks for all messages from number `first` on, as far as the buffer has them.
#                               What still comes of an earlier answer is thrown away for you
#
# and which keeps for you, as you set it (what is in brackets is there at first). Nothing else is to be
# remembered: with another rank that has the same values it must go on alike.
#
# rank.replay     whether anybody can be asked. The only one that is not yours to set
# rank.last       number of the last message that was delivered [-1]
# rank.payload    what that message was [b""]
# rank.newest     number of the newest live message [-1]
# rank.asking     an answer is awaited [False]
# rank.held       live messages that wait for the end of it, in order: (seq, payload) [[]]
# rank.top        the highest number in this answer so far, -1 for none [-1]
# rank.again      asking once more may help [False]
#
# The same three things are done in several places:
#
# Asking: rank.ask, from rank.last on (from 0 where nothing was delivered); asking is True, top -1, again
#     False. The last message is asked for once more on purpose: so you see whether the publisher is still the
#     same.
# Beginning anew: rank.restart(); last is -1 and payload b"" again; newest is the number of the last message
#     that is held, or -1. Then, if there is a replay, ask (so from 0).
# A message has its turn: if its number is not beyond rank.last, you had it: it is passed over. If some are
#     missing between rank.last and it, these are lost. Then deliver it, and set last and payload.


def connected(rank: Rank) -> None:
    """There is a connection, the first one or another. You may have come late, or missed something.

    With a replay: nothing stays held (the answer will have it), and you ask. Without one: nothing happens.
    """
    raise NotImplementedError("todo: connected")


def live(rank: Rank, seq: int, payload: bytes) -> None:
    """A message came live.

    If seq is not larger than rank.newest, the publisher began anew: nothing stays held, then begin anew as
    described above, and go on with this message. (In any case rank.newest is its number afterwards.)

    * You are waiting for an answer: it is held. If its number is beyond rank.newest + 1, as that was just
      before it (so after beginning anew), again is True: what is missing may have been sent after the answer
      was made.
    * You are not, some are missing before it, and there is a replay: hold it, and ask.
    * Else it has its turn.
    """
    raise NotImplementedError("todo: live")


def answer(rank: Rank, seq: int, payload: bytes) -> None:
    """A message of the answer. Only called while rank.asking. The numbers of an answer go up by one each; but
    the first may be beyond what you asked for, as the buffer no longer has what was before.

    rank.top is its number now. If it is number rank.last and not what was delivered as that, the publisher
    began anew: do as described above (what is held stays held), and that is all. Else those that are held
    and have a smaller number have their turn first, and then this message. If it was delivered, again is
    True. Do not wait for the end of the answer: it may be long.
    """
    raise NotImplementedError("todo: answer")


def answered(rank: Rank) -> None:
    """The answer is complete (it may have been empty). Only called while rank.asking.

    If it did not come as far as rank.last, this publisher never sent that message: it began anew, do as
    described above, and that is all.
    Else those that are held have their turn, one after the other. But if some are missing before one of them,
    and again is True, ask instead: this one and those after it stay held, and that is all for now. (If again
    is False, asking has not helped, and they are lost.) When nothing is held any more you are not asking any
    more.
    """
    raise NotImplementedError("todo: answered")


def hit(blocks: dict[Hash, Block], tokens: Sequence[int], space: tuple[str, ...] = ()) -> int:
    """How many tokens at the beginning of this prompt the server surely has, in whole blocks: what it need
    not compute. (A router asks this of each rank.)

    From the first block of a prompt (its parent is None) on, each block follows the one before it, has
    exactly the prompt's next tokens and exactly this space, and is in any medium. A hole ends it. What
    follows a placeholder is never hit: nobody knows which prompts it belongs to. `blocks` stays as it is.
    """
    raise NotImplementedError("todo: hit")
