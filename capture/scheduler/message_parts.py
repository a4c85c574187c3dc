"""How many bytes of which rows go into a message, of those that wait to be sent."""

from collections.abc import Sequence

PART_BYTES = 8 << 20
"""Maximum bytes of such rows in a message that also has other requests' tokens, which it delays by
about 3 ms. A prompt of 32k tokens (Qwen3-30B-A3B) takes three or four steps."""

BACKLOG_SHARE = 16
"""If more wait, since long prefills add more than one part per step, each message takes a quarter
of the backlog up to three parts, so that prompts wait for few steps, or 1 / BACKLOG_SHARE of it,
if that is more."""


def room_in_message(backlog: int, part_bytes: int, *, delays_others: bool) -> int:
    """Bytes of rows that go into a message, of the `backlog` bytes that wait for an API process.
    `delays_others`: whether the message also has something that does not wait for all of them."""
    if not delays_others:
        return backlog
    quarter = min(backlog // 4, 3 * part_bytes)
    return min(backlog, max(part_bytes, quarter, backlog // BACKLOG_SHARE))


def divide(room: int, sizes: Sequence[int], row_bytes: int) -> list[int]:
    """Bytes of each entry that go into a message with `room` bytes for rows; whole rows only.

    `sizes` are those of the entries, at least one, in the order in which they came; each is a
    multiple of `row_bytes`. The entry that came first gets half of the room, so that those that
    come later never hold it up. In the rest, shorter entries come before longer ones, so that as
    many requests as possible go on. What is left then goes to the first.
    """
    parts = [0] * len(sizes)
    later = sorted(range(1, len(sizes)), key=sizes.__getitem__)
    share_of_first = room // 2 if later else room
    parts[0] = _whole_rows(min(share_of_first, sizes[0]), row_bytes)
    left = room - parts[0]
    for index in later:
        if left < row_bytes:
            break
        parts[index] = _whole_rows(min(left, sizes[index]), row_bytes)
        left -= parts[index]
    parts[0] += _whole_rows(min(left, sizes[0] - parts[0]), row_bytes)
    return parts


def _whole_rows(num_bytes: int, row_bytes: int) -> int:
    return num_bytes // row_bytes * row_bytes
