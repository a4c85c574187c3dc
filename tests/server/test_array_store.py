"""The folder of stored arrays, used by several stores and threads at once."""

import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from routed_experts.server.outputs import array_store, folders
from routed_experts.server.outputs.array_store import (
    ArrayGoneError,
    ArrayStore,
    StoreError,
    UnknownArrayError,
)
from routed_experts.server.outputs.folders import remove_arrays

ARRAY = np.arange(4 * 10 * 2, dtype=np.int16).reshape(4, 10, 2)
FILE_BYTES = 4096  # a block


class Clock:
    """Both clocks of the store, which begin now."""

    def __init__(self) -> None:
        self.now = time.time()

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    both = {"time": clock.time, "monotonic": clock.time}
    for module in (array_store, folders):
        monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), **both}))
    return clock


def sizes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.npy"))


def content(store: ArrayStore, key: str) -> bytes:
    return store.read(key, [(0, store.size(key))])


def test_numpy_alone_reads_what_is_stored(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path / "a" / "b", 1 << 20)
    for array in (ARRAY, ARRAY[:, :0], ARRAY.astype(np.uint8), ARRAY.astype(np.float32)):
        before = time.time()
        stored = store.put(np.ascontiguousarray(array))
        after = time.time()
        assert before - 1 <= stored.expires - store.lifetime_s <= after + 2
        assert content(store, stored.id) == stored.path.read_bytes()
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
    mistyped = f"{first.id[:20]}{(int(first.id[20], 16) + 1) % 16:x}{first.id[21:]}"
    ill_formed = ("", "0" * 48, f"../{first.id}", first.id[:-1], first.id.upper(), "é" * 40)
    nevers = (*ill_formed, "0" * 40, "f" * 40, mistyped)
    gone = (first.id, second.id, foreign)
    for keys, error in ((nevers, UnknownArrayError), (gone, ArrayGoneError)):
        for key in keys:
            for method in (store.size, store.delete):
                with pytest.raises(error):
                    method(key)


def test_an_id_says_when_it_expires_and_nothing_else(tmp_path: Path) -> None:
    """Who has one cannot guess another; and whatever a clock did meanwhile, all servers agree."""
    stored = [ArrayStore(tmp_path, lifetime_s=100).put(ARRAY) for _ in range(50)]
    assert {int(entry.id[:8], 16) for entry in stored} == {entry.expires for entry in stored}
    numbers = {entry.id[8:] for entry in stored}
    assert len(numbers) == 50
    assert all(re.fullmatch("[0-9a-f]{32}", number) for number in numbers)
    assert len({number[:4] for number in numbers}) > 40, "they are drawn, not counted"


def test_a_full_store_takes_more_when_something_expires(tmp_path: Path, clock: Clock) -> None:
    store = ArrayStore(tmp_path / "store", 2 * FILE_BYTES + 1, lifetime_s=100)
    first = store.put(ARRAY)
    clock.now += 60
    second = store.put(ARRAY)
    clock.now = first.expires
    with pytest.raises(
        StoreError,
        match=f"{2 * FILE_BYTES} of {2 * FILE_BYTES + 1} bytes are used, {FILE_BYTES} more do not fit",
    ):
        store.put(ARRAY)
    clock.now += 1
    third = store.put(ARRAY)
    assert [entry.path.exists() for entry in (first, second, third)] == [False, True, True]
    assert store.used_bytes == sizes(store.folder) == 2 * FILE_BYTES
    clock.now = third.expires + 1
    assert store.sweep() == sizes(store.folder) == 0


def test_a_folder_of_expired_hours_is_left_with_those_that_are_not(
    tmp_path: Path, clock: Clock
) -> None:
    store = ArrayStore(tmp_path, 1 << 20, lifetime_s=10**5)
    for _ in range(5):
        stored = store.put(ARRAY)
        clock.now += 3600
    hours = {path.name for path in tmp_path.iterdir()}
    assert len(hours) == 5
    clock.now = stored.expires
    assert store.sweep() == FILE_BYTES
    assert [path.name for path in tmp_path.iterdir()] == [stored.path.parent.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_array_that_is_not_written_to_its_end_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, error: BaseException
) -> None:
    """As where the process is killed: nobody has its id, and it goes when its time has passed."""
    store = ArrayStore(tmp_path, 1 << 20, lifetime_s=100)
    store.open()
    writes = []

    def half(descriptor: int, part: memoryview) -> int:
        writes.append(write(descriptor, part[:20]))
        if len(writes) == 2:
            raise error
        return writes[-1]

    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises((KeyboardInterrupt, StoreError)):
            store.put(ARRAY)
    assert len([*tmp_path.rglob("*.npy")]) == (error is KeyboardInterrupt)
    another_server = ArrayStore(tmp_path)
    another_server.open()
    assert another_server.used_bytes == sizes(tmp_path)
    clock.now += 102
    assert another_server.sweep() == sizes(tmp_path) == 0


def test_files_of_the_user_are_kept(tmp_path: Path) -> None:
    """Where the folder has some, or the subfolder."""
    names = ("labels.npy", f"{'0' * 39}.npy", f"{'A' * 40}.npy", "0" * 16, "2020-01-01T00")
    store = ArrayStore(tmp_path, 1 << 20, lifetime_s=0)
    subfolder = store.put(ARRAY).path.parent
    files = [folder / name for folder in (tmp_path, subfolder) for name in names]
    for file in files:
        file.write_bytes(b"12345")
        os.utime(file, (1, 1))
    ArrayStore(tmp_path, 1 << 20).open()
    remove_arrays(tmp_path)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(files)


def test_the_limit_holds_for_threads_together(tmp_path: Path) -> None:
    """Arrays that are being written count."""
    store, num_stored = ArrayStore(tmp_path, 30 * FILE_BYTES), 0
    with ThreadPoolExecutor(4) as threads:
        for index, future in enumerate([threads.submit(store.put, ARRAY) for _ in range(100)]):
            try:
                stored = future.result()
            except StoreError:
                continue
            num_stored += 1
            if index % 3 == 0:
                store.delete(stored.id)
                num_stored -= 1
    assert store.used_bytes == sizes(tmp_path) == num_stored * FILE_BYTES
    assert 0 < num_stored <= 30


def test_a_system_that_reads_fewer_bytes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reads 2 GiB at most."""
    store = ArrayStore(tmp_path, 1 << 30)
    stored = store.put(ARRAY)
    size = store.size(stored.id)
    content = store.read(stored.id, [(0, size)])
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, at: pread(file, min(count, 7), at))
    assert store.read(stored.id, [(0, size)]) == content
    assert store.read(stored.id, [(3, 30), (1, 5)]) == content[3:30] + content[1:5]
    assert store.read(stored.id, [(size - 3, size + 9)]) == content[-3:], "what there is"


def test_threads_that_count_at_once_count_each_array_once(tmp_path: Path) -> None:
    store = ArrayStore(tmp_path, 1 << 30)
    with ThreadPoolExecutor(8) as threads:
        for _ in range(10):
            for _ in range(10):
                store.put(ARRAY)
            for future in [threads.submit(store.sweep) for _ in range(8)]:
                future.result()
    assert store.used_bytes == sizes(tmp_path) == 100 * FILE_BYTES


def test_the_limit_holds_for_processes_within_a_second(tmp_path: Path, clock: Clock) -> None:
    """Each counts what the others wrote before."""
    one, other = (ArrayStore(tmp_path, 4 * FILE_BYTES) for _ in range(2))
    for store in (one, other):
        store.open()
        assert store.used_bytes == 0
    for _ in range(3):
        stored = one.put(ARRAY)
    clock.now += 1
    other.put(ARRAY)
    assert other.used_bytes == 4 * FILE_BYTES
    for store in (other, one):
        clock.now += 1
        with pytest.raises(StoreError):
            store.put(ARRAY)
    other.delete(stored.id)
    clock.now += 1
    one.put(ARRAY)
    assert sizes(tmp_path) == 4 * FILE_BYTES


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
        remove_arrays(path)
    assert (theirs / "0123456789abcdef").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used"):
        ArrayStore(tmp_path / "file" / "folder").put(ARRAY)


def test_a_url_that_became_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be a folder below the current one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="as text"):
        ArrayStore(Path("s3://bucket/prefix"))
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    """Also by a store that was full."""
    store, other = (ArrayStore(tmp_path / "store", 2 * FILE_BYTES) for _ in range(2))
    first, _ = store.put(ARRAY), store.put(ARRAY)
    shutil.rmtree(store.folder)
    with pytest.raises(LookupError):
        store.size(first.id)
    second = store.put(ARRAY)
    assert content(other, second.id)
    assert sizes(store.folder) == FILE_BYTES
    assert store.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("other", ["pipe", "link"])
def test_what_stands_in_place_of_an_array_is_neither_read_nor_deleted(
    tmp_path: Path, other: str
) -> None:
    store = ArrayStore(tmp_path / "store", 4 * FILE_BYTES)
    stored = store.put(ARRAY)
    stored.path.rename(tmp_path / "elsewhere")
    if other == "pipe":
        os.mkfifo(stored.path)  # nobody waits for it
    else:
        stored.path.symlink_to(tmp_path / "elsewhere")
    for method in (store.size, store.delete, lambda key: store.read(key, [(0, 1)])):
        with pytest.raises(StoreError):
            method(stored.id)
    assert os.path.lexists(stored.path)


def test_counting_many_arrays_takes_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Not each request that is refused looks at all files."""
    store = ArrayStore(tmp_path, 2 * FILE_BYTES)
    counts, remove_expired = [], folders._remove_expired

    def slowly(folder: Path, now: float) -> int:
        counts.append(clock.now)
        clock.now += 0.5
        return remove_expired(folder, now)

    monkeypatch.setattr(folders, "_remove_expired", slowly)
    store.put(ARRAY), store.put(ARRAY)
    began = clock.now
    while clock.now < began + 100:
        clock.now += 0.1
        with pytest.raises(StoreError):
            store.put(ARRAY)
    assert 3 <= len([at for at in counts if at >= began]) <= 5
