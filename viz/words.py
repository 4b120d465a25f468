"""Events in words: the tag before a sentence, and one sentence for many events.

What each kind of event says stands with the event (minirad/observe/events.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from minirad.observe.event import EVENT_TYPES, TIER_SUMS, Event, Word

WORDS: Mapping[type[Event], Word] = {kind: kind.word for kind in EVENT_TYPES}
PASSED = Word("passed", "wait")  # no event tells of it: a request behind a waiting one was admitted


def word_of(event: Event) -> Word:
    """What stands before an event's sentence."""
    return event.word


def summary(events: Iterable[Event]) -> tuple[str, str]:
    """What a stretch of events comes to: (tone, one plain sentence).

    tone: "evict", "retract", "split", "hit", "new", "finish", "decode" or "", for its colour.
    """
    events = tuple(events)
    if len(events) == 1:
        return events[0].tone(), events[0].describe()
    by: dict[type[Event], list[Any]] = {}
    for event in events:
        if event.headline.rank:
            by.setdefault(type(event), []).append(event)
    greatest = sorted(by, key=lambda kind: kind.headline.rank, reverse=True)[:2]
    parts = [kind.together(by[kind]) for kind in greatest]
    if not parts:
        return "", events[-1].describe() if events else "Nothing has happened yet: the tree is empty"
    return parts[0][0], "; ".join(text for _, text in parts)


def tier_sums(events: Iterable[Event]) -> dict[str, int]:
    """Tokens that a stretch of events copied to the host, demoted, loaded back, computed again although the
    host had them, and evicted from the host."""
    sums = dict.fromkeys(TIER_SUMS, 0)
    for event in events:
        if event.tier_sum:
            sums[event.tier_sum] += len(getattr(event, "slots", ()) or getattr(event, "host_slots", ()))
    return sums
