"""What the arrays of a response look like: the form that a request asks for, and its sizes.

Nothing here changes once it is made. `encoding.py` makes the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from routed_experts.capture.wire.rows import row_shape, steps_of, weights_of
from routed_experts.protocol.batch import spread_unchecked
from routed_experts.protocol.codec import (
    NUMPY_DTYPES,
    UNKNOWN,
    UNKNOWN_STEP,
    CodecError,
    Format,
    Rows,
    count_missing,
)
from routed_experts.server.outputs.npy import NPY_HEADER_BYTES

PART_BYTES = 48 << 10
"""Bytes of an array that are encoded at once: whole groups of three, which in base64 are 64 KiB."""
_OBJECT_BYTES = 128
"""Upper bound for the JSON text around `data`."""
_FLOAT_TEXT_BYTES = 26
"""Upper bound for a float32 in a JSON list, with its comma."""
_UNKNOWN_BYTE = 0xFF
"""Of which -1 consists in each type. To search for a number in bytes takes a third of the time that
bytes take."""


class LostRowsError(CodecError):
    """Some rows are unknown, and the requested dtype cannot hold -1."""


@dataclass(frozen=True, kw_only=True)
class WireForm:
    """The form of arrays of ids, and of the weights and steps beside them if a request asks for
    those."""

    format: Format = "object"
    dtype: str = "int16"  # on the wire
    ids_shape: tuple[int, int]  # (L, K): of a captured row of ids
    num_experts: int
    # decoder layers of the L layers, and how many there are; None to send the L layers as they are
    decoder_layers: tuple[Sequence[int], int] | None = None
    has_weights: bool = False
    has_steps: bool = False

    @property
    def has_single_rows(self) -> bool:
        """Whether `single_rows` gives rows as they are sent, in base64."""
        return (
            self.format != "list"
            and self.dtype in ("int16", "uint8")
            and self.decoder_layers is None
        )

    @cached_property
    def forms(self) -> tuple["WireForm", ...]:
        """The forms of the arrays that take the place of one array of rows: of ids, weights and
        steps."""
        forms: list[WireForm] = [self]
        if self.has_weights:
            weights = WeightsForm(
                format=self.format,
                dtype="float32",
                ids_shape=self.ids_shape,
                num_experts=self.num_experts,
                decoder_layers=self.decoder_layers,
            )
            forms.append(weights)
        if self.has_steps:
            steps = StepsForm(dtype="uint32", ids_shape=self.ids_shape, num_experts=0)
            forms.append(steps)
        return tuple(forms)

    def name(self, of_ids: str) -> str:
        """Of such an array, beside the array of ids that is called `of_ids`."""
        return of_ids

    @cached_property
    def captured_shape(self) -> tuple[int, int]:
        """Of a captured row, as `converted` takes it: (L, K), higher with weights and steps."""
        return row_shape(*self.ids_shape, self.has_weights, self.has_steps)

    @cached_property
    def wire_dtype(self) -> np.dtype[Any]:
        return NUMPY_DTYPES[self.dtype]

    @cached_property
    def wire_shape(self) -> tuple[int, ...]:
        """Of a row as it is sent: layers and columns."""
        num_layers = self.ids_shape[0] if self.decoder_layers is None else self.decoder_layers[1]
        return num_layers, self.ids_shape[1]

    @cached_property
    def row_bytes(self) -> int:
        return prod(self.wire_shape) * self.wire_dtype.itemsize

    @cached_property
    def list_row_bytes(self) -> int:
        """Upper bound for the text of a row in nested lists."""
        num_layers, num_columns = self.wire_shape
        return num_layers * (num_columns * self.item_text_bytes + 2) + 2

    @property
    def item_text_bytes(self) -> int:
        """Upper bound for the text of an id, with its comma."""
        return 1 + max(len(str(self.num_experts - 1)), len(str(UNKNOWN)))

    # ---- sizes of some rows, and of their weights and steps ----

    def text_bytes(self, num_rows: int) -> int:
        """Upper bound for the JSON text of `num_rows` rows."""
        return sum(form._text_bytes(num_rows) for form in self.forms)

    def _text_bytes(self, num_rows: int) -> int:
        num_bytes = num_rows * self.row_bytes
        match self.format:
            case "list":
                return num_rows * self.list_row_bytes + 2
            case "npy":
                num_bytes += NPY_HEADER_BYTES
            case "object" | "raw":
                pass
            case unknown:
                assert_never(unknown)
        return -(-num_bytes // 3) * 4 + _OBJECT_BYTES

    def rows_in(self, num_bytes: int) -> int:
        """Number of rows whose JSON text surely fits into `num_bytes`; at least one."""
        empty = self.text_bytes(0)
        of_three = self.text_bytes(3)  # whose base64 has whole groups
        rounding = 3 * len(self.forms)
        return max(3 * (num_bytes - empty - rounding) // (of_three - empty), 1)

    # ---- arrays ----

    def converted(self, rows: Rows) -> tuple[NDArray[Any], int]:
        """`rows` as the array [n, layers, columns] of the type on the wire, in C order, and how many
        of them are unknown, which is an error if that type cannot hold -1."""
        array, missing = self.in_wire_dtype(rows)
        return np.ascontiguousarray(array), missing

    def in_wire_dtype(self, rows: Rows) -> tuple[NDArray[Any], int]:
        """The same, perhaps as a view of `rows`: only the columns stand beside each other."""
        array = self.laid_out(rows)
        missing = 0 if _is_surely_known(array) else count_missing(array)
        if missing and self.wire_dtype.kind == "u":
            raise LostRowsError(
                f"{missing} rows are unknown (-1), which {self.dtype} cannot hold: set routed_experts_dtype to int16"
            )
        return array.astype(self.wire_dtype, copy=False), missing

    def single_rows(self, rows: Rows) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """`rows` [n, ...] as the array [n, layers x columns] of the type on the wire, in C order, and
        which of them [n] are unknown in part: those may be anything."""
        ids = self.ids(rows).reshape(len(rows), -1)
        is_unknown: NDArray[np.bool_] = ids.min(axis=1) == UNKNOWN
        return np.ascontiguousarray(ids, self.wire_dtype), is_unknown

    def laid_out(self, rows: Rows) -> NDArray[Any]:
        """The array [n, layers, columns] that is sent of `rows`."""
        return self.spread(self.ids(rows))

    def ids(self, rows: Rows) -> Rows:
        return rows[:, : self.ids_shape[0]] if self.captured_shape != self.ids_shape else rows

    def spread(self, array: NDArray[Any]) -> NDArray[Any]:
        """`array` [..., L, K], with all decoder layers if they are sent."""
        if self.decoder_layers is None:
            return array
        _, num_layers = self.decoder_layers
        return spread_unchecked(array, self._layer_indexes, num_layers)

    @cached_property
    def _layer_indexes(self) -> NDArray[np.intp]:
        """The decoder layers as numpy indexes with them at once: each row of a stream needs it."""
        assert self.decoder_layers is not None
        return np.asarray(self.decoder_layers[0], np.intp)


class WeightsForm(WireForm):
    """The form of arrays of weights: float32, NaN where they are unknown (null in lists)."""

    def name(self, of_ids: str) -> str:
        return f"{of_ids[:-1]}_weights"

    @cached_property
    def captured_shape(self) -> tuple[int, int]:
        return row_shape(*self.ids_shape, with_weights=True)

    @property
    def has_single_rows(self) -> bool:
        return self.format != "list" and self.decoder_layers is None

    @property
    def item_text_bytes(self) -> int:
        return _FLOAT_TEXT_BYTES

    def single_rows(self, rows: Rows) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """A weight that a router gave as NaN counts as unknown here."""
        weights = weights_of(rows).reshape(len(rows), -1)
        is_unknown = np.asarray(np.isnan(weights).any(axis=1))
        return np.ascontiguousarray(weights), is_unknown

    def laid_out(self, rows: Rows) -> NDArray[Any]:
        return self.spread(weights_of(rows))


class StepsForm(WireForm):
    """The form of arrays of steps: always `object`, of uint32 [n]."""

    def name(self, of_ids: str) -> str:
        return f"{of_ids}_steps"

    @property
    def has_single_rows(self) -> bool:
        return True

    @cached_property
    def captured_shape(self) -> tuple[int, int]:
        return row_shape(*self.ids_shape, with_weights=False, with_step=True)

    @cached_property
    def wire_dtype(self) -> np.dtype[Any]:
        return np.dtype("<u4")

    @cached_property
    def wire_shape(self) -> tuple[int, ...]:
        return ()

    def in_wire_dtype(self, rows: Rows) -> tuple[NDArray[Any], int]:
        steps = steps_of(rows)
        return steps, int(np.count_nonzero(steps == UNKNOWN_STEP))

    def single_rows(self, rows: Rows) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        steps = steps_of(rows)
        return steps[:, np.newaxis], steps == UNKNOWN_STEP


def _is_surely_known(array: NDArray[Any]) -> bool:
    """Whether a small array has no -1, and no unknown weight, whose bytes are the same.

    The search takes a fifth of numpy's time. If it finds a byte, numpy has to look.
    """
    if array.nbytes > PART_BYTES:  # where numpy is faster
        return False
    values = array.tobytes()
    if array.itemsize > 2:  # the lower bytes of weights are anything
        values = values[array.itemsize - 1 :: array.itemsize]
    return _UNKNOWN_BYTE not in values
