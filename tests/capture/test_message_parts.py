"""How the room in a message is divided among rows that wait."""

from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.capture.scheduler.message_parts import PART_BYTES, divide, room_in_message

ROW = 6
PART = 20 * ROW
SIZES = st.lists(st.integers(1, 60).map(lambda rows: rows * ROW), min_size=1, max_size=8)
ROOM = st.integers(0, 400 * ROW)
AT_RANDOM = settings(max_examples=200, deadline=None, database=None, derandomize=True)


@AT_RANDOM
@given(SIZES, ROOM)
def test_whole_rows_fill_the_room(sizes: list[int], room: int) -> None:
    parts = divide(room, sizes, ROW)
    assert all(part % ROW == 0 and part <= size for part, size in zip(parts, sizes, strict=True))
    left = room - sum(parts)
    assert left >= 0
    assert parts == sizes or left < ROW


@AT_RANDOM
@given(SIZES, ROOM)
def test_the_first_gets_half_of_the_room(sizes: list[int], room: int) -> None:
    """So it never waits for those that came later."""
    parts = divide(room, sizes, ROW)
    share = room // 2 if len(sizes) > 1 else room
    assert parts[0] >= min(sizes[0], share // ROW * ROW)


@AT_RANDOM
@given(SIZES, ROOM)
def test_of_those_that_came_later_the_shortest_go_first(sizes: list[int], room: int) -> None:
    """If two are as long, the one that came first. Until all are sent, the first gets no more than
    half."""
    parts = divide(room, sizes, ROW)
    in_order = sorted(range(1, len(sizes)), key=lambda index: (sizes[index], index))
    is_cut = [parts[index] < sizes[index] for index in in_order]
    if not any(is_cut):
        return
    behind = in_order[is_cut.index(True) + 1 :]
    assert [parts[index] for index in behind] == [0] * len(behind)
    assert parts[0] <= room // 2


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
