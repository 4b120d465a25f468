"""One rank's messages in their order: which comes next, what is missing, when the publisher began anew.

A publisher numbers its messages from 0 and keeps the newest in a buffer that can be asked for ("replay").
`Order` is told what comes and when, and tells its listener what it means. It has no sockets and no clock.

It asks from the last message that it delivered, and that one is part of the answer: so it sees whether the
publisher is still the same. Another message there, or none, is a publisher that began anew, also where no
live message shows it. While it waits for an answer live messages are held.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

SILENCE = 2.0  # seconds without a message until the replay is asked: nothing shows that the last one was lost
LONGEST_SILENCE = 30.0  # it doubles up to this
PATIENCE = 5.0  # seconds that an answer, or the next part of it, may take
MOST_HELD = 20_000  # live messages
MOST_HELD_BYTES = 64 << 20

_NOT_HELD = "the replay buffer no longer holds them"
_NOT_SEEN_AGAIN = (
    "whether it is the same server still cannot be seen: the replay buffer no longer holds message"
)


class Listener(Protocol):
    """What `Order` tells, each about what comes after all that was told before."""

    def deliver(self, seq: int, payload: bytes, replayed: bool) -> None:
        """The next message."""

    def gap(self, first: int, last: int, why: str) -> None:
        """Messages first to last are lost."""

    def restart(self, why: str) -> None:
        """The publisher began anew: nothing that was delivered so far counts."""

    def trouble(self, why: str) -> None:
        """Something to be said that changes nothing."""

    def ask(self, start: int) -> None:
        """Ask the replay for all from `start` on; what still comes of an earlier answer is to be dropped."""


class Order:
    """One rank's messages; replay: whether there is an endpoint that can be asked.

    last: number of the last message delivered or lost, -1 for none. duplicates: live messages that a replay
    had brought already. asking: an answer is awaited. checking: and only to see whether anything was missed.
    """

    def __init__(self, listener: Listener, replay: bool) -> None:
        self._tell, self._replay = listener, replay
        self.duplicates = 0
        self.asking = self.checking = self.up = False
        self._wait = SILENCE
        self._heard = self._asked = 0.0  # when anything came; when the question was put, or a part answered
        self._top = -1  # the highest number in the answer so far
        self._progress = False  # the answer brought something new
        self._late = False  # something was lost while the answer came, so that it may be newer than that
        self.last = self._live = -1  # _live: of the last live message
        self._seen = b""  # what message `last` was
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        self._doubt = False  # behind the connection may be another publisher, and nobody can be asked

    # ------------------------------------------------------------ what comes

    def connected(self, now: float) -> None:
        """There is a connection, the first one or another: behind it may be another publisher than before."""
        self.up, self._heard = True, now
        if self._replay:
            self._drop_held()  # of the connection before; the replay has them
            self._ask(now)
        else:
            self._doubt = self.last >= 0

    def disconnected(self) -> None:
        """The connection is gone: silence says nothing now."""
        self.up = False

    def live(self, seq: int, payload: bytes, now: float) -> None:
        """A live message."""
        self._heard, self._wait = now, SILENCE
        anew = seq <= self._live
        if anew:
            self._drop_held()
            self._restart(f"message {seq} came after message {self._live}", now)
        elif self._doubt:
            self._tell.trouble(
                f"message {seq} came after message {self.last} on another connection: without a replay "
                "endpoint nobody can say whether the publisher began anew, so what is drawn may be gone"
            )
        skipped = seq > self._live + 1
        self._live, self._doubt = seq, False
        if self.asking:
            self._late = self._late or skipped
            self._hold(seq, payload)
        elif seq > self.last + 1 and self._replay:
            self._hold(seq, payload)
            self._ask(now)
        else:
            late = "they were lost on the way"
            if self.last < 0:
                before = "there was a connection to who began anew" if anew else "this began to listen"
                late = f"they were sent before {before}"
            self._next(seq, payload, False, now, f"{late}, and there is no replay endpoint to ask")

    def answer(self, seq: int, payload: bytes, now: float) -> None:
        """A message of the answer."""
        if not self.asking:
            return
        self._heard = now
        following = min(seq, self._held[0][0]) if self._held else seq
        if self._top < 0 and following == self.last + 1 > 0 and seq > self.last:
            self._tell.trouble(f"{_NOT_SEEN_AGAIN} {self.last}")  # as there is no gap, nothing else would
        if seq > self._top:  # else a replay that says the same again and again would never be given up
            self._top, self._asked = seq, now
        if seq == self.last and self._seen != payload:
            return self._restart(f"message {seq} is another one now", now)
        while self._held and self._held[0][0] < seq:
            if not self._next_held(now, _NOT_HELD):
                return
        if seq > self.last and self._next(seq, payload, True, now, _NOT_HELD):
            self._progress, self.checking, self._wait = True, False, SILENCE

    def answers_end(self, now: float) -> None:
        """The answer is complete."""
        if not self.asking:
            return
        self._heard = self._asked = now
        if self._top < self.last:
            return self._restart(f"the replay does not know message {self.last}", now)
        self._settle(now, _NOT_HELD)

    def tick(self, now: float) -> None:
        """Time goes by; to be called every 0.1 s or so."""
        if self.asking and now - self._asked >= PATIENCE:
            if self._progress:  # a part of the answer came, its end was lost
                return self._ask(now)
            self._tell.trouble(f"the replay endpoint did not answer within {PATIENCE:g} seconds")
            self._heard, self._late = now, False
            self._settle(now, "the replay endpoint did not answer")
        elif self.up and not self.asking and now - self._heard >= self._wait:
            self._wait = min(2 * self._wait, LONGEST_SILENCE)
            self.check(now)

    def check(self, now: float) -> None:
        """Asks whether anything was missed; without a replay, or while it is asked, nothing is done."""
        if self._replay and not self.asking:
            self._ask(now)
            self.checking = True

    # ------------------------------------------------------------ what follows

    def _next(self, seq: int, payload: bytes, replayed: bool, now: float, why: str) -> bool:
        """Delivers a message, if it is new; False if what is missing before it is asked for first.

        why: what was missing is lost, where asking did not help.
        """
        if seq <= self.last:
            self.duplicates += 1
            return True
        if seq > self.last + 1:
            if self._progress:  # the answer had a hole, or ended before the live messages began
                self._ask(now)
                return False
            self._tell.gap(self.last + 1, seq - 1, why)
        self.last, self._seen = seq, payload
        self._tell.deliver(seq, payload, replayed)
        return True

    def _settle(self, now: float, why: str) -> None:
        """No more of an answer comes: what was held is delivered."""
        self._progress = self._progress or self._late
        while self._held:
            if not self._next_held(now, why):
                return
        self.asking = self.checking = self._progress = False

    def _restart(self, why: str, now: float) -> None:
        self.last, self._live, self._seen = -1, self._held[-1][0] if self._held else -1, b""
        self._tell.restart(why)
        if self._replay:
            self._ask(now)

    def _ask(self, now: float) -> None:
        self.asking, self.checking, self._progress = True, False, False
        self._asked, self._top, self._late = now, -1, False
        self._tell.ask(max(self.last, 0))

    def _hold(self, seq: int, payload: bytes) -> None:
        """Keeps a live message, or lets it go where too many wait: the next one shows that it is missing."""
        if len(self._held) < MOST_HELD and self._held_bytes + len(payload) <= MOST_HELD_BYTES:
            self._held.append((seq, payload))
            self._held_bytes += len(payload)

    def _next_held(self, now: float, why: str) -> bool:
        seq, payload = self._held[0]
        if not self._next(seq, payload, False, now, why):
            return False
        self._held.popleft()
        self._held_bytes -= len(payload)
        return True

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0
