"""What a page shows: a workload on an engine (`Run`) or a recording (`Replay`). Two at once are compare.py's.

All answer the same questions, so that no caller asks for a type:

drivable: there are engines that can be stepped. idle: nothing is left to do by itself. clock: steps so far.
alone: the one run whose engine takes commands, or None. single_page: the page of one engine (of rank 0), or
None where two are compared. policy: the eviction policy that may be changed in the running engine, or "".
refused: what is said of refused requests, or of programs that failed, or "". served_none: every request was
refused. notices: what the page should tell. missing: what a recording has lost, or "".
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from minirad import workloads
from minirad.engine import Engine
from minirad.frontend.player import send_due
from minirad.observe.recorder import Recorder
from minirad.observe.recording import Recording
from minirad.observe.snapshot import is_fleet
from minirad.outputs import GenerationOutput
from minirad.schedule.request import TokenMask
from minirad.workloads import Workload
from viz.fork import changeable_policy
from viz.trace import Decode, Trace, decoder_of
from viz.web.page import Page
from viz.web.settings import Settings, beside

DISK_WAIT = 2.0  # seconds that a run waits for what is under way on the disk


class Run:
    """A workload on an engine, recorded. Not for several threads."""

    drivable, missing = True, ""

    def __init__(
        self, number: int, settings: Settings, workload: Workload | None, engine: Engine | None = None
    ) -> None:
        own = engine is None
        self.number, self.settings = number, settings
        self.workload = workload or settings.load_workload()
        self.engine = engine or _new_engine(settings, self.workload)
        self.player = workloads.Player(self.workload, self._encode, self.engine)
        notes = {"workload": self.workload.name, "title": self.workload.title, "labels": self.player.labels}
        self._disk_tree: Any = self.engine.cache if hasattr(self.engine.cache, "disk") else None
        if self._disk_tree is not None:
            disk = self._disk_tree.disk
            disk.flush(DISK_WAIT)  # by then the folder was looked at
            notes["disk"] = {"files": disk.files.files, "bytes": disk.files.nbytes}
        self.path = _numbered(settings.record, number)
        self.recorder = Recorder(
            self.engine, self.path, keyframe_every=50, notes=notes, tell=self._record_ends
        )
        self.clock = self.asked = 0
        code = getattr(self.engine, "yours", None)  # a learner's
        self.notices: list[str] = [] if code is None else [code.note(self.engine.config)]
        self.refusals: list[str] = []  # the reason of each
        self.masks: dict[str, TokenMask] = {}  # of requests, for a fork: no recording holds them
        self.trace = Trace(self.recorder, decoder_of(self.engine.tokenizer) if own else None)
        self.page = Page(self.trace, self.player.labels)
        self.note_idle()

    def _record_ends(self, error: OSError) -> None:
        said = f"The recording in a file ends here, the page goes on: {error}"
        self.notices.append(said)
        print(said, file=sys.stderr, flush=True)

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self.engine.encode(text)]

    @property
    def alone(self) -> Run:
        return self

    @property
    def single_page(self) -> Page:
        return self.page

    @property
    def policy(self) -> str:
        return changeable_policy(self.engine)

    def note_idle(self) -> None:
        """Notes, between two steps (within one the queues are in motion), whether all is done:
        nothing to compute now and nothing that will come by itself."""
        self.idle = self._is_over

    @property
    def _is_over(self) -> bool:
        return not self.engine.has_work and self.player.next_due is None

    def advance(self) -> None:
        """Sends what is due, then one engine step. An idle engine jumps to the next arrival."""
        engine, player = self.engine, self.player
        if not engine.has_work and player.next_due is not None:
            self.clock = max(self.clock, player.next_due)
        for asked, error in send_due(engine, player, self.clock):
            self.asked += 1
            if error is not None:
                self._note_refusal(asked.label, error)
        waiting = engine.scheduler.waiting
        self.masks.update({each.id: each.token_mask for each in waiting if each.token_mask is not None})
        self.clock += 1
        for output in self._step():
            player.finished(output, self.clock)
        if self._is_over:  # programs let go of their prefixes when they end: after the last step
            self.note_disk()
            self.recorder.cut()
            self.notices += [failure for failure in player.failures if failure not in self.notices]
            self._tell()
        self.note_idle()  # and only then: who sees it in another thread sees the last frame, too

    def note_disk(self) -> None:
        """No step follows that would tell what the disk has done since the last one."""
        if self._disk_tree is not None:
            self._disk_tree.disk.flush(DISK_WAIT)
            self._disk_tree.tell()

    def _step(self) -> list[GenerationOutput]:
        """One engine step; what finished."""
        return self.engine.step().finished

    def _note_refusal(self, label: str, error: ValueError) -> None:
        """No event tells of it: the engine never had this request. So the page and the file must."""
        self.notices.append(f"{label} was refused: {error}")
        self.refusals.append(str(error))
        self._tell()

    def _tell(self) -> None:
        if self.refused:
            self.page.refused = self.recorder.header["notes"]["refused"] = self.refused

    @property
    def refused(self) -> str:
        """How many requests were refused, or else programs failed, and the first reason; empty if none."""
        if self.refusals:
            return f"{len(self.refusals)} of {self.asked} requests refused: {self.refusals[0]}"
        failures = self.player.failures
        return f"programs that failed: {len(failures)}; {failures[0]}" if failures else ""

    @property
    def served_none(self) -> bool:
        return 0 < self.asked == len(self.refusals)

    def close(self, broken: bool = False) -> None:
        """Drops the run. What programs then abort is no part of what was recorded; a broken engine is
        asked for nothing more."""
        self.recorder.close()
        if not broken:
            self.player.close()
            if self._disk_tree is not None:  # what the tree holds is written: a run after this one finds it
                self._disk_tree.close()


class Replay:
    """A finished recording in the place of a Run: nothing can be driven."""

    drivable, served_none, policy, alone = False, False, "", None

    def __init__(
        self, recording: Recording, title: str, decode: Decode | None = None, tokenizer: str | None = None
    ) -> None:
        """decode, tokenizer: of a folder that is named beside the recording; None: as it says itself."""
        self.number, self.clock, self.idle = 1, 0, True
        self.recording, self.missing = recording, recording.missing
        notes = recording.header.get("notes")
        notes = notes if isinstance(notes, dict) else {}
        self.workload = Workload(title, str(notes.get("title", "")) or f"Recording {title}", ())
        self.trace = Trace(recording, decode)
        labels = notes.get("labels")
        labels = {str(k): str(v) for k, v in labels.items()} if isinstance(labels, dict) else {}
        self.page = self.single_page = _page_of(self.trace, labels)
        if tokenizer is not None:
            self.page.tokenizer = tokenizer
        self.page.refused = self.refused = str(notes.get("refused", ""))
        self.notices = [recording.missing] if recording.missing else []

    def advance(self) -> None:
        raise ValueError("this is a recording: there is no engine to drive")

    def close(self, broken: bool = False) -> None:
        """Nothing is open."""


def _page_of(trace: Trace, labels: dict[str, str]) -> Page:
    """A recording's page; that of a stream is another one."""
    if not is_fleet(trace.recording.header["start"]):
        return Page(trace, labels)
    from viz.web.fleet import FleetPage

    return FleetPage(trace, labels)


def _new_engine(settings: Settings, workload: Workload) -> Engine:
    config = settings.config(workload.kv_tokens)
    tree, code = settings.students_tree(), settings.students_code()
    if code is None:
        return Engine(config, tree)
    from lessons.grading.drafting import student_engine

    return student_engine(config, code, tree)


def _numbered(path: str | None, run: int) -> str | None:
    """A restarted run records beside the first one, and not over what an earlier command recorded."""
    if path is None or run == 1:
        return path
    return next(name for n in itertools.count(run) if not Path(name := str(beside(path, str(n)))).exists())
