"""What lies on the disk tier at a moment, and what was read and written until then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from minirad.observe import disk_events as dv
from minirad.observe.event import Event
from minirad.observe.snapshot import State


@dataclass(frozen=True, slots=True)
class Disk:
    """Running totals, and the folder as it was last told of.

    files, bytes: of all blocks in the folder, whoever wrote them; None: nobody has told yet. read, written:
    tokens, in so many blocks and microseconds (of the steps' waiting, of the writer's work). late: readings
    that were not waited for; lost: blocks that were deleted, not written or not believed.
    """

    files: int | None = None
    bytes: int | None = None
    read: int = 0
    read_blocks: int = 0
    read_us: int = 0
    written: int = 0
    written_blocks: int = 0
    written_us: int = 0
    late: int = 0
    lost: int = 0

    @staticmethod
    def of(header: State) -> Disk | None:
        """At a recording's beginning; None for an engine without a disk tier."""
        if not dv.has_disk(header["start"]):
            return None
        notes = header.get("notes")
        told = notes.get("disk") if isinstance(notes, dict) else None
        known = [told.get(name) for name in ("files", "bytes")] if isinstance(told, dict) else [None, None]
        files, nbytes = (each if type(each) is int and each >= 0 else None for each in known)
        return Disk(files, nbytes)

    def after(self, events: Iterable[Event]) -> Disk:
        """The same, some events later."""
        disk = self
        for event in events:
            if isinstance(event, dv.BlocksRead):
                disk = replace(
                    disk, read=disk.read + len(event.host_slots), read_blocks=disk.read_blocks + event.blocks,
                    read_us=disk.read_us + event.microseconds,
                )  # fmt: skip
            elif isinstance(event, dv.BlocksLate):
                disk = replace(disk, late=disk.late + 1)
            elif isinstance(event, dv.BlocksWritten):
                disk = replace(
                    disk, files=event.files, bytes=event.folder_bytes, written=disk.written + event.tokens,
                    written_blocks=disk.written_blocks + event.blocks,
                    written_us=disk.written_us + event.microseconds,
                )  # fmt: skip
            elif isinstance(event, dv.BlocksDropped):
                disk = replace(
                    disk, files=event.files, bytes=event.folder_bytes, lost=disk.lost + event.blocks
                )
        return disk

    def since(self, before: Disk) -> dict[str, int]:
        """What came to the totals after `before`."""
        names = ("read", "read_blocks", "read_us", "written", "written_blocks", "written_us", "late", "lost")
        return {name: getattr(self, name) - getattr(before, name) for name in names}


def block_units(start: State) -> int:
    """Tokens of a file's block: whole pages, 64 at least (tiers/disk_names.py)."""
    page = int(start["tree"]["page_size"])
    return -(-64 // page) * page


def from_disk(events: Iterable[Event]) -> dict[str, int]:
    """Tokens that came from the disk, by the request that they came for."""
    found: dict[str, Any] = {}
    for event in events:
        if isinstance(event, dv.BlocksRead):
            found[event.request] = found.get(event.request, 0) + len(event.host_slots)
    return found
