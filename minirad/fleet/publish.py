"""Our engine tells others which blocks it holds, as SGLang does: a PUB socket, and a ROUTER for the rest.

    with Publisher(engine):
        engine.generate(...)

A message is `[topic, sequence number, batch]`, the number as 8 bytes from 0 on. A batch is what one call of
the engine told, a step above all, or several whole ones where they come faster than they are sent. Who asks
the ROUTER with `[b"", first number]` gets `[b"", number, batch]` for each that is still in the buffer, and at
the end number -1 with nothing behind it; as SGLang's, without the topic.

The engine's thread only puts events into a queue. One thread of our own owns both sockets and never waits for
a subscriber: who is too slow loses messages, sees it by the numbers, and asks the ROUTER. The engine may run
ahead meanwhile. Other than SGLang's publisher, this one always binds, also where the endpoint names a host.
"""

from __future__ import annotations

import atexit
import re
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from minirad.errors import said, whole
from minirad.fleet.wire import Batch, Cleared, Record, Removed, Stored, encode
from minirad.observe.kv_events import (
    ADAPTER,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventStream,
)

if TYPE_CHECKING:
    from types import TracebackType

    from minirad.engine import Engine

ENDPOINT, REPLAY = "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"
MOST_BYTES = 64 << 20  # of the batches that are kept for the ROUTER
MOST_TOGETHER = 1_000  # events of several calls in one batch
MOST_BEHIND = 100_000  # events that wait to be sent; only beyond does the engine wait for our thread
MOST_QUEUED = 1_000_000  # messages for one subscriber
LOOK = 0.02  # seconds between two looks for a question
LINGER = 500  # milliseconds that a closed socket has for its last messages
END = (-1).to_bytes(8, "big", signed=True)

_ENDPOINT = re.compile(r"tcp://(\*|[^\s:/\[\]*]+|\[[0-9A-Fa-f:.%]+\]):([0-9]{1,5})", re.ASCII)


class Publisher:
    """Publishes what an engine's tree holds: first what is there, then every change.

    engine: None for one that comes later (`attach`). endpoint, replay: tcp://HOST:PORT to bind, HOST may be
    *; replay None: nobody can ask for what they missed. rank is added to both ports (but for port 0, which
    takes any free one) and stands in each batch; several ranks on one machine need a replay further off than
    the next port. buffer: how many batches are kept, of MOST_BYTES in all.

    Attributes:
        endpoint, replay: as they are bound.
        batches: messages so far, and the sequence number of the next one.
        trouble: one sentence on a batch that could not be sent (whoever listens sees a gap), or "".

    Raises ValueError for an endpoint that is none, a port that is taken, and a tree that tells no events.
    """

    def __init__(
        self, engine: Engine | None = None, endpoint: str = ENDPOINT, replay: str | None = REPLAY,
        topic: str = "", rank: int = 0, buffer: int = 10_000,
    ) -> None:  # fmt: skip
        import zmq

        if not isinstance(topic, str):
            raise ValueError(f"a topic is a text, got {said(topic)}")
        self.rank, self._keep = whole("rank", rank, 0), whole("buffer", buffer, 1)
        asked = with_rank("endpoint", endpoint, self.rank)
        asked_replay = None if replay is None else with_rank("replay", replay, self.rank)
        if asked == asked_replay and not asked.endswith(":0"):  # which is any free port
            raise ValueError(f"events, and answers on those missed, need an endpoint each: both are {asked}")
        self._topic, self.batches, self.trouble = topic.encode(), 0, ""
        self._engine: Engine | None = None
        self._stream: KVEventStream | None = None
        self._ends: list[Any] = []
        self._telling: list[KVEvent] = []  # by the call that is running
        self._changed = threading.Condition()
        self._waiting: deque[tuple[float, list[KVEvent]]] = deque()  # calls, and when they were over
        self._behind = 0  # events that wait or are being sent
        self._closing = False
        self._sent: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._context = zmq.Context()
        try:
            self._pub = self._bound(zmq.PUB, asked)
            self._router = None if asked_replay is None else self._bound(zmq.ROUTER, asked_replay)
            self.endpoint, self.replay = _where(self._pub), self._router and _where(self._router)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        if engine is not None:
            try:
                self.attach(engine)
            except BaseException:
                self.close()
                raise

    def _bound(self, kind: int, endpoint: str) -> Any:
        import zmq

        socket = self._context.socket(kind)
        socket.linger = LINGER
        socket.sndhwm = min(self._keep + 1, MOST_QUEUED)  # a whole answer, with its end
        socket.ipv6 = "[" in endpoint
        if kind == zmq.ROUTER:
            socket.router_mandatory = 1  # an asker that is gone, or does not read, is told to us
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise ValueError(f"cannot publish at {endpoint}: the port is taken") from None
            raise ValueError(f"cannot publish at {endpoint}: {zmq.strerror(error.errno or 0)}") from None
        return socket

    # ------------------------------------------------------------ in the engine's thread

    def attach(self, engine: Engine) -> None:
        """Goes on with this engine, after AllBlocksCleared where there was another one before.

        ValueError, with nothing changed, within a step, and for a tree that tells no events (a student's).
        """
        cache: Any = getattr(engine, "cache", None)
        if cache is None or not hasattr(engine, "bus"):
            raise ValueError(f"an engine is needed, got {said(engine)}")
        if getattr(cache, "bus", None) is not engine.bus:
            raise ValueError(f"{type(cache).__name__} tells no events, so there is nothing to publish")
        if not engine.bus.settled:
            raise ValueError("a publisher is attached between two steps, not within one")
        if self._closing:
            raise ValueError("this publisher is closed")
        self._detach()
        if self._engine is not None:
            self._take(AllBlocksCleared())
        self._engine = engine
        self._stream = KVEventStream(cache, self._take)
        self._ends = [self._stream.close, engine.bus.when_settled(self._cut)]
        self._cut()

    def _detach(self) -> None:
        for end in self._ends:
            end()
        self._ends = []

    def _take(self, event: KVEvent) -> None:
        self._telling.append(event)
        if self._engine is not None and self._engine.bus.settled:
            self._cut()  # a change by hand, outside of any call

    def _cut(self) -> None:
        """A call is over: what it told is one piece."""
        if not self._telling:
            return
        call, self._telling = (time.time(), self._telling), []
        with self._changed:
            if self._closing:
                return
            self._waiting.append(call)
            self._behind += len(call[1])
            self._changed.notify_all()
            if self._behind > MOST_BEHIND:  # our thread is behind, not a subscriber: it never waits for one
                self._changed.wait_for(lambda: self._behind <= MOST_BEHIND or self._closing, timeout=1)

    # ------------------------------------------------------------ from any thread

    def flush(self, timeout: float = 5.0) -> bool:
        """Returns when all that was told has been handed to the sockets; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._behind, timeout)

    @property
    def kept(self) -> list[tuple[int, bytes]]:
        """Numbers and batches that can be asked for; after a `flush`."""
        return list(self._sent)

    def close(self) -> None:
        """Sends what was told, and gives the ports back, within seconds; calling it twice does no harm."""
        self._detach()
        self._cut()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=5)
        atexit.unregister(self.close)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ in our own thread

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if not self._waiting and not self._closing:
                        self._changed.wait(None if self._router is None else LOOK)
                    calls, closing = self._next(), self._closing
                if calls:
                    self._send(calls)
                elif closing:
                    return
                if self._router is not None:
                    self._answer()
        finally:
            with self._changed:
                self._closing, self._behind = True, 0
                self._changed.notify_all()
            self._context.destroy(linger=LINGER)

    def _next(self) -> list[tuple[float, list[KVEvent]]]:
        """The calls of the next batch, each of them whole."""
        calls: list[tuple[float, list[KVEvent]]] = []
        room = MOST_TOGETHER
        while self._waiting and (not calls or len(self._waiting[0][1]) <= room):
            calls.append(self._waiting.popleft())
            room -= len(calls[-1][1])
        return calls

    def _send(self, calls: list[tuple[float, list[KVEvent]]]) -> None:
        import zmq

        events = [event for _, told in calls for event in told]
        number, self.batches = self.batches, self.batches + 1  # also where it fails: a gap is seen
        try:
            payload = encode(Batch(calls[-1][0], tuple(map(as_record, events)), self.rank))
            self._remember(number, payload)
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        except Exception as error:
            if not self.trouble:
                self.trouble = f"batch {number} could not be sent: {error!r}"
                print(f"minirad publisher: {self.trouble}", file=sys.stderr)
        with self._changed:
            self._behind -= len(events)
            self._changed.notify_all()

    def _remember(self, number: int, payload: bytes) -> None:
        self._sent.append((number, payload))
        self._bytes += len(payload)
        while len(self._sent) > self._keep or (self._bytes > MOST_BYTES and len(self._sent) > 1):
            self._bytes -= len(self._sent.popleft()[1])

    def _answer(self) -> None:
        """Answers one question, if there is one; an asker that cannot take the answer gets no end of it."""
        import zmq

        router: Any = self._router
        try:
            frames = router.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 3 or len(frames[2]) > 8:
                return  # nobody's question
            asker, start = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in self._sent:
                if number >= start:
                    router.send_multipart((asker, b"", number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            router.send_multipart((asker, b"", END, b""), zmq.NOBLOCK)
        except zmq.ZMQError:  # no question; or the asker is gone, or reads too slowly
            return


def with_rank(name: str, endpoint: Any, rank: int) -> str:
    """An endpoint with the rank added to its port; ValueError, naming it, where it is none."""
    found = _ENDPOINT.fullmatch(endpoint) if isinstance(endpoint, str) else None
    if found is None:
        raise ValueError(f"{name} must be tcp://HOST:PORT, such as {ENDPOINT}, got {said(endpoint)}")
    port = int(found[2])
    port += rank if port else 0
    if port > 65535:
        ranked = f" with rank {rank}" if rank else ""
        raise ValueError(f"{name} {endpoint}{ranked} is port {port}, and the last one is 65535")
    return f"tcp://{found[1]}:{port}"


def beside(endpoint: str) -> str:
    """Where the ROUTER stands by default: one port after the PUB socket, any free one after port 0."""
    base, _, port = with_rank("endpoint", endpoint, 0).rpartition(":")
    if port == "65535":
        raise ValueError(f"{endpoint} has the last port, so the replay needs one that is named")
    return f"{base}:{int(port) + (port != '0')}"


def as_record(event: KVEvent) -> Record:
    """An event of ours as it is sent."""
    if isinstance(event, AllBlocksCleared):
        return Cleared()
    if isinstance(event, BlockRemoved):
        return Removed(event.block_hashes, event.medium)
    assert isinstance(event, BlockStored)
    blocks, flat = len(event.block_hashes), event.token_ids
    size = len(flat) // blocks
    pairs = size == 2 * event.block_size
    space = _space(event, pairs)
    return Stored(
        event.block_hashes, event.parent_block_hash,
        tuple(flat[at : at + size] for at in range(0, len(flat), size)),
        event.block_size, event.medium, pairs, (space,) * blocks if space else (),
    )  # fmt: skip


def _space(event: BlockStored, pairs: bool) -> tuple[str, ...]:
    """What names a namespace: a text as it is, an adapter and any other key as `kv_events` spells them.

    All of those have a colon or a bracket, so texts that have one are spelt as well: no two keys look alike.
    That the tree is one of pairs is seen by the tokens.
    """
    if event.extra_keys is None:
        return ()
    keys, name = event.extra_keys[0], event.lora_name
    if keys[1:2] == (ADAPTER,):
        return keys[:-1] if pairs else keys
    if name and not set(":(") & set(name):
        return (name,)
    if pairs and keys[0] == "NoneType:None" and len(keys) == 2:
        return ()
    return tuple(key for at, key in enumerate(keys) if not (pairs and at == 1))


def _where(socket: Any) -> str:
    """The endpoint that a socket is bound to, with the port that a 0 became."""
    import zmq

    return str(socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
