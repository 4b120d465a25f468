"""What stands around a prompt in a log: its time, session, namespace, reply and usage; and the fields known.

Every field of a request is in one of these sets, or it is named as not understood. Does not write prompts.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any, TypeGuard

from minirad.cache.node import MAX_TOKEN
from minirad.errors import said
from minirad.logs.request import Usage
from minirad.logs.writing import Odd, dumps, join, names, pieces
from minirad.text import valid_text

LATEST = 1e16  # milliseconds: no clock is later, and arithmetic with it is exact enough

# Around a request, in whatever a gateway writes.
OUTER = names(
    "request response body params custom_id method url timestamp time created created_at id object "
    "session session_id conversation_id thread_id model adapter lora_path lora_name cache_salt "
    "extra_key error status status_code latency latency_ms duration duration_ms headers path host user "
    "usage request_id trace_id span_id key result provider"
)
_SAMPLING = names(
    "model max_tokens temperature top_p top_k min_p n stream stream_options stop seed logprobs "
    "top_logprobs logit_bias presence_penalty frequency_penalty repetition_penalty user metadata store "
    "service_tier tool_choice parallel_tool_calls priority request_id cache_salt extra_key lora_path "
    "lora_name adapter extra_body ignore_eos min_tokens skip_special_tokens best_of use_beam_search "
    "length_penalty guided_json guided_regex guided_choice guided_grammar structured_outputs "
    "prompt_cache_key prompt_cache_retention safety_identifier reasoning_effort verbosity"
)
CHAT = _SAMPLING | names(
    "messages tools functions response_format function_call max_completion_tokens modalities prediction "
    "web_search_options audio"
)
COMPLETIONS = _SAMPLING | names("prompt prompt_token_ids input_ids echo sampling_params")
RESPONSES = _SAMPLING | names(
    "input instructions tools text previous_response_id conversation max_output_tokens max_tool_calls "
    "include reasoning truncation background"
)
ANTHROPIC = _SAMPLING | names(
    "messages system tools thinking stop_sequences anthropic_version anthropic_beta betas output_config "
    "output_format inference_geo cache_control"
)
MESSAGE = names("role content name tool_calls tool_call_id function_call refusal annotations")
ANTHROPIC_MESSAGE = frozenset(["role", "content"])
ITEM = names(
    "type id role content status phase end_turn metadata name namespace arguments call_id input output "
    "action queries results code outputs revised_prompt result summary encrypted_content tools "
    "execution server_label error internal_chat_message_metadata_passthrough"
)
TURN = names("from value role content")
CONVERSATION = names("id conversations conversation system tools model session timestamp")
MOONCAKE = names("timestamp input_length output_length hash_ids session_id")

_SESSION = ("session", "session_id", "conversation_id", "thread_id")
_NAMESPACE = (
    ("model", ("model",)),
    ("adapter", ("adapter", "lora_path", "lora_name")),
    ("cache_salt", ("cache_salt",)),
    ("extra_key", ("extra_key",)),
)


def is_number(value: Any) -> TypeGuard[float]:
    """A time: 0 or more, and not beyond all clocks."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < LATEST


def whole(record: dict[str, Any], name: str, least: int) -> int:
    """A count; ValueError names it otherwise."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number, {least} or more, not {said(value)}")
    if value > MAX_TOKEN:
        raise ValueError(f"{name} must be at most {MAX_TOKEN}, not {said(value)}")
    return value


def is_id(value: Any) -> TypeGuard[int]:
    """A token id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN


def date(value: str) -> float:
    """Milliseconds since 1970 of an ISO date (UTC where it names no zone); ValueError for anything else."""
    found = datetime.fromisoformat(value.replace("Z", "+00:00"))
    return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp() * 1000


def time_of(*records: dict[str, Any]) -> float | None:
    """Milliseconds. Numbers are seconds, or milliseconds where seconds would lie beyond the year 5000."""
    for name in ("timestamp", "created_at", "created", "time"):
        value = next((record[name] for record in records if record.get(name) is not None), None)
        if isinstance(value, str):
            try:
                return date(value)
            except (ValueError, OverflowError):
                raise ValueError(f"{name} is no date: {said(value)}") from None
        if value is not None:
            if not is_number(value):
                raise ValueError(f"{name} must be a date or a number, 0 or more, not {said(value)}")
            return float(value) if value > 1e11 else value * 1000.0
    return None


def stamp_of(line: dict[str, Any], odd: Odd) -> float | None:
    """The time of a transcript's line; one that is none is named, for the line is read all the same."""
    stamp = line.get("timestamp")
    try:
        return None if stamp is None else time_of({"timestamp": stamp})
    except ValueError:
        odd.append("timestamp that is no date")
        return None


def name_of(value: Any, what: str) -> str | None:
    """A name as a text: numbers and objects as JSON. None for none."""
    if value is None:
        return None
    return valid_text(value if isinstance(value, str) else dumps(value), what)


def session_of(*records: dict[str, Any]) -> str | None:
    """Which conversation a request belongs to."""
    for name in _SESSION:
        for record in records:
            if record.get(name) is not None:
                return name_of(record[name], name)
    return None


def namespace_of(*records: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """What must be equal for KV to be shared; an empty name is none."""
    extra = [each["extra_body"] for each in records if isinstance(each.get("extra_body"), dict)]
    found = []
    for name, fields in _NAMESPACE:
        values = [r[field] for r in (*records, *extra) for field in fields if r.get(field) not in (None, "")]
        if values:
            found.append((name, name_of(values[0], name) or ""))
    return tuple(found)


def most_tokens(body: dict[str, Any], *names: str) -> int | None:
    """The most that may be replied; None where a log does not say."""
    length = next((body[name] for name in names if body.get(name)), None)
    if length is None:
        return None
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= MAX_TOKEN:
        raise ValueError(f"max_tokens must be a whole number, not {said(length)}")
    return length


def unpacked(value: Any, name: str) -> Any:
    """A JSON text as what it says. ValueError if it is none."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is a text that is no JSON: {error}") from error


# ---------------------------------------------------------------------- replies


def response_of(record: dict[str, Any]) -> Any:
    """The answer beside a request: out of "response" and its "body", or a batch's "result"; None for none."""
    response = record.get("response")
    if isinstance(response, str) and response.lstrip()[:1] == "{":
        try:
            response = json.loads(response)
        except (ValueError, RecursionError):
            return response
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        response = response["body"]
    result = record.get("result")
    if response is None and isinstance(result, dict):
        response = result.get("message")
    return response


def reply_of(response: Any, odd: Odd) -> str | None:
    """The text of an answer, calls of tools included; None if there is none to be read, which is named
    where the answer is neither an error nor one of the Responses API."""
    if isinstance(response, str):
        return response
    if not isinstance(response, dict):
        if response is not None:
            odd.append("response (no reply is read from it)")
        return None
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        message = choices[0].get("message")
        if isinstance(message, dict):
            return _spoken(message, odd)
        text = choices[0].get("text")
        if isinstance(text, str):
            return text
    if isinstance(response.get("content"), list):
        return join(pieces(response["content"], "the reply", odd))
    if not {"output", "error", "usage"} & set(response):
        odd.append("response (no reply is read from it)")
    return None


def _spoken(message: dict[str, Any], odd: Odd) -> str | None:
    calls, said_text = message.get("tool_calls") or message.get("function_call"), message.get("content")
    if said_text is None and message.get("refusal"):
        said_text = message["refusal"]
    if message.get("reasoning_content") or message.get("reasoning"):
        odd.append("reasoning of a reply (its tokens are left out)")
    text = join(pieces(said_text, "the reply", odd)) if said_text is not None else ""
    if calls:
        return text + ("\n" if text and not text.endswith("\n") else "") + dumps(calls)
    return None if said_text is None else text


def usage_of(response: Any) -> Usage | None:
    """What the provider counted."""
    usage = response.get("usage") if isinstance(response, dict) else None
    if not isinstance(usage, dict):
        return None
    prompt, rest = usage.get("prompt_tokens"), usage.get("input_tokens")
    if is_id(prompt):
        return Usage(prompt, _cached(usage.get("prompt_tokens_details")))
    if not is_id(rest):
        return None
    read, written = usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens")
    if is_id(read) or is_id(written):  # Anthropic's: input_tokens is the rest
        found, put = read if is_id(read) else 0, written if is_id(written) else 0
        return Usage(rest + found + put, found, put)
    return Usage(rest, _cached(usage.get("input_tokens_details")))


def _cached(details: Any) -> int | None:
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if is_id(cached) else None
