"""The bus that carries events from the engine to its handlers.

The emit sites ask first:

    if bus.wants(NodeSplit):
        bus.emit(NodeSplit(...))

so that with no listener no event is built. Handlers run at once, in order of subscription, inside the
engine's step. They must not change the engine: they watch.

Who has to see whole steps (a recorder) keeps the engine from running ahead; who does not (a publisher of
blocks) says so, and can hear with `when_settled` where a call of the engine, a step above all, is over.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from minirad.observe.event import EVENT_TYPES, Event

Handler = Callable[[Any], None]


class EventBus:
    """Carries events from the engine to its handlers. Synchronous and in order."""

    def __init__(self) -> None:
        self._all: list[Handler] = []
        self._by_type: dict[type[Event], list[Handler]] = {}
        # What `wants` asks: one set look-up, so that an idle emit site costs tens of nanoseconds.
        # With a listener to all it is EVENT_TYPES itself: also of event types that are defined later.
        self._wanted: Container[type[Event]] = set()
        self._failures: list[BaseException] | None = None  # None: a handler's error is raised at once
        self._need_steps = 0  # handlers that need whole steps
        self._settled: list[Callable[[], Any]] = []

    def wants(self, kind: type[Event]) -> bool:
        """True when a handler listens to events of this type."""
        return kind in self._wanted

    @property
    def whole_steps(self) -> bool:
        """A handler needs whole steps."""
        return self._need_steps > 0

    @property
    def settled(self) -> bool:
        """No call of the engine is running: what was told so far is whole."""
        return self._failures is None

    def emit(self, event: Event) -> None:
        """Hands one event to its listeners, those of its own type first."""
        for handler in (*self._by_type.get(type(event), ()), *self._all):
            self._call(handler, event)

    def _call(self, handler: Callable[..., Any], *event: Event) -> None:
        try:
            handler(*event)
        except BaseException as error:
            if self._failures is None:
                raise
            self._failures.append(error)

    def hold_failures(self) -> None:
        """From now on a handler's error is kept: the engine is in the middle of a change."""
        self._failures = []

    def release_failures(self) -> list[BaseException]:
        """Ends `hold_failures`: the call is over. Returns what handlers raised meanwhile."""
        for handler in tuple(self._settled):
            self._call(handler)
        failures, self._failures = self._failures or [], None
        return failures

    def subscribe(
        self, kind: type[Event] | None, handler: Handler, *, whole_steps: bool = True
    ) -> Callable[[], None]:
        """Calls `handler(event)` for each event of `kind` (None: of every kind).

        whole_steps: False for a handler that may be told what one step evicts for its room before it is told
        what the step before computed, and of no StepEnded: the engine may run ahead then (fast/overlap.py).
        Returns a function that ends the subscription; calling it twice does no harm.
        """
        if kind is not None and not any(kind is known for known in EVENT_TYPES):
            raise ValueError(f"{kind!r} is no event type: one of minirad.events.EVENT_TYPES, or None for all")
        if not callable(handler):
            raise ValueError(f"a handler is called with each event, and {handler!r} cannot be called")
        handlers = self._all if kind is None else self._by_type.setdefault(kind, [])
        handlers.append(handler)
        self._need_steps += whole_steps
        self._refresh()
        active = True

        def unsubscribe() -> None:
            nonlocal active
            if active:  # one handler may be subscribed twice: each subscription ends by itself
                active = False
                handlers.remove(handler)
                self._need_steps -= whole_steps
                self._refresh()

        return unsubscribe

    def when_settled(self, handler: Callable[[], Any]) -> Callable[[], None]:
        """Calls `handler()` where a call of the engine is over. Returns what ends that, once or more."""
        self._settled.append(handler)

        def end() -> None:
            self._settled = [other for other in self._settled if other is not handler]

        return end

    def _refresh(self) -> None:
        listened = {kind for kind, handlers in self._by_type.items() if handlers}
        self._wanted = EVENT_TYPES if self._all else listened
