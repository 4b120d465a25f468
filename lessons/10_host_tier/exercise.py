"""Lesson 10: the host tier. Fill in the five functions; README.md says what and why.

    pytest lessons/10_host_tier        grades this file

You are given (lessons/grading/tiers.py) nodes of a tree, each of them

node.size            tokens
node.on_device       its KV lies in the pool, where it can be attended to
node.on_host         a copy of it lies in host memory. On both: a copy there, and the original here
node.parent          the node above; the root's is None
node.below           list of its children, wherever their KV lies
node.lock_ref        how many running requests read it on the device
node.held            True while something is to be loaded from its copy: the copy must stay
node.hits            how many requests' prompts ran through it
node.last_access     the clock when it was last used, as in lesson 03. Two that may go never have the same

and `tiers`, the tree itself. Pages hold one token, so a node of 3 tokens takes 3 slots wherever it lies.

tiers.nodes()        all nodes but the root, parents before their children
tiers.write_back     True: copies are made when a node is evicted. False: they were made before
tiers.host_size      how many slots the host has
tiers.host_free, tiers.device_free        how many slots are free there, and on the device
tiers.copy(node)     copies a node that lies on the device and has no copy; where the host is full, old nodes
                     leave it for that. True when the copy is there. False when there is none: no room could
                     be made, or the copy went wrong
tiers.demote(node)   gives back the device slots of a node that has a copy. It stays in the tree
tiers.remove(node)   takes a node with nothing below it out of the tree, and out of both tiers
tiers.evict(n)       frees at least n device slots, if that many can be freed; returns how many it freed. For
                     load_back: within evict, and what evict comes to, it would call itself
tiers.hold(nodes), tiers.release(nodes)        their copies stay on the host from the first to the second
tiers.load(nodes)    brings nodes that lie on the host only back into free device slots. The list goes from
                     the top down, and what is above the first of them is on the device (or is the root)

What holds before each call, and must after it: a node on the device has a parent on the device (or the root).
Calls that would break the tree say so. Each call of yours stands for itself; keep nothing between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lessons.grading.tiers import Node, Tiers


def write_through(tiers: Tiers, path: Sequence[Node], least_hits: int) -> int:
    """Copies what a request leaves behind, before anybody needs the room.

    path: nodes from the top of the tree downwards, all on the device; may be empty. Some may have a copy.

    Copies (tiers.copy) those that have no copy and at least `least_hits` hits (0: all of them; nodes further
    down never have more hits than those above). A node may only have a copy if its parent has one (that is
    the rule of both write_throughs; write_back begins at the leaves, and has no such rule). So when a copy is
    refused, nothing further down is copied, not even tried.

    Returns how many tokens were copied by this call.
    """
    raise NotImplementedError("todo: write_through")


def make_host_room(tiers: Tiers, num_tokens: int) -> bool:
    """Frees host slots until at least num_tokens of them are free.

    What may go: a node that lies on the host only, with nothing below it, and that is not held. Of these the
    least recently used first (smallest last_access). When a parent's last child has gone, it may be next.
    Nodes that lie on the device as well keep their copies.

    Takes out (tiers.remove) no more than is needed. Returns True when enough is free. Returns False when
    it is not, although all that may go has gone; and False at once, with nothing removed, when num_tokens
    is more than the whole host has.
    """
    raise NotImplementedError("todo: make_host_room")


def evict(tiers: Tiers, num_tokens: int) -> int:
    """Frees device slots until at least num_tokens were freed or nothing may go any more.

    What may go: a node on the device with lock_ref 0 and no child on the device (children on the host only
    do not protect it). Of these the least recently used first (smallest last_access). When the last child of
    a node has left the device, it may be next.

    A victim with a copy is demoted. A victim without one is copied first if tiers.write_back, and then
    demoted. If it gets no copy (no write_back, or tiers.copy says False), it leaves the tree, and what lies
    below it on the host goes with it: no look-up could reach that any more.

    Making room for a copy may take nodes out of the host: the tree can have changed when tiers.copy returns.

    Returns how many device slots were freed.
    """
    raise NotImplementedError("todo: evict")


def load_back(tiers: Tiers, path: Sequence[Node], prompt_tokens: int, threshold: int) -> int:
    """A request comes, and the end of its match lies on the host only: is it loaded back?

    path: what its prompt matches, from the top of the tree downwards; may be empty. First nodes on the
    device (the request has locked them), then nodes on the host only. Either part may be missing.
    prompt_tokens: length of its prompt, never less than what matches. Its last token is always computed, so
    of what matches at most prompt_tokens - 1 tokens are of use.

    Loads the host's part, all of it or nothing. Nothing is loaded, and nothing evicted, if that saves fewer
    than `threshold` tokens from being computed (threshold is at least 1).

    If too few device slots are free, evict the shortfall. Evicting may copy others to the host, and these
    may push out just what you are about to load: hold it before, and release it in the end, whatever
    happened. If there are still too few free slots, nothing is loaded.

    Returns how many tokens were loaded.
    """
    raise NotImplementedError("todo: load_back")


def break_even(loads: Sequence[tuple[int, float]], prefills: Sequence[tuple[int, float]]) -> int | None:
    """From how many tokens on is fetching from the host quicker than computing? The threshold for load_back.

    loads: measured (tokens, seconds) of copies from the host to the device.
    prefills: measured (tokens, seconds) of forward passes that compute so many tokens of one prompt.
    Each has two different numbers of tokens at least, and is noisy. Fit a straight line, seconds = a + b *
    tokens, to each, by least squares (numpy.polyfit(x, y, 1) gives b, a).

    A load costs all of its line: a + b * n. But the request's forward pass is launched in any case, for
    its last token at least. So n tokens that are fetched save only what n tokens add to a pass.

    Returns the smallest whole n, 1 or more, such that fetching n tokens or any larger number takes less time
    than it saves; None if there is no such n.
    """
    raise NotImplementedError("todo: break_even")
