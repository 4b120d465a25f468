"""Serve the OpenAI API over one engine: http://127.0.0.1:8000/v1, and /health, /metrics, /server_info."""

from __future__ import annotations

import argparse

from minirad.options import add_engine_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m minirad serve`."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    add_engine_options(parser)


def main(args: argparse.Namespace) -> int:
    """Serves until it is told to end; returns the exit code."""
    import asyncio
    import socket

    import uvicorn

    from minirad.engine import Engine
    from minirad.options import engine_config
    from minirad.server.app import make_app
    from minirad.server.service import EngineThread, Service

    engine = Engine(engine_config(args))
    service = Service(engine)
    thread = EngineThread(service)
    thread.start()
    sock = socket.create_server((args.host, args.port))
    config = uvicorn.Config(make_app(service), log_config=None, access_log=False, http="h11", ws="none")
    print(f"minirad serve: http://{args.host}:{sock.getsockname()[1]}", flush=True)
    asyncio.run(uvicorn.Server(config).serve(sockets=[sock]))
    return 0
