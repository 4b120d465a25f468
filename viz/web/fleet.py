"""The page of a stream of other servers: what it shows of a position, and who brings it there.

`FleetPage` is a page over a recording of a stream (minirad/fleet): ranks in place of a pool, growth and
shares in place of requests, one rank alone where that is asked for. Nothing of a stream is trusted: its texts
are shortened and made visible here, and set as text by static/fleet.js.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from minirad.observe import fleet_events as fe
from minirad.observe.event import Event
from minirad.observe.route_events import WorkerChanged, has_routes, judged_in_the_end, worker_name
from minirad.observe.snapshot import State
from viz.draw import fleet as cards
from viz.draw import tree
from viz.trace import Trace, View
from viz.view import fleet, routes
from viz.view.text import short as short
from viz.web.page import Page
from viz.words import summary, word_of

Json = dict[str, Any]
NEWS = 25  # frames for which a gap, a restart or garbage is still told
_ENDS = 160  # tokens of either end of a node that are spelled in its box
_TEXT = 600  # characters of them
_SENTENCE = 400  # characters of an event's sentence
_AWAY = ("connecting", "lost")
MEDIA_WORDS = ("GPU", "CPU", "disk", "external", "may be there")
_NEWS = (fe.GapSeen, fe.RankRestarted, fe.TroubleSeen, fe.RankStateSeen)


class FleetPage(Page):
    """The page's data about the recording of a stream, finished or growing."""

    def __init__(self, trace: Trace, labels: Mapping[str, str] | None = None) -> None:
        super().__init__(trace, labels)
        self.sized = True  # how large blocks are has been told
        self._growth = fleet.Growth(trace.recording.header["start"])
        self._sums = [self._growth.now]  # after each frame, the start first
        self._news: list[tuple[int, Event]] = []  # troubles by frame
        self._ranks = {int(row["rank"]) for row in trace.recording.header["start"]["tree"]["ranks"]}
        self.routed = has_routes(trace.recording.header["start"])  # the ranks are workers behind a router
        header = trace.recording.header
        self._routing = routes.Followed(header["start"], routes.Limits.of(header.get("notes")))
        self._policy_sums: list[routes.Sums] = [{}]  # after each frame, the start first

    def meta(self, title: str = "", note: str = "") -> Json:
        """What does not change: no pool and no policies of ours."""
        meta = super().meta(short(title, 120), note)
        words = dict(zip(fleet.SIGNS, MEDIA_WORDS, strict=True))
        with self._lock:
            self._catch_up()  # a file tells by its events only that there is a router
        return {
            **meta,
            **({} if self.sized else {"page_size": 0}),
            "model": "",
            "schedule_policy": "",
            "fleet": {"media": words, "colours": cards.COLOURS, "routed": self.routed},
        }

    def _frame_record(self, index: int) -> Json:
        frame = self.trace.recording.frames[index]
        grown = self._growth.take(frame.events)
        self._sums.append(grown)
        self._routing.take(frame.events)
        self._policy_sums.append(self._routing.sums(self._policy_sums[-1], frame.events))
        self.routed = self.routed or any(isinstance(event, WorkerChanged) for event in frame.events)
        self._news += [(index, event) for event in frame.events if isinstance(event, _NEWS)]
        self._ranks.update(event.rank for event in frame.events if isinstance(event, fe.RankStateSeen))
        ended = frame.events[-1] if frame.events else None
        if isinstance(ended, fe.BatchesTaken):
            self._ranks.update(ended.ranks)
        return {
            "s": frame.step,
            "k": getattr(ended, "kind", "") if ended is not None and ended.ends_frame else "",
            "u": [0, 0, 0, 0],
            "m": sorted({event.mark for event in frame.events if event.mark}),
            "e": len(frame.events),
            "c": self.trace.position_of("scene", index),
            "b": grown.media,
            "d": grown.tokens,
            "v": grown.lost,
        }

    def ranks(self) -> list[int]:
        """All that were told of by now; each can be asked for at any position."""
        with self._lock:
            self._catch_up()
            return sorted(self._ranks)

    # ------------------------------------------------------------ one position

    def view(
        self, granularity: str, index: int, opened: Collection[int] = frozenset(), height: int = 400,
        rank: int | None = None,
    ) -> Json:  # fmt: skip
        """As Page.view; rank: of what it alone holds. ValueError: there is no such rank."""
        shown = super().view(granularity, index, opened, height, rank)
        events = self._look(granularity, index, rank).events
        if len(events) > 1:  # that no batch came is not worth a word beside what did
            told = [e for e in events if not isinstance(e, fe.BatchesTaken) or any(e.batches)]
            shown["kind"], shown["say"] = summary(told)
        if rank is not None and not events and shown["frame"] >= 0:
            shown["say"] = f"Nothing of rank {rank} changed here"
        if shown["frame"] < 0:
            shown["say"] = self._beginning()
        return {**shown, "say": short(shown["say"], _SENTENCE), "rank": rank}

    def _beginning(self) -> str:
        nodes = len(self.trace.recording.header["start"]["tree"]["nodes"])
        if nodes:
            return f"What was known when this part of the recording began: {nodes:,} node{'s' * (nodes != 1)}"
        return "Nothing has come yet: the tree is empty"

    def _look(self, granularity: str, index: int, rank: int | None) -> View:
        view = self.trace.view(granularity, index)
        if rank is None:
            return view
        if rank not in self.ranks():
            known = ", ".join(map(str, self.ranks()[:16])) or "none"
            raise ValueError(f"there is no rank {rank} in this stream: its ranks are {known}")
        return view.once(f"rank {rank}", lambda: fleet.alone(view, rank))

    def _parts(self, view: View, options: tree.Options) -> dict[str, tuple[Callable[[], Any], Any]]:
        parts = super()._parts(view, options)
        nothing: dict[str, Any] = {
            "pool": [], "usage": [0, 0, 0, 0], "requests": {}, "left": {}, "why": [], "quiz": None,
        }  # fmt: skip
        for name, empty in nothing.items():
            parts[name] = partial(deepcopy, empty), empty
        parts["fleet"] = (lambda: self._fleet(view), {"ranks": [], "shares": [], "wrong": ""})
        if self.routed:
            parts["routes"] = (
                lambda: self._routes(view),
                {"workers": [], "last": [], "sums": [], "policy": ""},
            )
        return parts

    def _fleet(self, view: View) -> Json:
        whole = self.trace.view(view.granularity, view.index)  # view may be of one rank alone
        ended = view.granularity != "event" or view.index == self.trace.position_of("event", view.frame)
        found = self._sums[view.frame + 1] if ended else whole.once("sums", lambda: fleet.sums(whole.state))
        ranks = whole.state["tree"]["ranks"]
        return {
            "ranks": [self._rank(row, found.ranks.get(int(row["rank"]), {})) for row in ranks],
            "shares": list(found.shares),
            "wrong": short(self._wrong(whole.state, self._still_news(view)), _SENTENCE),
        }

    def _wrong(self, state: State, news: Sequence[Event]) -> str:
        """Of workers behind a router it is told which are dead: their connections come and go with them."""
        if not self.routed:
            return fleet.wrong(state, news)
        ranks = [{**row, "state": "live"} for row in state["tree"]["ranks"]]
        told = [event for event in news if not isinstance(event, fe.RankRestarted)]
        rest = fleet.wrong({**state, "tree": {**state["tree"], "ranks": ranks}}, told)
        return "; ".join(filter(None, (routes.dead(state["tree"].get("workers", ())), rest)))

    def _rank(self, row: State, media: Mapping[str, tuple[int, int]]) -> Json:
        numbers = {name: row[name] for name in ("rank", "seq", "batches", "replayed", "lost", "unknown")}
        texts = {name: short(str(row[name]), 200) for name in ("where", "state")}
        return {**numbers, **texts, "media": {letter: list(sums) for letter, sums in media.items()}}

    def _routes(self, view: View) -> Json:
        """The workers behind a router, the last requests that it sent to them, and sums by policy."""
        tree = view.state["tree"]
        workers, last = tree.get("workers", []), tree.get("routes", [])
        sums = self._routing.sums(self._policy_sums[max(view.frame, 0)], view.so_far)
        return {
            "workers": [_worker(row) for row in workers],
            "last": [self._route(row) for row in reversed(last)],
            "policy": last[-1]["policy"] if last else "",
            "sums": [_sum(policy, each, len(workers)) for policy, each in sums.items()],
        }

    def _route(self, row: State) -> Json:
        limits = self._routing.limits if row["policy"] in routes.WITH_THRESHOLDS else None
        names = ("worker", "matches", "loads", "tokens", "outcome", "cached")
        best, regret = row["best"], row["regret"]
        if row["outcome"] == "finished":
            best, regret = judged_in_the_end(best, regret, row["cached"])
        return {
            **{name: row[name] for name in names},
            "best": best,
            "regret": regret,
            "id": short(str(row["request"]), 40),
            "policy": short(str(row["policy"]), 40),
            "reason": short(str(row["reason"]), _SENTENCE),
            "match_limit": limits.match(row["tokens"]) if limits else None,
            "load_limit": self._routing.load_limit(row["request"], row["worker"]),
        }

    def _still_news(self, view: View) -> list[Event]:
        """Troubles of the last frames before a position; of its own frame those that have come by then."""
        with self._lock:
            first = bisect_right(self._news, view.frame - NEWS, key=lambda each: each[0])
            last = bisect_left(self._news, view.frame, key=lambda each: each[0])
            before = [event for _, event in self._news[first:last]]
        return told_still([*before, *(event for event in view.so_far if isinstance(event, _NEWS))])

    def _node(self, node: State, view: View, most: int | None = None) -> Json:
        tokens = node["tokens"][:: 2 if node["pairs"] else 1]
        cut = len(tokens) > 2 * _ENDS
        ends = [tokens[:_ENDS], tokens[-_ENDS:]] if cut else [tokens]
        text = " … ".join(short(self.trace.decode(end), _TEXT) for end in ends)
        return {
            "status": view.status[node["id"]],
            "parent": node["parent"],
            "lock": 0,
            "t": node["last_access"],
            "created": node["created"],
            "hits": 0,
            "priority": 0,
            "space": node["namespace"],
            "named": cards.space_name(view.state["tree"], node) if node["namespace"] else "",
            "blocks": node["blocks"],
            "held": {rank: fleet.sign(media) for rank, media in node["held"].items()},
            "body": {"text": text, "slots": [], "size": node["units"], "pieces": []},
        }

    def _event(self, event: Event, present: bool, future: bool) -> Json:
        return {
            **word_of(event)._asdict(),
            "text": short(event.describe(), _SENTENCE),
            "nodes": list(event.touches()),
            "requests": [],
            "on": present,
            "later": future,
        }


def _worker(row: State) -> Json:
    numbers = {name: row[name] for name in ("load", "requests", "tokens", "cached", "regret")}
    why = short(" ".join(filter(None, (str(row["where"]), str(row["why"])))), 200)
    return {
        "name": worker_name(row["worker"]),
        "rank": row["worker"],
        "state": row["state"],
        "why": why,
        **numbers,
    }


def _sum(policy: str, found: routes.PolicySum, workers: int) -> Json:
    balance = found.balance(workers)
    return {
        "policy": short(policy, 40), "tries": found.tries, "tokens": found.tokens, "cached": found.cached,
        "moved": found.moved, "failed": found.failed, "regret": found.regret if found.judged else None,
        "balance": None if balance is None else round(balance, 3),
    }  # fmt: skip


def told_still(events: Iterable[Event]) -> list[Event]:
    """Gaps, restarts and troubles that still stand: of a connection that is there again, none from before."""
    told: list[Event] = []
    states: dict[int, str] = {}
    for event in events:
        if isinstance(event, fe.RankStateSeen):
            if states.get(event.rank, "lost") in _AWAY and event.now not in _AWAY:
                told = [e for e in told if not (isinstance(e, fe.TroubleSeen) and e.rank == event.rank)]
            states[event.rank] = event.now
        else:
            told.append(event)
    return told
