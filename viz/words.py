"""One word for each event: what stands before its sentence on the page and in the notebook.

A word names one kind of event only: "touch" is a path that a match or an insert walked, "admit" a request
that got a row. `kind` is its colour class (style.css, stepper.css); `small` ones come in great numbers, and
the page shows them only when asked for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from minirad import events as ev


class Word(NamedTuple):
    tag: str
    kind: str = "plain"
    small: bool = False


WORDS: Mapping[type[ev.Event], Word] = {
    ev.RequestAdded: Word("queue"),
    ev.RequestAdmitted: Word("admit", "hit"),
    ev.RequestDeferred: Word("defer", "wait"),
    ev.RequestForked: Word("fork", "commit"),
    ev.Committed: Word("commit", "commit"),
    ev.TokenSampled: Word("sample", small=True),
    ev.RequestRetracted: Word("retract", "evict"),
    ev.RequestAborted: Word("abort", "evict"),
    ev.RequestFinished: Word("finish", "new"),
    ev.PrefixTouched: Word("touch", "hit", small=True),
    ev.NodeInserted: Word("insert", "new"),
    ev.NodeGrown: Word("grow", "grown"),
    ev.NodeSplit: Word("split", "split"),
    ev.NodeLocked: Word("lock", "lock", small=True),
    ev.NodeUnlocked: Word("unlock", "lock", small=True),
    ev.NodeEvicted: Word("evict", "evict"),
    ev.BackupStarted: Word("copy", "host"),
    ev.BackupEnded: Word("copied", "host", small=True),
    ev.NodeDemoted: Word("demote", "evict"),
    ev.LoadStarted: Word("load", "hit"),
    ev.LoadEnded: Word("loaded", "host", small=True),
    ev.NodeAdopted: Word("again", "new"),
    ev.HostEvicted: Word("h-evict", "evict"),
    ev.VersionBumped: Word("weights", "evict"),
    ev.PolicyChanged: Word("policy"),
    ev.CacheFlushed: Word("flush", "evict"),
    ev.SlotsAllocated: Word("alloc", small=True),
    ev.SlotsFreed: Word("free", small=True),
    ev.BatchScheduled: Word("batch"),
    ev.StepEnded: Word("step", small=True),
}
PASSED = Word("passed", "wait")  # no event tells of it: somebody behind a waiting request was admitted


def word_of(event: ev.Event) -> Word:
    return WORDS.get(type(event), Word(type(event).__name__, small=True))
