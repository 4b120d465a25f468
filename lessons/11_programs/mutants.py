"""Wrong solutions of lesson 11, as learners write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean
from typing import Any

from lessons.grading import Mutant
from lessons.grading.desk import forked

_STEPS = "def steps"
_FORK = "def fork"
_SELECT = "def select"
_PROMPTS = "return times * prefix + sum(own)"
_TAKEN = "if filled >= chunk:"
_BY_DECODING = "hint + math.ceil(behind_the_hint / chunk) + new_tokens - 1"
_SERIAL = "return hint + len(own) * new_tokens"
_HINT = "    desk.wait([desk.send(prefix, 0)])\n    return desk.pin(prefix)"
_SENT = "names = [desk.send([*prefix, *own], new_tokens) for own in branches]"
_HELD = f"""    try:
        {_SENT}
        return list(desk.wait(names))
    finally:
        if pin is not None:
            desk.unpin(pin)
"""
_SCORED = "names = [desk.score([*prefix, *choice], len(prefix)) for choice in choices]"
_MEANS = "scores = [fmean(logprobs) for logprobs in desk.wait(names)]"
_CHOSEN = f"""    try:
        {_SCORED}
        {_MEANS}
    finally:
        desk.unpin(pin)
"""
_BEST = "return scores.index(max(scores)), scores"
_LEFT = "left = room - len(thought.tokens) - thought.new_tokens"
_BRANCHES = "branches = await s.fork(len(thought.children))"
_FITS = "if _slots(thought) <= room:"
_SLOTS = "return len(thought.tokens) + thought.new_tokens + below"
_BELOW = "below = sum(_slots(child) for child in thought.children)"
_ONE_BY_ONE = "found = [await child(branch, index) for index, branch in enumerate(branches)]"
_JOIN = "    await branches.join()\n"
_FLAT = "return [way for ways in found for way in ways]"

# ---------------------------------------------------------------------- computed_tokens

_KNOWN: dict[Any, int] = {}


def _first_step(prefix: int, own: Any, chunk: int) -> int:
    """How many branches the first step takes on."""
    filled = times = 0
    for tokens in own:
        if filled >= chunk:
            break
        filled += prefix + tokens
        times += 1
    return times


def _unless(
    costs: Callable[[int, Any, int], int],
) -> dict[str, Callable[..., int]]:
    """computed_tokens with another count for branches that come together without a hint."""

    def computed_tokens(prefix: int, own: Any, chunk: int, hint: bool, parallel: bool) -> int:
        return prefix + sum(own) if hint or not parallel else costs(prefix, own, chunk)

    return {"computed_tokens": computed_tokens}


def _computed_from_a_table(prefix: int, own: Any, chunk: int, hint: bool, parallel: bool) -> int:
    key = (prefix, len(own), chunk, hint, parallel)
    many = parallel and not hint
    times = _first_step(prefix, own, chunk) if many else 1
    return _KNOWN.setdefault(key, times * prefix + sum(own))


def _computed_eats_the_list(prefix: int, own: Any, chunk: int, hint: bool, parallel: bool) -> int:
    if hint or not parallel:
        return prefix + sum(own)
    filled = computed = 0
    while own:
        alone = filled < chunk
        tokens = own.pop(0)
        filled += prefix + tokens
        computed += prefix + tokens if alone else tokens
    return computed


def _ask_the_engine(prefix: int, own: Any, chunk: int, hint: bool, parallel: bool) -> int:
    return forked(prefix, tuple(own), 1, chunk, hint, parallel)[0]


def _only_what_it_got(prefix: int, own: Any, chunk: int) -> int:
    """The one that gets the rest of the chunk finds, a step later, what is missing of the prefix."""
    times = _first_step(prefix, own, chunk)
    before = sum(prefix + tokens for tokens in own[: times - 1])
    return (times - 1) * prefix + min(prefix, chunk - before) + sum(own)


# ---------------------------------------------------------------------- fork


def _fork_in_other_order(desk: Any, prefix: Any, branches: Any, new_tokens: int) -> list[list[int]]:
    pin = None
    if prefix:
        desk.wait([desk.send(prefix, 0)])
        pin = desk.pin(prefix)
    try:
        order = sorted(range(len(branches)), key=lambda place: len(branches[place]))
        names = {place: desk.send([*prefix, *branches[place]], new_tokens) for place in order}
        return desk.wait([names[place] for place in range(len(branches))])
    finally:
        if pin is not None:
            desk.unpin(pin)


def _fork_by_text(desk: Any, prefix: Any, branches: Any, new_tokens: int) -> list[list[int]]:
    pin = None
    if prefix:
        desk.wait([desk.send(prefix, 0)])
        pin = desk.pin(prefix)
    try:
        names: dict[Any, str] = {}
        for own in branches:
            if tuple(own) not in names:
                names[tuple(own)] = desk.send([*prefix, *own], new_tokens)
        return desk.wait([names[tuple(own)] for own in branches])
    finally:
        if pin is not None:
            desk.unpin(pin)


# ---------------------------------------------------------------------- explore


def _slots(thought: Any) -> int:
    return len(thought.tokens) + int(thought.new_tokens) + sum(_slots(child) for child in thought.children)


async def _think(s: Any, thought: Any) -> Any:
    s += thought.tokens
    await s.gen("thought", max_new_tokens=thought.new_tokens)
    return s.said("thought").token_ids


async def _explore_by_levels(s: Any, thought: Any, promising: Any, room: int) -> list[list[int]]:
    level, ended = [((), s, thought)], {}
    while level:
        below = []
        for place, state, each in level:
            reply = await _think(state, each)
            if promising(reply) and each.children:
                branches = await state.fork(len(each.children))
                rows = enumerate(zip(branches, each.children, strict=True))
                below += [((*place, i), branch, child) for i, (branch, child) in rows]
            else:
                ended[place] = state.tokens
        level = below
    return [ended[place] for place in sorted(ended)]


async def _explore_one_fork_for_each(s: Any, thought: Any, promising: Any, room: int) -> list[list[int]]:
    if not promising(await _think(s, thought)) or not thought.children:
        return [s.tokens]
    left = room - len(thought.tokens) - thought.new_tokens
    if _slots(thought) <= room:
        branches = await s.fork(len(thought.children))
        found = await branches.each(
            lambda branch, index: _explore_one_fork_for_each(branch, thought.children[index], promising, left)
        )
        await branches.join()
        return [way for ways in found for way in ways]
    ways = []
    for child in thought.children:
        branches = await s.fork(1)
        ways += await _explore_one_fork_for_each(branches[0], child, promising, left)
        await branches.join()
    return ways


async def _explore_as_they_end(s: Any, thought: Any, promising: Any, room: int) -> list[list[int]]:
    ways: list[list[int]] = []

    async def go(state: Any, each: Any, room: int) -> None:
        if not promising(await _think(state, each)) or not each.children:
            ways.append(state.tokens)
            return
        left = room - len(each.tokens) - each.new_tokens
        branches = await state.fork(len(each.children))
        if _slots(each) <= room:
            await branches.each(lambda branch, index: go(branch, each.children[index], left))
        else:
            for branch, child in zip(branches, each.children, strict=True):
                await go(branch, child, left)
        await branches.join()

    await go(s, thought, room)
    return ways


async def _explore_what_is_left_over(s: Any, thought: Any, promising: Any, room: int) -> list[list[int]]:
    if not promising(await _think(s, thought)) or not thought.children:
        return [s.tokens]
    left = room - len(thought.tokens) - thought.new_tokens
    branches = await s.fork(len(thought.children))
    if _slots(thought) <= room:
        found = await branches.each(
            lambda branch, index: _explore_what_is_left_over(branch, thought.children[index], promising, left)
        )
    else:
        found = []
        for branch, child in zip(branches, thought.children, strict=True):
            found.append(await _explore_what_is_left_over(branch, child, promising, left))
            left -= _slots(child)
    await branches.join()
    return [way for ways in found for way in ways]


_SIZES: dict[Any, int] = {}


def _slots_by_tokens(thought: Any) -> int:
    """Remembers the size of a thought by its tokens."""
    if thought.tokens not in _SIZES:
        below = sum(_slots_by_tokens(child) for child in thought.children)
        _SIZES[thought.tokens] = len(thought.tokens) + thought.new_tokens + below
    return _SIZES[thought.tokens]


def _longest(thought: Any) -> int:
    below = max((_longest(child) for child in thought.children), default=0)
    return len(thought.tokens) + int(thought.new_tokens) + below


MUTANTS = [
    # ------------------------------------------------------------ computed_tokens
    Mutant("computed_tokens", "the prefix once, hint or not", _PROMPTS, "return prefix + sum(own)"),
    Mutant("computed_tokens", "by every branch", _PROMPTS, "return len(own) * prefix + sum(own)"),
    Mutant(
        "computed_tokens",
        "not by the one that gets the rest of the chunk",
        _TAKEN,
        "if times and filled + prefix + tokens > chunk:",
    ),
    Mutant("computed_tokens", "a full step takes one more", _TAKEN, "if filled > chunk:"),
    Mutant("computed_tokens", "only prefixes fill the step", "filled += prefix + tokens", "filled += prefix"),
    Mutant(
        "computed_tokens", "only own tokens fill the step", "filled += prefix + tokens", "filled += tokens"
    ),
    Mutant("computed_tokens", "own tokens are not counted", _PROMPTS, "return times * prefix"),
    Mutant("computed_tokens", "serial as parallel", "if hint or not parallel:", "if hint:"),
    Mutant("computed_tokens", "a hint makes no difference", "if hint or not parallel:", "if not parallel:"),
    Mutant(
        "computed_tokens",
        "the hint is counted, and the prefix again",
        "return prefix + sum(own)",
        "return prefix * (1 + hint) + sum(own)",
    ),
    Mutant(
        "computed_tokens",
        "behind a hint each computes its last token again",
        "return prefix + sum(own)",
        "return prefix + sum(own) + hint * len(own)",
    ),
    Mutant(
        "computed_tokens",
        "all branches as long as the first",
        replaces=_unless(
            lambda prefix, own, chunk: min(len(own), math.ceil(chunk / (prefix + own[0]))) * prefix + sum(own)
        ),
    ),
    Mutant(
        "computed_tokens",
        "all branches as long as their mean",
        replaces=_unless(
            lambda prefix, own, chunk: (
                min(len(own), math.ceil(chunk / (prefix + fmean(own)))) * prefix + sum(own)
            )
        ),
    ),
    Mutant(
        "computed_tokens",
        "more requests than there are branches",
        replaces=_unless(lambda prefix, own, chunk: math.ceil(chunk / (prefix + own[0])) * prefix + sum(own)),
    ),
    Mutant(
        "computed_tokens",
        "once for each step, not for each request",
        replaces=_unless(
            lambda prefix, own, chunk: (
                math.ceil(sum(prefix + each for each in own) / chunk) * prefix + sum(own)
            )
        ),
    ),
    Mutant(
        "computed_tokens",
        "who got a part of the prefix finds the rest of it",
        replaces=_unless(_only_what_it_got),
    ),
    Mutant(
        "computed_tokens",
        "the README's three",
        replaces=_unless(lambda prefix, own, chunk: min(3, len(own)) * prefix + sum(own)),
    ),
    Mutant(
        "computed_tokens",
        "remembers by the number of branches",
        replaces={"computed_tokens": _computed_from_a_table},
    ),
    Mutant("computed_tokens", "takes the list apart", replaces={"computed_tokens": _computed_eats_the_list}),
    Mutant("computed_tokens", "asks the engine", replaces={"computed_tokens": _ask_the_engine}),
    # ------------------------------------------------------------ steps
    Mutant(
        "steps",
        "side by side, the hint has no step",
        _BY_DECODING,
        "math.ceil(behind_the_hint / chunk) + new_tokens - 1",
    ),
    Mutant("steps", "one by one, the hint has no step", _SERIAL, "return len(own) * new_tokens"),
    Mutant("steps", "one by one, a hint for each", _SERIAL, "return len(own) * (hint + new_tokens)"),
    Mutant("steps", "one by one, a step for the prompt alone", _SERIAL, f"{_SERIAL[:-10]}(new_tokens + 1)"),
    Mutant("steps", "one by one, only the decoding", _SERIAL, f"{_SERIAL[:-10]}(new_tokens - 1)"),
    Mutant(
        "steps",
        "the last step of a prompt gives no token",
        _BY_DECODING,
        "hint + math.ceil(behind_the_hint / chunk) + new_tokens",
    ),
    Mutant(
        "steps",
        "rounded down",
        _BY_DECODING,
        "hint + max(1, behind_the_hint // chunk) + new_tokens - 1",
    ),
    Mutant(
        "steps",
        "rounded down and one more",
        _BY_DECODING,
        "hint + behind_the_hint // chunk + 1 + new_tokens - 1",
    ),
    Mutant(
        "steps",
        "rounded to the nearest",
        _BY_DECODING,
        "hint + max(1, round(behind_the_hint / chunk)) + new_tokens - 1",
    ),
    Mutant("steps", "the hint's tokens are computed once more", " - hint * prefix", ""),
    Mutant("steps", "all prompts in one step", _BY_DECODING, "hint + 1 + new_tokens - 1"),
    Mutant(
        "steps",
        "a step for each prompt",
        _BY_DECODING,
        "hint + len(own) + new_tokens - 1",
    ),
    Mutant(
        "steps",
        "who has its prompt decodes at once",
        _BY_DECODING,
        "hint + max(math.ceil(behind_the_hint / chunk), new_tokens)",
    ),
    Mutant(
        "steps",
        "side by side, each decodes by itself",
        _BY_DECODING,
        "hint + math.ceil(behind_the_hint / chunk) + len(own) * (new_tokens - 1)",
    ),
    Mutant(
        "steps",
        "at least one step of decoding",
        _BY_DECODING,
        "hint + math.ceil(behind_the_hint / chunk) + max(1, new_tokens - 1)",
    ),
    Mutant("steps", "one by one as side by side", "if not parallel:", "if False:", after=_STEPS),
    Mutant(
        "steps",
        "the prefix is computed once in any case",
        "computed_tokens(prefix, own, chunk, hint, parallel) - hint * prefix",
        "(0 if hint else prefix) + sum(own)",
    ),
    Mutant(
        "steps",
        "the prefix is computed by every branch",
        "computed_tokens(prefix, own, chunk, hint, parallel) - hint * prefix",
        "(0 if hint else prefix * len(own)) + sum(own)",
    ),
    # ------------------------------------------------------------ fork
    Mutant("fork", "no hint", "pin = _hint(desk, prefix) if prefix else None", "pin = None"),
    Mutant(
        "fork",
        "a pin without a hint",
        "_hint(desk, prefix) if prefix",
        "desk.pin(prefix) if prefix",
        after=_FORK,
    ),
    Mutant(
        "fork", "the hint is not waited for", _HINT, "    desk.send(prefix, 0)\n    return desk.pin(prefix)"
    ),
    Mutant(
        "fork",
        "pinned before it is computed",
        _HINT,
        "    name, pin = desk.send(prefix, 0), desk.pin(prefix)\n    desk.wait([name])\n    return pin",
    ),
    Mutant("fork", "a hint, and no pin", _HINT, "    desk.wait([desk.send(prefix, 0)])\n    return None"),
    Mutant("fork", "the hint says a token", "desk.send(prefix, 0)", "desk.send(prefix, 1)"),
    Mutant("fork", "the hint ends a token early", "desk.send(prefix, 0)", "desk.send(prefix[:-1], 0)"),
    Mutant("fork", "the pin ends a token early", "return desk.pin(prefix)", "return desk.pin(prefix[:-1])"),
    Mutant(
        "fork",
        "pinned when the branches are on their way",
        f"    pin = _hint(desk, prefix) if prefix else None\n{_HELD}",
        f"""    if prefix:
        desk.wait([desk.send(prefix, 0)])
    {_SENT}
    pin = desk.pin(prefix) if prefix else None
    try:
        return list(desk.wait(names))
    finally:
        if pin is not None:
            desk.unpin(pin)
""",
    ),
    Mutant(
        "fork",
        "a hint for every branch",
        _SENT,
        f"[desk.wait([desk.send(prefix, 0)]) for own in branches]\n        {_SENT}",
    ),
    Mutant(
        "fork",
        "a pin for every branch",
        _SENT,
        f"[desk.pin(prefix) for own in branches]\n        {_SENT}",
    ),
    Mutant(
        "fork",
        "an empty prefix is sent ahead",
        "_hint(desk, prefix) if prefix else None",
        "_hint(desk, prefix)",
    ),
    Mutant(
        "fork",
        "an empty prefix has nothing to fork from",
        "pin = _hint(desk, prefix) if prefix else None",
        "if not prefix:\n        return []\n    pin = _hint(desk, prefix)",
    ),
    Mutant(
        "fork",
        "lets go of a pin that it has not",
        "        if pin is not None:\n            desk.unpin(pin)",
        "        desk.unpin(pin)",
    ),
    Mutant(
        "fork",
        "the branches without the prefix",
        "desk.send([*prefix, *own], new_tokens)",
        "desk.send(own, new_tokens)",
    ),
    Mutant(
        "fork",
        "each branch behind the one before",
        _SENT,
        """mine, names = list(prefix), []
        for own in branches:
            mine += own
            names.append(desk.send(mine, new_tokens))""",
    ),
    Mutant(
        "fork",
        "writes into the prefix",
        _SENT,
        """names = []
        for own in branches:
            prefix += own
            names.append(desk.send(prefix, new_tokens))
            del prefix[-len(own) :]
        prefix += branches[-1]""",
    ),
    Mutant(
        "fork",
        "writes into the branches",
        _SENT,
        """for own in branches:
            own[:0] = prefix
        names = [desk.send(own, new_tokens) for own in branches]""",
    ),
    Mutant(
        "fork",
        "one branch after another",
        f"{_SENT}\n        return list(desk.wait(names))",
        "return [desk.wait([desk.send([*prefix, *own], new_tokens)])[0] for own in branches]",
    ),
    Mutant(
        "fork",
        "waits for the last one only",
        "return list(desk.wait(names))",
        "return list(desk.wait(names[-1:]))",
    ),
    Mutant(
        "fork",
        "each reply in a list of its own",
        "return list(desk.wait(names))",
        "return [desk.wait([name]) for name in names]",
    ),
    Mutant(
        "fork",
        "replies behind what was asked",
        "return list(desk.wait(names))",
        "return [[*own, *reply] for own, reply in zip(branches, desk.wait(names))]",
    ),
    Mutant("fork", "the shortest branch first", replaces={"fork": _fork_in_other_order}),
    Mutant("fork", "equal branches are sent once", replaces={"fork": _fork_by_text}),
    Mutant(
        "fork",
        "the pin goes when the branches are sent",
        _HELD,
        f"""    try:
        {_SENT}
    finally:
        if pin is not None:
            desk.unpin(pin)
    return list(desk.wait(names))
""",
    ),
    Mutant(
        "fork",
        "the pin goes when the first branch is done",
        "return list(desk.wait(names))",
        "desk.wait(names[:1])\n        pin = desk.unpin(pin) if pin is not None else None\n"
        "        return list(desk.wait(names))",
    ),
    Mutant("fork", "the pin is kept", "            desk.unpin(pin)\n", "            pass\n"),
    Mutant(
        "fork",
        "no finally",
        _HELD,
        f"""    {_SENT}
    replies = list(desk.wait(names))
    if pin is not None:
        desk.unpin(pin)
    return replies
""",
    ),
    Mutant(
        "fork",
        "only waiting is within try",
        f"    try:\n        {_SENT}\n",
        f"    {_SENT}\n    try:\n",
    ),
    Mutant(
        "fork",
        "only sending is within try",
        _HELD,
        f"""    try:
        {_SENT}
    except BaseException:
        if pin is not None:
            desk.unpin(pin)
        raise
    replies = list(desk.wait(names))
    if pin is not None:
        desk.unpin(pin)
    return replies
""",
    ),
    Mutant(
        "fork",
        "the pin goes back after a ValueError only",
        _HELD,
        f"""    try:
        {_SENT}
        replies = list(desk.wait(names))
    except ValueError:
        if pin is not None:
            desk.unpin(pin)
        raise
    if pin is not None:
        desk.unpin(pin)
    return replies
""",
    ),
    Mutant(
        "fork",
        "an error is kept from the caller",
        "return list(desk.wait(names))\n",
        "return list(desk.wait(names))\n    except Exception:\n        return []\n",
    ),
    # ------------------------------------------------------------ select
    Mutant("select", "the sum", "fmean(logprobs)", "sum(logprobs)"),
    Mutant("select", "the middle one", "fmean(logprobs)", "sorted(logprobs)[len(logprobs) // 2]"),
    Mutant("select", "the first token alone", "fmean(logprobs)", "logprobs[0]"),
    Mutant("select", "the worst token", "fmean(logprobs)", "min(logprobs)"),
    Mutant("select", "a probability, not its logarithm", "fmean(logprobs)", "math.exp(fmean(logprobs))"),
    Mutant("select", "rounded", "fmean(logprobs)", "round(fmean(logprobs))"),
    Mutant(
        "select",
        "divided by the length of all",
        "fmean(logprobs)",
        "sum(logprobs) / (len(prefix) + len(logprobs))",
    ),
    Mutant("select", "divided by the number of choices", "fmean(logprobs)", "sum(logprobs) / len(choices)"),
    Mutant(
        "select", "the prefix's last token counts", "*choice], len(prefix))", "*choice], len(prefix) - 1)"
    ),
    Mutant(
        "select",
        "the choice's first token does not count",
        "*choice], len(prefix))",
        "*choice], len(prefix) + 1)",
    ),
    Mutant("select", "the prefix counts", "*choice], len(prefix))", "*choice], 1)"),
    Mutant(
        "select",
        "the choice without the prefix",
        "desk.score([*prefix, *choice], len(prefix))",
        "desk.score(choice, 1)",
    ),
    Mutant("select", "the least likely", _BEST, "return scores.index(min(scores)), scores"),
    Mutant(
        "select",
        "of equal scores the last",
        _BEST,
        "return max((score, place) for place, score in enumerate(scores))[1], scores",
    ),
    Mutant(
        "select", "the place in an order by score", _BEST, "return sorted(scores).index(max(scores)), scores"
    ),
    Mutant("select", "the choice, not its place", _BEST, "return choices[scores.index(max(scores))], scores"),
    Mutant("select", "the place alone", _BEST, "return scores.index(max(scores))"),
    Mutant("select", "scores first", _BEST, "return scores, scores.index(max(scores))"),
    Mutant(
        "select", "scores from the best on", _BEST, "return scores.index(max(scores)), sorted(scores)[::-1]"
    ),
    Mutant("select", "an empty prefix is left to the desk", "if not prefix or not choices", "if not choices"),
    Mutant("select", "no choices are left to max()", "if not prefix or not choices", "if not prefix"),
    Mutant("select", "an empty choice is left to the desk", "() in different or ", ""),
    Mutant("select", "equal choices are taken", " or len(different) < len(choices)", ""),
    Mutant(
        "select",
        "equal neighbours only",
        "len(different) < len(choices)",
        "any(one == other for one, other in zip(choices, choices[1:]))",
    ),
    Mutant(
        "select",
        "equal choices by their first token",
        "len(different) < len(choices)",
        "len({choice[0] for choice in choices}) < len(choices)",
    ),
    Mutant(
        "select",
        "equal choices by what is in them",
        "{tuple(choice) for choice in choices}",
        "{tuple(sorted(choice)) for choice in choices}",
    ),
    Mutant(
        "select", "None instead of an error", 'raise ValueError(f"a prefix', 'return None, []  # (f"a prefix'
    ),
    Mutant("select", "no hint", "pin = _hint(desk, prefix)\n", "pin = desk.pin(prefix)\n", after=_SELECT),
    Mutant("select", "the hint is a score", "desk.send(prefix, 0)", "desk.score(prefix, 1)"),
    Mutant(
        "select", "the hint is not waited for", "desk.wait([desk.send(prefix, 0)])", "desk.send(prefix, 0)"
    ),
    Mutant("select", "the first choice is the hint", "desk.send(prefix, 0)", "desk.send(prefix, 1)"),
    Mutant(
        "select",
        "one choice after another",
        f"{_SCORED}\n        {_MEANS}",
        "scores = [fmean(desk.wait([desk.score([*prefix, *c], len(prefix))])[0]) for c in choices]",
    ),
    Mutant(
        "select",
        "the pin is kept",
        "    finally:\n        desk.unpin(pin)\n",
        "    finally:\n        pass\n",
        after=_SELECT,
    ),
    Mutant(
        "select",
        "no finally",
        _CHOSEN,
        f"    {_SCORED}\n    {_MEANS}\n    desk.unpin(pin)\n",
    ),
    Mutant(
        "select",
        "the pin goes when the choices are sent",
        f"        {_MEANS}\n    finally:\n        desk.unpin(pin)\n",
        f"    finally:\n        desk.unpin(pin)\n    {_MEANS}\n",
    ),
    Mutant(
        "select", "only waiting is within try", f"    try:\n        {_SCORED}\n", f"    {_SCORED}\n    try:\n"
    ),
    Mutant(
        "select",
        "writes into the choices",
        _SCORED,
        """for choice in choices:
            choice[:0] = prefix
        names = [desk.score(choice, len(prefix)) for choice in choices]""",
    ),
    # ------------------------------------------------------------ explore
    Mutant("explore", "always side by side", _FITS, "if True:"),
    Mutant("explore", "never side by side", _FITS, "if False:"),
    Mutant("explore", "what fits exactly does not fit", _FITS, "if _slots(thought) < room:"),
    Mutant("explore", "held against what is left", _FITS, "if _slots(thought) <= left:"),
    Mutant(
        "explore",
        "the children held against all the room",
        _FITS,
        "if sum(map(_slots, thought.children)) <= room:",
    ),
    Mutant("explore", "one child has room", _FITS, "if max(map(_slots, thought.children)) <= left:"),
    Mutant("explore", "new tokens take no room", _SLOTS, "return len(thought.tokens) + below"),
    Mutant("explore", "only new tokens take room", _SLOTS, "return thought.new_tokens + below"),
    Mutant(
        "explore",
        "only the children count, not what is below them",
        _BELOW,
        "below = sum(len(each.tokens) + each.new_tokens for each in thought.children)",
    ),
    Mutant(
        "explore", "the longest way counts", _BELOW, "below = max(map(_slots, thought.children), default=0)"
    ),
    Mutant("explore", "thoughts are counted, not tokens", _SLOTS, "return 1 + below"),
    Mutant("explore", "each child has all the room", _LEFT, "left = room"),
    Mutant("explore", "new tokens are not taken off the room", _LEFT, "left = room - len(thought.tokens)"),
    Mutant("explore", "only new tokens are taken off the room", _LEFT, "left = room - thought.new_tokens"),
    Mutant("explore", "the text so far is taken off at every thought", _LEFT, "left = room - len(s.tokens)"),
    Mutant("explore", "the room is shared out", _LEFT, f"{_LEFT}\n    left //= len(thought.children)"),
    Mutant("explore", "once one by one, always", _ONE_BY_ONE, f"left = 0\n        {_ONE_BY_ONE}"),
    Mutant("explore", "no join", _JOIN, ""),
    Mutant("explore", "joined before the branches run", _BRANCHES, f"{_BRANCHES}\n{_JOIN}"),
    Mutant(
        "explore", "no hint", "s.fork(len(thought.children))", "s.fork(len(thought.children), hint=False)"
    ),
    Mutant("explore", "a list of lists of ways", _FLAT, "return found"),
    Mutant("explore", "the first way of each child", _FLAT, "return [ways[0] for ways in found]"),
    Mutant("explore", "the last child first", _FLAT, "return [way for ways in found[::-1] for way in ways]"),
    Mutant(
        "explore",
        "what is not promising is left out",
        "return [list(s.tokens)]",
        "return [] if thought.children else [list(s.tokens)]",
    ),
    Mutant(
        "explore",
        "the end of a way must be promising",
        "return [list(s.tokens)]",
        'return [list(s.tokens)] if promising(s.said("thought").token_ids) else []',
    ),
    Mutant("explore", "everything is promising", ' or not promising(s.said("thought").token_ids)', ""),
    Mutant("explore", "promising is asked about the whole text", 's.said("thought").token_ids', "s.tokens"),
    Mutant("explore", "promising is asked the other way round", "or not promising", "or promising"),
    Mutant(
        "explore",
        "the replies, not the text",
        "return [list(s.tokens)]",
        'return [s.said("thought").token_ids]',
    ),
    Mutant(
        "explore",
        "the thought's own tokens are not added",
        "s += thought.tokens",
        "s += [] if s.tokens else thought.tokens",
    ),
    Mutant(
        "explore",
        "all thoughts are three tokens long",
        "max_new_tokens=thought.new_tokens)",
        "max_new_tokens=3)",
    ),
    Mutant("explore", "level by level", replaces={"explore": _explore_by_levels}),
    Mutant("explore", "a fork with a hint for each child", replaces={"explore": _explore_one_fork_for_each}),
    Mutant("explore", "ways in the order in which they end", replaces={"explore": _explore_as_they_end}),
    Mutant(
        "explore",
        "later children have the room that earlier ones left",
        replaces={"explore": _explore_what_is_left_over},
    ),
    Mutant("explore", "sizes are remembered by the tokens", replaces={"_slots": _slots_by_tokens}),
]
