"""What each request did, frame by frame: one account for the page's lanes, the notebook's and the timeline.

`Lives` takes in a recording's frames in order, as they come. A `Life` says it in two ways: by frame, where a
phase begins when it begins ("prefill" from the admission to the first token); and by step, as `spans`, where
"paused" means that the request held a row and others were computed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minirad.observe import events as ev
from minirad.observe.draft_events import TokensForced
from minirad.observe.event import request_order
from minirad.observe.recording import Recording
from minirad.observe.replay import Frame
from minirad.observe.snapshot import State
from viz.trace import Decode, decoder_for

# What a request does, by its phase, in a step in which it is not computed.
_NOT_COMPUTED = {"waiting": "waiting", "prefill": "paused", "decode": "paused", "retracted": "retracted"}


@dataclass(frozen=True, slots=True)
class Span:
    """A request did one thing from `start` to `end` (steps, both included).

    phase: "waiting", "prefill", "decode", "paused" or "retracted". tokens: computed in it. ending: on the
    last span, the finish reason.
    """

    request: str
    phase: str
    start: int
    end: int
    tokens: int = 0
    ending: str = ""


@dataclass(slots=True)
class Life:
    """All that is known of a request. Frames are counted from 0; ranges are [from, to).

    leader: whose prompt it has (its own id, unless it is a further sample). added: the frame; -1: it was
    there before the recording began, and its `tokens`, `max_new_tokens` and `n` are not known.
    prompt: its length (0: not known).
    phases: ["waiting", "prefill", "decode" or "retracted", from, to or None].
    deferrals: [from, to, why it was looked at and left waiting]. passes: (frame, the requests
    behind it that were admitted). forced: (frame, tokens that its grammar forced).
    hit, admitted: cached tokens and frame (-1: before the recording) of its first admission.
    node: on which it runs, or ended. commits: (frame, node).
    end: the frame in which it finished, for `reason`.
    """

    id: str
    leader: str
    added: int = -1
    tokens: tuple[int, ...] | None = None
    namespace: int = 0
    max_new_tokens: int = 0
    n: int = 1
    priority: int = 0
    prompt: int = 0
    phases: list[list[Any]] = field(default_factory=list)
    deferrals: list[list[Any]] = field(default_factory=list)
    passes: list[tuple[int, list[str]]] = field(default_factory=list)
    forced: list[tuple[int, int]] = field(default_factory=list)
    hit: int | None = None
    admitted: int | None = None
    node: int | None = None
    commits: list[tuple[int, int]] = field(default_factory=list)
    end: int | None = None
    reason: str = ""
    spans: list[Span] = field(default_factory=list)

    @property
    def phase(self) -> str:
        """What it does now."""
        return str(self.phases[-1][0])

    def enter(self, phase: str, frame: int) -> None:
        """Ends the present phase before a frame and begins another."""
        self.phases[-1][2] = frame
        self.phases.append([phase, frame, None])

    def defer(self, reason: str, frame: int) -> None:
        """Notes why it is left waiting; the same reason in the next frame makes the stretch longer."""
        last = self.deferrals[-1] if self.deferrals else None
        if last and last[2] == reason and last[1] in (frame, frame + 1):
            last[1] = frame + 1
        else:
            self.deferrals.append([frame, frame + 1, reason])

    def node_at(self, frame: int) -> int | None:
        """The node that it had last committed to by a frame."""
        at = bisect_right(self.commits, frame, key=lambda commit: commit[0]) - 1
        return self.commits[at][1] if at >= 0 else None

    def spans_until(self, step: int) -> list[Span]:
        """Spans up to a step; the one in progress is cut there and its ending left out."""
        past = [span for span in self.spans if span.start <= step]
        if past and past[-1].end > step:
            last = past[-1]
            past[-1] = Span(last.request, last.phase, last.start, step)
        return past

    def span(self, phase: str, step: int, tokens: int, ending: str) -> None:
        """Adds what it did in one more step."""
        last = self.spans[-1] if self.spans else None
        if last and last.end == step and tokens == 0:  # a frame between two steps
            self.spans[-1] = Span(self.id, last.phase, last.start, last.end, last.tokens, ending)
        elif last and last.phase == phase != "prefill":  # prefill chunks stay apart
            self.spans[-1] = Span(self.id, phase, last.start, step, last.tokens + tokens, ending)
        else:
            self.spans.append(Span(self.id, phase, step, step, tokens, ending))


class Lives:
    """Every request of a recording, by id in order of arrival; `take` the frames in order.

    changed: the last frame in which what `by_id` says of a request became another (its spans aside).
    admissions: requests in the order of their first admission.
    """

    def __init__(self, start: State) -> None:
        self.by_id: dict[str, Life] = {}
        self.changed: dict[str, int] = {}
        self.admissions: list[Life] = []
        self._present: dict[str, Life] = {}  # added, and not ended before this frame
        self._frames = 0
        spaces = {node["id"]: node["namespace"] for node in start["tree"]["nodes"]}
        for name, request in start["requests"].items():
            self._there(name, request, spaces)

    @staticmethod
    def of(recording: Recording) -> Lives:
        """Those of a recording as it is by now."""
        lives = Lives(recording.header["start"])
        lives.catch_up(recording.frames)
        return lives

    def catch_up(self, frames: Sequence[Frame]) -> None:
        """Takes in those of a recording's frames that are new."""
        for frame in frames[self._frames :]:
            self.take(frame)

    def take(self, frame: Frame) -> None:
        """Takes in the next frame."""
        index, self._frames = self._frames, self._frames + 1
        computed: dict[str, tuple[str, int]] = {}  # by request: computed as what, and how many tokens
        ended: dict[str, str] = {}
        for event in frame.events:
            if isinstance(event, ev.BatchScheduled):
                for name, tokens in zip(event.requests, event.tokens, strict=True):
                    prefills = name in self.by_id and self.by_id[name].phase == "prefill"
                    computed[name] = ("prefill" if prefills else "decode", tokens)
            elif isinstance(event, ev.RequestForked):
                self._fork(event, index)
                computed.setdefault(event.request, ("prefill", 0))  # it shares its leader's prefill
            elif isinstance(event, ev.RequestFinished | ev.RequestAborted):
                ended[event.request] = getattr(event, "reason", "abort")
                self._end(event.request, ended[event.request], index)
            else:
                self._note(event, index)
        self._note_passes(frame.events, index)
        for name, life in self._present.items():
            phase, tokens = computed.get(name, (_NOT_COMPUTED[life.phase], 0))
            life.span(phase, frame.step, tokens, ended.get(name, ""))
        for name in ended:
            self._present.pop(name, None)

    # ------------------------------------------------------------ single events

    def _known(self, name: str, phase: str = "waiting") -> Life:
        """A request by id; one that no event has announced is taken as one from before the recording."""
        if name not in self.by_id:
            self.by_id[name] = Life(name, name.partition(".")[0], phases=[[phase, 0, None]])
            self._present[name] = self.by_id[name]
        return self.by_id[name]

    def _there(self, name: str, request: State, spaces: Mapping[int, int]) -> None:
        """One from before the recording: what its state says. spaces: the namespace of each node."""
        life = self._known(name, "decode" if request["row"] >= 0 else "waiting")
        life.prompt, life.priority, life.node = request["prompt_tokens"], request["priority"], request["node"]
        life.namespace = spaces.get(request["node"], 0)
        if request["attempts"]:
            life.hit, life.admitted = request["cached"], -1
        self.changed[name] = 0

    def _note(self, event: ev.Event, index: int) -> None:
        name = getattr(event, "request", None)
        if isinstance(event, ev.RequestAdded):
            self._add(event, index)
        elif isinstance(event, ev.RequestDeferred) and name in self.by_id:
            self.by_id[event.request].defer(event.reason, index)
        elif isinstance(event, ev.RequestAdmitted):
            self._admit(event, index)
        elif isinstance(event, ev.TokenSampled) and name in self.by_id:
            if self.by_id[event.request].phase != "prefill":
                return
            self.by_id[event.request].enter("decode", index + 1)  # this step's pass was still the prefill
        elif isinstance(event, TokensForced) and name in self.by_id:
            self.by_id[event.request].forced.append((index, len(event.tokens)))
        elif isinstance(event, ev.Committed):
            life = self._known(event.request)
            life.node = event.node
            life.commits.append((index, event.node))
        elif isinstance(event, ev.RequestRetracted):
            self._known(event.request).enter("retracted", index)
        else:
            return
        self.changed[event.request] = index

    def _add(self, event: ev.RequestAdded, index: int) -> None:
        life = Life(
            event.request, event.request, index, event.token_ids, event.namespace, event.max_new_tokens,
            event.n, event.priority, len(event.token_ids), [["waiting", index, None]],
        )  # fmt: skip
        self.by_id[event.request] = self._present[event.request] = life

    def _admit(self, event: ev.RequestAdmitted, index: int) -> None:
        life = self._known(event.request)
        life.enter("prefill", index)
        life.node = event.node or None
        if event.attempt == 1:
            life.hit, life.admitted, life.prompt = event.cached, index, life.prompt or event.length
            self.admissions.append(life)

    def _fork(self, event: ev.RequestForked, index: int) -> None:
        """A further sample has its leader's prompt, and begins at its leader's node."""
        leader = self.by_id.get(event.leader) or Life(event.leader, event.leader)
        phase = "decode" if event.row >= 0 else "waiting"
        self.by_id[event.request] = self._present[event.request] = Life(
            event.request, leader.leader, index, leader.tokens, leader.namespace, leader.max_new_tokens,
            leader.n, leader.priority, leader.prompt, [[phase, index, None]], node=leader.node,
        )  # fmt: skip
        self.changed[event.request] = index

    def _end(self, name: str, reason: str, index: int) -> None:
        life = self.by_id.get(name)
        if life is None:
            return
        life.phases[-1][2] = index + 1
        life.end, life.reason = index, reason
        self.changed[name] = index

    def _note_passes(self, events: Sequence[ev.Event], index: int) -> None:
        """Which requests were left waiting in a frame that admitted one behind them: the scheduler's own rule
        (policies.is_behind), read from the events so that recordings tell it under every policy."""
        admitted = [e.request for e in events if isinstance(e, ev.RequestAdmitted)]
        if not admitted:
            return
        for name, life in self.by_id.items():
            if life.prompt and life.end is None and life.phase in ("waiting", "retracted"):
                by = [other for other in admitted if self._rank(other) > self._rank(name)]
                if by:
                    life.passes.append((index, by))
                    self.changed[name] = index

    def _rank(self, name: str) -> tuple[int, int, int]:
        return (-self.by_id[name].priority, *request_order(name))


def spans(recording: Recording) -> list[Span]:
    """What every request did when, request by request in order of arrival."""
    return [span for life in Lives.of(recording).by_id.values() for span in life.spans]


def prompts(recording: Recording) -> dict[str, tuple[int, ...]]:
    """Token ids by id of the requests that were added while it was recorded."""
    lives = Lives.of(recording).by_id.values()
    return {life.id: life.tokens for life in lives if life.tokens is not None and life.id == life.leader}


# ---------------------------------------------------------------------- what they found in the cache


@dataclass(frozen=True, slots=True)
class RequestHit:
    """How much of a request's prompt came from the cache, and H over all admitted so far.

    H = 1 - C / sum of prompt tokens, C the prompt tokens that had to be computed.
    """

    request: str
    step: int
    prompt_tokens: int
    cached_tokens: int
    cumulative: float
    text: str

    @property
    def rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def request_hits(recording: Recording, decode: Decode | None = None) -> list[RequestHit]:
    """Requests in order of their first admission (a retracted one is not counted again)."""
    decode = decode or decoder_for(recording.header)
    hits, cached, total = [], 0, 0
    for life in Lives.of(recording).admissions:
        if life.id == life.leader and life.hit is not None and life.admitted is not None:
            cached, total = cached + life.hit, total + life.prompt
            step, text = recording.frames[life.admitted].step, decode(life.tokens or ())
            hits.append(RequestHit(life.id, step, life.prompt, life.hit, cached / total, text))
    return hits
