"""What a server is told once: how it calls itself, who may come in, and how much it takes."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass, field

from minirad import command
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


def add_limits(parser: argparse._ActionsContainer) -> None:
    """Who may ask, for what and how much: the options that a page with a server has, too. None: not said."""
    usual = Limits()
    parser.add_argument("--api-key", metavar="KEY", help="clients have to send it (default: MINIRAD_API_KEY)")
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    parser.add_argument(
        "--max-queue", metavar="N", type=_count,
        help=f"replies that may wait beside those that run (default: {usual.queue}); more are answered 429",
    )  # fmt: skip
    parser.add_argument(
        "--max-body", metavar="BYTES", type=command.positive,
        help=f"size of a request (default: {usual.body:,})",
    )  # fmt: skip


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"a whole number, 0 or more, is needed, not {command.one_line(text)!r}"
        )
    return min(int(text), (1 << 31) - 1)


def limits_of(args: argparse.Namespace) -> Limits:
    """What `add_limits` asked for."""
    said = {"queue": args.max_queue, "body": args.max_body}
    return Limits(**{name: value for name, value in said.items() if value is not None})
