"""Lesson 12: many workers. Fill in the three functions and the class; README.md says what and why.

pytest lessons/12_many_workers                                                grades this file
python -m viz.live --workers 3 --route lessons/12_many_workers/exercise.py    your Router, real engines
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Step = tuple[str, int]  # from a node to one of its children: the child's namespace and its first token
Path = tuple[Step, ...]  # from the root to a node; () is the root itself


class Node(Protocol):
    """A node of a rank's tree. Pages are of one token: no two children of a node begin alike."""

    namespace: str  # "" for none
    tokens: list[int]  # of its edge; the root has none
    slots: list[int]  # as many
    lock_ref: int
    hits: int
    last_access: int  # a tick of the tree's clock: who was used least recently is evicted first
    children: list[Any]  # in the order in which they were made
    name: str  # "n7": what this rank calls it


class Told(Protocol):
    """What rank 0 answers about a node of its own tree: its fields, and digests instead of what is below."""

    namespace: str
    tokens: list[int]
    slots: list[int]
    lock_ref: int
    hits: int
    last_access: int
    digest: bytes  # of the node and all that is below it
    children: dict[Step, bytes]  # of each child the digest, in no particular order


class Route(Protocol):
    """What became of a request."""

    worker: int  # an index: where it was sent
    tokens: int  # of its prompt
    cached: int  # how many of them this worker had not to compute
    held: list[int | None]  # of the prompt, by each worker at that moment; None: it was not alive


class Worker(Protocol):
    """A worker as a router sees it: its tree is not to be seen."""

    name: str
    alive: bool
    load: int  # requests that were sent there and are not answered


SLACK = 4  # requests that a chosen worker may have in flight more than the least loaded one


def digest(root: Node) -> bytes:
    """The tree from `root` downwards in 16 bytes, by which ranks compare what they have.

    Two trees that are alike get the same bytes, in every process and on every machine. They are alike if
    their roots are alike in namespace, tokens, slots, lock_ref, hits and last_access, and if the children of
    one are alike, each to one, to the children of the other. The order in which children stand in a list
    does not count, nor does what nodes are called.

    Any other difference, however small, gives other bytes: a token, two slots that changed places, a lock,
    where a run of tokens is cut into nodes, which node hangs below which. (Two trees in 2**64 may have the
    same by chance.) The tree stays as it is. No tree is deeper than 200 nodes.
    """
    raise NotImplementedError("todo: digest")


def find_divergence(
    mine: Node, ask: Callable[[Path], Told], digest: Callable[[Node], bytes]
) -> tuple[Path, str] | None:
    """The first difference between this rank's tree and rank 0's, with few questions. None: they are alike.

    mine: the root of this rank's tree. digest: a right one, as above; rank 0 uses the same, so call this one.
    ask(path): one message to rank 0, about the node to which the path leads in *its* tree. There must be one.
    ask(()) is about the root.

    Returns (path, what). what is
    * the first of "tokens", "slots", "lock_ref", "hits", "last_access" in which the two nodes at the end of
      the path differ (paths name the namespace, so that it never differs there), or
    * "only here", "only there": this rank alone, or rank 0 alone, has a node at the end of the path.

    Of several differences the first: a node's own before those below it; of its children the one with the
    smaller step first (steps are tuples, and compare as such), and all below that one before the next.

    Messages are dear: at most one about each node on the path that both ranks have. So there are three for a
    path of two steps, two if its last node is on one rank only, and one if the trees are alike.
    """
    raise NotImplementedError("todo: find_divergence")


def account(routes: Sequence[Route], workers: int) -> dict[str, Any]:
    """What the choices of a router were worth. workers: how many there are, also those that got nothing.

    "hit_rate": cached tokens of all prompt tokens (0.0 if there are none).
    "computed": a list, of each worker how many prompt tokens it had to compute.
    "imbalance": the most that one of them computed over the mean of all (1.0 if nothing was computed): 1 is
        the best, and with 4 workers 4 is the worst that there is.
    "regret": tokens in all; of each request how many more the best worker that was alive held than the one
        to which it was sent.
    """
    raise NotImplementedError("todo: account")


class Router:
    """Says which worker a request goes to. It knows what it sent, and loads; it sees no trees.

    A worker "was sent" n tokens of a prompt if n is the longest beginning that the prompt has in common with
    some prompt that was sent to this worker before. What must hold always:

    * The chosen worker is alive, and has at most SLACK requests in flight more than the least loaded worker
      that is alive. A worker that meets this is called free here.
    * If one free worker was sent three quarters of the prompt or more, and every other free one less than
      half, the prompt goes to that one.
    * If no free worker was sent a tenth of the prompt, it goes to one of the least loaded. These take turns:
      of such prompts in a row, with equal loads, each worker gets one before any of them gets a second.

    What lies in between is yours. It is measured: four simulated workers with real trees get a few dozen
    requests. Your hit rate has to gain over round-robin, on the same requests, at least half of what the
    engine's own policy "cache-aware" gains, and no worker may get more than two thirds of the requests.

    The same calls give the same choices: no clock, no chance. Nothing that is passed in is changed.
    """

    def __init__(self) -> None:
        """Nothing was sent."""
        raise NotImplementedError("todo: Router")

    def choose(self, tokens: Sequence[int], workers: Sequence[Worker]) -> tuple[int, str]:
        """The index of a worker, and why: a line of text with the numbers that decided, for those who watch.

        tokens: of the prompt, at least one. workers: all of them, always in the same order, at least one of
        them alive.
        """
        raise NotImplementedError("todo: Router.choose")

    def sent(self, worker: int, tokens: Sequence[int]) -> None:
        """A prompt was sent to this worker. Only now it is: what was chosen may come to nothing."""
        raise NotImplementedError("todo: Router.sent")

    def forget(self, worker: int) -> None:
        """This worker died, or began anew: it holds nothing of what was sent to it before."""
        raise NotImplementedError("todo: Router.forget")
