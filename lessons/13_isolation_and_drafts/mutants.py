"""Plausible wrong solutions of lesson 13."""

from __future__ import annotations

from lessons.grading import Mutant

_SPACE, _OUT, _PAIRS, _TOKENS = "def space_of", "def outdated", "def to_pairs", "def to_tokens"
_COMMIT, _CACHED, _ACCEPT = "def commit", "def cached_tokens", "def accept"
_ROOM, _BACK = "def room_for", "def roll_back"


def _space(about: str, old: str, new: str) -> Mutant:
    return Mutant("namespaces", f"space_of: {about}", old, new, _SPACE)


def _out(about: str, old: str, new: str) -> Mutant:
    return Mutant("adapters", f"outdated: {about}", old, new, _OUT)


_NONE = "return None if salt is None else (PLAIN, salt)"
_ADAPTED = "return (ADAPTED, salt, loaded[adapter])"
_MISSING = "    if adapter not in loaded:\n"

NAMESPACES = [
    _space("the adapter's name, not its weights", _ADAPTED, "return (ADAPTED, salt, adapter)"),
    _space("name and digest: another name of the same weights misses", _ADAPTED,
           "return (ADAPTED, salt, loaded[adapter], adapter)"),
    _space("forgets the salt under an adapter", _ADAPTED, "return (ADAPTED, None, loaded[adapter])"),
    _space("an empty salt counts as none", _NONE, "return (PLAIN, salt) if salt else None"),
    _space("a salt of 0 or '' under an adapter is none", _ADAPTED,
           "return (ADAPTED, salt or None, loaded[adapter])"),
    _space("a salt alone is its own key, and can look like an adapter's", _NONE, "return salt"),
    _space("no word for the kind: (salt,) beside (digest,)", f"{_NONE}\n{_MISSING}",
           f"return None if salt is None else (salt,)\n{_MISSING}"
           "        raise ValueError(f'adapter {adapter!r} is not loaded')\n"
           "    if salt is None:\n        return (loaded[adapter],)\n    if adapter not in loaded:\n"),
    _space("leaves out what is None: a salt that is a digest opens the adapter",
           f"{_NONE}\n{_MISSING}",
           "return None if salt is None else tuple(x for x in (PLAIN, salt) if x is not None)\n"
           f"{_MISSING}        raise ValueError(adapter)\n"
           "    return tuple(x for x in (PLAIN, salt, loaded[adapter]) if x is not None)\n"
           f"{_MISSING}"),
    _space("the salt as text: 1 and '1' are one tenant", _ADAPTED,
           "return (ADAPTED, str(salt), loaded[adapter])"),
    _space("repr of the salt: 1 and 1.0 are two tenants", _NONE,
           "return None if salt is None else (PLAIN, repr(salt))"),
    _space("joins salt and digest to one text", _ADAPTED, "return f'{salt}:{loaded[adapter]}'"),
    _space("one text for each, and a salt may be such a text", f"{_NONE}\n{_MISSING}",
           f"return None if salt is None else f'{{salt}}'\n{_MISSING}"
           "        raise ValueError(adapter)\n    return f'{salt}:{loaded[adapter]}'\n"
           f"{_MISSING}"),
    _space("a tuple as salt is spread out", _ADAPTED,
           "return (ADAPTED, *(salt if isinstance(salt, tuple) else (salt,)), loaded[adapter])"),
    _space("salt and digest without an order", _ADAPTED, "return frozenset((salt, loaded[adapter]))"),
    _space("the hash instead of the value: that of 0 and that of '' are equal", _ADAPTED,
           "return hash((ADAPTED, salt, loaded[adapter]))"),
    _space("only the first eight letters of a digest", _ADAPTED,
           "return (ADAPTED, salt, loaded[adapter][:8])"),
    _space("keeps an adapter's first digest between calls", _ADAPTED,
           "return (ADAPTED, salt, globals().setdefault('_first', {}).setdefault(adapter, loaded[adapter]))"),
    _space("a KeyError for an adapter that is not loaded", _MISSING, "    if False:\n"),
    _space("an adapter that is not loaded gets a namespace", f"{_MISSING}"
           "        raise ValueError(f\"adapter {adapter!r} is not loaded\")\n"
           "    return (ADAPTED, salt, loaded[adapter])", "    return (ADAPTED, salt, loaded.get(adapter))"),
    _space("does not say which adapter is missing", "adapter {adapter!r} is not loaded", "not loaded"),
    _space("neither salt nor adapter has a key of its own, not None", _NONE, "return (PLAIN, salt)"),
    _space("with nothing loaded no adapter is asked for", "    if not adapter:",
           "    if not adapter or not loaded:"),
]  # fmt: skip

_MINE = "isinstance(space, tuple) and space[0] == ADAPTED"
_GONE = "space[2] not in loaded.values()"
_ASKED = f"return {_MINE} and {_GONE}"
_HEAD = (
    "loaded[adapter])\n\n\ndef outdated(space: Hashable, loaded: Mapping[str, str]) -> bool:\n"
    f'    """Whether no request can ask for this namespace now."""\n    {_ASKED}'
)

ADAPTERS = [
    Mutant("adapters", "space_of has the name, and outdated looks for the name", _HEAD,
           _HEAD.replace("loaded[adapter])", "adapter)").replace("loaded.values()", "loaded"), _SPACE),
    _out("looks for the digest among the names", _GONE, "space[2] not in loaded"),
    _out("the other way round", _GONE, "space[2] in loaded.values()"),
    _out("a salt alone is outdated, too", _ASKED,
         "return isinstance(space, tuple) and space[-1] not in loaded.values()"),
    _out("knows no None", _MINE, "space[0] == ADAPTED"),
    _out("only what has no salt can be outdated", _MINE, f"{_MINE} and space[1] is None"),
    _out("with nothing loaded nothing is outdated", _MINE, f"bool(loaded) and {_MINE}"),
    _out("once outdated, always outdated", _ASKED,
         f"gone = globals().setdefault('_gone', set())\n    if {_MINE} and {_GONE}:\n"
         "        gone.add(space)\n    return space in gone"),
    _out("keeps its first answer between calls", _ASKED,
         f"return globals().setdefault('_said', {{}}).setdefault(space, {_MINE} and {_GONE})"),
    _out("the beginning of another digest is enough", _GONE,
         "not any(digest.startswith(space[2]) for digest in loaded.values())"),
    _out("looks for a loaded digest anywhere in the key, so in the salt as well", _GONE,
         "not set(space[1:]) & set(loaded.values())"),
    _out("looks at the adapter loaded first only", _GONE, "space[2] not in list(loaded.values())[:1]"),
    _out("looks at the adapter loaded last only", _GONE, "space[2] not in list(loaded.values())[-1:]"),
    _out("gives back the digest, not True", _ASKED, f"return {_MINE} and {_GONE} and space[2]"),
    _out("nothing is ever outdated", _ASKED, "return False"),
    _out("whatever has an adapter is outdated", _ASKED, f"return {_MINE}"),
]  # fmt: skip


def _big(about: str, old: str, new: str, after: str) -> Mutant:
    return Mutant("bigrams", f"{after[4:]}: {about}", old, new, after)


_COUNT = "count = min(len(pairs), len(row)) // page_size * page_size"
_UNITS = "units = max(common - 1, 0) if pairs else common"
_USED = "return min(units, length - 1) // page_size * page_size"
_SPELT = "return [pair[0] for pair in pairs] + [pair[1] for pair in pairs[-1:]]"

BIGRAMS = [
    _big("a last pair with nothing behind it", "list(pairwise(tokens))", "list(pairwise([*tokens, 0]))",
         _PAIRS),
    _big("every second pair only", "list(pairwise(tokens))", "list(zip(tokens[::2], tokens[1::2]))", _PAIRS),
    _big("the token before, not the one behind", "list(pairwise(tokens))",
         "[(b, a) for a, b in pairwise(tokens)]", _PAIRS),
    _big("lists instead of pairs", "list(pairwise(tokens))", "[list(pair) for pair in pairwise(tokens)]",
         _PAIRS),
    _big("one token is a pair with itself", "return list(pairwise(tokens))",
         "return list(pairwise(tokens)) if len(tokens) != 1 else [(tokens[0], tokens[0])]", _PAIRS),
    _big("an iterator, used up after one look", "return list(pairwise(tokens))", "return pairwise(tokens)",
         _PAIRS),
    _big("equal pairs once", "list(pairwise(tokens))", "list(dict.fromkeys(pairwise(tokens)))", _PAIRS),
    _big("forgets the last token", _SPELT, "return [pair[0] for pair in pairs]", _TOKENS),
    _big("forgets the first token", _SPELT, "return [pair[1] for pair in pairs]", _TOKENS),
    _big("all tokens of all pairs", _SPELT, "return [token for pair in pairs for token in pair]", _TOKENS),
    _big("falls over no pairs", _SPELT, "return [pairs[0][0]] + [pair[1] for pair in pairs]", _TOKENS),
    _big("lets pairs by that do not meet", "if end != begin:", "if False:", _TOKENS),
    _big("looks only whether the second meets the first", "in pairwise(pairs):", "in pairwise(pairs[:2]):",
         _TOKENS),
    _big("stops where pairs do not meet and says nothing",
         "raise ValueError(f\"a pair ends with {end}, the next one begins with {begin}\")",
         "return []", _TOKENS),
    _big("takes the pairs out of the list, one by one", _SPELT,
         "tokens = [pairs[0][0]] if pairs else []\n    while pairs:\n"
         "        tokens.append(pairs.pop(0)[1])\n    return tokens", _TOKENS),
    _big("as many units as slots, known or not", "return pairs[:count], list(row[:count])",
         "count = len(row) // page_size * page_size\n    return pairs[:count], list(row[:count])", _COMMIT),
    _big("as many units as pairs, with a slot or not", _COUNT,
         "count = len(pairs) // page_size * page_size", _COMMIT),
    _big("one unit too few where slots end first", _COUNT,
         "count = min(len(pairs), max(len(row) - 1, 0)) // page_size * page_size", _COMMIT),
    _big("pages begun are pages", _COUNT, "count = min(len(pairs), len(row))", _COMMIT),
    _big("rounds to the nearest page", _COUNT,
         "count = min((min(len(pairs), len(row)) + page_size // 2) // page_size * page_size, "
         "len(pairs), len(row))", _COMMIT),
    _big("rounds up, and stops at what is there", _COUNT,
         "count = min(-(-min(len(pairs), len(row)) // page_size) * page_size, len(pairs), len(row))",
         _COMMIT),
    _big("slots of the second token of a pair", "list(row[:count]), list(row[count:])",
         "list(row[1 : count + 1]), list(row[count:])", _COMMIT),
    _big("the tail begins behind the last pair's second token", "list(row[count:])", "list(row[count + 1 :])",
         _COMMIT),
    _big("the tail is what has no unit, without the rest of the last page", "list(row[count:])",
         "list(row[len(pairs) :])", _COMMIT),
    _big("the last pages instead of the first", "return pairs[:count], list(row[:count]), list(row[count:])",
         "n = min(len(pairs), len(row))\n"
         "    return pairs[n - count : n], list(row[n - count : n]), list(row[: n - count]) + list(row[n:])",
         _COMMIT),
    _big("cuts the row that it was given", "return pairs[:count], list(row[:count]), list(row[count:])",
         "tail = list(row[count:])\n    del row[count:]\n    return pairs[:count], list(row), tail", _COMMIT),
    _big("gives back the very row where nothing is cut off",
         "return pairs[:count], list(row[:count]), list(row[count:])",
         "return pairs[:count], row if count == len(row) else list(row[:count]), "
         "list(row[count:]) if count else row", _COMMIT),
    _big("pages of 4 always", _COUNT, "count = min(len(pairs), len(row)) // 4 * 4", _COMMIT),
    _big("a fork costs nothing", _UNITS, "units = common", _CACHED),
    _big("a fork costs one token, of whatever unit", _UNITS, "units = max(common - 1, 0)", _CACHED),
    _big("nothing in common is less than nothing", _UNITS, "units = common - 1 if pairs else common",
         _CACHED),
    _big("a fork costs two tokens", _UNITS, "units = max(common - 2, 0) if pairs else common", _CACHED),
    _big("pays the fork of pairs after the last token, so twice", _USED,
         "return max(min(common, length - 1) - pairs, 0) // page_size * page_size", _CACHED),
    _big("uses the whole prompt", _USED, "return units // page_size * page_size", _CACHED),
    _big("whole pages first, then one token less", _USED,
         "return min(units // page_size * page_size, length - 1)", _CACHED),
    _big("a token less in any case, found or not", _USED,
         "return max(units - 1, 0) // page_size * page_size", _CACHED),
    _big("a page less for the last token even where it is not found",
         _USED, "return max(units // page_size * page_size - page_size, 0)", _CACHED),
    _big("counts pages, not tokens", _USED, "return min(units, length - 1) // page_size", _CACHED),
    _big("tokens, whatever the page", _USED, "return min(units, length - 1)", _CACHED),
    _big("pays the fork by whole pages", _UNITS,
         "units = max(common - page_size, 0) if pairs else common", _CACHED),
]  # fmt: skip


def _acc(about: str, old: str, new: str) -> Mutant:
    return Mutant("accept", f"accept: {about}", old, new, _ACCEPT)


_STOP = "if tokens[-1] != guess or ends(list(tokens)):"
_RESULT = "return tokens, len(tokens) - 1"
_START = "    tokens = [chosen[0]]\n"

ACCEPT = [
    _acc("keeps every draft", _STOP, "if False:"),
    _acc("never asks whether the reply is over", _STOP, "if tokens[-1] != guess:"),
    _acc("asks about the last token alone", "ends(list(tokens))", "ends(tokens[-1:])"),
    _acc("asks before the first token is there", _START, "    if ends([]):\n        return [], 0\n" + _START),
    _acc("asks about tokens behind a reply's end, and cuts afterwards", _START,
         "    n = 0\n    while n < len(draft) and draft[n] == chosen[n]:\n        n += 1\n"
         "    over = [k for k in range(1, n + 2) if ends(list(chosen[:k]))]\n"
         "    n = min([n, *(k - 1 for k in over)])\n    return list(chosen[: n + 1]), n\n" + _START),
    _acc("looks on behind the first wrong guess", "            break", "            continue"),
    _acc("counts guesses that are right by chance behind a wrong one", _RESULT,
         "return tokens, sum(a == b for a, b in zip(draft, chosen))"),
    _acc("keeps the slot of the guess that ends the reply", _RESULT,
         "hit = len(tokens) <= len(draft) and draft[len(tokens) - 1] == tokens[-1]\n"
         "    return tokens, len(tokens) - 1 + hit"),
    _acc("a reply that is over loses its last token",
         "        if tokens[-1] != guess or ends(list(tokens)):\n",
         "        if ends(list(tokens)):\n            return tokens[:-1] or tokens, max(len(tokens) - 2, 0)\n"
         "        if tokens[-1] != guess:\n"),
    _acc("only what was guessed joins", _RESULT, "return tokens[:-1], len(tokens) - 1"),
    _acc("all holds: the model's last token is forgotten", "zip(draft, chosen[1:], strict=True)",
         "zip(draft[:-1], chosen[1:])"),
    _acc("the first draft is not looked at", _START, "    tokens = [chosen[0]]\n    if draft:\n"
         "        tokens.append(chosen[1])\n        draft, chosen = draft[1:], chosen[1:]\n"),
    _acc("compares with the model's token one place further", "if tokens[-1] != guess or",
         "if behind != guess or"),
    _acc("a guess that is anywhere among the drafts holds", "tokens[-1] != guess or",
         "tokens[-1] not in draft or"),
    _acc("token 0 counts as no token", "if tokens[-1] != guess or", "if not guess or tokens[-1] != guess or"),
    _acc("counts the model's own token as kept", _RESULT, "return tokens, len(tokens)"),
    _acc("no draft, no token", _START, "    if not draft:\n        return [], 0\n" + _START),
    _acc("the wrong guess joins instead of the model's word", _RESULT,
         "n = len(tokens) - 1\n    return [*tokens[:-1], *(draft[n : n + 1] or tokens[-1:])], n"),
    _acc("hard-coded: token 2 ends a reply", "ends(list(tokens))", "tokens[-1] == 2"),
    _acc("takes the first token out of the model's list", _START,
         "    tokens = [chosen.pop(0)]\n    chosen = [tokens[0], *chosen]\n"),
]  # fmt: skip


def _roll(about: str, old: str, new: str, after: str = _BACK) -> Mutant:
    return Mutant("roll_back", f"{after[4:]}: {about}", old, new, after)


_ROOMS = "return min(wanted, left - 1, -length % page_size + free)"
_FIRST = "first = -(-end // page_size) * page_size"
_BOTH = "return list(row[:end]), list(row[first:])"

ROLL_BACK = [
    _roll("left, not one less", _ROOMS, "return min(wanted, left, -length % page_size + free)", _ROOM),
    _roll("two less than left, and never below none", _ROOMS,
          "return min(wanted, max(left - 2, 0), -length % page_size + free)", _ROOM),
    _roll("does not look at left", _ROOMS, "return min(wanted, -length % page_size + free)", _ROOM),
    _roll("forgets the rest of the row's last page", _ROOMS, "return min(wanted, left - 1, free)", _ROOM),
    _roll("a row that ends with a page has a whole one left", _ROOMS,
          "return min(wanted, left - 1, page_size - length % page_size + free)", _ROOM),
    _roll("what the last page has already, not what is left", _ROOMS,
          "return min(wanted, left - 1, length % page_size + free)", _ROOM),
    _roll("the last token is not in the row yet", _ROOMS,
          "return min(wanted, left - 1, max(-length % page_size - 1, 0) + free)", _ROOM),
    _roll("counts the last token's place as free", _ROOMS,
          "return min(wanted, left - 1, -(length - 1) % page_size + free)", _ROOM),
    _roll("all or nothing", _ROOMS,
          "most = min(wanted, left - 1)\n    return most if most <= -length % page_size + free else 0",
          _ROOM),
    _roll("whole pages of drafts only", _ROOMS,
          "return min(wanted, left - 1, -length % page_size + free) // page_size * page_size", _ROOM),
    _roll("free counts pages", _ROOMS,
          "return min(wanted, left - 1, -length % page_size + free * page_size)", _ROOM),
    _roll("only new pages or only the last page, the larger", _ROOMS,
          "return min(wanted, left - 1, max(-length % page_size, free))", _ROOM),
    _roll("at most four drafts", _ROOMS, "return min(wanted, left - 1, -length % page_size + free, 4)",
          _ROOM),
    _roll("gets what is wanted", _ROOMS, "return wanted", _ROOM),
    _roll("gives back slots of the page in which the row ends", _FIRST, "first = end"),
    _roll("rounds down: gives back what the row still has", _FIRST, "first = end // page_size * page_size"),
    _roll("a row that ends with a page keeps the next one", _FIRST,
          "first = (end // page_size + 1) * page_size"),
    _roll("the row keeps the rest of its last page", _BOTH, "return list(row[:first]), list(row[first:])"),
    _roll("forgets the drafts that are kept", "end = length + kept", "end = length"),
    _roll("one draft too many stays", "end = length + kept", "end = min(length + kept + 1, len(row))"),
    _roll("the last kept draft is given back", "end = length + kept", "end = length + max(kept - 1, 0)"),
    _roll("pages are counted from the first draft", _FIRST,
          "first = length + -(-kept // page_size) * page_size"),
    _roll("last slot first", _BOTH, "return list(row[:end]), list(row[first:])[::-1]"),
    _roll("sorts what it gives back", _BOTH, "return list(row[:end]), sorted(row[first:])"),
    _roll("cuts the row that it was given", _BOTH,
          "freed = list(row[first:])\n    del row[end:]\n    return list(row), freed"),
    _roll("returns the very row where every draft holds", _BOTH,
          "return row if end == len(row) else list(row[:end]), list(row[first:])"),
    _roll("page by page, whole pages only: the last one, begun, stays", _BOTH,
          "last = len(row) // page_size * page_size\n    return list(row[:end]), list(row[first:last])"),
    _roll("pages of 4 always", _FIRST, "first = -(-end // 4) * 4"),
    _roll("every draft goes back where one does not hold", "end = length + kept",
          "end = length + (kept if length + kept == len(row) else 0)"),
]  # fmt: skip

MUTANTS = NAMESPACES + ADAPTERS + BIGRAMS + ACCEPT + ROLL_BACK
