"""Inputs as the user gave them → shards in a fixed order, and the one schema of their pass-through columns.

Every footer is read, and everything that a footer can tell is checked, before anything else loads. pyarrow itself would
fill a missing column with nulls and read the first of two columns of one name without a word.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from gte_vectorize.batch import Shard
from gte_vectorize.errors import InputError, TemporaryError
from gte_vectorize.reader.convert import is_convertible, to_parquet
from gte_vectorize.reader.listing import Listing, list_files, refuse_repeats, vectors_description
from gte_vectorize.reader.schema import TEXT_TYPES, canonical, widest
from gte_vectorize.reader.storage import listed_before, open_store, reading
from gte_vectorize.store.layout import Layout

log = logging.getLogger(__name__)

_FOOTERS_AT_ONCE = 16
_NAMES_SHOWN = 30


@dataclass(frozen=True, slots=True)
class Corpus:
    """The shards, in the order of the inputs and sorted by path within each.

    `schema` holds the pass-through columns with the type that serves all shards, without metadata, in the first shard's
    order; `skipped` names what an input folder or pattern held beside them, for the log.
    """

    shards: tuple[Shard, ...]
    schema: pa.Schema
    skipped: tuple[str, ...]


class _Footer(NamedTuple):
    """`embedded`: the file is an output of gte-vectorize."""

    shard: Shard
    schema: pa.Schema
    embedded: bool


def find_corpus(
    inputs: Sequence[str],
    *,
    text_column: str,
    columns: Sequence[str] | None = None,
    keep_text: bool = False,
    layouts: Sequence[Layout] = (),
) -> Corpus:
    """List the inputs, read every footer and settle the schema.

    `columns` are the pass-through columns wanted, all when None; the text is one of them only if named there or with
    `keep_text`. `layouts` are of the run's outputs; inputs that are not Parquet are converted into the first one's
    spool.

    Outputs that lie in an input folder or match a pattern, this run's or another's, are left out; one that is named
    itself is read. Raises InputError for anything that cannot be read whole and right, TemporaryError when a store does
    not answer.
    """
    if not inputs:
        raise InputError("no input; name at least one file, pattern or folder")
    listings = [list_files(given, layouts) for given in inputs]
    uris = [uri for listing in listings for uri in listing.files]
    refuse_repeats(uris)
    spool = layouts[0].spool if layouts else None
    footers, embedded = _leave_out_embedded(inputs, listings, _read_footers([_as_parquet(uri, spool) for uri in uris]))
    schema = _shared_schema(footers, text_column, columns, keep_text)
    skipped = (name for listing in listings for name in listing.skipped)
    return Corpus(tuple(footer.shard for footer in footers), schema, (*skipped, *embedded))


def check_unchanged(shard: Shard) -> None:
    """Raise TemporaryError if the file is no longer the one that was listed: other size, other time, or gone."""
    with listed_before(), reading(shard.uri, "looking for changes"):
        store, path = open_store(shard.uri)
        info = store.get_file_info(path)
    if (info.size, info.mtime_ns or 0) != (shard.size, shard.modified_ns):
        raise TemporaryError(f"{shard.uri!r} changed while it was read; run again when nothing writes to it")


def _leave_out_embedded(
    inputs: Iterable[str], listings: Iterable[Listing], footers: Iterable[_Footer]
) -> tuple[list[_Footer], list[str]]:
    """The footers without those of outputs that nobody named, and the files of these."""
    rest, kept, left_out, named = iter(footers), [], [], []
    for given, listing in zip(inputs, listings, strict=True):
        of_given = list(islice(rest, len(listing.files)))
        chosen = [footer for footer in of_given if listing.named or not footer.embedded]
        if not chosen:
            raise InputError(
                f"{given!r}: there are only outputs of gte-vectorize, first {of_given[0].shard.uri!r}; give the "
                "corpus, or name each file itself to embed a text that it holds"
            )
        kept += chosen
        named += [footer.shard.uri for footer in chosen if footer.embedded]
        left_out += [footer.shard.uri for footer in of_given if footer.embedded and not listing.named]
    for level, uris, what in (
        (logging.INFO, left_out, "are left out"),
        (logging.WARNING, named, "are embedded again, because they are named"),
    ):
        if uris:
            log.log(level, "outputs of gte-vectorize among the inputs: %d, first %r; they %s", len(uris), uris[0], what)
    return kept, left_out


def _as_parquet(uri: str, spool: Path | None) -> str:
    if not is_convertible(uri):
        return uri
    if spool is None:
        raise InputError(
            f"{uri!r} is not Parquet, and there is no folder to convert it into; convert it to Parquet first"
        )
    return str(to_parquet(uri, spool).absolute())


def _read_footers(uris: Sequence[str]) -> list[_Footer]:
    """The footer of every file, in order; neighbours of one schema share one object."""
    footers: list[_Footer] = []
    pool = ThreadPoolExecutor(_FOOTERS_AT_ONCE)
    try:
        for footer in pool.map(_read_footer, uris):
            same = footers and footer.schema.equals(footers[-1].schema)
            footers.append(footer._replace(schema=footers[-1].schema) if same else footer)
    finally:
        pool.shutdown(cancel_futures=True)
    return footers


def _read_footer(uri: str) -> _Footer:
    store, path = open_store(uri)
    with reading(uri, "reading the Parquet footer"):
        info = store.get_file_info(path)
        with store.open_input_file(path) as file, pq.ParquetFile(file, arrow_extensions_enabled=False) as parquet:
            groups = (parquet.metadata.row_group(index) for index in range(parquet.metadata.num_row_groups))
            rows = tuple(group.num_rows for group in groups)
            # Other tools' metadata (pandas, huggingface) may be megabytes a shard, and does not describe our columns.
            schema = parquet.schema_arrow.remove_metadata()
            embedded = vectors_description(parquet.metadata.metadata) is not None
    return _Footer(Shard(uri, info.size, info.mtime_ns or 0, rows), schema, embedded)


def _shared_schema(
    footers: Iterable[_Footer], text_column: str, columns: Sequence[str] | None, keep_text: bool
) -> pa.Schema:
    """The chosen columns with the type that serves every shard; see `find_corpus`."""
    shared: dict[str, tuple[pa.DataType, str]] = {}
    first_uri, last = "", None
    for shard, schema, _ in footers:
        if schema is last:
            continue
        _check_text(shard.uri, schema, text_column)
        types = _chosen_types(shard.uri, schema, text_column, columns, keep_text)
        if last is None:
            first_uri, shared = shard.uri, {name: (type_, shard.uri) for name, type_ in types.items()}
        _refuse_lack(shard.uri, types, shared, first_uri)
        _refuse_lack(first_uri, shared, types, shard.uri)
        for name, (type_, uri) in shared.items():
            wide = widest(type_, types[name])
            if wide is None:
                raise InputError(
                    f"column {name!r} is {type_} in {uri!r} and {types[name]} in {shard.uri!r}; give it one type, or "
                    f"leave it out with --columns"
                )
            shared[name] = (wide, uri if wide == type_ else shard.uri)
        last = schema
    return pa.schema([(name, type_) for name, (type_, _) in shared.items()])


def _refuse_lack(uri: str, names: Container[str], others: Iterable[str], other_uri: str) -> None:
    for name in others:
        if name not in names:
            raise InputError(
                f"{uri!r} has no column {name!r}, which {other_uri!r} has; add it, or leave it out with --columns"
            )


def _check_text(uri: str, schema: pa.Schema, text_column: str) -> None:
    found = [field for field in schema if field.name == text_column]
    if not found:
        raise InputError(
            f"{uri!r} has no column {text_column!r}{_nearest(text_column, schema.names)}; name the texts' column "
            f"with --text-column. Its columns: {_shown(schema.names)}"
        )
    if len(found) > 1:
        raise InputError(
            f"{uri!r} has {len(found)} columns named {text_column!r}; rename all but the one that is meant"
        )
    if _canonical(uri, found[0]) not in TEXT_TYPES:
        raise InputError(
            f"{uri!r}: column {text_column!r} has the type {found[0].type}; texts are strings, or UTF-8 in a binary "
            f"column: convert it, or name another column with --text-column. Its columns: {_shown(schema.names)}"
        )


def _chosen_types(
    uri: str, schema: pa.Schema, text_column: str, columns: Sequence[str] | None, keep_text: bool
) -> dict[str, pa.DataType]:
    """Canonical type of each pass-through column that is wanted, in the file's order."""
    wanted = {name for name in schema.names if name != text_column} if columns is None else set(columns)
    if keep_text:
        wanted.add(text_column)
    counts = Counter(schema.names)
    for name in columns or ():
        if name not in counts:
            near = _nearest(name, schema.names)
            raise InputError(f"{uri!r} has no column {name!r}{near}; its columns: {_shown(schema.names)}")
    repeated = sorted(name for name in wanted if counts[name] > 1)
    if repeated:
        raise InputError(
            f"{uri!r} has several columns of one name: {_shown(repeated)}; rename them, or choose others with --columns"
        )
    return {field.name: _canonical(uri, field) for field in schema if field.name in wanted}


def _canonical(uri: str, field: pa.Field) -> pa.DataType:
    try:
        return canonical(field.type)
    except InputError as error:
        raise InputError(f"{uri!r}, column {field.name!r}: {error}; leave it out with --columns") from None


def _nearest(name: str, names: Sequence[str]) -> str:
    near = [other for other in names if other.casefold() == name.casefold()] or get_close_matches(name, names, n=1)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:_NAMES_SHOWN])) + more
