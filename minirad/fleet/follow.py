"""A server's KV events as they come: sockets for each rank, one thread, a call for everything that is told.

    with Follower(["tcp://host:5557"], ["tcp://host:5558"], tell=print) as follower:
        follower.wait(60)

A rank's publisher (PUB) has its own port, and so has its replay (ROUTER). `tell` is called in the follower's
thread, for each rank in order. While it works nothing is read: what ZeroMQ then drops is asked for again.
Nothing that comes is believed: frames, numbers and sizes are looked at, and what is refused is told.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minirad.errors import said
from minirad.fleet.endpoints import MOST_RANKS, check_endpoint
from minirad.fleet.endpoints import rank_endpoints as rank_endpoints
from minirad.fleet.endpoints import server_info as server_info
from minirad.fleet.order import PATIENCE, SILENCE, Listener, Order
from minirad.fleet.wire import Batch, Decoder, WireError

if TYPE_CHECKING:
    import zmq

LARGEST = 16 << 20  # bytes of a message that is read
LARGEST_FRAME = 128 << 20  # ZeroMQ ends the connection of who sends more
MOST_WAITING = 10_000  # messages that ZeroMQ keeps for us
AT_ONCE = 500  # messages of a rank until the next one has its turn
LAST_NUMBER = (1 << 53) - 1
HANDSHAKE_SECONDS = 3  # until who listens there must have shown that it speaks ZeroMQ
TURN = 0.05  # seconds that a turn waits for something to come

STATES = ("connecting", "replaying", "live", "silent", "lost")
_END = b"\xff" * 8  # -1, the number of an answer's end
_TOO_LARGE = b"\xc1 too large "  # stands for a message that was not kept; no msgpack begins with it


@dataclass(frozen=True, slots=True)
class Delivered:
    """A rank's next batch."""

    rank: int
    seq: int
    batch: Batch
    replayed: bool


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages first to last of a rank are lost."""

    rank: int
    first: int
    last: int
    why: str


@dataclass(frozen=True, slots=True)
class Restart:
    """A rank's publisher began anew: its cache is empty."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something was refused, or cannot be had."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class State:
    """How a rank is from now on, one of STATES."""

    rank: int
    state: str


Told = Delivered | Gap | Restart | Trouble | State


class Follower:
    """Follows the ranks of a server until it is closed.

    endpoints: of each rank's publisher. replays: of each rank's replay, or none at all. topic: only messages
    whose topic begins with it. bind: the publishers connect to us, and we listen at `endpoints`. tell: see
    above; if it raises, following ends, and `wait` and `close` raise that error. decoder, order: what makes
    each rank's (a learner's own, lessons/grading/subscriber.py).

    Raises ValueError for endpoints that are none, or that cannot be bound.
    """

    def __init__(
        self, endpoints: Sequence[str], replays: Sequence[str] = (), topic: str = "", *,
        bind: bool = False, tell: Callable[[Told], object],
        decoder: Callable[[], Decoder] = Decoder, order: Callable[[Listener, bool], Order] = Order,
    ) -> None:  # fmt: skip
        import zmq

        if not endpoints or len(endpoints) > MOST_RANKS:
            raise ValueError(f"a server has 1 to {MOST_RANKS} ranks, got {len(endpoints)} endpoints")
        if replays and len(replays) != len(endpoints):
            raise ValueError(
                f"{len(endpoints)} ranks have {len(replays)} replay endpoints: each needs its own"
            )
        for endpoint in endpoints:
            check_endpoint(endpoint, bind=bind)
        for endpoint in replays:
            check_endpoint(endpoint)
        self.tell, self.decoder, self.order = tell, decoder, order
        self._failure: BaseException | None = None
        # `_over`, as a Ctrl-C in the thread's own `join` makes Python take it for dead.
        self._stop, self._over = threading.Event(), threading.Event()
        self._asked, self._asking = deque[threading.Event](), list[threading.Event]()  # by `catch_up`
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8 * MOST_RANKS)
        self._poller = zmq.Poller()
        try:
            self.ranks = [
                _Rank(self, number, endpoint, replays[number] if replays else None, topic, bind)
                for number, endpoint in enumerate(endpoints)
            ]
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def catch_up(self, timeout: float = 8.0) -> bool:
        """Asks every rank's replay whether anything was missed; True when all of it was told, in time."""
        until, done = time.monotonic() + timeout, threading.Event()
        self._asked.append(done)
        while not self._over.is_set() and time.monotonic() < until:
            if done.wait(TURN):
                return True
        return False

    def wait(self, seconds: float | None = None) -> bool:
        """Waits; True if following has ended meanwhile. Raises what `tell` raised."""
        over = self._over.wait(seconds)
        if self._failure is not None:
            raise self._failure
        return over

    def close(self) -> None:
        """Ends it, within a few seconds also where `tell` never returns. Raises what `tell` raised."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self.wait(5.0)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            for rank in self.ranks:
                rank.tell_state(time.monotonic())
            while not self._stop.is_set():
                self._turn()
        except BaseException as error:  # the caller's, told by `wait`
            self._failure = error
        finally:
            self._context.destroy(linger=0)
            self._over.set()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(int(1000 * TURN)))
        while self._asked:
            self._asking.append(self._asked.popleft())
            for rank in self.ranks:
                rank.wanted = True
        for rank in self.ranks:
            rank.turn(ready)
        if self._asking and not any(rank.wanted or rank.order.asking for rank in self.ranks):
            for done in self._asking:
                done.set()
            self._asking.clear()


class _Rank:
    """One rank's sockets, and what its `Order` tells."""

    def __init__(
        self, follower: Follower, number: int, endpoint: str, replay: str | None, topic: str, bind: bool
    ) -> None:
        import zmq

        self._follower, self.number, self.endpoint, self._bound = follower, number, endpoint, bind
        self.refused = 0  # messages of which nothing was read
        self.wanted = False  # to be asked whether anything was missed
        self.state = ""
        self._was_up = False
        self._live_at = time.monotonic()
        self._said, self._unsaid = float("-inf"), 0
        self._replay, self._question = replay, -1  # from which number on; -1: there is none to put
        self._dealer: zmq.Socket[bytes] | None = None  # waits for the answer
        self._decoder, self.order = follower.decoder(), follower.order(self, replay is not None)
        self._sub = self._socket(zmq.SUB, endpoint)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._stranger = False  # who listens there has not yet shown that it speaks ZeroMQ
        self._missed_at = self._live_at + PATIENCE
        self._connect_at = float(
            "inf"
        )  # ZeroMQ itself does not go back to who broke its rules or sent too much
        self._monitor = self._sub.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        for socket in (self._sub, self._monitor):
            follower._poller.register(socket, zmq.POLLIN)
        self._open(self._sub, endpoint, bind)

    # ------------------------------------------------------------ what `Order` tells

    def deliver(self, seq: int, payload: bytes, replayed: bool) -> None:
        """See order.Listener."""
        if payload.startswith(_TOO_LARGE):
            return self.gap(seq, seq, payload[len(_TOO_LARGE) :].partition(b";")[0].decode())
        try:
            batch = self._decoder.decode(payload)
        except WireError as error:
            return self.gap(seq, seq, str(error))
        self._follower.tell(Delivered(self.number, seq, batch, replayed))

    def gap(self, first: int, last: int, why: str) -> None:
        """See order.Listener."""
        self._follower.tell(Gap(self.number, first, last, why))

    def restart(self, why: str) -> None:
        """See order.Listener."""
        self._decoder = self._follower.decoder()
        self._follower.tell(Restart(self.number, why))

    def trouble(self, why: str) -> None:
        """See order.Listener."""
        self._follower.tell(Trouble(self.number, why))

    def ask(self, start: int) -> None:
        """See order.Listener. The question is put at the end of the turn."""
        self._hang_up()
        self._question = start

    # ------------------------------------------------------------ sockets

    def turn(self, ready: dict[Any, int]) -> None:
        """Takes what has come, at most AT_ONCE messages of each socket."""
        messages = self._receive(self._sub) if self._sub in ready else []
        self._watch()  # before the messages: those of a new connection may be another publisher's
        for frames in messages:
            self._live(frames)
        dealer = self._dealer
        if dealer is not None and dealer in ready:
            for frames in self._receive(dealer):
                if self._dealer is dealer:  # else they answer a question that was put aside
                    self._answer(frames)
        now = time.monotonic()
        if self.wanted and not self.order.asking:
            self.wanted = False
            self.order.check(now)
        self.order.tick(now)
        if self._question >= 0:
            self._put_question()
        if now >= self._connect_at:
            self._connect_anew()
        if now >= self._missed_at and not self.order.up:
            self._missed_at = float("inf")
            self.trouble(f"nothing has answered at {self.endpoint} so far")
        self.tell_state(now)

    def _receive(self, socket: zmq.Socket[bytes]) -> list[list[bytes]]:
        import zmq

        messages = []
        try:
            for _ in range(AT_ONCE):
                messages.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            pass
        return messages

    def _watch(self) -> None:
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            now = time.monotonic()
            if event == zmq.EVENT_CONNECTED:
                self._stranger = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._stranger, self._was_up, self._live_at = False, True, now
                self._missed_at = self._connect_at = float("inf")
                self.order.connected(now)
            else:
                if self._stranger:
                    self._refuse(f"what listens at {self.endpoint} is no publisher of events")
                self._stranger = False
                self._connect_at = float("inf") if self._bound else now + 1
                self.order.disconnected()

    def _connect_anew(self) -> None:
        import zmq

        self._connect_at = float("inf")
        with contextlib.suppress(zmq.ZMQError):  # it is gone already
            self._sub.disconnect(self.endpoint)
        self._open(self._sub, self.endpoint, bind=False)

    def _live(self, frames: list[bytes]) -> None:
        number = self._number(frames[1]) if len(frames) == 3 else None
        if number is None:
            self._refuse(f"a message is {_shown(frames)}, not a topic, a number of 8 bytes and a payload")
        else:
            self._live_at = time.monotonic()
            self.order.live(number, _kept(frames[2]), self._live_at)

    def _answer(self, frames: list[bytes]) -> None:
        rest = frames[1:] if frames[0] == b"" else frames
        if _END in rest[:2] and rest[-1] in (b"", _END):
            self._hang_up()
            self.order.answers_end(time.monotonic())
            return
        number = self._number(rest[-2]) if len(rest) in (2, 3) else None
        if number is None:
            self._refuse(
                f"an answer of the replay is {_shown(frames)}, with no number of 8 bytes and a payload"
            )
        else:
            self.order.answer(number, _kept(rest[-1]), time.monotonic())

    @staticmethod
    def _number(frame: bytes) -> int | None:
        number = int.from_bytes(frame, "big") if len(frame) == 8 else -1
        return number if 0 <= number <= LAST_NUMBER else None

    def _put_question(self) -> None:
        """Asks on a socket of its own: so an answer cannot be taken for that of an earlier question."""
        import zmq

        start, self._question = self._question, -1
        assert self._replay is not None
        try:
            self._dealer = self._socket(zmq.DEALER, self._replay)
            self._open(self._dealer, self._replay, bind=False)
            self._follower._poller.register(self._dealer, zmq.POLLIN)
            self._dealer.send_multipart((b"", start.to_bytes(8, "big")), zmq.NOBLOCK)
        except (
            zmq.ZMQError,
            ValueError,
        ) as error:  # too many open files, say; the question is put again later
            self._refuse(f"the replay cannot be asked: {error}")

    def _hang_up(self) -> None:
        if self._dealer is not None:
            with contextlib.suppress(KeyError):
                self._follower._poller.unregister(self._dealer)
            self._dealer.close(linger=0)
            self._dealer = None

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        import zmq

        try:
            socket: zmq.Socket[bytes] = self._follower._context.socket(kind)
        except zmq.ZMQError as error:
            raise ValueError(f"{endpoint}: there can be no more sockets: {error}") from None
        for option, value in (
            (zmq.LINGER, 0), (zmq.RCVHWM, MOST_WAITING), (zmq.MAXMSGSIZE, LARGEST_FRAME),
            (zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 30), (zmq.RECONNECT_IVL_MAX, 500),
            (zmq.HANDSHAKE_IVL, 1000 * HANDSHAKE_SECONDS),
            (zmq.IPV6, int("[" in endpoint)),
        ):  # fmt: skip
            socket.setsockopt(option, value)
        return socket

    def _open(self, socket: zmq.Socket[bytes], endpoint: str, bind: bool) -> None:
        import zmq

        try:
            (socket.bind if bind else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            what = "listened at" if bind else "connected to"
            raise ValueError(f"{endpoint} cannot be {what}: {error}") from None

    # ------------------------------------------------------------ what is said

    def _refuse(self, why: str) -> None:
        """Counts what was not read; says so, but not more often than once a second."""
        self.refused += 1
        now = time.monotonic()
        if now - self._said < 1:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more were refused before)" if self._unsaid else ""
        self._said, self._unsaid = now, 0
        self.trouble(why + more)

    def tell_state(self, now: float) -> None:
        """Says how the rank is, if that is new."""
        if not self.order.up:
            state = "lost" if self._was_up else "connecting"
        elif self.order.asking and not self.order.checking:
            state = "replaying"
        else:
            state = "silent" if now - self._live_at > SILENCE else "live"
        if state != self.state:
            self.state = state
            self._follower.tell(State(self.number, state))


def _kept(payload: bytes) -> bytes:
    """A payload, or what stands for it where it is too large to be kept."""
    if len(payload) <= LARGEST:
        return payload
    why = f"a message of {len(payload):,} bytes is larger than the {LARGEST:,} that are read"
    return _TOO_LARGE + why.encode() + b";" + hashlib.blake2b(payload, digest_size=16).digest()


def _shown(frames: list[bytes]) -> str:
    lengths = [len(frame) for frame in frames]
    return f"{len(frames)} frame{'s' * (len(frames) != 1)} of {said(lengths)} bytes"
