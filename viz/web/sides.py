"""Several pages as one, by step only: what two engines that are compared (compare.py) and the ranks of one
engine (ranks.py) have in common. Draws nothing (static/sides.js does).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minirad.observe import events as ev
from viz.web.page import Page

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Totals:
    """One engine up to a frame. Waits are steps from arrival to first admission, or up to now.

    prompt, cached: tokens, at first admissions. worst_id: the request that waited longest. steps: of the
    engine.
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


class SidesPage:
    """Pages side by side, each with a name. How their steps belong together is said by who is one."""

    kind = ""  # which of static/*.js draws it

    def __init__(self, pages: Sequence[Page], names: Sequence[str]) -> None:
        self.pages, self.names = tuple(pages), tuple(names)
        self._lock = threading.RLock()
        self._counts: tuple[list[tuple[int, int]], ...] = tuple([] for _ in pages)  # evicted, retracted

    def __len__(self) -> int:
        """Steps that can be shown."""
        raise NotImplementedError

    def place(self, number: int, index: int) -> int:
        """The position of one page that stands beside position `index` of all."""
        return min(index, len(self.pages[number].trace))

    def done(self, number: int, index: int) -> bool:
        """Nothing comes behind position `index` of all on this page."""
        raise NotImplementedError

    @property
    def refused(self) -> str:
        """What is said of requests that were refused."""
        return self.pages[0].refused

    def meta(self, title: str = "", note: str = "") -> Json:
        """What does not change during a run."""
        return {**self.pages[0].meta(title, note), "names": list(self.names), "refused": self.refused}

    def requests(self, since: int = 0) -> dict[str, Json]:
        """Requests of all sides, as "0 R1" and "1 R1", that changed at position `since` of all or later.

        Of each also the steps that were taken before it came, and before it was first admitted.
        """
        return {
            f"{side} {name}": {**request, **self._steps_of(side, request)}
            for side, page in enumerate(self.pages)
            for name, request in page.requests(self.place(side, since)).items()
        }

    def _steps_of(self, number: int, request: Json) -> Json:
        began = request.get("admitted")
        return {
            "came": self.steps(number, request["added"]),
            **({} if began is None else {"began": self.steps(number, began)}),
        }

    def steps(self, number: int, place: int) -> int:
        """Steps that one side's engine has taken up to a position of its page: a frame that was cut off
        between two steps is none."""
        recording = self.pages[number].trace.recording
        start = int(recording.header["start"]["step"])
        return recording.frames[place - 1].step - start if place > 0 else 0

    def title(self, index: int, totals: Sequence[Totals]) -> str:
        """What position `index` is called, if it is not the start."""
        return f"step {max(each.steps for each in totals)}"

    def frames(self, start: int = 0) -> list[Json]:
        """One record per step from `start` on."""
        raise NotImplementedError

    def view(
        self, granularity: str, index: int, opened: Collection[int] = frozenset(), height: int = 400,
        rank: int | None = None,
    ) -> Json:  # fmt: skip
        """All sides at position `index`, and what there is to say of them. ValueError: not there."""
        if rank is not None:
            raise ValueError(f"rank {rank}: only a stream of other servers has ranks")
        if granularity != "step":
            raise ValueError(f"what is shown side by side goes by step, not by {granularity}")
        if not 0 <= index <= len(self):
            raise ValueError(f"there is no step {index}: positions go from 0 to {len(self)}")
        places = [self.place(number, index) for number in range(len(self.pages))]
        totals = [self.totals(number, index) for number in range(len(self.pages))]
        return {
            "g": "step",
            "i": index,
            "frame": index - 1,
            "title": self.title(index, totals) if index else "the start",
            "sides": [
                page.view("step", at, opened, height) for page, at in zip(self.pages, places, strict=True)
            ],
            "totals": [{**asdict(each), "hit": each.hit} for each in totals],
            **self.together(index, totals),
        }

    def together(self, index: int, totals: Sequence[Totals]) -> Json:
        """What is said of all sides at a position: "say", a sentence, and what else there is."""
        raise NotImplementedError

    def totals(self, number: int, index: int) -> Totals:
        """One side up to position `index` of all."""
        page, frame = self.pages[number], self.place(number, index) - 1
        known = [r for r in page.requests().values() if r["added"] <= frame and not r["sample"]]
        admitted = [r for r in known if r["hit"] is not None and r["admitted"] <= frame]
        steps, now = [self._steps_of(number, r) for r in known], self.steps(number, frame + 1)
        waits = [
            (min(each.get("began", now), now) - each["came"], r["id"])
            for each, r in zip(steps, known, strict=True)
        ]
        longest, which = max(waits, key=lambda wait: wait[0], default=(0, ""))
        mean = round(sum(wait for wait, _ in waits) / max(len(waits), 1), 1)
        evicted, retracted = self._counted(number, frame)
        return Totals(
            sum(r["prompt"] for r in admitted), sum(r["hit"] for r in admitted), len(known),
            sum(r["end"] is not None and r["end"] <= frame for r in known),
            mean, longest, which, evicted, retracted, now, self.done(number, index),
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
