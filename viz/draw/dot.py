"""Finding and running Graphviz' `dot`.

The Python package `graphviz` only calls a program. Looked for, in this order: what the environment
variable MINIRAD_DOT names, the one that comes with the package graphviz-pure (Linux, macOS, Windows),
and `dot` on the PATH. Does not know what is drawn.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from functools import lru_cache
from importlib import metadata
from pathlib import Path

VARIABLE = "MINIRAD_DOT"
ADVICE = (
    "no Graphviz found: `pip install graphviz-pure` brings one, or install Graphviz so that `dot` is "
    f"on the PATH, or set {VARIABLE} to a dot program"
)


class DotError(RuntimeError):
    """No dot program could be found, or it refused a picture."""


@lru_cache(maxsize=1)
def find_dot() -> Path:
    """The dot program to use; DotError says how to get one."""
    named = os.environ.get(VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise DotError(f"{VARIABLE}={named!r} names no program that can be run")
        return Path(found)
    bundled = _bundled()
    if bundled is not None:
        return bundled
    on_path = shutil.which("dot")
    if on_path is None:
        raise DotError(ADVICE)
    return Path(on_path)


def _bundled() -> Path | None:
    """The program of the installed package graphviz-pure."""
    name = "graphviz-pure.exe" if sys.platform == "win32" else "graphviz-pure"
    try:
        files = metadata.files("graphviz-pure") or []
    except metadata.PackageNotFoundError:
        return None
    places = [Path(str(file.locate())).resolve() for file in files if file.name == name]
    places.append(Path(sysconfig.get_path("scripts")) / name)
    return next((place for place in places if place.is_file()), None)


def run_dot(text: str, output: str = "svg") -> bytes:
    """Lays out and renders DOT text. output: "svg", "png" or "json"."""
    import graphviz

    try:
        return _drawn([str(find_dot()), "-Kdot", f"-T{output}"], text.encode("utf-8"))
    except (graphviz.CalledProcessError, graphviz.ExecutableNotFound) as error:
        detail = getattr(error, "stderr", b"") or str(error)
        detail = detail.decode("utf-8", "replace") if isinstance(detail, bytes) else detail
        raise DotError(f"{find_dot()} could not draw this: {detail.strip()}") from error


def _drawn(command: list[str], text: bytes, again: bool = True) -> bytes:
    """Ctrl-C, and a launcher that ends all of a group, mean us: a picture that is begun is drawn.

    So it gets a session of its own. What comes in the moment before it has one still ends it: then once more.
    """
    import graphviz
    from graphviz.backend import execute

    try:
        done = execute.run_check(command, input=text, capture_output=True, quiet=True, start_new_session=True)
    except graphviz.CalledProcessError as error:
        if not again or error.returncode >= 0:
            raise
        return _drawn(command, text, again=False)
    drawn: bytes = done.stdout
    return drawn
