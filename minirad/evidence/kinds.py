"""All kinds of programs by name, in the order of the paper's figure."""

from __future__ import annotations

from minirad.evidence import agents, chats, choices, documents, json_records, thoughts
from minirad.evidence.kind import Kind

__all__ = ["KINDS", "Kind"]

KINDS: dict[str, Kind] = {
    kind.name: kind
    for room in (choices, agents, thoughts, json_records, chats, documents)
    for kind in room.KINDS
}
"""What the paper measured its engine on; each runs on the classroom Llama in seconds, and on any Llama."""
