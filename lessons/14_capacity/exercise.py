"""Lesson 14: how large a cache does a real trace deserve? Fill in the functions; README.md says what and why.

    pytest lessons/14_capacity                     grades this file
    python -m minirad simulate mooncake --eviction-policy lru,lessons/14_capacity/exercise.py
    python -m viz.live --eviction-policy lessons/14_capacity/exercise.py

A trace is a row of requests, each a list of block ids (whole numbers). An id says what a block holds, but its
KV depends on all that stands before it: a block is the same as another one only when the whole beginning up
to it is the same. [1, 2] and [3, 2] have no block in common; [1, 2, 5] and [1, 2, 6] have two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def needed_sizes(requests: Iterable[Sequence[int]]) -> list[list[int | None]]:
    """For each block of each request the smallest cache that has it: one pass for all sizes.

    The cache evicts single blocks, the least recently used first. A request is looked up as a whole, before
    anything of it is put in. Then its last block is used, then the one before it, ..., its first block at the
    end: so of one request the end goes first, and what is left can still be found from its beginning.

    requests: can be gone through once only; there may be empty ones.
    Returns, for each request in order, a list with a number for each of its blocks: a cache of so many blocks
    has it, a cache of one less does not. None where no cache could have it: nobody asked for it before.
    (What a cache does that cannot hold the longest request is nobody's concern here: see hit_curve.)

    The time must not grow with the number of sizes: there is no loop over sizes in it. A step that takes time
    in proportion to the cached blocks, such as finding a place in a list, may be made for each block.
    """
    raise NotImplementedError("todo: needed_sizes")


def hit_curve(needed: Sequence[Sequence[int | None]], sizes: Sequence[int]) -> list[int]:
    """How many blocks a cache of each size finds, over the whole trace.

    needed: what needed_sizes returns, of no requests, too. sizes: cache sizes in blocks, in any order, some
    of them twice perhaps; or none.
    Returns the number of blocks found (of all requests together) for each size, in the order of `sizes`.

    Raises ValueError for a size that is smaller than the longest request, and says the size in its message.
    The engine refuses a request that does not fit; the rest would then be another trace than this.
    """
    raise NotImplementedError("todo: hit_curve")


def claim_inclusion() -> tuple[list[list[int]], int, int]:
    """A claim found in print: "under lru a larger cache holds all that a smaller one holds".

    (And so it would never find less.)

    Returns (requests, small, large) that refute it for the engine's tree, which evicts whole leaves: at most
    eight requests of one to eight block ids each, small < large, every request fits into small. Served one
    after another, from an empty cache under lru with pages of one block (minirad.simulate.Replay does it),
    RadixCache finds more blocks in all with room for `small` blocks than with room for `large`.
    """
    raise NotImplementedError("todo: claim_inclusion")


def victim_key(node: Any) -> Any:
    """Who goes first when room is needed? The leaf with the smallest key; of equal ones the smaller node.id.

    node: a leaf of the engine's own tree, which holds the last part of some prompt. You may read

    len(node)           how many blocks it holds (1 or more): so much room is won when it goes
    node.last_access    the tick at which it was used last
    node.created        the tick at which it came in
    node.hits           how many look-ups found it since (each is somebody who did not compute it); where
                        a leaf is split, its end keeps `created` and `hits`
    node.id             its number: 1, 2, 3, ... in the order in which nodes were made

    A tick is one look-up or one insert. A request makes one of each here: two ticks from request to request.

    Returns anything that can be compared with the keys of other leaves: a number, a tuple, ... It changes
    nothing, and depends on these five alone: a key may change only when the leaf itself is used, since the
    heap hears of nothing else. No clock, no dice, no counting of calls, no memory.

    Graded on the public trace `mooncake`, one request after another, by the engine's own tree. Against lru,
    which is `return node.last_access`, it must find
    * on requests 1,501 to 3,000, in a cache of 1,800 blocks: at least 15% more blocks;
    * on the trace's second half, which you should not tune on: in a cache of 3,000 blocks at least 25% more,
      and in one of 6,000 not more than 3% less.
    """
    raise NotImplementedError("todo: victim_key")


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """How many bytes of KV a model keeps for one token.

    config: a model's config.json. Of its fields matter

    num_hidden_layers       each layer keeps one key and one value vector for every KV head
    num_attention_heads     query heads: they keep nothing
    num_key_value_heads     KV heads; missing or null: as many as query heads
    head_dim                numbers in one vector; missing or null: hidden_size // num_attention_heads
    dtype                   "float32" (4 bytes a number), "float16" or "bfloat16" (2); older files say
                            torch_dtype instead; where both are there, dtype counts; neither or null:
                            "float32"
    """
    raise NotImplementedError("todo: kv_bytes_per_token")


def gigabytes_deserved(
    needed: Sequence[Sequence[int | None]], block_bytes: int, block_worth: int, gigabyte_price: int
) -> int:
    """How many whole gigabytes of cache pay best. Graded together with kv_bytes_per_token.

    needed: what needed_sizes returns, of no requests, too. block_bytes: of the KV of one block. A gigabyte is
    10**9 bytes; g gigabytes hold as many whole blocks as fit into all of them together. block_worth: what is
    saved each time a block is found, gigabyte_price: what one gigabyte costs for as long as the trace runs;
    both in cents, 0 or more.

    Returns the number of gigabytes, 0 or more, for which savings less costs are greatest; of several such
    numbers the smallest. (0 gigabytes find nothing and cost nothing. One gigabyte holds the longest request.)
    """
    raise NotImplementedError("todo: gigabytes_deserved")
