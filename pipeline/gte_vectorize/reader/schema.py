"""Column types: the one type that a column has in every shard, so that all parts of an output agree.

Writers differ in how they hold the same values: dictionaries, views, 32- or 64-bit offsets, narrow integers, a null
type where a shard has no value at all. None of that is a difference of content.
"""

from __future__ import annotations

import pyarrow as pa
from pyarrow import types

from gte_vectorize.errors import InputError

_VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
_SIGNED = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_UNSIGNED = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())

TEXT_TYPES = frozenset({pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.null()})
"""Canonical types of a text column."""


def canonical(type_: pa.DataType) -> pa.DataType:
    """`type_` without dictionaries, views, extension types and metadata; every nested field nullable.

    Raises InputError for an extension type inside another type, which pyarrow cannot strip.
    """
    if isinstance(type_, pa.BaseExtensionType):
        return canonical(type_.storage_type)
    if types.is_dictionary(type_):
        return canonical(type_.value_type)
    if types.is_map(type_):
        return pa.map_(_nested(type_.key_type), _nested(type_.item_type))
    if types.is_struct(type_):
        return pa.struct([pa.field(field.name, _nested(field.type)) for field in type_])
    if types.is_fixed_size_list(type_):
        return pa.list_(_element(type_), type_.list_size)
    if types.is_large_list(type_) or types.is_large_list_view(type_):
        return pa.large_list(_element(type_))
    if types.is_list(type_) or types.is_list_view(type_):
        return pa.list_(_element(type_))
    return _VIEWS.get(type_, type_)


def _element(type_: pa.DataType) -> pa.Field:
    return pa.field("element", _nested(type_.value_type))


def _nested(type_: pa.DataType) -> pa.DataType:
    if isinstance(type_, pa.BaseExtensionType):
        raise InputError(f"the extension type {type_} inside another type cannot be copied")
    return canonical(type_)


def widest(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """The canonical type that holds the values of both, bit for bit; None if there is none."""
    if first == second or types.is_null(second):
        return first
    if types.is_null(first):
        return second
    for small, large in _LARGE.items():
        if {first, second} == {small, large}:
            return large
    for integers in (_SIGNED, _UNSIGNED):
        if first in integers and second in integers:
            return max(first, second, key=integers.index)
    return _widest_nested(first, second)


def _widest_nested(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    if types.is_struct(first) and types.is_struct(second) and first.names == second.names:
        children = [widest(mine.type, other.type) for mine, other in zip(first, second, strict=True)]
        return None if None in children else pa.struct(list(zip(first.names, children, strict=True)))
    if types.is_map(first) and types.is_map(second):
        key, item = widest(first.key_type, second.key_type), widest(first.item_type, second.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if not all(types.is_list(type_) or types.is_large_list(type_) for type_ in (first, second)):
        return None
    element = widest(first.value_type, second.value_type)
    if element is None:
        return None
    large = types.is_large_list(first) or types.is_large_list(second)
    return (pa.large_list if large else pa.list_)(pa.field("element", element))
