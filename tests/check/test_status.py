"""How far a job is, at each point of its life."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from small_output import OUTPUTS, SHARDS, flip
from store import small_run

from gte_vectorize.check.status import job_status
from gte_vectorize.cli import cli
from gte_vectorize.errors import OutputError
from gte_vectorize.store.local import LocalFiles

pytestmark = [pytest.mark.usefixtures("made_up"), pytest.mark.parametrize("output", OUTPUTS)]


@pytest.fixture
def asked(capfd: pytest.CaptureFixture[str]) -> Callable[[Path], tuple[int, dict[str, Any]]]:
    """The command's exit code and its answer."""

    def ask(output: Path) -> tuple[int, dict[str, Any]]:
        code = cli.main(["status", str(output), "--json"], standalone_mode=False)
        return code, json.loads(capfd.readouterr().out)

    return ask


def state(output: Path) -> Path:
    return job_path if (job_path := output / "_gte_vectorize").exists() else output.with_name(f".{output.name}.state")


def test_a_job_from_its_beginning_to_its_end(tmp_path, output, asked):
    path = tmp_path / output
    started = datetime.now(UTC).replace(microsecond=0)
    small_run.run(path, shards=SHARDS, tasks=0)
    code, found = asked(path)
    assert (code, found["state"], found["run_again"], found["status"]) == (75, "interrupted", True, {})
    assert (found["tasks"], found["rows"]) == ({"published": 0, "total": 2}, {"published": 0, "total": 24})

    small_run.run(path, shards=SHARDS, tasks=1)
    half, totals = job_status(path), job_status(path).published
    assert (half.state, half.exit_code, half.published_tasks, totals.rows) == ("interrupted", 75, 1, 16)
    (part,) = tmp_path.rglob("part-*.parquet")
    assert totals.bytes == part.stat().st_size
    with FileLock(state(path) / "lock"):
        code, found = asked(path)
    assert (code, found["state"], found["run_again"]) == (75, "running", False)

    whole = small_run.run(path, shards=SHARDS)
    end = job_status(path)
    assert (end.state, end.exit_code, end.run_again) == ("finished", 0, False)
    assert (end.published, end.published_tasks, end.tasks) == (whole, 2, 2)
    assert started <= end.started <= half.updated <= end.updated <= datetime.now(UTC)


def test_people_can_read_it(tmp_path, output, capfd):
    small_run.run(tmp_path / output, shards=SHARDS, tasks=1)
    assert cli.main(["status", str(tmp_path / output)], standalone_mode=False) == 75
    first, *rest = capfd.readouterr().out.splitlines()
    assert first == f"{tmp_path / output}: interrupted; run the same command again: what is published is kept"
    assert rest[0] == "  tasks    1 of 2 (50.0 %)"
    assert rest[1].startswith("  rows     16 of 24: ")


def test_a_lost_or_cut_file_is_damage(tmp_path, output, asked):
    path = tmp_path / output
    small_run.run(path, shards=SHARDS)
    file = path if path.is_file() else path / "part-000001.parquet"
    data = file.read_bytes()
    for damage in (lambda: file.write_bytes(data[:-1]), file.unlink):
        damage()
        code, found = asked(path)
        assert (code, found["state"], found["run_again"]) == (5, "damaged", False)
    file.write_bytes(data)
    assert asked(path)[0] == 0


def test_asking_changes_nothing(tmp_path, output):
    small_run.run(tmp_path / output, shards=SHARDS, tasks=1)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    job_status(tmp_path / output)
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_what_is_no_output_or_has_lost_its_plan_is_refused(tmp_path, output):
    with pytest.raises(OutputError, match="is not an output of gte-vectorize"):
        job_status(tmp_path / output)
    small_run.run(tmp_path / output, shards=SHARDS)
    plan = state(tmp_path / output) / "plan.json"
    data = flip(plan, 80)
    with pytest.raises(OutputError, match="is not the plan that the records and the manifest name"):
        job_status(tmp_path / output)
    plan.write_bytes(data)
    assert job_status(tmp_path / output).state == "finished"


def test_an_old_file_of_the_same_size_is_not_finished(tmp_path, output, monkeypatch):
    """A run that was to replace it has published the new one's manifest, and died."""
    path, publish = tmp_path / output, LocalFiles.publish

    def died(self: LocalFiles, temp: Path, final: Path, *, replace: bool = False) -> None:
        if final.name in (path.name, "_SUCCESS"):
            if final == path:
                final.write_bytes(bytes(temp.stat().st_size))
            raise KeyboardInterrupt
        publish(self, temp, final, replace=replace)

    small_run.run(path, shards=SHARDS)
    monkeypatch.setattr(LocalFiles, "publish", died)
    with pytest.raises(KeyboardInterrupt):
        small_run.run(path, shards=SHARDS, fields={**small_run.FIELDS, "model": "other"}, overwrite=True)
    assert job_status(path).state == "interrupted"
