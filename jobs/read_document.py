"""The text of one document: .txt, .md, .html, .docx or .pdf. What prepare_corpus.py runs for each file, in a process of
its own.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import os
import re
import resource
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from html.parser import HTMLParser
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

FORMATS = {".txt": "txt", ".md": "md", ".html": "html", ".htm": "html", ".docx": "docx", ".pdf": "pdf"}
SIGNATURES = {b"%PDF-": "pdf", b"PK\x03\x04": "docx"}  # told by their content, whatever their names say
LIBRARIES = ["charset_normalizer", "docx", "lxml.etree", "pypdf"]  # imported where they are used

MEMORY = 2 << 30  # bytes of address space that reading one file may take
LXML_NO_MEMORY = 2  # lxml.etree.ErrorTypes.ERR_NO_MEMORY
MAX_BYTES = 256 << 20  # of a file, and of what a .docx unpacks to
MAX_CHARACTERS = 64 << 20  # of a text

# Tags of HTML and local names of WordprocessingML, which do not collide.
SKIPPED = {"script", "style", "template", "noscript", "pPr", "moveFrom", "Fallback"}
BLOCKS = set(
    "address article aside blockquote body br caption center cr dd details div dl dt fieldset figcaption figure footer "  # noqa: SIM905
    "form h1 h2 h3 h4 h5 h6 header hr li main nav ol option p pre section summary table tbl tr ul".split()
)
CELLS = {"td", "th", "tc"}
CHARACTERS = {"tab": "\t", "noBreakHyphen": "-"}

# A few that texts in Chinese and English come in. Among all encodings there are, short texts are guessed wrongly.
GUESSES = ["gb18030", "big5", "cp1252"]
BOMS = [  # UTF-32's begins like UTF-16's
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
]
# What browsers take these labels for.
LABELS = {"gb2312": "gb18030", "gbk": "gb18030", "big5": "big5hkscs", "iso-8859-1": "cp1252", "us-ascii": "cp1252"}

Row = dict[str, Any]


class Unreadable(Exception):
    """Why a file cannot be read, for a person, without a word of its text."""


def read_apart(pipe: Connection, path: str, encoding: str | None, timeout: float) -> None:
    """What `read` says, through the pipe. It limits and silences the whole process, which should do nothing else."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    seconds = 2 * int(timeout) + 10  # should nobody be left to end this process
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)  # parsers' complaints quote the text
    pipe.send(read(path, encoding))


def read(path: str, encoding: str | None) -> Row | str:
    """The file's row but for its id, or why there is none, without a word of its text.

    encoding  of texts not in UTF-8 that do not say theirs; None: it is guessed
    """
    kind = FORMATS[Path(path).suffix.lower()]
    try:
        data = _content(path)
        kind = next((kind for mark, kind in SIGNATURES.items() if data.startswith(mark)), kind)
        text, title, pages = _parse(kind, data, encoding)
    except Unreadable as error:
        return str(error)
    except Exception as error:  # whatever a parser makes of a broken file; its message may quote the text
        if isinstance(error, MemoryError) or getattr(error, "code", None) == LXML_NO_MEMORY:
            return f"takes more than {MEMORY >> 20} MiB of memory"
        return f"cannot be read as {kind}: {type(error).__name__}"
    if len(text) > MAX_CHARACTERS:
        return f"its text is longer than {MAX_CHARACTERS >> 20} Mi characters; split it"
    return {
        "text": _whole(text),
        "format": kind,
        "title": " ".join(_whole(title or "").split()) or None,
        "pages": pages,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def _content(path: str) -> bytes:
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise Unreadable(f"cannot be opened: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise Unreadable(f"is larger than {MAX_BYTES >> 20} MiB; split it")
    return data


def _whole(text: str) -> str:
    """Halves of surrogate pairs, which PDFs may hold, are no Unicode."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _parse(kind: str, data: bytes, encoding: str | None) -> tuple[str, str | None, int | None]:
    """Text, title, pages."""
    if kind == "pdf":
        return read_pdf(data)
    if kind == "docx":
        return *read_docx(data), None
    if kind == "html":
        return *read_html(data, encoding), None
    return decode(data, encoding), None, None


def decode(data: bytes, encoding: str | None, declared: str | None = None) -> str:
    """The text that the bytes are. Raises Unreadable."""
    for name in _encodings(data, encoding, declared):
        with suppress(UnicodeError, LookupError):
            return data.decode(name)
    raise Unreadable(
        "is not text in UTF-8, nor in any other encoding that it says or looks like; name it by --encoding"
    )


def _encodings(data: bytes, encoding: str | None, declared: str | None) -> Iterator[str]:
    """What to try, the surest first. A text in UTF-8 often is one in GB18030 too, but hardly ever the other way."""
    from charset_normalizer import from_bytes

    yield from [name for mark, name in BOMS if data.startswith(mark)]
    if data.count(0) * 10 <= len(data):  # else it is UTF-16: of a text in English every other byte is zero
        yield "utf-8"
    if declared:
        yield LABELS.get(declared.lower(), declared)
    if encoding:
        yield encoding
    elif best := from_bytes(data, cp_isolation=["utf_16_le", "utf_16_be"] if 0 in data else GUESSES).best():
        yield best.encoding


def read_pdf(data: bytes) -> tuple[str, str | None, int]:
    """Text (pages parted by a line feed), title, number of pages."""
    from pypdf import PdfReader
    from pypdf.errors import FileNotDecryptedError

    try:
        reader = PdfReader(io.BytesIO(data))
        pages = [page.extract_text().strip() for page in reader.pages]
    except FileNotDecryptedError as error:
        raise Unreadable("is encrypted; save it without a password") from error
    if not any(pages):
        raise Unreadable("no text layer; needs OCR")
    title = reader.metadata.title if reader.metadata else None
    return "\n".join(page for page in pages if page), title, len(pages)


def read_docx(data: bytes) -> tuple[str, str | None]:
    """Text, title.

    The body is walked element by element: the paragraphs that python-docx hands out lack tracked insertions, content
    controls (the blanks of a form) and text boxes.
    """
    from docx import Document
    from docx.opc.constants import RELATIONSHIP_TYPE
    from lxml import etree

    if data.startswith(b"\xd0\xcf\x11\xe0"):
        raise Unreadable("is encrypted, or an old .doc; save it as .docx without a password")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(member.file_size for member in archive.infolist()) > MAX_BYTES:
            raise Unreadable(f"unpacks to more than {MAX_BYTES >> 20} MiB")
    document = Document(io.BytesIO(data))
    lines = Lines()
    for event, element in etree.iterwalk(document.element.body, events=("start", "end")):
        name = etree.QName(element).localname
        if event == "end":
            lines.end(name)
        else:
            lines.start(name)
            lines.data(element.text or "" if name == "t" else CHARACTERS.get(name, ""))
    package = document.part.package
    kinds = {relationship.reltype for relationship in package.rels.values()}
    # Asked for a title there is not, python-docx makes one up.
    return lines.text(), package.core_properties.title if RELATIONSHIP_TYPE.CORE_PROPERTIES in kinds else None


def read_html(data: bytes, encoding: str | None) -> tuple[str, str | None]:
    """Text, title."""
    declared = re.search(rb"<(?:meta|\?xml)[^>]+(?:charset|encoding)\s*=\s*[\"']?\s*([\w-]+)", data[:4096], re.I)
    page = HtmlPage()
    page.feed(decode(data, encoding, declared and declared[1].decode("ascii", "replace")))
    page.close()
    return re.sub(" +", " ", page.lines.text()), page.title


class Lines:
    """Text from a parser's events: a line for each block, and for each row of a table, with tabs between its cells.

    pieces  of the text; each begins with what separates it from the one before
    open    how many elements of each name
    """

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.open: Counter[str] = Counter()
        self._gap = ""  # what separates the next piece
        self._row_is_empty = True

    def start(self, tag: str) -> None:
        self.open[tag] += 1
        self._separate(tag)

    def end(self, tag: str) -> None:
        self.open[tag] = max(0, self.open[tag] - 1)
        if tag not in CELLS:  # their ends need not be there
            self._separate(tag)

    def _separate(self, tag: str) -> None:
        if tag == "tr":
            self._gap, self._row_is_empty = "\n", True
        elif tag in CELLS:
            if not self._row_is_empty:
                self._gap = self._gap + "\t" if self._gap.startswith("\t") else "\t"
        elif tag in BLOCKS:
            self.start_line()

    def start_line(self) -> None:
        if not self._gap.startswith("\t"):  # else a cell begins, on its row's line
            self._gap = "\n"

    def data(self, text: str) -> None:
        if self._gap or not self.pieces:
            text = text.lstrip(" ")
        if text and not any(self.open[tag] for tag in SKIPPED):
            self.pieces.append(self._gap + text if self.pieces else text)
            self._gap, self._row_is_empty = "", False

    def text(self) -> str:
        return re.sub(r" +(?=[\t\n])", "", "".join(self.pieces)).rstrip(" ")


class HtmlPage(HTMLParser):
    """Not libxml2, which leaves text out, and does not say so, where elements are nested deeply or memory ends."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = Lines()
        self.title: str | None = None

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.lines.start(tag)

    def handle_endtag(self, tag: str) -> None:
        self.lines.end(tag)

    def handle_data(self, text: str) -> None:
        if self.lines.open["title"]:
            # Later ones are those of drawings.
            self.title = self.title if self.lines.pieces else (self.title or "") + text
            return
        for number, line in enumerate(text.split("\n") if self.lines.open["pre"] else [text]):
            if number:
                self.lines.start_line()
            self.lines.data(re.sub(r"[ \t\r\n\f]+", " ", line))
