"""Events for a tree that tells nothing itself (a student's): put together from how it was and how it is."""

from __future__ import annotations

from minirad.observe.events import (
    Event,
    NodeEvicted,
    NodeGrown,
    NodeInserted,
    NodeLocked,
    NodeSplit,
    NodeUnlocked,
)
from minirad.observe.snapshot import State


def derive_events(before: dict[int, State], after: dict[int, State]) -> list[Event]:
    """What must have happened between two looks at a tree that tells nothing itself.

    Exact in which nodes came, went, grew and were split; the order of things is not known.
    """
    found: list[Event] = []
    for number in sorted(before.keys() - after.keys()):
        node = before[number]
        why = "gone since the step before"
        found.append(NodeEvicted(number, node["parent"], tuple(node["slots"]), "its own", why, None))
    for number in sorted(after.keys() - before.keys()):
        found.append(_arrival(number, before, after))
    for number in sorted(after.keys() & before.keys()):
        old, new = before[number], after[number]
        size = len(old["tokens"])
        if len(new["tokens"]) > size and new["tokens"][:size] == old["tokens"]:
            found.append(
                NodeGrown(
                    number, tuple(new["tokens"][size:]), tuple(new["slots"][len(old["slots"]) :]),
                    new["last_access"], new["priority"],
                )
            )  # fmt: skip
        moved = new["lock_ref"] - old["lock_ref"]
        if moved:
            kind = NodeLocked if moved > 0 else NodeUnlocked
            found.append(kind(number, (number,), len(new["slots"])))
    return found


def _arrival(number: int, before: dict[int, State], after: dict[int, State]) -> Event:
    node = after[number]
    for other, old in before.items():
        new = after.get(other)
        shorter = new is not None and new["parent"] == number and new["tokens"] != old["tokens"]
        if shorter and old["tokens"][: len(node["tokens"])] == node["tokens"]:
            return NodeSplit(number, other, len(node["slots"]), node["last_access"])
    return NodeInserted(
        number, node["parent"], tuple(node["tokens"]), tuple(node["slots"]),
        node["last_access"], node["priority"], node["namespace"],
    )  # fmt: skip
