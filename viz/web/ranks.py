"""One engine on several ranks: their trees side by side, what rank 0 sent, and whether all did the same.

    python -m viz.live --tp 2                  starts the ranks itself; under torchrun it is one of them
    python -m viz.live --replay run.jsonl      finds run.rank1.jsonl beside it

Each rank has a tree, a pool and a recording of its own: what is drawn of a rank is what it did itself.
A frame of rank 0's is shown beside what the others had done when their step had the same number.

`Ranks` stands where a run or a replay stands, `RanksPage` where a page does. Draws nothing (static/ranks.js).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minirad.errors import RanksDiffer
from minirad.model.load import load_tokenizer, resolve_model
from minirad.observe import events as ev
from minirad.observe import rank_events as re_
from minirad.observe.recording import Recording, read_recording
from minirad.observe.replay import Frame
from minirad.observe.snapshot import State
from minirad.ranks import unwatch, watch
from minirad.workloads import Workload
from viz.trace import Trace
from viz.view.text import short
from viz.web.page import Page
from viz.web.runs import Replay, Run
from viz.web.settings import Settings
from viz.web.sides import Json, SidesPage, Totals

MOST_RANKS = 8  # whose recordings are looked for beside a file
_LISTED, _SENTENCE = 60, 400  # things sent in one step that are listed; characters of a sentence
_NODE = re.compile(r"\bn([1-9]\d{0,8})\b")
_STEP = re.compile(r"^step \d+: ")
_OTHER = re.compile(r"\.rank\d+$")
_FIELDS = ("parent", "tokens", "slots", "lock_ref", "last_access", "created", "hits", "priority")


class Ranks:
    """A run or a replay of rank 0, and the others' recordings. All but the page is rank 0's.

    Where the ranks differ the run is over, as if it were done: it can be looked at, and another may begin.
    """

    def __init__(self, first: Run | Replay, others: Mapping[int, Recording]) -> None:
        """others: by the number of the rank; they may still grow."""
        self.first, self.others = first, others
        pages = [Page(Trace(each, first.trace.decode), first.page.labels) for each in others.values()]
        self.page = RanksPage([first.page, *pages], (0, *others))
        self.page.over = not first.drivable
        self.trace = self.page  # its length is that of all

    def __getattr__(self, name: str) -> Any:
        return getattr(self.first, name)

    @property
    def idle(self) -> bool:
        return bool(self.page.broken) or self.first.idle

    @property
    def refused(self) -> str:
        """What has to be told of this run: that the ranks differ, or which requests were refused."""
        return self.page.refused

    def advance(self) -> None:
        """One step on all ranks."""
        if self.page.broken:
            raise ValueError(self.page.broken)
        try:
            self.first.advance()
        except RanksDiffer as error:
            self.page.broken = f"the ranks differ: {error}"
            self.close()

    def close(self, broken: bool = False) -> None:
        """Ends the recordings. What rank 0 did alone, behind the last step of all, is shown from now on."""
        if self.page.over:
            return
        self.page.over = True
        broken = broken or bool(self.page.broken)
        self.first.close(broken)
        if isinstance(self.first, Run):
            if not broken:
                unwatch(self.first.engine)
            if self.first.path is not None:
                for rank, recording in self.others.items():
                    recording.save(rank_path(self.first.path, rank))


@dataclass(frozen=True, slots=True)
class Said:
    """What the ranks said to each other within a frame of rank 0's, or (sums) up to its end.

    told, agreed: 1 if anything was sent, and if digests were compared and equal.
    """

    told: int = 0
    requests: tuple[str, ...] = ()
    aborts: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    bytes: int = 0
    agreed: int = 0
    digest: str = ""
    differed: tuple[re_.RanksDiffered, ...] = ()

    @classmethod
    def of(cls, frame: Frame) -> Said:
        said = cls()
        for event in frame.events:
            if isinstance(event, re_.RanksTold):
                said = replace(
                    said, told=1, requests=said.requests + event.requests,
                    aborts=said.aborts + event.aborts, other=said.other + event.other,
                    bytes=said.bytes + event.bytes,
                )  # fmt: skip
            elif isinstance(event, re_.RanksAgreed):
                said = replace(said, agreed=1, digest=event.digest)
            elif isinstance(event, re_.RanksDiffered):
                said = replace(said, differed=(*said.differed, event))
        return said

    @property
    def names(self) -> list[str]:
        """All that was sent, in words."""
        aborts = [f"the end of {name}" for name in self.aborts]
        return [*self.requests, *aborts, *(f"“{short(word, 60)}”" for word in self.other)]


@dataclass(frozen=True, slots=True)
class Sums:
    """What rank 0 sent so far, and what each rank decided for itself meanwhile."""

    steps: int = 0
    requests: int = 0
    aborts: int = 0
    other: int = 0
    bytes: int = 0
    agreed: int = 0
    slots: int = 0
    tokens: int = 0

    def plus(self, said: Said, frame: Frame) -> Sums:
        """The same behind one more frame of rank 0's."""
        slots = sum(len(event.slots) for event in frame.events if isinstance(event, ev.SlotsAllocated))
        step = said.told and (frame.events[-1].ends_frame or said.differed)
        return Sums(
            self.steps + bool(step), self.requests + len(said.requests), self.aborts + len(said.aborts),
            self.other + len(said.other), self.bytes + said.bytes, self.agreed + said.agreed,
            self.slots + slots, self.tokens + sum(isinstance(e, ev.TokenSampled) for e in frame.events),
        )  # fmt: skip


class RanksPage(SidesPage):
    """The ranks' pages as one, by rank 0's frames.

    over: no rank does anything any more. broken: a sentence on how the ranks differed, or "".
    """

    kind = "ranks"

    def __init__(self, pages: Sequence[Page], numbers: Sequence[int]) -> None:
        super().__init__(pages, [f"rank {number}" for number in numbers])
        self.numbers, self.over, self.broken = tuple(numbers), False, ""
        self._recordings = [page.trace.recording for page in pages]
        self._said: list[Said] = []
        self._sums = [Sums()]
        config = self._recordings[0].header.get("config")
        self.tp = int(config.get("tp", len(numbers))) if isinstance(config, dict) else len(numbers)

    def __len__(self) -> int:
        """Frames of rank 0's up to the last step that all have done; in the end all."""
        frames = self._recordings[0].frames
        if self.over:
            return len(frames)
        return bisect_right(frames, min(map(_step, self._recordings)), key=lambda frame: frame.step)

    def place(self, number: int, index: int) -> int:
        if number == 0 or index == 0:
            return index
        step, other = self._recordings[0].frames[index - 1].step, self._recordings[number]
        at = bisect_right(other.frames, step, key=lambda frame: frame.step)
        if at == len(other) and at and not _ends_step(other, at) and not self._is_end(index):
            return at - 1
        return at

    def _is_end(self, index: int) -> bool:
        """Rank 0's last frame, of what came behind its last step: of the others, too."""
        first = self._recordings[0]
        if not self.over or index < len(first) or _ends_step(first, index):
            return False
        return bool(self._heard(index - 1).differed) or not self.broken

    def title(self, index: int, totals: Sequence[Totals]) -> str:
        first, differed = self._recordings[0], self._heard(index - 1).differed
        if differed:
            return f"step {differed[0].step}"
        step = first.frames[index - 1].step
        return f"step {step}" if _ends_step(first, index) else f"after step {step}"

    def done(self, number: int, index: int) -> bool:
        return False

    @property
    def refused(self) -> str:
        return self.broken or self.pages[0].refused

    def meta(self, title: str = "", note: str = "") -> Json:
        return {**super().meta(title, note), "tp": self.tp, "numbers": list(self.numbers)}

    def frames(self, start: int = 0) -> list[Json]:
        """Per frame of rank 0's its marks ("differ": digests were not equal), and what was sent: "t", as
        [requests, aborts, other things, bytes]; "a": 1 equal digests, 0 no digest, -1 not equal."""
        stop = len(self)
        rows = []
        for at, row in enumerate(self.pages[0].frames(start)[: max(stop - start, 0)], start):
            said = self._heard(at)
            sent = [len(said.requests), len(said.aborts), len(said.other), said.bytes]
            marks = [*row["m"], *(["differ"] if said.differed else [])]
            agreed = -1 if said.differed else said.agreed
            rows.append({"s": row["s"], "m": marks, "e": 0, "c": 0, "t": sent, "a": agreed})
        return rows

    def together(self, index: int, totals: Sequence[Totals]) -> Json:
        said = self._heard(index - 1) if index else Said()
        told = [(each.rank, short(each.what, _SENTENCE)) for each in said.differed]
        unlike = told or self._unlike(index)
        return {
            "say": sentence(said, index, unlike, self.tp),
            "tone": "evict" if unlike else "new" if said.names else "compare",
            "told": self._told(said) if said.told else None,
            "digest": short(said.digest, 64),
            "at": [self._step_of(number, index, said) for number in range(len(self.pages))],
            "unlike": [[rank, what, _named(what)] for rank, what in unlike],
            "sums": _as_json(self._sums[index]),
        }

    def _step_of(self, number: int, index: int, said: Said) -> int:
        """The step that a rank is shown after, or (where ranks differ) in: old recordings have rank 0 alone
        in that step."""
        place, recording = self.place(number, index), self._recordings[number]
        if said.differed and (number == 0 or (place and not _ends_step(recording, place))):
            return said.differed[0].step
        return recording.frames[place - 1].step if place else int(recording.header["start"]["step"])

    def _told(self, said: Said) -> Json:
        requests = self.pages[0].requests()
        texts = {name: requests[name]["label"] or requests[name]["text"] for name in requests}
        prompts = {name: requests[name]["prompt"] for name in requests}
        return {
            "requests": [
                [name, texts.get(name, ""), prompts.get(name, 0)] for name in said.requests[:_LISTED]
            ],
            "aborts": [[name, texts.get(name, "")] for name in said.aborts[:_LISTED]],
            "other": [short(word, 200) for word in said.other[:_LISTED]],
            "more": sum(max(len(each) - _LISTED, 0) for each in (said.requests, said.aborts, said.other)),
            "bytes": said.bytes,
        }

    def _heard(self, frame: int) -> Said:
        with self._lock:
            for each in self._recordings[0].frames[len(self._said) : frame + 1]:
                self._said.append(Said.of(each))
                self._sums.append(self._sums[-1].plus(self._said[-1], each))
            return self._said[frame]

    def _unlike(self, index: int) -> list[tuple[int, str]]:
        """How the recorded trees differ where all have just ended the same step: whether there is a digest
        or not, a picture does not say "equal" of two that are not."""
        places = [self.place(number, index) for number in range(len(self.pages))]
        if index == 0 or not all(map(_ends_step, self._recordings, places)):
            return []
        states = [page.trace.view("step", at).state for page, at in zip(self.pages, places, strict=True)]
        found = [difference(states[0], state) for state in states[1:]]
        numbered = zip(self.numbers[1:], found, strict=True)
        return [(number, f"rank {number} {what}") for number, what in numbered if what]


def _named(what: str) -> list[int]:
    """The node that a sentence is about; what stands behind its name may be anybody's text."""
    found = _NODE.search(what)
    return [int(found[1])] if found else []


def _step(recording: Recording) -> int:
    """The step that a recording has come to."""
    frames = recording.frames
    return frames[-1].step if frames else int(recording.header["start"]["step"])


def _ends_step(recording: Recording, place: int) -> bool:
    events = recording.frames[place - 1].events if place else ()
    return bool(events) and events[-1].ends_frame


def _as_json(sums: Sums) -> Json:
    return {name: getattr(sums, name) for name in Sums.__slots__}


# ---------------------------------------------------------------------- in words


def sentence(said: Said, index: int, unlike: Sequence[tuple[int, str]], ranks: int) -> str:
    """What was sent in a step, and whether all ranks did the same with it."""
    if unlike:
        told = "; ".join(_STEP.sub("", what) for _, what in unlike)
        return told[:1].upper() + told[1:]
    if index == 0:
        return f"{ranks} ranks, each with a tree and a pool of its own: nothing was sent yet"
    if not said.told:
        return "Between two steps: what was done here is sent with the next one"
    size = f"{said.bytes:,} byte{'s' * (said.bytes != 1)}"
    sent = f"Rank 0 sent {ev.listed(said.names or ['nothing but the word to go on'], 5)}"
    all_ranks = "both ranks" if ranks == 2 else f"all {ranks} ranks"
    same = f"what {all_ranks} made of it is the same" if said.agreed else f"{all_ranks} went on from it"
    return f"{sent} ({size}, no slots, no drawn tokens); {same}"


def difference(state: State, other: State) -> str:
    """What another rank's recorded state says that rank 0's does not, at the first node; "" if nothing."""
    nodes = {node["id"]: node for node in state["tree"]["nodes"]}
    others = {node["id"]: node for node in other["tree"]["nodes"]}
    for number in sorted({*nodes, *others}):
        if number not in others:
            return f"has no n{number}, rank 0 has"
        if number not in nodes:
            return f"has n{number}, rank 0 has not"
        for name in _FIELDS:
            own, its = nodes[number].get(name), others[number].get(name)
            if own != its:
                told = f"{its} at n{number}, rank 0 has {own}" if isinstance(own, int) else f"at n{number}"
                return f"has other {name} {told}" if not isinstance(own, int) else f"has {name} {told}"
    if state["free"] != other["free"]:
        return f"has {other['free']} free slots, rank 0 has {state['free']}"
    return ""


# ---------------------------------------------------------------------- from files


def _sizes(recording: Recording) -> tuple[Any, ...]:
    start = recording.header["start"]
    return start["step"], start["kv_tokens"], start["tree"]["page_size"]


def rank_path(path: str | Path, rank: int) -> Path:
    """run.jsonl as run.rank1.jsonl."""
    path = Path(path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def recorded_ranks(path: str | Path, recording: Recording) -> tuple[dict[int, Recording], list[str]]:
    """The other ranks' recordings that lie beside one of rank 0, and what is to be said of the rest."""
    config = recording.header.get("config")
    tp = config.get("tp", 1) if isinstance(config, dict) else 1
    found: dict[int, Recording] = {}
    notices: list[str] = []
    if not isinstance(tp, int) or _OTHER.search(Path(path).stem):
        return found, notices
    for rank in range(1, min(tp, MOST_RANKS)):
        file = rank_path(path, rank)
        if not file.exists():
            notices.append(f"rank {rank} is not shown: there is no {file.name} beside {Path(path).name}")
            continue
        other = read_recording(file)
        if other.header.get("config") != config or _sizes(other) != _sizes(recording):
            notices.append(f"rank {rank} is not shown: {file.name} is of another run")
            continue
        if other.missing:
            notices.append(other.missing)
        found[rank] = other
    return found, notices


def watched(number: int, settings: Settings, workload: Workload | None) -> Ranks:
    """A run of rank 0 with a growing recording of every other rank."""
    load_tokenizer(resolve_model(settings.model))  # what takes its time, on all ranks at once
    run = Run(number, settings, workload)
    return Ranks(run, dict(enumerate(watch(run.engine), start=1)))
