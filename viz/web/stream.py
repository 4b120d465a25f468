"""A stream of other servers' KV events, followed and shown: the options, the thread, the run that a page has.

    python -m viz.live --connect tcp://host:5557 --replay tcp://host:5558 --ranks 2
    python -m viz.live --server http://host:30000 --record flight.jsonl
    python -m viz.live --bind tcp://*:5557                     for a publisher that connects

With one of these three, and with nothing else, a socket to elsewhere is opened. `--export` of a live stream
writes its file after --steps frames, when nothing has come for SILENCE seconds, or with Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from minirad.fleet.endpoints import ServerInfo, rank_endpoints, server_info

from minirad import command
from viz.trace import Decode, ids_as_text
from viz.words import decoder_from

Json = dict[str, Any]
PACE = 0.1  # seconds between two frames that a page is told of
SILENCE = 5.0  # seconds without news after which an export is written
_OWN = (
    "workload", "model", "kv_tokens", "page_size", "schedule_policy", "eviction_policy", "host_kv_tokens",
    "host_write", "bigram_keys", "compare", "cache", "speed", "paused", "publish",
)  # fmt: skip


# ---------------------------------------------------------------------- what is asked for


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a stream."""
    group = parser.add_argument_group("the cache of another server, from the KV events that it publishes")
    where = group.add_argument
    where("--connect", metavar="ENDPOINT", help="its publisher, tcp://host:5557; rank 1 has the next port")
    where("--server", metavar="URL", help="ask SGLang's /server_info for endpoints, ranks and topic")
    where("--bind", metavar="ENDPOINT", help="listen here, for a publisher that connects: tcp://*:5557")
    where("--ranks", type=command.positive, metavar="N", help="data-parallel ranks (default: 1)")
    where("--topic", metavar="T", help="only messages whose topic begins with it (default: all)")
    where("--tokenizer", metavar="DIR|ID",
          help="a folder, or a name in the local cache (nothing is fetched): token ids as text")  # fmt: skip


def asked(options: argparse.Namespace) -> bool:
    """A stream is to be followed."""
    return any(given is not None for given in (options.connect, options.server, options.bind))


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """ValueError, in one sentence, for options that do not go together. Opens nothing."""
    if not asked(options):
        for name in ("ranks", "topic"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} {getattr(options, name)} goes with --connect, --bind or --server")
        if options.tokenizer is not None and options.replay is None:
            raise ValueError(
                f"--tokenizer {options.tokenizer} goes with a stream: an engine of ours has its own"
            )
        if options.replay is not None and "://" in options.replay:
            raise ValueError(f"--replay {options.replay} is an endpoint: it goes with --connect or --bind")
        return
    given = [name for name in ("connect", "server", "bind") if getattr(options, name) is not None]
    if len(given) > 1:
        raise ValueError(f"--{given[0]} and --{given[1]} name two streams: only one can be followed")
    own = [name for name in _OWN if getattr(options, name, None) != parser.get_default(name)]
    if own:
        option = f"--{own[0].replace('_', '-')}"
        raise ValueError(f"{option} with --{given[0]}: no engine runs here, its server is another's")
    if options.server is not None and options.ranks is not None:
        raise ValueError(f"--ranks {options.ranks} with --server: the server says how many there are")
    if options.steps is not None and not options.export:
        raise ValueError(f"--steps {options.steps} goes with --export only: a page runs until Ctrl-C")
    if any(not path.lower().endswith((".html", ".htm")) for path in options.export):
        raise ValueError("--export of a stream needs a .html file")
    _endpoints(options)


def _endpoints(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Of each rank, where its publisher and its replay are. ValueError for what cannot be one."""
    ranks = options.ranks or 1
    endpoints: list[str] = []
    if options.server is None:
        bind = options.bind is not None
        endpoints = rank_endpoints(options.bind if bind else options.connect, ranks, bind=bind)
    replays = rank_endpoints(options.replay, ranks) if options.replay is not None else []
    return endpoints, replays


def followed(options: argparse.Namespace) -> ServerInfo:
    """What is followed; a server is asked where that is."""
    endpoints, replays = _endpoints(options)
    if options.server is None:
        return ServerInfo(endpoints, replays, options.topic or "", 0)
    found = server_info(options.server)
    if options.replay is not None:
        replays = rank_endpoints(options.replay, len(found.endpoints))
    topic = found.topic if options.topic is None else options.topic
    return ServerInfo(found.endpoints, replays or found.replays, topic, found.block_size, found.notices)


def decoder(source: str | None) -> Decode:
    """The decoder of --tokenizer; ids as numbers where none was given. ValueError: there is none here."""
    if source is None:
        return ids_as_text
    folder = _folder(source)
    decode = decoder_from(folder) if folder else ids_as_text
    if decode is ids_as_text:
        raise ValueError(
            f"--tokenizer {source}: no tokenizer in a folder or in the local cache (nothing is fetched)"
        )
    return decode


def _folder(source: str) -> str:
    """A folder as it is; of a name, its folder in the local cache of Hugging Face, or ""."""
    with contextlib.suppress(OSError, ValueError):
        if Path(source).is_dir():
            return source
    from huggingface_hub import try_to_load_from_cache

    for name in ("tokenizer.json", "tokenizer_config.json"):
        with contextlib.suppress(OSError, ValueError):  # what cannot be a name
            found = try_to_load_from_cache(source, name)
            if isinstance(found, str):
                return str(Path(found).parent)
    return ""
