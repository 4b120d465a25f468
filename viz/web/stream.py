"""A stream of other servers' KV events, followed and shown: the options, the thread, the run that a page has.

    python -m viz.live --connect tcp://host:5557 --replay tcp://host:5558 --ranks 2
    python -m viz.live --server http://host:30000 --record flight.jsonl
    python -m viz.live --bind tcp://*:5557                     for a publisher that connects

With one of these three, and with nothing else, a socket to elsewhere is opened. `--export` of a live stream
writes its file after --steps frames, when nothing has come for SILENCE seconds, or with Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minirad.collector import rare_collections
from minirad.fleet.endpoints import ServerInfo, rank_endpoints, server_info
from minirad.fleet.flight import Flight, FlightRecording
from minirad.fleet.follow import Follower, Told
from minirad.fleet.follow import State as RankState
from minirad.fleet.tree import FleetTree
from viz.trace import Decode, Trace, ids_as_text
from viz.view.text import short
from viz.web.asked import SILENCE, endpoints_of
from viz.web.fleet import FleetPage
from viz.words import decoder_from

if TYPE_CHECKING:
    from lessons.grading.subscriber import Subscriber

Json = dict[str, Any]
PACE = 0.1  # seconds between two frames that a page is told of
FOREIGN = "this is the cache of another server: there is nothing to drive"


# ---------------------------------------------------------------------- what is asked for


def followed(options: argparse.Namespace) -> ServerInfo:
    """What is followed; a server is asked where that is."""
    endpoints, replays = endpoints_of(options)
    if options.server is None:
        return ServerInfo(endpoints, replays, options.topic or "", 0)
    found = server_info(options.server)
    if options.replay is not None:
        replays = rank_endpoints(options.replay, len(found.endpoints))
    topic = found.topic if options.topic is None else options.topic
    return ServerInfo(found.endpoints, replays or found.replays, topic, found.block_size, found.notices)


def tokenizer(source: str) -> str:
    """The folder of the tokenizer that --tokenizer names. ValueError: there is none here."""
    folder = _folder(source)
    if not folder or decoder_from(folder) is ids_as_text:
        raise ValueError(
            f"--tokenizer {source}: no tokenizer is in such a folder, nor in the local cache under "
            "that name (nothing is fetched)"
        )
    return folder


def _folder(source: str) -> str:
    """A folder as it is; of a name, its folder in the local cache of Hugging Face, or ""."""
    with contextlib.suppress(OSError, ValueError):
        if Path(source).is_dir():
            return source
    from huggingface_hub import try_to_load_from_cache

    for name in ("tokenizer.json", "tokenizer_config.json"):
        with contextlib.suppress(OSError, ValueError):  # what cannot be a name
            found = try_to_load_from_cache(source, name)
            if isinstance(found, str):
                return str(Path(found).parent)
    return ""


# ---------------------------------------------------------------------- what a page shows


class Titled(NamedTuple):
    """Where a run of our own has a workload."""

    name: str
    title: str


class FleetRun:
    """One part of a stream's recording in the place of a run: nothing can be driven."""

    drivable, idle, served_none = False, False, False
    policy = refused = missing = ""
    alone = single_page = None

    def __init__(self, number: int, recording: FlightRecording, decode: Decode, title: str) -> None:
        self.number, self.recording = number, recording
        self.workload = Titled("stream", title)
        self.notices: list[str] = []
        self.trace = Trace(recording, decode)
        self.page = FleetPage(self.trace)

    @property
    def clock(self) -> int:
        return len(self.trace)

    def advance(self) -> None:
        raise ValueError(FOREIGN)

    def close(self, broken: bool = False) -> None:
        """Nothing is open."""


class FlightSource(threading.Thread):
    """What has a live page of a flight recording that grows (routes.Source).

    A subclass makes `_flight`, calls `_begin`, and says how things are. decode: token ids to text.
    error: what ended it, or "".
    """

    page_kind, what, ending = "page", "the stream", 0.3  # ending: seconds that its end may take
    plain: tuple[type[Exception], ...] = ()  # errors whose sentence says it all
    _flight: Flight

    def __init__(self, name: str, title: str, decode: Decode) -> None:
        super().__init__(name=name, daemon=True)
        self.title, self.error = title, ""
        self._decode = decode
        self._told: tuple[int, Json] = 0, {}  # frames, status
        self._token = secrets.token_hex(4)
        self._stopping = threading.Event()
        self._listeners: list[Callable[[], None]] = []
        self.run_now: FleetRun

    def _begin(self) -> None:
        """The first run: to be called when there is a flight."""
        self.run_now = self._run_of(1)

    # ------------------------------------------------------------ in this thread

    def run(self) -> None:
        """Until it is stopped: frames are cut, and pages told of them."""
        try:
            with rare_collections():
                while not self._stopping.is_set():
                    self._wait()
                    self._look()
        except Exception as error:
            if isinstance(error, self.plain):
                self.error = str(error)
            else:
                self.error = f"{type(error).__name__}: {error}"
                traceback.print_exc()
        finally:
            self._end()

    def _wait(self) -> None:
        """A moment, in which frames come. Raises what ended them."""
        raise NotImplementedError

    def _close(self) -> None:
        """Ends what was begun."""
        raise NotImplementedError

    def _look(self) -> None:
        """Tells pages of what is new; another recording is a run of its own."""
        run, recording = self.run_now, self._flight.recording
        if recording is not run.recording:
            run = self.run_now = self._run_of(run.number + 1)
        trouble = self._flight.trouble
        if trouble and trouble not in run.notices:
            run.notices.append(trouble)
        if (news := (len(recording), self.status())) != self._told:  # also a word that no frame comes with
            self._told = news
            self._announce()

    def _end(self) -> None:
        with contextlib.suppress(Exception):  # what ended it was told
            self._close()
        self._flight.close()
        self._look()
        self._announce()

    def _run_of(self, number: int) -> FleetRun:
        return FleetRun(number, self._flight.recording, self._decode, self.title)

    # ------------------------------------------------------------ from other threads

    @property
    def stopping(self) -> bool:
        """It is about to end."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Ends it."""
        self._stopping.set()
        self._announce()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """`listener` is called, in any thread, when something has come; returns how to end that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _announce(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    def command(self, name: str, arguments: Json) -> Future[Json]:
        """There is none."""
        answer: Future[Json] = Future()
        answer.set_exception(ValueError(FOREIGN))
        return answer

    def key(self, run: Any) -> str:
        """Names a run so that no page takes it for one of a server that was here before."""
        return f"{run.number}.{self._token}"

    def hello(self, run: Any) -> Json:
        """What a page needs when a run begins."""
        return {
            "run": self.key(run), "kind": self.page_kind, "meta": run.page.meta(run.workload.title),
            "choices": {}, "settings": {}, "status": self.status(),
        }  # fmt: skip

    def status(self) -> Json:
        """What the page's header depends on."""
        text, kind = self._state()
        return {
            "run": self.key(self.run_now), "playing": True, "speed": 1 / PACE, "idle": False,
            "drivable": False, "error": self.error, "notices": list(self.run_now.notices[-3:]),
            "refused": "", "policy": "", "stream": {"text": text, "kind": kind},
        }  # fmt: skip

    def _state(self) -> tuple[str, str]:
        """In few words, and whether that is "on", "off" or "error"."""
        raise NotImplementedError


class FleetSource(FlightSource):
    """Follows a stream and has a live page of it. Opens its sockets when it is made.

    tokenizer: a folder; None: token ids are shown as numbers. record: a file that is written as it grows.
    subscriber: a learner's parts in the engine's place; where they break, that is the stream's end.
    ValueError for endpoints that cannot be had.
    """

    def __init__(
        self, info: ServerInfo, tokenizer: str | None = None, record: str | None = None, bind: bool = False,
        subscriber: Subscriber | None = None,
    ) -> None:  # fmt: skip
        where = info.endpoints
        title = f"{where[0]} and {len(where) - 1} more" if len(where) > 1 else where[0]
        super().__init__("stream", title, ids_as_text if tokenizer is None else decoder_from(tokenizer))
        self.info, self.subscriber = info, subscriber
        self._states = ["connecting"] * len(where)
        self._flight = Flight(
            where, block_size=info.block_size or None, path=record, tokenizer=tokenizer,
            notes={"title": title}, tree=FleetTree(subscriber.blocks) if subscriber else None,
        )  # fmt: skip
        self._begin()
        parts: Json = {}
        if subscriber is not None:
            parts = {"decoder": subscriber.decoder, "order": subscriber.order}
            self.what, self.plain = "your subscriber", (subscriber.broke,)
        self._follower = Follower(where, info.replays, info.topic, bind=bind, tell=self._take, **parts)

    def _take(self, told: Told) -> None:
        """In the follower's thread."""
        if isinstance(told, RankState):
            self._states[told.rank] = told.state
        self._flight.take(told)

    def _wait(self) -> None:
        ended = self._follower.wait(PACE / 2)
        self._flight.tick()
        if ended:
            self._look()
            raise RuntimeError("the stream is followed no more")

    def _close(self) -> None:
        self._follower.close()

    def _run_of(self, number: int) -> FleetRun:
        run = super()._run_of(number)
        run.page.sized = bool(self.info.block_size) or run.recording.chapter > 1
        run.notices = [short(notice, 400) for notice in self.info.notices]
        if self.subscriber is not None:
            run.notices.append(short(self.subscriber.line, 400))
        return run

    def _state(self) -> tuple[str, str]:
        here = sum(state not in ("connecting", "lost") for state in self._states)
        ranks = len(self._states)
        text = f"{here} of {ranks} ranks here" if ranks > 1 else "connected" if here else "not connected"
        return text, "on" if here == ranks else "error" if not here else "off"


def until_told(source: FleetSource, steps: int | None) -> None:
    """Waits for what an export shows: so many frames, or silence. ValueError: nothing has come."""
    heard, known = time.monotonic(), -1
    try:
        while not source.error and (steps is None or len(source.run_now.trace) < steps):
            if len(source.run_now.trace) != known:
                known, heard = len(source.run_now.trace), time.monotonic()
            if time.monotonic() - heard > SILENCE:
                break
            time.sleep(PACE / 2)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    if not any(row["batches"] for row in source.run_now.trace.state()["tree"]["ranks"]):
        raise ValueError(f"nothing came from {source.info.endpoints[0]}, so there is nothing to export")
