"""The folder of stored arrays, used by several processes and threads at once."""

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from routed_experts.server.outputs.array_store import (
    ArrayGoneError,
    ArrayStore,
    StoreError,
    StoreFullError,
    UnknownArrayError,
    remove_at_exit,
    remove_unused,
)

ARRAY = np.arange(4 * 10 * 2, dtype=np.int16).reshape(4, 10, 2)
FILE_BYTES = 4096  # a block


def sizes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("[!.]*"))


def test_numpy_alone_reads_what_is_stored(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path / "a" / "b", 1 << 20)
    for array in (ARRAY, ARRAY[:, :0], ARRAY.astype(np.uint8), ARRAY.astype(np.float32)):
        before = time.time()
        stored = store.put(np.ascontiguousarray(array))
        assert -1 <= stored.expires - store.lifetime_s - before <= 2 + time.time() - before
        assert store.find(stored.id) == stored.path
        mapped = np.load(stored.path, mmap_mode="r")
        assert (mapped.dtype, mapped.tolist()) == (array.dtype, array.tolist())
    assert store.used_bytes == sizes(store.folder)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_ids_that_never_were_are_told_from_those_that_are_gone(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path / "store", 1 << 20)
    first, second = store.put(ARRAY), store.put(ARRAY)
    assert first.id != second.id
    forged = first.id[:-1] + ("0" if first.id[-1] != "0" else "1")
    for never in ("", "0" * 48, forged, f"../{first.id}", "é" * 48):
        with pytest.raises(UnknownArrayError):
            store.find(never)
    store.delete(first.id)
    os.utime(second.path, (1, 1))
    for gone in (first.id, second.id):
        for method in (store.find, store.delete):
            with pytest.raises(ArrayGoneError):
                method(gone)
    again = ArrayStore(tmp_path / "store", 1 << 20)  # after a restart
    assert again.sweep() == 0
    assert not list(store.folder.glob("*.npy"))
    with pytest.raises(ArrayGoneError):
        again.find(second.id)


def test_a_full_store_takes_more_when_something_expires(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path / "store", 2 * FILE_BYTES + 1)
    stored = [store.put(ARRAY) for _ in range(2)]
    assert not store.has_room(FILE_BYTES)
    assert store.has_room(1)
    with pytest.raises(StoreFullError):
        store.put(ARRAY)
    assert len(list(store.folder.glob("[!.]*"))) == 2
    os.utime(stored[0].path, (1, 1))
    assert store.sweep() == FILE_BYTES
    store.put(ARRAY)


def test_a_full_store_is_not_searched_for_each_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr("routed_experts.server.outputs.array_store.time.monotonic", lambda: now)
    store = ArrayStore(tmp_path / "store", FILE_BYTES)
    stored = store.put(ARRAY)
    assert store.make_room(1)
    os.utime(stored.path, (1, 1))
    assert store.make_room(1)
    now += 1
    assert store.make_room(1) is None
    assert not stored.path.exists()


def test_files_that_ended_processes_left_behind_are_deleted(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path / "store", 1 << 20)
    assert store.sweep() == 0
    old, new = store.folder / f"{'0' * 48}.tmp", store.folder / f"{'1' * 48}.tmp"
    for path in (old, new):
        path.write_bytes(b"12345")
    os.utime(old, (time.time() - 700,) * 2)
    assert store.sweep() == FILE_BYTES
    assert not old.exists()


@pytest.mark.parametrize("name", ["labels.npy", "labels.tmp", f"{'0' * 47}.npy", f"{'0' * 49}.npy", f"{'A' * 48}.npy"])
def test_files_of_the_user_are_kept(tmp_path: Path, name: str) -> None:
    """Where the folder that is named has some."""
    (tmp_path / name).write_bytes(b"12345")
    os.utime(tmp_path / name, (1, 1))
    store = ArrayStore(tmp_path, 1 << 20, lifetime_s=0)
    store.put(ARRAY)
    time.sleep(2)
    assert store.sweep() == 0
    assert [path.name for path in tmp_path.glob("[!.]*")] == [name]


def _fill(folder: Path, seed: int) -> int:
    store, count = ArrayStore(folder, 100 * FILE_BYTES), 0
    for index in range(100):
        try:
            stored = store.put(ARRAY)
        except StoreFullError:
            continue
        if (index + seed) % 3 == 0:
            store.delete(stored.id)
        else:
            count += 1
    return count


def test_the_limit_holds_for_processes_and_threads_together(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with multiprocessing.get_context("spawn").Pool(2) as pool, ThreadPoolExecutor(4) as threads:
        others = pool.starmap_async(_fill, [(folder, 0), (folder, 1)])
        kept = sum(threads.map(_fill, [folder] * 4, range(4))) + sum(others.get(240))
    store = ArrayStore(folder, 0)
    assert kept == len(list(folder.glob("*.npy"))) <= 100
    assert not store.is_open
    assert store.used_bytes == sizes(folder) == kept * FILE_BYTES


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    theirs, open_to_all, link = tmp_path / "theirs", tmp_path / "open", tmp_path / "link"
    for path in (theirs, open_to_all):
        path.mkdir()
    os.chown(theirs, 12345, -1)
    open_to_all.chmod(0o777)
    link.symlink_to(tmp_path)
    for path in (theirs, open_to_all, link):
        with pytest.raises(StoreError, match="folder of this user"):
            ArrayStore(path).put(ARRAY)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used"):
        ArrayStore(tmp_path / "file" / "folder").put(ARRAY)


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    store, other = (ArrayStore(tmp_path / "store", 2 * FILE_BYTES) for _ in range(2))
    first = store.put(ARRAY)
    assert other.find(first.id) == first.path
    shutil.rmtree(store.folder)
    with pytest.raises(ArrayGoneError):
        store.find(first.id)
    second = store.put(ARRAY)
    assert other.find(second.id) == second.path
    assert store.used_bytes == other.used_bytes == other.sweep() == FILE_BYTES


def test_a_folder_that_is_removed_while_it_is_locked(tmp_path: Path) -> None:
    store, other = (ArrayStore(tmp_path / "store", 1 << 20) for _ in range(2))
    store.put(ARRAY)
    with ThreadPoolExecutor() as another:
        with store._locked():
            shutil.rmtree(store.folder)
            other.put(ARRAY)
            waits = another.submit(store.put, ARRAY)
            time.sleep(0.1)
        waits.result(60)
    assert other.used_bytes == other.sweep() == 2 * FILE_BYTES


def test_a_folder_that_is_removed_at_any_time(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path / "store", 1 << 20)

    def put(_: int) -> None:
        with suppress(StoreError):
            store.put(ARRAY)

    with ThreadPoolExecutor(4) as threads:
        puts = [threads.submit(put, index) for index in range(400)]
        while not all(done.done() for done in puts):
            shutil.rmtree(store.folder, ignore_errors=True)
            time.sleep(0.001)  # else each call of the others waits 5 ms for Python's lock
        for done in puts:
            done.result(10)
    store.put(ARRAY)
    assert store.sweep() == sizes(store.folder)


def test_a_folder_that_cannot_be_searched_is_reported(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path / "store", FILE_BYTES)
    store.put(ARRAY)
    store.folder.rename(tmp_path / "elsewhere")
    (tmp_path / "store").touch()
    for method in (store.sweep, lambda: store.put(ARRAY)):
        with pytest.raises(StoreError):
            method()


def test_a_folder_in_use_is_not_removed(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path / "store", 1 << 20)
    stored = store.put(ARRAY)
    remove_unused(store.folder)
    assert store.find(stored.id).exists()
    store.close()
    remove_unused(store.folder)
    assert not store.folder.exists()
    remove_unused(store.folder)


def test_a_process_that_ends_removes_the_folder_that_it_used_itself(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path / "store", 1 << 20)
    store.put(ARRAY)
    remove_unused(store.folder)
    assert store.folder.exists()
    remove_unused(store.folder, ends=True)
    assert not store.folder.exists()


def _put(folder: Path) -> None:
    remove_at_exit(folder)
    ArrayStore(folder, 1 << 20).put(ARRAY)


def _leave_work_to_the_thread(folder: Path) -> None:
    remove_at_exit(folder)
    store = ArrayStore(folder, 1 << 20)
    for _ in range(20):
        store.submit(store.put, ARRAY)
    store.put(ARRAY)


@pytest.mark.parametrize("use", [_put, _leave_work_to_the_thread])
def test_a_process_may_end_while_another_begins(tmp_path: Path, use: Callable[[Path], None]) -> None:
    folder, context = tmp_path / "store", multiprocessing.get_context("fork")
    for _ in range(40):
        processes = [context.Process(target=use, args=(folder,)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
        assert not folder.exists()
