"""One workload on two engines that differ in one policy, side by side and stepping together.

    python -m viz.live --compare lpm,fcfs
    python -m viz.live --compare lru,lfu --export both.html

Step n of one engine is shown beside step n of the other; the one that is done first keeps its last step.
One sentence tells what they found in the cache and how long they let requests wait.

`Pair` stands where a run stands, `PairPage` where a page does. Draws nothing (static/compare.js does).
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from minirad.observe import events as ev
from viz.web.page import Page
from viz.web.runs import Replay, Run
from viz.web.settings import Settings
from viz.web.stream import FleetRun

Json = dict[str, Any]


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


@dataclass(frozen=True, slots=True)
class Totals:
    """One engine up to a frame. Waits are steps from arrival to first admission, or up to now.

    prompt, cached: tokens, at first admissions. worst_id: the request that waited longest.
    """

    prompt: int
    cached: int
    requests: int
    finished: int
    wait: float
    worst: int
    worst_id: str
    evicted: int
    retracted: int
    steps: int
    done: bool

    @property
    def hit(self) -> float:
        return self.cached / self.prompt if self.prompt else 0.0


class PairPage:
    """Two pages as one, by step only."""

    kind = "compare"

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.pages = (pair.sides[0].page, pair.sides[1].page)
        self._lock = threading.RLock()
        self._counts: tuple[list[tuple[int, int]], ...] = ([], [])  # evicted tokens, retractions so far

    def __len__(self) -> int:
        """Steps that both have taken, or the one that goes on where the other is done."""
        first, second = self.pair.sides
        lengths = (len(first.trace), len(second.trace))
        if first.idle == second.idle:
            return max(lengths) if first.idle else min(lengths)
        return lengths[1] if first.idle else lengths[0]

    def meta(self, title: str = "", note: str = "") -> Json:
        first = self.pages[0].meta(title, note)
        return {
            **first,
            "names": list(self.pair.names),
            "compare": self.pair.settings.compare,
            "refused": self.refused,
        }

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
            rows.append({"s": start + at + 1, "m": marks, "e": 0, "c": 0, "sides": sides})
        return rows

    def requests(self, since: int = 0) -> dict[str, Json]:
        """Requests of both sides, as "0 R1" and "1 R1"."""
        return {
            f"{side} {name}": request
            for side, page in enumerate(self.pages)
            for name, request in page.requests(since).items()
        }

    def view(
        self, granularity: str, index: int, opened: Collection[int] = frozenset(), height: int = 400,
        rank: int | None = None,
    ) -> Json:  # fmt: skip
        """Both sides at their step `index`, and the difference in one sentence. ValueError: not there."""
        if rank is not None:
            raise ValueError(f"rank {rank}: only a stream of other servers has ranks")
        if granularity != "step":
            raise ValueError(f"two engines are compared by step, not by {granularity}")
        if not 0 <= index <= len(self):
            raise ValueError(f"there is no step {index}: positions go from 0 to {len(self)}")
        sides, totals = [], []
        for number, page in enumerate(self.pages):
            at = min(index, len(page.trace))
            sides.append(page.view("step", at, opened, height))
            totals.append(self._totals(number, index))
        return {
            "g": "step",
            "i": index,
            "frame": index - 1,
            "title": f"step {index}" if index else "the start",
            "say": difference(self.pair.names, (totals[0], totals[1])),
            "sides": sides,
            "totals": [{**asdict(each), "hit": each.hit} for each in totals],
        }

    def _totals(self, number: int, index: int) -> Totals:
        page, frame = self.pages[number], index - 1
        known = [r for r in page.requests().values() if r["added"] <= frame and not r["sample"]]
        admitted = [r for r in known if r["hit"] is not None and r["admitted"] <= frame]
        last = min(frame, len(page.trace) - 1)
        waits = [(min(r.get("admitted", last + 1), last + 1) - r["added"], r["id"]) for r in known]
        longest, which = max(waits, key=lambda wait: wait[0], default=(0, ""))
        mean = round(sum(wait for wait, _ in waits) / max(len(waits), 1), 1)
        evicted, retracted = self._counted(number, last)
        return Totals(
            sum(r["prompt"] for r in admitted), sum(r["hit"] for r in admitted), len(known),
            sum(r["end"] is not None and r["end"] <= frame for r in known),
            mean, longest, which, evicted, retracted, last + 1,
            bool(self.pair.sides[number].idle and index >= len(page.trace)),
        )  # fmt: skip

    def _counted(self, number: int, frame: int) -> tuple[int, int]:
        """Tokens evicted from the device and requests retracted up to a frame."""
        counts, frames = self._counts[number], self.pages[number].trace.recording.frames
        with self._lock:
            for each in frames[len(counts) : frame + 1]:
                evicted, retracted = counts[-1] if counts else (0, 0)
                for event in each.events:
                    gone = ev.device_eviction(event)
                    evicted += 0 if gone is None else len(gone.slots)
                    retracted += isinstance(event, ev.RequestRetracted)
                counts.append((evicted, retracted))
            return counts[frame] if frame >= 0 else (0, 0)


AnyPage = Page | PairPage
Shown = Run | Replay | Pair | FleetRun


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
