"""Session files of Codex (rollout-*.jsonl): each run of items that the model made is a request.

Lines are {"timestamp", "type", "payload"}: session_meta (instructions), turn_context (the model),
response_item (messages, calls and their outputs, as the Responses API has them), event_msg (for the screen;
here only thread_rolled_back and token_count count) and compacted, whose replacement_history takes the place
of all that was said. Older files have the items bare, one a line.

The file holds no tools but those of session_meta's dynamic_tools, and reasoning only encrypted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from minirad.errors import said
from minirad.logs import fields
from minirad.logs.apis import by_model, item_part, replied, spoken
from minirad.logs.claude_code import UNANSWERED
from minirad.logs.records import Record
from minirad.logs.request import LoggedRequest, Part, Usage
from minirad.logs.writing import Odd, content, definitions, known_only, mended, message, names, opening

NO_TOOLS = "the tools are not in a session file of Codex: prompts begin after them"
SUMMARY = ", compaction summary"  # in the name of its message
REBUILT = "a compaction without its replacement_history: the history after it is made up as Codex makes it up"
MOST_REBUILT = 80_000  # characters of the last messages that such a compaction keeps, about 20,000 tokens

TYPES = names("session_meta response_item event_msg turn_context compacted")
_ITEMS = names(
    "message reasoning function_call function_call_output local_shell_call local_shell_call_output "
    "custom_tool_call custom_tool_call_output web_search_call tool_search_call tool_search_output "
    "image_generation_call ghost_snapshot compaction compaction_summary context_compaction"
)
_NEVER_SENT = frozenset(["ghost_snapshot", "compaction_trigger"])
# What Codex says in the user's name: no turn begins with it.
_CONTEXT = (
    "<environment_context>", "<user_instructions>", "# AGENTS.md instructions", "<INSTRUCTIONS>", "<skill>",
    "<turn_aborted>", "<user_shell_command>", "<subagent_notification>",
)  # fmt: skip
_LINE = names("timestamp type payload ordinal")


class _Item(NamedTuple):
    """One item of the history. turn: the user began a turn with it. plain: a user's message, as a text."""

    part: Part
    turn: bool
    plain: str | None


class Codex:
    """Turns the lines of one session file into requests."""

    def __init__(self, file: str, notes: dict[str, int]) -> None:
        self._file, self._notes = file, notes
        self._head: list[Part] = []  # tools and instructions
        self._format: list[Part] = []
        self._history: list[_Item] = []
        self._session: str | None = None
        self._model: tuple[tuple[str, str], ...] = ()
        self._incomplete = ""
        self._request: LoggedRequest | None = None
        self._reply: list[Part] = []
        self._odd: Odd = []
        self._replying = False
        self._asked: float | None = None

    def requests(self, record: Record, odd: Odd) -> Iterator[LoggedRequest]:
        """The requests that this line completes."""
        value = record.value
        if not isinstance(value, dict):
            raise ValueError(f"an object was expected, not {type(value).__name__}")
        if is_bare_head(value):
            self._meta(value, odd)
            return
        if "record_type" in value:  # of older files: nothing that was sent
            return
        kind = value.get("type")
        payload = value.get("payload", value if isinstance(kind, str) and kind in _ITEMS else None)
        kind = "response_item" if payload is value else kind
        if not isinstance(kind, str) or not isinstance(payload, dict):
            raise ValueError(f"a line of a session needs a type and a payload, not {said(value)}")
        if payload is not value:
            known_only(value, _LINE, "line.", odd)
        if kind == "response_item":
            yield from self._item(payload, fields.stamp_of(value, odd), record, odd)
        elif kind == "compacted":
            self._compacted(payload, odd)
        elif kind == "session_meta":
            self._meta(payload, odd)
        elif kind == "turn_context":
            self._turn(payload, odd)
        elif kind == "event_msg":
            self._event(payload, odd)
        else:
            odd.append(f"line of type {kind!r}"[:80])
        self._odd += odd

    def finish(self) -> Iterator[LoggedRequest]:
        """What is left at the end of the file."""
        yield from self._complete()
        if self._history and not self._replying:
            self._notes[UNANSWERED] = self._notes.get(UNANSWERED, 0) + 1

    # ------------------------------------------------------------------ lines

    def _meta(self, payload: dict[str, Any], odd: Odd) -> None:
        if self._session is not None:
            return  # a fork's file has its parent's lines behind its own
        name = payload.get("id", payload.get("session_id"))
        self._session = mended(name, odd) if isinstance(name, str) else ""
        told = payload.get("base_instructions", payload.get("instructions"))
        if isinstance(told, dict):
            told = told.get("text")
        tools = payload.get("dynamic_tools")
        self._head = [definitions("tools", tools)] if tools else []
        if told:
            text = mended(content(told, "instructions", odd)[0], odd)
            self._head.append(message("instructions", "system", text))
        self._notes[NO_TOOLS] = 1

    def _turn(self, payload: dict[str, Any], odd: Odd) -> None:
        self._model = fields.namespace_of({"model": payload.get("model")})
        wanted = payload.get("final_output_json_schema")
        self._format = [definitions("response_format", wanted)] if wanted else []

    def _event(self, payload: dict[str, Any], odd: Odd) -> None:
        kind = payload.get("type")
        if kind == "thread_rolled_back":
            turns = payload.get("num_turns")
            if not fields.is_id(turns):
                raise ValueError(f"num_turns must be a whole number, not {said(turns)}")
            starts = [at for at, item in enumerate(self._history) if item.turn]
            if turns and starts:
                del self._history[starts[-min(turns, len(starts))] :]
            self._replying = False
        elif kind == "token_count" and self._request is not None and self._request.usage is None:
            info = payload.get("info")
            last = info.get("last_token_usage") if isinstance(info, dict) else None
            if isinstance(last, dict) and fields.is_id(last.get("input_tokens")):
                cached = last.get("cached_input_tokens")
                usage = Usage(last["input_tokens"], cached if fields.is_id(cached) else None)
                self._request = replace(self._request, usage=usage)

    def _compacted(self, payload: dict[str, Any], odd: Odd) -> None:
        items, self._replying = payload.get("replacement_history"), False
        if isinstance(items, list):
            found: list[_Item] = []
            for each in items:
                if not _never_sent(each):
                    found += _read(each, len(found) + 1, odd)
            self._history, self._incomplete = _summed_up(found), ""
            return
        if items is not None:
            raise ValueError(f"replacement_history must be a list, not {said(items)}")
        summary = payload.get("message")
        if not isinstance(summary, str):
            raise ValueError(f"a compaction needs a message or a replacement_history, not {said(payload)}")
        self._rebuild(mended(summary, odd))
        self._notes[REBUILT] = self._notes.get(REBUILT, 0) + 1

    def _rebuild(self, summary: str) -> None:
        """As Codex does: what the session began with, the user's last messages, the summary."""
        first = next((at for at, item in enumerate(self._history) if item.turn), len(self._history))
        kept, room = [], MOST_REBUILT
        for item in reversed(self._history[first:]):
            if item.turn and item.plain is not None:
                room -= len(item.plain)
                if room < 0:
                    break
                kept.append(item.plain)
        begun = [(item.part, item.turn, item.plain) for item in self._history[:first]]
        self._history = [_Item(*each) for each in begun]
        for text in (*reversed(kept), summary):
            label = f"user{SUMMARY}" if text is summary else "user"
            part = message(f"message {len(self._history) + 1} ({label})", "user", text)
            self._history.append(_Item(part, text is not summary, text))
        self._incomplete = REBUILT

    # ------------------------------------------------------------------ items

    def _item(
        self, item: dict[str, Any], time: float | None, record: Record, odd: Odd
    ) -> Iterator[LoggedRequest]:
        if _never_sent(item):
            return
        entry = _read(item, len(self._history) + 1, odd)
        if not by_model(item):
            self._replying, self._asked = False, time
        elif not self._replying:
            yield from self._complete()
            self._replying = True
            asked = self._asked if self._asked is not None else time
            self._request = LoggedRequest(
                self._file, record.line, record.where, "codex",
                (*self._head, *self._format, *(each.part for each in self._history), opening()), None,
                asked, self._session, self._model, fields.name_of(item.get("id"), "id"),
                incomplete=self._incomplete,
            )  # fmt: skip
        if by_model(item):
            self._reply += [each.part for each in entry]
        self._history += entry

    def _complete(self) -> Iterator[LoggedRequest]:
        if self._request is not None:
            yield replace(self._request, reply=replied(self._reply), not_understood=tuple(self._odd))
        self._request, self._reply, self._odd = None, [], []


def is_bare_head(value: dict[str, Any]) -> bool:
    """The first line of an older file: a session_meta without a wrapper."""
    return {"id", "timestamp", "instructions"} <= set(value) and "type" not in value


def _summed_up(items: list[_Item]) -> list[_Item]:
    """What a compaction leaves ends with its summary, in the user's name (context may follow)."""
    for number in range(len(items) - 1, -1, -1):
        if items[number].turn:
            part = items[number].part
            named = replace(part, name=f"{part.name.removesuffix(')')}{SUMMARY})")
            return [*items[:number], items[number]._replace(part=named), *items[number + 1 :]]
    return items


def _never_sent(item: Any) -> bool:
    kind = item.get("type") if isinstance(item, dict) else None
    return isinstance(kind, str) and kind in _NEVER_SENT


def _read(item: Any, number: int, odd: Odd) -> list[_Item]:
    """An item of the history; none where it says nothing."""
    found = item_part(_mended(item, odd), number, odd)
    if found is None:
        return []
    role = item.get("role") if item.get("type", "message") == "message" else None
    plain = spoken(found) if role == "user" else None
    turn = plain is not None and not plain.lstrip().startswith(_CONTEXT)
    return [_Item(found, turn, plain)]


def _mended(value: Any, odd: Odd, depth: int = 0) -> Any:
    """An item whose texts are all valid."""
    if isinstance(value, str):
        return mended(value, odd)
    if depth > 200:
        raise ValueError("nested too deeply to be read")
    if isinstance(value, dict):
        return {mended(key, odd): _mended(each, odd, depth + 1) for key, each in value.items()}
    return [_mended(each, odd, depth + 1) for each in value] if isinstance(value, list) else value
