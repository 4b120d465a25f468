"""Blocks of KV in a folder: what is believed, what is skipped, the bound, two stores in one folder."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minirad.tiers import disk, disk_files, disk_names
from minirad.tiers.disk import DiskTier
from minirad.tiers.disk_files import BlockFiles, NotWritten, Reading, Worker
from minirad.tiers.disk_names import Block, Layout, blocks_of, chain_start, namespace_digest

LAYOUT = Layout((64, 2, 2, 1, 4), torch.float32)
ROOM = 1 << 20


def chain(count: int = 3, seed: int = 0, layout: Layout = LAYOUT) -> list[Block]:
    tokens = np.random.default_rng(seed).integers(0, 1000, count * 64).astype(np.int32)
    return blocks_of(b"start", tokens.tobytes(), 64, False, count)


def kv_of(block: Block, layout: Layout = LAYOUT) -> torch.Tensor:
    """Other KV for every name."""
    seeded = torch.Generator().manual_seed(int(block.name[:8], 16))
    return torch.randn(layout.shape, generator=seeded).to(layout.dtype)


def filled(folder: Path, blocks: list[Block], most: int = ROOM) -> BlockFiles:
    files = BlockFiles(folder, most, LAYOUT)
    for block in blocks:
        files.write(block, kv_of(block))
    return files


def names_in(folder: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in folder.glob("*.safetensors")}


SIZE = 64 * 2 * 2 * 4 * 4  # bytes of a block's KV


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_written_is_read_by_another_store(tmp_path: Path, dtype: torch.dtype) -> None:
    layout = Layout(LAYOUT.shape, dtype)
    (block,) = chain(1)
    size = BlockFiles(tmp_path, ROOM, layout).write(block, kv_of(block, layout))
    assert size == (tmp_path / f"{block.name}.minirad.safetensors").stat().st_size
    found = BlockFiles(tmp_path, ROOM, layout).read(block)
    assert found is not None and torch.equal(found, kv_of(block, layout))
    assert not list(tmp_path.glob("*.tmp"))
    read = load_file(tmp_path / f"{block.name}.minirad.safetensors")  # what any other program sees
    assert read["tokens"].tolist() == block.tokens.tolist() and tuple(read["kv"].shape) == layout.shape


def test_a_block_that_is_not_there_is_a_miss_without_a_word(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, ROOM, LAYOUT)
    assert files.read(chain(1)[0]) is None
    assert not files.notes and not files.warnings


# ---------------------------------------------------------------------- what is not believed


def damaged(change: Callable[[Path, Block], Any], tmp_path: Path) -> BlockFiles:
    """A store that has just refused to read a file that was changed; it may be written over."""
    blocks = chain(2)
    files = filled(tmp_path, blocks)
    files.scan()
    change(files.path(blocks[0].name), blocks[0])
    assert files.read(blocks[0]) is None
    assert files.read(blocks[1]) is not None  # the others are as they were
    assert [note.what for note in files.notes] == ["broken"] and len(files.warnings) == 1
    assert not files.has(blocks[0].name) and files.write(blocks[0], kv_of(blocks[0])) > 0
    found = files.read(blocks[0])
    assert found is not None and torch.equal(found, kv_of(blocks[0]))
    return files


@pytest.mark.parametrize(
    "left", [0, 1, 7, 8, 9, 100, 250, 400, SIZE // 2, -SIZE, -513, -512, -9, -8, -1], ids=str
)
def test_a_file_that_was_cut_off_is_skipped(tmp_path: Path, left: int) -> None:
    damaged(lambda path, block: os.truncate(path, left % path.stat().st_size), tmp_path)


def resaved(path: Path, metadata: dict[str, str] | None, **tensors: torch.Tensor) -> None:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    known = load_file(path)
    save_file({**known, **tensors}, path, {**header["__metadata__"], **(metadata or {})})


def checksum(kv: torch.Tensor) -> dict[str, str]:
    return {"crc32": disk_files._checksum(kv)}


NAN = torch.full(LAYOUT.shape, float("nan"))
FORGERIES: dict[str, Callable[[Path, Block], Any]] = {
    "other tokens": lambda path, block: resaved(path, None, tokens=torch.from_numpy(block.tokens) + 1),
    "fewer tokens": lambda path, block: resaved(path, None, tokens=torch.from_numpy(block.tokens)[:-1]),
    "tokens of another type": lambda path, block: resaved(
        path, None, tokens=torch.from_numpy(block.tokens).int()
    ),
    "another parent": lambda path, block: resaved(path, {"parent": "0" * 64}),
    "another format": lambda path, block: resaved(path, {"format": "minirad-disk-0"}),
    "not a number": lambda path, block: resaved(path, checksum(NAN), kv=NAN),
    "another shape": lambda path, block: resaved(path, None, kv=kv_of(block).reshape(64, 1, 4, 1, 4)),
    "another dtype": lambda path, block: resaved(path, None, kv=kv_of(block).to(torch.float64)[:32]),
    "a bit turned": lambda path, block: resaved(path, None, kv=-kv_of(block)),
    "zeros": lambda path, block: path.write_bytes(bytes(path.stat().st_size)),
    "zeros behind the header": lambda path, block: path.write_bytes(
        path.read_bytes()[:600] + bytes(path.stat().st_size - 600)
    ),
    "one tensor more": lambda path, block: resaved(path, None, more=torch.zeros(1)),
    "a text": lambda path, block: path.write_text("hello"),
    "longer": lambda path, block: path.write_bytes(path.read_bytes() + b"x"),
    "far longer": lambda path, block: os.truncate(path, 1 << 30),
    "of another program": lambda path, block: save_file({"weight": torch.zeros(3)}, path),
    "deep JSON": lambda path, block: path.write_bytes((3000).to_bytes(8, "little") + b"[" * 3000),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_file_is_skipped(tmp_path: Path, name: str) -> None:
    damaged(FORGERIES[name], tmp_path)


def test_one_warning_for_many_broken_files(tmp_path: Path) -> None:
    blocks = chain(6)
    files = filled(tmp_path, blocks)
    for block in blocks:
        files.path(block.name).write_bytes(b"")
        assert files.read(block) is None
    assert len(files.warnings) == 1 and len(files.notes) == 6
    assert "is skipped: it is cut off after 0 bytes" in files.warnings[0]


def test_what_is_no_number_is_not_written(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, ROOM, LAYOUT)
    with pytest.raises(NotWritten, match="not all of it are numbers"):
        files.write(chain(1)[0], NAN)
    assert names_in(tmp_path) == set()


# ---------------------------------------------------------------------- the bound


def bound(blocks: int) -> int:
    """Bytes in which so many blocks fit, and not one more."""
    return blocks * (SIZE + 1000) + 400


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    first, second, third, fourth = (chain(1, seed)[0] for seed in range(4))
    files = filled(tmp_path, [first, second, third], bound(3))
    files.touch([first.name])
    files.write(fourth, kv_of(fourth))
    assert names_in(tmp_path) == {first.name, third.name, fourth.name}
    assert [note.what for note in files.notes] == ["dropped"]
    assert files.nbytes == sum(path.stat().st_size for path in tmp_path.iterdir()) <= files.most_bytes


def test_of_a_path_the_end_goes_first(tmp_path: Path) -> None:
    path, other = chain(3), chain(2, seed=1)
    files = filled(tmp_path, path, bound(4))
    files.touch([block.name for block in path])
    for block in other:
        files.write(block, kv_of(block))
    assert names_in(tmp_path) == {block.name for block in (*path[:2], *other)}


def test_a_path_does_not_make_room_for_its_own_end(tmp_path: Path) -> None:
    path = chain(4)
    files = filled(tmp_path, path[:3], bound(3))
    with pytest.raises(NotWritten, match="has no room for it"):
        files.write(path[3], kv_of(path[3]), keep={block.name for block in path})
    assert names_in(tmp_path) == {block.name for block in path[:3]}


def test_a_bound_of_less_than_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"disk_mb: 100 bytes have no room for one block .* takes 4,096"):
        BlockFiles(tmp_path / "kv", 100, LAYOUT)
    assert not list(tmp_path.iterdir())


def test_what_others_keep_in_the_folder_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    """Also where it is named by a hash, is older than all, and makes the folder larger than its bound."""
    blocks, name = chain(4), "ab" * 32
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"their target")
    folder = tmp_path / "kv"
    folder.mkdir()
    theirs = [
        folder / each for each in (name, f"{name}.safetensors", f"{name}.1-1.tmp", "notes.txt", "a.tmp")
    ]
    for path in theirs:
        path.write_bytes(b"theirs" * 10_000)
        os.utime(path, (1, 1))
    (inside := folder / f"{'cd' * 32}.minirad.safetensors").mkdir()  # no file, though named as one of ours
    link = folder / f"{'ef' * 32}.minirad.safetensors"
    if os.name == "nt":  # links are for administrators there
        link.mkdir()
    else:
        link.symlink_to(elsewhere)
        os.utime(link, (1, 1), follow_symlinks=False)
    files = filled(folder, blocks, bound(2))
    files.trim()
    assert not files.off and not files.warnings and files.files == 2
    assert all(path.exists() for path in (*theirs, inside, link, elsewhere))
    assert {path.name[:64] for path in folder.iterdir() if path not in (*theirs, inside, link)} == {
        block.name for block in blocks[2:]
    }


def test_files_that_cannot_be_deleted_leave_the_others_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's in a folder such as /tmp. Where all are, nothing is written any more, and it says so."""
    first, second, third, fourth = (chain(1, seed)[0] for seed in range(4))
    files, unlink = filled(tmp_path, [first, second], bound(2)), Path.unlink

    def refuse(path: Path, *more: Any, **named: Any) -> None:
        if not path.name.startswith(stuck):
            return unlink(path, *more, **named)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    stuck: Any = first.name
    files.write(third, kv_of(third))
    assert names_in(tmp_path) == {first.name, third.name} and not files.off
    files.scan()
    stuck = (first.name, third.name)
    with pytest.raises(NotWritten, match=disk_files.ENDED):
        files.write(fourth, kv_of(fourth))
    assert names_in(tmp_path) == {first.name, third.name}
    assert "nothing in it can be deleted" in files.off and len(files.warnings) == 1


def test_what_was_there_before_counts_and_is_the_oldest(tmp_path: Path) -> None:
    old, new = chain(3), chain(2, seed=1)
    filled(tmp_path, old)
    filled(tmp_path, new, bound(3))
    assert names_in(tmp_path) == {old[2].name, *(block.name for block in new)}


def test_what_another_process_hits_stays(tmp_path: Path) -> None:
    first, second, third = (chain(1, seed)[0] for seed in range(3))
    files = filled(tmp_path, [first, second], bound(2))
    other = BlockFiles(tmp_path, ROOM, LAYOUT)
    other.scan()
    other.touch([first.name])
    files.write(third, kv_of(third))
    assert names_in(tmp_path) == {first.name, third.name}


def test_what_another_process_wrote_is_bounded_at_the_next_look(tmp_path: Path) -> None:
    mine, theirs = chain(2), chain(3, seed=1)
    files = filled(tmp_path, mine, bound(3))
    filled(tmp_path, theirs)
    files.trim()
    assert names_in(tmp_path) == {block.name for block in theirs}


def test_a_clock_that_goes_back_does_not_turn_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (chain(1, seed)[0] for seed in range(3))
    files = filled(tmp_path, [first, second], bound(2))
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)
    files.touch([first.name])
    files.write(third, kv_of(third))
    assert names_in(tmp_path) == {first.name, third.name}
    again = BlockFiles(tmp_path, bound(2), LAYOUT)  # also after a restart
    again.write(second, kv_of(second))
    assert names_in(tmp_path) == {third.name, second.name}


def test_what_was_left_half_written_goes_when_it_is_old(tmp_path: Path) -> None:
    name = chain(1)[0].name
    old, ahead, new, strange = (
        tmp_path / each
        for each in (
            f"{name}.minirad.1-1.tmp",
            f"{name}.minirad.1-2.tmp",
            f"{name}.minirad.2-1.tmp",
            "mine.tmp",
        )
    )
    for path in (old, ahead, new, strange):
        path.write_bytes(b"half")
    now = time.time()
    for path, age in ((old, 7200), (ahead, -7200), (strange, 7200)):
        os.utime(path, (now - age, now - age))
    BlockFiles(tmp_path, ROOM, LAYOUT).scan()
    assert set(tmp_path.iterdir()) == {new, strange}


# ---------------------------------------------------------------------- a disk that is not as it should be


def raising(error: OSError) -> Callable[..., Any]:
    def fail(*args: Any, **more: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("place", ["write_bytes", "replace"])
def test_a_full_disk_ends_the_writing_and_not_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    there, new = chain(2)
    files = filled(tmp_path, [there])
    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(*((Path, "write_bytes", full) if place == "write_bytes" else (os, "replace", full)))
    for _ in range(2):
        with pytest.raises(NotWritten, match="nothing is written any more"):
            files.write(new, kv_of(new))
    assert len(files.warnings) == 1 and "No space left on device" in files.warnings[0]
    assert names_in(tmp_path) == {there.name} and not list(tmp_path.glob("*.tmp"))
    assert files.read(there) is not None


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    block, other = chain(2)
    files = filled(folder, [block])
    files.path(block.name).unlink()
    folder.rmdir()
    assert files.read(block) is None and not files.has(block.name)
    with pytest.raises(NotWritten):
        files.write(other, kv_of(other))
    files.scan()
    assert files.off and len(files.warnings) == 1 and files.files == 0


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="who is root may write everywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    there, new = chain(2)
    filled(tmp_path, [there])
    tmp_path.chmod(0o500)
    try:
        files = BlockFiles(tmp_path, bound(1), LAYOUT)
        files.scan()
        with pytest.raises(NotWritten, match="nothing is written any more"):
            files.write(new, kv_of(new))
        assert files.read(there) is not None and len(files.warnings) == 1
    finally:
        tmp_path.chmod(0o700)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"disk_dir '.*file' cannot be a folder"):
        BlockFiles(tmp_path / "file", ROOM, LAYOUT)


def test_a_file_that_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    (block,) = chain(1)
    files = BlockFiles(tmp_path, ROOM, LAYOUT)
    files.path(block.name).mkdir()
    assert files.read(block) is None
    assert "cannot be read" in files.warnings[0]


def test_where_an_open_file_cannot_be_replaced_it_is_there_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows: another process reads the file that it has just written."""
    (block,) = chain(1)
    filled(tmp_path, [block])
    files = BlockFiles(tmp_path, ROOM, LAYOUT)
    files._bad.add(block.name)
    monkeypatch.setattr(os, "replace", raising(PermissionError(errno.EACCES, "in use")))
    assert files.write(block, kv_of(block)) == 0
    assert not files.off and not list(tmp_path.glob("*.tmp")) and names_in(tmp_path) == {block.name}


def test_another_process_may_write_the_same(tmp_path: Path) -> None:
    """Two threads with a store each write and read one chain; nothing is ever half there."""
    blocks = chain(8)
    stores = [BlockFiles(tmp_path, bound(5), LAYOUT) for _ in range(2)]
    wrong: list[Any] = []

    def play(store: BlockFiles, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for number in rng.integers(0, 8, 120).tolist():
            block = blocks[number]
            found = store.read(block)
            if found is None:
                store.write(block, kv_of(block))
            elif not torch.equal(found, kv_of(block)):
                wrong.append(number)

    threads = [threading.Thread(target=play, args=(s, n)) for n, s in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert not wrong and not any(store.off or store.warnings for store in stores)
    for store in stores:
        store.trim()
    assert len(names_in(tmp_path)) <= 5 and not list(tmp_path.glob("*.tmp"))


# ---------------------------------------------------------------------- threads


def test_a_worker_does_all_and_ends() -> None:
    worker, done = Worker("test"), []
    for number in range(5):
        worker.submit(lambda number=number: done.append(number))
    assert worker.stop(60) and done == [0, 1, 2, 3, 4]
    worker.submit(lambda: done.append(9))
    thread = worker._thread
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive() and len(done) == 5


def test_a_workers_defect_is_told_and_ends_the_writing(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, ROOM, LAYOUT)
    tier._writer.submit(lambda: 1 // 0)
    assert tier.flush(60)
    (sentence,) = tier.warnings()
    assert "ZeroDivisionError" in tier.files.off and "ZeroDivisionError" in sentence
    tier.close()


def test_a_tier_that_is_let_go_writes_what_is_queued_and_ends_its_threads(tmp_path: Path) -> None:
    blocks = chain(3)
    tier = DiskTier(tmp_path, ROOM, LAYOUT)
    tier.read([], blocks)
    tier.put(blocks, [(block, kv_of(block)) for block in blocks])
    threads = [tier._writer._thread, tier._reader._thread]
    del tier
    for thread in threads:
        assert thread is not None
        thread.join(60)
        assert not thread.is_alive()
    assert names_in(tmp_path) == {block.name for block in blocks}


def test_a_slow_reading_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = chain(3)
    filled(tmp_path, blocks)
    tier = DiskTier(tmp_path, ROOM, LAYOUT)
    tier.read_wait = 0.05
    gate, first_came, read = threading.Event(), threading.Event(), BlockFiles.read

    def slow(files: BlockFiles, block: Block) -> Any:
        if block is blocks[1]:
            first_came.set()
            gate.wait(200)
        return read(files, block)

    class Waited(Reading):
        """Whoever waits for it has the first block by then, however busy the machine is."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            usual = self.done.wait
            self.done.wait = lambda seconds=None: first_came.wait(200) and usual(seconds)  # type: ignore[method-assign]

    monkeypatch.setattr(BlockFiles, "read", slow)
    monkeypatch.setattr(disk, "Reading", Waited)
    first = tier.read([], blocks)
    assert len(first.kv) == 1 and first.late == 2 and tier.stats.late == 1
    for asked in (blocks, chain(2, seed=5)):  # the same again, and another: nobody waits
        assert tier.read([], asked).late == 0
    gate.set()
    assert tier._late is not None and tier._late.done.wait(60)
    again = tier.read([], blocks)
    assert [torch.equal(kv, kv_of(block)) for kv, block in zip(again.kv, blocks, strict=True)] == [True] * 3
    assert tier.read([], chain(2, seed=5)).kv == []
    tier.close()


def test_the_queue_is_bounded(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, ROOM, LAYOUT)
    tier.queue_bytes = 2 * SIZE
    gate = threading.Event()
    tier._writer.submit(lambda: gate.wait(200))
    blocks = chain(3)
    assert tier.room() == 2
    tier.put(blocks, [(block, kv_of(block)) for block in blocks[:2]])
    assert tier.room() == 0 and tier.has(blocks[0]) and not tier.has(blocks[2])
    gate.set()
    assert tier.flush(60) and tier.room() == 2
    tier.notes()
    assert (tier.stats.written_blocks, tier.stats.written) == (2, 128)
    tier.queue_bytes = 1  # one block always has room
    assert tier.room() == 1
    tier.close()


# ---------------------------------------------------------------------- names


def test_names_are_those_of_every_process() -> None:
    """Written down: another name would make every folder that there is worthless without a word."""
    start = chain_start(b"weights", namespace_digest(None) or b"", 1, LAYOUT)
    (block,) = blocks_of(start, np.arange(64, dtype=np.int32).tobytes(), 64, False, 1)
    assert block.parent == start.hex()
    assert (start.hex()[:16], block.name[:16]) == NAMES


NAMES = ("ee82c356721f16e2", "fcfe62ceec7c8205")


def test_a_name_says_all_that_kv_depends_on() -> None:
    data = np.arange(64, dtype=np.int32).tobytes()
    starts = [
        chain_start(weights, namespace_digest(key) or b"", page, layout)
        for weights in (b"a", b"b")
        for key in (None, 0, "", "0", b"0", b"", (), (0,), ((0,),), (0, 0), ("a", "bc"), ("ab", "c"), -1)
        for page in (1, 16)
        for layout in (
            LAYOUT, Layout(LAYOUT.shape, torch.bfloat16), Layout(LAYOUT.shape, torch.float32, True),
            Layout((64, 4, 2, 1, 2), torch.float32),
        )
    ]  # fmt: skip
    names = {blocks_of(start, data, 64, False, 1)[0].name for start in starts}
    assert len(names) == len(starts) == 2 * 13 * 2 * 4


def test_what_comes_before_is_in_the_name() -> None:
    tokens = np.arange(192, dtype=np.int32)
    other = tokens.copy()
    other[3] = 7
    one, two = (blocks_of(b"s", each.tobytes(), 64, False, 3) for each in (tokens, other))
    assert [a.name == b.name for a, b in zip(one, two, strict=True)] == [False] * 3
    assert np.array_equal(one[2].tokens, two[2].tokens) and one[2].parent != two[2].parent


def test_pairs_are_named_by_the_token_behind_them_as_well() -> None:
    tokens = np.arange(129, dtype=np.int32)
    pairs = np.stack((tokens[:-1], tokens[1:]), axis=1)
    blocks = blocks_of(b"s", pairs.tobytes(), 64, True, 2)
    assert [block.tokens.tolist() for block in blocks] == [list(range(65)), list(range(64, 129))]


class Own(tuple[Any, ...]):
    """A key of somebody's own kind."""


@pytest.mark.parametrize("key", [1.0, object(), frozenset("a"), Own((1, 2)), (1, 2.0), ("a", (object(),))])
def test_a_key_that_another_process_cannot_tell_the_same(key: Any) -> None:
    assert namespace_digest(key) is None


def test_a_key_that_nests_without_end_stays_in_memory() -> None:
    key: Any = ()
    for _ in range(2000):
        key = (key,)
    assert namespace_digest(key) is None


@pytest.mark.parametrize(("page", "units"), [(1, 64), (4, 64), (16, 64), (24, 72), (64, 64), (128, 128)])
def test_blocks_are_whole_pages_and_64_units_at_least(page: int, units: int) -> None:
    assert disk_names.block_units(page) == units


def test_the_digest_of_weights_sees_each_of_them(tiny_model: Any) -> None:
    wanted = disk_names.weights_digest(tiny_model)
    assert wanted == disk_names.weights_digest(tiny_model)
    layer = tiny_model.layers[1]
    tensors = [tiny_model.embed, tiny_model.norm, *(
        each for name in layer.__dataclass_fields__
        if isinstance(each := getattr(layer, name), torch.Tensor)
    )]  # fmt: skip
    assert len(tensors) >= 7
    for tensor in tensors:
        flat = tensor.view(-1)
        flat[-1] += 1
        assert disk_names.weights_digest(tiny_model) != wanted
        flat[-1] -= 1
