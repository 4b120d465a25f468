"""Request logs and transcripts as people have them: the requests in each, and all that cannot be read named."""

from __future__ import annotations

from pathlib import Path

import pytest

from minirad.logs import LoggedRequest, LogReader

LOGS = Path(__file__).parent.parent / "logs"


def written(request: LoggedRequest) -> str:
    """A request as it stands in the files of expected ones."""
    around = {
        "reply": request.reply, "time": request.time, "session": request.session,
        "namespace": dict(request.namespace) or None, "id": request.id, "usage": request.usage and tuple(request.usage),
        "reply_tokens": request.reply_tokens, "blocks": request.blocks, "tokens": request.tokens,
        "incomplete": request.incomplete or None, "not understood": list(request.not_understood) or None,
    }  # fmt: skip
    lines = [f"== {request.where} (line {request.line}), {request.kind}"]
    lines += [f"   {name}: {value!r}" for name, value in around.items() if value is not None]
    for part in request.parts:
        mark = " (breakpoint)" if part.breakpoint else ""
        lines.append(f"   [{part.name}]{mark} {part.text if part.ids is None else list(part.ids)!r}".rstrip("\n"))
    return "\n".join(lines)
def everything(path: Path) -> str:
    reader = LogReader(path)
    found = [written(request) for request in reader]
    return "\n".join([f"format: {reader.format}", *found, *reader.summary()]).replace(str(path), path.name) + "\n"
if __name__ == "__main__":
    for p in sorted(LOGS.glob("*.json*")):
        try: t = everything(p)
        except ValueError as e: t = str(e).replace(str(p),p.name)+"\n"
        (LOGS / f"{p.stem}.expected").write_text(t)
