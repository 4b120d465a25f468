"""Questions about what comes next, and answers to "why this one?". Text and numbers only, no widgets.

`asked_about` says of which event of a position one could be asked before it is shown: the next victim, or
the next hit length. The page words its own question; `question_for` words the notebook's. `why` explains
the evictions of a position by the policy's own key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from minirad.observe import events as ev
from minirad.observe.snapshot import State
from viz.trace import Trace, View, units
from viz.view.victims import Victim, victims


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


def asked_about(view: View) -> ev.AnyEviction | ev.RequestAdmitted | None:
    """The first event that can be guessed from what was on view before: an eviction of a node that was
    there, or a request's first admission. None where nothing worth asking happens."""
    for event in view.events:
        gone = ev.device_eviction(event)
        if gone is not None:
            if "new" not in view.also.get(gone.node, ()):
                return gone
        elif isinstance(event, ev.RequestAdmitted) and event.attempt == 1:
            return event
    return None


def question_for(trace: Trace, granularity: str, index: int) -> Question | None:
    """What to ask before position `index` is shown; None where nothing worth asking happens in it."""
    view = trace.view(granularity, index)
    event = asked_about(view)
    if event is None:
        return None
    if isinstance(event, ev.RequestAdmitted):
        return _hit_question(event)
    return next((_victim_question(each) for each in victims(trace, view) if each.event is event), None)


def _victim_question(victim: Victim) -> Question:
    event = victim.event
    few = len(victim.choices) == victim.count  # of a large tree, any node may be named
    leaves = tuple(f"n{number}" for number in sorted(node["id"] for node in victim.choices if few))
    text = f"Room is needed, and the policy is {event.policy}. Which node is evicted first?"
    return Question("victim", text, f"n{event.node}", leaves, event.describe())


def _hit_question(event: ev.RequestAdmitted) -> Question:
    text = f"{event.request} is admitted with {event.length} tokens. How many of them come from the cache?"
    return Question("hit", text, str(event.cached), (), event.describe())


def why(trace: Trace, view: View, most: int = 3) -> list[str]:
    """For each eviction of a position (`most` of them): the policy's key, and how near the next one was."""
    lines = [_why(victim) for victim in islice(victims(trace, view), most)]
    more = sum(bool(event.victim) for event in view.events) - most
    return [*lines, f"and {more} more in the same way"] if more > 0 else lines


def _why(victim: Victim) -> str:
    event, nodes = victim.event, victim.nodes
    where = {"demoted": "to the host ", "host": "from the host "}.get(victim.what, "")
    others = victim.count - 1
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
