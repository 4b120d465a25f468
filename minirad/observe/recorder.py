"""The recorder: takes an engine's events as they come, in memory and (if asked) into a file.

Does not draw anything and does not need a model: viz/ does the one, and neither needs the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from minirad.errors import path as a_path
from minirad.errors import said, whole
from minirad.observe.bus import EventBus
from minirad.observe.event import Event
from minirad.observe.reading import SCHEMA
from minirad.observe.recording import Recording, encoded, header_line
from minirad.observe.replay import Frame, sharing
from minirad.observe.silent import derive_events
from minirad.observe.snapshot import State, bare_snapshot, nodes_by_id


class _Lines:
    """The file of a recorder: a header and whole lines at any moment, however writing them ends."""

    def __init__(self, path: Path, header: str) -> None:
        self._path, self._file = path, path.open("wb", buffering=0)
        self._whole = 0  # bytes of whole lines
        self._owed: deque[Frame] = deque()
        self._torn = False  # part of a line may lie behind the whole ones
        try:
            self._write(header)
        except BaseException:
            self._file.close()
            raise

    def add(self, frame: Frame) -> None:
        """Writes a frame, and before it those that could not be written when it was their turn."""
        self._owed.append(frame)
        self.write_owed()

    def write_owed(self) -> None:
        """OSError if the file still cannot be written; nothing is lost by that."""
        while self._owed:
            self._write(self._owed[0].to_json() + "\n")
            self._owed.popleft()

    def _write(self, line: str) -> None:
        if self._torn:
            self._file.seek(self._whole)
            self._file.truncate()
        data = encoded(line)
        self._torn = True
        done = 0
        try:
            while done < len(data):
                done += self._file.write(data[done:])
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._whole += len(data)
        self._torn = False

    def close(self) -> None:
        if self._torn:
            with contextlib.suppress(OSError):
                self._file.truncate(self._whole)
        self._file.close()


class Recorder(Recording):
    """Records an engine, or a cache on its own, while it is open.

        with Recorder(engine) as recording:
            engine.generate(...)
        recording.save("run.jsonl")

    path: written to as it goes (a crash loses at most the step in progress). A frame that cannot be written
    (a full disk) is raised as OSError, and written before the next one: the file has no holes.
    tell: called with that error, once, instead: the file ends there, and recording in memory goes on.
    A cache on its own has no steps: `cut()` ends a frame. A tree that emits no events (a student's)
    is compared with what it was at each step's end, and gets a keyframe every time.
    notes: anything else worth knowing, as JSON, kept in header["notes"]. It may still change while the
    recorder is open (names of requests that come later): the file's header is brought up to date at its end.
    """

    def __init__(
        self, source: Any, path: str | Path | None = None, *, keyframe_every: int = 100,
        notes: dict[str, Any] | None = None, tell: Callable[[OSError], Any] | None = None,
    ) -> None:  # fmt: skip
        whole("keyframe_every", keyframe_every, 1)
        path = None if path is None else a_path("path", path)
        runs = callable(getattr(source, "step", None))
        if isinstance(source, type) or not (runs or hasattr(source, "walk")):
            raise ValueError(f"an engine or a tree can be recorded, not {said(source)}")
        if notes is not None and not isinstance(notes, dict):
            raise ValueError(f"notes must be a dict that JSON can hold, or None, got {said(notes)}")
        self._engine = source if runs else None
        self._cache = source.cache if self._engine is not None else source
        bus = getattr(source, "bus", None)
        self._bus: EventBus = bus if bus is not None else EventBus()
        self._silent = getattr(self._cache, "bus", None) is not self._bus
        self._every = 1 if self._silent else keyframe_every
        super().__init__(self._describe_source())
        if notes is not None:
            self.header["notes"] = notes
        self._events: list[Event] = []
        self._step = int(self.header["start"]["step"])
        self._last_keyframe: State = self.header["start"]
        self._scene: str | None = None
        self._before = nodes_by_id(self._cache) if self._silent else {}
        self._path, self._first_line, self._tell = path, header_line(self.header), tell
        self._file = None if path is None else _Lines(Path(path), self._first_line)
        self._unsubscribe = self._bus.subscribe(None, self._take)

    def scene(self, title: str) -> None:
        """The next frame begins a new scene: a run of frames that is shown as one."""
        if not isinstance(title, str):
            raise ValueError(f"a scene's title is a text, got {said(title)}")
        self.cut()
        self._scene = title

    def cut(self) -> None:
        """Ends the frame in progress, if anything has happened in it."""
        self._derive()
        if self._events:
            self._end_frame()

    def close(self) -> None:
        """Stops recording; what happened since the last step becomes a last frame."""
        self._unsubscribe()
        try:
            self.cut()
            if self._file is not None:
                self._or_tell(self._file.write_owed)
        finally:
            file, self._file = self._file, None
            if file is not None:
                file.close()
                self._or_tell(self._renew_header)

    def _or_tell(self, write: Callable[[], None]) -> None:
        """Where it fails, the file ends and its owner is told; or OSError."""
        try:
            write()
        except OSError as error:
            if self._tell is None:
                raise
            file, self._file = self._file, None
            if file is not None:
                file.close()
            self._tell(error)

    def _renew_header(self) -> None:
        """Exchanges the file's first line if the notes have changed; the file is whole at any moment."""
        line = header_line(self.header)
        if self._path is None or line == self._first_line:
            return
        old, new = Path(self._path), Path(f"{self._path}.new")
        try:
            with old.open("rb") as source, new.open("wb") as target:
                source.readline()
                target.write(encoded(line))
                shutil.copyfileobj(source, target)
            new.replace(old)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self, event: Event) -> None:
        self._events.append(event)
        if event.ends_frame:
            self._step = getattr(event, "step", self._step)
            self._derive()
            self._end_frame()

    def _derive(self) -> None:
        if self._silent:
            after = nodes_by_id(self._cache)
            ends_step = bool(self._events) and self._events[-1].ends_frame
            place = len(self._events) - ends_step
            self._events[place:place] = derive_events(self._before, after)
            self._before = after

    def _end_frame(self) -> None:
        keyframe = None
        if (len(self.frames) + 1) % self._every == 0:
            keyframe = self._snapshot()
            if not self._silent:
                keyframe = self._last_keyframe = sharing(keyframe, self._last_keyframe)
        frame = Frame(len(self.frames), self._step, tuple(self._events), keyframe, self._scene)
        self._events, self._scene = [], None
        self.frames.append(frame)
        if self._file is not None:
            self._or_tell(partial(self._file.add, frame))

    def _snapshot(self) -> State:
        source = self._engine
        return source.snapshot() if source is not None else bare_snapshot(self._cache)

    def _describe_source(self) -> State:
        header: State = {"minirad": SCHEMA, "config": {}, "model": {}}
        engine = self._engine
        if engine is not None:
            config = dataclasses.asdict(engine.config)
            for name in ("model", "disk_dir", "draft_model"):
                config[name] = None if config[name] is None else str(config[name])
            config["lora"] = [name for name, _ in config["lora"]]
            header["config"] = config
            known = engine.model_path is not None
            source = (str(engine.model_path) if config["model"] is not None else None) if known else ""
            header["model"] = {
                "parameters": getattr(engine.model, "whole", engine.model.config).num_parameters,
                # None: the classroom Llama's, which comes with the package; "": there is none to name
                "tokenizer": source,
            }
        header["start"] = self._snapshot()
        return header
