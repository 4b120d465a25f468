"""What the live page and exported files show, as plain data (JSON): no HTML, no HTTP, no engine.

Three parts, from cheap to dear: `meta` (once per run), one small record per frame and per request
(kept up to date as a recording grows), and a whole view of one position, made when it is asked for.
static/page.js draws all of it.
"""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from minirad import events as ev
from minirad.record import Frame, ReplayState, State, apply_frame
from viz import tree
from viz.trace import (
    MARKS,
    VICTIMS,
    Trace,
    View,
    evictable_leaves,
    has_tiers,
    host_used,
    key_tokens,
    nodes_of,
    path_of,
    requests_of,
    summary,
    text_tokens,
    tier_of,
    tier_sums,
    units,
)
from viz.words import PASSED, word_of

Json = dict[str, Any]
_TEXT = 600  # characters of a node's text that a view carries
_CANDIDATES = 12
_LANES = 60  # requests that the page lists at a time


class Page:
    """The page's data about one recording, finished or growing. May be asked from several threads.

    labels: request id -> what the workload calls it.
    """

    def __init__(self, trace: Trace, labels: Mapping[str, str] | None = None) -> None:
        self.trace = trace
        self.labels: Mapping[str, str] = labels if labels is not None else {}
        self.refused = ""  # requests that never got into the engine, in a sentence: no event tells of them
        self._lock = threading.RLock()
        self._failures: set[tuple[str, str]] = set()
        self._frames: list[Json] = []
        self._requests: dict[str, Json] = {}
        self._prompts: dict[str, tuple[tuple[int, ...], int]] = {}  # token ids and namespace
        self._changed: dict[str, int] = {}  # request -> frames seen when it last changed
        self._usage = [0, 0, 0, 0]
        self._host = ReplayState(trace.recording.header["start"])  # moved on only where it has tiers
        self._tiers = has_tiers(trace.recording.header["start"])

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
            "schedule_policy": config.get("schedule_policy", ""),
            **({name: tree_start[name] for name in ("host_tokens", "host_write")} if self._tiers else {}),
            **({"bigram_keys": True} if config.get("bigram_keys") else {}),
            "eviction_policy": start["tree"]["eviction_policy"],
            "styles": {
                name: {"stroke": style.stroke, "fill": style.fill, "word": style.word}
                for name, style in tree.STYLES.items()
            },
        }

    def frames(self, start: int = 0) -> list[Json]:
        """One record per frame from `start` on: step, kind, usage, marks, events, scene."""
        with self._lock:
            self._catch_up()
            return self._frames[start:]

    def requests(self, since: int = 0) -> dict[str, Json]:
        """Requests that changed in frame `since` or later."""
        with self._lock:
            self._catch_up()
            changed = [name for name, frame in self._changed.items() if frame >= since]
            return {name: {**self._requests[name], "label": self._label(name)} for name in changed}

    def prompt(self, name: str) -> tuple[int, ...]:
        """The token ids that a request came with; of a sample those of its leader. ValueError: unknown."""
        with self._lock:
            self._catch_up()
            known = self._prompts.get(name.partition(".")[0])
        if known is None:
            raise ValueError(f"there is no request {name!r}")
        return known[0]

    def prompt_text(self, name: str) -> str:
        """The same as text."""
        return self.trace.decode(self.prompt(name))

    def _catch_up(self) -> None:
        for index in range(len(self._frames), len(self.trace)):
            frame = self.trace.recording.frames[index]
            for event in frame.events:
                self._note(event, index)
            self._note_passes(frame.events, index)
            self._frames.append(self._frame_record(index))

    def _frame_record(self, index: int) -> Json:
        frame = self.trace.recording.frames[index]
        ended = frame.events[-1] if frame.events else None
        kind = ""
        if isinstance(ended, ev.StepEnded):
            kind = ended.kind
            self._usage = [ended.free, ended.evictable, ended.protected, ended.private]
        else:  # cut off between two steps (an eviction by hand, say): counted from the state itself
            self._usage = usage_of(self.trace.view("step", index + 1).state)
        tiers = {"h": self._host_used(frame)} if self._tiers else {}
        marks = sorted({MARKS[type(event)] for event in frame.events if type(event) in MARKS})
        return {
            "s": frame.step,
            "k": kind,
            "u": self._usage,
            "m": marks,
            "e": len(frame.events),
            "c": self.trace.position_of("scene", index),
            **tiers,
        }

    def _host_used(self, frame: Frame) -> int:
        """Host slots in use after a frame; frames come in order."""
        self._host = apply_frame(self._host, frame)
        return host_used(self._host.tree)

    def _note(self, event: ev.Event, index: int) -> None:
        name = getattr(event, "request", None)
        if name is None:
            return
        if isinstance(event, ev.RequestAdded):
            self._requests[name] = self._new_request(event, index)
        elif isinstance(event, ev.RequestForked):
            leader = self._requests.get(event.leader)
            if leader is None:  # it was there before the recording began
                return
            kind = "decode" if event.row >= 0 else "waiting"
            own: Json = {"segs": [[kind, index, None]], "defers": [], "passed": [], "sample": True}
            self._requests[name] = {**leader, "id": name, "added": index, **own}
        request = self._requests.get(name)
        if request is None:
            return
        if isinstance(event, ev.RequestDeferred):
            _defer(request, event.reason, index)
            self._changed[name] = index
        if _moves(event, request, index) or isinstance(event, ev.RequestAdded | ev.RequestForked):
            self._changed[name] = index

    def _note_passes(self, events: tuple[ev.Event, ...], index: int) -> None:
        """Who was left waiting in a frame that admitted somebody behind it: the scheduler's own rule
        (policies.is_behind), read from the events so that recordings tell it under every policy."""
        admitted = [e.request for e in events if isinstance(e, ev.RequestAdmitted)]
        if not admitted:
            return
        for name, request in self._requests.items():
            if request["end"] is None and request["segs"][-1][0] in ("waiting", "retracted"):
                by = [other for other in admitted if self._rank(other) > self._rank(name)]
                if by:
                    request["passed"].append([index, by])
                    self._changed[name] = index

    def _rank(self, name: str) -> tuple[int, int, int]:
        request = self._requests.get(name)
        number, _, sample = name.removeprefix("R").partition(".")
        place = int(number) if number.isdigit() else 0
        return (-request["priority"] if request else 0, place, int(sample) if sample.isdigit() else 0)

    def _new_request(self, event: ev.RequestAdded, index: int) -> Json:
        self._prompts[event.request] = event.token_ids, event.namespace
        return {
            "id": event.request,
            "text": asked_text(self.trace.decode(event.token_ids)),
            "added": index,
            "prompt": len(event.token_ids),
            "new": event.max_new_tokens,
            "n": event.n,
            "priority": event.priority,
            "segs": [["waiting", index, None]],
            "defers": [],  # [from, to), and why it was looked at and left waiting
            "passed": [],  # frame, and who behind it was admitted
            "hit": None,
            "node": None,
            "end": None,
            "reason": "",
            "sample": False,
        }

    def _label(self, name: str) -> str:
        leader, _, index = name.partition(".")
        label = self.labels.get(leader, "")
        return f"{label} · sample {int(index) + 1}" if label and index else label

    # ------------------------------------------------------------ one position

    def view(
        self, granularity: str, index: int, opened: frozenset[int] = frozenset(), height: int = 400
    ) -> Json:
        """Everything that the page shows of a position, the tree's SVG included.

        A part that cannot be made is empty, and "failed" says why, by its name: the others are shown.
        """
        with self._lock:
            self._catch_up()
        view = self.trace.view(granularity, index)
        state = view.state
        nodes = {**view.nodes, **view.ghosts}
        options = tree.Options(opened=opened, height=height)
        parts: dict[str, tuple[Callable[[], Any], Any]] = {
            "svg": (lambda: tree.tree_svg(view, self.trace.decode, options), ""),
            "nodes": (lambda: {number: self._node(nodes[number], view) for number in sorted(nodes)}, {}),
            "pool": (lambda: pool_runs(view), []),
            "usage": (lambda: usage_of(state), [0, 0, 0, 0]),
            "requests": (lambda: _requests(state, nodes), {}),
            "left": (lambda: self._left(view), {}),
            "events": (lambda: self._events(view), []),
            "why": (lambda: self._why(view), []),
            "quiz": (lambda: self._quiz(view), None),
        }
        if self._tiers:
            nothing = {"host": [], "host_used": 0, "host_only": 0, "tier_sums": {}}
            parts["host"] = (lambda: host_part(view), nothing)
        kind, sentence = summary(view.events)
        shown: Json = {
            "g": granularity,
            "i": index,
            "frame": view.frame,
            "step": view.step,
            "scene": self.trace.position_of("scene", view.frame),
            "title": view.title,
            "kind": kind,
            "say": sentence,
            "policy": state["tree"]["eviction_policy"],
        }
        for name, (make, empty) in parts.items():
            try:
                made = make()
            except Exception as error:  # whatever it is, it is this part's alone
                made = empty
                shown.setdefault("failed", {})[name] = self._told(name, error)
            shown.update(made if name == "host" else {name: made})
        return shown

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
        done = [name for name, r in self._requests.items() if r["added"] <= view.frame and name not in live]
        if not done:
            return {}
        children: dict[tuple[int, int], list[State]] = {}
        for node in view.state["tree"]["nodes"]:
            children.setdefault((node["parent"], node["namespace"]), []).append(node)
        found = {}
        for name in done[-_LANES:]:
            tokens, namespace = self._prompts.get(name.partition(".")[0], ((), 0))
            found[name] = spelled_path(children, tokens, namespace)
        return found

    def _node(self, node: State, view: View) -> Json:
        tokens, host = key_tokens(node), node.get("host", [])
        text = self.trace.decode(text_tokens(node))
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
            "body": {
                **({"host": runs(host)} if host else {}),
                "text": text,
                "slots": runs(node["slots"]),
                "size": len(tokens),
                "pieces": [self.trace.decode([token]) for token in tokens],
            },
        }

    def _events(self, view: View) -> list[Json]:
        """Events of the position; by event those of the whole step, the present one marked."""
        if view.granularity == "event" and view.frame >= 0:
            events = self.trace.frame_events(view.frame)
            now = len(view.so_far) - 1
        else:
            events, now = view.events, None
        shown = [self._event(event, now is None or at == now, now is not None and at > now)
                 for at, event in enumerate(events[:400])]  # fmt: skip
        return shown if view.granularity == "event" else shown + self._passes(view)

    def _passes(self, view: View) -> list[Json]:
        """No event says that somebody was passed over: it is what the admissions of a step add up to."""
        first, found = view.frame - self._frames_of(view) + 1, []
        for name, request in self._requests.items():
            before = sum(frame < first for frame, _ in request["passed"])
            for nth, (frame, by) in enumerate(request["passed"][before:], start=before + 1):
                if frame > view.frame:
                    break
                verb = "is" if len(by) == 1 else "are"
                text = (
                    f"{name} is passed over: {listed(by)}, behind it, {verb} admitted ({times(nth)} so far)"
                )
                found.append({**PASSED._asdict(), "text": text, "nodes": [], "requests": [name],
                              "on": True, "later": False})  # fmt: skip
        return found

    def _event(self, event: ev.Event, present: bool, future: bool) -> Json:
        text = event.describe()
        if isinstance(event, ev.TokenSampled):
            text += f": {tree.visible(self.trace.decode([event.token]))!r}"
        return {
            **word_of(event)._asdict(),
            "text": text,
            "nodes": list(nodes_of(event)),
            "requests": list(requests_of(event)),
            "on": present,
            "later": future,
        }

    def _why(self, view: View) -> list[Json]:
        """For each eviction: the policy's reason, the runner-up, and who else could have gone."""
        found: list[Json] = []
        if not any(isinstance(event, VICTIMS) for event in view.events):
            return found
        last = view.frame
        first = last - (self._frames_of(view) - 1)
        state = self.trace.recording.replay_to(first - 1)
        for frame in range(first, last + 1):
            for event in self.trace.frame_events(frame):
                if isinstance(event, VICTIMS) and event in view.events and len(found) < 8:
                    found.append(self._victim(event, state))
                try:
                    state.apply(event)
                except (KeyError, ValueError):
                    return found  # a silent tree: what led to it is not known
        return found

    def _frames_of(self, view: View) -> int:
        if view.granularity != "scene":
            return 1
        count, at = 0, view.frame
        while at >= 0 and self.trace.position_of("scene", at) == view.index:
            count, at = count + 1, at - 1
        return max(count, 1)

    def _victim(self, event: ev.NodeEvicted | ev.NodeDemoted | ev.HostEvicted, state: ReplayState) -> Json:
        from_host = isinstance(event, ev.HostEvicted)
        leaves = evictable_leaves(state.nodes, host=from_host)
        leaves.sort(
            key=lambda n: (n["id"] != event.node, n["id"] != event.runner_up, n["last_access"], n["id"])
        )
        names = ("id", "last_access", "created", "hits", "priority")
        return {
            "node": event.node,
            "policy": event.policy,
            "reason": event.reason,
            "runner_up": event.runner_up,
            "free": units(state.nodes[event.node]) if event.node in state.nodes else 0,
            **({"host": True} if from_host else {}),
            "others": len(leaves),
            "candidates": [
                {**{name: leaf[name] for name in names}, "tokens": units(leaf)}
                for leaf in leaves[:_CANDIDATES]
            ],
        }

    def _quiz(self, view: View) -> Json | None:
        """What could be asked before this position is shown."""
        for event in view.events:
            if isinstance(event, ev.NodeEvicted | ev.NodeDemoted) and view.also.get(
                event.node, frozenset()
            ).isdisjoint({"new"}):
                return {"ask": "victim", "answer": event.node, "reason": event.reason, "policy": event.policy}
            if isinstance(event, ev.RequestAdmitted) and event.attempt == 1:
                request = self._requests.get(event.request, {})
                return {
                    "ask": "hit", "answer": event.matched, "request": event.request,
                    "of": event.length, "text": request.get("text", ""), "label": self._label(event.request),
                }  # fmt: skip
        return None


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


def _moves(event: ev.Event, request: Json, index: int) -> bool:
    """Brings a request's record up to date; False if the event does not change it."""
    segments = request["segs"]
    if isinstance(event, ev.RequestAdmitted):
        _enter(segments, "prefill", index)
        request["node"] = event.node or None
        if event.attempt == 1:
            request["hit"] = event.cached
            request["admitted"] = index
    elif isinstance(event, ev.TokenSampled):
        if segments[-1][0] != "prefill":
            return False
        _enter(segments, "decode", index + 1)  # this step's forward pass was still the prefill
    elif isinstance(event, ev.Committed):
        request["node"] = event.node
    elif isinstance(event, ev.RequestRetracted):
        _enter(segments, "retracted", index)
    elif isinstance(event, ev.RequestFinished | ev.RequestAborted):
        segments[-1][2] = index + 1
        request["end"] = index
        request["reason"] = getattr(event, "reason", "abort")
    else:
        return False
    return True


def _defer(request: Json, reason: str, index: int) -> None:
    """Notes why a request is left waiting; the same reason in the next frame makes the stretch longer."""
    defers = request["defers"]
    if defers and defers[-1][2] == reason and defers[-1][1] in (index, index + 1):
        defers[-1][1] = index + 1
    else:
        defers.append([index, index + 1, reason])


def listed(names: list[str]) -> str:
    """Names in a sentence: R7, R8 and R9."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _enter(segments: list[list[Any]], kind: str, index: int) -> None:
    """Ends a request's present segment [kind, from, to) before frame `index` and begins another."""
    segments[-1][2] = index
    segments.append([kind, index, None])


def _model_name(config: Json, parameters: int | None) -> str:
    if parameters is None:
        return "a tree on its own"
    name = config.get("model") or "classroom Llama"
    name = re.split(r"[\\/]", str(name).rstrip("\\/"))[-1]
    size = f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
    return f"{name} · {size}"


def asked_text(prompt: str) -> str:
    """What a prompt asks, in a few words: the last thing that the user says in it."""
    said = re.findall(r"<\|im_start\|>user\n(.*?)(?:<\|im_end\|>|$)", prompt, flags=re.DOTALL)
    if not said:
        said = re.findall(r"Question \d+: (.*)", prompt)
    text = tree.visible((said[-1] if said else prompt).strip().replace("\n", " "))
    return text if len(text) <= 60 else f"{text[:59]}…"


def spelled_path(
    children: Mapping[tuple[int, int], list[State]], tokens: tuple[int, ...], namespace: int
) -> list[int]:
    """Ids of the nodes that hold the beginning of `tokens`. children: by parent and namespace."""
    path: list[int] = []
    at = parent = 0
    while at < len(tokens):
        for node in children.get((parent, namespace), ()):
            held = text_tokens(node)  # of pairs one more than there are units: the next one begins with it
            if held and held[0] == tokens[at] and held == list(tokens[at : at + len(held)]):
                path.append(node["id"])
                at, parent = at + units(node), node["id"]
                break
        else:
            break
    return path


def runs(numbers: list[int]) -> list[list[int]]:
    """[3, 4, 5, 9] as [[3, 3], [9, 1]]: first and length of each run."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found


def pool_runs(view: View) -> list[list[Any]]:
    """Who owns the pages, page 1 first, as runs: [owner, how many pages].

    "n7" is a node, "R3" a request alone, "x7" free since n7 was evicted in this step or scene, "" free.
    Takes time by what is in use, not by the size of the pool.
    """
    state = view.state
    page = int(state["tree"]["page_size"])
    owners: dict[int, str] = {}
    for ghost in view.ghosts.values():
        owners.update({slot // page: f"x{ghost['id']}" for slot in ghost["slots"]})
    for name, request in state["requests"].items():
        owners.update({slot // page: name for slot in request["slots"][request["protected"] :]})
    for node in state["tree"]["nodes"]:
        owners.update({slot // page: f"n{node['id']}" for slot in node["slots"]})
    used = max((n for n, owner in owners.items() if owner[0] != "x"), default=0)
    # A tree on its own has no pool: as many pages as it uses.
    return _runs_of(owners, int(state["kv_tokens"]) // page or used, "")


def _runs_of(owners: Mapping[int, Any], last: int, nobody: Any) -> list[list[Any]]:
    """Pages 1 to `last` as runs of equal owners: [owner, how many]."""
    found: list[list[Any]] = []

    def add(owner: Any, count: int) -> None:
        if found and found[-1][0] == owner:
            found[-1][1] += count
        elif count:
            found.append([owner, count])

    at = 1
    for number in sorted(number for number in owners if 0 < number <= last):
        add(nobody, number - at)
        add(owners[number], 1)
        at = number + 1
    add(nobody, last + 1 - at)
    return found


def host_part(view: View) -> Json:
    """Host memory of a position. host: runs of pages, [[node's id or 0, its tier], how many]."""
    state = view.state
    sums = {name: tokens for name, tokens in tier_sums(view.events).items() if tokens}
    page = int(state["tree"]["page_size"])
    owners: dict[int, list[Any]] = {}
    for node in state["tree"]["nodes"]:
        owners.update({slot // page: [node["id"], tier_of(node)] for slot in node["host"][::page]})
    only = sum(units(node) for node in state["tree"]["nodes"] if tier_of(node) == "host")
    return {
        "host": _runs_of(owners, int(state["tree"]["host_tokens"]) // page, [0, "free"]),
        "host_used": host_used(state["tree"]), "host_only": only, "tier_sums": sums,
    }  # fmt: skip


def usage_of(state: State) -> list[int]:
    """[free, evictable, protected, private] tokens of a state."""
    nodes = state["tree"]["nodes"]
    total = sum(len(node["slots"]) for node in nodes)
    protected = sum(len(node["slots"]) for node in nodes if node["lock_ref"])
    free = int(state["free"])
    private = max(int(state["kv_tokens"]) - free - total, 0)
    return [free, total - protected, protected, private]
