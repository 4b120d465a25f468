"""The stream of notebook 15: two ranks of SGLang's own radix tree, event recorder and publisher, fed with chats.

    VENV/bin/python tests/kv_sources/lesson_stream.py --root SG [--port 5557] [--replay-port 6557] [--pace 1.2]

SG is a folder with SGLang unpacked, VENV an environment that can import what it needs: sglang_source.py says how
both are made; this needs `tokenizers` there beside. What is sent is SGLang's doing; what the chats say is ours,
in the classroom's tokens, so that a reader sees texts. A router that knows no prefixes sends each turn to a rank
at random. Rank 1 has no replay endpoint, as SGLang and vLLM have none unless asked.

It waits for one line on standard input before the second third of the requests: who records the stream comes then,
too late for what rank 1 had said before.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TUTOR = "You are a patient tutor. Answer in one short sentence, then ask one question back."
AGENT = (
    "You are an agent with two tools.\nsearch(words): looks words up.\ncalc(sum): works a sum out.\n"
    "Write one call in each turn and wait for its result."
)
# Who asks (a salt, or None), under which instructions, and what: the turns of one conversation.
CHATS: tuple[tuple[str | None, str, tuple[str, ...]], ...] = (
    (None, TUTOR, ("What is a prefix?", "And a suffix?", "Give me a word with both.", "Thank you.")),
    (None, TUTOR, ("What is a prefix?", "Why do two prompts share one?", "When do they not?")),
    (None, TUTOR, ("Why is the sky blue?", "And at sunset?", "Is it blue on Mars?")),
    (None, TUTOR, ("Who wrote Hamlet?", "When?", "Was it a success?")),
    (None, AGENT, ("How old is the Eiffel tower?", "search result: built in 1889", "calc result: 137")),
    (None, AGENT, ("How far is the moon?", "search result: 384400 km", "And in miles?", "calc result: 238855")),
    (None, AGENT, ("How high is Everest?", "search result: 8849 m", "calc result: 29032")),
    ("school-a", TUTOR, ("What is a noun?", "Name three.", "Is blue a noun?")),
    ("school-b", TUTOR, ("What is a noun?", "Name three.", "And a verb?")),
)
REPLIES = (
    "Yes. What would you try first?", "It is what comes before. Can you name one?", "That is right. Why?",
    "calc(2026 - 1889)", "search(height and age)", "It depends on the light. What do you think?",
)  # fmt: skip


def turns() -> list[tuple[str | None, str]]:
    """(salt, prompt) of each request, in the order in which they come: chats taken in turn, at random."""
    rng = random.Random(15)
    open_chats = [[salt, f"<|im_start|>system\n{system}<|im_end|>\n", list(asked)] for salt, system, asked in CHATS]
    sent: list[tuple[str | None, str]] = []
    while open_chats:
        chat: list[Any] = rng.choice(open_chats)
        chat[1] += f"<|im_start|>user\n{chat[2].pop(0)}<|im_end|>\n<|im_start|>assistant\n"
        reply = rng.choice(REPLIES)
        sent.append((chat[0], chat[1] + reply))
        chat[1] += f"{reply}<|im_end|>\n"
        if not chat[2]:
            open_chats.remove(chat)
    # Two of them come back after a while: has the tree kept them?
    return sent + [sent[0], sent[len(sent) // 2], sent[3]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--port", type=int, default=5557)
    parser.add_argument("--replay-port", type=int, default=6557)
    parser.add_argument("--pace", type=float, default=1.2, help="requests a second")
    parser.add_argument("--page", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=640, help="tokens that a rank keeps")
    options = parser.parse_args()
    sys.path.insert(0, str(HERE.parents[1]))
    from minirad.traces import tokenizer

    source: dict[str, Any] = {"__name__": "sglang_source"}
    exec(compile((HERE / "sglang_source.py").read_text().rpartition("\nmain()")[0], "sglang_source.py", "exec"), source)
    radix, events = source["load"](options.root)
    asked = sys.modules["sglang.srt.mem_cache.base_prefix_cache"]
    set_up = sys.modules["sglang.srt.mem_cache.cache_init_params"]
    import torch

    trees, publishers = [], []
    for rank in (0, 1):
        replay = f"tcp://127.0.0.1:{options.replay_port}" if rank == 0 else None
        publishers.append(events.ZmqEventPublisher(rank, endpoint=f"tcp://*:{options.port}", replay_endpoint=replay))
        trees.append(radix.RadixCache(set_up.CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=source["Allocator"](),
            page_size=options.page, eviction_policy="lru", enable_kv_cache_events=True)))  # fmt: skip
    rng, encode, requests = random.Random(5), tokenizer().encode, turns()
    print(f"{len(requests)} requests; a line on standard input before number {len(requests) // 3}", flush=True)
    for number, (salt, prompt) in enumerate(requests):
        if number == len(requests) // 3:
            sys.stdin.readline()
        ids = encode(prompt)
        kept = len(ids) // options.page * options.page
        rank = rng.randrange(2)
        tree = trees[rank]
        tree.insert(asked.InsertParams(
            key=radix.RadixKey(array("q", ids), cache_salt=salt), value=torch.arange(kept, dtype=torch.int64)))  # fmt: skip
        while tree.evictable_size() > options.capacity:
            tree.evict(asked.EvictParams(num_tokens=32))
        if told := tree.take_events():
            publishers[rank].publish(events.KVEventBatch(ts=time.time(), events=told))
        time.sleep(1 / options.pace)
    print(f"sent; the trees hold {[tree.total_size() for tree in trees]} tokens", flush=True)
    time.sleep(6)
    for publisher in publishers:
        publisher.shutdown()


if __name__ == "__main__":
    main()
