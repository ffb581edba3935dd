"""What the model's limit costs a search: articles are looked for in whole statutes, for every way to embed these.

    python jobs/bench/retrieval.py --statutes STATUTES.parquet --articles ARTICLES.parquet --model DIR
        [--documents 60] [--queries 200] [--modes truncate mean windows windows:overlap=0,max_length=256]
        [--output RESULT.md]

Documents are drawn from the statutes that are longer than the model's limit. Queries are articles of these: of at least
30 characters, with a middle third that occurs once in all the documents; half of them lie before the model's limit, as
far as there are so many, and half behind it. Each is asked as it is, and by that third alone. Draws are the same in
every run. A mode is a value of --long, and behind a colon any other options. A document's score is that of its best
vector. A window is right if it has more than half of the article's characters.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from importlib.metadata import version
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gte_vectorize import vectorize
from gte_vectorize.batch import Bool, Float32
from gte_vectorize.bench.page import hardware
from gte_vectorize.config import LONG
from gte_vectorize.encoder.encoder import resolve_device
from gte_vectorize.model.spec import ModelSpec, load_model
from gte_vectorize.report import Report
from gte_vectorize.tokens.tokenizer import Document, TextTokenizer

SHORTEST = 30
Ranks = npt.NDArray[np.int64]


class Query(NamedTuple):
    """An article: its characters `start` to `end` in the text of a document, and whether the model's limit is before
    their middle.
    """

    text: str
    document: int
    start: int
    end: int
    behind: bool


class Outcome(NamedTuple):
    """Of one mode. `ranks`: (query style, what is looked for) → int64[queries], from 1."""

    mode: str
    report: Report
    ranks: dict[tuple[str, str], Ranks]


def middle(text: str) -> str:
    return text[len(text) // 3 : -(-2 * len(text) // 3)]


STYLES: dict[str, Callable[[str], str]] = {"article": str, "middle third": middle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--statutes", type=Path, required=True)
    parser.add_argument("--articles", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--modes", nargs="+", default=[mode for mode in LONG if mode != "both"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    spec = load_model(arguments.model)
    tokenizer = TextTokenizer(spec.tokenizer)
    texts = draw_documents(read_texts(arguments.statutes), tokenizer, arguments.documents)
    found = find_queries(texts, read_texts(arguments.articles), tokenizer)
    queries = draw_queries(found, arguments.queries)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = list(measure(texts, queries, spec, arguments.modes, Path(folder)))
    page = "\n".join([*describe(spec, texts, found, queries), "", *render(outcomes, queries), ""])
    print(page)
    if arguments.output:
        arguments.output.write_text(page, encoding="utf-8")


def read_texts(path: Path) -> list[str]:
    """Distinct texts, in an order that does not depend on the file's."""
    texts = sorted(set(pq.read_table(path, columns=["text"])["text"].to_pylist()))
    return random.Random(0).sample(texts, len(texts))


def draw_documents(texts: Sequence[str], tokenizer: TextTokenizer, count: int) -> list[str]:
    """The first that are longer than the limit."""
    return list(islice((text for text in texts if reach(text, tokenizer) < len(text)), count))


def reach(text: str, tokenizer: TextTokenizer) -> int:
    """Characters before the model's limit."""
    document = tokenizer.encode_long(text)
    if not isinstance(document, Document):
        raise SystemExit(f"a document has no tokens ({document.name.lower()}); leave it out")
    room = tokenizer.room(document)
    return int(document.offsets[room - 1, 1]) if len(document.ids) > room else len(text)


def find_queries(texts: Sequence[str], articles: Sequence[str], tokenizer: TextTokenizer) -> list[Query]:
    """All articles that can be asked for, in their order."""
    whole = "\0".join(texts)
    starts = list(accumulate((len(text) + 1 for text in texts), initial=0))
    reaches = [reach(text, tokenizer) for text in texts]
    found = []
    for article in articles:
        place = whole.find(article)
        if place < 0 or len(article) < SHORTEST or whole.count(middle(article)) != 1:
            continue
        document = bisect(starts, place) - 1
        start = place - starts[document]
        behind = start + len(article) // 2 >= reaches[document]
        found.append(Query(article, document, start, start + len(article), behind))
    return found


def draw_queries(found: Sequence[Query], count: int) -> list[Query]:
    before = [query for query in found if not query.behind][: count // 2]
    behind = [query for query in found if query.behind][: count - len(before)]
    if not before or not behind:
        raise SystemExit(f"{len(before)} articles before the limit and {len(behind)} behind it: draw more --documents")
    return before + behind


def measure(
    texts: Sequence[str], queries: Sequence[Query], spec: ModelSpec, modes: Sequence[str], folder: Path
) -> Iterator[Outcome]:
    """Embed the queries, in every style, and the documents, in every mode; rank exactly, by cosine."""
    model = str(spec.path)
    documents = folder / "documents.parquet"
    pq.write_table(pa.table({"document": range(len(texts)), "text": texts}), documents)
    asked: dict[str, Float32] = {}
    for style, ask in STYLES.items():
        corpus, output = folder / "queries.parquet", folder / f"{style}.parquet"
        pq.write_table(pa.table({"text": [ask(query.text) for query in queries]}), corpus)
        vectorize(corpus, output, model=model, prompt=spec.query_prompt)
        asked[style] = read_vectors(output)
    for number, mode in enumerate(modes):
        output = folder / f"{number}.parquet"
        long, _, options = mode.partition(":")
        given = dict(option.split("=", 1) for option in options.split(",")) if options else {}
        report = vectorize(documents, output, model=model, long=long, **given)
        ranks = {
            (style, what): of_style
            for style, vectors in asked.items()
            for what, of_style in rank(output, vectors, queries).items()
        }
        print(f"{mode}: {report.computed_tokens:,} tokens, {report.seconds:.0f} s", file=sys.stderr)
        yield Outcome(mode, report, ranks)


def read_vectors(output: Path) -> Float32:
    column = pq.read_table(output, columns=["embedding"])["embedding"].combine_chunks()
    if column.null_count:
        raise SystemExit(f"{column.null_count} rows have no vector; leave their texts out")
    vectors: Float32 = column.flatten().to_numpy().reshape(len(column), -1)
    return vectors


def rank(output: Path, asked: Float32, queries: Sequence[Query]) -> dict[str, Ranks]:
    """The ranks of the right document, and where rows are windows of the best right window."""
    scores = asked @ read_vectors(output).T
    rows = pq.read_table(output).drop_columns("embedding").to_pydict()
    of_row = np.array(rows["document"])
    wanted = np.array([query.document for query in queries])[:, None]
    first_rows = np.flatnonzero(np.diff(of_row, prepend=-1))
    ranks = {"document": places(np.maximum.reduceat(scores, first_rows, axis=1), of_row[first_rows] == wanted)}
    if "char_start" in rows:
        starts, ends = (np.array([[query.start, query.end] for query in queries]).T)[:, :, None]
        shared = np.minimum(ends, rows["char_end"]) - np.maximum(starts, rows["char_start"])
        ranks["window"] = places(scores, (of_row == wanted) & (2 * shared > ends - starts))
    return ranks


def places(scores: Float32, right: Bool) -> Ranks:
    """The rank of the best right column in each row; an equal one that is wrong goes before it. Behind all without."""
    best = np.where(right, scores, -np.inf).max(axis=1, keepdims=True)
    return np.asarray(1 + (~right & (scores >= best)).sum(axis=1), np.int64)


def describe(spec: ModelSpec, texts: Sequence[str], found: Sequence[Query], queries: Sequence[Query]) -> list[str]:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "tokenizers", "pyarrow"))
    machine = hardware(resolve_device("auto"))
    share = sum(query.behind for query in found) / len(found)
    behind = sum(query.behind for query in queries)
    return [
        f"# What the limit costs a search, {date.today().isoformat()}",
        "",
        f"    python jobs/bench/{' '.join(Path(word).name for word in sys.argv)}",
        "",
        f"{machine}; {versions}; model {spec.path.name}, limit {spec.tokenizer.max_length} tokens.",
        f"{len(texts)} documents of {sum(map(len, texts)):,} characters, all longer than the limit.",
        f"{len(found):,} articles in them can be asked for, and {share:.0%} of these are behind the limit. "
        f"Asked for: {len(queries) - behind} before it, {behind} behind it.",
    ]


def render(outcomes: Sequence[Outcome], queries: Sequence[Query]) -> Iterator[str]:
    yield "| mode | vectors | tokens | seconds | share of tokens in no vector |"
    yield "|---|---:|---:|---:|---:|"
    for mode, report, _ in outcomes:
        cut = report.cut_tokens / (report.cut_tokens + report.tokens)
        yield f"| {mode} | {report.rows:,} | {report.computed_tokens:,} | {report.seconds:,.0f} | {cut:.0%} |"
    for style in STYLES:
        yield from ["", f"## The query is the {style}", ""]
        yield "| | before the limit: first | in the first 5 | MRR@10 | behind it: first | in the first 5 | MRR@10 |"
        yield "|---|---:|---:|---:|---:|---:|---:|"
        for what in ("document", "window"):
            for mode, _, ranks in outcomes:
                if (style, what) in ranks:
                    yield f"| {what}, {mode} | {' | '.join(cells(ranks[style, what], queries))} |"


def cells(ranks: Ranks, queries: Sequence[Query]) -> Iterator[str]:
    is_behind = np.array([query.behind for query in queries])
    for chosen in (ranks[~is_behind], ranks[is_behind]):
        yield f"{np.mean(chosen == 1):.0%}"
        yield f"{np.mean(chosen <= 5):.0%}"
        yield f"{np.mean(np.where(chosen <= 10, 1 / chosen, 0)):.2f}"


if __name__ == "__main__":
    main()
