"""Workers behind a router, and the page of both: `python -m viz.live --workers 4 --route cache-aware`.

The router (minirad/route/router.py) starts servers of ours, routes to them and keeps one recording of what
they hold and where requests went; here that recording has a live page, and a workload whose prompts have
beginnings in common is sent through the router, as a client would: by HTTP. The page comes at once, and shows
the workers coming up.

Only with --workers are starlette, uvicorn and httpx imported.
"""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from minirad import command, workloads
from minirad.model.classroom import corpus
from minirad.route.policies import POLICIES, make_policy
from minirad.workloads import Asked, Session, Turn, Workload
from viz.web.asked import ROUTE
from viz.web.served import example, key_of
from viz.web.settings import Settings
from viz.web.stream import PACE, FleetRun, FlightSource, Json
from viz.words import decoder_from, ids_as_text

if TYPE_CHECKING:
    from minirad.route.router import Router

STEP = 0.1  # seconds that stand for a step of a workload
AT_ONCE = 16  # requests of the workload that may be in flight
PATIENCE = 7.0  # seconds that the first worker that is ready waits for the others, at most
ANSWER = 120.0  # seconds that an answer may take
_ENGINE = (
    "model", "kv_tokens", "page_size", "schedule_policy", "eviction_policy", "host_kv_tokens", "host_write",
    "bigram_keys", "speculative", "draft_tokens", "jump_forward", "disk_dir",
)  # fmt: skip


# ---------------------------------------------------------------------- what is asked for


def workload_of(options: argparse.Namespace) -> Workload:
    """The one that is named, or prompts about some texts. ValueError for programs: they are no requests."""
    if options.workload is None:
        return texts(options.workers)
    found = Settings(options.workload, lora=tuple(options.lora)).load_workload()
    if found.program is not None:
        raise ValueError(
            f"--workload {options.workload} with --workers: a program needs an engine of its own"
        )
    if any(turn.token_ids for session in found.sessions for turn in session.turns[1:]):
        raise ValueError(
            f"--workload {options.workload} with --workers: a client goes on with texts, not with token ids"
        )
    return found


def texts(workers: int, requests: int = 96) -> Workload:
    """Questions about several texts, in bursts; one text is asked about most.

    No worker's pool has room for all of them, but all together have, if each text stays with one.
    """
    chance, count = random.Random("texts"), 2 * workers - 1
    openings = [
        corpus.few_shot_header(corpus.few_shot_examples(6, random.Random(f"text {text}")))
        for text in range(count)
    ]
    sessions = []
    for number in range(requests):
        text = 0 if chance.random() < 0.25 else chance.randrange(count)
        prompt = openings[text] + corpus.few_shot_question(7, chance.choice(workloads._QUESTIONS))
        turn = Turn(prompt, max_new_tokens=chance.randrange(6, 20), ignore_eos=True)
        sessions.append(Session(f"text {text}, question {number}", (turn,), 3 * number - 3 * number % 15))
    title = f"Questions about {count} texts, room for two in each worker"
    return Workload("texts", title, tuple(sessions), kv_tokens=384)


def router_of(options: argparse.Namespace, workload: Workload) -> Router:
    """The router that is asked for, not started. ValueError for what cannot be."""
    from minirad.route.proxy import Limits
    from minirad.route.router import Router
    from minirad.route.router import Settings as RouterSettings

    limits = Limits() if options.max_body is None else Limits(body=options.max_body)
    settings = RouterSettings(
        workers=options.workers, policy=options.route or ROUTE,
        engine=engine_options(options, workload), host=options.host, port=options.serve or 0,
        key=key_of(options) or "", limits=limits, keep=True,
        record=None if options.record is None else Path(options.record),
    )  # fmt: skip
    return Router(settings)


def engine_options(options: argparse.Namespace, workload: Workload) -> list[str]:
    """The workers' engines, as minirad serve is told; the pool is the workload's if none is named."""
    found: list[str] = []
    for name in _ENGINE:
        value = getattr(options, name)
        if name == "kv_tokens" and value is None:
            page = max(options.page_size, 1)  # one that cannot be is refused by the engine's own sentence
            value = max(workload.kv_tokens // page, 1) * page
        if value is True:
            found.append(f"--{name.replace('_', '-')}")
        elif value is not None and value is not False:  # 0 is said, too
            found += [f"--{name.replace('_', '-')}", str(value)]
    if options.disk_dir is not None:
        found += ["--disk-mb", str(options.disk_mb)]
    return [*found, *(word for each in options.lora for word in ("--lora", each))]


# ---------------------------------------------------------------------- a client


class Traffic(threading.Thread):
    """Sends a workload to a server by HTTP, as one client with several connections.

    A client has no tokenizer: it sends texts, which the workload's player knows as their characters' numbers,
    or token ids where the workload has nothing else. sent: requests so far; failures: a sentence each.
    """

    def __init__(self, url: str, key: str, workload: Workload, step: float = STEP) -> None:
        super().__init__(name="traffic", daemon=True)
        self._server, self._key, self._step = urlsplit(url), key, step
        self._player = workloads.Player(workload, lambda text: list(map(ord, text)))
        self._answers: queue.Queue[tuple[Asked, SimpleNamespace]] = queue.Queue()
        self._stopping = threading.Event()
        self.sent, self.failures = 0, list[str]()

    @property
    def done(self) -> bool:
        """Everything was sent and answered, or it was stopped."""
        return not self.is_alive()

    def stop(self) -> None:
        """Sends nothing more."""
        self._stopping.set()

    def run(self) -> None:
        """Until all is answered."""
        clock, open_now = 0, 0
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="client") as pool:
            while not (self._player.done or self._stopping.is_set()):
                due = self._player.next_due
                if not open_now and due is not None:
                    clock = max(clock, due)
                for asked in self._player.due(clock):
                    self.sent += 1
                    self._player.sent(asked, f"T{self.sent}")
                    pool.submit(self._ask, asked, f"T{self.sent}")
                    open_now += 1
                until = time.monotonic() + self._step
                while (left := until - time.monotonic()) > 0:
                    try:
                        asked, output = self._answers.get(timeout=left)
                    except queue.Empty:
                        break
                    open_now -= 1
                    self._player.finished(output, clock)
                clock += 1

    def _ask(self, asked: Asked, name: str) -> None:
        """In a thread of its own; whatever comes of it is put into the queue."""
        output = SimpleNamespace(request_id=name, index=0, token_ids=[], finish_reason="error")
        try:
            choice = self._post(self._body(asked))["choices"][0]
            output.token_ids = list(map(ord, choice["text"]))
            output.finish_reason = choice["finish_reason"]
        except Exception as error:  # a client that fails is no reason for the others to wait
            if not self._stopping.is_set():
                self.failures.append(f"{asked.label} was not answered: {command.one_line(error)}")
        self._answers.put((asked, output))

    def _body(self, asked: Asked) -> Json:
        params, ready = asked.params, asked.session.turns[asked.turn].token_ids
        found: Json = {
            "prompt": list(ready) or "".join(map(chr, asked.prompt)), "max_tokens": params.max_new_tokens,
            "temperature": params.temperature, "n": params.n, "ignore_eos": params.ignore_eos,
        }  # fmt: skip
        if params.stop:
            found["stop"] = list(params.stop)
        if params.seed is not None:
            found["seed"] = params.seed
        if asked.session.extra_key is not None:
            found["cache_salt"] = str(asked.session.extra_key)
        if asked.session.lora:
            found["model"] = asked.session.lora
        return found

    def _post(self, body: Json) -> Any:
        """The answer; RuntimeError with what the server says of an error. One that is full is asked again."""
        until = time.monotonic() + ANSWER
        while True:
            status, wait, data = post(self._server.netloc, "/v1/completions", body, self._key)
            if status == 200:
                return data
            if status != http.HTTPStatus.TOO_MANY_REQUESTS or time.monotonic() + wait > until:
                raise RuntimeError(f"{status} {data['error']['message'] if 'error' in data else ''}")
            if self._stopping.wait(wait):
                raise RuntimeError("it was stopped")


def post(server: str, path: str, body: Json, key: str = "") -> tuple[int, float, Any]:
    """Status, Retry-After in seconds, and the JSON of an answer. OSError where there is none."""
    connection = http.client.HTTPConnection(server, timeout=ANSWER)
    try:
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        after = answer.headers.get("Retry-After", "1")
        return answer.status, float(after) if after.isdigit() else 1.0, json.loads(answer.read() or b"{}")
    except http.client.HTTPException as error:
        raise OSError(f"the server's answer is none: {error!r}") from error
    finally:
        connection.close()


# ---------------------------------------------------------------------- what a page shows


class RoutedSource(FlightSource):
    """A router with its workers, and the page of both. Starts them when it is made.

    router: not started; its settings have `keep`. workload: what is sent as soon as the workers are there.
    ValueError for a port that is taken.
    """

    what, ending = "the router", 20.0

    def __init__(self, router: Router, workload: Workload) -> None:
        from minirad.route.workers import CannotStart

        decode = ids_as_text if router.folder is None else decoder_from(str(router.folder))
        super().__init__("routed", f"{len(router.workers)} workers · {workload.title}", decode)
        self.plain = (CannotStart,)
        self.router, self.workload = router, workload
        self.traffic: Traffic | None = None
        self._first_ready = 0.0
        self._work = ThreadPoolExecutor(1, thread_name_prefix="commands")
        router.start(wait=False)
        assert router.flight is not None
        self._flight = router.flight
        self._begin()

    # ------------------------------------------------------------ in this thread

    def _wait(self) -> None:
        if self.router.wait(PACE / 2):
            self._look()
            raise RuntimeError("the router has ended")
        if self.traffic is None and self._may_begin():
            self._send({})
        traffic = self.traffic
        failures = [] if traffic is None else traffic.failures
        for said in (*failures[-1:], self._broken()):
            if said and said not in self.run_now.notices:
                self.run_now.notices.append(said)

    def _may_begin(self) -> bool:
        """All workers are ready; or some are, and it has been waited long enough for the others.

        Not sooner: what the first ones are sent stays with them, and the others would have nothing to do.
        """
        alive = [worker.alive for worker in self.router.workers]
        if any(alive) and not self._first_ready:
            self._first_ready = time.monotonic()
        return all(alive) or (any(alive) and time.monotonic() - self._first_ready > PATIENCE)

    def _close(self) -> None:
        if self.traffic is not None:
            self.traffic.stop()
        self._work.shutdown(wait=False, cancel_futures=True)
        self.router.stop()

    def _run_of(self, number: int) -> FleetRun:
        run = super()._run_of(number)
        run.page.routed = True
        return run

    @property
    def over(self) -> bool:
        """The workload has been sent and answered, and its last events have come."""
        return self.traffic is not None and self.traffic.done

    # ------------------------------------------------------------ from other threads

    def command(self, name: str, arguments: Json) -> Future[Json]:
        """Another policy, the workload once more, empty trees."""
        known = {"route": self._route, "send": self._send, "flush": self._flush}
        answer: Future[Json] = Future()
        if name not in known:
            answer.set_exception(
                ValueError("workers behind a router are not driven from here: send them requests")
            )
        elif self.error or self.stopping:
            answer.set_exception(ValueError("the router has ended"))
        else:
            answer = self._work.submit(known[name], arguments)
        answer.add_done_callback(lambda _: self._announce())
        return answer

    def _route(self, arguments: Json) -> Json:
        """Another policy decides from now on; it knows nothing of what the one before has sent."""
        router, name = self.router, str(arguments.get("policy"))
        if name == router.policy.name:
            raise ValueError(f"the policy is {name} already")
        router.policy = make_policy(name, router.policy.options)
        return {}

    def _send(self, arguments: Json) -> Json:
        if self.traffic is not None and not self.traffic.done:
            raise ValueError("the workload is still being sent")
        if not any(worker.alive for worker in self.router.workers):
            raise ValueError("no worker is there yet")
        traffic = Traffic(self.router.url, self.router.settings.key, self.workload)
        traffic.start()
        self.traffic = traffic  # not sooner: a thread that has not begun looks like one that is done
        return {"requests": self.workload.requests}

    def _flush(self, arguments: Json) -> Json:
        """Empties the workers' trees; ValueError where one of them is at work."""
        status, _, said = post(urlsplit(self.router.url).netloc, "/flush_cache", {}, self.router.settings.key)
        if status != 200:
            full = [name for name, code in said.items() if code != 200] if isinstance(said, dict) else []
            raise ValueError(f"not emptied, as requests run there: {', '.join(full) or status}")
        return {}

    def status(self) -> Json:
        """As that of a stream; what can be changed, and where requests can be sent."""
        ready = sum(worker.alive for worker in self.router.workers)
        sending = not self.over  # also before all workers are there, when it is about to be
        policy = self.router.policy.name
        route = {"policies": list(POLICIES), "policy": policy, "sending": sending, "ready": ready > 0}
        serving, broken = self._serving(ready, sending), self._broken()
        if broken:  # a notice alone would be gone with the next request
            serving["text"] = f"{broken[0].upper()}{broken[1:]}. {serving['text']}"
        return {**super().status(), "route": route, "serving": serving}

    def _broken(self) -> str:
        """What went wrong first in a learner's policy (lessons/grading/router.py); "" if nothing did."""
        broken: str = getattr(self.router.policy, "broken", "")
        return broken

    def _serving(self, ready: int, sending: bool) -> Json:
        where, key = self.router.url, self.router.settings.key
        if self.error or self.stopping:
            return {"text": "The router has ended.", "example": ""}
        count = len(self.router.workers)
        if self.traffic is None:
            are = (
                f"{ready} of its {count} workers are ready" if ready else f"its {count} workers are starting"
            )
            return {"text": f"The router is at {where}/v1, and {are}.", "example": ""}
        if not ready:
            return {"text": f"The router is at {where}/v1, but no worker is ready.", "example": ""}
        if sending:
            return {"text": f"The workload is sent to the router, {where}/v1", "example": ""}
        return {"text": "All is answered. Ask the router:", "example": example(where, key)}

    def _state(self) -> tuple[str, str]:
        states = [worker.alive for worker in self.router.workers]
        text = f"{sum(states)} of {len(states)} workers ready"
        dead = any(worker.state == "dead" for worker in self.router.workers)
        return text, "on" if all(states) else "error" if dead else "off"


def until_over(source: RoutedSource, steps: int | None) -> None:
    """Waits for what an export shows: so many frames, or the workload's end. Ctrl-C ends it early."""
    try:
        while not source.error and not source.over and (steps is None or len(source.run_now.trace) < steps):
            time.sleep(PACE)
        time.sleep(3 * PACE)  # the last answers' blocks are told a little later
    except KeyboardInterrupt:
        print()
