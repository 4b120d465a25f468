"""Requests of APIs by their own keys: OpenAI chat, completions, Responses, Anthropic messages; and traces.

    {"messages", "tools", ...}      also inside "body" or "params" (batches) or "request" (beside "response")
    {"input", "instructions", ...}  Responses; "previous_response_id" is looked up among the answers so far
    {"system", "messages", ...}     Anthropic: its prompts are tools, system, messages
    {"conversations": [...]}        ShareGPT: each turn that has a reply is one request
    {"hash_ids": [...]}             Mooncake: blocks of 512 tokens, no texts

Does not read files and does not guess: what is malformed is a ValueError that says what.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from minirad.errors import said
from minirad.logs import fields
from minirad.logs.records import Record
from minirad.logs.request import OPENING, LoggedRequest, Part
from minirad.logs.writing import (
    CLOSE,
    OPEN,
    Odd,
    content,
    definitions,
    digested,
    dumps,
    known_only,
    message,
    names,
    opening,
    raw,
)
from minirad.text import valid_text

BLOCK_TOKENS = 512  # of one Mooncake hash id
MOST_REMEMBERED = 1 << 27  # characters of answers that a later request may go on from
WRAPPERS = ("request", "body", "params")
IDS = ("prompt_token_ids", "input_ids")  # prompts as engines log them
BODY = ("messages", "prompt", *IDS, "input")
# By kind, and whether the fields of a log's line stand beside those of the request.
_KNOWN_FIELDS = {
    (kind, bare): known | (fields.OUTER if bare else frozenset())
    for kind, known in (
        ("chat", fields.CHAT), ("anthropic", fields.ANTHROPIC), ("completions", fields.COMPLETIONS),
        ("responses", fields.RESPONSES),
    )
    for bare in (False, True)
}  # fmt: skip
UNANSWERED = "a conversation, or the end of one, has no reply and is no request"
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}


def unwrapped(record: dict[str, Any]) -> dict[str, Any]:
    """The request itself, out of "request" (a log with the reply beside it) and "body" (a batch file)."""
    for name in WRAPPERS:
        if name in record and not any(key in record for key in BODY):
            record = fields.unpacked(record[name], name)
            if not isinstance(record, dict):
                raise ValueError(f"{name} must be an object, not {type(record).__name__}")
    return record


def is_batch_output(record: dict[str, Any]) -> bool:
    """A line of a batch's output file: a reply, and no prompt."""
    answered = "response" in record or "result" in record
    return "custom_id" in record and answered and not any(key in record for key in (*WRAPPERS, *BODY))


def kind_of(body: dict[str, Any], record: dict[str, Any] | None = None) -> str:
    """One of "chat", "anthropic", "responses", "completions". ValueError if it is none of them."""
    url = (record or {}).get("url")
    if isinstance(url, str) and "embeddings" in url:
        raise ValueError(f"no prompt that is generated from: {said(url)}")
    if "messages" in body:
        return "anthropic" if _is_anthropic(body) else "chat"
    if any(name in body for name in ("prompt", *IDS)):
        return "completions"
    if "input" in body:
        return "responses"
    found = ", ".join(map(said, list(body)[:20])) or "nothing"
    raise ValueError(f"neither messages, prompt nor input (there is {found})")


def _is_anthropic(body: dict[str, Any]) -> bool:
    if "system" in body or "anthropic_version" in body:
        return True
    model = body.get("model")
    if isinstance(model, str) and "claude" in model.lower():
        return True
    tools, messages = body.get("tools"), body["messages"]
    if isinstance(tools, list) and any(isinstance(each, dict) and "input_schema" in each for each in tools):
        return True
    contents = (
        [each.get("content") for each in messages if isinstance(each, dict)]
        if isinstance(messages, list)
        else []
    )
    blocks = [b for each in contents if isinstance(each, list) for b in each if isinstance(b, dict)]
    return any(
        block.get("type") in ("tool_use", "tool_result") or "cache_control" in block for block in blocks
    )


class Apis:
    """Turns records into requests. replies: by custom_id, from a batch's output file. notes: gets what a
    file cannot say, and how often."""

    def __init__(
        self,
        file: str,
        forced: str | None = None,
        replies: dict[str, Any] | None = None,
        notes: dict[str, int] | None = None,
    ) -> None:
        self._file, self._forced, self._replies = file, forced, replies or {}
        self._notes = {} if notes is None else notes
        self._answers = _Answers()
        self._blocks: dict[int, int] = {}

    def requests(self, record: Record, odd: Odd) -> Iterator[LoggedRequest]:
        """The requests of one record; ValueError for what is malformed. odd: names are added to it."""
        value = record.value
        if not isinstance(value, dict):
            raise ValueError(f"an object was expected, not {type(value).__name__}")
        if self._forced == "mooncake":
            yield self._mooncake(value, record, odd)
        elif self._forced == "sharegpt":
            yield from self._sharegpt(value, record, odd)
        else:
            yield from self._api(value, record, odd)

    def _api(self, outer: dict[str, Any], record: Record, odd: Odd) -> Iterator[LoggedRequest]:
        if is_batch_output(outer):
            raise ValueError(
                "a line of a batch's output: it holds a reply and no prompt (read the input file)"
            )
        body = unwrapped(outer)
        kind = kind_of(body, outer) if self._forced is None else self._forced
        if body is not outer:
            known_only(outer, fields.OUTER, "", odd)
        response = fields.response_of(outer)
        if response is None and isinstance(outer.get("custom_id"), str):
            response = self._replies.get(outer["custom_id"])
        common = {
            "file": self._file, "line": record.line, "where": record.where, "kind": kind,
            "time": fields.time_of(outer, body), "session": fields.session_of(outer, body),
            "namespace": fields.namespace_of(body, outer), "usage": fields.usage_of(response),
            "id": fields.name_of(outer.get("custom_id", outer.get("id")), "id"),
        }  # fmt: skip
        prompts = getattr(self, f"_{kind}")(body, outer, odd, response, common)
        for request in prompts:
            yield replace(request, not_understood=tuple(odd))

    # ------------------------------------------------------------------ the kinds

    def _chat(self, body: Any, outer: Any, odd: Odd, response: Any, common: Any) -> list[LoggedRequest]:
        known_only(body, _KNOWN_FIELDS["chat", body is outer], "body.", odd)
        parts = [definitions(name, body[name]) for name in ("tools", "functions") if body.get(name)]
        wanted = body.get("response_format")
        if wanted and wanted != {"type": "text"}:
            parts.append(definitions("response_format", wanted))
        parts += [
            chat_message(each, number, odd)
            for number, each in enumerate(_messages(body["messages"]), start=1)
        ]
        return [self._asked([*parts, opening()], body, response, odd, common)]

    def _anthropic(self, body: Any, outer: Any, odd: Odd, response: Any, common: Any) -> list[LoggedRequest]:
        known_only(body, _KNOWN_FIELDS["anthropic", body is outer], "body.", odd)
        parts = [definitions("tools", body["tools"])] if body.get("tools") else []
        if body.get("system"):
            parts.append(message("system", "system", *content(body["system"], "system", odd)))
        config = body.get("output_config")
        wanted = body.get("output_format") or (config.get("format") if isinstance(config, dict) else None)
        if wanted:
            parts.append(definitions("response_format", wanted))
        messages = _messages(body.get("messages"))
        for number, each in enumerate(messages, start=1):
            role, what = _role(each, number), f"message {number}"
            known_only(each, fields.ANTHROPIC_MESSAGE, "messages[].", odd)
            if each.get("content") is None:
                raise ValueError(f"message {number} has no content: {said(each)}")
            text, marked = content(each["content"], what, odd)
            if role == "assistant" and number == len(messages):
                parts.append(opening(text))  # a reply that the client has begun
            else:
                parts.append(message(f"{what} ({role})", role, text, marked))
        if parts[-1].name != OPENING:
            parts.append(opening())
        return [self._asked(parts, body, response, odd, common)]

    def _completions(
        self, body: Any, outer: Any, odd: Odd, response: Any, common: Any
    ) -> list[LoggedRequest]:
        known_only(body, _KNOWN_FIELDS["completions", body is outer], "body.", odd)
        prompt = next((body[name] for name in IDS if body.get(name)), body.get("prompt"))
        many = prompt if isinstance(prompt, list) and not all(map(fields.is_id, prompt)) else [prompt]
        if many and many is prompt and fields.is_id(many[0]):  # it was meant as one prompt
            wrong = next(each for each in many if not fields.is_id(each))
            raise ValueError(
                f"prompt must be a text, token ids or a list of such: {said(wrong)} is no token id"
            )
        found = [self._asked([_prompt(each)], body, response, odd, common) for each in many]
        if len(found) > 1:  # which of the choices answers which prompt is not said
            found = [replace(each, reply=None, usage=None) for each in found]
        return found

    def _responses(self, body: Any, outer: Any, odd: Odd, response: Any, common: Any) -> list[LoggedRequest]:
        known_only(body, _KNOWN_FIELDS["responses", body is outer], "body.", odd)
        parts = [definitions("tools", body["tools"])] if body.get("tools") else []
        text = body.get("text")
        wanted = text.get("format") if isinstance(text, dict) else None
        if wanted and wanted != {"type": "text"}:
            parts.append(definitions("response_format", wanted))
        if body.get("instructions"):
            parts.append(
                message("instructions", "system", content(body["instructions"], "instructions", odd)[0])
            )
        before, missing = self._answers.before(body.get("previous_response_id"))
        if missing:
            odd.append("previous_response_id (not in this log)")
        items = body.get("input")
        if not isinstance(items, (str, list)) or not items:
            raise ValueError(f"input must be a text or a list of items, not {said(items)}")
        said_now = item_parts(
            [{"role": "user", "content": items}] if isinstance(items, str) else items, len(before), odd
        )
        history = (*before, *said_now)
        request = self._asked([*parts, *history, opening()], body, response, odd, common)
        output = response.get("output") if isinstance(response, dict) else None
        if isinstance(output, list):
            answer = item_parts(output, len(history), odd)
            reply = replied(answer)
            request = replace(request, reply=reply, id=request.id or fields.name_of(response.get("id"), "id"))
            self._answers.remember(response.get("id"), (*history, *answer))
        conversation = body.get("conversation")
        session = request.session or fields.name_of(
            conversation.get("id") if isinstance(conversation, dict) else conversation, "conversation"
        )
        return [
            replace(request, incomplete=missing, session=session or self._answers.session(body, response))
        ]

    def _asked(
        self, parts: list[Part], body: dict[str, Any], response: Any, odd: Odd, common: dict[str, Any]
    ) -> LoggedRequest:
        reply = fields.reply_of(response, odd)
        if reply is not None:
            valid_text(reply, "the reply")
        length = fields.most_tokens(body, "max_completion_tokens", "max_tokens", "max_output_tokens")
        return LoggedRequest(parts=tuple(parts), reply=reply, reply_tokens=length, **common)

    # ------------------------------------------------------------------ traces

    def _sharegpt(self, value: dict[str, Any], record: Record, odd: Odd) -> Iterator[LoggedRequest]:
        known_only(value, fields.CONVERSATION, "", odd)
        turns = value.get("conversations", value.get("conversation"))
        if not isinstance(turns, list):
            raise ValueError(f"conversations must be a list, not {said(turns)}")
        parts = [definitions("tools", value["tools"])] if value.get("tools") else []
        if isinstance(value.get("system"), str) and value["system"]:
            parts.append(message("system", "system", value["system"]))
        first, waiting = len(parts), True
        for number, turn in enumerate(turns, start=1):
            role, text = _turn(turn, number)
            known_only(turn, fields.TURN, "conversations[].", odd)
            said_now = message(f"message {number} ({role})", role, text)
            waiting = role != "assistant" or len(parts) == first
            if role == "assistant" and len(parts) > first:
                yield LoggedRequest(
                    self._file, record.line, record.where, "sharegpt", (*parts, opening()), text,
                    None, record.where, fields.namespace_of(value), fields.name_of(value.get("id"), "id"),
                    tuple(odd),
                )  # fmt: skip
            parts.append(said_now)
        if waiting:
            self._notes[UNANSWERED] = self._notes.get(UNANSWERED, 0) + 1

    def _mooncake(self, value: dict[str, Any], record: Record, odd: Odd) -> LoggedRequest:
        known_only(value, fields.MOONCAKE, "", odd)
        time = value.get("timestamp")
        if not fields.is_number(time):
            raise ValueError(f"timestamp must be a number of milliseconds, 0 or more, not {said(time)}")
        tokens, reply = fields.whole(value, "input_length", 1), fields.whole(value, "output_length", 0)
        ids = value.get("hash_ids")
        if not isinstance(ids, list):
            raise ValueError(f"hash_ids must be a list, not {said(ids)}")
        blocks = -(-tokens // BLOCK_TOKENS)
        if len(ids) != blocks:  # before each of them is looked at: a hostile line may have 100 million
            raise ValueError(
                f"input_length {tokens} is {blocks} blocks of {BLOCK_TOKENS}, "
                f"but there are {len(ids)} hash_ids"
            )
        for each in ids:
            if isinstance(each, bool) or not isinstance(each, int) or each < 0:
                raise ValueError(f"hash_ids must be whole numbers, 0 or more, not {said(each)}")
        # Ids wider than a key unit are numbered anew; equal ones stay equal.
        units = tuple(self._blocks.setdefault(each, len(self._blocks)) for each in ids)
        return LoggedRequest(
            self._file, record.line, record.where, "mooncake", time=float(time),
            session=fields.name_of(value.get("session_id"), "session_id"), not_understood=tuple(odd),
            reply_tokens=reply, blocks=units, tokens=tokens,
        )  # fmt: skip


# ---------------------------------------------------------------------- messages, turns and items


def _messages(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages must be a list with at least one, not {said(value)}")
    return value


def _role(value: Any, number: int) -> str:
    role = value.get("role") if isinstance(value, dict) else None
    if not isinstance(role, str):
        raise ValueError(f"message {number} has no role: {said(value)}")
    return role


def chat_message(value: Any, number: int, odd: Odd) -> Part:
    """A message of a chat; calls of tools follow what is said."""
    role, what = _role(value, number), f"message {number}"
    known_only(value, fields.MESSAGE, "messages[].", odd)
    calls = value.get("tool_calls") or value.get("function_call")
    told = value["refusal"] if value.get("content") is None and value.get("refusal") else value.get("content")
    if told is None and not calls:
        raise ValueError(f"message {number} has no content: {said(value)}")
    text, marked = content(told, what, odd)
    if calls:
        text += ("\n" if text and not text.endswith("\n") else "") + dumps(calls)
    speaker = value.get("name")
    spoken_by = f"{role} {speaker}" if isinstance(speaker, str) and role != "tool" else role
    return message(f"{what} ({role})", spoken_by, text, marked)


def _turn(turn: Any, number: int) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise ValueError(f"turn {number} must be an object, not {type(turn).__name__}")
    speaker, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(speaker, str) or not isinstance(value, str):
        raise ValueError(f'turn {number} needs the texts "from" and "value": {said(turn)}')
    return ROLES.get(speaker, speaker), value


def _prompt(value: Any) -> Part:
    if isinstance(value, str):
        found = raw(value)
    elif isinstance(value, list) and all(map(fields.is_id, value)):
        found = Part("prompt", ids=tuple(value))
    else:
        raise ValueError(f"prompt must be a text, token ids or a list of such, not {said(value)}")
    if not value:
        raise ValueError("the prompt is empty")
    return found


def spoken(part: Part) -> str:
    """What a message part says, without its markers."""
    return part.text.removeprefix(OPEN).partition("\n")[2].removesuffix(CLOSE)


def replied(parts: Iterable[Part]) -> str:
    """A reply of several items as the next prompt spells it: each of them is a message there."""
    return f"{CLOSE}{OPEN}assistant\n".join(map(spoken, parts))


_CALLS = {"function_call": "arguments", "custom_tool_call": "input", "local_shell_call": "action",
          "web_search_call": "action", "tool_search_call": "arguments", "file_search_call": "queries",
          "mcp_call": "arguments", "code_interpreter_call": "code", "computer_call": "action",
          "image_generation_call": "revised_prompt"}  # fmt: skip
_OUTPUTS = names(
    "function_call_output custom_tool_call_output local_shell_call_output tool_search_output "
    "computer_call_output"
)
_KNOWN = {*_CALLS, *_OUTPUTS, "message", "reasoning"}


def kind_of_item(item: Any, number: int) -> str:
    """An item's type; ValueError for what is none."""
    if not isinstance(item, dict):
        raise ValueError(f"item {number} must be an object, not {type(item).__name__}")
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise ValueError(f"item {number} has no type: {said(item)}")
    return kind


def by_model(item: dict[str, Any]) -> bool:
    """Whether an item was generated (it is part of a reply), not given."""
    kind = kind_of_item(item, 1)
    return kind in _CALLS or kind == "reasoning" or (kind == "message" and item.get("role") == "assistant")


def item_parts(items: list[Any], before: int, odd: Odd) -> tuple[Part, ...]:
    """Items of the Responses API as parts, numbered from `before` + 1."""
    found: list[Part] = []
    for each in items:
        part = item_part(each, before + len(found) + 1, odd)
        if part is not None:
            found.append(part)
    return tuple(found)


def item_part(item: Any, number: int, odd: Odd) -> Part | None:
    """One item as a part: a message, a call, a call's output, reasoning; None for one that says nothing."""
    kind, what = kind_of_item(item, number), f"message {number}"
    if kind in _KNOWN:
        known_only(item, fields.ITEM, "item.", odd)
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise ValueError(f"item {number} has no role: {said(item)}")
        return message(f"{what} ({role})", role, *content(item.get("content"), what, odd))
    if kind in _CALLS:
        names = ("type", "name", "namespace", _CALLS[kind])
        call = {name: item[name] for name in names if item.get(name) is not None}
        return message(f"{what} (assistant)", "assistant", dumps(call))
    if kind in _OUTPUTS:
        output = item.get("output", item.get("tools"))
        if isinstance(output, dict):  # older sessions: {"content", "success"}
            output = output.get("content", output.get("content_items", output))
        return message(f"{what} (tool)", "tool", content(output, what, odd)[0])
    if kind == "reasoning":
        return _reasoning(item, what, odd)
    odd.append(f"item {kind!r}"[:80])
    return message(f"{what} ({kind[:40]})", "user", dumps(digested(item)))


def _reasoning(item: dict[str, Any], what: str, odd: Odd) -> Part | None:
    if item.get("encrypted_content"):
        odd.append("encrypted reasoning (its tokens are not known)")
    text = "".join(content(item.get(name), what, odd)[0] for name in ("summary", "content"))
    thought = f"<thinking>\n{text}\n</thinking>\n"
    return message(f"{what} (assistant, reasoning)", "assistant", thought) if text else None


class _Answers:
    """What was said up to each answer, by its id, the last used ones within MOST_REMEMBERED characters."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, tuple[Part, ...]] = OrderedDict()
        self._own: dict[str, int] = {}
        self._sessions: dict[str, str] = {}
        self._size = 0

    def before(self, name: Any) -> tuple[tuple[Part, ...], str]:
        """The conversation that a request goes on from, and a sentence if it is not there."""
        if name is None:
            return (), ""
        if isinstance(name, str) and name in self._said:
            self._said.move_to_end(name)
            return self._said[name], ""
        return (), f"it goes on from {said(name)}, which is not in this log: what was said before is missing"

    def session(self, body: dict[str, Any], response: Any) -> str | None:
        """The first answer of a chain of answers names their conversation."""
        before, name = (
            body.get("previous_response_id"),
            response.get("id") if isinstance(response, dict) else None,
        )
        first = self._sessions.get(before, before) if isinstance(before, str) else name
        if not isinstance(first, str):
            return None
        if isinstance(name, str) and name in self._said:
            self._sessions[name] = first
        return valid_text(first, "id")

    def remember(self, name: Any, parts: tuple[Part, ...]) -> None:
        """Texts that several answers share are counted for each of them: the bound is kept."""
        if not isinstance(name, str) or name in self._said:
            return
        size = len(name) + sum(64 + len(part.text) for part in parts)
        self._said[name], self._own[name] = parts, size
        self._size += size
        while self._size > MOST_REMEMBERED and len(self._said) > 1:
            old, _ = self._said.popitem(last=False)
            self._size -= self._own.pop(old)
            self._sessions.pop(old, None)
