"""What an event is, and the state that events move on.

An event is one small immutable record of one decision. All that is known about a kind of event stands in its
class (minirad/observe/events.py has them all): its fields, its sentence, what it does to a state, what has to
hold before, what it says to a router, and how it is drawn. The recorder, files, the replay, the page, the
notebook and the export read it from there: none of them has a table of kinds. So a new event is a class

    @dataclass(frozen=True, slots=True)
    class NodeNamed(Event):
        node: int
        name: str

        def describe(self) -> str:
            return f"{node_name(self.node)} is called {self.name}"

        def apply(self, state: ReplayState) -> None:
            state.nodes[self.node]["name"] = self.name

and the place that emits it. A field holds what a recording can (reading.py: ints, texts, tuples of them);
fields called node, nodes, path, request, slots are checked by these names in a file from a stranger.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import le
from typing import Any, ClassVar, NamedTuple, Protocol

from minirad.observe.snapshot import State

Ints = tuple[int, ...]
GPU, CPU = "GPU", "CPU"  # the media of KV events: the device's pool and host memory
# What a node can be drawn as: what happened to it, or how it is; viz/trace.py says what each means.
STATUSES = (
    "new", "hit", "split", "grown", "locked", "cached", "evicted", "host", "demoted", "loaded", "again",
    "stale", "stored", "removed", "hole", "unseen",
)  # fmt: skip
# On the time line, each with a button that jumps to the next; a gap is in a stream of other servers only.
MARKS_OF_TIME = ("split", "evict", "retract", "gap")
TIER_SUMS = ("copied", "demoted", "loaded", "again", "host_evicted")  # tokens that moved between the tiers
VICTIM_FATES = ("evicted", "demoted", "host")  # gone; on the host only; gone from the host
_CHOICES = {"status": STATUSES, "mark": MARKS_OF_TIME, "tier_sum": TIER_SUMS, "victim": VICTIM_FATES}


class Word(NamedTuple):
    """What stands before an event's sentence on the page and in the notebook.

    A tag names one kind of event only. kind: its colour class (style.css, stepper.css). small: events that
    come in great numbers; the page shows them only when asked for all.
    """

    tag: str
    kind: str = "plain"
    small: bool = False


class Headline(NamedTuple):
    """A kind's place in the summary of many events: the two largest ranks are told; rank 0 never is.

    tone: the summary's colour if this kind comes first.
    """

    rank: int = 0
    tone: str = ""


class BlockStream(Protocol):
    """What an event can say to a router that knows blocks only (minirad.observe.kv_events)."""

    def insert(
        self, node: int, parent: int, namespace: int, tokens: Ints, units: int, medium: str = GPU
    ) -> None:
        """A new node below `parent`, `units` tokens long, in a medium."""

    def grow(self, node: int, tokens: Ints, units: int) -> None:
        """A node was made longer."""

    def split(self, upper: int, lower: int, at: int) -> None:
        """The first `at` tokens of `lower` are `upper` from now on."""

    def store(self, nodes: Ints, medium: str) -> None:
        """The blocks of nodes came into a medium."""

    def remove(self, node: int, medium: str, *, forget: bool) -> None:
        """A node's blocks left a medium; forget: and the node the tree."""

    def clear(self, *, forget: bool) -> None:
        """Nothing that was there matches any more; forget: and no node is left."""


class Event:
    """Base class of all events: what each kind may say about itself, with a default for most of it."""

    __slots__ = ()

    # Data on the kind. Where a kind gives no word, it is told by its class name.
    word: ClassVar[Word]
    headline: ClassVar[Headline] = Headline()
    mark: ClassVar[str] = ""  # one of MARKS_OF_TIME; "": none
    status: ClassVar[str] = ""  # one of STATUSES, for the nodes `with_status`; "": they look as before
    colour: ClassVar[str] = ""  # of its sentence when it is told alone; "": as its mark
    tier_sum: ClassVar[str] = ""  # one of TIER_SUMS, to which its slots are counted; "": none
    victim: ClassVar[str] = ""  # one of VICTIM_FATES, for evictions: they have policy, reason and runner_up
    by_caller: ClassVar[str] = ""  # what a caller did to the engine beside asking, in the plural
    is_turn: ClassVar[bool] = False  # a thinned-out export keeps its step, as it does every step with a mark
    ends_frame: ClassVar[bool] = False  # a step is over with it
    begins_scene: ClassVar[bool] = False  # where a recording has no scenes with titles of its own
    of_ranks: ClassVar[bool] = False  # only an engine of several ranks tells it (rank_events.py)
    by_engine: ClassVar[bool] = True  # an engine of ours tells it; False: of others' (fleet_events.py)

    def __init_subclass__(cls) -> None:
        taken = [name for name in inspect.get_annotations(cls) if hasattr(Event, name) or name == "word"]
        if taken:
            raise TypeError(
                f"event {cls.__name__}: every event has a {taken[0]!r}, so no field can be called so"
            )
        for name, known in _CHOICES.items():
            value = getattr(cls, name)
            if value and value not in known:
                choices = ", ".join(known)
                raise TypeError(f"event {cls.__name__}: its {name} is {value!r}, not one of {choices}")
        if "word" not in cls.__dict__:
            cls.word = Word(cls.__name__, small=True)
        _register(cls)

    def describe(self) -> str:
        """One plain English sentence, without a final full stop."""
        raise NotImplementedError

    def apply(self, state: ReplayState) -> None:
        """What it does to a state; nothing where it only tells."""

    def check(self, state: ReplayState) -> None:
        """ValueError in one sentence where it cannot follow on this state (in a file from a stranger).

        By default: the request, the nodes and the slots that it names are there.
        """
        request = getattr(self, "request", None)
        expect(request is None or request in state.requests, f"there is no request {request}")
        for name in ("path", "nodes"):
            for number in getattr(self, name, ()):
                expect(number in state.nodes, f"there is no node {number}")
        state.expect_node(getattr(self, "node", 0))
        state.expect_slots(self, getattr(self, "slots", ()))

    def to_blocks(self, stream: BlockStream) -> None:
        """What it says to a router; nothing for most kinds."""

    # ------------------------------------------------------------ how it is drawn

    def touches(self) -> Ints:
        """The nodes that it names, the root left out."""
        node = getattr(self, "node", 0)
        return (node,) if node else ()

    def about(self) -> tuple[str, ...]:
        """The requests that it names."""
        request = getattr(self, "request", None)
        return (request,) if request else ()

    def with_status(self, nodes: Mapping[int, State]) -> Sequence[int]:
        """The nodes that get its `status`. nodes: those in the tree before it."""
        return self.touches()

    def says(self) -> Ints:
        """Token ids whose text belongs behind its sentence."""
        return ()

    def split_off(self) -> tuple[int, int] | None:
        """(new node, the node whose first tokens it took), if it divides one."""
        return None

    def joined(self) -> tuple[int, int] | None:
        """(node that is gone, the node that begins with its tokens now), if it makes one node of two."""
        return None

    def stale(self) -> Ints:
        """The namespaces whose nodes match nothing from now on."""
        return ()

    def tone(self) -> str:
        """The colour of its sentence: new, hit, split, evict, retract, finish, decode, or none."""
        return self.colour or self.mark

    @classmethod
    def together(cls, events: Sequence[Any]) -> tuple[str, str]:
        """Tone and sentence of one or more events of this kind in the summary of many events."""
        return cls.headline.tone, events[0].describe() if len(events) == 1 else cls.several(events)

    @classmethod
    def several(cls, events: Sequence[Any]) -> str:
        """One sentence on two or more events of this kind."""
        return str(events[-1].describe())


# Every event type that our engine tells, with its name in recordings. It grows where a class is defined.
EVENT_TYPES: dict[type[Event], str] = {}
_BY_NAME: dict[str, type[Event]] = {}


def event_type(name: str) -> type[Event] | None:
    """The event type that recordings know by this name, if there is one."""
    return _BY_NAME.get(name)


def _register(kind: type[Event]) -> None:
    known = _BY_NAME.get(kind.__name__)
    if known is not None:
        if known.__module__ != kind.__module__:
            raise TypeError(f"there is an event called {kind.__name__} already, in {known.__module__}")
        # A dataclass with slots is made twice, a notebook's cell runs twice: the last one counts.
        forget(known)
    if kind.by_engine:
        EVENT_TYPES[kind] = kind.__name__
    _BY_NAME[kind.__name__] = kind


def forget(kind: type[Event]) -> None:
    """There is no such event type any more (a notebook or a test has defined one for itself)."""
    EVENT_TYPES.pop(kind, None)
    del _BY_NAME[kind.__name__]


def expect(holds: bool, message: str) -> None:
    """ValueError(message) unless it holds."""
    if not holds:
        raise ValueError(message)


class Nodes(dict[int, State]):
    """A state's nodes by number, which it shares with snapshots: one is copied before it is first changed.

    `nodes[number]` (also `get`, `pop`, `values`, `items`) may be changed in place; what is put in belongs to
    it. To look at nodes without a copy: `look(number)`, `all_to_look_at()`.
    """

    __slots__ = ("_gone", "_last", "_own", "_rising")

    def __init__(self, nodes: Mapping[int, State], rising: bool = False) -> None:
        """rising: they are known to stand in the order of their numbers."""
        super().__init__(nodes)
        self._own: set[int] = set()  # those that no snapshot has
        self._gone: set[int] = set()  # taken out since the last snapshot
        self._rising = rising or all(map(le, self, islice(self, 1, None)))
        self._last = next(reversed(self), 0) if self._rising else max(self, default=0)

    def __getitem__(self, number: int) -> State:
        node = super().__getitem__(number)
        if number in self._own:
            return node
        self._own.add(number)
        node = _copied(node)
        super().__setitem__(number, node)
        return node

    def __setitem__(self, number: int, node: State) -> None:
        self._own.add(number)
        self._rising, self._last = self._rising and number > self._last, max(number, self._last)
        super().__setitem__(number, node)

    def __delitem__(self, number: int) -> None:
        super().__delitem__(number)
        self._own.discard(number)
        self._gone.add(number)

    def get(self, number: int, default: Any = None) -> Any:
        return self[number] if number in self else default  # noqa: SIM401  (this is it)

    def pop(self, number: int, *default: Any) -> Any:
        if default and number not in self:
            return default[0]
        node = self[number]
        del self[number]
        return node

    def clear(self) -> None:
        self._gone.update(self)
        self._own.clear()
        super().clear()

    def values(self) -> Any:
        self._own_all()
        return super().values()

    def items(self) -> Any:
        self._own_all()
        return super().items()

    def _own_all(self) -> None:
        for number in self:
            self[number]

    def look(self, number: int) -> State:
        """A node as it is, not to be changed; a later event may do so."""
        return super().__getitem__(number)

    def all_to_look_at(self) -> Iterable[State]:
        """All nodes as they are, not to be changed."""
        return super().values()

    def keep(self, number: int) -> State:
        """A node as it is now, for ever: who changes it from now on changes a copy."""
        self._own.discard(number)
        return super().__getitem__(number)

    def keep_all(self) -> dict[int, State]:
        """The same of all, by number in increasing order."""
        self._own.clear()
        self._gone.clear()
        if not self._rising:
            nodes = dict.copy(self)
            super().clear()
            super().update({number: nodes[number] for number in sorted(nodes)})
            self._rising, self._last = True, max(nodes, default=0)
        return dict.copy(self)

    def changed(self) -> set[int]:
        """The numbers of those that are not as in the last snapshot: put in, taken out or changed since."""
        return self._own | self._gone


class ReplayState:
    """An engine's state, moved on by events. Starts from a snapshot, which it does not change.

    No engine runs: a simulation's Replay (minirad.simulate) is another thing. Snapshots share the nodes that
    are equal in them, so one costs little more than a reference per node.

    nodes, requests: by number and by name, in the shape of `Engine.snapshot()`; waiting: the queue.
    tree: what a snapshot says of the whole tree; rest: what it says beside (step, kv_tokens, free).
    """

    def __init__(self, snapshot: State, nodes: Mapping[int, State] | None = None) -> None:
        """nodes: the snapshot's by number, in increasing order, if at hand."""
        rest = dict(snapshot)
        tree = dict(rest.pop("tree"))
        listed = tree.pop("nodes")
        by_number = {node["id"]: node for node in listed} if nodes is None else nodes
        self.nodes = Nodes(by_number, rising=nodes is not None)
        self.tree: State = _deep(tree)
        self.requests: dict[str, State] = {n: _copied(each) for n, each in rest.pop("requests").items()}
        self.waiting: list[str] = list(rest.pop("waiting"))
        self.rest: State = _deep(rest)

    def apply(self, event: Event) -> None:
        """Moves the state on by one event."""
        event.apply(self)

    def snapshot(self, nodes: Mapping[int, State] | None = None) -> State:
        """The present state, in the shape of `Engine.snapshot()`; later events do not change it.

        Do not change it either: other snapshots share its nodes. nodes: `self.nodes.keep_all()`, if at hand.
        """
        nodes = self.nodes.keep_all() if nodes is None else nodes
        requests = sorted(self.requests.items(), key=lambda item: request_order(item[0]))
        return {
            **_deep(self.rest),
            "tree": {**_deep(self.tree), "nodes": list(nodes.values())},
            "waiting": list(self.waiting),
            "requests": {name: _copied(request) for name, request in requests},
        }

    # ------------------------------------------------------------ what events ask and say

    @property
    def tiers(self) -> bool:
        """The tree has a second tier in host memory."""
        return "host_tokens" in self.tree

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.tree["page_size"])

    def path_slots(self, node: int) -> list[int]:
        """All slots from the root to the end of a node."""
        parts: list[list[int]] = []
        while node:
            parts.append(self.nodes.look(node)["slots"])
            node = self.nodes.look(node)["parent"]
            if len(parts) > len(self.nodes):
                raise ValueError(f"node {node} is its own ancestor")
        return [slot for part in reversed(parts) for slot in part]

    def take_free(self, slots: int) -> None:
        """So many slots left the free list of the device's pool (negative: they are back)."""
        self.rest["free"] -= slots

    def take_host(self, slots: int) -> None:
        """The same of host memory."""
        self.tree["host_free"] -= slots

    # ------------------------------------------------------------ what `Event.check` asks

    def expect_node(self, number: int) -> None:
        """ValueError unless this is the root or a node in the tree."""
        expect(number == 0 or number in self.nodes, f"there is no node {number}")

    def expect_slots(self, event: Event, slots: Sequence[int]) -> None:
        """ValueError unless these slots are in the pool."""
        check_slots(slots, self.rest["kv_tokens"], self.page_size, type(event).__name__)


def _copied(record: State) -> State:
    """A record of its own: lists and dictionaries in it (of plain values) are copied, too."""
    return {
        name: list(v) if isinstance(v, list | tuple) else dict(v) if isinstance(v, dict) else v
        for name, v in record.items()
    }


def _deep(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _deep(each) for name, each in value.items()}
    return [_deep(each) for each in value] if isinstance(value, list | tuple) else value


def request_order(name: str) -> tuple[int, int]:
    """R3 before R10, samples R3.1 and R3.2 right after R3. A name of another form comes first."""
    number, _, index = name[1:].partition(".")
    return int(number) if number.isdigit() else 0, int(index) if index.isdigit() else 0


def check_slots(slots: Any, tokens: int, page: int, what: str) -> None:
    """Slots lie in a pool of so many tokens behind its dummy page; a tree on its own has none (0)."""
    if tokens and slots and max(slots) >= tokens + page:
        raise ValueError(f"{what}: slot {max(slots)} is not in a pool of {tokens} tokens")


def check_host_slots(slots: Any, tree: State, what: str) -> None:
    """The same of host memory; `tree` has a second tier."""
    page, tokens = tree["page_size"], tree["host_tokens"]
    if min(slots) < page or max(slots) >= tokens + page:
        raise ValueError(f"{what}: its host slots are not in a host tier of {tokens} tokens")
