"""Bodies of the OpenAI API as we take them: a body becomes a request, or all that is wrong with it is said.

Every field is looked at by itself, so that one answer names all that has to change. Fields that would change
the answer and that nothing here can do are refused by name; those that change nothing are passed over; an
unknown one is a mistake. `null` is as good as absent. Knows no tokenizer and no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from minirad.errors import said

INVALID = "invalid_request_error"
MOST_PROBLEMS = 20  # that one answer names
TOP_LOGPROBS = 20

Count = Annotated[int, Meta(ge=1, le=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Share = Annotated[float, Meta(gt=0, le=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]


class ApiError(Exception):
    """What a client is told instead of an answer, in OpenAI's form."""

    def __init__(
        self, message: str, status: int = 400, kind: str = INVALID, param: str | None = None,
        code: str | None = None, headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = headers or {}

    def body(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode({"error": self.error()})

    def error(self) -> dict[str, Any]:
        """What stands under "error"."""
        return {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}


class StreamOptions(Struct, forbid_unknown_fields=True):
    """include_obfuscation: what OpenAI's client may send; nothing is padded here."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Body(Struct, kw_only=True):
    """What both kinds of requests have."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Share = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] = 0
    n: Count = 1
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool = False
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    def adapter(self, known: Iterable[str]) -> str:
        """The adapter that it names as the model, of those that there are; "" for the model itself."""
        return self.model if self.model is not None and self.model in known else ""

    @property
    def include_usage(self) -> bool:
        """The stream ends with a chunk that has the usage."""
        return self.stream and self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a reply."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Completion(Body, kw_only=True):
    """`POST /v1/completions`. prompt: texts, or rows of ids."""

    prompt: list[str] | list[list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Count | None = None


class Chat(Body, kw_only=True):
    """`POST /v1/chat/completions`. messages: role and content, the content one text."""

    messages: list[dict[str, str]]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS)] | None = None
    response_format: dict[str, Any] | None = None


# Nothing here does these, and they would change the answer. Behind each: values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "min_p": (0,), "min_tokens": (0,), "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"), "audio": (), "modalities": (["text"],), "prediction": (),
    "reasoning_effort": ("none",), "web_search_options": (), "verbosity": ("medium",), "suffix": ("",),
    "moderation": (), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "structured_outputs": (), "regex": (), "ebnf": (), "json_schema": (), "lora_path": (), "priority": (0,),
    "use_beam_search": (False,), "length_penalty": (1,), "prompt_logprobs": (0,), "chat_template": (),
    "chat_template_kwargs": ({},), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "add_special_tokens": (), "skip_special_tokens": (True,), "return_token_ids": (False,),
    "include_stop_str_in_output": (False,), "documents": ([],), "echo": (False,), "best_of": (1,),
}  # fmt: skip
_HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
     "prompt_cache_retention", "prompt_cache_options", "parallel_tool_calls")
)  # fmt: skip
_ROLES = {name: name for name in ("system", "user", "assistant")} | {"developer": "system"}
_IN_MESSAGE = ("role", "content", "name")
_WHERE = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
B = TypeVar("B", bound=Body)


class Problems:
    """What is wrong with a request, by field."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def add(self, field: str, sentence: str) -> None:
        """sentence: begins with what goes on behind the field's name."""
        self.found.append((field, sentence))

    def raise_any(self) -> None:
        """ApiError with all of them; its param is the first one's field."""
        if not self.found:
            return
        texts = [f"{field}: {sentence}" for field, sentence in self.found[:MOST_PROBLEMS]]
        if len(self.found) > MOST_PROBLEMS:
            texts.append(f"and {len(self.found) - MOST_PROBLEMS} more")
        raise ApiError("; ".join(texts), param=self.found[0][0])


def completion(body: bytes) -> Completion:
    """A body of /v1/completions; ApiError says all that is wrong with it."""
    data, problems = _object(body), Problems()
    prompt = data.pop("prompt", None)
    values = _fields(Completion, data, problems)
    values["prompt"] = _prompts(prompt, problems)
    best_of, n = values.get("best_of"), values.get("n", 1)
    if best_of is not None and best_of != n:
        problems.add("best_of", f"is not supported unless it is n ({n}), got {best_of}")
    if values.get("echo") and values.get("stream") and values.get("logprobs") is not None:
        problems.add("echo", "with logprobs is not supported in a stream")
    problems.raise_any()
    return Completion(**values)


def chat(body: bytes) -> Chat:
    """A body of /v1/chat/completions; ApiError says all that is wrong with it."""
    data, problems = _object(body), Problems()
    messages = data.pop("messages", None)
    values = _fields(Chat, data, problems)
    values["messages"] = _messages(messages, problems)
    if values.get("max_tokens") == 0:
        problems.add("max_tokens", "must be at least 1, got 0")
    if values.get("top_logprobs") is not None and not values.get("logprobs"):
        problems.add("top_logprobs", "needs logprobs to be true")
    _check_format(values.get("response_format"), problems)
    problems.raise_any()
    return Chat(**values)


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(_no_json(body, error)) from None
    if not isinstance(data, dict):
        raise ApiError(f"the body must be a JSON object, got {said(data)}")
    return data


def _no_json(body: bytes, error: Exception) -> str:
    """Half of a surrogate pair may stand in JSON, and is no text: msgspec says then that the body was cut."""
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as half:
        return f"the body holds half of a surrogate pair, {half.object[half.start]!r}, which is no text"
    except (ValueError, RecursionError):
        pass
    return f"the body is no JSON: {error}"


def _fields(kind: type[B], data: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """The fields of a request that are given, each of its type."""
    known = {each.name: each.type for each in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in data.items():
        if value is None or name in _HARMLESS:
            continue
        if name in known:
            values.update(_converted(name, value, known[name], problems))
        elif name not in _REFUSED:
            problems.add(said(name).strip("'\""), "is no argument of this request")
        elif not any(value == each and isinstance(value, type(each) | float) for each in _REFUSED[name]):
            problems.add(name, f"is not supported, got {said(value)}")
    if values.get("stream_options") is not None and not values.get("stream"):
        problems.add("stream_options", "is only allowed when stream is true")
    return values


def _converted(name: str, value: Any, kind: Any, problems: Problems) -> Iterable[tuple[str, Any]]:
    try:
        return [(name, msgspec.convert(value, kind))]
    except msgspec.ValidationError as error:
        match = _WHERE.fullmatch(str(error))
        assert match is not None
        what = match["what"][:1].lower() + match["what"][1:]
        problems.add(f"{name}{match['path'] or ''}", f"{what} ({said(value)})")
    return []


def _prompts(value: Any, problems: Problems) -> Any:
    """A text, texts, a row of ids or rows of ids, as several."""
    if isinstance(value, str):
        return [value]
    if value is None:
        problems.add("prompt", "is missing")
        return []
    if not isinstance(value, list):
        problems.add("prompt", f"must be a text, token ids or a list of these, got {said(value)}")
        return []
    if not value:
        problems.add("prompt", "is empty")
        return []
    if all(isinstance(each, str) for each in value):
        return value
    rows = value if all(isinstance(each, list) for each in value) else [value]
    for at, row in enumerate(rows):
        where = "prompt" if rows is not value else f"prompt[{at}]"
        wrong = next(
            (i for i, each in enumerate(row) if type(each) is not int or not 0 <= each < 1 << 31), None
        )
        if not row:
            problems.add(where, "is empty")
        elif wrong is not None:
            problems.add(f"{where}[{wrong}]", f"is no token id: {said(row[wrong])}")
    return rows


def _messages(value: Any, problems: Problems) -> list[dict[str, str]]:
    if value is None:
        problems.add("messages", "is missing")
        return []
    if not isinstance(value, list) or not value:
        problems.add("messages", f"must be a list of one message or more, got {said(value)}")
        return []
    return [_message(each, f"messages[{at}]", problems) for at, each in enumerate(value)]


def _message(value: Any, where: str, problems: Problems) -> dict[str, str]:
    if not isinstance(value, dict):
        problems.add(where, f"must be an object with role and content, got {said(value)}")
        return {}
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        problems.add(f"{where}.role", f"must be one of {', '.join(_ROLES)}, got {said(role)}")
    for name, given in value.items():
        if name not in _IN_MESSAGE and given not in (None, [], {}, ""):  # as a reply has them
            problems.add(f"{where}.{said(name)[1:-1]}", "is not supported")
    content = value.get("content")
    if content is None and role == "assistant":
        content = ""
    return {"role": _ROLES.get(str(role), ""), "content": _content(content, f"{where}.content", problems)}


def _content(value: Any, where: str, problems: Problems) -> str:
    """A text, or the parts of one: they are joined as they are."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        problems.add(where, f"must be a text or a list of text parts, got {said(value)}")
        return ""
    texts = []
    for at, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind == "text" else None
        if kind not in (None, "text"):
            problems.add(f"{where}[{at}].type", f"only text is supported, got {said(kind)}")
        elif not isinstance(text, str):
            problems.add(f"{where}[{at}]", f"must be a text part, got {said(part)}")
        else:
            texts.append(text)
    return "".join(texts)


def _check_format(value: dict[str, Any] | None, problems: Problems) -> None:
    """response_format: text, json_object, or json_schema with a schema."""
    if value is None:
        return
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        problems.add("response_format.type", f"must be text, json_object or json_schema, got {said(kind)}")
    elif kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            problems.add("response_format.json_schema.schema", f"must be an object, got {said(schema)}")
