from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from gte_vectorize.errors import ModelError
from gte_vectorize.model.folder import DEFAULT_MODEL, find_model, inside, read_settings


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, dict[str, Any]]]:
    calls: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(tmp_path / "snapshots" / ("c0ffee" * 7)[:40])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


@pytest.mark.usefixtures("no_network")
def test_a_directory_is_used_as_it_is_and_named_without_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gte").mkdir()
    folder = find_model(str(tmp_path / "gte"))
    assert (folder.path, folder.name, folder.revision) == (tmp_path / "gte", "gte", None)
    monkeypatch.chdir(tmp_path / "gte")
    assert find_model(".").name == "gte"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/gte").path == tmp_path / "gte"


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["./missing", "/missing", "~/missing", "~nobody-of-that-name/x"])
def test_a_path_that_is_no_directory_is_never_asked_of_the_hub(name: str) -> None:
    with pytest.raises(ModelError):
        find_model(name)


def test_a_file_is_not_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="not a directory"):
        find_model("weights")


def test_a_directory_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--revision"):
        find_model(str(tmp_path), "main")


def test_a_hub_id_is_fetched_without_code_or_pickles(hub: list[tuple[str, dict[str, Any]]]) -> None:
    folder = find_model("some/model", "main")
    assert (folder.name, folder.revision) == ("some/model", ("c0ffee" * 7)[:40])
    [(name, options)] = hub
    assert (name, options["revision"]) == ("some/model", "main")
    assert set(options["allow_patterns"]) == {"*.json", "*.txt", "*.model", "*.safetensors"}


@pytest.mark.parametrize("alias", ["Alibaba-NLP/gte-large-zh", "iic/nlp_gte_sentence-embedding_chinese-large"])
def test_an_alias_means_the_default_model(alias: str, hub: list[tuple[str, dict[str, Any]]]) -> None:
    assert find_model(alias).name == DEFAULT_MODEL == hub[0][0]


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (LocalEntryNotFoundError("x"), "cannot be reached.*directory"),
        (ValueError("x"), "check the id"),
        (ConnectionError("x"), "ConnectionError"),
    ],
)
def test_a_failed_fetch_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception, hint: str) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=hint):
        find_model("some/model")


def test_a_malformed_id_is_refused_by_the_real_client() -> None:
    with pytest.raises(ModelError, match="check the id"):
        find_model("not a/valid/id")


@pytest.mark.parametrize("relative", ["../x", "a/../../x", "/etc", "a\\..\\x", "a\0", None, 3])
def test_a_file_named_outside_the_folder_is_refused(relative: object) -> None:
    with pytest.raises(ModelError):
        inside(Path("model"), relative)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 200_000])
def test_a_damaged_json_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_settings(tmp_path / "config.json")
