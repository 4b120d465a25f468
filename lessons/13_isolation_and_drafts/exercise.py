"""Lesson 13: when must equal tokens not share? Fill in the functions; README.md says what and why.

    pytest lessons/13_isolation_and_drafts        grades this file

and, as soon as one of them is written, the engine runs on it:

    python -m viz.live --speculative ngram --cache lessons/13_isolation_and_drafts/exercise.py

(to_pairs and commit: with --speculative eagle, whose tree is one of pairs).

Tokens, slots and positions are plain numbers. A list that you are given stays as it is; you return a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

# ---------------------------------------------------------------------- namespaces, 2 points


def space_of(salt: Hashable, adapter: str, loaded: Mapping[str, str]) -> Hashable:
    """The namespace of a request's KV. The tree lets two requests share only if theirs are equal.

    salt: what the caller wants to be kept apart by (a tenant, say), compared as a value with ==: None for
        none, else a text, a number or a tuple of these. 1 and 1.0 are one salt, 1 and "1" are two; "" and 0
        are salts like any other. It comes from outside: it may look like anything, also like a namespace of
        yours.
    adapter: the name of a LoRA adapter that computes on top of the model; "" for the model alone.
    loaded: the adapters that are loaded now: name -> digest. The digest (a text, short or long) says which
        weights they are: equal digests, equal weights. A name can be loaded again later with others.

    Returns anything that can be hashed:
    * equal for two requests if and only if their salts are equal and the same weights compute for them (under
      whatever name);
    * None for a request with neither salt nor adapter: the namespace of all who know of none.

    It is asked once, when the request arrives, and kept: `loaded` may change while the request runs.

    Raises:
        ValueError: for an adapter that is not loaded; its name is in the message.
    """
    raise NotImplementedError("todo: space_of")


# ---------------------------------------------------------------------- adapters, 2 points


def outdated(space: Hashable, loaded: Mapping[str, str]) -> bool:
    """Whether no request can ask for this namespace now, so that its leaves may be evicted before all others.

    space: what your space_of returned at some time, for some salt, adapter and `loaded` of then.
    loaded: as it is now.

    A namespace without an adapter can always be asked for. One with an adapter can be, as long as its weights
    are loaded under any name. Returns True or False. What is outdated now may be asked for again later, when
    the same weights come back.
    """
    raise NotImplementedError("todo: outdated")


# ---------------------------------------------------------------------- bigrams, 3 points


def to_pairs(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """The units of a draft head's tree: each token with the one behind it, as a tuple. One token, or none:
    no pair."""
    raise NotImplementedError("todo: to_pairs")


def to_tokens(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The tokens that a run of pairs spells; [] for no pairs.

    Raises:
        ValueError: where a pair does not begin with the token that the pair before it ends with.
    """
    raise NotImplementedError("todo: to_tokens")


def commit(
    tokens: Sequence[int], row: Sequence[int], page_size: int
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """What a request passes on to a tree of pairs.

    tokens: all that is known, prompt and reply. row: the slots of those that have KV, from the first one on:
        row[i] is the slot of tokens[i]; there are at most as many as tokens, often fewer.

    Unit i is the pair (tokens[i], tokens[i + 1]) and lies in row[i]: the head's KV there depends on both. A
    unit can be passed on if both its tokens are known and its slot is there. The tree takes whole pages of
    units only, from the first one on.

    Returns (pairs, slots, tail): the units that the tree takes, one slot for each, and the rest of the row,
    which stays the request's.
    """
    raise NotImplementedError("todo: commit")


def cached_tokens(common: int, length: int, page_size: int, pairs: bool) -> int:
    """How many tokens of a prompt are not computed again.

    length: tokens of the prompt, 1 at least. common: so many of its first tokens (0 to `length`), and no
        more, are the beginning of a text that lies in the tree. pairs: whether the tree's units are pairs, as
        to_pairs makes them; else they are tokens.

    The tree finds whole pages of units, and the request can use a token's slot if it finds its unit. One
    token of the prompt at least is always computed, since its logits say what comes next; what is used of the
    cache is whole pages still.
    """
    raise NotImplementedError("todo: cached_tokens")


# ---------------------------------------------------------------------- accept, 2 points


def accept(
    draft: Sequence[int], chosen: Sequence[int], ends: Callable[[list[int]], bool]
) -> tuple[list[int], int]:
    """Which drafts hold, once the model has computed them all in one pass.

    draft: n tokens that somebody guessed behind the request's last one.
    chosen: n + 1 tokens, the model's own. chosen[i] is what it says behind the first i drafts: worth
        something only if all of these hold; else it may be any number.
    ends(tokens): whether the reply is over with the last of these. tokens: a list of those that this pass
        has given the reply so far, 1 at least. Ask it only about tokens that the reply gets.

    The reply gets exactly what it would have got without drafts, one token after the other: the model's own
    token, and as long as it is what was guessed there and the reply is not over, the next one.

    Returns (tokens, kept): the tokens that join the reply, and how many drafts keep their slots. A draft
    keeps its slot if a token joins the reply that stands behind it.
    """
    raise NotImplementedError("todo: accept")


# ---------------------------------------------------------------------- roll_back, 3 points


def room_for(wanted: int, left: int, length: int, free: int, page_size: int) -> int:
    """How many drafts get slots before a pass.

    wanted: so many could be guessed. left: so many tokens the reply may still get, 1 at least; a pass gives
        it one token more than drafts hold. length: tokens in the request's row, the last one included, which
        this pass computes; drafts come behind it. free: slots of free pages, whole pages all of them.

    Pages are handed out whole. What is left of the page in which the row ends is the request's already and
    costs nothing. A draft pushes nobody out: it gets what is free, or nothing. None gets a slot that could
    not hold for lack of `left`.
    """
    raise NotImplementedError("todo: room_for")


def roll_back(row: Sequence[int], length: int, kept: int, page_size: int) -> tuple[list[int], list[int]]:
    """After a pass: the row as it goes on, and the slots that are free again.

    row: the request's slots, one for each token and behind them one for each draft; page after page, each
        page's slots one after the other. length: how many of them are tokens', not drafts'. kept: as accept
        says.

    Returns (row, freed): the row without the drafts that do not hold; and, in order, those of the slots given
    up that lie in pages in which the row has nothing left. The rest of the page in which the row ends stays
    the request's: its next token lies there.
    """
    raise NotImplementedError("todo: roll_back")
