"""Questions about what comes next, and answers to "why this one?". Text and numbers only, no widgets.

`question_for` looks at the position after the one on view and asks for what it would show: the next
victim, or the next hit length. `why` explains the evictions of a position by the policy's own key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minirad import events as ev
from minirad.record import State
from viz.trace import VICTIMS, Trace, View, evictable_leaves, units


@dataclass(frozen=True, slots=True)
class Question:
    """kind: "victim" or "hit". choices: what may be answered; empty where any number may be."""

    kind: str
    text: str
    answer: str
    choices: tuple[str, ...]
    explanation: str

    def check(self, given: str) -> bool:
        """Is it right? Blanks and the letter n do not matter."""
        return given.strip().lower().removeprefix("n") == self.answer.lower().removeprefix("n")


def question_for(trace: Trace, granularity: str, index: int) -> Question | None:
    """What to ask before position `index` is shown; None where nothing worth asking happens in it."""
    view = trace.view(granularity, index)
    events = view.events
    for event in events:
        if isinstance(event, ev.NodeEvicted | ev.NodeDemoted):
            return _victim_question(event, state_before(trace, view, event))
        if isinstance(event, ev.RequestAdmitted):
            return _hit_question(event)
    return None


def _victim_question(event: ev.NodeEvicted | ev.NodeDemoted, before: State) -> Question:
    policy = before["tree"]["eviction_policy"]
    leaves = tuple(f"n{node['id']}" for node in unlocked_leaves(before))
    return Question(
        "victim", f"Room is needed, and the policy is {policy}. Which node is evicted first?",
        f"n{event.node}", leaves, event.describe(),
    )  # fmt: skip


def _hit_question(event: ev.RequestAdmitted) -> Question:
    text = f"{event.request} is admitted with {event.length} tokens. How many of them come from the cache?"
    return Question("hit", text, str(event.cached), (), event.describe())


def unlocked_leaves(state: State) -> list[State]:
    """Nodes that could be evicted (or demoted) now."""
    return evictable_leaves({node["id"]: node for node in state["tree"]["nodes"]})


def state_before(trace: Trace, view: View, event: ev.Event) -> State:
    """The state just before one of a view's events happened."""
    if view.granularity == "event":
        return trace.state("event", view.index - 1)
    frame = next(f for f in range(view.frame, -1, -1) if any(e is event for e in trace.frame_events(f)))
    at = next(i for i, e in enumerate(trace.frame_events(frame)) if e is event)
    return trace.state("event", trace.position_of("event", frame - 1) + at)


def why(trace: Trace, view: View, most: int = 3) -> list[str]:
    """For each eviction of a position (`most` of them): the policy's key, and how near the next one was."""
    victims = [event for event in view.events if isinstance(event, VICTIMS)]
    lines = [_why(event, state_before(trace, view, event)) for event in victims[:most]]
    if len(victims) > most:
        lines.append(f"and {len(victims) - most} more in the same way")
    return lines


def _why(event: ev.NodeEvicted | ev.NodeDemoted | ev.HostEvicted, before: State) -> str:
    nodes = {node["id"]: node for node in before["tree"]["nodes"]}
    others = len(evictable_leaves(nodes, isinstance(event, ev.HostEvicted))) - 1
    where = {ev.NodeDemoted: "to the host ", ev.HostEvicted: "from the host "}.get(type(event), "")
    line = f"n{event.node} went {where}by the policy {event.policy}: {event.reason}. "
    if event.runner_up and event.runner_up in nodes:
        line += f"{_key(nodes, event.node)}, the runner-up {_key(nodes, event.runner_up)}."
    elif event.runner_up:
        line += f"The runner-up is n{event.runner_up}."
    else:
        line += "There was no other unlocked leaf." if others < 1 else f"{others} other leaves were unlocked."
    return line


def _key(nodes: dict[int, State], number: int) -> str:
    node = nodes[number]
    facts: Sequence[str] = (
        f"last used at tick {node['last_access']}", f"made at {node['created']}",
        f"{node['hits']} hits", f"{units(node)} tokens",
    )  # fmt: skip
    if node["priority"]:
        facts = (*facts, f"priority {node['priority']}")
    return f"n{number} ({', '.join(facts)})"
