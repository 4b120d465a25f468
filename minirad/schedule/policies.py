"""In which order waiting requests are tried. Read-only: `peek` leaves no trace in the tree.

Every policy serves a larger `priority` first and breaks ties by arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minirad.schedule.request import Request

Peek = Callable[[Request], int]  # how many of its tokens the tree would match now


def fcfs(waiting: Sequence[Request], peek: Peek) -> list[Request]:
    """First come, first served."""
    return sorted(waiting, key=lambda r: (-r.priority, r.arrival))


def lpm(waiting: Sequence[Request], peek: Peek) -> list[Request]:
    """Longest prefix match first: it uses what is cached before it is evicted (SGLang paper, 3)."""
    return sorted(waiting, key=lambda r: (-r.priority, -peek(r), r.arrival))


POLICIES: dict[str, Callable[[Sequence[Request], Peek], list[Request]]] = {
    "fcfs": fcfs,
    "lpm": lpm,
}
