"""The live page: `python -m viz.live` runs an engine and shows every step of it in the browser.

    python -m viz.live                               a mixed workload on the classroom Llama
    python -m viz.live --workload agents --kv-tokens 600 --eviction-policy lfu
    python -m viz.live --host-kv-tokens 2000 --host-write write_back      with a second tier in host memory
    python -m viz.live --lora capitals --lora oneword      the same questions under two adapters and none
    python -m viz.live --host-kv-tokens 2000 --disk-dir DIR      a third tier, which outlives the run
    python -m viz.live --speculative eagle           drafts: guessed, verified in one pass, rolled back
    python -m viz.live --jump-forward                records as JSON: what a grammar forces is not sampled
    python -m viz.live --compare lpm,fcfs            two engines side by side; so do two eviction policies
    python -m viz.live --cache lessons/02_radix_tree/exercise.py      a learner's own tree
    python -m viz.live --speculative ngram --cache lessons/13_isolation_and_drafts/exercise.py      and drafts
    python -m viz.live --eviction-policy lessons/14_capacity/exercise.py      a learner's own policy
    python -m viz.live --tp 2                        one engine on two ranks: their trees, what rank 0 sends
    python -m viz.live --replay run.jsonl            a recording instead of an engine
    python -m viz.live --publish tcp://127.0.0.1:5557      tells routers what the tree holds, as SGLang does
    python -m viz.live --export run.html             no server: run to the end, write one file, leave
    python -m viz.live --connect tcp://host:5557     the cache of another server (viz/web/stream.py)
    python -m viz.live --connect tcp://host:5557 --subscriber lessons/15_your_own_server/exercise.py
    python -m viz.live --serve 8000                  OpenAI's API over the same engine (viz/web/served.py)
    python -m viz.live --workers 4 --route random    several engines behind a router (viz/web/routed.py)
    python -m viz.live --workers 3 --route lessons/12_many_workers/exercise.py      a learner's own router

This is the command line; the parts are in viz/web. Three kinds of threads: ONE drives the engine (driver.py;
all others put commands into its queue), one serves (server.py lets requests in, routes.py answers them) and
only reads what was recorded, and the main thread waits for Ctrl-C.

Listens on 127.0.0.1 alone, unless --host says otherwise. Behind a forwarded port or a proxy on localhost
nothing has to be said; behind one with a name of its own:

    python -m viz.live --allow-host hub.example.org

Does not draw (viz/draw), count (viz/view) or lay out (static/); the engine does not know of it.
"""

from __future__ import annotations

from minirad import command

if __name__ == "__main__":
    command.end_quietly("python -m viz.live")  # before what takes its time to import
    import gc

    gc.set_threshold(50_000, 20, 100)  # imports make objects that stay: a search among them finds nothing

import argparse
import os
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from minirad import workloads
from minirad.cache.eviction import POLICIES as EVICTION_POLICIES
from minirad.config import HOST_WRITE, SPECULATIVE
from minirad.errors import InvariantError, RankLost
from minirad.model.load import resolve_model
from minirad.observe.recorder import Recorder
from minirad.observe.snapshot import is_fleet
from minirad.rooms import room
from minirad.schedule.policies import POLICIES as SCHEDULE_POLICIES
from viz.draw.dot import DotError
from viz.web import asked, launch
from viz.web.commands import COMMANDS, FASTEST, make_run
from viz.web.compare import Shown
from viz.web.driver import Driver
from viz.web.routes import rules
from viz.web.runs import Replay, Run
from viz.web.server import HOST, LOOPBACK, Gate, Server
from viz.web.settings import DISK_MB, Settings, telling_workload
from viz.words import decoder_from

if TYPE_CHECKING:
    from lessons.grading.subscriber import Subscriber
    from minirad.fleet.publish import Publisher
    from viz.web.ranks import Ranks
    from viz.web.stream import FlightSource

__all__ = ["COMMANDS", "Driver", "Live", "Replay", "Run", "Settings", "main", "make_run"]

PORT = 8321


# ---------------------------------------------------------------------- command line


@dataclass(slots=True)
class Live:
    """Driver and server together, for tests and notebooks: `with Live(...) as live: live.url`.

    host: the address to listen on; allowed: further names by which a browser may know it (viz/web/server.py).
    """

    driver: Driver | FlightSource
    port: int = 0
    host: str = HOST
    allowed: tuple[str, ...] = ()
    server: Server = field(init=False)

    def __enter__(self) -> Live:
        self.server = Server(rules(self.driver), self.port, self.host, self.allowed)
        self.server.start()
        self.driver.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.driver.stop()
        self.driver.join(timeout=self.driver.ending)
        self.server.stop()

    @property
    def url(self) -> str:
        return self.server.url


def _pace(text: str) -> float:
    speed = float(text)
    if not 0 <= speed <= FASTEST:  # false for nan as well
        raise argparse.ArgumentTypeError(f"steps per second are from 0 (as fast as it goes) to {FASTEST:.0f}")
    return speed


def _add_more(parser: argparse.ArgumentParser) -> None:
    """What an engine may have besides: tiers, adapters, drafts."""
    parser.add_argument("--host-kv-tokens", type=int, default=0, metavar="N",
                        help="size of a second tier in host memory (default: none)")  # fmt: skip
    parser.add_argument("--host-write", default="write_through", choices=HOST_WRITE,
                        help="when copies are made (default: write_through)")  # fmt: skip
    parser.add_argument("--disk-dir", metavar="DIR", help="a third tier: KV as files in this folder")
    parser.add_argument("--disk-mb", type=command.positive, default=DISK_MB, metavar="N",
                        help="most MB in that folder (default: %(default)s)")  # fmt: skip
    parser.add_argument("--lora", metavar="NAME=DIR", action="append", default=[],
                        help="an adapter (PEFT's format); a shipped one by its name; repeatable")  # fmt: skip
    parser.add_argument("--bigram-keys", action="store_true", default=None,
                        help="a tree of pairs of tokens (with --speculative eagle it is one)")  # fmt: skip
    parser.add_argument(
        "--speculative", choices=SPECULATIVE, help="draft tokens, and verify them in one pass"
    )
    parser.add_argument("--draft-tokens", type=command.positive, metavar="N",
                        help="drafted at most before a pass (default: 4)")  # fmt: skip
    parser.add_argument("--jump-forward", action="store_true",
                        help="what a grammar forces is computed in one pass, not sampled")  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = command.Parser(prog="python -m viz.live", description="Watch RadixAttention at work.")
    names = ", ".join(workloads.WORKLOADS)
    parser.add_argument("--workload", metavar="NAME|FILE",
                        help=f"{names}; or a file (default: one that shows what is asked for)")  # fmt: skip
    parser.add_argument("--model", help="default: the classroom Llama that comes with minirad")
    parser.add_argument("--kv-tokens", type=int, help="size of the KV pool (default: the workload's)")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--schedule-policy", default="lpm", choices=list(SCHEDULE_POLICIES))
    parser.add_argument("--eviction-policy", default="lru", metavar="NAME|FILE.py",
                        help=f"{', '.join(EVICTION_POLICIES)}, or a file's victim_key")  # fmt: skip
    _add_more(parser)
    parser.add_argument("--tp", type=command.positive, default=1, metavar="N",
                        help="tensor parallel on N ranks, started here unless by torchrun")  # fmt: skip
    parser.add_argument("--compare", metavar="A,B",
                        help="two schedule or two eviction policies, side by side")  # fmt: skip
    parser.add_argument(
        "--speed", type=_pace, help="steps per second; 0: as fast as it goes (default: 3; 0 with --serve)"
    )
    parser.add_argument("--paused", action="store_true", help="wait for the page to press play")
    parser.add_argument("--port", type=asked.port, default=PORT, help="any free one if it is taken")
    parser.add_argument("--host", default=HOST, metavar="ADDRESS",
                        help=f"address to listen on (default: {HOST}, this machine alone)")  # fmt: skip
    parser.add_argument("--allow-host", metavar="NAME[:PORT]", action="append", default=[],
                        help="a name under which a proxy shows the page, e.g. hub.example.org")  # fmt: skip
    parser.add_argument("--no-open", action="store_true", help="do not open the browser")
    parser.add_argument("--cache", metavar="FILE.py", action="append", default=[],
                        help="a lesson's exercise.py as the tree (13: keys, drafts), or several")  # fmt: skip
    parser.add_argument(
        "--record", metavar="FILE.jsonl", help="write the recording as it grows, into a new file"
    )
    parser.add_argument("--replay", metavar="FILE.jsonl|ENDPOINT",
                        help="show a recording instead of an engine; with --connect: where the publisher "
                             "answers for what was before, tcp://host:5558")  # fmt: skip
    parser.add_argument("--export", metavar="FILE.html|FILE.gif", action="append", default=[],
                        help="run to the end without a server and write a file")  # fmt: skip
    parser.add_argument("--publish", metavar="tcp://HOST:PORT",
                        help="publish KV events there, as SGLang and vLLM do for their routers")  # fmt: skip
    parser.add_argument("--publish-replay", metavar="tcp://HOST:PORT",
                        help="where missed ones are asked for (default: the port after it)")  # fmt: skip
    parser.add_argument("--steps", type=command.positive, help="with --export: steps at most (default: 2000)")
    asked.add_stream(parser)
    asked.add_server(parser)
    asked.add_workers(parser)
    return parser


def settings_of(options: argparse.Namespace) -> Settings:
    """What the command line asks for; without --workload one on which that shows within seconds."""
    workload = options.workload
    if workload is None:
        workload = telling_workload(
            options.compare, options.host_kv_tokens, options.speculative, options.lora, options.jump_forward
        )
    kv_tokens = options.kv_tokens
    if options.serve is not None and options.workload is None:
        workload, kv_tokens = "none", asked.KV_TOKENS if kv_tokens is None else kv_tokens
    return Settings(
        workload, options.model, kv_tokens, options.page_size, options.schedule_policy,
        options.eviction_policy, record=options.record, compare=options.compare,
        cache=tuple(options.cache), host_kv_tokens=options.host_kv_tokens, host_write=options.host_write,
        bigram_keys=options.bigram_keys, tp=options.tp,
        speculative=options.speculative, draft_tokens=options.draft_tokens or 4,
        jump_forward=options.jump_forward,
        lora=tuple(options.lora), disk_dir=options.disk_dir, disk_mb=options.disk_mb,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    return command.run(parser.prog, lambda: _main(options, parser), DotError)


def _main(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if options.tp > 1 and launch.my_rank():
        return launch.follow(options.model)
    asked.check_stream(options, parser)
    asked.check_server(options)
    if options.draft_tokens is not None and options.speculative is None:
        raise ValueError(f"--draft-tokens {options.draft_tokens} goes with --speculative")
    asked.check_workers(options, parser)
    asked.join_policies(options)
    if asked.workers_asked(options):
        return _route(options)
    if asked.stream_asked(options):
        return _follow(options)
    if options.tp > 1:
        launch.check(options)
    asked.check_replay(options, parser)
    settings = settings_of(options)
    config = settings.config(settings.load_workload().kv_tokens)
    if settings.workload == "records":
        _check_grammar()
    settings.students_tree()
    code = settings.students_code()
    if code is not None:
        print(code.note(config), flush=True)
    if settings.compare is not None:
        settings.sides()
        if options.replay:
            raise ValueError("--compare runs two engines, --replay none: only one of them can be had")
    Gate(options.host, tuple(options.allow_host))
    model = resolve_model(settings.model)
    if config.lora:
        room("adapters.where").check(config.lora)
    _check_written(options, settings)
    _check_published(options)
    replay = _replay(options.replay, options.tokenizer) if options.replay is not None else None
    if options.steps is not None and not options.export:
        raise ValueError(f"--steps {options.steps} goes with --export only: a page runs until Ctrl-C")
    if options.tp > 1 and launch.my_rank() is None:
        return launch.start(options.tp, model, options.arguments)
    if options.export:
        return _export(options, settings, replay)
    return _serve(options, settings, replay)


def _check_grammar() -> None:
    """ValueError, saying what to install, where JSON cannot be forced: the page would stay empty."""
    from minirad.grammar import check_installed

    try:
        check_installed("the workload records (shown with --jump-forward)")
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error


def _check_written(options: argparse.Namespace, settings: Settings) -> None:
    """ValueError for a file that may not be written: before anything is loaded or run."""
    reads = [*settings.cache, *(path for path in (settings.workload, options.replay) if path)]
    for path in options.export:
        command.may_be_written("--export", path, (".html", ".gif", ".htm"), reads)
    if settings.record is None:
        return
    if options.replay is not None:
        raise ValueError(f"--record {settings.record} with --replay: nothing runs, so nothing is recorded")
    sides = (settings,) if settings.compare is None else settings.sides()[1]
    files = [side.record or "" for side in sides]
    if settings.tp > 1:
        from viz.web.ranks import rank_path

        files += [str(rank_path(files[0], rank)) for rank in range(1, settings.tp)]
    for file in files:
        command.may_be_written("--record", file, (".jsonl",), reads, keep=True)


def _check_published(options: argparse.Namespace) -> None:
    """ValueError for what publishes no events, or has more than one engine to publish."""
    if options.publish is None:
        if options.publish_replay is not None:
            raise ValueError(f"--publish-replay {options.publish_replay} goes with --publish only")
        return
    why = {
        "--compare": "two engines run, and a publisher tells of one",
        "--replay": "nothing runs, so nothing is published",
        "--export": "nobody can follow a run that is over at once",
        "--cache": "a tree of your own tells no events",
    }
    for name, reason in why.items():
        if getattr(options, name[2:]):
            raise ValueError(f"--publish {options.publish} with {name}: {reason}")


def _publisher(options: argparse.Namespace) -> Publisher | None:
    """Where the engines of this page publish, one after the other; says where that is."""
    if options.publish is None:
        return None
    from minirad.fleet.publish import Publisher, beside

    replay = beside(options.publish) if options.publish_replay is None else options.publish_replay
    publisher = Publisher(None, options.publish, replay)
    print(f"publishing KV events: {publisher.endpoint}   (missed ones: {publisher.replay})", flush=True)
    return publisher


def _replay(path: str, tokenizer: str | None = None) -> Replay | Ranks:
    from viz.web.ranks import Ranks, recorded_ranks
    from viz.web.stream import tokenizer as folder_of

    recording = Recorder.load(path)
    if tokenizer is not None and not is_fleet(recording.header["start"]):
        raise ValueError(f"--tokenizer {tokenizer} with {path}: a recording of our own names its own")
    folder = folder_of(tokenizer) if tokenizer is not None else None
    decode = decoder_from(folder) if folder is not None else None
    if recording.missing:
        print(f"python -m viz.live: {recording.missing}", file=sys.stderr)
    replay = Replay(recording, Path(path).name, decode, folder)
    others, notices = recorded_ranks(path, recording)
    replay.notices += notices
    for notice in notices:
        print(f"python -m viz.live: {notice}", file=sys.stderr)
    return Ranks(replay, others) if others else replay


def _follow(options: argparse.Namespace) -> int:
    """The page, or the export, of another server's stream."""
    from viz.web import stream

    _check_flight(options)
    tokenizer = stream.tokenizer(options.tokenizer) if options.tokenizer is not None else None
    subscriber = _subscriber(options.subscriber)
    info = stream.followed(options)
    for notice in info.notices:
        print(f"python -m viz.live: {command.one_line(notice)}", file=sys.stderr)
    source = stream.FleetSource(info, tokenizer, options.record, options.bind is not None, subscriber)
    if not options.export:
        return _serve_page(source, options, source.what if subscriber is not None else "")
    return _export_flight(source, options, lambda: stream.until_told(source, options.steps))


def _subscriber(path: str | None) -> Subscriber | None:
    """A learner's file as what follows a stream, and one line on it. ValueError: nothing in it runs."""
    if path is None:
        return None
    from lessons.grading.subscriber import student_subscriber

    found = student_subscriber(path)
    print(found.line, flush=True)
    return found


def _route(options: argparse.Namespace) -> int:
    """The page, or the export, of workers behind a router."""
    from viz.web import routed

    _check_flight(options)
    workload = routed.workload_of(options)
    source = routed.RoutedSource(routed.router_of(options, workload), workload)
    print(f"minirad router: {source.router.url}/v1   ({options.workers} workers are starting)", flush=True)
    if not options.export:
        return _serve_page(source, options)
    return _export_flight(source, options, lambda: routed.until_over(source, options.steps))


def _check_flight(options: argparse.Namespace) -> None:
    """ValueError for files that may not be written, and a host that is none: before anything is opened."""
    for path in options.export:
        command.may_be_written("--export", path, (".html", ".gif", ".htm"))
    if options.record is not None:
        command.may_be_written("--record", options.record, (".jsonl",), keep=True)
    Gate(options.host, tuple(options.allow_host))


def _export_flight(source: FlightSource, options: argparse.Namespace, wait: Callable[[], None]) -> int:
    """Files of what a source has shown when `wait` returns."""
    from viz.web.export import export

    source.start()
    try:
        wait()
    finally:
        source.stop()
        source.join(timeout=max(5.0, source.ending))
    for path in options.export:
        size = export(source.run_now.page, path, title=source.run_now.workload.title)
        print(f"{path}: {len(source.run_now.trace)} steps, {size / 1000:.0f} KB")
    if source.error:
        print(f"{source.what} stopped: {source.error}", file=sys.stderr)
    return 1 if source.error else 0


def _serve(options: argparse.Namespace, settings: Settings, replay: Replay | Ranks | None) -> int:
    publisher = _publisher(options)
    with publisher or nullcontext():
        driver = _driver(options, settings, replay, publisher)
        driver.first = partial(_one_thread, settings)  # imports torch, while the browser opens the page
        if publisher is not None:
            driver.begun = lambda run: publisher.attach(run.alone.engine) if run.alone else None
        with launch.ranks_of(driver):
            return _serve_page(driver, options, settings.students and f"your {settings.students}")


def _driver(
    options: argparse.Namespace, settings: Settings, replay: Shown | None, publisher: Publisher | None
) -> Driver:
    """The engine's thread, of a server as well where one is asked for."""
    if options.serve is None:
        speed = 3.0 if options.speed is None else options.speed
        return Driver(settings, speed, paused=options.paused, replay=replay)
    from viz.web import served

    told = served.served_of(options)
    front = served.Front(options.serve, options.host)
    print(f"minirad server: {front.url}/v1", flush=True)
    return served.ServedDriver(
        settings, options.speed or 0.0, front, told, paused=options.paused, publisher=publisher
    )


def _serve_page(driver: Driver | FlightSource, options: argparse.Namespace, theirs: str = "") -> int:
    """Until Ctrl-C. theirs: what of it a learner wrote ("your tree"); the page shows how it broke."""
    what = driver.what
    with Live(driver, options.port, options.host, tuple(options.allow_host)) as live:
        print(f"minirad live: {live.url}   (Ctrl-C ends it)", flush=True)
        if live.server.address not in LOOPBACK:
            print(
                f"every machine that reaches {live.server.address} can drive {what}: it has no password",
                flush=True,
            )
        if not options.no_open:
            threading.Thread(target=webbrowser.open, args=(live.url,), daemon=True).start()
        told = ""
        try:
            while not driver.error:
                time.sleep(0.1)
                told = _tell_refusals(driver.run_now, told)
            driver.join(driver.ending)  # its last frame comes behind the error: pages see it before they end
            if theirs and not (isinstance(driver, Driver) and driver.mistake):
                print(f"{theirs} broke: {driver.error}   (see the page; Ctrl-C ends it)", flush=True)
                threading.Event().wait()
        except KeyboardInterrupt:
            print()
    if isinstance(driver, Driver) and driver.mistake is not None:
        raise driver.mistake
    if driver.error:
        print(f"{what} stopped: {driver.error}", file=sys.stderr)
    return 1 if driver.error else 0


def _tell_refusals(run: Shown | None, told: str) -> str:
    """One line once a run is over, and again where a later one ends otherwise; what was told."""
    refused = run.refused if run is not None and run.idle else ""
    if refused and refused != told:
        print(refused, file=sys.stderr, flush=True)
    return refused or told


def _one_thread(settings: Settings) -> None:
    """A tiny model is quicker on one thread than on several that wait for one another."""
    if settings.model is None:
        import torch

        torch.set_num_threads(1)


def _export(options: argparse.Namespace, settings: Settings, replay: Replay | Ranks | None) -> int:
    from viz.web.export import export
    from viz.web.ranks import Ranks

    broken = ""
    run: Shown
    if replay is not None:
        run = replay
    else:
        _one_thread(settings)
        run = make_run(1, settings)
        broken = _run_out(run, 2000 if options.steps is None else options.steps, settings)
        if settings.tp > 1:
            launch.leave()
    for path in options.export:
        size = export(run.page, path, title=run.workload.title, note=run.missing)
        print(f"{path}: {len(run.trace)} steps, {size / 1000:.0f} KB")
    _tell_refusals(run, "")
    if broken:
        whose = f"your {settings.students} broke" if settings.students else "the engine stopped"
        print(f"{whose}: {broken}", file=sys.stderr)
    differ = isinstance(run, Ranks) and bool(run.page.broken)
    return 1 if broken or differ or run.served_none else 0


def _run_out(run: Shown, steps: int, settings: Settings) -> str:
    """Runs to the end. What broke a student's part, or lost a rank, is said, and shown by the last frame."""
    broken = ""
    try:
        while not run.idle and run.clock < steps:
            run.advance()
    except InvariantError as error:
        if not settings.students:
            raise
        broken = str(error)
    except RankLost as error:
        broken = str(error)
    run.close(broken=bool(broken))
    return broken


def _leave(code: int) -> NoReturn:
    """Ends the process at once: the interpreter's own tidy end waits for whatever import or forward
    pass the engine's thread is in. Nothing is lost, recordings are flushed with every frame."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
