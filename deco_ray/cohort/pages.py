"""One part of a cohort: a slide's columns straight from the file's bytes, without decoding them patch by patch.

Our writer stores each column of a slide as one uncompressed page of plain values. Such a page can be used where
it lies: in the memory map of a local file, or in the one range fetched from an object store. Any other layout
(a cohort rewritten by another Parquet tool) is read by pyarrow, slower and just as correctly.
"""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

COLUMNS = ("x", "y", "feature")
DATA_PAGE = 0
INT_FIELD = 0x15  # Thrift's compact protocol: the next field, a 32-bit integer


class Part:
    """An opened part file, read by row group; any number of threads may read."""

    def __init__(self, source: pa.NativeFile) -> None:
        self.source = source
        # a mapped file is one buffer from here on: slices of it copy nothing and move no file pointer
        self.mapped = source.read_buffer() if isinstance(source, pa.MemoryMappedFile) else None
        self.file = pq.ParquetFile(source if self.mapped is None else pa.BufferReader(self.mapped), pre_buffer=False)
        names = self.file.schema_arrow.names
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            raise ValueError(f"no column {', '.join(missing)}")
        self.index = {name: names.index(name) for name in COLUMNS}
        self.lengths: dict[int, Tensor] = {}  # of each row group's features, once somebody needed them
        self.sound: set[int] = set()  # row groups whose metadata pyarrow's reader took
        self.checking = threading.Lock()

    def patches(self, row_group: int, dim: int, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Features [N, dim] as stored (read-only) and coordinates int64 [N, 2] if the source had any."""
        stored = np.dtype(dtype).newbyteorder("<")
        self._check(row_group)
        group = self.file.metadata.row_group(row_group)
        chunks = {name: chunk for name, index in self.index.items() if is_plain(chunk := group.column(index))}
        first = min((chunk.data_page_offset for chunk in chunks.values()), default=0)
        last = max((chunk.data_page_offset + chunk.total_compressed_size for chunk in chunks.values()), default=0)
        data = self._fetch(first, last - first)  # one round trip for all columns
        columns = {}
        for name in COLUMNS:
            width = dim * stored.itemsize if name == "feature" else 4
            values = None
            if name in chunks:
                start = chunks[name].data_page_offset - first
                page = data[start : start + chunks[name].total_compressed_size]
                values = plain_values(page, group.num_rows, width)
            columns[name] = self._decoded(row_group, name, width) if values is None else values
        features = np.frombuffer(columns["feature"], stored).reshape(-1, dim)
        x, y = (np.frombuffer(columns[name], "<i4") for name in ("x", "y"))
        if len(features) != group.num_rows:
            raise ValueError(f"{len(features)} features for {group.num_rows} patches")
        if len(x) != group.num_rows or len(y) != group.num_rows:  # nulls
            return features, None
        coords = np.empty((group.num_rows, 2), np.int64)
        coords[:, 0], coords[:, 1] = x, y
        return features, coords

    def _check(self, row_group: int) -> None:
        """Refuses damaged metadata, once: pyarrow's reader raises where `metadata.column` would end the process.

        Of a mapped file only. To look at an object in a store would cost a request, and stores check what they hold.
        """
        with self.checking:
            if self.mapped is not None and row_group not in self.sound:
                rows = self.file.iter_batches(1, row_groups=[row_group], columns=list(COLUMNS), use_threads=False)
                next(rows, None)
                self.sound.add(row_group)

    def _fetch(self, offset: int, size: int) -> memoryview:
        if self.mapped is not None:
            return memoryview(self.mapped.slice(offset, size)).cast("B")
        return memoryview(self.source.read_at(size, offset))

    def _decoded(self, row_group: int, name: str, width: int) -> memoryview:
        """The column's values that are not null, read by pyarrow."""
        table = self.file.read_row_group(row_group, columns=[name], use_threads=False)
        column = table[name].combine_chunks().drop_null()
        if column.type.bit_width != width * 8:
            raise ValueError(f"column {name} is {column.type}, not {width} bytes wide")
        values = column.buffers()[1] if len(column) else b""
        return memoryview(values).cast("B")[column.offset * width : (column.offset + len(column)) * width]


def is_plain(chunk: pq.ColumnChunkMetaData) -> bool:
    """Values as they are; RLE is the encoding of the marks that say which of them are null."""
    encodings = set(chunk.encodings)
    return chunk.compression == "UNCOMPRESSED" and not chunk.has_dictionary_page and encodings <= {"PLAIN", "RLE"}


def plain_values(data: memoryview, rows: int, width: int) -> memoryview | None:
    """The values of a plain column chunk that is a single page without nulls; none for any other."""
    kind, at = _integer(data, 0)
    uncompressed, at = _integer(data, at)
    size, at = _integer(data, at)
    # a first page that holds the bytes of all rows is the only page
    if kind != DATA_PAGE or size != uncompressed or size < rows * width or size > len(data):
        return None
    page = data[len(data) - size :]
    if size == rows * width:  # a column that cannot be null has no marks
        return page
    marks = 4 + int.from_bytes(page[:4], "little")
    return page[marks:] if size == marks + rows * width else None


def _integer(data: memoryview, at: int) -> tuple[int, int]:
    """The integer field of a page header at `at` (zigzag, seven bits a byte) and where the next begins; -1: not one."""
    if data[at] != INT_FIELD:
        return -1, at
    value, shift = 0, 0
    byte = 0x80
    while byte >= 0x80 and shift < 35:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift += 7
    return (value >> 1) ^ -(value & 1), at + 1
