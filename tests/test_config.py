from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gte_vectorize.config import MAX_CONFIG_BYTES, OPTIONS, Config, resolve
from gte_vectorize.errors import ConfigError
from gte_vectorize.option import limit


def resolved(environment: dict[str, str] | None = None, file: Path | None = None, **said: Any) -> Config:
    return resolve({"inputs": "a.parquet", **said}, environment=environment or {}, file=file)[0]


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(content: str | bytes) -> Path:
        path = tmp_path / "job.toml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_each_source_gives_way_to_the_one_before_it(toml):
    file = toml("task_rows = 10\nmax_length = 10\nbatch_tokens = 10\nworkers = 10\n")
    environment = {"GTE_VECTORIZE_MAX_LENGTH": "20", "GTE_VECTORIZE_BATCH_TOKENS": "20", "HOME": "/root"}
    config, sources = resolve({"inputs": ["a"], "batch_tokens": "30"}, environment=environment, file=file)
    assert (config.task_rows, config.max_length, config.batch_tokens) == (10, 20, 30)
    assert config.text_column == "text"
    assert [sources[name] for name in ("workers", "max_length", "batch_tokens", "text_column")] == [
        "config file 'job.toml'",
        "environment",
        "command line",
        "default",
    ]


def test_none_means_not_said(toml):
    config, sources = resolve({"inputs": ["a"], "workers": None}, environment={}, file=toml("workers = 3"))
    assert config.workers == 3
    assert sources["workers"] == "config file 'job.toml'"


def test_an_unknown_word_names_the_nearest_one(toml):
    with pytest.raises(ConfigError, match=r"unknown key 'max_lenght' in config file 'job\.toml'; .*'max_length'"):
        resolved(file=toml("max_lenght = 5"))
    with pytest.raises(ConfigError, match="GTE_VECTORIZE_MODLE; did you mean 'GTE_VECTORIZE_MODEL'"):
        resolved({"GTE_VECTORIZE_MODLE": "x"})
    with pytest.raises(ConfigError, match="unknown key 'modle' in the call; did you mean 'model'"):
        resolve({"inputs": ["a"], "modle": "x"}, environment={}, file=None, caller="the call")
    with pytest.raises(ConfigError, match="unknown key 'run'"):
        resolved(file=toml("[run]\nworkers = 3"))


@pytest.mark.parametrize(
    "value", [0, -1, "0", "-3", "1.5", "nan", "", "1e3", True, 1.0, float("nan"), 1 << 31, "9" * 5000]
)
def test_a_number_is_whole_and_above_zero(value):
    with pytest.raises(ConfigError, match="--max-length: a whole number from 1 to 2147483647"):
        resolved(max_length=value)


@pytest.mark.parametrize(
    "value", ["-1", "101%", "-1%", "nan%", "inf%", "%", "", "x%", "0.5", 0.001, True, -3, "nan", [1], "1e999999999%"]
)
def test_a_limit_is_a_count_or_a_percentage(value):
    with pytest.raises(ConfigError, match="--max-bad-rows: a number of rows"):
        resolved(max_bad_rows=value)


@pytest.mark.parametrize(
    ("said", "rows", "allowed"),
    [
        ("0.1%", 526, 1),
        ("0.1%", 1000, 1),
        ("0.1%", 1001, 2),
        ("7%", 100, 7),
        ("100%", 9, 9),
        ("0%", 100, 0),
        ("0.1%", 0, 0),
        ("5", 3, 5),
        (5, 1000, 5),
        (0, 1000, 0),
    ],
)
def test_a_limit_is_rounded_up_to_whole_rows(said, rows, allowed):
    bound = limit(said)
    assert bound.allows(allowed, rows)
    assert not bound.allows(allowed + 1, rows)


@given(st.integers(0, 1000), st.integers(0, 10**9))
def test_a_limit_reads_itself(per_mille, rows):
    for bound in (limit(f"{per_mille / 10}%"), limit(rows)):
        again = limit(str(bound))
        assert again.allows(rows, rows) == bound.allows(rows, rows)
        assert again.allows(1, rows) == bound.allows(1, rows)


@pytest.mark.parametrize("key", ["model", "output", "text_column", "revision"])
@pytest.mark.parametrize("value", ["", "a\0b", "a\udc80", 5, ["a"], True])
def test_a_text_is_one_and_not_empty(key, value):
    with pytest.raises(ConfigError, match="a text is expected"):
        resolved(**{key: value})


def test_a_value_that_is_refused_is_not_repeated(toml):
    with pytest.raises(ConfigError) as caught:
        resolved({"GTE_VECTORIZE_WORKERS": "hf_secret"})
    assert str(caught.value) == "GTE_VECTORIZE_WORKERS: a whole number from 1 to 2147483647 is expected"
    with pytest.raises(ConfigError, match=r"workers in config file 'job\.toml': a whole") as caught:
        resolved(file=toml('workers = "hf_secret"'))
    assert "hf_secret" not in str(caught.value)


def test_an_empty_prompt_is_a_prompt():
    assert resolved(prompt="").prompt == ""
    with pytest.raises(ConfigError, match="exclude each other"):
        resolved(prompt="", prompt_name="query")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a,b", ("a", "b")),
        (" a , b,", ("a", "b")),
        (["a,b", " c"], ("a,b", " c")),
        (("a",), ("a",)),
        ("", ()),
        ([], ()),
    ],
)
def test_columns_are_a_list_or_separated_by_commas(value, expected):
    assert resolved(columns=value).columns == expected


@pytest.mark.parametrize("value", [5, [5], [""], {"a": 1}, ["a\0"]])
def test_columns_are_names(value):
    with pytest.raises(ConfigError, match="names are expected"):
        resolved(columns=value)


def test_a_path_may_hold_a_comma():
    assert resolved(inputs="a,b.parquet").inputs == ("a,b.parquet",)
    with pytest.raises(ConfigError, match="no input"):
        resolved(inputs=[])
    with pytest.raises(ConfigError, match="--inputs: names are expected"):
        resolved(inputs=[""])


@pytest.mark.parametrize(
    ("value", "expected"), [("yes", True), ("OFF", False), ("1", True), (False, False), ("false", False)]
)
def test_a_flag_has_many_words(value, expected):
    assert resolved(keep_text=value).keep_text is expected


@pytest.mark.parametrize("value", ["", "2", "maybe", 1, 1.0])
def test_a_flag_is_true_or_false(value):
    with pytest.raises(ConfigError, match="--keep-text: true or false"):
        resolved(keep_text=value)


@pytest.mark.parametrize("value", ["gpu", "CPU", "", 1, ["cpu"]])
def test_a_choice_is_listed(value):
    with pytest.raises(ConfigError, match="--device: one of auto, cpu, cuda"):
        resolved(device=value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("workers = ", "not valid TOML"),
        (b"workers = 1 # \xff", "not valid TOML"),
        ("workers = 1\nworkers = 2", "not valid TOML"),
        ("a = " + "[" * 100_000, "not valid TOML"),
        ("workers = " + "9" * 10_000, "not valid TOML"),
        ("workers = nan", "a whole number"),
        ("workers = 2020-01-01", "a whole number"),
        ("#" * MAX_CONFIG_BYTES + "\n", "larger than"),
    ],
)
def test_a_bad_config_file_is_refused(toml, content, message):
    with pytest.raises(ConfigError, match=message):
        resolved(file=toml(content))


def test_a_config_file_that_is_none_is_refused(tmp_path):
    for path, message in [
        (tmp_path / "none.toml", "'none.toml': No such file"),
        (tmp_path, "Is a directory"),
        (Path("/dev/zero"), "larger than"),
    ]:
        with pytest.raises(ConfigError, match=message):
            resolved(file=path)


def test_a_config_file_may_be_a_pipe(tmp_path):
    read, write = os.pipe()
    os.write(write, b"workers = 3")
    os.close(write)
    assert resolved(file=Path(f"/dev/fd/{read}")).workers == 3
    os.close(read)


def test_the_output_stands_beside_one_local_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.b.parquet").touch()
    assert resolved(inputs="a.b.parquet").output_path == Path("a.b.embeddings.parquet")
    for inputs in ("*.parquet", ".", "s3://bucket/a.parquet", "missing.parquet", ["a.b.parquet", "a.b.parquet"]):
        with pytest.raises(ConfigError, match="--output is required"):
            _ = resolved(inputs=inputs).output_path
    assert resolved(inputs="*.parquet", output="out").output_path == Path("out")


def test_paths_in_a_config_file_stay_relative_to_the_working_directory(toml):
    config = resolved(file=toml('output = "out"\nmodel = "models/x"'))
    assert (config.output, config.model) == ("out", "models/x")


def test_every_option_says_what_it_is():
    for name, option in OPTIONS.items():
        assert option.help.endswith((".", "]")), name
