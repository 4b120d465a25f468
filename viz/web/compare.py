"""One workload on two engines that differ in one policy, side by side and stepping together.

    python -m viz.live --compare lpm,fcfs
    python -m viz.live --compare lru,lfu --export both.html

Step n of one engine is shown beside step n of the other; the one that is done first keeps its last step.
One sentence tells what they found in the cache and how long they let requests wait.

`Pair` stands where a run stands, `PairPage` where a page does. Draws nothing (static/compare.js does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, Union

from viz.web.page import Page
from viz.web.runs import Replay, Run
from viz.web.settings import Settings
from viz.web.sides import Json, SidesPage, Totals

if TYPE_CHECKING:
    from viz.web.ranks import Ranks
    from viz.web.stream import FleetRun

# ---------------------------------------------------------------------- two runs as one


class Pair:
    """Two runs in the place of one: `advance` takes one step of each that is not done."""

    drivable, policy, missing, alone, single_page = True, "", "", None, None

    def __init__(
        self, number: int, settings: Settings, sides: tuple[Run, Run], names: tuple[str, str]
    ) -> None:
        self.number, self.settings, self.sides, self.names = number, settings, sides, names
        self.workload = sides[0].workload
        self.page = PairPage(self)
        self.trace = self.page  # its length is that of both

    @property
    def idle(self) -> bool:
        return all(side.idle for side in self.sides)

    @property
    def clock(self) -> int:
        return max(side.clock for side in self.sides)

    @property
    def notices(self) -> list[str]:
        named = zip(self.names, self.sides, strict=True)
        return [f"{name}: {notice}" for name, side in named for notice in side.notices]

    @property
    def refused(self) -> str:
        return self.page.refused

    @property
    def served_none(self) -> bool:
        return all(side.served_none for side in self.sides)

    def advance(self) -> None:
        for side in self.sides:
            if not side.idle:
                side.advance()

    def close(self, broken: bool = False) -> None:
        for side in self.sides:
            side.close(broken)


class PairPage(SidesPage):
    """Two pages as one: step n of one beside step n of the other."""

    kind = "compare"

    def __init__(self, pair: Pair) -> None:
        super().__init__([side.page for side in pair.sides], pair.names)
        self.pair = pair

    def __len__(self) -> int:
        """Steps that both have taken, or the one that goes on where the other is done."""
        first, second = self.pair.sides
        lengths = (len(first.trace), len(second.trace))
        if first.idle == second.idle:
            return max(lengths) if first.idle else min(lengths)
        return lengths[1] if first.idle else lengths[0]

    def done(self, number: int, index: int) -> bool:
        return bool(self.pair.sides[number].idle and index >= len(self.pages[number].trace))

    def meta(self, title: str = "", note: str = "") -> Json:
        return {**super().meta(title, note), "compare": self.pair.settings.compare}

    @property
    def refused(self) -> str:
        """What both sides say of requests that they refused: once, if that is the same."""
        told = [page.refused for page in self.pages]
        if told[0] == told[1]:
            return told[0] and f"both: {told[0]}"
        named = zip(self.pair.names, told, strict=True)
        return "; ".join(f"{name}: {refused}" for name, refused in named if refused)

    def frames(self, start: int = 0) -> list[Json]:
        """Per step what each side's page says of it (None where it is done); "m": the marks of both."""
        stop = len(self)
        columns = [page.frames(start)[: max(stop - start, 0)] for page in self.pages]
        rows = []
        for at in range(max(stop - start, 0)):
            sides = [column[at] if at < len(column) else None for column in columns]
            marks = sorted({mark for side in sides if side for mark in side["m"]})
            step = max(side["s"] for side in sides if side)
            rows.append({"s": step, "m": marks, "e": 0, "c": 0, "sides": sides})
        return rows

    def together(self, index: int, totals: Sequence[Totals]) -> Json:
        return {"say": difference(self.pair.names, (totals[0], totals[1]))}


AnyPage = Page | SidesPage
Shown: TypeAlias = Union[Run, Replay, Pair, "Ranks", "FleetRun"]


# ---------------------------------------------------------------------- in words


def difference(names: tuple[str, str], totals: tuple[Totals, Totals]) -> str:
    """What sets two engines apart so far, in one sentence."""
    if not any(each.requests for each in totals):
        return f"{names[0]} and {names[1]}: no request has come yet"
    same = all(
        getattr(totals[0], field) == getattr(totals[1], field)
        for field in ("cached", "prompt", "wait", "worst")
    )
    if same:
        wait = f"a request waits {_steps(totals[0].wait)} on average"
        return f"No difference so far: both found {totals[0].hit:.0%} of the prompts in the cache, {wait}"
    return f"{_hits(names, totals)}; {_waits(names, totals)}"


def _hits(names: tuple[str, str], totals: tuple[Totals, Totals]) -> str:
    a, b = sorted(zip(names, totals, strict=True), key=lambda each: -each[1].hit)
    if f"{a[1].hit:.0%}" == f"{b[1].hit:.0%}":
        return f"both found {a[1].hit:.0%} of the prompts in the cache"
    return f"{a[0]} found {a[1].hit:.0%} of the prompts in the cache, {b[0]} {b[1].hit:.0%}"


def _waits(names: tuple[str, str], totals: tuple[Totals, Totals]) -> str:
    a, b = sorted(zip(names, totals, strict=True), key=lambda each: -each[1].wait)
    if f"{a[1].wait:.1f}" == f"{b[1].wait:.1f}":
        same = a[1].worst == b[1].worst
        worst = f"at most {a[1].worst}" + ("" if same else f" under {a[0]} and {b[1].worst} under {b[0]}")
        return f"requests wait {_steps(a[1].wait)} on average under both, {worst}"
    return (
        f"requests wait {_steps(a[1].wait)} on average under {a[0]} (worst {_worst(a[1])}), "
        f"{b[1].wait:.1f} under {b[0]} (worst {_worst(b[1])})"
    )


def _steps(wait: float) -> str:
    return f"{wait:.1f} step{'s' * (f'{wait:.1f}' != '1.0')}"


def _worst(totals: Totals) -> str:
    return f"{totals.worst}, {totals.worst_id}" if totals.worst else "0"
