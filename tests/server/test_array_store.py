"""The folder of stored arrays, used by several processes and threads at once."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from routed_experts.server.outputs import array_store, folders
from routed_experts.server.outputs.array_store import (
    ArrayGoneError,
    ArrayStore,
    StoreError,
    UnknownArrayError,
)
from routed_experts.server.outputs.folders import private_folder, remove_unused
from tests.protocol.answers import peak_of

ARRAY = np.arange(4 * 10 * 2, dtype=np.int16).reshape(4, 10, 2)
FILE_BYTES = 4096  # a block


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (array_store, folders):
        monkeypatch.setattr(
            module, "time", SimpleNamespace(time=clock.time, monotonic=time.monotonic)
        )
    return clock


def sizes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.npy"))


OTHER = """
import sys
from pathlib import Path
import numpy as np
from routed_experts.server.outputs.array_store import ArrayStore

store = ArrayStore(Path(sys.argv[1]), 1 << 20)
held = [store.put(np.zeros((4, 10, 2), np.int16)) for _ in range(2)]
reader = store.read(held[1].id)
print(held[0].id, held[1].id, flush=True)
for line in sys.stdin:
    store.sweep()
    print(store.used_bytes, flush=True)
"""


@contextmanager
def another(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """A program with two arrays in `folder`, the second of which it reads; for each line it says
    how much it uses."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        try:
            yield program, program.stdout.readline().split()
        finally:
            program.kill()


def used_by(program: "subprocess.Popen[str]") -> int:
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write("\n")
    program.stdin.flush()
    return int(program.stdout.readline())


def test_numpy_alone_reads_what_is_stored(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path / "a" / "b", 1 << 20)
    for array in (ARRAY, ARRAY[:, :0], ARRAY.astype(np.uint8), ARRAY.astype(np.float32)):
        before = time.time()
        stored = store.put(np.ascontiguousarray(array))
        assert -1 <= stored.expires - store.lifetime_s - before <= 2 + time.time() - before
        with store.read(stored.id) as file:
            assert file.readall() == stored.path.read_bytes()
        mapped = np.load(stored.path, mmap_mode="r")
        assert (mapped.dtype, mapped.tolist()) == (array.dtype, array.tolist())
    assert store.used_bytes == sizes(store.folder)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_call_that_writes_less_than_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", lambda fd, part, write=os.write: write(fd, part[:7]))
    assert np.load(ArrayStore(tmp_path, 1 << 20).put(ARRAY).path).tolist() == ARRAY.tolist()


def test_ids_that_never_were_are_told_from_those_that_are_gone(
    tmp_path: Path, clock: Clock
) -> None:
    store = ArrayStore(tmp_path / "store", 1 << 20)
    first, second = store.put(ARRAY), store.put(ARRAY)
    assert first.id != second.id
    foreign = ArrayStore(tmp_path / "other", 1 << 20).put(ARRAY).id
    store.delete(first.id)
    clock.now = second.expires + 1
    nevers = ("", "0" * 48, foreign, f"../{first.id}", first.id[:-1], first.id.upper(), "é" * 48)
    for keys, error in ((nevers, UnknownArrayError), ((first.id, second.id), ArrayGoneError)):
        for key in keys:
            for method in (store.read, store.delete):
                with pytest.raises(error):
                    method(key)


def test_a_full_store_takes_more_when_something_expires(tmp_path: Path, clock: Clock) -> None:
    store = ArrayStore(tmp_path / "store", 2 * FILE_BYTES + 1, lifetime_s=100)
    first = store.put(ARRAY)
    clock.now += 60
    second = store.put(ARRAY)
    assert (store.has_room(FILE_BYTES), store.has_room(1)) == (False, True)
    clock.now = first.expires
    with pytest.raises(
        StoreError, match=f"{2 * FILE_BYTES} of {2 * FILE_BYTES + 1} bytes are used"
    ):
        store.put(ARRAY)
    clock.now += 1
    third = store.put(ARRAY)
    assert [each.path.exists() for each in (first, second, third)] == [False, True, True]
    assert store.used_bytes == sizes(store.folder) == 2 * FILE_BYTES
    clock.now = third.expires + 1
    assert store.sweep() == sizes(store.folder) == 0


def test_what_was_deleted_is_forgotten(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before it would have expired."""
    monkeypatch.setattr(array_store, "_GONE", 3)
    store = ArrayStore(tmp_path, 1 << 20)
    kept = store.put(ARRAY)
    for _ in range(20):
        store.delete(store.put(ARRAY).id)
    assert len(store._expiries) < 7
    clock.now = kept.expires + 1
    assert store.sweep() == sizes(tmp_path) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_array_that_is_not_written_to_its_end_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """As where the process is killed: nobody gets it, and it goes with the process's other
    files."""
    store = ArrayStore(tmp_path, 1 << 20)
    name = store.open()
    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", Mock(side_effect=error))
        with pytest.raises((KeyboardInterrupt, StoreError)):
            store.put(ARRAY)
    left = [path.stem for path in tmp_path.rglob("*.npy")]
    assert len(left) == (error is KeyboardInterrupt)
    for number in left:
        with pytest.raises(ArrayGoneError):
            store.read(name + number)
    store.close()
    ArrayStore(tmp_path).open()
    assert sizes(tmp_path) == 0


@pytest.mark.parametrize(
    "name", ["labels.npy", "labels.tmp", f"{'0' * 31}.npy", f"{'A' * 32}.npy", "0" * 16]
)
@pytest.mark.parametrize("keeps", [False, True])
def test_files_of_the_user_are_kept(tmp_path: Path, name: str, keeps: bool) -> None:
    """Where the folder that is named has some, or the subfolder."""
    store = ArrayStore(tmp_path, 1 << 20, lifetime_s=0)
    subfolder = store.put(ARRAY).path.parent
    for place in (tmp_path, subfolder):
        (place / name).write_bytes(b"12345")
        os.utime(place / name, (1, 1))
    store.close()
    other = ArrayStore(tmp_path, 1 << 20, keeps=keeps)
    other.open()
    other.close()
    remove_unused(tmp_path)
    assert (tmp_path / name).read_bytes() == (subfolder / name).read_bytes() == b"12345"


def _fill(folder: Path, rank: int) -> int:
    store, count = ArrayStore(folder, 100 * FILE_BYTES, rank=rank, count=3), 0
    with ThreadPoolExecutor(4) as threads:
        for index, future in enumerate([threads.submit(store.put, ARRAY) for _ in range(100)]):
            try:
                stored = future.result()
            except StoreError:
                continue
            if index % 3 == 0:
                store.delete(stored.id)
            else:
                count += 1
    assert store.used_bytes == count * FILE_BYTES <= 100 * FILE_BYTES // 3
    return count


def test_the_limit_holds_for_processes_and_threads_together(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        others = pool.starmap_async(_fill, [(folder, 0), (folder, 1)])
        kept = _fill(folder, 2) + sum(others.get(240))
    assert sizes(folder) == kept * FILE_BYTES <= 100 * FILE_BYTES


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    theirs, open_to_all, link = tmp_path / "theirs", tmp_path / "open", tmp_path / "link"
    for path in (theirs, open_to_all):
        path.mkdir()
        (path / "0123456789abcdef").mkdir()
    os.chown(theirs, 12345, -1)
    open_to_all.chmod(0o777)
    link.symlink_to(tmp_path)
    for path in (theirs, open_to_all, link):
        with pytest.raises(StoreError, match="folder of this user"):
            ArrayStore(path).put(ARRAY)
        remove_unused(path)
    assert (theirs / "0123456789abcdef").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used"):
        ArrayStore(tmp_path / "file" / "folder").put(ARRAY)


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("room", [2, 4])
def test_s6_a_folder_that_is_removed_or_renamed_is_made_again(
    tmp_path: Path, room: int, renamed: bool
) -> None:
    """Also by a store that is full."""
    store, other = (ArrayStore(tmp_path / "store", room * FILE_BYTES) for _ in range(2))
    first, _ = store.put(ARRAY), store.put(ARRAY)
    store.folder.rename(tmp_path / "elsewhere") if renamed else shutil.rmtree(store.folder)
    with pytest.raises(LookupError):
        store.read(first.id)
    second = store.put(ARRAY)
    other.read(second.id).close()
    assert sizes(store.folder) == FILE_BYTES


def test_what_is_left_for_an_owner_is_read_up_to_a_limit(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path, 4 * FILE_BYTES)
    stored = store.put(ARRAY)
    with (stored.path.parent / ".owner").open("wb") as owner:
        owner.truncate(1 << 30)
    _, peak = peak_of(lambda: store.sweep(0))
    assert peak < 8 << 20
    assert (stored.path.parent / ".owner").stat().st_size == 0
    ArrayStore(tmp_path, 4 * FILE_BYTES).delete(stored.id)
    assert store.sweep(0) == 0, "words that come later are read"


def test_nobody_waits_for_a_pipe_in_the_folder(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path, 4 * FILE_BYTES)
    stored = store.put(ARRAY)
    stored.path.unlink()
    os.mkfifo(stored.path)
    for method in (store.read, store.delete):
        with pytest.raises(StoreError, match="it is no file"):
            method(stored.id)
    (tmp_path / ("ff" * 8)).mkdir()
    os.mkfifo(tmp_path / ("ff" * 8) / ".owner")
    other = ArrayStore(tmp_path, 4 * FILE_BYTES)
    other.read(other.put(ARRAY).id).close()
    store.close()
    ArrayStore(tmp_path, 4 * FILE_BYTES).put(ARRAY)


def test_a_folder_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path / "store", 4 * FILE_BYTES)
    stored = store.put(ARRAY)
    store.folder.rename(tmp_path / "elsewhere")
    (tmp_path / "store").touch()
    for method in (
        lambda: store.put(ARRAY),
        lambda: store.read(stored.id),
        lambda: store.delete(stored.id),
    ):
        with pytest.raises(StoreError):
            method()
    assert store.used_bytes == FILE_BYTES


def test_s2_bytes_count_until_nobody_reads_them(tmp_path: Path) -> None:
    """In whichever process: a reader of a file that was removed would keep its bytes."""
    store, other = (ArrayStore(tmp_path, 2 * FILE_BYTES) for _ in range(2))
    first, second = store.put(ARRAY), store.put(ARRAY)
    readers = store.read(first.id), other.read(second.id)
    store.delete(first.id)
    other.delete(second.id)
    with pytest.raises(StoreError):
        store.make_room(1)
    assert sizes(tmp_path) == 2 * FILE_BYTES
    for number, reader in enumerate(readers):
        assert b"NUMPY" in reader.readall()
        reader.close()
        store.make_room(1)
        assert store.sweep() == sizes(tmp_path) == FILE_BYTES * (1 - number)


def test_s3_a_program_that_is_stopped_holds_nobody_up(tmp_path: Path) -> None:
    """No call waits: what is stored, fetched and deleted, of others too; starting; ending."""
    with another(tmp_path) as (program, keys):
        program.send_signal(signal.SIGSTOP)
        process = multiprocessing.get_context("fork").Process(
            target=_use_all, args=(tmp_path, keys)
        )
        process.start()
        process.join(60)
        exitcode = process.exitcode
        process.kill()
        assert exitcode == 0
        program.send_signal(signal.SIGCONT)
        assert used_by(program) == FILE_BYTES


def _use_all(folder: Path, keys: list[str]) -> None:
    store = ArrayStore(folder, 1 << 20, lifetime_s=0)
    stored = [store.put(ARRAY) for _ in range(3)]
    with suppress(ArrayGoneError):
        store.delete(stored[0].id)
    store.sweep()
    store.make_room(1 << 19)
    for key in keys:
        store.read(key).close()
        store.delete(key)
    store.close()
    remove_unused(folder)


def _calls(folder: Path, count: int) -> list[str]:
    """The calls that look at files, of requests to a store that has so many arrays."""
    left = ArrayStore(folder, 1 << 40)
    path = left.put(ARRAY).path
    for index in range(count - 1):
        os.link(path, path.with_name(f"{index:032x}.npy"))
    left.close()
    store, calls = ArrayStore(folder, (count + 3) * FILE_BYTES), []
    store.open()
    sys.addaudithook(
        lambda event, args: (
            calls.append(event) if event.startswith(("os.", "open", "fcntl")) else None
        )
    )
    stored = [store.put(ARRAY) for _ in range(3)]
    with suppress(StoreError):
        store.put(ARRAY)
    for each in stored[:2]:
        store.read(each.id).close()
        store.delete(each.id)
    store.make_room(FILE_BYTES)
    with suppress(StoreError):
        store.make_room(9 * FILE_BYTES)
    return [*calls, str(store.used_bytes // FILE_BYTES - count)]


def test_s4_nothing_on_a_requests_way_depends_on_the_number_of_arrays(tmp_path: Path) -> None:
    """Also where the store is full."""
    found = []
    for count in (10, 20_000):
        with multiprocessing.get_context("fork").Pool(1) as process:
            found.append(process.apply(_calls, (tmp_path / str(count), count)))
        shutil.rmtree(tmp_path / str(count))
    assert found[0] == found[1]
    assert found[0][-1] == "1"
    assert not {"os.listdir", "os.scandir"} & {*found[0]}


def test_what_an_ended_process_left_belongs_to_the_next_of_its_rank(
    tmp_path: Path, clock: Clock
) -> None:
    """In a folder that is kept; a limit holds over restarts, and what expired goes."""
    ranks = [ArrayStore(tmp_path, 8 * FILE_BYTES, rank=rank, count=2) for rank in range(2)]
    old = [store.put(ARRAY) for store in ranks]
    clock.now = old[0].expires + 1
    kept = [store.put(ARRAY) for store in ranks]
    live = ArrayStore(tmp_path, 8 * FILE_BYTES)
    stays = live.put(ARRAY)
    for store in ranks:
        store.close()
    again = [ArrayStore(tmp_path, 8 * FILE_BYTES, rank=rank, count=2) for rank in range(2)]
    for store in again:
        store.open()
        assert store.used_bytes == FILE_BYTES
    assert {*tmp_path.rglob("*.npy")} == {each.path for each in (*kept, stays)}
    for each in kept:
        again[0].read(each.id).close()
    for store, mine in zip(again, kept, strict=True):
        store.delete(mine.id)
        assert store.used_bytes == 0


@pytest.mark.parametrize("keeps", [True, False])
def test_what_an_ended_process_left_belongs_to_one_that_runs(
    tmp_path: Path, clock: Clock, keeps: bool
) -> None:
    """Else nobody counts it before the next start, and nobody removes what expires."""
    store = ArrayStore(tmp_path, 3 * FILE_BYTES, keeps=keeps)
    other = ArrayStore(tmp_path, 1 << 20, lifetime_s=10)
    store.put(ARRAY)
    first, second = other.put(ARRAY), other.put(ARRAY)
    assert store.sweep() == FILE_BYTES
    other.close()
    assert store.sweep() == 3 * FILE_BYTES
    with pytest.raises(StoreError):
        store.put(ARRAY)
    store.delete(first.id)
    store.read(second.id).close()
    assert store.used_bytes == 2 * FILE_BYTES
    clock.now = second.expires + 1
    assert store.sweep() == sizes(tmp_path) == FILE_BYTES


def test_what_expires_before_what_another_process_left(tmp_path: Path, clock: Clock) -> None:
    """Where a server begins again with a shorter lifetime: a folder would be full of arrays that
    have expired."""
    other = ArrayStore(tmp_path, 1 << 20, lifetime_s=1000)
    left = [other.put(ARRAY) for _ in range(2)]
    other.close()
    store = ArrayStore(tmp_path, 4 * FILE_BYTES, lifetime_s=10)
    for _ in range(3):
        stored = store.put(ARRAY), store.put(ARRAY)
        clock.now = stored[1].expires + 1
    store.delete(left[0].id)
    assert store.sweep() == sizes(tmp_path) == FILE_BYTES
    clock.now = left[1].expires + 1
    assert store.sweep() == sizes(tmp_path) == 0


def test_what_is_read_when_its_process_ends_goes_afterwards(tmp_path: Path, clock: Clock) -> None:
    store, other = ArrayStore(tmp_path, 1 << 20), ArrayStore(tmp_path, 1 << 20)
    store.put(ARRAY)
    _, stored = other.put(ARRAY), other.put(ARRAY)
    with store.read(stored.id):
        other.delete(stored.id)
        other.close()
        assert store.sweep() == sizes(tmp_path) == 3 * FILE_BYTES
    assert store.sweep() == sizes(tmp_path) == 2 * FILE_BYTES


def test_the_end_of_a_process_whose_child_goes_on(tmp_path: Path) -> None:
    """The child has its files open."""
    store = ArrayStore(tmp_path / "store", 1 << 20, keeps=False)
    store.put(ARRAY)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    store.close()
    child.kill()
    child.join()
    assert not store.folder.exists()


def _put_and_leave_work_to_the_thread(folder: Path, count: int) -> None:
    store = ArrayStore(folder, 1 << 20, keeps=False)
    for _ in range(count):
        store.writer.submit(store.put, ARRAY)
    store.put(ARRAY)


def test_a_process_may_end_while_another_begins(tmp_path: Path) -> None:
    folder, context = tmp_path / "store", multiprocessing.get_context("fork")
    for _ in range(20):
        processes = [
            context.Process(target=_put_and_leave_work_to_the_thread, args=(folder, n))
            for n in (0, 20)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
        assert not folder.exists()


def test_a_folder_that_another_process_removes_while_it_is_made(tmp_path: Path) -> None:
    """S6. It is gone, and made again: "File exists" would have the first array of a process
    fail."""
    folder, context = tmp_path / "store", multiprocessing.get_context("fork")
    remover = context.Process(target=_remove_forever, args=(folder,), daemon=True)
    remover.start()
    found_gone = 0
    try:
        while found_gone < 10:
            try:
                private_folder(folder)
            except FileNotFoundError:
                found_gone += 1
    finally:
        remover.kill()
        remover.join()


def _remove_forever(folder: Path) -> None:
    while True:
        with suppress(FileNotFoundError):
            folder.rmdir()
