"""All commands of the project, and how each ends: a caller's mistake is one line on stderr and exit code 2.

A pipe that was closed (`| head -1`) ends a command quietly, Ctrl-C with one line and code 130, also while it
imports what it needs. So do SIGTERM and a terminal that is closed, with 143 and 129: what is held is written
first. Imports nothing that takes time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

LONGEST = 600  # characters of a message: what was typed may be long
INTERRUPTED = 130

# What follows `python -m`, and what it does. The one list: parsers take their sentences from it.
COMMANDS: dict[str, str] = {
    "minirad generate": "continue prompts and show what the cache saved",
    "minirad chat": "talk in the terminal; shows hits per turn",
    "minirad serve": "the OpenAI API over one engine, with metrics and KV events",
    "minirad route": "the same API over several servers, which are started behind a cache-aware router",
    "minirad simulate": "hit rates of a workload or trace file without a model; --diff compares two prompts",
    "minirad kv-events": "what a foreign server's cache holds, rebuilt from its KV events",
    "minirad why": "why a request of a log missed the cache, what each cause cost, and what to change",
    "minirad theorem": "Theorem 3.1 of the SGLang paper, run, and what happens without its assumptions",
    "minirad info": "model, configuration, pool and backend",
    "minirad.evidence": "the paper's programs, each kind once: right answers, hits, seconds",
    "minirad.figure3": "the nine steps of the SGLang paper's figure, in the terminal",
    "viz.live": "the live page: tree and pool as they change, forwards and backwards",
    "viz.figure3": "the nine steps as a picture",
    "viz.gallery": "recorded runs as pages that open from any disk",
    "viz.measure": "how long a view of a tree of 100,000 nodes takes, page and notebook",
    "viz.roofline": "what a decode step is made of, drawn from a measurement",
    "viz.evidence": "what each part of the engine is worth, beside the paper's, drawn from a measurement",
    "lessons": "the course: what is solved so far, and the commands below",
    "lessons list": "the lessons and what is solved (what you get without a command)",
    "lessons grade": "grade lessons; the exit code says whether all passed",
    "lessons collect": "grade a folder of submissions, one folder per student",
    "lessons merge": "one table of many that `collect` has written",
    "lessons classroom": "write a repository for students: no solutions, no hidden cases",
    "lessons gradescope": "write the autograder for Gradescope",
    "minirad bench radix": "the radix tree alone: seconds per workload, scaling",
    "minirad bench engine": "tokens per second beside transformers or llama.cpp, and what the tree costs",
    "minirad bench hooks": "what events and the recorder cost",
    "minirad bench parity": "greedy output against transformers, token for token",
    "minirad bench schedule": "ordering a queue, what a bound on waiting costs, retractions by estimate",
    "minirad bench eviction": "hit rate of every eviction policy on every workload, without a model",
    "minirad bench learn": "an eviction policy tuned on a trace's first half, judged on the second",
    "minirad bench tiers": "what a second tier in host memory saves and what it costs",
    "minirad bench disk": "what a disk tier saves an engine that is started anew",
    "minirad bench speculative": "tokens a forward pass, and time, with drafts and without",
    "minirad bench adapters": "what several adapters in one batch cost beside one alone, and none",
    "minirad bench programs": "the paper's workloads as programs, each part switched off in turn",
    "minirad bench fleet": "a production server's stream of KV events: does its picture keep up?",
    "minirad bench serve": "requests that come when they come: times to tokens, and what HTTP costs",
    "minirad bench quant": "what a CPU multiplies fastest by, and where the time of a decode step goes",
    "minirad bench gpu": "all that a run on a GPU should show, as one table",
    "minirad bench kernels": "what a decode step takes without the engine (needs a GPU)",
    "minirad.model.classroom.corpus": "samples of the texts that the classroom Llama learns from",
    "minirad.model.classroom.train": "train the classroom Llama anew",
    "minirad.model.classroom.score": "examine a classroom Llama: what it knows, and what it must",
    "minirad.model.classroom.train_adapters": "train the classroom Llama's adapters anew",
    "minirad.model.classroom.score_adapters": "examine the adapters: answers, and their looks",
}


def below(words: str) -> dict[str, str]:
    """The commands one word longer, by that word: those of "minirad bench" are radix, engine, ..."""
    found = {name.removeprefix(f"{words} "): about for name, about in COMMANDS.items()}
    return {word: about for word, about in found.items() if " " not in word and f"{words} {word}" in COMMANDS}


def listing() -> str:
    """All commands, a line each, to be read."""
    width = max(len(name) for name in COMMANDS if len(name) <= 30)  # what is longer moves its sentence
    lines = [f"  {name:{width}}  {about}" for name, about in COMMANDS.items()]
    return "\n".join(["all commands, each after `python -m` and with a --help of its own:", *lines])


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong with the command line, and leaves with 2."""
        self.exit(2, f"{self.prog}: {one_line(message)} (--help lists the options)\n")


def positive(text: str) -> int:
    """An option's whole number, 1 or more."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number < 1 << 31:
        raise argparse.ArgumentTypeError(f"a whole number, 1 or more, is needed, not {one_line(text)!r}")
    return number


def some_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """What reads an option's names with commas between them: in their order, each once."""
    names = tuple(known)

    def read(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in found:
            if name not in names:
                raise argparse.ArgumentTypeError(f"unknown {one_line(name)!r}; known: {', '.join(names)}")
        return found

    return read


def above_zero(text: str) -> float:
    """An option's number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0 is needed, not {one_line(text)!r}")
    return number


def may_be_written(
    option: str, path: str | Path, endings: Sequence[str], reads: Iterable[str | Path] = (),
    *, keep: bool = False,
) -> None:  # fmt: skip
    """ValueError, in one sentence, if something would be lost by writing the file that an option names.

    endings: such as ".html"; any other name may be a file of another kind. reads: what the command reads.
    keep: what is in the file already stays.
    """
    file = Path(path)
    if file.suffix.lower() not in endings:
        raise ValueError(f"{option}: a file's name must end in {' or '.join(endings)}, not {str(path)!r}")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{option}: there is no folder {file.parent}")
    if not file.exists():
        return
    if any(Path(each).exists() and file.samefile(each) for each in reads):
        raise ValueError(f"{option}: {path} is read by this command and cannot be written, name another file")
    if keep and file.is_file() and file.stat().st_size:
        raise ValueError(f"{option}: {path} exists already, name another file or delete it")


def figure_writer(name: str, option: str) -> Callable[[Any, Path], Any]:
    """What draws a command's reports. A package beside this one announces it; none is imported here."""
    from importlib.metadata import entry_points

    for each in entry_points(group="minirad.figures", name=name):
        draw: Callable[[Any, Path], Any] = each.load()
        return draw
    raise ValueError(f"{option}: nothing that can draw it is installed: install the project with pip")


def one_line(error: object) -> str:
    """What went wrong as one line of bounded length."""
    text = " ".join(str(error).split()) or ("" if isinstance(error, str) else type(error).__name__)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


@contextlib.contextmanager
def named(path: str | Path) -> Iterator[None]:
    """While this file is written: an OSError that names no file (a full disk) names it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_whole(path: str | Path, text: str, errors: str = "strict") -> None:
    """Writes a text to a file; if that fails, what was there before stays. An OSError names the file.

    It stays where a new file may take its place. Else it is written over: in a folder that is not ours, or
    where the file is another user's, has other names, or is none (a pipe).
    """
    data = text.encode("utf-8", errors)
    try:
        if not _replaced(Path(os.path.realpath(path)), data):  # a link stays one
            Path(path).write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replaced(file: Path, data: bytes) -> bool:
    """Whether a new file with this data has taken the old one's place."""
    if file.is_symlink():  # to itself
        return False
    old = file.stat() if file.exists() else None
    if old is not None:
        if not stat.S_ISREG(old.st_mode) or old.st_nlink > 1:
            return False
        file.open("r+b").close()  # one that is protected is not replaced either
    half = file.with_name(f".minirad-{os.getpid()}.half")
    try:
        made = half.open("wb")
    except OSError:  # the file itself says what is wrong, if something is
        return False
    try:
        with made:
            made.write(data)
        if old is not None:
            new = half.stat()
            if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
                return False
            half.chmod(stat.S_IMODE(old.st_mode))
        try:
            half.replace(file)
        except OSError:  # such as of a file that is mounted alone
            return False
        return True
    finally:
        with contextlib.suppress(OSError):
            half.unlink()


class _Output:
    """A stream whose failures name it; in all else the stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> Any:
        with named("standard output"):
            return self._stream.write(text)

    def flush(self) -> None:
        with named("standard output"):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def output_named() -> Iterator[None]:
    """What is printed is written in the end; an OSError of the standard output says whose it is.

    ValueError where it is closed (`>&-`): nothing is computed to be lost.
    """
    if sys.stdout is None:
        raise ValueError("the standard output is closed; if it is not wanted, send it to /dev/null")
    if sys.stderr is None:  # print would take the standard output instead
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    output: Any = _Output(sys.stdout)
    with contextlib.redirect_stdout(output):
        yield
        output.flush()


def run(name: str, work: Callable[[], int], *mistakes: type[Exception]) -> int:
    """Does the work of a command and returns its exit code. mistakes: further errors of the caller's."""
    interruptible()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a console that cannot show every character
    told: list[int] = []
    try:
        with output_named(), told_to_end(told):
            return work()
    except BrokenPipeError:  # `| head` has seen enough
        forget_output()
        return 0
    except KeyboardInterrupt:
        return interrupted(name, told)
    except MemoryError:
        return _mistake(name, "there is not enough memory for that")
    except RecursionError:
        return _mistake(name, "that is nested too deeply")
    except (ValueError, OSError, OverflowError) as error:
        return _mistake(name, error)
    except mistakes as error:
        return _mistake(name, error)


def interrupted(name: str, told: Sequence[int]) -> int:
    """Says how a command was ended: by Ctrl-C, or by a signal that `told_to_end` noted; returns its code."""
    how = f"ended by {signal.Signals(told[0]).name}" if told else "interrupted"
    print(f"{name}: {how}", file=sys.stderr)
    return 128 + told[0] if told else INTERRUPTED


@contextlib.contextmanager
def told_to_end(told: list[int]) -> Iterator[None]:
    """Within, SIGTERM and the end of the terminal do what Ctrl-C does, and are noted.

    Not where something else is done already, and not on one of several ranks: those end together (ranks/).
    """

    def end(number: int, frame: Any) -> None:
        told.append(number)
        stop = signal.getsignal(signal.SIGINT)  # a transaction notes it
        if not callable(stop):  # a job in the background of a script does not hear Ctrl-C
            raise KeyboardInterrupt
        stop(signal.SIGINT, frame)

    ours: list[int] = []
    if threading.current_thread() is threading.main_thread() and "RANK" not in os.environ:
        numbers = [getattr(signal, each, None) for each in ("SIGTERM", "SIGHUP")]  # Windows has one of them
        ours = [each for each in numbers if each and signal.getsignal(each) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _mistake(name: str, error: object) -> int:
    print(f"{name}: {one_line(error)}", file=sys.stderr)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # it was the output that could not be written
        forget_output()
    return 2


def forget_output() -> None:
    """What is left in stdout's buffer must not be tried again when Python ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end_quietly(name: str) -> None:
    """From now on Ctrl-C outside `run` (while a module imports torch, say) is one line and code 130, too.

    Up to `interruptible` it ends the program at once: a KeyboardInterrupt in the middle of numpy's import
    would come out of it as an ImportError.
    """
    global _leave
    usual = sys.excepthook

    def leave(number: int, frame: object) -> NoReturn:
        os.write(2, f"{name}: interrupted\n".encode())  # print may have been what was interrupted
        os._exit(INTERRUPTED)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if not issubclass(kind, KeyboardInterrupt):
            return usual(kind, error, trace)
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)  # Python's own end would be the signal's, with code -2 for who waits for it

    sys.excepthook = hook
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else Ctrl-C is ignored here
        _leave = leave
        signal.signal(signal.SIGINT, leave)


_leave: Callable[[int, object], NoReturn] | None = None


def interruptible() -> None:
    """All is imported: from now on Ctrl-C raises KeyboardInterrupt again."""
    if _leave is not None and signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
