from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import docx
import pyarrow.parquet as pq
import pytest
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fpdf import FPDF

from gte_vectorize.reader.listing import list_files

JOBS = Path(__file__).parents[2] / "jobs"

PARTIES = "本合同由甲方（北京某某科技有限公司）与乙方于2024年签订。"
CLAUSE = "违约金为合同总价的20%，自逾期之日起按日计算；“不可抗力”除外。"
SECRET = "此句不得出现在任何原因中"
TRADITIONAL = "甲方與乙方就本契約之履行達成以下協議：買賣標的物之所有權，於價金全部清償前仍歸甲方所有。"
CURLY = "The “Agreement” is made by the Buyer’s agent — § 12 applies; the fee is £1,500.\n" * 3
LINES = f"{PARTIES}\n{CLAUSE}"


@pytest.fixture(scope="session")
def font(tmp_path_factory) -> Path:
    """A TrueType font with a box for each character of the texts, as a PDF of Chinese text must bring one."""
    path = tmp_path_factory.mktemp("font") / "boxes.ttf"
    characters = sorted(set(LINES + "标题 ") - {"\n"})
    names = {ord(character): f"uni{ord(character):04X}" for character in characters}
    pen = TTGlyphPen(None)
    pen.moveTo((100, 0))
    for point in ((100, 700), (900, 700), (900, 0)):
        pen.lineTo(point)
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", *names.values()])
    builder.setupCharacterMap(names)
    builder.setupGlyf(dict.fromkeys([".notdef", *names.values()], pen.glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys([".notdef", *names.values()], (1000, 100)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Boxes", "styleName": "Regular"})
    builder.setupOS2(sTypoAscender=800, sTypoDescender=-200, usWinAscent=800, usWinDescent=200)
    builder.setupPost()
    builder.save(path)
    return path


def pdf(font: Path, pages: list[str], **encryption: str) -> bytes:
    document = FPDF()
    document.add_font("boxes", fname=font)
    document.set_font("boxes", size=8)
    document.set_title("标题")
    if encryption:
        document.set_encryption(encryption_method="AES-256", **encryption)  # type: ignore[arg-type]
    for text in pages:
        document.add_page()
        for line in text.splitlines():
            document.cell(text=line, new_x="LMARGIN", new_y="NEXT")
    return bytes(document.output())


def slow_pdf() -> bytes:
    """A sound PDF of one page with half a million pieces of text, which takes minutes to read."""
    content = zlib.compress(b"BT /F 12 Tf (a) Tj ET\n" * 500_000)
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>",
        b"<</Length %d/Filter/FlateDecode>>stream\n%s\nendstream" % (len(content), content),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    data = b"%PDF-1.4\n"
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return data + b"xref\n0 6\n0000000000 65535 f \n%strailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (
        table,
        len(data),
    )


def contract() -> bytes:
    """A paragraph, a table with merged cells, and what python-docx's own paragraphs lack."""
    document = docx.Document()
    document.core_properties.title = "买卖 合同"
    document.add_paragraph(PARTIES)
    table = document.add_table(rows=3, cols=3)
    for row, texts in zip(
        table.rows, [("项目", "数量", "金额"), ("服务器", "", "¥100"), ("合计", "", "")], strict=True
    ):
        for cell, text in zip(row.cells, texts, strict=True):
            cell.text = text
    table.cell(2, 0).merge(table.cell(2, 1))
    table.cell(2, 2).text = "¥100"
    table.cell(2, 2).add_paragraph("（含税）")
    paragraph = document.add_paragraph("第一条\t")
    inserted = f'<w:ins {nsdecls("w")} w:id="1" w:author="x"><w:r><w:t>修订</w:t></w:r></w:ins>'
    removed = f'<w:del {nsdecls("w")} w:id="2" w:author="x"><w:r><w:delText>删除</w:delText></w:r></w:del>'
    blank = f"<w:sdt {nsdecls('w')}><w:sdtContent><w:r><w:t>填空</w:t></w:r></w:sdtContent></w:sdt>"
    for xml in (inserted, removed, blank):
        paragraph._p.append(parse_xml(xml))
    document.add_paragraph(CLAUSE)
    stream = io.BytesIO()
    document.save(stream)
    return stream.getvalue()


CONTRACT = f"{PARTIES}\n项目\t数量\t金额\n服务器\t\t¥100\n合计\t¥100\n（含税）\n第一条\t修订填空\n{CLAUSE}"


def archive(**members: str | bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return stream.getvalue()


def html(body: str, head: str = "<title>买卖\n 合同</title>") -> str:
    return f"<!DOCTYPE html><html><head>{head}<style>p {{}}</style></head><body>{body}</body></html>"


@pytest.fixture(scope="module")
def folder(font, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    gb_head = "<meta http-equiv=Content-Type content='text/html; charset=gb2312'>"
    files = {
        "utf8.txt": LINES.encode(),
        "bom.txt": LINES.encode("utf-8-sig"),
        "gb18030.txt": LINES.encode("gb18030"),
        "big5.txt": TRADITIONAL.encode("big5"),
        "utf16.txt": LINES.encode("utf-16"),
        "utf16-be.txt": LINES.encode("utf-16-be"),
        "curly.txt": CURLY.encode("cp1252"),
        "empty.txt": b"",
        "子 目录/合同 №1.MD": LINES.encode(),
        "page.html": html(
            f"<p>{PARTIES[:5]}<b>{PARTIES[5:]}</b></p><script>x</script><!-- x --><div>{CLAUSE}<br>尾 \n 行</div>"
            "<table><tr><td>项目</td><td><p>金额</p></td></tr><tr><td><td>¥1<td><td>二</table><pre>一\n二</pre>"
        ).encode(),
        "gb2312.htm": html(f"<p>镕{LINES}</p>", gb_head).encode("gb18030"),  # its first character is not in GB2312
        "deep.html": html("<div>" * 10_000 + PARTIES + "</div>" * 10_000 + f"<p>{CLAUSE}").encode(),
        "contract.docx": contract(),
        "misnamed.docx": pdf(font, [PARTIES]),
        "pages.pdf": pdf(font, [LINES, "", CLAUSE]),
        "owner.pdf": pdf(font, [PARTIES], owner_password="x"),
        # These cannot be read.
        "bad/binary.txt": SECRET.encode() + random.Random(0).randbytes(3000),
        "bad/locked.pdf": pdf(font, [PARTIES], owner_password="x", user_password="y"),
        "bad/scanned.pdf": pdf(font, [""]),
        "bad/broken.pdf": b"%PDF-1.7\n" + SECRET.encode(),
        "bad/truncated.docx": contract()[:-2000],
        "bad/bomb.docx": archive(**{"word/document.xml": bytes(257 << 20)}),
        "bad/table.docx": archive(**{"xl/workbook.xml": SECRET}),
        "bad/old.docx": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + SECRET.encode(),
        "bad/text.pdf": SECRET.encode(),
        # These are not even tried.
        ".hidden.txt": b"x",
        "~$contract.docx": b"x",
        ".git/x.txt": b"x",
        "old.doc": b"x",
        "older.DOC": b"x",
        "Makefile": b"x",
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "outside").symlink_to(JOBS)
    (folder / "link.txt").symlink_to("utf8.txt")
    os.mkfifo(folder / "pipe.txt")
    return folder


@pytest.fixture(scope="module")
def corpus(folder, run_job, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    output = tmp_path_factory.mktemp("out") / "corpus"
    return output, run_job("prepare_corpus.py", folder, "-o", output, "--json", "--workers", "2")


def rows(path: Path) -> dict[str, dict]:
    return {row["id"]: row for row in pq.read_table(path).to_pylist()}


EXPECTED = {
    "utf8.txt": LINES,
    "bom.txt": LINES,
    "gb18030.txt": LINES,
    "big5.txt": TRADITIONAL,
    "utf16.txt": LINES,
    "utf16-be.txt": LINES,
    "curly.txt": CURLY,
    "empty.txt": "",
    "子 目录/合同 №1.MD": LINES,
    "page.html": f"{PARTIES}\n{CLAUSE}\n尾 行\n项目\t金额\n¥1\t\t二\n一\n二",
    "gb2312.htm": "镕" + LINES.replace("\n", " "),
    "deep.html": LINES,
    "contract.docx": CONTRACT,
    "misnamed.docx": PARTIES,
    "pages.pdf": f"{LINES}\n{CLAUSE}",
    "owner.pdf": PARTIES,
}
REASONS = {
    "bad/binary.txt": "is not text in UTF-8",
    "bad/locked.pdf": "is encrypted; save it without a password",
    "bad/scanned.pdf": "no text layer; needs OCR",
    "bad/broken.pdf": "cannot be read as pdf: ",
    "bad/truncated.docx": "cannot be read as docx: BadZipFile",
    "bad/bomb.docx": "unpacks to more than 256 MiB",
    "bad/table.docx": "cannot be read as docx: ",
    "bad/old.docx": "is encrypted, or an old .doc",
    "bad/text.pdf": "cannot be read as pdf: ",
}


def test_every_text_comes_back_exactly(corpus):
    found = rows(corpus[0] / "corpus-00000.parquet")
    assert {name: row["text"] for name, row in found.items()} == EXPECTED


def test_rows_are_sorted_and_describe_their_files(corpus, folder):
    found = rows(corpus[0] / "corpus-00000.parquet")
    assert list(found) == sorted(found)
    for name, row in found.items():
        data = (folder / name).read_bytes()
        assert (row["bytes"], row["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    described = {name: (row["format"], row["title"], row["pages"]) for name, row in found.items()}
    assert described["utf8.txt"] == ("txt", None, None)
    assert described["子 目录/合同 №1.MD"] == ("md", None, None)
    assert described["page.html"] == ("html", "买卖 合同", None)
    assert described["gb2312.htm"] == ("html", None, None)
    assert described["contract.docx"] == ("docx", "买卖 合同", None)
    assert described["misnamed.docx"] == ("pdf", "标题", 1)
    assert described["pages.pdf"] == ("pdf", "标题", 3)


def test_every_failure_has_its_reason_and_no_text(corpus):
    output, result = corpus
    found = rows(output / "_failures.parquet")
    assert sorted(found) == sorted(REASONS)
    for name, row in found.items():
        assert row["reason"].startswith(REASONS[name]), row
        assert row["format"] == name.rpartition(".")[2]
    written = (output / "_failures.parquet").read_bytes().decode("utf-8", "replace") + result.stderr
    assert not any(SECRET[start : start + 4] in written for start in range(len(SECRET) - 3))


def test_it_says_what_was_done(corpus):
    output, result = corpus
    assert result.returncode == 3
    assert json.loads(result.stdout) == {
        "documents": 16,
        "failed": 9,
        "shards": 1,
        "skipped": {".doc": 2, ".txt": 1, "hidden": 3, "link": 2, "no extension": 1},
    }
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"16 documents in 1 shards of '{output}'; 9 failed; skipped: 2 .doc, ")
    assert [path.name for path in output.parent.iterdir()] == ["corpus"]
    assert {path.stat().st_mode & 0o77 for path in (output, *output.iterdir())} == {0}


def test_the_pipeline_takes_the_folder_without_the_failures(corpus):
    assert [Path(file).name for file in list_files(str(corpus[0])).files] == ["corpus-00000.parquet"]


def test_a_file_that_hangs_is_ended_and_the_others_are_read(run_job, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.pdf").write_bytes(slow_pdf())
    (tmp_path / "in/b.txt").write_text(PARTIES, encoding="utf-8")
    started = time.monotonic()
    result = run_job("prepare_corpus.py", tmp_path / "in", "-o", tmp_path / "out", "--timeout", "3")
    assert result.returncode == 3, result.stderr
    assert 3 < time.monotonic() - started < 30
    assert rows(tmp_path / "out/_failures.parquet")["a.pdf"]["reason"] == "took longer than 3 s to read"
    assert list(rows(tmp_path / "out/corpus-00000.parquet")) == ["b.txt"]


def test_stopped_it_leaves_nothing_behind(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.pdf").write_bytes(slow_pdf())
    command = [sys.executable, JOBS / "prepare_corpus.py", tmp_path / "in", "-o", tmp_path / "out"]
    with subprocess.Popen(command) as process:
        while not list(tmp_path.glob(".out-*")):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_equal_folders_give_equal_bytes_in_shards_and_groups(run_job, tmp_path):
    written = []
    for place, workers, order in (("x", "1", 1), ("y/z", "3", -1)):
        folder = tmp_path / place / "docs"
        folder.mkdir(parents=True)
        for number in range(5)[::order]:
            (folder / f"{number}.txt").write_text(f"{PARTIES}{number}", encoding="utf-8")
        output = tmp_path / place / "out"
        output.mkdir()  # empty, which is allowed
        result = run_job(
            "prepare_corpus.py", folder, "-o", output, "--rows-per-shard", "3", "--rows-per-group", "2",
            "--workers", workers,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        written.append({path.name: path.read_bytes() for path in output.iterdir()})
    assert written[0] == written[1]
    assert sorted(written[0]) == ["_failures.parquet", "corpus-00000.parquet", "corpus-00001.parquet"]
    shard = pq.ParquetFile(tmp_path / "x/out/corpus-00000.parquet")
    assert [shard.metadata.row_group(group).num_rows for group in range(shard.num_row_groups)] == [2, 1]
    texts = [row["text"] for name in sorted(written[0])[1:] for row in rows(tmp_path / "x/out" / name).values()]
    assert texts == [f"{PARTIES}{number}" for number in range(5)]


def test_ids_over_several_folders_and_only_failures(run_job, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").write_bytes(b"\xff\0\xff")
    os.close(os.open(os.fsencode(tmp_path) + b"/a/\xff.txt", os.O_CREAT | os.O_WRONLY))
    result = run_job("prepare_corpus.py", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out")
    assert result.returncode == 3, result.stderr
    assert list(rows(tmp_path / "out/_failures.parquet")) == ["a/same.txt", "b/same.txt"]
    assert list(rows(tmp_path / "out/corpus-00000.parquet")) == ["a/\\xff.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in", "-o", "in"], "'in' is in the way"),
        (["in", "-o", "in/a.txt"], "'in/a.txt' is in the way"),
        (["in", "in/sub", "-o", "out"], "give every folder once"),
        (["x/same", "y/same", "-o", "out"], "would have the same id"),
        (["none", "-o", "out"], "no file in the folders ends in .txt, .md, "),
        (["missing", "-o", "out"], "does not exist"),
        (["in", "-o", "out", "--encoding", "gb18031"], "unknown encoding: gb18031"),
    ],
)
def test_what_is_refused(run_job, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("in/sub", "none", "x/same", "y/same"):
        Path(folder).mkdir(parents=True)
        if folder != "none":
            Path(folder, "a.txt").write_bytes(b"x")
    Path("in/a.txt").write_bytes(b"x")
    result = run_job("prepare_corpus.py", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert not Path("out").exists()


@pytest.fixture
def jobs(monkeypatch):
    """What `import` finds of jobs/, as it does for a script there."""
    monkeypatch.syspath_prepend(JOBS)


def test_a_reader_that_dies_costs_its_file_alone(jobs, tmp_path):
    from prepare_corpus import File, Reading

    (tmp_path / "a.pdf").write_bytes(slow_pdf())
    reading = Reading(File("a.pdf", str(tmp_path / "a.pdf")), None, 60)
    assert not reading.settle()
    os.kill(reading._process.pid, signal.SIGKILL)
    assert reading.pipe.poll(20)
    assert reading.settle()
    assert reading.outcome == "its reader died, probably of a lack of memory"


def test_a_document_that_bursts_is_a_failure(jobs, tmp_path):
    body = "<w:p/>" * (5 << 20)
    members = dict(zip(*archive_members(), strict=True))
    members["word/document.xml"] = f"<w:document {nsdecls('w')}><w:body>{body}</w:body></w:document>"
    (tmp_path / "a.docx").write_bytes(archive(**members))
    program = (
        "import multiprocessing, pathlib, sys, read_document as r; r.MEMORY = 400 << 20;"
        "ours, theirs = multiprocessing.Pipe(); r.read_apart(theirs, sys.argv[1], None, 60);"
        "pathlib.Path(sys.argv[2]).write_text(repr(ours.recv()))"
    )
    command = [sys.executable, "-c", program, tmp_path / "a.docx", tmp_path / "answer"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(JOBS)})
    assert (tmp_path / "answer").read_text() == "'takes more than 400 MiB of memory'"


def archive_members() -> tuple[list[str], list[bytes]]:
    with zipfile.ZipFile(io.BytesIO(contract())) as file:
        return file.namelist(), [file.read(name) for name in file.namelist()]


@pytest.mark.parametrize(
    ("encoding", "data", "text"),
    [
        ("big5", "\n乙方".encode("big5"), "\n乙方"),
        ("big5", "\n乙方".encode(), "\n乙方"),
        ("shift_jis", "契約書".encode("shift_jis"), "契約書"),
        (None, "甲方 α".encode("utf-32"), "甲方 α"),
        (None, "甲\0方 and a stray zero".encode(), "甲\0方 and a stray zero"),
        (None, CURLY.encode("utf-16-le"), CURLY),
        (None, b"Party A shall pay.".replace(b"", b"\0")[:-1], "Party A shall pay."),
        (None, PARTIES[:8].encode("gb18030"), PARTIES[:8]),
    ],
)
def test_the_encoding_of_texts(jobs, encoding, data, text):
    from read_document import decode

    assert decode(data, encoding) == text


def test_text_that_is_no_unicode_is_mended(jobs):
    from read_document import _whole

    assert _whole("甲\ud83d\ude00乙\udc00") == "甲😀乙\ufffd"
