"""How every command of the project ends: a caller's mistake is one line on stderr and exit code 2.

A pipe that was closed (`| head -1`) ends a command quietly, Ctrl-C with one line and code 130, also while it
imports what it needs. Imports nothing that takes time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

LONGEST = 600  # characters of a message: what was typed may be long
INTERRUPTED = 130


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


def one_line(error: object) -> str:
    """What went wrong as one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def run(name: str, work: Callable[[], int], *mistakes: type[Exception]) -> int:
    """Does the work of a command and returns its exit code. mistakes: further errors of the caller's."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a console that cannot show every character
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has seen enough
        _forget_output()
        return 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except MemoryError:
        return _mistake(name, "there is not enough memory for that")
    except RecursionError:
        return _mistake(name, "that is nested too deeply")
    except (ValueError, OSError, OverflowError) as error:
        return _mistake(name, error)
    except mistakes as error:
        return _mistake(name, error)


def _mistake(name: str, error: object) -> int:
    print(f"{name}: {one_line(error)}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # it was the output that could not be written
        _forget_output()
    return 2


def _forget_output() -> None:
    """What is left in stdout's buffer must not be tried again when Python ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def end_quietly(name: str) -> None:
    """From now on Ctrl-C outside `run` (while a module imports torch, say) is one line and code 130, too."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if not issubclass(kind, KeyboardInterrupt):
            return usual(kind, error, trace)
        print(f"{name}: interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)  # Python's own end would be the signal's, with code -2 for who waits for it

    sys.excepthook = hook
