"""How the room in a message is divided among rows that wait."""

from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.capture.scheduler.message_parts import PART_BYTES, divide, room_in_message

ROW = 6
PART = 20 * ROW
SIZES = st.lists(st.integers(1, 60).map(lambda rows: rows * ROW), min_size=1, max_size=8)
AT_RANDOM = settings(max_examples=200, deadline=None, database=None, derandomize=True)


@AT_RANDOM
@given(SIZES, st.integers(0, 400 * ROW))
def test_what_is_divided(sizes: list[int], room: int) -> None:
    parts = divide(room, sizes, ROW)
    assert all(part % ROW == 0 and part <= size for part, size in zip(parts, sizes, strict=True))
    # no more than there is room for, and nothing is left out for which there is room
    assert sum(parts) <= room
    assert parts == sizes or room - sum(parts) < ROW
    # The first never waits for those that came later.
    half = room // 2 if len(sizes) > 1 else room
    assert parts[0] >= min(sizes[0], half // ROW * ROW)
    # Whoever gets something was not longer than another that waits, nor came after it if it was as
    # long. The first gets more than half only where no other waits.
    later = list(zip(sizes, range(len(sizes)), parts, strict=True))[1:]
    for size, index, part in later:
        if part < size:
            assert not any(other > 0 for *longer, other in later if longer > [size, index])
            assert parts[0] <= half


@AT_RANDOM
@given(
    st.integers(1, 40),
    st.lists(st.lists(st.integers(1, 10), max_size=6), min_size=6, max_size=6),
)
def test_the_first_is_sent_soon_whatever_comes_later(first: int, arrivals: list[list[int]]) -> None:
    """Half of a part of each message is for it."""
    sizes = [first * ROW]
    num_messages = 0
    for num_rows in arrivals:
        sizes += [rows * ROW for rows in num_rows]
        room = room_in_message(sum(sizes), PART, delays_others=True)
        parts = divide(room, sizes, ROW)
        num_messages += 1
        if parts[0] == sizes[0]:
            break
        left = [size - part for size, part in zip(sizes, parts, strict=True)]
        sizes = [left[0], *(size for size in left[1:] if size)]
    assert num_messages <= -(-first // (PART // 2 // ROW))


@AT_RANDOM
@given(st.integers(0, 1 << 40))
def test_how_much_room_there_is(backlog: int) -> None:
    assert room_in_message(backlog, PART_BYTES, delays_others=False) == backlog
    room = room_in_message(backlog, PART_BYTES, delays_others=True)
    assert min(backlog, PART_BYTES) <= room <= max(3 * PART_BYTES, backlog // 16)
    # Prompts wait for few steps, however many of them come.
    assert room >= backlog // 16
