"""Arrays of slides on their way between processes: one Arrow buffer per slide, no pickle of the data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

Arrays = dict[str, np.ndarray]
ALIGNMENT = 64
SCHEMA = pa.schema(
    [("slide_id", pa.string()), ("layout", pa.string()), ("data", pa.large_binary()), ("error", pa.binary())]
)


def pack(slide_ids: Sequence[str], results: Sequence[Arrays], error: bytes = b"") -> pa.Table:
    """A row per slide; the arrays' bytes are gathered once, into memory that Arrow then only refers to."""
    layouts, starts = [], [0]
    pieces: list[tuple[int, np.ndarray]] = []
    at = 0
    for arrays in results:
        layout = []
        for name, array in arrays.items():
            array = np.ascontiguousarray(array)
            if array.dtype.hasobject:
                raise TypeError(f"array {name!r} holds Python objects; give numbers or fixed-width text")
            layout.append([name, array.dtype.str, list(array.shape), at - starts[-1]])
            pieces.append((at, array))
            at += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        layouts.append(json.dumps(layout))
        starts.append(at)
    data = np.zeros(at, np.uint8) if not pieces else np.empty(at, np.uint8)
    for start, array in pieces:
        data[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    offsets = np.asarray(starts, np.int64)
    column = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(layouts), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    table = pa.table([list(slide_ids), layouts, column, [b""] * len(layouts)], schema=SCHEMA)
    if error:
        table = pa.concat_tables([table, pa.table([[""], ["[]"], [b""], [error]], schema=SCHEMA)])
    return table


def unpack(table: pa.Table) -> Iterator[tuple[str, Arrays, bytes]]:
    """Slide, arrays (copies, free to be changed), and the error that ended the block, if any."""
    for slide, layout, data, error in zip(*(table[name] for name in SCHEMA.names)):
        buffer = data.as_buffer()
        arrays = {}
        for name, dtype, shape, start in json.loads(layout.as_py()):
            count = int(np.prod(shape, dtype=np.int64))
            # a copy: the buffer is shared memory, which must not be written to and should be let go of
            arrays[name] = np.frombuffer(buffer, np.dtype(dtype), count, start).reshape(shape).copy()
        yield slide.as_py(), arrays, error.as_py()
