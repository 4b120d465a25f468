"""Sessions of agents as Claude Code and Codex write them: turns with tool results, compactions, seeded.

python tests/transcripts.py claude-code session.jsonl --turns 300 --bytes 10000000
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEXT = (
    "the cache holds tokens of a request and its prefix while another one waits for pages so that a node can "
    "be split evicted locked or read again when it fails return value error index parent child key length "
    "import path file test assert engine config class self update layer buffer offset number slot page size"
)
WORDS = TEXT.split()
SIDES = (
    "def {0}_{1}(self, {2}: int) -> {3}:",
    "    {0}.{1} = {2}[{4}:{5}]",
    "    if {0} >= {4} and not {1}:",
    '        raise ValueError(f"{0} {1} {{{2}}}")',
    "    # {0} {1} {2} {3} {0} of {4}",
    "{0}: {1} {2} {4}.{5}",
)


def lines(rng: random.Random, size: int) -> str:
    """Some `size` characters of what looks like code."""
    made, there = [], 0
    while there < size:
        words = rng.choices(WORDS, k=4)
        line = rng.choice(SIDES).format(*words, rng.randrange(5000), rng.randrange(100000))
        made.append(line)
        there += len(line) + 1
    return "\n".join(made)


def claude_code(
    turns: int = 200, compactions: int = 2, size: int = 2_000_000, seed: int = 0, copies: bool = True
) -> Iterator[dict[str, Any]]:
    """Lines of a session file. size: its characters, about; copies: results stand in it a second time, as
    Claude Code keeps them for its screen (toolUseResult)."""
    rng = random.Random(seed)
    share = size // turns
    text = max(share // (3 if copies else 1) - 900, 60)
    ends = {turns * (number + 1) // (compactions + 1) for number in range(compactions)}
    above, count = None, 0

    def line(kind: str, parent: str | None, **more: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        stamp = f"2026-03-01T{10 + count // 3600:02}:{count // 60 % 60:02}:{count % 60:02}.000Z"
        return {
            "parentUuid": parent, "isSidechain": False, "userType": "external", "cwd": "/home/dev/project",
            "sessionId": f"session-{seed}", "version": "2.1.2", "gitBranch": "main", "type": kind,
            "uuid": f"{kind}-{count:06}", "timestamp": stamp, **more,
        }  # fmt: skip

    for turn in range(turns):
        if turn % 20 == 0 and turn not in ends:
            asked = {"role": "user", "content": f"Task {turn}: {lines(rng, 300)}"}
            yield (told := line("user", above, message=asked))
            above = told["uuid"]
        usage = {"input_tokens": 4, "cache_creation_input_tokens": 900, "cache_read_input_tokens": 20_000}
        reply = {
            "id": f"msg_{turn}",
            "type": "message",
            "role": "assistant",
            "model": "claude-x",
            "usage": usage,
        }
        for block in (
            {"type": "text", "text": lines(rng, 200)},
            {
                "type": "tool_use",
                "id": f"toolu_{turn}",
                "name": "Read",
                "input": {"file_path": f"src/{turn}.py"},
            },
        ):
            yield (
                told := line(
                    "assistant", above, message={**reply, "content": [block]}, requestId=f"req_{turn}"
                )
            )
            above = told["uuid"]
        result = lines(rng, text)
        block = {"tool_use_id": f"toolu_{turn}", "type": "tool_result", "content": result}
        more: dict[str, Any] = {"sourceToolAssistantUUID": above}
        if copies:
            more["toolUseResult"] = {
                "originalFile": result,
                "structuredPatch": [{"lines": result.split("\n")}],
            }
        yield (told := line("user", above, message={"role": "user", "content": [block]}, **more))
        above = told["uuid"]
        if turn + 1 in ends:
            about = {"trigger": "auto", "preTokens": 180_000}
            told = line("system", None, subtype="compact_boundary", content="Conversation compacted",
                        logicalParentUuid=above, compactMetadata=about)  # fmt: skip
            yield told
            summary = f"This session is being continued from a previous conversation. {lines(rng, 3000)}"
            said = {"role": "user", "content": summary}
            yield (told := line("user", told["uuid"], message=said, isCompactSummary=True))
            above = told["uuid"]


def codex(
    turns: int = 200, compactions: int = 2, size: int = 2_000_000, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Lines of a rollout file of about `size` characters."""
    rng = random.Random(seed)
    text = max(size // turns - 900, 60)
    ends = {turns * (number + 1) // (compactions + 1) for number in range(compactions)}
    count = 0

    def line(kind: str, **payload: Any) -> dict[str, Any]:
        nonlocal count
        count += 1
        stamp = f"2026-03-01T{10 + count // 3600:02}:{count // 60 % 60:02}:{count % 60:02}.000Z"
        return {"timestamp": stamp, "type": kind, "payload": payload}

    def said(role: str, text: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    tools = [{"name": "lookup", "description": "Looks up a symbol", "input_schema": {"type": "object"}}]
    told = {"text": f"You are a coding agent. {lines(rng, 4000)}"}
    yield line("session_meta", id=f"codex-{seed}", cwd="/home/dev/project", originator="codex_exec",
               base_instructions=told, dynamic_tools=tools)  # fmt: skip
    yield line("turn_context", cwd="/home/dev/project", model="gpt-x", effort="high")
    context = said("user", "<environment_context>\n  <cwd>/home/dev/project</cwd>\n</environment_context>")
    yield line("response_item", **context)
    asked: list[dict[str, Any]] = []
    for turn in range(turns):
        if turn % 20 == 0:
            asked.append(said("user", f"Task {turn}: {lines(rng, 300)}"))
            yield line("response_item", **asked[-1])
        call = {"name": "shell", "arguments": json.dumps({"command": ["cat", f"src/{turn}.py"]})}
        yield line("response_item", type="reasoning", summary=[], encrypted_content="gAAA")
        yield line("response_item", type="function_call", call_id=f"call_{turn}", **call)
        yield line("event_msg", type="token_count", info={"last_token_usage": {"input_tokens": 20_000}})
        yield line(
            "response_item", type="function_call_output", call_id=f"call_{turn}", output=lines(rng, text)
        )
        if turn + 1 in ends:
            summary = said("user", f"Another model began this task. Its summary: {lines(rng, 3000)}")
            yield line("compacted", message="", replacement_history=[context, *asked, summary])


MAKERS = {"claude-code": claude_code, "codex": codex}


def write(path: Path, kind: str, **how: Any) -> Path:
    """A session file."""
    with path.open("w", encoding="utf-8") as file:
        for each in MAKERS[kind](**how):
            file.write(json.dumps(each) + "\n")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=list(MAKERS))
    parser.add_argument("file", type=Path)
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--compactions", type=int, default=3)
    parser.add_argument("--bytes", type=int, default=10_000_000)
    asked = parser.parse_args()
    made = write(asked.file, asked.kind, turns=asked.turns, compactions=asked.compactions, size=asked.bytes)
    print(f"{made}: {made.stat().st_size:,} bytes")
