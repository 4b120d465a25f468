"""What the live page and exported files show, as plain data (JSON): no HTML, no HTTP, no engine.

Three parts, from cheap to dear: `meta` (once per run), one small record per frame and per request
(kept up to date as a recording grows), and a whole view of one position, made when it is asked for.
What these say is viz/view's; here it gets the short names that static/page.js draws.
"""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from minirad.observe import events as ev
from minirad.observe.event import ReplayState
from minirad.observe.replay import Frame, apply_frame
from minirad.observe.snapshot import State
from viz.draw import tree
from viz.trace import (
    Trace,
    View,
    has_tiers,
    host_used,
    is_fleet,
    key_tokens,
    nodes_of,
    path_of,
    requests_of,
    summary_of,
    text_tokens,
    tier_of,
    tier_sums,
    units,
)
from viz.view.disk import Disk, block_units, from_disk
from viz.view.drafts import DraftBook, is_drafting
from viz.view.pool import host_pool, page_map, runs
from viz.view.quiz import asked_about
from viz.view.requests import Life, Lives
from viz.view.text import asked_text, listed, pretty, short, times, visible
from viz.view.usage import Usage, counted_usage, usage_of
from viz.view.victims import Victim, first_frame, victims
from viz.web.drafts import NOTHING, drafts_part
from viz.web.told import Moments, Told, no_text
from viz.words import PASSED, word_of

Json = dict[str, Any]
_TEXT = 600  # characters of a node's text that a view carries
_CANDIDATES = 12
_VICTIMS = 8  # that are explained at a time
_LANES = 60  # requests that the page lists at a time
_EVENTS = 400  # of a position that are listed
_CELLS = 4096  # of the pool's map: MOST_CELLS of static/parts.js
# Of a large tree: nodes that are told of, how many tokens of each one by one, how much of a path's end.
_BODIES, _PIECES, _SPOKEN = 400, 64, 16
_REPLY = 200  # characters of a reply
BEFORE = "came before the recording began"
_LONG = 20_000  # tokens of a node that are no longer decoded all


class Page:
    """The page's data about one recording, finished or growing. May be asked from several threads.

    labels: request id -> what the workload calls it.
    """

    kind = "page"  # which of static/*.js draws it

    def __init__(self, trace: Trace, labels: Mapping[str, str] | None = None) -> None:
        self.trace = trace
        self.labels: Mapping[str, str] = labels if labels is not None else {}
        self.refused = ""  # requests that never got into the engine, in a sentence: no event tells of them
        self._lock = threading.RLock()
        self._failures: set[tuple[str, str]] = set()
        self._frames: list[Json] = []
        self._lives = Lives(trace.recording.header["start"])
        self._asked: dict[str, str] = {}  # what each prompt asks, by the request that came with it
        self._host = ReplayState(trace.recording.header["start"])  # moved on only where it has tiers
        self._tiers = has_tiers(trace.recording.header["start"])
        self.theirs = is_fleet(trace.recording.header["start"])  # no slots: nothing of a pool is counted
        header = trace.recording.header
        self._drafts = DraftBook(header["start"]) if is_drafting(header) else None
        # The folder of its tokenizer; None: the classroom's; "": there is none.
        self.tokenizer: str | None = (header.get("model") or {}).get("tokenizer", "")
        self.moments = Moments(trace.recording)
        self._disks = [disk] if (disk := Disk.of(header)) else []  # totals at the start, after each frame
        self._from_disk: dict[str, int] = {}  # tokens, by request
        self._replies: dict[str, dict[int, int]] = {}  # where there are adapters: tokens by position
        self._answers = Told(header, trace.decode)
        self._piece = lru_cache(maxsize=1 << 16)(lambda token: trace.decode([token]))

    # ------------------------------------------------------------ the whole run

    def meta(self, title: str = "", note: str = "") -> Json:
        """What does not change during a run."""
        header = self.trace.recording.header
        config, start = header.get("config", {}), header["start"]
        tree_start = start["tree"]
        parameters = (header.get("model") or {}).get("parameters")
        return {
            "title": title,
            "note": note,
            "refused": self.refused,
            "model": _model_name(config, parameters),
            "kv_tokens": start["kv_tokens"],
            "page_size": start["tree"]["page_size"],
            "start": start["step"],
            "no_text": no_text(self.tokenizer, self.theirs),
            "schedule_policy": config.get("schedule_policy", ""),
            **({name: tree_start[name] for name in ("host_tokens", "host_write")} if self._tiers else {}),
            **({"bigram_keys": True} if config.get("bigram_keys") else {}),
            **self._adapters(),
            **self._disk_meta(config, start),
            **({name: config[name] for name in ("speculative", "jump_forward") if config.get(name)}),
            "eviction_policy": start["tree"]["eviction_policy"],
            "styles": {
                name: {"stroke": style.stroke, "fill": style.fill, "word": style.word}
                for name, style in tree.STYLES.items()
            },
        }

    def _adapters(self) -> Json:
        """Names and colours of the engine's adapters, if it has any; the last is that of having none."""
        names = self.trace.origins.adapters
        if not names:
            return {}
        return {"adapters": [[name, tree.adapter_colour(name, names)] for name in (*names, "")]}

    def _disk_meta(self, config: Json, start: State) -> Json:
        if not self._disks:
            return {}
        folder = re.split(r"[\\/]", str(config.get("disk_dir") or "").rstrip("\\/"))[-1]
        return {"disk": {"bytes": start["tree"]["disk_bytes"], "folder": folder}}

    def frames(self, start: int = 0) -> list[Json]:
        """One record per frame from `start` on: step, kind, usage, marks, events, scene."""
        with self._lock:
            self._catch_up()
            return self._frames[start:]

    def requests(self, since: int = 0) -> dict[str, Json]:
        """Requests that changed in frame `since` or later."""
        with self._lock:
            self._catch_up()
            changed = [name for name, frame in self._lives.changed.items() if frame >= since]
            lives = {name: self._lives.by_id[name] for name in changed}
            return {name: self._request(life) for name, life in lives.items() if life.prompt}

    def prompt(self, name: str) -> tuple[int, ...]:
        """The token ids that a request came with; of a sample those of its leader. ValueError: unknown."""
        with self._lock:
            self._catch_up()
            life = self._lives.by_id.get(name.partition(".")[0])
        if life is None:
            raise ValueError(f"there is no request {name!r}")
        if life.tokens is None:
            raise ValueError(f"the prompt of {name} is not known: it {BEFORE}")
        return life.tokens

    def prompt_text(self, name: str) -> str:
        """The same as text."""
        return self.trace.decode(self.prompt(name))

    def _catch_up(self) -> None:
        for index in range(len(self._frames), len(self.trace)):
            self._lives.take(self.trace.recording.frames[index])
            self._answers.take(self.trace.recording.frames[index])
            self._note_more(self.trace.recording.frames[index])
            if self._drafts is not None:
                self._drafts.take(self.trace.recording.frames[index].events)
            self._frames.append(self._frame_record(index))

    def _note_more(self, frame: Frame) -> None:
        """What is kept of a run with a disk tier, and of one with adapters."""
        if self._disks:
            self._disks.append(self._disks[-1].after(frame.events))
            for name, tokens in from_disk(frame.events).items():
                self._from_disk[name] = self._from_disk.get(name, 0) + tokens
        if self.trace.origins.adapters:
            for event in frame.events:
                if isinstance(event, ev.TokenSampled):
                    self._replies.setdefault(event.request, {})[event.position] = event.token

    def _frame_record(self, index: int) -> Json:
        frame = self.trace.recording.frames[index]
        ended = frame.events[-1] if frame.events else None
        # Cut off between two steps (an eviction by hand, say), it is counted from the state itself.
        usage = counted_usage(frame) or (
            Usage(0, 0, 0, 0) if self.theirs else usage_of(self.trace.view("step", index + 1))
        )
        tiers = {"h": self._host_used(frame)} if self._tiers else {}
        marks = sorted({event.mark for event in frame.events if event.mark})
        return {
            "s": frame.step,
            "k": getattr(ended, "kind", "") if ended is not None and ended.ends_frame else "",
            "u": list(usage),
            "m": marks,
            "e": len(frame.events),
            "c": self.trace.position_of("scene", index),
            **tiers,
        }

    def _host_used(self, frame: Frame) -> int:
        """Host slots in use after a frame; frames come in order."""
        self._host = apply_frame(self._host, frame)
        return host_used(self._host.tree)

    def _request(self, life: Life) -> Json:
        """A request's lane. Ranges of frames are [from, to)."""
        leader = self._lives.by_id.get(life.leader, life)
        first = life if life.admitted is not None else leader  # a sample was admitted with its leader
        if leader.id not in self._asked:
            text = BEFORE if life.tokens is None else asked_text(self.trace.decode(life.tokens))
            self._asked[leader.id] = text
        return {
            "id": life.id,
            "text": self._asked[leader.id],
            "added": life.added,
            "prompt": life.prompt,
            "new": life.max_new_tokens,
            "n": life.n,
            "priority": life.priority,
            "segs": life.phases,
            "defers": life.deferrals,
            "passed": life.passes,
            **({"forced": life.forced} if life.forced else {}),
            "hit": first.hit,
            "node": life.node,
            "end": life.end,
            "reason": life.reason,
            "sample": life.id != life.leader,
            **({"before": True} if life.tokens is None else {}),
            **({"admitted": first.admitted} if first.admitted is not None else {}),
            **({"why": why} if (why := self._answers.why(first.id)) else {}),
            **({"disk": disk} if (disk := self._from_disk.get(first.id)) else {}),
            **self._adapted(life),
            "label": self._label(life.id),
        }

    def _adapted(self, life: Life) -> Json:
        """A request's adapter, and its reply once that is whole: they differ from one adapter to the next."""
        unknown = life.tokens is None and not life.namespace  # it may be one that no node is under yet
        if not self.trace.origins.adapters or unknown:
            return {}
        said = self._replies.get(life.id, {}) if life.end is not None else {}
        reply = pretty(self.trace.decode([said[position] for position in sorted(said)])).removesuffix("■")
        lora = self.trace.origins.spaces.get(life.namespace, "")
        return {"lora": lora, "reply": short(reply, _REPLY)}

    def _label(self, name: str) -> str:
        leader, _, index = name.partition(".")
        label = self.labels.get(leader, "")
        return f"{label} · sample {int(index) + 1}" if label and index else label

    # ------------------------------------------------------------ one position

    def view(
        self, granularity: str, index: int, opened: Collection[int] = frozenset(), height: int = 400,
        rank: int | None = None,
    ) -> Json:  # fmt: skip
        """Everything that the page shows of a position, the tree's SVG included. rank: of a stream, it alone.

        A part that cannot be made is empty, and "failed" says why, by its name: the others are shown.
        """
        with self._lock:
            self._catch_up()
        view = self._look(granularity, index, rank)
        kind, sentence = self._summary(view)
        shown: Json = {
            "g": granularity,
            "i": index,
            "frame": view.frame,
            "step": view.step,
            "scene": self.trace.position_of("scene", view.frame),
            "title": view.title,
            "kind": kind,
            "say": sentence,
            "policy": view.state["tree"]["eviction_policy"],
        }
        for name, (make, empty) in self._parts(view, tree.Options(opened=opened, height=height)).items():
            try:
                made = make()
            except Exception as error:  # whatever it is, it is this part's alone
                made = empty
                shown.setdefault("failed", {})[name] = self._told(name, error)
            shown.update(made if name == "host" else {name: made})
        return shown

    def _summary(self, view: View) -> tuple[str, str]:
        """Tone and sentence; of a single admission also why it did not hit further."""
        kind, sentence = summary_of(view)
        admitted = [event for event in view.events if isinstance(event, ev.RequestAdmitted)]
        if len(admitted) == 1:
            sentence = sentence.replace(admitted[0].describe(), self._answers.sentence(admitted[0]), 1)
        return kind, visible(sentence)

    def _look(self, granularity: str, index: int, rank: int | None) -> View:
        if rank is not None:
            raise ValueError(f"rank {rank}: only a stream of other servers has ranks")
        return self.trace.view(granularity, index)

    def _parts(self, view: View, options: tree.Options) -> dict[str, tuple[Callable[[], Any], Any]]:
        """How each part of a view is made, and what stands for it where that fails."""
        nodes = view.once("all", lambda: {**view.nodes, **view.ghosts} if view.ghosts else view.nodes)
        parts: dict[str, tuple[Callable[[], Any], Any]] = {
            "svg": (lambda: tree.tree_svg(view, self.trace.decode, options), ""),
            "nodes": (lambda: self._nodes(view, nodes, options), {}),
            "count": (lambda: len(nodes), 0),
            "pool": (lambda: pool_runs(view), []),
            "usage": (lambda: usage_of(view), Usage(0, 0, 0, 0)),
            "requests": (lambda: _requests(view.state, nodes), {}),
            "left": (lambda: self._left(view), {}),
            "events": (lambda: self._events(view), []),
            "why": (lambda: self._why(view), []),
            "quiz": (lambda: self._quiz(view), None),
        }
        if self._tiers:
            nothing = {"host": [], "host_used": 0, "host_only": 0, "tier_sums": {}}
            parts["host"] = (lambda: host_part(view), nothing)
        if self._disks:
            parts["disk"] = (lambda: self._disk(view), None)
        if (book := self._drafts) is not None:
            parts["drafts"] = (lambda: drafts_part(book, self.trace, view), NOTHING)
        return parts

    def _disk(self, view: View) -> Json:
        """The disk tier at a position: the folder, totals until then, and what this position brought."""
        whole = view.granularity != "event" or view.frame < 0
        before = self._disks[view.frame + 1 if whole else view.frame]
        total = before if whole else before.after(view.so_far)
        start = self.trace.recording.header["start"]
        return {
            "files": total.files, "bytes": total.bytes,
            "tokens": None if total.files is None else total.files * block_units(start),
            "now": Disk().after(view.events).since(Disk()), "total": total.since(Disk()),
        }  # fmt: skip

    def _told(self, part: str, error: Exception) -> str:
        """What failed, in short; all of it in the terminal, where it is told once."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        text = text if len(text) <= 200 else f"{text[:199]}…"
        if (part, text) not in self._failures:
            self._failures.add((part, text))
            traceback.print_exc()
        return text

    def _left(self, view: View) -> Json:
        """Of the latest requests that are done: the path of what is still in the tree of their prompt."""
        live = view.state["requests"]
        known = (life for life in self._known() if life.tokens is not None)
        done = [life for life in known if life.added <= view.frame and life.id not in live]
        if not done:
            return {}
        children = Children(view)
        return {life.id: spelled_path(children, life.tokens or (), life.namespace) for life in done[-_LANES:]}

    def _known(self) -> list[Life]:
        """Requests that can be told of, in order of arrival: also those from before the recording."""
        return [life for life in self._lives.by_id.values() if life.prompt]

    def _nodes(self, view: View, nodes: Mapping[int, State], options: tree.Options) -> dict[int, Json]:
        """All nodes by number; of a large tree those that are drawn, or that something else speaks of."""
        if not tree.by_weight(view, options):
            return {number: self._node(nodes[number], view) for number in sorted(nodes)}
        spoken = {node["id"] for node in tree.plan(view, options).nodes}
        paths = [path_of(nodes, request["node"]) for request in view.state["requests"].values()]
        paths += [list(event.touches()) for event in view.events[:_EVENTS]]
        for path in paths:
            spoken.update(path[-_SPOKEN:])
        some = sorted(number for number in spoken if number in nodes)
        return {number: self._node(nodes[number], view, _PIECES) for number in some[-_BODIES:]}

    def _node(self, node: State, view: View, most: int | None = None) -> Json:
        """most: tokens at most that are given one by one; None: all."""
        tokens, host = key_tokens(node), node.get("host", [])
        text = self._text(node)
        if len(text) > _TEXT:
            text = f"{text[: _TEXT // 2]} … {text[-_TEXT // 2 :]}"
        return {
            "status": view.status[node["id"]],
            "parent": node["parent"],
            "lock": node["lock_ref"],
            "t": node["last_access"],
            "created": node["created"],
            "hits": node["hits"],
            "priority": node["priority"],
            "space": node["namespace"],
            **({"tier": tier_of(node)} if self._tiers else {}),
            **({"disk": True} if node["id"] in self.trace.origins.disk else {}),
            **({"lora": name} if (name := self.trace.origins.adapter(node)) else {}),
            "body": {
                **({"host": runs(host)} if host else {}),
                "text": text,
                "slots": runs(node["slots"]),
                "size": len(tokens) or units(node),
                "pieces": [self._piece(token) for token in tokens[:most]],
            },
        }

    def _text(self, node: State) -> str:
        """What a node says; of a very long one only both ends are decoded."""
        tokens = text_tokens(node)
        if len(tokens) <= _LONG:
            return self.trace.decode(tokens)
        return f"{self.trace.decode(tokens[:_TEXT])} … {self.trace.decode(tokens[-_TEXT:])}"

    def _events(self, view: View) -> list[Json]:
        """Events of the position; by event those of the whole step, the present one marked."""
        if view.granularity == "event" and view.frame >= 0:
            events = self.trace.frame_events(view.frame)
            now = len(view.so_far) - 1
        else:
            events, now = view.events, None
        shown = [self._event(event, now is None or at == now, now is not None and at > now)
                 for at, event in enumerate(events[:_EVENTS])]  # fmt: skip
        return shown if view.granularity == "event" else shown + self._passes(view)

    def _passes(self, view: View) -> list[Json]:
        """No event says that a request was passed over: it is what the admissions of a step add up to."""
        first, found = first_frame(self.trace, view), []
        for life in self._known():
            before = sum(frame < first for frame, _ in life.passes)
            for nth, (frame, by) in enumerate(life.passes[before:], start=before + 1):
                if frame > view.frame:
                    break
                verb = "is" if len(by) == 1 else "are"
                text = f"{life.id} is passed over: {listed(by)}, behind it, {verb} admitted"
                found.append({**PASSED._asdict(), "text": f"{text} ({times(nth)} so far)", "nodes": [],
                              "requests": [life.id], "on": True, "later": False})  # fmt: skip
        return found

    def _event(self, event: ev.Event, present: bool, future: bool) -> Json:
        text = event.describe()
        if isinstance(event, ev.RequestAdmitted):
            text = self._answers.sentence(event)
        if event.says():
            text += f": {visible(self.trace.decode(list(event.says())))!r}"
        return {
            **word_of(event)._asdict(),
            "text": text,
            "nodes": list(nodes_of(event)),
            "requests": list(requests_of(event)),
            "on": present,
            "later": future,
        }

    def _why(self, view: View) -> list[Json]:
        """For each eviction: the policy's reason, the runner-up, and which other nodes could have gone."""
        return [_reason(victim) for victim in islice(victims(self.trace, view), _VICTIMS)]

    def _quiz(self, view: View) -> Json | None:
        """What could be asked before this position is shown."""
        event = asked_about(view)
        if isinstance(event, ev.RequestAdmitted):
            life = self._lives.by_id.get(event.request)
            text = self._request(life)["text"] if life and life.tokens is not None else ""
            return {
                "ask": "hit", "answer": event.matched, "request": event.request, "of": event.length,
                "text": text, "label": self._label(event.request),
            }  # fmt: skip
        if event is not None:
            return {"ask": "victim", "answer": event.node, "reason": event.reason, "policy": event.policy}
        return None


def _reason(victim: Victim) -> Json:
    event, names = victim.event, ("id", "last_access", "created", "hits", "priority")
    return {
        "node": event.node,
        "policy": event.policy,
        "reason": event.reason,
        "runner_up": event.runner_up,
        "free": units(victim.nodes[event.node]) if event.node in victim.nodes else 0,
        **({"host": True} if victim.what == "host" else {}),
        "others": victim.count,
        "candidates": [
            {**{name: leaf[name] for name in names}, "tokens": units(leaf)}
            for leaf in victim.choices[:_CANDIDATES]
        ],
    }


def _requests(state: State, nodes: Mapping[int, State]) -> Json:
    """Live requests: the nodes that each runs on, and whether it waits."""
    return {
        name: {
            "path": path_of(nodes, request["node"]) if request["row"] >= 0 else [],
            "length": request["length"],
            "waiting": request["row"] < 0,
        }
        for name, request in state["requests"].items()
    }


def _model_name(config: Json, parameters: int | None) -> str:
    if parameters is None:
        return "a tree on its own"
    name = config.get("model") or "classroom Llama"
    name = re.split(r"[\\/]", str(name).rstrip("\\/"))[-1]
    size = f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
    return f"{name} · {size}"


class Children:
    """The nodes below a parent that begin with some tokens, found without a look at all the others."""

    def __init__(self, view: View) -> None:
        self._view, self.page = view, max(int(view.state["tree"]["page_size"]), 1)
        self._known: dict[int, tuple[set[int], dict[tuple[int, ...], list[State]]]] = {}

    def beginning(self, parent: int, namespace: int, tokens: Sequence[int]) -> list[State]:
        """Those below `parent` (0: the root) in this namespace whose first page is that of `tokens`."""
        if parent not in self._known:
            self._known[parent] = self._below(parent)
        sizes, known = self._known[parent]
        return [node for size in sizes for node in known.get((namespace, *tokens[:size]), ())]

    def _below(self, parent: int) -> tuple[set[int], dict[tuple[int, ...], list[State]]]:
        """A node's first tokens lead to it: as many as a page has, fewer of a node that is shorter."""
        table, nodes = self._view.table, self._view.nodes
        place = int(table.places(np.array([parent]))[0]) if parent else len(table)
        found: dict[tuple[int, ...], list[State]] = {}
        for number in table.id[table.below.children(place)].tolist():
            node = nodes[number]
            first = text_tokens(node)[: self.page]
            if node["parent"] == parent:  # and not one whose parent is not there
                found.setdefault((node["namespace"], *first), []).append(node)
        return {len(first) - 1 for first in found}, found


def spelled_path(children: Children, tokens: tuple[int, ...], namespace: int) -> list[int]:
    """Ids of the nodes that hold the beginning of `tokens`."""
    path: list[int] = []
    at = parent = 0
    while at < len(tokens):
        for node in children.beginning(parent, namespace, tokens[at : at + children.page]):
            held = text_tokens(node)  # of pairs one more than there are units: the next one begins with it
            if held and held[0] == tokens[at] and held == list(tokens[at : at + len(held)]):
                path.append(node["id"])
                at, parent = at + units(node), node["id"]
                break
        else:
            break
    return path


def pool_runs(view: View) -> list[list[Any]]:
    """The owners of the pages, page 1 first, as runs: [owner, how many pages].

    "n7" is a node, "R3" a request alone, "x7" free since n7 was evicted in this step or scene, "" free.
    The page draws `_CELLS` cells at most: of a larger pool only every so many pages are looked at, of which
    each stands for those up to the next one.
    """
    pool = page_map(view)
    last = len(pool.cells)
    each = max(1, -(-last // _CELLS))
    cells = pool.cells[::each]
    begins = np.flatnonzero(np.append(True, cells[1:] != cells[:-1])) if last else np.zeros(0, np.int64)
    codes, ends = cells[begins].tolist(), np.append(begins[1:] * each, last)
    return [
        [pool.name(code), count] for code, count in zip(codes, (ends - begins * each).tolist(), strict=True)
    ]


def host_part(view: View) -> Json:
    """Host memory of a position. host: runs of pages, [[node's id or 0, its tier], how many]."""
    nodes, pool = view.state["tree"]["nodes"], host_pool(view)
    sums = {name: tokens for name, tokens in tier_sums(view.events).items() if tokens}
    return {
        "host": [
            [[owner.node, owner.kind] if owner else [0, "free"], count]
            for owner, count in (pool.runs() if pool else ())
        ],
        "host_used": host_used(view.state["tree"]),
        "host_only": sum(units(node) for node in nodes if tier_of(node) == "host"),
        "tier_sums": sums,
    }
