from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gte_vectorize.errors import InputError
from gte_vectorize.reader.listing import list_files, refuse_repeats
from gte_vectorize.store.layout import find_layout

SIDE_FILES = ["_SUCCESS", ".a.parquet.crc", "_metadata", "_tmp/x.parquet", ".hid/x.parquet", "readme.txt", "part-0"]


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def below(folder: Path, given: str) -> list[str]:
    """The files that a pattern below `folder` stands for, relative to it."""
    return [os.path.relpath(name, folder) for name in list_files(str(folder / given))[0]]


def test_a_folder_stands_for_its_parquet_files(tmp_path: Path) -> None:
    folder = tmp_path / "_raw"  # its own name does not count
    make(folder, "b.parquet", "a/c.PARQUET", "lang=zh/d.parquet", *SIDE_FILES)
    (folder / "again").symlink_to(folder)
    files, skipped, _ = list_files(str(folder))
    assert files == [str(folder / name) for name in ("a/c.PARQUET", "b.parquet", "lang=zh/d.parquet")]
    left_out = ["_SUCCESS", ".a.parquet.crc", "_metadata", "_tmp", ".hid", "readme.txt", "part-0", "again"]
    assert skipped == sorted(str(folder / name) for name in left_out)


def test_an_existing_path_is_literal_before_it_is_a_pattern(tmp_path: Path) -> None:
    make(tmp_path, "a [1].parquet", "a 1.parquet", "*.parquet")
    assert below(tmp_path, "a [1].parquet") == ["a [1].parquet"]
    assert below(tmp_path, "*.parquet") == ["*.parquet"]
    assert below(tmp_path, "a [0-9].parquet") == ["a 1.parquet"]


def test_a_literal_file_may_have_any_name(tmp_path: Path) -> None:
    make(tmp_path, "_hidden.parquet", "part-0")
    assert below(tmp_path, "_hidden.parquet") == ["_hidden.parquet"]
    assert below(tmp_path, "part-0") == ["part-0"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.parquet", ["top.parquet"]),
        ("**/*.parquet", ["a/b/deep.parquet", "a/x.parquet", "top.parquet"]),
        ("**", ["a/b/deep.parquet", "a/x.parquet", "top.parquet"]),
        ("?/x.parquet", ["a/x.parquet"]),
        ("[ab]/**/deep*", ["a/b/deep.parquet"]),
        ("_*/x.parquet", ["_tmp/x.parquet"]),
        ("*.txt", ["readme.txt"]),
        ("part-*", ["part-0"]),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    make(tmp_path, "top.parquet", "a/x.parquet", "a/b/deep.parquet", *SIDE_FILES)
    (tmp_path / "a/loop").symlink_to(tmp_path)
    assert below(tmp_path, pattern) == expected


def test_a_relative_pattern_in_a_folder_that_looks_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "data [1]/a.parquet")
    monkeypatch.chdir(tmp_path / "data [1]")
    assert list_files("*.parquet").files == [str(tmp_path / "data [1]/a.parquet")]


@pytest.mark.parametrize("given", ["", "none.parquet", "*.nothing", "empty", "only_side_files", "x**y", "nul\0"])
def test_nothing_found_is_an_error(tmp_path: Path, given: str) -> None:
    make(tmp_path, "only_side_files/_SUCCESS")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError):
        list_files(str(tmp_path / given) if given else "")


def test_a_folder_named_like_a_file_is_not_skipped_by_a_pattern(tmp_path: Path) -> None:
    make(tmp_path, "a.parquet", "spark.parquet/part-0.parquet")
    assert below(tmp_path, "*.parquet") == ["a.parquet", "spark.parquet"]  # opening it refuses
    assert below(tmp_path, "**/*.parquet") == ["a.parquet", "spark.parquet/part-0.parquet"]


@pytest.mark.parametrize(("given", "more"), [("", []), ("*", []), ("**/*", []), (".*/**/*", [".x/hidden.parquet"])])
@pytest.mark.parametrize("outputs", [["out"], ["out.parquet"], ["out", "second"], ["out.parquet", "second.parquet"]])
def test_what_the_run_writes_is_no_input(tmp_path: Path, outputs: list[str], given: str, more: list[str]) -> None:
    make(tmp_path, "real/a.parquet", "real/outer.parquet", "real/.x/hidden.parquet")
    folder = tmp_path / "link"
    folder.symlink_to("real")
    layouts = [find_layout(folder / output, ()) for output in outputs]
    for layout in layouts:
        for path in (layout.part(0), layout.tmp / "b.parquet", layout.spool / "c.parquet"):
            make(path.parent, path.name)
        (tmp_path / f"real/z-{layout.output.name}.parquet").symlink_to(layout.part(0))
    expected = more or ["a.parquet", "outer.parquet"]
    assert list_files(str(folder / given), layouts).files == [str(folder / name) for name in expected]
    for layout in layouts:
        with pytest.raises(InputError, match="belongs to the state"):
            list_files(str(layout.spool / "c.parquet"), layouts)


@pytest.mark.parametrize("link", [Path.hardlink_to, Path.symlink_to, None])
def test_one_file_twice_is_refused(tmp_path: Path, link: Any) -> None:
    make(tmp_path, "a.parquet")
    twin = tmp_path / "b.parquet" if link else tmp_path / "a.parquet"
    if link:
        link(twin, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"b\.parquet' is the same file|a\.parquet' is the same file"):
        refuse_repeats([str(tmp_path / "a.parquet"), str(twin)])
    with pytest.raises(InputError, match="s3://b/a"):
        refuse_repeats(["s3://b/a", "s3://b/c", "s3://b/a"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ["a/x.PARQUET", "a [1].parquet", "top.parquet"]),
        ("a", ["a/x.PARQUET"]),
        ("a/", ["a/x.PARQUET"]),
        ("a [1].parquet", ["a [1].parquet"]),
        ("*.parquet", ["a [1].parquet", "top.parquet"]),
        ("**/*.[pP]*", ["a/x.PARQUET", "a [1].parquet", "top.parquet"]),
        ("_tmp/*", ["_tmp/x.parquet"]),
    ],
)
def test_s3(bucket: Any, given: str, expected: list[str]) -> None:
    for key in ("top.parquet", "a/x.PARQUET", "a [1].parquet", *SIDE_FILES):
        bucket.put_object(Key=key, Body=b"x")
    files, skipped, _ = list_files(f"s3://corpora/{given}")
    assert files == sorted(f"s3://corpora/{key}" for key in expected)
    if not given:
        assert skipped == sorted(f"s3://corpora/{key}" for key in SIDE_FILES)


@pytest.mark.parametrize("given", ["none.parquet", "none/*.parquet", "side"])
def test_nothing_on_s3_is_an_error(bucket: Any, given: str) -> None:
    bucket.put_object(Key="side/_SUCCESS", Body=b"")
    with pytest.raises(InputError, match="s3://corpora"):
        list_files(f"s3://corpora/{given}")


def test_a_missing_bucket_is_an_error(bucket: Any) -> None:
    with pytest.raises(InputError):
        list_files("s3://no-such-bucket/a.parquet")
