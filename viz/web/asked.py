"""What may be asked for beside an engine's page, and what of it goes together: another server's stream, a
server over the engine, workers behind a router.

Apart from stream.py, served.py and routed.py, which do it, so that a page without these imports none of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from minirad import command, own_policy
from minirad.server.settings import add_limits, needed

SILENCE = 5.0  # seconds without news of a stream after which an export is written
ROUTES = ("round-robin", "least-loaded", "random", "cache-aware", "events")  # minirad/route/policies.py
ROUTE = "cache-aware"
KV_TOKENS = 2048  # of a server's pool, where nothing else is said: the page shows each slot of it
_OF_AN_ENGINE = (
    "workload", "model", "kv_tokens", "page_size", "schedule_policy", "eviction_policy", "host_kv_tokens",
    "host_write", "disk_dir", "disk_mb", "lora", "bigram_keys", "tp", "compare", "cache", "speed", "paused",
    "publish", "publish_replay", "serve", "speculative", "draft_tokens", "jump_forward",
)  # fmt: skip
_OF_A_REPLAY = ("speed", "paused", "compare", "publish", "publish_replay", "serve")  # or refused elsewhere
_LIMITS = ("api_key", "max_queue", "max_body", "served_model_name")
_WITHOUT_WORKERS = {
    "compare": "two engines are compared without a router",
    "replay": "nothing runs, so there is nothing to route to",
    "cache": "the workers have trees of their own",
    "publish": "each worker publishes already, for the router",
    "connect": "a foreign fleet is watched, not routed: see SGLang's router or Dynamo",
    "server": "a foreign fleet is watched, not routed: see SGLang's router or Dynamo",
    "bind": "a foreign fleet is watched, not routed: see SGLang's router or Dynamo",
    "paused": "workers run at their own pace",
    "speed": "workers run at their own pace",
    "served_model_name": "all workers serve the same model under one name",
    "tp": "each worker computes alone",
    "max_queue": "each worker has its own queue",
}


def join_policies(options: argparse.Namespace) -> None:
    """Eviction policies that are files join those known by name. ValueError where they cannot run."""
    named = f"{options.eviction_policy},{options.compare or ''}"
    if any(map(own_policy.is_file, named.split(","))) and (options.tp > 1 or workers_asked(options)):
        raise ValueError(
            f"{named.strip(',')}: a policy of your own runs in one process, no --tp or --workers"
        )
    options.eviction_policy = own_policy.join_files(options.eviction_policy)
    options.compare = options.compare and own_policy.join_files(options.compare)


# ---------------------------------------------------------------------- another server's stream


def add_stream(parser: argparse.ArgumentParser) -> None:
    """The options of a stream."""
    group = parser.add_argument_group(
        "the cache of another server, from the KV events that it publishes",
        f"with --export: until --steps frames have come, nothing comes for {SILENCE:g} s, or Ctrl-C",
    )
    where = group.add_argument
    where("--connect", metavar="ENDPOINT", help="its publisher, tcp://host:5557; rank 1 has the next port")
    where("--server", metavar="URL", help="ask SGLang's /server_info for endpoints, ranks and topic")
    where("--bind", metavar="ENDPOINT", help="listen here, for a publisher that connects: tcp://*:5557")
    where("--ranks", type=command.positive, metavar="N", help="data-parallel ranks (default: 1)")
    where("--topic", metavar="T", help="only messages whose topic begins with it (default: all)")
    where("--tokenizer", metavar="DIR|ID",
          help="a folder, or a name in the local cache (nothing is fetched): token ids as text")  # fmt: skip
    where("--subscriber", metavar="FILE.py", help="lesson 15's exercise.py as what follows the stream")


def stream_asked(options: argparse.Namespace) -> bool:
    """A stream is to be followed."""
    return any(given is not None for given in (options.connect, options.server, options.bind))


def check_stream(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """ValueError, in one sentence, for options that do not go together. Opens nothing."""
    if not stream_asked(options):
        for name in ("ranks", "topic", "subscriber"):
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
    own = next(_given(options, parser, _OF_AN_ENGINE), None)
    if own is not None:
        option = f"--{own.replace('_', '-')}"
        raise ValueError(f"{option} with --{given[0]}: no engine runs here, its server is another's")
    if options.server is not None and options.ranks is not None:
        raise ValueError(f"--ranks {options.ranks} with --server: the server says how many there are")
    if options.steps is not None and not options.export:
        raise ValueError(f"--steps {options.steps} goes with --export only: a page runs until Ctrl-C")
    endpoints_of(options)


def check_replay(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """ValueError for options of an engine beside a recording, which is shown as it was."""
    if options.replay is None:
        return
    for name in _given(options, parser, (*_OF_AN_ENGINE, "steps")):
        value = getattr(options, name)
        option = f"--{name.replace('_', '-')}{f' {value}' if type(value) in (int, str) else ''}"
        if name not in _OF_A_REPLAY:
            raise ValueError(f"{option} with --replay {options.replay}: nothing runs, it is shown as it was")


def _given(
    options: argparse.Namespace, parser: argparse.ArgumentParser, names: Iterable[str]
) -> Iterator[str]:
    """Those options that are not as they are by default."""
    return (name for name in names if getattr(options, name, None) != parser.get_default(name))


def endpoints_of(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Of each rank, where its publisher and its replay are. ValueError for what cannot be one."""
    from minirad.fleet.endpoints import rank_endpoints

    ranks = options.ranks or 1
    endpoints: list[str] = []
    if options.server is None:
        bind = options.bind is not None
        endpoints = rank_endpoints(options.bind if bind else options.connect, ranks, bind=bind)
    replays = rank_endpoints(options.replay, ranks) if options.replay is not None else []
    return endpoints, replays


# ---------------------------------------------------------------------- a server over the engine


def port(text: str) -> int:
    """An option's port; 0: any free one."""
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, not {number}")
    return number


def add_server(parser: argparse.ArgumentParser) -> None:
    """The options of a server beside the page."""
    group = parser.add_argument_group(
        "a server with OpenAI's API, over the page's engine or over its workers"
    )
    help_ = "serve there, as minirad serve does (0: any free port)"
    group.add_argument("--serve", type=port, metavar="PORT", help=help_)
    add_limits(group)


def check_server(options: argparse.Namespace) -> None:
    """ValueError, in one sentence, for options that do not go together. Opens nothing."""
    given = [name for name in _LIMITS if getattr(options, name) is not None]
    if options.serve is None:
        if given and options.workers is None:
            raise ValueError(
                f"--{given[0].replace('_', '-')} {getattr(options, given[0])} goes with --serve only"
            )
        return
    if options.serve and options.serve == options.port:
        raise ValueError(f"--serve {options.serve} and --port {options.port}: page and server need two ports")
    if options.workers is not None:
        return
    why = {
        "compare": "two engines run, and a server has one",
        "replay": "nothing runs, so nothing can be served",
        "export": "nobody can ask a run that is over at once",
    }
    if getattr(options, "tp", 1) > 1:
        raise ValueError(
            f"--serve {options.serve} with --tp {options.tp}: a page of ranks serves nobody; "
            "torchrun ... -m minirad serve --tp does"
        )
    for name, reason in why.items():
        if getattr(options, name):
            raise ValueError(f"--serve {options.serve} with --{name}: {reason}")
    needed("--serve")


# ---------------------------------------------------------------------- workers behind a router


def add_workers(parser: argparse.ArgumentParser) -> None:
    """The options of a router and its workers."""
    group = parser.add_argument_group("several engines of ours behind a router, each a process of its own")
    where = group.add_argument
    where("--workers", type=command.positive, metavar="N", help="so many; --serve PORT is then the router's")
    where("--route", metavar="POLICY|FILE.py",
          help=f"{', '.join(ROUTES)}, or lesson 12's exercise.py (default: {ROUTE})")  # fmt: skip


def workers_asked(options: argparse.Namespace) -> bool:
    """Workers behind a router are to be shown."""
    return options.workers is not None


def check_workers(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """ValueError, in one sentence, for options that do not go together. Starts nothing."""
    if not workers_asked(options):
        if options.route is not None:
            raise ValueError(f"--route {options.route} goes with --workers: one engine has nobody to choose")
        return
    for name, reason in _WITHOUT_WORKERS.items():
        if getattr(options, name, None) not in (None, parser.get_default(name)):
            raise ValueError(f"--workers {options.workers} with --{name.replace('_', '-')}: {reason}")
    from minirad.route.policies import make_policy

    if options.route is not None and options.route.endswith(".py"):
        from lessons.grading.router import add_policy

        add_policy(options.route)
    make_policy(ROUTE if options.route is None else options.route)
    if options.steps is not None and not options.export:
        raise ValueError(f"--steps {options.steps} goes with --export only: a page runs until Ctrl-C")
    needed("--workers")
