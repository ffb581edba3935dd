from __future__ import annotations

from itertools import permutations

import pyarrow as pa
import pytest

from gte_vectorize.errors import InputError
from gte_vectorize.reader.schema import canonical, widest

TEXT = pa.string()


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        (pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (pa.dictionary(pa.int32(), pa.string_view()), pa.string()),
        (pa.binary_view(), pa.binary()),
        (pa.large_string(), pa.large_string()),
        (pa.uuid(), pa.binary(16)),
        (pa.json_(pa.large_string()), pa.large_string()),
        (
            pa.list_(pa.field("item", pa.dictionary(pa.int8(), TEXT), nullable=False)),
            pa.list_(pa.field("element", TEXT)),
        ),
        (pa.large_list_view(pa.string_view()), pa.large_list(pa.field("element", TEXT))),
        (pa.list_(pa.float32(), 3), pa.list_(pa.field("element", pa.float32()), 3)),
        (pa.struct({"a": pa.list_view(pa.string_view())}), pa.struct({"a": pa.list_(pa.field("element", TEXT))})),
        (pa.map_(TEXT, pa.binary_view()), pa.map_(TEXT, pa.binary())),
        (pa.decimal256(60, 3), pa.decimal256(60, 3)),
        (pa.timestamp("us", "Asia/Shanghai"), pa.timestamp("us", "Asia/Shanghai")),
    ],
)
def test_canonical(type_: pa.DataType, expected: pa.DataType) -> None:
    assert canonical(type_) == expected
    assert canonical(expected) == expected


def test_an_extension_type_inside_another_type_is_refused() -> None:
    with pytest.raises(InputError, match="uuid"):
        canonical(pa.list_(pa.uuid()))


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ((pa.null(), pa.string()), pa.string()),
        ((pa.null(), pa.struct({"a": pa.int8()})), pa.struct({"a": pa.int8()})),
        ((pa.string(), pa.large_string(), pa.null()), pa.large_string()),
        ((pa.binary(), pa.large_binary()), pa.large_binary()),
        ((pa.int8(), pa.int64(), pa.int16()), pa.int64()),
        ((pa.uint16(), pa.uint32()), pa.uint32()),
        ((pa.list_(pa.int32()), pa.large_list(pa.int32())), pa.large_list(pa.int32())),
        ((pa.list_(pa.null()), pa.list_(pa.int32()), pa.large_list(pa.int8())), pa.large_list(pa.int32())),
        ((pa.struct({"a": pa.int8()}), pa.struct({"a": pa.int64()})), pa.struct({"a": pa.int64()})),
        ((pa.map_(TEXT, pa.int8()), pa.map_(pa.large_string(), pa.int16())), pa.map_(pa.large_string(), pa.int16())),
    ],
)
def test_widest_in_any_order(types: tuple[pa.DataType, ...], expected: pa.DataType) -> None:
    for order in permutations(map(canonical, types)):
        wide = order[0]
        for other in order[1:]:
            wide = widest(wide, other)
        assert wide == canonical(expected)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.int64(), pa.uint64()),
        (pa.int64(), pa.float64()),
        (pa.float32(), pa.float64()),
        (pa.string(), pa.binary()),
        (pa.string(), pa.int64()),
        (pa.timestamp("ms"), pa.timestamp("us")),
        (pa.list_(pa.string()), pa.list_(pa.int64())),
        (pa.list_(pa.int64()), pa.list_(pa.int64(), 2)),
        (pa.struct({"a": pa.int8()}), pa.struct({"b": pa.int8()})),
        (pa.struct({"a": pa.int8()}), pa.struct({"a": pa.int8(), "b": pa.int8()})),
        (pa.struct({"a": pa.int8()}), pa.struct({"a": pa.string()})),
        (pa.map_(TEXT, pa.int8()), pa.map_(pa.int8(), pa.int8())),
    ],
)
def test_nothing_that_would_change_a_value(first: pa.DataType, second: pa.DataType) -> None:
    assert widest(first, second) is None
    assert widest(second, first) is None
