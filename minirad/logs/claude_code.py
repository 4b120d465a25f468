"""Session files of Claude Code: each reply in them is a request, and its prompt what the model saw by then.

Lines form a tree by `parentUuid`, and the file only grows: what a reply saw are its ancestors. Several lines
with one `message.id` are one reply, a block each; results of tools that were called side by side hang off
different lines of it, and all of them were seen. A compact_boundary begins a new root (what it kept is named
by its preservedSegment); a microcompact_boundary empties old results. Subagents (isSidechain) are sessions
of their own.

The file holds no system prompt and no tools: prompts are shorter than what was sent (`usage` says by how
much), and alike in what is missing only if nothing there changed.

The shapes are those of files as versions 1.0 to 2.1 write them; nothing is documented by the vendor. What a
line has beside these is named.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from minirad.errors import said
from minirad.logs import fields
from minirad.logs.records import Record
from minirad.logs.request import LoggedRequest, Part
from minirad.logs.writing import Odd, Piece, dumps, join, known_only, mended, message, names, opening, pieces

MOST_KEPT = 1 << 28  # characters of a session's texts; the oldest go first, and who needs them is told
WAIT = 2000  # lines: a reply whose last block is so far behind is complete
MOST_WALKS = 64  # sessions in one file (subagents) that go on where they were
CLEARED = "[Old tool result content cleared]"
NO_SYSTEM = (
    "the system prompt and the tools are not in a session file of Claude Code: prompts begin after them"
)
UNANSWERED = "a message without a reply in the file: it is no request"

TYPES = names(
    "user assistant system summary progress attachment file-history-snapshot queue-operation "
    "last-prompt custom-title ai-title tag agent-name agent-color agent-setting mode permission-mode "
    "worktree-state pr-link attribution-snapshot speculation-accept content-replacement "
    "marble-origami-commit marble-origami-snapshot"
)
_NEVER_SENT = TYPES - names(
    "user assistant system attachment content-replacement marble-origami-commit marble-origami-snapshot"
)
_ENVELOPE = names(
    "type uuid parentUuid logicalParentUuid sessionId session_id agentId isSidechain message timestamp "
    "cwd version gitBranch userType isMeta isCompactSummary isVisibleInTranscriptOnly isVirtual "
    "isApiErrorMessage apiErrorStatus apiError error errorDetails requestId toolUseResult toolUseID "
    "parentToolUseID sourceToolUseID sourceToolAssistantUUID slug todos thinkingMetadata permissionMode "
    "promptId promptSource entrypoint teamName agentName forkedFrom origin imagePasteIds mcpMeta "
    "planContent attributionAgent attributionSkill attributionPlugin attributionMcpServer "
    "attributionMcpTool summarizeMetadata isReplay interruptedMessageId sourceTaskId effort"
)
_MESSAGE = names(
    "role content id type model stop_reason stop_sequence stop_details usage container "
    "context_management diagnostics"
)


@dataclass(slots=True, eq=False)
class _Node:
    """A line that others may hang off. pieces: its blocks as texts; None for what was never sent."""

    uuid: str
    parent: str | None
    line: int
    role: str
    label: str = ""
    pieces: list[Piece] | None = None
    reply: str = ""  # its message.id
    time: float | None = None
    lane: str = ""
    root: str = ""
    results: bool = False
    cleared: tuple[str, ...] = ()
    answered: bool = False
    part: tuple[int, int, frozenset[str], Part] | None = None  # as it was last: number, pieces, cleared ones


@dataclass(slots=True, eq=False)
class _Reply:
    """A reply whose lines may go on."""

    request: dict[str, Any]
    lane: str
    line: int
    pieces: list[Piece] = field(default_factory=list)
    odd: Odd = field(default_factory=list)
    complete: bool = False


@dataclass(slots=True)
class _Walk:
    """The last prompt of a session, to go on from: the lines up to its question, and what was written."""

    chain: list[_Node]
    parts: list[Part]
    done: set[_Node]  # lines that are written, those of replies and results of tools
    cleared: frozenset[str]


class ClaudeCode:
    """Turns the lines of one session file into requests."""

    def __init__(self, file: str, notes: dict[str, int]) -> None:
        self._file, self._notes = file, notes
        self._nodes: dict[str, _Node] = {}
        self._order: deque[tuple[str, int]] = deque()
        self._size = 0
        self._lines: dict[str, list[_Node]] = {}  # message.id -> the lines of that reply
        self._results: dict[str, list[_Node]] = {}  # uuid of a line -> results of the tools it called
        self._kept: dict[str, tuple[str, str]] = {}
        self._open: OrderedDict[str, _Reply] = OrderedDict()
        self._walks: OrderedDict[str, _Walk] = OrderedDict()  # by session
        self._unanswered = 0  # messages that are forgotten, and no reply saw

    def requests(self, record: Record, odd: Odd) -> Iterator[LoggedRequest]:
        """The requests that this line completes."""
        value = record.value
        if not isinstance(value, dict):
            raise ValueError(f"an object was expected, not {type(value).__name__}")
        kind = value.get("type")
        if not isinstance(kind, str):
            raise ValueError(f"a line of a session needs a type, not {said(kind)}")
        if kind in _NEVER_SENT and not (kind == "progress" and "uuid" in value):
            return
        if kind in ("user", "assistant") and "uuid" not in value:
            raise ValueError(f"a line of type {kind!r} needs a uuid")
        if "uuid" not in value:
            odd.append(f"line of type {kind!r}"[:80])
            return
        node = self._node(value, kind, record.line, odd)
        if node is not None:
            self._keep(node, value, odd)
        yield from self._complete(record.line)

    def finish(self) -> Iterator[LoggedRequest]:
        """What is left at the end of the file."""
        for reply in self._open.values():
            reply.complete = True
        yield from self._complete(0)
        self._unanswered += sum(map(_is_unanswered, self._nodes.values()))
        if self._unanswered:
            self._notes[UNANSWERED] = self._unanswered

    # ------------------------------------------------------------------ lines

    def _node(self, value: dict[str, Any], kind: str, line: int, odd: Odd) -> _Node | None:
        uuid, parent = value["uuid"], value.get("parentUuid")
        if not isinstance(uuid, str) or not (parent is None or isinstance(parent, str)):
            raise ValueError(f"uuid and parentUuid must be texts, not {said(uuid)} and {said(parent)}")
        if uuid in self._nodes:
            odd.append("a line whose uuid was there before (a copy)")
            return None
        node = _Node(uuid, parent, line, kind)
        if kind in ("user", "assistant"):
            known_only(value, _ENVELOPE, "line.", odd)
            self._read_message(node, value, odd)
        elif kind == "attachment":
            told = value.get("attachment")
            sort = told.get("type") if isinstance(told, dict) else None
            node.role, node.label = "user", f"attachment {sort}"[:60]
            node.pieces = [Piece(dumps(told), apart=True)]
            odd.append(f"attachment {sort!r} (written as JSON)"[:80])
        elif kind == "system":
            self._read_system(node, value, odd)
        elif kind != "progress":
            odd.append(f"line of type {kind!r}"[:80])
        if node.pieces is not None:
            node.pieces = [piece._replace(text=mended(piece.text, odd)) for piece in node.pieces]
        node.label = mended(node.label, odd)
        node.time = fields.stamp_of(value, odd)
        return node

    def _read_message(self, node: _Node, value: dict[str, Any], odd: Odd) -> None:
        told = value.get("message")
        if not isinstance(told, dict):
            raise ValueError(f"message must be an object, not {said(told)}")
        known_only(told, _MESSAGE, "message.", odd)
        synthetic = told.get("model") == "<synthetic>"
        if (value.get("isApiErrorMessage") is True and synthetic) or value.get("isVirtual") is True:
            return
        content = told.get("content")
        if content is None:
            raise ValueError(f"the message of role {node.role} has no content: {said(told)}")
        node.pieces = pieces(content, f"a {node.role}'s message", odd)
        node.results = node.role == "user" and any(piece.result for piece in node.pieces)
        node.label = "compaction summary" if value.get("isCompactSummary") is True else ""
        if node.role == "assistant":
            name = told.get("id") or value.get("requestId") or node.uuid
            node.reply = name if isinstance(name, str) and not synthetic else node.uuid

    def _read_system(self, node: _Node, value: dict[str, Any], odd: Odd) -> None:
        subtype, content = value.get("subtype"), value.get("content")
        if subtype == "local_command" and isinstance(content, str):
            node.role, node.label, node.pieces = "user", "local command", [Piece(content)]
        elif subtype == "compact_boundary":
            told = value.get("compactMetadata")
            kept = told.get("preservedSegment") if isinstance(told, dict) else None
            if isinstance(kept, dict):
                head, anchor, tail = (kept.get(each) for each in ("headUuid", "anchorUuid", "tailUuid"))
                if isinstance(head, str) and isinstance(anchor, str) and isinstance(tail, str):
                    self._kept[anchor] = (head, tail)
                else:
                    odd.append("preservedSegment without its three uuids")
            self._notes_once("the request that wrote a compaction's summary is not in the file")
        elif subtype == "microcompact_boundary":
            told = value.get("microcompactMetadata")
            ids = told.get("compactedToolIds") if isinstance(told, dict) else None
            node.cleared = (
                tuple(each for each in ids if isinstance(each, str)) if isinstance(ids, list) else ()
            )

    def _notes_once(self, note: str) -> None:
        self._notes[note] = self._notes.get(note, 0) + 1

    def _keep(self, node: _Node, value: dict[str, Any], odd: Odd) -> None:
        parent = self._nodes.get(node.parent or "")
        node.root = parent.root if parent else node.uuid
        node.lane = _lane(value, node.root)
        if node.role == "assistant" and node.pieces is not None:
            self._replied(node, value, odd)
        elif node.results and node.parent:
            self._results.setdefault(node.parent, []).append(node)
            self._is_late(parent)
        self._nodes[node.uuid] = node
        size = 200 + sum(len(piece.text) for piece in node.pieces or ())
        self._order.append((node.uuid, size))
        self._size += size
        while self._size > MOST_KEPT and len(self._order) > 1:
            self._forget()

    def _forget(self) -> None:
        uuid, size = self._order.popleft()
        self._size -= size
        old = self._nodes.pop(uuid)
        self._unanswered += _is_unanswered(old)
        self._lines.pop(old.reply, None)
        self._results.pop(uuid, None)
        self._walks.clear()

    def _is_late(self, node: _Node | None) -> None:
        """A line or a result joins what was written already: it is to be written anew."""
        for lane in [lane for lane, walk in self._walks.items() if node in walk.done]:
            del self._walks[lane]

    def _replied(self, node: _Node, value: dict[str, Any], odd: Odd) -> None:
        told = value["message"]
        synthetic = told.get("model") == "<synthetic>"
        if node.reply not in self._lines and not synthetic:
            request = self._request(node, told)
            for other in self._open.values():
                other.complete = other.complete or other.lane == node.lane
            self._open[node.reply] = _Reply(request, node.lane, node.line)
        lines = self._lines.setdefault(node.reply, [])
        if lines:
            self._is_late(lines[0])
        lines.append(node)
        reply = self._open.get(node.reply)
        if reply is not None:
            reply.line = node.line
            reply.pieces += node.pieces or []
            reply.odd += odd
        elif not synthetic:
            odd.append("a block of a reply that had ended")

    # ------------------------------------------------------------------ requests

    def _complete(self, line: int) -> Iterator[LoggedRequest]:
        while self._open:
            name, reply = next(iter(self._open.items()))
            if not reply.complete and line < reply.line + WAIT:
                return
            del self._open[name]
            yield LoggedRequest(reply=join(reply.pieces), not_understood=tuple(reply.odd), **reply.request)

    def _request(self, node: _Node, told: dict[str, Any]) -> dict[str, Any]:
        namespace, name = fields.namespace_of(told), fields.name_of(told.get("id"), "id")
        walk, incomplete = self._prompt(node)
        asked = walk.chain[-1].time if walk.chain else None
        self._notes_once(NO_SYSTEM)
        return {
            "file": self._file, "line": node.line, "where": f"line {node.line}", "kind": "claude-code",
            "parts": (*walk.parts, opening()), "time": asked if asked is not None else node.time,
            "session": node.lane, "namespace": namespace, "id": name, "incomplete": incomplete,
            "usage": fields.usage_of(told),
        }  # fmt: skip

    def _prompt(self, node: _Node) -> tuple[_Walk, str]:
        """What was said before a reply, and why there may have been more."""
        last = self._walks.pop(node.lane, None)
        found, above, why = self._ancestors(node.parent, last.chain[-1].uuid if last else None)
        walk = last if last and above else _Walk([], [], set(), frozenset())
        cleared = walk.cleared.union(call for each in found for call in each.cleared)
        walk.chain += found
        if cleared == walk.cleared:
            self._write(walk, found)
        else:
            walk = _Walk(walk.chain, [], set(), cleared)
            self._write(walk, walk.chain)
        for each in found:
            each.answered = True
        if walk.chain and not why:
            self._walks[node.lane] = walk
            if len(self._walks) > MOST_WALKS:
                self._walks.popitem(last=False)
        return walk, why

    def _ancestors(self, uuid: str | None, known: str | None) -> tuple[list[_Node], bool, str]:
        """The lines before, oldest first, back to the one called `known`; whether it was found among them;
        and why there may have been more."""
        found: list[_Node] = []
        seen: set[str] = set()
        at, inside, why = uuid, ("", ""), ""
        while at is not None and (at != known or inside[0]):
            node = self._nodes.get(at)
            if node is None or at in seen:
                missing = "is in no line before it" if node is None else "is its own ancestor"
                why = f"what came before is not known: {said(at)} {missing}"
                break
            seen.add(at)
            found.append(node)
            above = node.parent
            if at == inside[0]:  # the first of what a compaction kept: it follows the summary
                above, inside = inside[1], ("", "")
            elif above in self._kept and not inside[0]:
                head, tail = self._kept[above]
                above, inside = tail, (head, above)
            at = above
        found.reverse()
        return found, at is not None and not why, why

    def _write(self, walk: _Walk, chain: list[_Node]) -> None:
        """Writes lines that go on from what is written."""
        for node in chain:
            if node.pieces is None or node in walk.done:
                continue
            if not node.reply:
                self._write_one(walk, node, [node])
                continue
            lines = self._lines.get(node.reply, [node])
            walk.done.update(lines)
            self._write_one(walk, lines[0], lines)
            results = [each for line in lines for each in self._results.get(line.uuid, ())]
            for each in sorted(results, key=lambda each: each.line):
                if each not in walk.done:
                    walk.done.add(each)
                    self._write_one(walk, each, [each])

    def _write_one(self, walk: _Walk, node: _Node, lines: list[_Node]) -> None:
        walk.parts.append(_part(node, lines, len(walk.parts) + 1, walk.cleared))


def _is_unanswered(node: _Node) -> bool:
    """Whether it is a message that no reply saw."""
    return node.role == "user" and node.pieces is not None and not node.results and not node.answered


def _part(node: _Node, lines: list[_Node], number: int, cleared: frozenset[str]) -> Part:
    """A message; the very same object as long as nothing about it changes."""
    said_now: list[Piece] = [piece for line in lines for piece in line.pieces or ()]
    gone = frozenset(piece.result for piece in said_now if piece.result in cleared)
    if node.part is not None and node.part[:3] == (number, len(said_now), gone):
        return node.part[3]
    if gone:
        said_now = [
            piece._replace(text=f"<tool_result {piece.result}>\n{CLEARED}\n</tool_result>\n")
            if piece.result in cleared
            else piece
            for piece in said_now
        ]
    role = "assistant" if node.reply else "user"
    label = f"{role}, {node.label}" if node.label else role
    part = message(f"message {number} ({label})", role, join(said_now))
    node.part = (number, len(said_now), gone, part)
    return part


def _lane(value: dict[str, Any], root: str) -> str:
    """The session a line belongs to; a subagent's is its own."""
    session, agent = value.get("sessionId"), value.get("agentId")
    name = mended(session, []) if isinstance(session, str) else ""
    if isinstance(agent, str):
        return mended(f"{name}/{agent}", [])
    return mended(f"{name}/{root[:8]}", []) if value.get("isSidechain") is True else name
