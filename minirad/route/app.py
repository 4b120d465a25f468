"""What the router's front answers to: the completions by the proxy, all else here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from minirad.route.proxy import refusal
from minirad.server.app import HANDLERS, Door

if TYPE_CHECKING:
    from minirad.route.router import Router
    from minirad.route.workers import Worker

TOLD = ("name", "state", "why", "url", "pid", "load", "queued_tokens", "routed", "failed", "restarts")
ASKING = 5.0  # seconds that a worker has to answer something small


def make_app(router: Router) -> Door:
    """The front of a router. Only /health and /metrics are open to who has no key."""
    front = _Front(router)
    return Door(
        Starlette(
            routes=[
                Route("/v1/completions", router.proxy, methods=["POST"]),
                Route("/v1/chat/completions", router.proxy, methods=["POST"]),
                Route("/v1/models", front.models),
                Route("/v1/models/{name:path}", front.models),
                Route("/health", front.health),
                Route("/metrics", front.metrics),
                Route("/workers", front.workers),
                Route("/server_info", front.server_info),
                Route("/flush_cache", front.flush_cache, methods=["POST"]),
            ],
            exception_handlers=HANDLERS,
        ),
        router.settings.key or None,
        router.metrics.answered,
    )


class _Front:
    """Answers about the router and its workers."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._since = int(time.time())

    @property
    def _alive(self) -> list[Worker]:
        return [worker for worker in self._router.workers if worker.alive]

    async def models(self, request: Request) -> Response:
        """What a worker says that it serves."""
        for worker in self._alive:
            answer = await self._ask(worker, "GET", request.url.path)
            if answer is not None and answer.status_code < 500:
                return Response(answer.content, answer.status_code, media_type="application/json")
        raise refusal(503, "no worker is alive", "no_worker", 5)

    async def health(self, request: Request) -> Response:
        """200 while a worker is alive."""
        alive, closing = len(self._alive), self._router.proxy.closing
        status = "ending" if closing else "ok" if alive else "no worker is alive"
        said = {"status": status, "alive": alive, "workers": len(self._router.workers)}
        return JSONResponse(said) if status == "ok" else JSONResponse(said, 503, {"retry-after": "5"})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        text = self._router.metrics.text(self._router.workers)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def workers(self, request: Request) -> Response:
        """How each worker is, and the last choices."""
        router = self._router
        rows = [
            {**{name: getattr(worker, name) for name in TOLD}, "holds_tokens": tree.tokens}
            for worker, tree in zip(router.workers, router.trees, strict=True)
        ]
        return JSONResponse({"policy": router.policy.name, "workers": rows, "routes": list(router.routes)})

    async def server_info(self, request: Request) -> Response:
        """As a server of several ranks has it: each worker is one."""
        router = self._router
        count = router.settings.workers
        events: dict[str, Any] = {"publisher": "null"}
        if router.kv_port:
            events = {
                "publisher": "zmq", "topic": "", "dp_size": count, "block_size": router.engine.page_size,
                "endpoint_host": "127.0.0.1", "endpoint_port_base": router.kv_port,
                "replay_endpoint_host": "127.0.0.1", "replay_endpoint_port_base": router.kv_port + count,
            }  # fmt: skip
        folder = None if router.folder is None else str(router.folder)
        return JSONResponse(
            {
                "kv_events": events, "dp_size": count, "page_size": router.engine.page_size,
                "model_path": folder, "tokenizer_path": folder, "policy": router.policy.name,
                "started": self._since,
            }
        )  # fmt: skip

    async def flush_cache(self, request: Request) -> Response:
        """Empties the cache of every worker that is alive."""
        said = {}
        for worker in self._alive:
            answer = await self._ask(worker, "POST", "/flush_cache")
            said[worker.name] = "no answer" if answer is None else answer.status_code
            if said[worker.name] == 200:
                self._router.policy.forget(worker.rank)
        if not said:
            raise refusal(503, "no worker is alive", "no_worker", 5)
        return JSONResponse(said, 200 if set(said.values()) == {200} else 503)

    async def _ask(self, worker: Worker, method: str, path: str) -> httpx.Response | None:
        try:
            return await worker.client.request(method, path, timeout=ASKING) if worker.client else None
        except httpx.HTTPError:
            worker.doubt.set()
            return None
