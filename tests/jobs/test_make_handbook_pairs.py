from __future__ import annotations

import pyarrow.parquet as pq
import pytest

PAGE = """<?xml version="1.0" encoding="UTF-8" standalone="no"?>
<html xmlns="http://www.w3.org/1999/xhtml"><head><title>in the head</title><script>in_script()</script></head><body>
<div id="banner"><a href="x"><span class="text">in the banner</span></a></div>
<p id="title"><a class="left" href="x"><img alt="image" src="x.png" /></a></p>
<ul class="docnav top"><li class="previous"><a href="x"><strong>previous page</strong></a></li></ul>
<div class="section"><h2 class="title"><a id="x"></a>{heading}</h2>
<div class="para">
    {text} <code class="command">apt</code>, &amp;
    the end.</div>
<pre class="screen"># <strong>apt update</strong>
Hit:1</pre></div>
<ul class="docnav"><li class="next">next page</li></ul></body></html>"""


@pytest.fixture
def handbook(tmp_path):
    """An unpacked package: one page translated, one still in English, one without an original."""
    html = tmp_path / "deb/usr/share/doc/debian-handbook/html"
    pages = {
        "en-US/apt.html": ("Updating", "Packages are updated by"),
        "zh-CN/apt.html": ("更新", "软件包的更新与维护由管理员用命令行工具完成，也可以自动进行，详见"),
        "en-US/kernel.html": ("Kernel", "Compiling a kernel"),
        "zh-CN/kernel.html": ("内核", "Compiling a kernel"),
        "zh-CN/extra.html": ("附录", "只有中文版的页面，没有原文可以对照，所以不成一对，应当略去"),
    }
    for name, (heading, text) in pages.items():
        (html / name).parent.mkdir(parents=True, exist_ok=True)
        (html / name).write_text(PAGE.format(heading=heading, text=text), encoding="utf-8")
    return tmp_path / "deb"


def test_only_translated_pages_come_out_as_clean_text(handbook, run_job, tmp_path):
    result = run_job("make_handbook_pairs.py", "--deb-dir", handbook, tmp_path / "pairs.parquet")
    assert result.returncode == 0, result.stderr
    table = pq.read_table(tmp_path / "pairs.parquet")
    assert table.column_names == ["page", "lang", "text"]
    english, chinese = table.to_pylist()
    assert english == {
        "page": "apt",
        "lang": "en",
        "text": "Updating\nPackages are updated by apt, & the end.\n# apt update\nHit:1",
    }
    assert (chinese["page"], chinese["lang"]) == ("apt", "zh")
    assert chinese["text"].startswith("更新\n软件包的更新")


def test_two_runs_give_the_same_bytes(handbook, run_job, tmp_path):
    for name in ("a.parquet", "b.parquet"):
        run_job("make_handbook_pairs.py", "--deb-dir", handbook, tmp_path / name).check_returncode()
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_a_folder_without_the_handbook_is_refused(run_job, tmp_path):
    result = run_job("make_handbook_pairs.py", "--deb-dir", tmp_path, tmp_path / "pairs.parquet")
    assert result.returncode == 1
    assert "unpack debian-handbook" in result.stderr
    assert not (tmp_path / "pairs.parquet").exists()
