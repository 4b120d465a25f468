"""Serve the OpenAI API over one engine: /v1/completions and /v1/chat/completions, with streaming.

Also /v1/models, /health, /metrics (for Prometheus), /server_info (as SGLang says where KV events are to be
had) and /flush_cache. Ctrl-C takes no more requests and gives those that are here a few seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minirad import command
from minirad.fleet.publish import ENDPOINT, Publisher, beside, with_rank
from minirad.options import add_engine_options, engine_config
from minirad.server.settings import Settings, add_limits, limits_of, needed

if TYPE_CHECKING:
    from minirad.engine import Engine

JOIN = 10.0  # seconds in which the engine's last step has to end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minirad serve`."""
    parser.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes any free one")
    add_limits(parser)
    parser.add_argument(
        "--kv-events", metavar="ENDPOINT", nargs="?", const=ENDPOINT,
        help=f"publish what the cache holds, as SGLang does (without ENDPOINT: {ENDPOINT})",
    )  # fmt: skip
    parser.add_argument(
        "--kv-replay", metavar="ENDPOINT",
        help="where those who missed some can ask for them (default: the port behind that of --kv-events)",
    )  # fmt: skip
    parser.add_argument("--record", type=Path, help="write every step to this new .jsonl file")
    parser.add_argument(
        "--grace", metavar="SECONDS", type=command.above_zero, default=5.0,
        help="that running requests have when the server ends (default: 5)",
    )  # fmt: skip
    parser.add_argument(
        "--exit-with-parent", metavar="PID", type=int, nargs="?", const=0,
        help="end when the process that started this one is gone",
    )  # fmt: skip
    add_engine_options(parser)


def main(args: argparse.Namespace) -> int:
    """Serves until it is told to end; returns the exit code."""
    settings = _checked(args)
    watch = _parent_watch(args.exit_with_parent)
    from minirad.engine import Engine

    engine = Engine(engine_config(args))
    if engine.attention_note:
        print(engine.attention_note, file=sys.stderr)
    with contextlib.ExitStack() as stack:
        if args.record is not None:
            from minirad.observe.recorder import Recorder

            stack.enter_context(Recorder(engine, args.record, tell=_record_ends))
        publisher = None
        if args.kv_events is not None:
            replay = args.kv_replay or beside(args.kv_events)
            publisher = stack.enter_context(Publisher(engine, args.kv_events, replay))
        return _serve(args, engine, settings, publisher, watch)


def _record_ends(error: OSError) -> None:
    print(f"minirad serve: the recording ends, the server goes on: {error}", file=sys.stderr, flush=True)


def _checked(args: argparse.Namespace) -> Settings:
    """ValueError for what cannot be, before anything is loaded."""
    needed("serve")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be from 0 to 65535, got {args.port}")
    if not args.host:
        raise ValueError("--host takes an address such as 127.0.0.1 or 0.0.0.0, not ''")
    if args.record is not None:
        command.may_be_written("--record", args.record, (".jsonl",), keep=True)
    if args.kv_events is not None:
        with_rank("--kv-events", args.kv_events, 0)
        with_rank("--kv-replay", args.kv_replay or beside(args.kv_events), 0)
    elif args.kv_replay is not None:
        raise ValueError(f"--kv-replay {args.kv_replay} goes with --kv-events only")
    key = api_key(args.api_key)
    if os.environ.get("RANK", "0") == "0":  # of several ranks the first one serves
        from minirad.server.connections import listening

        listening(args.host, args.port).close()  # a model may take minutes to load
    if not is_loopback(args.host) and key is None:
        print(
            f"minirad serve: {args.host} can be reached from other machines, and without --api-key anybody"
            " who reaches it may use it", file=sys.stderr,
        )  # fmt: skip
    name = args.served_model_name or args.dummy_weights or Path(args.model or "classroom").name
    return Settings(name, key, limits_of(args))


def api_key(said: str | None) -> str | None:
    """The key that was said, else the environment's, else None. ValueError for what cannot be one."""
    key = said if said is not None else os.environ.get("MINIRAD_API_KEY") or None
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ValueError("--api-key must be printable ASCII without spaces, and not empty")
    return key


def is_loopback(host: str) -> bool:
    """Only this machine reaches that address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _parent_watch(parent: int | None) -> Any:
    if parent is None:
        return None
    from minirad.server.connections import ParentWatch

    watch = ParentWatch(parent or os.getppid())
    watch.start()
    return watch


def _serve(
    args: argparse.Namespace, engine: Engine, settings: Settings, publisher: Publisher | None, watch: Any
) -> int:
    from minirad.server.app import make_app
    from minirad.server.connections import Server, listening
    from minirad.server.metrics import Metrics
    from minirad.server.service import EngineThread, Service

    metrics = Metrics()
    service = Service(engine, settings.limits, metrics)
    app = make_app(service, settings, info=lambda: server_info(engine, publisher), metrics=metrics)
    socket = listening(args.host, args.port)
    host = f"[{args.host}]" if ":" in args.host else args.host
    place = f"http://{host}:{socket.getsockname()[1]}"
    server = Server(app, service, lambda: print(f"minirad serve: {place}", flush=True), args.grace)
    if watch is not None:
        watch.on_gone = server.end_soon
    thread = EngineThread(service, server.end_soon)
    thread.start()
    try:
        asyncio.run(server.serve(sockets=[socket]))
    finally:
        service.end()
        service.end_all("the server has ended")
        thread.join(JOIN)
    if service.error:
        print(f"minirad serve: {command.one_line(service.error)}", file=sys.stderr)
        return 1
    if thread.is_alive():
        print(f"minirad serve: a step did not end within {JOIN:g} seconds", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    return 0


def server_info(engine: Engine, publisher: Publisher | None) -> dict[str, Any]:
    """What /server_info says; `kv_events` as SGLang's, and as minirad/fleet/endpoints.py reads it."""
    import minirad

    config = engine.config
    info: dict[str, Any] = {
        "version": minirad.__version__,
        "model_path": str(engine.model_path),
        **{
            name: getattr(config, name)
            for name in ("kv_tokens", "page_size", "max_running", "max_context", "chunk_tokens", "device",
                         "dtype", "attention", "schedule_policy", "eviction_policy", "host_kv_tokens",
                         "speculative", "draft_tokens", "jump_forward")
        },
        "lora": [*dict(config.lora)],
        "kv_events": None,
    }  # fmt: skip
    if publisher is not None:
        host, port = publisher.endpoint.removeprefix("tcp://").rsplit(":", 1)
        named = "*" if is_loopback(host) else host  # of a wildcard whoever asks knows the host already
        replay = None if publisher.replay is None else int(publisher.replay.rsplit(":", 1)[1])
        info["kv_events"] = {
            "publisher": "zmq", "endpoint_host": named, "endpoint_port_base": int(port),
            "replay_endpoint_port_base": replay, "topic": "", "block_size": config.page_size, "dp_size": 1,
        }  # fmt: skip
    return info
