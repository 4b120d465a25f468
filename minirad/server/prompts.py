"""A request's prompts as token ids: texts as they are, conversations by the model's own chat template.

A router that has to know which worker holds a prefix makes the same ids with this file. Without torch.
"""

from __future__ import annotations

from typing import Any

from minirad.cache.node import Slots
from minirad.command import one_line
from minirad.errors import as_int64
from minirad.server.protocol import ApiError, Chat, Completion
from minirad.text import valid_text


def prompt_name(body: Completion, at: int) -> str:
    """What errors call one of a completion's prompts."""
    return "prompt" if len(body.prompt) == 1 else f"prompt[{at}]"


def completion_prompts(body: Completion, texts: Any) -> list[Slots]:
    """The ids of each prompt; texts: a tokenizing.Tokenizing. ApiError for what is no text."""
    found = []
    for at, prompt in enumerate(body.prompt):
        where = prompt_name(body, at)
        try:
            found.append(texts.encode(prompt))
        except ValueError as error:
            raise ApiError(f"{where}: {one_line(error)}", param=where) from None
    return found


def chat_prompt(body: Chat, texts: Any) -> Slots:
    """The ids of a conversation, up to where the reply begins. ApiError where the template refuses it."""
    try:
        tokenizer = texts.tokenizer
    except ValueError as error:  # a bare model
        raise ApiError(f"messages: {one_line(error)}", param="messages") from None
    if getattr(tokenizer, "chat_template", None) is None:
        raise ApiError(
            "messages: this model has no chat template; /v1/completions takes texts", param="messages"
        )
    try:
        written = tokenizer.apply_chat_template(body.messages, tokenize=False, add_generation_prompt=True)
        ids = texts.texts.encode(valid_text(written, "the conversation"))
    except Exception as error:  # jinja's, which a template raises on purpose: roles must alternate, say
        raise ApiError(
            f"messages: the chat template refuses them: {one_line(error)}", param="messages"
        ) from None
    prompt: Slots = as_int64(ids, "the conversation")
    return prompt
