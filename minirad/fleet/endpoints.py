"""Where a server's KV events can be had: endpoints of ZeroMQ, checked, and what SGLang's /server_info says.

Only what the user named is asked: no redirect to another server is followed, and no proxy is told.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from minirad.command import one_line
from minirad.errors import said

MOST_RANKS = 256
INFO_SECONDS = 5.0
INFO_BYTES = 4 << 20
WILDCARDS = ("*", "0.0.0.0", "::", "[::]")
_TCP = re.compile(r"tcp://(\*|[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\]):(\d{1,5})")


def check_endpoint(endpoint: str, *, bind: bool = False) -> str:
    """The endpoint; ValueError, in one sentence, unless it is tcp://host:port or ipc://path.

    bind: it is to be bound, and its host may be *.
    """
    if endpoint.startswith("ipc://"):
        if not 0 < len(endpoint) - 6 <= 100 or not endpoint.isprintable():
            raise ValueError(
                f"an ipc:// endpoint names a file, in at most 100 characters, got {said(endpoint)}"
            )
        return endpoint
    match = _TCP.fullmatch(endpoint)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError(
            f"an endpoint is tcp://host:port (IPv6 in brackets) or ipc://path, got {said(endpoint)}"
        )
    if match[1] in WILDCARDS and not bind:
        raise ValueError(
            f"{endpoint}: one can listen at {match[1]}, but not connect to it; name the server's host"
        )
    return endpoint


def rank_endpoints(endpoint: str, ranks: int, *, bind: bool = False) -> list[str]:
    """The endpoint of each data-parallel rank: port, port + 1, ...; ValueError for what cannot be one."""
    check_endpoint(endpoint, bind=bind)
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"a server has 1 to {MOST_RANKS} ranks, got {ranks}")
    if ranks == 1:
        return [endpoint]
    if endpoint.startswith("ipc://"):
        raise ValueError(f"{endpoint}: an ipc:// endpoint is one rank's, {ranks} ranks need tcp://")
    base, _, port = endpoint.rpartition(":")
    if int(port) + ranks - 1 > 65535:
        raise ValueError(f"{endpoint}: there are no {ranks} ports from {port} on, the last one is 65535")
    return [f"{base}:{int(port) + rank}" for rank in range(ranks)]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Where a server publishes its events. replays: () where it has no replay. notices: sentences to show."""

    endpoints: list[str]
    replays: list[str]
    topic: str
    block_size: int
    notices: tuple[str, ...] = ()


def server_info(url: str) -> ServerInfo:
    """What SGLang's /server_info says of its events; ValueError, in one sentence, where it says nothing."""
    base, host = _server(url)
    events = _fetch(f"{base}/server_info").get("kv_events")
    if not isinstance(events, dict) or events.get("publisher") in (None, "null"):
        raise ValueError(
            f"{base} publishes no KV events: start it with"
            ' --kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557",'
            ' "replay_endpoint": "tcp://*:5558"}\''
        )
    if events["publisher"] != "zmq":
        raise ValueError(f"{base} publishes its KV events by {said(events['publisher'])}, not by zmq")
    ranks, topic = events.get("dp_size", 1), events.get("topic") or ""
    size, port = events.get("block_size", 0), events.get("endpoint_port_base")
    replay = events.get("replay_endpoint_port_base")
    for name, value, most in (
        ("dp_size", ranks, MOST_RANKS), ("block_size", size, 1 << 20), ("endpoint_port_base", port, 65535),
        ("replay_endpoint_port_base", 1 if replay is None else replay, 65535),
    ):  # fmt: skip
        if type(value) is not int or not 0 < value <= most:
            raise ValueError(f"{base}/server_info: kv_events has {name} {said(value)}")
    if not isinstance(topic, str) or len(topic) > 1000:
        raise ValueError(f"{base}/server_info: kv_events has topic {said(topic)}")
    notices = []
    named = _host(base, events, "endpoint_host")
    if named:
        notices.append(
            f"the server's endpoint names the host {named}: if nothing comes, its publisher connects there"
            f" instead of listening, and --bind tcp://*:{port} is needed on that host"
        )
    if replay is None:
        notices.append(
            "the server has no replay endpoint: what was before cannot be seen, and what is lost stays lost"
        )
    replay_host = _host(base, events, "replay_endpoint_host") or host
    return ServerInfo(
        rank_endpoints(f"tcp://{named or host}:{port}", ranks),
        rank_endpoints(f"tcp://{replay_host}:{replay}", ranks) if replay is not None else [],
        topic, size, tuple(notices),
    )  # fmt: skip


def _server(url: str) -> tuple[str, str]:
    """The URL without its end, and the host as it stands in an endpoint."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc or not url.isprintable():
        raise ValueError(f"a server is http://host:port, got {said(url)}")
    host = f"[{host}]" if ":" in host else host
    path = parts.path.rstrip("/").removesuffix("/server_info")
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{path}", host


def _host(base: str, events: dict[str, Any], name: str) -> str:
    """The host that an endpoint names, "" where it is a wildcard or not told."""
    host = events.get(name)
    if host is None or host in WILDCARDS:
        return ""
    if not isinstance(host, str):
        raise ValueError(f"{base}/server_info: kv_events has {name} {said(host)}")
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class _SameServer(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to where it was asked."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if (old.scheme, old.netloc) != (new.scheme, new.netloc):
            raise ValueError(f"{req.full_url} sends elsewhere, to {said(newurl)}; name that server yourself")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _fetch(url: str) -> dict[str, Any]:
    """A JSON object from a server, of bounded size and in bounded time."""
    until = time.monotonic() + INFO_SECONDS
    # No proxy: the server is one's own, and nobody else is told of it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _SameServer)
    try:
        with opener.open(url, timeout=INFO_SECONDS) as response:
            text = b""
            while part := response.read1(1 << 16):
                text += part
                if len(text) > INFO_BYTES or time.monotonic() > until:
                    raise ValueError(f"{url} answers with more than {INFO_BYTES:,} bytes, or too slowly")
    except urllib.error.HTTPError as error:
        error.close()
        raise ValueError(f"{url} answers with {error.code} {said(error.reason)}") from None
    except (OSError, urllib.error.URLError) as error:
        raise ValueError(f"{url} does not answer: {one_line(getattr(error, 'reason', error))}") from None
    except Exception as error:  # http.client's, for what is no HTTP
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{url} does not speak HTTP: {said(str(error))}") from None
    try:
        info = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{url} answers with no JSON: {said(text[:100])}") from None
    if not isinstance(info, dict):
        raise ValueError(f"{url} answers with no JSON object: {said(info)}")
    return info


def free_ports(count: int, host: str = "127.0.0.1", tries: int = 200) -> int:
    """The first of so many free ports in a row; ValueError where none are found."""
    chance = random.Random()
    for _ in range(tries):
        first = chance.randrange(20_000, 32_000 - count)  # below those that systems hand out by themselves
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind((host, port))
            except OSError:
                continue
            return first
    raise ValueError(f"there are no {count} free ports in a row between 20000 and 32000")
