"""What a server is told once: how it calls itself, who may come in, and how much it takes."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

from minirad.errors import whole

PACKAGES = ("starlette", "uvicorn", "httpx", "prometheus_client")  # of the extra `serve`


def needed(what: str) -> None:
    """ValueError where a package that serving or routing (`what`) needs is not installed. Imports none."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{what} needs {' and '.join(missing)}: pip install 'minirad[serve]'")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a server takes.

    queue: samples that may wait beside those that have a row. body: bytes of a request. body_seconds: in
    which it has to have come. unread: pieces of a stream that may wait for a client that does not read.
    stalled: seconds in which a client has to read something. hang: seconds of one step after which the
    server calls itself ill. prompts: in one request.
    """

    queue: int = 256
    body: int = 4 << 20
    body_seconds: float = 30.0
    unread: int = 1024
    stalled: float = 30.0
    hang: float = 60.0
    prompts: int = 256

    def __post_init__(self) -> None:
        for name in ("queue", "body", "unread", "prompts"):
            whole(name, getattr(self, name), 0 if name == "queue" else 1)


@dataclass(frozen=True, slots=True)
class Settings:
    """model: the name that clients give. api_key: None lets everybody in."""

    model: str = "minirad"
    api_key: str | None = None
    limits: Limits = field(default_factory=Limits)
