import fcntl
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from small_run import DIM, FIELDS, SHARDS, make_plan, make_schema, run, windows, write_task

from gte_vectorize.batch import Shard
from gte_vectorize.errors import OutputError, TemporaryError, VectorizeError
from gte_vectorize.store import space
from gte_vectorize.store.store import Store
from gte_vectorize.writer.part import PartWriter

ROWS = 1500
OUTPUTS = ["out", "out.parquet"]
OTHER = {**FIELDS, "model": "other/model"}


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def states(folder: Path) -> dict[str, tuple[int, ...]]:
    found = {str(path): path.lstat() for path in [folder, *folder.rglob("*")]}
    return {name: (status.st_mtime_ns, status.st_ino, status.st_size) for name, status in found.items()}


@pytest.fixture(scope="module", params=OUTPUTS)
def undisturbed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    totals = run(folder / request.param)
    return request.param, tree(folder), totals


def expected_ids():
    return [name for task in make_plan().tasks for _, columns in windows(task) for name in columns["id"].to_pylist()]


@pytest.mark.parametrize("name", OUTPUTS)
def test_row_i_of_the_output_is_row_i_of_the_corpus(tmp_path, name):
    totals = run(tmp_path / name)

    files = [tmp_path / name] if name.endswith(".parquet") else sorted((tmp_path / name).glob("part-*.parquet"))
    table = pa.concat_tables(map(pq.read_table, files))
    assert table["id"].to_pylist() == expected_ids()
    assert (totals.files, totals.rows, totals.bytes) == (len(files), ROWS, sum(file.stat().st_size for file in files))
    assert totals.status == {"ok": ROWS - table["embedding"].null_count, "empty": table["embedding"].null_count}
    assert totals.tokens == sum(table["n_tokens"].to_pylist())


def test_a_directory_is_complete_when_success_vouches_for_the_manifest(tmp_path):
    run(tmp_path / "out", tasks=2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "_gte_vectorize",
        "part-000000.parquet",
        "part-000001.parquet",
    ]
    run(tmp_path / "out")

    manifest = (tmp_path / "out/_manifest.json").read_bytes()
    assert (tmp_path / "out/_SUCCESS").read_text() == hashlib.sha256(manifest).hexdigest() + "\n"
    parts = json.loads(manifest)["parts"]
    assert [part["name"] for part in parts] == [f"part-{index:06d}.parquet" for index in range(5)]
    assert [part["input"]["num_rows"] for part in parts] == [300, 300, 0, 450, 450]
    for part in parts:
        data = (tmp_path / "out" / part["name"]).read_bytes()
        assert part["content"]["sha256"] == hashlib.sha256(data).hexdigest()
    assert sorted(path.name for path in (tmp_path / "out/_gte_vectorize").iterdir()) == ["lock", "plan.json", "records"]
    assert ds.dataset(tmp_path / "out").count_rows() == ROWS


def test_a_single_file_leaves_only_its_plan_and_manifest_beside_it(tmp_path):
    run(tmp_path / "out.parquet", tasks=2)
    assert [path.name for path in tmp_path.iterdir()] == [".out.parquet.state"]
    run(tmp_path / "out.parquet")

    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.parquet.state", "out.parquet"]
    state = tmp_path / ".out.parquet.state"
    assert sorted(path.name for path in state.iterdir()) == ["lock", "manifest.json", "plan.json"]
    assert pq.ParquetFile(tmp_path / "out.parquet").schema_arrow.equals(make_schema(), check_metadata=True)


@pytest.mark.parametrize("name", OUTPUTS)
def test_everything_is_readable_by_its_owner_alone(tmp_path, name):
    umask = os.umask(0)
    try:
        run(tmp_path / "new" / name)
    finally:
        os.umask(umask)
    for path in (tmp_path / "new").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_running_a_finished_job_again_changes_nothing(tmp_path, undisturbed):
    name, files, totals = undisturbed
    for relative, data in files.items():
        (tmp_path / relative).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / relative).write_bytes(data)
    before = states(tmp_path)

    with Store.open(tmp_path / name, make_plan(), make_schema()) as store:
        assert store.done
        assert store.pending() == []
        assert store.finish() == totals
    assert run(tmp_path / name, overwrite=True) == totals
    assert states(tmp_path) == before


@pytest.mark.parametrize("tasks", [0, 1, 4, 5])
def test_a_run_in_two_halves_makes_the_same_bytes(tmp_path, undisturbed, tasks):
    name, files, totals = undisturbed
    run(tmp_path / name, tasks=tasks)
    published = {path: status for path, status in states(tmp_path).items() if "part-" in path}
    with Store.open(tmp_path / name, make_plan(), make_schema()) as store:
        assert [task.index for task in store.pending()] == list(range(tasks, 5))
        if tasks < 5:
            with pytest.raises(VectorizeError, match="parts are missing"):
                store.finish()
    assert published.items() <= states(tmp_path).items()
    assert run(tmp_path / name) == totals
    assert tree(tmp_path) == files


def test_a_failure_leaves_no_temporary_file_and_no_part(tmp_path):
    def fail():
        steps.append(1)
        if len(steps) == 8:
            raise RuntimeError

    steps = []
    with pytest.raises(RuntimeError):
        run(tmp_path / "out", step=fail)
    assert sorted(tree(tmp_path / "out")) == [
        "_gte_vectorize/plan.json",
        "_gte_vectorize/records/000000.json",
        "part-000000.parquet",
    ]


def test_what_a_dead_run_left_is_removed(tmp_path):
    run(tmp_path / "out", tasks=1)
    (tmp_path / "out/_gte_vectorize/tmp/dead").mkdir(parents=True)
    (tmp_path / "out/_gte_vectorize/tmp/dead/part-000001.parquet").write_bytes(b"half")

    with Store.open(tmp_path / "out", make_plan(), make_schema()):
        assert list(tmp_path.rglob("dead")) == []


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_part_published_without_its_record_is_adopted(tmp_path, name, undisturbed):
    run(tmp_path / name, tasks=2)
    (record,) = tmp_path.rglob("000001.json")
    (part,) = tmp_path.rglob("part-000001.parquet")
    record.unlink()
    before = part.stat().st_ino

    run(tmp_path / name, tasks=2)
    assert (part.stat().st_ino, record.exists()) == (before, True)


@pytest.mark.parametrize("with_record", [True, False])
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"garbage!" * 128, lambda _: b""])
def test_a_truncated_or_garbage_part_is_made_again(tmp_path, undisturbed, caplog, damage, with_record):
    name, files, _ = undisturbed
    run(tmp_path / name, tasks=3)
    (part,) = tmp_path.rglob("part-000001.parquet")
    (record,) = tmp_path.rglob("000001.json")
    part.write_bytes(damage(part.read_bytes()))
    if not with_record:
        record.unlink()

    run(tmp_path / name)
    assert tree(tmp_path) == files
    assert "part-000001.parquet" in caplog.text


def of_another_plan(record):
    told = json.loads(record)
    return json.dumps({"plan": "other", "content": {**told["content"], "tokens": 0}}).encode()


@pytest.mark.parametrize("damage", [lambda _: b"", lambda record: record[:-1], lambda _: b"[]", of_another_plan])
def test_a_torn_or_foreign_record_is_not_believed(tmp_path, undisturbed, damage):
    name, files, _ = undisturbed
    run(tmp_path / name, tasks=3)
    (path,) = tmp_path.rglob("000001.json")
    path.write_bytes(damage(path.read_bytes()))

    run(tmp_path / name)
    assert tree(tmp_path) == files


def test_another_whole_file_under_a_parts_name_is_never_removed(tmp_path):
    run(tmp_path / "out", tasks=1)
    pq.write_table(pa.table({"mine": [1]}), tmp_path / "out/part-000001.parquet")
    before = (tmp_path / "out/part-000001.parquet").read_bytes()

    with pytest.raises(OutputError, match=r"part-000001\.parquet"):
        run(tmp_path / "out")
    assert (tmp_path / "out/part-000001.parquet").read_bytes() == before


def test_a_part_of_this_plan_with_other_vectors_and_no_record_is_replaced(tmp_path, undisturbed, caplog):
    name, files, _ = undisturbed
    run(tmp_path / name, tasks=2)
    (record,) = tmp_path.rglob("000001.json")
    (part,) = tmp_path.rglob("part-000001.parquet")
    record.unlink()
    part.write_bytes(part.with_name("part-000000.parquet").read_bytes())  # as many rows of the same schema

    run(tmp_path / name)
    assert tree(tmp_path) == files
    assert "part-000001.parquet" in caplog.text


def test_a_link_under_a_parts_name_is_never_removed(tmp_path):
    run(tmp_path / "out", tasks=1)
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    (tmp_path / "out/part-000001.parquet").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OutputError, match=r"part-000001\.parquet"):
        run(tmp_path / "out")
    assert (tmp_path / "out/part-000001.parquet").is_symlink()


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_took_the_place_of_a_recorded_part_is_never_removed(tmp_path, kind):
    run(tmp_path / "out", tasks=2)
    part, moved = tmp_path / "out/part-000001.parquet", tmp_path / "moved.parquet"
    part.rename(moved)
    part.symlink_to(moved) if kind == "link" else part.mkdir()

    with pytest.raises(OutputError, match=r"part-000001\.parquet' exists"):
        run(tmp_path / "out")
    assert part.is_symlink() or part.is_dir()


def test_a_part_that_a_rival_has_recorded_meanwhile_is_never_replaced(tmp_path):
    plan, schema = make_plan(), make_schema()
    with Store.open(tmp_path / "out", plan, schema) as late:
        late._release()  # as a file system does that loses locks
        with Store.open(tmp_path / "out", plan, schema) as rival:
            write_task(rival, plan.tasks[0], schema, model="other vectors", step=lambda: None)
            before = (tmp_path / "out/part-000000.parquet").read_bytes()
            with pytest.raises(OutputError, match=r"part-000000\.parquet' exists"):
                write_task(late, plan.tasks[0], schema, model=FIELDS["model"], step=lambda: None)
            assert (tmp_path / "out/part-000000.parquet").read_bytes() == before


def test_a_directory_is_not_finished_without_a_part_that_was_published(tmp_path):
    plan, schema = make_plan(), make_schema()
    with Store.open(tmp_path / "out", plan, schema) as store:
        for task in store.pending():
            write_task(store, task, schema, model=FIELDS["model"], step=lambda: None)
        (tmp_path / "out/part-000001.parquet").unlink()
        with pytest.raises(TemporaryError, match=r"part-000001\.parquet' has been removed"):
            store.finish()
    assert not (tmp_path / "out/_SUCCESS").exists()
    run(tmp_path / "out")
    assert (tmp_path / "out/_SUCCESS").exists()


def test_a_success_that_does_not_fit_the_manifest_vouches_for_nothing(tmp_path):
    run(tmp_path / "out")
    files = tree(tmp_path)
    (tmp_path / "out/_SUCCESS").write_text("")

    with Store.open(tmp_path / "out", make_plan(), make_schema()) as store:
        assert not store.done
        assert store.pending() == []
    run(tmp_path / "out")
    assert tree(tmp_path) == files


def test_a_finished_directory_that_lost_a_part_is_no_longer_complete_and_is_mended(tmp_path):
    run(tmp_path / "out")
    files = tree(tmp_path)
    (tmp_path / "out/part-000003.parquet").unlink()

    with Store.open(tmp_path / "out", make_plan(), make_schema()) as store:
        assert [task.index for task in store.pending()] == [3]
        assert not (tmp_path / "out/_SUCCESS").exists()
    run(tmp_path / "out")
    assert tree(tmp_path) == files


def test_a_damaged_part_is_found_when_the_single_file_is_assembled(tmp_path):
    run(tmp_path / "whole.parquet")
    run(tmp_path / "out.parquet", tasks=5)
    (part,) = tmp_path.rglob(".out*/parts/part-000003.parquet")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)

    with pytest.raises(TemporaryError, match=r"part-000003\.parquet"):
        run(tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()
    run(tmp_path / "out.parquet")
    assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_a_part_with_another_footer_than_recorded_is_made_again(tmp_path):
    """Page checksums do not cover the footer; this bit has pyarrow raise ValueError."""
    run(tmp_path / "out.parquet")
    whole = (tmp_path / "out.parquet").read_bytes()
    run(tmp_path / "again/out.parquet", tasks=5)
    part = tmp_path / "again/.out.parquet.state/parts/part-000001.parquet"
    data = bytearray(part.read_bytes())
    data[data.rindex(b"parquet-cpp")] ^= 0x80
    part.write_bytes(data)

    with pytest.raises(TemporaryError, match=r"part-000001\.parquet' was damaged"):
        run(tmp_path / "again/out.parquet")
    run(tmp_path / "again/out.parquet")
    assert (tmp_path / "again/out.parquet").read_bytes() == whole


def test_a_lack_of_memory_takes_no_part_away(tmp_path, monkeypatch):
    def exhausted(*_: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    run(tmp_path / "out.parquet", tasks=5)
    before = states(tmp_path / ".out.parquet.state/parts")
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", exhausted)
    with pytest.raises(TemporaryError, match="memory ran out"):
        run(tmp_path / "out.parquet")
    assert states(tmp_path / ".out.parquet.state/parts") == before


def test_no_name_breaks_a_line_of_the_log(tmp_path, caplog):
    run(tmp_path / "a\nb", tasks=1)
    os.truncate(tmp_path / "a\nb/part-000000.parquet", 100)
    run(tmp_path / "a\nb", tasks=1)
    assert [record.message for record in caplog.records if "made again" in record.message]
    assert not [record.message for record in caplog.records if "\n" in record.message]


@pytest.mark.parametrize("tasks", [2, None])
@pytest.mark.parametrize("name", OUTPUTS)
def test_another_model_is_refused_by_name_and_changes_nothing(tmp_path, name, tasks):
    run(tmp_path / name, tasks=tasks)
    before = tree(tmp_path)

    with pytest.raises(OutputError, match=r"'thenlper/gte-large-zh'.*'other/model'") as refusal:
        run(tmp_path / name, fields=OTHER)
    assert "--overwrite" in str(refusal.value)
    assert tree(tmp_path) == before


def test_a_file_put_between_the_others_is_refused_by_name(tmp_path):
    run(tmp_path / "out", tasks=2)
    inserted = Shard("/corpus/aa.parquet", 9, 9, (10,))

    with pytest.raises(OutputError, match=r"'/corpus/aa.parquet' is new"):
        run(tmp_path / "out", shards=(SHARDS[0], inserted, *SHARDS[1:]))


def test_a_long_list_of_differences_is_cut(tmp_path):
    run(tmp_path / "out", tasks=0)

    with pytest.raises(OutputError, match="and 5 more"):
        run(tmp_path / "out", shards=tuple(Shard(f"/new/{index}.parquet", 1, 1, (1,)) for index in range(12)))


def test_what_overwrite_removes_is_gone_for_good_before_the_plan_goes(tmp_path, monkeypatch):
    """Or a power loss could bring parts back that no plan knows."""
    run(tmp_path / "out", tasks=2)
    events, sync, unlink = [], os.fsync, os.unlink

    def watched_sync(descriptor):
        events.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        sync(descriptor)

    def watched_unlink(path, **options):
        events.append(("unlink", Path(path).name))
        unlink(path, **options)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "unlink", watched_unlink)
    run(tmp_path / "out", fields=OTHER, overwrite=True, tasks=0)
    gone = events[: events.index(("unlink", "plan.json"))]
    for name, folder in (("part-000001.parquet", "out"), ("000001.json", "records")):
        assert gone.index(("unlink", name)) < gone.index(("sync", folder))


@pytest.mark.parametrize("tasks", [2, None])
@pytest.mark.parametrize("name", OUTPUTS)
def test_overwrite_makes_what_a_fresh_run_makes(tmp_path, name, tasks):
    run(tmp_path / "fresh" / name, fields=OTHER, shards=SHARDS[:1])
    run(tmp_path / "again" / name, tasks=tasks)

    run(tmp_path / "again" / name, fields=OTHER, shards=SHARDS[:1], overwrite=True)
    assert tree(tmp_path / "again") == tree(tmp_path / "fresh")


def test_overwrite_keeps_the_old_file_until_the_new_one_is_whole(tmp_path):
    output = tmp_path / "out.parquet"
    output.write_bytes(b"somebody's")
    with pytest.raises(OutputError, match="--overwrite"):
        run(output)
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]

    run(output, overwrite=True, tasks=5)
    assert output.read_bytes() == b"somebody's"
    run(output, overwrite=True)
    assert pq.read_table(output)["id"].to_pylist() == expected_ids()
    run(output, fields=OTHER, overwrite=True, tasks=5)
    assert pq.read_table(output)["id"].to_pylist() == expected_ids()


@contextmanager
def killed(step):
    """Whatever changes the disk raises from the `step`-th time on, clean-up included. Yields the steps taken."""
    names = ["mkdir", "link", "unlink", "rmdir", "replace", "fsync"]
    taken = []

    def watched(name, call):
        def change(target, *args, **options):
            if str(target).endswith("lock"):  # freed by the kernel
                return call(target, *args, **options)
            taken.append(name)
            if len(taken) > step:
                raise KeyboardInterrupt
            return call(target, *args, **options)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, watched(name, getattr(os, name)))
        try:
            yield taken
        except KeyboardInterrupt:
            assert len(taken) > step


@pytest.mark.parametrize("killed_before", [False, True])
def test_overwrite_killed_at_any_step_ends_with_the_new_file(tmp_path, killed_before):
    (tmp_path / "base").mkdir()
    run(tmp_path / "new.parquet", shards=SHARDS[:1])
    new = (tmp_path / "new.parquet").read_bytes()
    old = bytes(len(new))
    (tmp_path / "base/out.parquet").write_bytes(old)
    again = partial(run, shards=SHARDS[:1], overwrite=True)
    again(tmp_path / "base/out.parquet", tasks=2)
    if killed_before:
        shutil.copytree(tmp_path / "base", tmp_path / "clean")
        with killed(10**9) as taken:
            again(tmp_path / "clean/out.parquet")
        with killed(taken.index("replace")):
            again(tmp_path / "base/out.parquet")
        assert (tmp_path / "base/.out.parquet.state/manifest.json").exists()
        assert (tmp_path / "base/out.parquet").read_bytes() == old

    for step in count():
        output = shutil.copytree(tmp_path / "base", tmp_path / str(step)) / "out.parquet"
        with killed(step) as taken:
            again(output)
        assert output.read_bytes() in (old, new)
        again(output)
        assert output.read_bytes() == new
        assert not list(output.parent.rglob("tmp"))
        if len(taken) <= step:
            break
    assert step > 20


def test_what_a_killed_conversion_left_is_removed_and_what_one_finished_stays(tmp_path):
    spool = tmp_path / "out/_gte_vectorize/spool"
    (spool / "tmpdead").mkdir(parents=True)
    (spool / "tmpdead/made.parquet").write_bytes(b"text")
    (spool / "tmp.txt-0123.parquet").write_bytes(b"finished")
    run(tmp_path / "out")

    assert [path.name for path in spool.glob("*.parquet")] == ["tmp.txt-0123.parquet"]
    assert not (spool / "tmpdead").exists()


def test_overwrite_goes_on_after_a_stop(tmp_path):
    run(tmp_path / "out.parquet")
    run(tmp_path / "out.parquet", fields=OTHER, overwrite=True, tasks=2)

    with Store.open(tmp_path / "out.parquet", make_plan(OTHER), make_schema(OTHER), overwrite=True) as store:
        assert [task.index for task in store.pending()] == [2, 3, 4]


def test_a_single_file_changed_by_somebody_else_is_not_touched_unasked(tmp_path):
    output = tmp_path / "out.parquet"
    run(output)
    whole = output.read_bytes()
    output.write_bytes(whole[:-1])

    with pytest.raises(OutputError, match="not what this run published"):
        run(output)
    assert output.read_bytes() == whole[:-1]
    run(output, overwrite=True)
    assert output.read_bytes() == whole


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_else_is_refused(tmp_path, overwrite):
    for name in OUTPUTS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-000000.parquet").write_bytes(b"theirs")
        with pytest.raises(OutputError, match="choose another output"):
            run(tmp_path / name, overwrite=overwrite)
    (tmp_path / "file").write_bytes(b"theirs")
    with pytest.raises(OutputError, match="not an output of gte-vectorize"):
        run(tmp_path / "file", overwrite=overwrite)
    assert set(tree(tmp_path).values()) == {b"theirs"}


def test_an_empty_folder_may_be_the_output(tmp_path):
    (tmp_path / "out").mkdir()
    run(tmp_path / "out")
    assert (tmp_path / "out/_SUCCESS").exists()


def test_an_output_over_the_input_is_refused(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    shard = replace(SHARDS[0], uri=str(corpus / "a.parquet"))
    (corpus / "a.parquet").write_bytes(b"text")
    (tmp_path / "link.parquet").symlink_to(corpus / "a.parquet")

    for output in (corpus / "a.parquet", corpus / "../corpus/a.parquet", corpus, tmp_path, tmp_path / "link.parquet"):
        with pytest.raises(OutputError, match=r"over the input .*a\.parquet"):
            run(output, shards=(shard,), overwrite=True)
    with pytest.raises(OutputError, match="over the input"):
        run(corpus / "a.parquet/out", shards=(replace(SHARDS[0], uri=f"file://{corpus}/a.parquet"),))
    assert tree(tmp_path) == {"corpus/a.parquet": b"text", "link.parquet": b"text"}
    run(corpus / "a.embeddings.parquet", shards=(shard,))


@pytest.mark.parametrize("output", ["hf://datasets/a/b", Path("gs://bucket/out"), "hdfs://host/out"])
def test_another_store_than_s3_is_refused_with_advice(output):
    with pytest.raises(OutputError, match="write locally, then copy"):
        run(output)


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_second_run_ends_at_once_and_the_lock_dies_with_its_process(tmp_path, name):
    script = [sys.executable, Path(__file__).parent / "small_run.py", tmp_path / name]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "pipeline")}
    with subprocess.Popen(script, stdout=subprocess.PIPE, env=environment) as first:
        assert first.stdout.readline() == b"step\n"
        first.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(TemporaryError, match="another run is writing"):
                run(tmp_path / name)
            with pytest.raises(TemporaryError, match="another run is writing"):
                run(tmp_path / name, fields=OTHER, overwrite=True)
        finally:
            first.kill()
    assert first.returncode == -signal.SIGKILL
    run(tmp_path / name)


def test_a_glance_at_the_lock_ends_no_run(tmp_path):
    run(tmp_path / "out", tasks=0)
    with (tmp_path / "out/_gte_vectorize/lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        glance = threading.Timer(0.1, fcntl.flock, (lock, fcntl.LOCK_UN))
        glance.start()
        run(tmp_path / "out", tasks=0)
        glance.join()


def test_the_lock_is_free_again_after_leaving_and_after_a_refusal(tmp_path):
    run(tmp_path / "out", tasks=1)
    with pytest.raises(OutputError):
        run(tmp_path / "out", fields=OTHER)
    with Store.open(tmp_path / "out", make_plan(), make_schema()):
        pass
    run(tmp_path / "out")


def test_too_little_room_is_said_before_work(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    need = ROWS * 4 * DIM
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, need - 1))
    with pytest.raises(TemporaryError, match=r"need at least .* GiB are free; make room"):
        run(tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, need))
    monkeypatch.setattr(space, "_SLACK", 0)
    run(tmp_path / "out", tasks=1)
    with pytest.raises(TemporaryError, match="make room"):
        run(tmp_path / "out.parquet")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(OutputError, match="closed"):
        run(tmp_path / "closed/out")


def test_a_path_through_a_file_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="file"):
        run(tmp_path / "file/out.parquet")


def test_odd_names_work(tmp_path):
    run(tmp_path / "合同 [1] %20 'x'" / "out put.PARQUET")
    assert pq.read_table(tmp_path / "合同 [1] %20 'x'" / "out put.PARQUET").num_rows == ROWS


def test_a_plan_that_cannot_be_read_is_refused_and_overwritten(tmp_path):
    run(tmp_path / "out", tasks=2)
    (tmp_path / "out/_gte_vectorize/plan.json").write_bytes(b"{")

    with pytest.raises(OutputError, match="cannot be read"):
        run(tmp_path / "out")
    run(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out/_SUCCESS").exists()


def test_a_part_with_too_few_rows_is_not_published(tmp_path):
    plan, schema = make_plan(), make_schema()
    task, short = plan.tasks[0], replace(plan.tasks[0], num_rows=100)
    with Store.open(tmp_path / "out", plan, schema) as store:
        window, columns = next(windows(short))
        with (
            pytest.raises(VectorizeError, match="holds 100 rows instead of 300"),
            store.part(task) as path,
            PartWriter(path, schema, short) as part,
        ):
            part.write(window, columns.to_batches())
        assert store.pending()[0] is task
    assert list((tmp_path / "out").glob("part-*")) == []


def test_a_file_that_a_rival_of_the_same_plan_published_is_adopted(tmp_path):
    """Two runs that no lock kept apart can leave the file without the manifest that vouches for it."""
    run(tmp_path / "out.parquet")
    before = (tmp_path / "out.parquet").stat().st_ino, (tmp_path / "out.parquet").read_bytes()
    (tmp_path / ".out.parquet.state/manifest.json").unlink()
    run(tmp_path / "out.parquet")
    assert ((tmp_path / "out.parquet").stat().st_ino, (tmp_path / "out.parquet").read_bytes()) == before
    assert (tmp_path / ".out.parquet.state/manifest.json").exists()


@pytest.mark.parametrize("name", ["out", "out.parquet"])
def test_a_device_that_answers_differently_does_not_go_on(tmp_path, name):
    plan, schema = make_plan(), make_schema()
    with Store.open(tmp_path / name, plan, schema) as store:
        store.recognise("one")
        store.recognise("one")
        store.recognise("two")  # nothing is published that it could differ from
    run(tmp_path / name, tasks=1)
    with Store.open(tmp_path / name, plan, schema) as store:
        store.recognise("two")
        with pytest.raises(OutputError, match=r"other bits than the one that began .*--overwrite"):
            store.recognise("three")
    with Store.open(tmp_path / name, make_plan(OTHER), make_schema(OTHER), overwrite=True) as store:
        store.recognise("three")
