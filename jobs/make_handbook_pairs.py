"""The Debian Administrator's Handbook → pages in Chinese and in English, to judge retrieval across the two languages.

OUT holds two rows a page, `page, lang (en or zh), text`, for the pages that truly are translated: many pages of the
Chinese edition are still in English. DEB_DIR is the unpacked Debian package (GPL-2+ or CC BY-SA 3.0):

    apt-get download debian-handbook && dpkg-deb -x debian-handbook_*.deb DEB_DIR
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq

HTML = Path("usr/share/doc/debian-handbook/html")
EDITIONS = {"en": "en-US", "zh": "zh-CN"}
TRANSLATED = 0.3  # a page with a larger share of Han characters is taken for translated
SCHEMA = pa.schema({"page": pa.string(), "lang": pa.string(), "text": pa.string()})

SKIPPED = {"head", "nav", "script", "style", "#banner", "#title", ".docnav"}
INLINE = {"a", "acronym", "code", "em", "img", "span", "strong", "sup"}


class PageText(HTMLParser):
    """Collects the text of a page without the navigation around it. Relies on closed tags, as XHTML has them."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._skipped = self._preformatted = 0  # how deep inside such an element

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        selectors = {tag, "#" + given.get("id", ""), *("." + name for name in given.get("class", "").split())}
        if self._skipped or selectors & SKIPPED:
            self._skipped += 1
        self._preformatted += tag == "pre"
        self._break_before_block(tag)

    def handle_endtag(self, tag: str) -> None:
        self._skipped -= self._skipped > 0
        self._preformatted -= tag == "pre"
        self._break_before_block(tag)

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.pieces.append(data if self._preformatted else re.sub(r"\s+", " ", data))

    def _break_before_block(self, tag: str) -> None:
        if tag not in INLINE:
            self.pieces.append("\n")


def page_text(html: str) -> str:
    """One line for every block of the page, and for every line of its listings."""
    parser = PageText()
    parser.feed(html)
    parser.close()
    lines = "".join(parser.pieces).split("\n")
    return "\n".join(" ".join(line.split()) for line in lines if line.strip())


def han_share(text: str) -> float:
    """The share of Han characters in what is not white space."""
    return len(re.findall("[一-鿿]", text)) / max(1, len(re.findall(r"\S", text)))


def pairs(html: Path) -> Iterator[dict[str, str]]:
    """The rows of OUT, by page, English before Chinese."""
    for chinese in sorted((html / EDITIONS["zh"]).glob("*.html")):
        files = {lang: html / edition / chinese.name for lang, edition in EDITIONS.items()}
        if not files["en"].is_file():
            continue
        texts = {lang: page_text(file.read_text(encoding="utf-8")) for lang, file in files.items()}
        if han_share(texts["zh"]) > TRANSLATED:
            yield from ({"page": chinese.stem, "lang": lang, "text": text} for lang, text in texts.items())


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--deb-dir", type=click.Path(path_type=Path), required=True, help="The unpacked package.")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
def main(deb_dir: Path, out: Path) -> None:
    """Write the translated pages of the handbook to OUT, a Parquet file."""
    table = pa.Table.from_pylist(list(pairs(deb_dir / HTML)), SCHEMA)
    if not table.num_rows:
        raise click.ClickException(f"No translated pages in {str(deb_dir / HTML)!r}; unpack debian-handbook there")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".pairs-") as scratch:
        pq.write_table(table, Path(scratch) / out.name, compression="zstd")
        (Path(scratch) / out.name).replace(out)
    click.echo(f"{table.num_rows // 2} pages in two languages", err=True)


if __name__ == "__main__":
    main()
