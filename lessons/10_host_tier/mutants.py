"""Plausible wrong solutions of lesson 10."""

from __future__ import annotations

import numpy as np

from lessons.grading import Mutant

_THROUGH = "def write_through"
_ROOM = "def make_host_room"
_EVICT = "def evict"
_BELOW = "def _remove_with_all_below"
_LOAD = "def load_back"
_EVEN = "def break_even"
_IDLE = "if not (node.on_device or node.below or node.held)"
_HAS_A_COPY = "if victim.on_host or (tiers.write_back and tiers.copy(victim)):"
_SHORTFALL = "    if tiers.device_free < need:\n        tiers.evict(need - tiers.device_free)\n"
_START = "start / (per_computed - per_loaded)"
_ALL_BELOW = (
    "    for child in node.below:\n        _remove_with_all_below(tiers, child)\n    tiers.remove(node)"
)


def _last_used(node):
    return node.last_access


def _idle(tiers):
    return [node for node in tiers.nodes() if not (node.on_device or node.below or node.held)]


def _may_leave(node):
    return node.on_device and node.lock_ref == 0 and not any(child.on_device for child in node.below)


def _remove_all(tiers, node):
    for child in node.below:
        _remove_all(tiers, child)
    tiers.remove(node)


# ---------------------------------------------------------------------- write_through


def _through_all_or_nothing(tiers, path, least_hits):
    wanted = [node for node in path if not node.on_host and node.hits >= least_hits]
    if sum(node.size for node in wanted) > tiers.host_size:
        return 0
    copied = 0
    for node in wanted:
        if not tiers.copy(node):
            break
        copied += node.size
    return copied


def _through_asks_the_last(tiers, path, least_hits):
    if not path or path[-1].hits < least_hits:
        return 0
    copied = 0
    for node in path:
        if not node.on_host:
            if not tiers.copy(node):
                break
            copied += node.size
    return copied


def _through_counts_the_path(tiers, path, least_hits):
    for node in path:
        if not node.on_host and (node.hits < least_hits or not tiers.copy(node)):
            break
    return sum(node.size for node in path if node.on_host)


def _through_by_free_slots(tiers, path, least_hits):
    free = tiers.host_free
    for node in path:
        if not node.on_host and (node.hits < least_hits or not tiers.copy(node)):
            break
    return free - tiers.host_free


# ---------------------------------------------------------------------- make_host_room


def _room_list_from_before(tiers, num_tokens):
    if num_tokens > tiers.host_size:
        return False
    for node in sorted(_idle(tiers), key=_last_used):
        if tiers.host_free >= num_tokens:
            break
        tiers.remove(node)
    return tiers.host_free >= num_tokens


def _room_leaves_of_the_moment(tiers, num_tokens):
    if num_tokens > tiers.host_size:
        return False
    while tiers.host_free < num_tokens:
        idle = sorted(_idle(tiers), key=_last_used)
        if not idle:
            return False
        for node in idle:
            if tiers.host_free < num_tokens:
                tiers.remove(node)
    return True


def _room_whole_branches(tiers, num_tokens):
    if num_tokens > tiers.host_size:
        return False

    def may_go(node):
        return not (node.on_device or node.held) and all(may_go(child) for child in node.below)

    while tiers.host_free < num_tokens:
        idle = [node for node in tiers.nodes() if may_go(node)]
        if not idle:
            return False
        _remove_all(tiers, min(idle, key=_last_used))
    return True


def _room_if_all_fits(tiers, num_tokens):
    may_go = [node for node in tiers.nodes() if not (node.on_device or node.held)]
    if tiers.host_free + sum(node.size for node in may_go) < num_tokens:
        return False
    while tiers.host_free < num_tokens:
        idle = _idle(tiers)
        if not idle:
            return False
        tiers.remove(min(idle, key=_last_used))
    return True


# ---------------------------------------------------------------------- evict


def _evict_list_from_before(tiers, num_tokens):
    freed = 0
    for victim in sorted(filter(_may_leave, tiers.nodes()), key=_last_used):
        if freed >= num_tokens:
            break
        freed += victim.size
        if victim.on_host or (tiers.write_back and tiers.copy(victim)):
            tiers.demote(victim)
        else:
            _remove_all(tiers, victim)
    return freed


def _evict_below_from_before(tiers, num_tokens):
    freed = 0
    while freed < num_tokens:
        able = [node for node in tiers.nodes() if _may_leave(node)]
        if not able:
            break
        victim = min(able, key=_last_used)
        below, todo = [], [victim]
        while todo:
            below.append(todo.pop())
            todo += below[-1].below
        freed += victim.size
        if victim.on_host or (tiers.write_back and tiers.copy(victim)):
            tiers.demote(victim)
        else:
            for node in reversed(below):
                tiers.remove(node)
    return freed


def _evict_copies_first(tiers, num_tokens):
    if tiers.write_back:
        coming, planned = sorted(filter(_may_leave, tiers.nodes()), key=_last_used), 0
        for node in coming:
            if planned < num_tokens and not node.on_host:
                tiers.copy(node)
            planned += node.size
    freed = 0
    while freed < num_tokens:
        able = [node for node in tiers.nodes() if _may_leave(node)]
        if not able:
            break
        victim = min(able, key=_last_used)
        freed += victim.size
        if victim.on_host:
            tiers.demote(victim)
        else:
            _remove_all(tiers, victim)
    return freed


def _evict_skips_what_is_refused(tiers, num_tokens):
    freed, refused = 0, []
    while freed < num_tokens:
        able = [node for node in tiers.nodes() if _may_leave(node) and node not in refused]
        if not able:
            break
        victim = min(able, key=_last_used)
        if tiers.write_back and not victim.on_host and not tiers.copy(victim):
            refused.append(victim)
            continue
        freed += victim.size
        if victim.on_host:
            tiers.demote(victim)
        else:
            _remove_all(tiers, victim)
    return freed


# ---------------------------------------------------------------------- load_back


def _load_what_fits(tiers, path, prompt_tokens, threshold):
    chain = [node for node in path if not node.on_device]
    need, matched = sum(node.size for node in chain), sum(node.size for node in path)
    saved = min(matched, prompt_tokens - 1) - min(matched - need, prompt_tokens - 1)
    if saved < threshold:
        return 0
    tiers.hold(chain)
    if tiers.device_free < need:
        tiers.evict(need - tiers.device_free)
    fits, room = [], tiers.device_free
    for node in chain:
        room -= node.size
        if room < 0:
            break
        fits.append(node)
    if fits:
        tiers.load(fits)
    tiers.release(chain)
    return sum(node.size for node in fits)


def _load_one_by_one(tiers, path, prompt_tokens, threshold):
    chain = [node for node in path if not node.on_device]
    need, matched = sum(node.size for node in chain), sum(node.size for node in path)
    saved = min(matched, prompt_tokens - 1) - min(matched - need, prompt_tokens - 1)
    if saved < threshold:
        return 0
    loaded = 0
    tiers.hold(chain)
    for node in chain:
        if tiers.device_free < node.size:
            tiers.evict(node.size - tiers.device_free)
        if tiers.device_free < node.size:
            break
        tiers.load([node])
        loaded += node.size
    tiers.release(chain)
    return loaded


def _load_holds_too_early(tiers, path, prompt_tokens, threshold):
    chain = [node for node in path if not node.on_device]
    tiers.hold(chain)
    need, matched = sum(node.size for node in chain), sum(node.size for node in path)
    saved = min(matched, prompt_tokens - 1) - min(matched - need, prompt_tokens - 1)
    if saved < threshold:
        return 0
    if tiers.device_free < need:
        tiers.evict(need - tiers.device_free)
    fits = tiers.device_free >= need
    if fits:
        tiers.load(chain)
    tiers.release(chain)
    return need if fits else 0


def _loads(hold_early, hold_late=lambda chain: []):
    def load_back(tiers, path, prompt_tokens, threshold):
        chain = [node for node in path if not node.on_device]
        need, matched = sum(node.size for node in chain), sum(node.size for node in path)
        saved = min(matched, prompt_tokens - 1) - min(matched - need, prompt_tokens - 1)
        if saved < threshold:
            return 0
        early, late = hold_early(chain), hold_late(chain)
        tiers.hold(early)
        if tiers.device_free < need:
            tiers.evict(need - tiers.device_free)
        tiers.hold(late)
        fits = tiers.device_free >= need
        if fits:
            tiers.load(chain)
        tiers.release(early + late)
        return need if fits else 0

    return load_back


_load_without_hold = _loads(lambda chain: [])
_load_holds_the_top = _loads(lambda chain: chain[:1])
_load_holds_too_late = _loads(lambda chain: [], lambda chain: chain)


def _load_forgets_after_no_room(tiers, path, prompt_tokens, threshold):
    chain = [node for node in path if not node.on_device]
    need, matched = sum(node.size for node in chain), sum(node.size for node in path)
    saved = min(matched, prompt_tokens - 1) - min(matched - need, prompt_tokens - 1)
    if saved < threshold:
        return 0
    tiers.hold(chain)
    if tiers.device_free < need:
        tiers.evict(need - tiers.device_free)
    if tiers.device_free < need:
        return 0
    tiers.load(chain)
    tiers.release(chain)
    return need


# ---------------------------------------------------------------------- break_even


def _whole(x):
    return max(int(x // 1) + 1, 1)


def _line(pairs):
    return np.polyfit(*zip(*pairs, strict=True), 1)


def _even_where_lines_cross(loads, prefills):
    (per_loaded, start), (per_computed, launch) = _line(loads), _line(prefills)
    if per_computed <= per_loaded:
        return None
    return _whole((start - launch) / (per_computed - per_loaded))


def _even_ends_only(loads, prefills):
    (a, b), (c, d) = (min(loads), max(loads)), (min(prefills), max(prefills))
    per_loaded, per_computed = (b[1] - a[1]) / (b[0] - a[0]), (d[1] - c[1]) / (d[0] - c[0])
    if per_computed <= per_loaded:
        return None
    return _whole((a[1] - per_loaded * a[0]) / (per_computed - per_loaded))


def _even_compute_through_zero(loads, prefills):
    per_loaded, start = _line(loads)
    x, y = np.array(prefills).T
    per_computed = (x @ y) / (x @ x)
    if per_computed <= per_loaded:
        return None
    return _whole(start / (per_computed - per_loaded))


def _even_rates(loads, prefills):
    per_loaded, start = _line(loads)
    per_computed = float(np.mean([seconds / tokens for tokens, seconds in prefills]))
    if per_computed <= per_loaded:
        return None
    return _whole(start / (per_computed - per_loaded))


def _even_smallest_is_the_start(loads, prefills):
    per_loaded, per_computed = _line(loads)[0], _line(prefills)[0]
    if per_computed <= per_loaded:
        return None
    return _whole(min(loads)[1] / (per_computed - per_loaded))


def _even_by_trying(loads, prefills):
    (per_loaded, start), (per_computed, _) = _line(loads), _line(prefills)
    for n in range(1, 1001):
        if start + per_loaded * n < per_computed * n:
            return n
    return None


def _even_first_only(loads, prefills):
    (per_loaded, start), (per_computed, _) = _line(loads), _line(prefills)
    for n in range(1, 10_001):
        if start + per_loaded * n < per_computed * n:
            return n
    return None


def _even_measured_sizes(loads, prefills):
    (per_loaded, start), (per_computed, _) = _line(loads), _line(prefills)
    for n in sorted({tokens for tokens, _ in (*loads, *prefills)}):
        if start + per_loaded * n < per_computed * n:
            return n
    return None


MUTANTS = [
    # write_through
    Mutant("write_through", "stops at the first copy", "continue", "break", _THROUGH),
    Mutant("write_through", "goes on below a refused copy", "break", "continue", _THROUGH),
    Mutant("write_through", "ignores the hits", "node.hits < least_hits or ", "", _THROUGH),
    Mutant("write_through", "more hits than asked for", "< least_hits", "<= least_hits", _THROUGH),
    Mutant("write_through", "0 hits taken for two", "least_hits or", "(least_hits or 2) or", _THROUGH),
    Mutant("write_through", "children first", "in path:", "in reversed(path):", _THROUGH),
    Mutant("write_through", "only the last node", "in path:", "in path[-1:]:", _THROUGH),
    Mutant("write_through", "not the last node", "in path:", "in path[:-1]:", _THROUGH),
    Mutant("write_through", "copies once more", "node.on_host", "False", _THROUGH),
    Mutant("write_through", "counts nodes", "copied += node.size", "copied += 1", _THROUGH),
    Mutant(
        "write_through",
        "only into slots that are free now",
        "not tiers.copy(node)",
        "tiers.host_free < node.size or not tiers.copy(node)",
        _THROUGH,
    ),
    Mutant(
        "write_through",
        "counts what was refused",
        "if node.hits < least_hits or not tiers.copy(node):\n            break\n        copied += node.size",
        "if node.hits < least_hits:\n            break\n        copied += node.size\n"
        "        if not tiers.copy(node):\n            break",
        _THROUGH,
    ),
    Mutant(
        "write_through",
        "counts copies that were there",
        replaces={"write_through": _through_counts_the_path},
    ),
    Mutant(
        "write_through",
        "counts by free slots, though a copy makes room",
        replaces={"write_through": _through_by_free_slots},
    ),
    Mutant(
        "write_through",
        "nothing if not all fits",
        replaces={"write_through": _through_all_or_nothing},
    ),
    Mutant(
        "write_through",
        "asks the last node for its hits, for all",
        replaces={"write_through": _through_asks_the_last},
    ),
    # make_host_room
    Mutant(
        "make_host_room",
        "does not compare with the whole host",
        "if num_tokens > tiers.host_size:\n        return False\n    ",
        "",
        _ROOM,
    ),
    Mutant("make_host_room", "not the whole host", "num_tokens > ", "num_tokens >= ", _ROOM),
    Mutant("make_host_room", "takes what is held", " or node.held", "", _ROOM),
    Mutant("make_host_room", "takes copies of what is on the device", "node.on_device or ", "", _ROOM),
    Mutant("make_host_room", "the most recently used first", "min(idle", "max(idle", _ROOM),
    Mutant("make_host_room", "the first in the tree", "min(idle, key=_last_used)", "idle[0]", _ROOM),
    Mutant(
        "make_host_room",
        "the longest first",
        "min(idle, key=_last_used)",
        "max(idle, key=lambda node: (node.size, -node.last_access))",
        _ROOM,
    ),
    Mutant("make_host_room", "the fewest hits first", "key=_last_used", "key=lambda node: node.hits", _ROOM),
    Mutant("make_host_room", "one slot too many", "host_free < num_tokens", "host_free <= num_tokens", _ROOM),
    Mutant(
        "make_host_room",
        "counts what it freed, not what is free",
        "while tiers.host_free < num_tokens:",
        "before = tiers.host_free\n    while tiers.host_free - before < num_tokens:",
        _ROOM,
    ),
    Mutant(
        "make_host_room",
        "only children on the device protect",
        "node.below",
        "any(child.on_device for child in node.below)",
        _ROOM,
    ),
    Mutant(
        "make_host_room", "true whatever came of it", "            return False", "            break", _ROOM
    ),
    Mutant(
        "make_host_room",
        "takes one and looks no more",
        "while tiers.host_free < num_tokens:",
        "if tiers.host_free < num_tokens:",
        _ROOM,
    ),
    Mutant(
        "make_host_room",
        "a list from before",
        replaces={"make_host_room": _room_list_from_before},
    ),
    Mutant(
        "make_host_room",
        "all childless of the moment before a parent",
        replaces={"make_host_room": _room_leaves_of_the_moment},
    ),
    Mutant(
        "make_host_room",
        "an old parent takes all below along",
        replaces={"make_host_room": _room_whole_branches},
    ),
    Mutant(
        "make_host_room",
        "nothing goes if not enough can",
        replaces={"make_host_room": _room_if_all_fits},
    ),
    # evict
    Mutant(
        "evict",
        "a child on the host protects",
        "any(child.on_device for child in node.below)",
        "node.below",
    ),
    Mutant("evict", "whatever is on the device", " and not any(child.on_device for child in node.below)", ""),
    Mutant("evict", "locked nodes as well", " and node.lock_ref == 0", ""),
    Mutant("evict", "the most recently used first", "min(able", "max(able", _EVICT),
    Mutant(
        "evict",
        "what is copied first",
        "key=_last_used",
        "key=lambda node: (not node.on_host, node.last_access)",
        _EVICT,
    ),
    Mutant(
        "evict",
        "childless nodes first",
        "key=_last_used",
        "key=lambda node: (bool(node.below), node.last_access)",
        _EVICT,
    ),
    Mutant("evict", "no copy under write_back", " or (tiers.write_back and tiers.copy(victim))", "", _EVICT),
    Mutant(
        "evict",
        "copies whatever the policy",
        "(tiers.write_back and tiers.copy(victim))",
        "tiers.copy(victim)",
    ),
    Mutant(
        "evict",
        "copies what has a copy",
        _HAS_A_COPY,
        "if (tiers.write_back and tiers.copy(victim)) or victim.on_host:",
        _EVICT,
    ),
    Mutant(
        "evict",
        "demotes although the copy was refused",
        _HAS_A_COPY,
        "if tiers.write_back and not victim.on_host:\n            tiers.copy(victim)\n"
        "        if victim.on_host or tiers.write_back:",
        _EVICT,
    ),
    Mutant(
        "evict",
        "copies have a use under write_back only",
        _HAS_A_COPY,
        "if tiers.write_back and (victim.on_host or tiers.copy(victim)):",
        _EVICT,
    ),
    Mutant("evict", "leaves what hangs below", _ALL_BELOW, "    tiers.remove(node)", _BELOW),
    Mutant(
        "evict",
        "removes one level below",
        "_remove_with_all_below(tiers, child)",
        "tiers.remove(child)",
        _BELOW,
    ),
    Mutant(
        "evict",
        "removes parents before their children",
        _ALL_BELOW,
        "    below = node.below\n    tiers.remove(node)\n    for child in below:\n"
        "        _remove_with_all_below(tiers, child)",
        _BELOW,
    ),
    Mutant(
        "evict",
        "removes the first child only",
        "for child in node.below:",
        "for child in node.below[:1]:",
        _BELOW,
    ),
    Mutant(
        "evict",
        "demotes where something hangs below",
        _HAS_A_COPY,
        "if victim.on_host or victim.below or (tiers.write_back and tiers.copy(victim)):",
        _EVICT,
    ),
    Mutant("evict", "counts victims", "freed += victim.size", "freed += 1", _EVICT),
    Mutant("evict", "one victim too many", "freed < num_tokens", "freed <= num_tokens", _EVICT),
    Mutant("evict", "says what was asked for", "return freed", "return min(freed, num_tokens)", _EVICT),
    Mutant(
        "evict",
        "never more than was asked for",
        "if _may_leave_the_device(node)]",
        "if _may_leave_the_device(node) and node.size <= num_tokens - freed]",
        _EVICT,
    ),
    Mutant(
        "evict",
        "counts what hangs below as freed",
        "            _remove_with_all_below(tiers, victim)",
        "            freed += sum(child.size for child in victim.below)\n"
        "            _remove_with_all_below(tiers, victim)",
        _EVICT,
    ),
    Mutant(
        "evict",
        "until so many are free",
        "while freed < num_tokens:",
        "while tiers.device_free < num_tokens:",
        _EVICT,
    ),
    Mutant(
        "evict",
        "gives up where a copy is refused",
        _HAS_A_COPY,
        "if tiers.write_back and not victim.on_host and not tiers.copy(victim):\n"
        "            return freed - victim.size\n        if victim.on_host:",
        _EVICT,
    ),
    Mutant("evict", "a list from before", replaces={"evict": _evict_list_from_before}),
    Mutant("evict", "what hangs below, asked before copying", replaces={"evict": _evict_below_from_before}),
    Mutant("evict", "copies all that is to go, then evicts", replaces={"evict": _evict_copies_first}),
    Mutant("evict", "spares what gets no copy", replaces={"evict": _evict_skips_what_is_refused}),
    # load_back
    Mutant(
        "load_back",
        "the last token counts as saved",
        "usable = prompt_tokens - 1",
        "usable = prompt_tokens",
        _LOAD,
    ),
    Mutant(
        "load_back",
        "the last token always lies in what is loaded",
        "saved = min(matched, usable) - min(matched - need, usable)",
        "saved = need - 1",
        _LOAD,
    ),
    Mutant(
        "load_back",
        "all of the match counts as saved",
        "min(matched, usable) - min(matched - need, usable)",
        "min(matched, usable)",
        _LOAD,
    ),
    Mutant(
        "load_back",
        "the whole prompt counts as saved",
        "min(matched, usable) - min(matched - need, usable)",
        "usable - (matched - need)",
        _LOAD,
    ),
    Mutant("load_back", "more than the threshold", "saved < threshold", "saved <= threshold", _LOAD),
    Mutant("load_back", "no threshold", " or saved < threshold", "", _LOAD),
    Mutant("load_back", "does not hold", replaces={"load_back": _load_without_hold}),
    Mutant("load_back", "holds the top node only", replaces={"load_back": _load_holds_the_top}),
    Mutant("load_back", "holds when the evicting is over", replaces={"load_back": _load_holds_too_late}),
    Mutant("load_back", "releases the end only", "tiers.release(chain)", "tiers.release(chain[-1:])", _LOAD),
    Mutant("load_back", "does not release", "    tiers.release(chain)\n", "", _LOAD),
    Mutant("load_back", "does not evict", _SHORTFALL, "", _LOAD),
    Mutant(
        "load_back", "evicts all that it needs", "tiers.evict(need - tiers.device_free)", "tiers.evict(need)"
    ),
    Mutant("load_back", "evicts though there is room", _SHORTFALL, "    tiers.evict(need)\n", _LOAD),
    Mutant(
        "load_back",
        "evicts before it decides",
        "    if not chain or saved < threshold:",
        "    if chain and tiers.device_free < need:\n        tiers.evict(need - tiers.device_free)\n"
        "    if not chain or saved < threshold:",
        _LOAD,
    ),
    Mutant("load_back", "loads though there is no room", "tiers.device_free >= need", "True", _LOAD),
    Mutant(
        "load_back", "needs one slot more", "tiers.device_free >= need", "tiers.device_free > need", _LOAD
    ),
    Mutant("load_back", "from the bottom up", "tiers.load(chain)", "tiers.load(chain[::-1])", _LOAD),
    Mutant("load_back", "loads what is there", "tiers.load(chain)", "tiers.load(path)", _LOAD),
    Mutant("load_back", "says what is saved", "return need if", "return saved if", _LOAD),
    Mutant("load_back", "says all that matches", "return need if", "return matched if", _LOAD),
    Mutant("load_back", "loads as much as fits", replaces={"load_back": _load_what_fits}),
    Mutant("load_back", "node by node", replaces={"load_back": _load_one_by_one}),
    Mutant("load_back", "holds, then leaves at the threshold", replaces={"load_back": _load_holds_too_early}),
    Mutant(
        "load_back", "no room: leaves without releasing", replaces={"load_back": _load_forgets_after_no_room}
    ),
    # break_even
    Mutant("break_even", "where the two lines cross", replaces={"break_even": _even_where_lines_cross}),
    Mutant("break_even", "a copy begins for nothing", "start / (", "0 / (", _EVEN),
    Mutant(
        "break_even", "no larger than the load's start over computing", _START, "start / per_computed", _EVEN
    ),
    Mutant("break_even", "polyfit's order turned round", "per_loaded, start =", "start, per_loaded =", _EVEN),
    Mutant(
        "break_even",
        "never None",
        "    if per_computed <= per_loaded:\n        return None\n",
        "",
        _EVEN,
    ),
    Mutant("break_even", "rounded down", "// 1) + 1", "// 1)", _EVEN),
    Mutant("break_even", "rounded to the nearest", f"int({_START} // 1) + 1", f"round({_START})", _EVEN),
    Mutant("break_even", "0 or less", f"max(int({_START} // 1) + 1, 1)", f"int({_START} // 1) + 1", _EVEN),
    Mutant("break_even", "0 where a copy has no start", ", 1)\n", ", 0)\n", "return max("),
    Mutant(
        "break_even",
        "None where a copy has no start",
        "if per_computed <= per_loaded:",
        "if per_computed <= per_loaded or start <= 0:",
        _EVEN,
    ),
    Mutant(
        "break_even",
        "the one token of the pass comes off",
        f"{_START}",
        "(start + per_computed) / (per_computed - per_loaded)",
        _EVEN,
    ),
    Mutant("break_even", "the two mixed up", "*zip(*loads", "*zip(*prefills", _EVEN),
    Mutant("break_even", "first and last measurement", replaces={"break_even": _even_ends_only}),
    Mutant("break_even", "computing through zero", replaces={"break_even": _even_compute_through_zero}),
    Mutant("break_even", "seconds over tokens", replaces={"break_even": _even_rates}),
    Mutant(
        "break_even", "the smallest copy as the start", replaces={"break_even": _even_smallest_is_the_start}
    ),
    Mutant("break_even", "tries up to 1,000", replaces={"break_even": _even_by_trying}),
    Mutant("break_even", "the first n, not all after it", replaces={"break_even": _even_first_only}),
    Mutant("break_even", "only sizes that were measured", replaces={"break_even": _even_measured_sizes}),
]
