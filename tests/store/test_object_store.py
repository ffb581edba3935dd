"""Outputs in a bucket: the promises of local ones, before a real server."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder.tiny import save_tiny
from object_world import NAMES, another_machine, local_files, objects, states, uploads, visible
from small_run import FIELDS, SHARDS, make_plan, make_schema, run, write_task

from gte_vectorize import vectorize
from gte_vectorize.batch import Shard
from gte_vectorize.errors import ConfigError, OutputError, TemporaryError
from gte_vectorize.store import lease, s3
from gte_vectorize.store.bucket import Bucket
from gte_vectorize.store.layout import find_layout
from gte_vectorize.store.store import Store

OTHER = {**FIELDS, "model": "other/model"}
SECRET = "wJalrXUtnFEMI"
SCRIPT = Path(__file__).parent / "small_run.py"

pytestmark = pytest.mark.usefixtures("machine")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_leaves_the_bytes_of_a_local_run_and_nothing_on_the_machine(bucket, local, machine, name, tmp_path):
    totals = run(f"s3://corpora/{name}")

    assert objects(bucket) == local[name]
    assert totals == run(tmp_path / "local" / name)
    assert {path.name for path in machine.rglob("*") if path.is_file()} == {"lock", "holder"}
    for path in machine.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_bucket_itself_and_odd_names_work(bucket, local):
    for output, prefix in (("s3://corpora/", ""), ("S3://corpora/合同 %20+/[1]/", "合同 %20+/[1]/")):
        run(output)
        found = {key.removeprefix("out/"): data for key, data in local["out"].items()}
        assert {key.removeprefix(prefix): data for key, data in objects(bucket).items()} == found
        bucket.objects.delete()


@pytest.mark.parametrize("name", NAMES)
def test_a_finished_run_again_changes_nothing(bucket, name, tmp_path):
    totals = run(f"s3://corpora/{name}")
    before = states(bucket)
    with another_machine(tmp_path):
        assert run(f"s3://corpora/{name}") == totals
        with Store.open(f"s3://corpora/{name}", make_plan(), make_schema(), overwrite=True) as store:
            assert (store.done, store.pending()) == (True, [])
    assert states(bucket) == before


@pytest.mark.parametrize("name", NAMES)
def test_another_machine_goes_on_and_touches_nothing_that_is_published(bucket, local, name, tmp_path):
    run(f"s3://corpora/{name}", tasks=2)
    parts = {key: state for key, state in states(bucket).items() if "part-" in key}
    with another_machine(tmp_path), Store.open(f"s3://corpora/{name}", make_plan(), make_schema()) as store:
        assert [task.index for task in store.pending()] == [2, 3, 4]
        assert parts.items() <= states(bucket).items()
    run(f"s3://corpora/{name}")
    assert objects(bucket) == local[name]
    assert name == "out.parquet" or parts.items() <= states(bucket).items()


def start_and_kill(output: str, failpoints: str, delay: float) -> int:
    """Dies at a failpoint, or `delay` seconds after its first step."""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2] / "pipeline")}
    environment |= {"GTE_VECTORIZE_FAILPOINTS": failpoints} if failpoints else {}
    with subprocess.Popen([sys.executable, SCRIPT, output], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if not failpoints:
            time.sleep(delay)
            process.kill()
        process.stdout.read()
    return process.returncode


@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("out", ["publish.link=kill@4"]),
        ("out.parquet", ["publish.syncdir=kill@7"]),
        pytest.param("out", ["random"] * 12, marks=pytest.mark.slow),
        pytest.param("out.parquet", ["random"] * 12, marks=pytest.mark.slow),
    ],
)
def test_killed_and_run_again_is_undisturbed(bucket, local, machine, name, points):
    rng, kills = random.Random(name), 0
    for point in points:
        ended = start_and_kill(f"s3://corpora/{name}", "" if point == "random" else point, rng.uniform(0, 0.3))
        assert visible(bucket).items() <= local[name].items()
        kills += ended == -signal.SIGKILL
        if ended == 0:
            assert objects(bucket) == local[name]
            bucket.objects.delete()
    assert kills > len(points) / 2
    run(f"s3://corpora/{name}")
    assert objects(bucket) == local[name]
    assert {path.name for path in machine.rglob("*") if path.is_file()} == {"lock", "holder"}


@contextmanager
def dead_after(steps: int, *, after_the_request: bool) -> Iterator[list[str]]:
    """No request gets through from the `steps`-th on; the last one may still reach the store."""
    ask, taken = Bucket.ask, []

    def watched(self: Bucket, operation: str, about: Path, **asked: Any) -> Any:
        taken.append(operation)
        if len(taken) > steps:
            if after_the_request and len(taken) == steps + 1:
                ask(self, operation, about, **asked)
            raise KeyboardInterrupt
        return ask(self, operation, about, **asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "ask", watched)
        try:
            yield taken
        except KeyboardInterrupt:
            assert len(taken) > steps


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_dead_before_or_after_any_request_and_run_again_is_undisturbed(bucket, tmp_path, name, stride):
    run(tmp_path / "local" / name, shards=SHARDS[:1])
    expected = local_files(tmp_path / "local")
    for step in count(0, stride):
        with dead_after(step, after_the_request=step % 2 == 0) as taken:
            run(f"s3://corpora/{name}", shards=SHARDS[:1])
        assert visible(bucket).items() <= expected.items()
        run(f"s3://corpora/{name}", shards=SHARDS[:1])
        assert objects(bucket) == expected
        bucket.objects.delete()
        if len(taken) <= step:
            break
    assert step > 30


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_overwrite_dead_at_any_request_ends_with_the_new_file(bucket, tmp_path, stride):
    run(tmp_path / "out.parquet", shards=SHARDS[:1])
    new = (tmp_path / "out.parquet").read_bytes()
    for step in count(0, stride):
        bucket.Object("out.parquet").put(Body=bytes(len(new)))
        with dead_after(step, after_the_request=False) as taken:
            run("s3://corpora/out.parquet", shards=SHARDS[:1], overwrite=True)
        assert bucket.Object("out.parquet").get()["Body"].read() in (new, bytes(len(new)))
        run("s3://corpora/out.parquet", shards=SHARDS[:1], overwrite=True)
        assert bucket.Object("out.parquet").get()["Body"].read() == new
        bucket.objects.delete()
        if len(taken) <= step:
            break


@pytest.mark.parametrize("name", NAMES)
def test_a_second_run_ends_at_once(bucket, name, tmp_path):
    with Store.open(f"s3://corpora/{name}", make_plan(), make_schema()) as store:
        for fields, overwrite in ((FIELDS, False), (OTHER, True)):
            with pytest.raises(TemporaryError, match=f"another run is writing 's3://corpora/{name}'"):
                run(f"s3://corpora/{name}", fields=fields, overwrite=overwrite)
            with another_machine(tmp_path), pytest.raises(TemporaryError, match="another run is writing"):
                run(f"s3://corpora/{name}", fields=fields, overwrite=overwrite)
        assert len(store.pending()) == 5
    with another_machine(tmp_path):
        run(f"s3://corpora/{name}")


def test_a_lease_that_is_renewed_holds_and_one_that_is_not_is_taken_over(bucket, local, tmp_path, monkeypatch, caplog):
    plan, schema, thawed, put = make_plan(), make_schema(), threading.Lock(), Bucket.put

    def put_when_thawed(self: Bucket, *asked: Any) -> str:
        with thawed if threading.current_thread() is beating else nullcontext():
            return put(self, *asked)

    monkeypatch.setattr(lease, "BEAT", 0.05)
    with Store.open("s3://corpora/out", plan, schema) as first:
        (beating,) = (thread for thread in threading.enumerate() if thread.name == "lease")
        monkeypatch.setattr(Bucket, "put", put_when_thawed)
        write_task(first, plan.tasks[0], schema, model=FIELDS["model"], step=lambda: None)
        time.sleep(2.5)
        monkeypatch.setattr(lease, "EXPIRES", 2.0)  # an object's time has whole seconds
        with another_machine(tmp_path), pytest.raises(TemporaryError, match="another run is writing"):
            run("s3://corpora/out")
        monkeypatch.setattr(lease, "EXPIRES", -2.0)
        with thawed, another_machine(tmp_path):
            run("s3://corpora/out")
        assert "taken for dead" in caplog.text
        beating.join(10)
        with pytest.raises(TemporaryError, match="another run has taken over"), first.part(plan.tasks[1]):
            pass
    assert objects(bucket) == local["out"]
    said = json.loads(bucket.Object("out/_gte_vectorize/lease.json").get()["Body"].read())
    assert said == {"run": None, "settled": True}


@pytest.mark.parametrize("torn", [b"", b"[]", b'{"run": "a", "holder": "b"'])
def test_a_torn_lease_expires(bucket, torn, monkeypatch):
    bucket.Object("out/_gte_vectorize/lease.json").put(Body=torn)
    with pytest.raises(TemporaryError, match="another run is writing"):
        run("s3://corpora/out", tasks=0)
    monkeypatch.setattr(lease, "EXPIRES", -2.0)
    run("s3://corpora/out", tasks=0)


def test_a_rival_that_lost_its_lease_does_no_damage(bucket, local, tmp_path, monkeypatch):
    plan, schema = make_plan(), make_schema()
    with Store.open("s3://corpora/out", plan, schema) as first:
        monkeypatch.setattr(lease, "EXPIRES", -2.0)
        with another_machine(tmp_path):
            run("s3://corpora/out", tasks=3)
        before = states(bucket)
        for task in first.pending():
            write_task(first, task, schema, model=FIELDS["model"], step=lambda: None)
        first.finish()
    assert objects(bucket) == local["out"]
    assert {key: state for key, state in before.items() if "lease" not in key}.items() <= states(bucket).items()


def test_two_runs_that_start_at_once_refuse_neither_for_good(bucket, tmp_path, monkeypatch):
    """A rival comes and goes before each of the requests with which a run takes its output."""
    ask = Bucket.ask
    for step in count():
        asked = count()

        def late(self: Bucket, *given: Any, at: int = step, so_far: Iterator[int] = asked, **options: Any) -> Any:
            if next(so_far) == at:
                with suppress(TemporaryError), another_machine(tmp_path):
                    run("s3://corpora/out", tasks=0)
            return ask(self, *given, **options)

        with monkeypatch.context() as patch, suppress(TemporaryError):
            patch.setattr(Bucket, "ask", late)
            run("s3://corpora/out", tasks=0)
        bucket.objects.delete()
        if next(asked) <= step:
            break
    assert step > 10


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_lost_its_lease_finishes_nothing(bucket, name, tmp_path, monkeypatch):
    plan, schema = make_plan(shards=SHARDS[:1]), make_schema()
    monkeypatch.setattr(lease, "BEAT", 0.05)
    with Store.open(f"s3://corpora/{name}", plan, schema) as first:
        for task in first.pending():
            write_task(first, task, schema, model=FIELDS["model"], step=lambda: None)
        (beating,) = (thread for thread in threading.enumerate() if thread.name == "lease")
        monkeypatch.setattr(lease, "EXPIRES", -2.0)
        taken = False
        while not taken:  # by the beat, perhaps
            with suppress(TemporaryError), another_machine(tmp_path):
                run(f"s3://corpora/{name}", fields=OTHER, shards=SHARDS[:1], overwrite=True, tasks=1)
                taken = True
        beating.join(10)
        before = states(bucket)
        with pytest.raises(TemporaryError, match="another run has taken over"):
            first.finish()
    assert states(bucket) == before


def test_answers_are_asked_for_a_few_ahead():
    answers = s3.S3Files(Path("out"), Path("state")).map(lambda number: 2 * number, count())
    assert [next(answers) for _ in range(1000)] == list(range(0, 2000, 2))
    answers.close()


def test_an_object_of_somebody_else_is_never_touched(bucket):
    run("s3://corpora/out", tasks=1)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"mine": [1]}), sink)
    bucket.Object("out/part-000001.parquet").put(Body=sink.getvalue().to_pybytes())
    before = states(bucket)["out/part-000001.parquet"]

    with pytest.raises(OutputError, match=r"'s3://corpora/out/part-000001\.parquet' exists"):
        run("s3://corpora/out")
    assert states(bucket)["out/part-000001.parquet"] == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_else_is_refused(bucket, overwrite):
    bucket.Object("out/theirs/a.txt").put(Body=b"theirs")
    with pytest.raises(OutputError, match="not an output of gte-vectorize"):
        run("s3://corpora/out", overwrite=overwrite)
    assert list(states(bucket)) == ["out/theirs/a.txt"]


def test_a_single_file_of_somebody_else_is_replaced_only_on_demand_and_at_the_end(bucket, local):
    bucket.Object("out.parquet").put(Body=b"theirs")
    with pytest.raises(OutputError, match="--overwrite"):
        run("s3://corpora/out.parquet")
    assert objects(bucket) == {"out.parquet": b"theirs"}
    run("s3://corpora/out.parquet", overwrite=True, tasks=5)
    assert objects(bucket)["out.parquet"] == b"theirs"
    run("s3://corpora/out.parquet", overwrite=True)
    assert objects(bucket) == local["out.parquet"]


@pytest.mark.parametrize(("name", "tasks"), [("out", 2), ("out.parquet", None)])
def test_another_model_is_refused_by_name_and_replaces_on_demand(bucket, name, tasks, tmp_path):
    run(f"s3://corpora/{name}", tasks=tasks)
    before = objects(bucket)
    with pytest.raises(OutputError, match=r"'thenlper/gte-large-zh'.*'other/model'"):
        run(f"s3://corpora/{name}", fields=OTHER)
    assert objects(bucket) == before

    run(f"s3://corpora/{name}", fields=OTHER, shards=SHARDS[:1], overwrite=True)
    run(tmp_path / "fresh" / name, fields=OTHER, shards=SHARDS[:1])
    assert objects(bucket) == local_files(tmp_path / "fresh")


@pytest.mark.parametrize("name", NAMES)
def test_a_part_without_its_record_is_adopted_and_a_damaged_one_made_again(bucket, local, name):
    run(f"s3://corpora/{name}", tasks=3)
    keys = [found.key for found in bucket.objects.all()]
    parts, records = ([key for key in keys if word in key] for word in ("part-", "records"))
    bucket.Object(records[0]).delete()
    adopted = states(bucket)[parts[0]]
    bucket.Object(records[1]).delete()
    bucket.Object(parts[1]).put(Body=b"garbage!" * 99)
    bucket.Object(parts[2]).put(Body=b"half")

    run(f"s3://corpora/{name}", tasks=3)
    assert states(bucket)[parts[0]] == adopted
    run(f"s3://corpora/{name}")
    assert objects(bucket) == local[name]


def test_a_part_damaged_in_the_bucket_is_found_when_the_file_is_assembled(bucket, local):
    run("s3://corpora/out.parquet", tasks=5)
    part = bucket.Object(".out.parquet.state/parts/part-000003.parquet")
    told = part.get()
    data = bytearray(told["Body"].read())
    data[-1] ^= 1
    part.put(Body=bytes(data), Metadata=told["Metadata"])

    with pytest.raises(TemporaryError, match=r"part-000003\.parquet"):
        run("s3://corpora/out.parquet")
    run("s3://corpora/out.parquet")
    assert objects(bucket) == local["out.parquet"]


def test_a_finished_directory_that_lost_a_part_is_mended(bucket, local):
    run("s3://corpora/out")
    bucket.Object("out/part-000003.parquet").delete()
    run("s3://corpora/out")
    assert objects(bucket) == local["out"]


def test_a_copy_without_our_metadata_is_known_by_its_bytes(bucket, local):
    run("s3://corpora/out", tasks=1)
    key = "out/part-000000.parquet"
    bucket.Object(key).put(Body=local["out"][key])
    bucket.Object("out/_gte_vectorize/records/000000.json").delete()
    run("s3://corpora/out")
    assert objects(bucket) == local["out"]


def test_a_large_file_is_sent_in_pieces_and_what_a_dead_run_left_of_it_is_let_go(bucket, local, monkeypatch):
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(s3, "LARGEST_PUT", 100_000)
    monkeypatch.setattr(s3, "PIECE", 100_000)
    theirs = bucket.Object("out.parquet").initiate_multipart_upload().id
    run("s3://corpora/out.parquet", tasks=5)
    ask = Bucket.ask

    def die(self: Bucket, operation: str, about: Path, **asked: Any) -> Any:
        if operation == "complete_multipart_upload":
            raise TemporaryError("told")
        return ask(self, operation, about, **asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "ask", die)
        with pytest.raises(TemporaryError, match="told"):
            run("s3://corpora/out.parquet")
    assert len(uploads(bucket)) == 2
    assert "out.parquet" not in objects(bucket)

    run("s3://corpora/out.parquet")
    assert uploads(bucket) == {theirs}
    assert objects(bucket) == local["out.parquet"]


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://KEY:{SECRET}@corpora/out",
        f"s3://{SECRET}@corpora/out.parquet",
        f"s3://corpora/out?secret_key={SECRET}",
        Path(f"s3://KEY:{SECRET}@corpora/out"),
    ],
)
def test_credentials_in_a_uri_are_refused_and_not_echoed(uri):
    with pytest.raises(OutputError, match="credentials") as refusal:
        run(uri)
    assert SECRET not in str(refusal.value)


def test_an_output_over_an_input_is_refused(bucket):
    shard = Shard("s3://corpora/in/a.parquet", 1, 1, (10,))
    for output in ("s3://corpora/in", "s3://corpora/in/a.parquet", "s3://corpora"):
        with pytest.raises(OutputError, match="over the input"):
            find_layout(output, (shard,))
    find_layout("s3://corpora/in/b.parquet", (shard,))
    find_layout("s3://corpora/i", (shard,))


def test_a_missing_bucket_and_missing_credentials_are_named(monkeypatch, tmp_path):
    with pytest.raises(OutputError, match="no such bucket"):
        run("s3://nobody/out")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(OutputError, match="NoCredentialsError"):
        run("s3://corpora/out")


def test_without_boto3_the_extra_is_named(monkeypatch):
    for name in ("boto3", "botocore", "botocore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'gte-vectorize\[s3\]'"):
        run("s3://corpora/out")


def test_a_job_from_bucket_to_bucket(bucket, tmp_path, monkeypatch):
    model = save_tiny(tmp_path / "model", "bert")
    texts = [f"w{row} w{row + 1}" for row in range(40)]
    pq.write_table(pa.table({"id": list(range(40)), "text": texts}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"id": row, "text": texts[row]}) + "\n" for row in range(40)))
    bucket.upload_file(str(tmp_path / "a.parquet"), "in/a.parquet")
    vectorize(tmp_path / "a.parquet", tmp_path / "local.parquet", model=model, device="cpu")

    for source, output in (
        ("s3://corpora/in", "s3://corpora/in/v.parquet"),
        (tmp_path / "a.jsonl", "s3://corpora/j/v.parquet"),
    ):
        report = vectorize(source, output, model=model, device="cpu")
        assert (report.output, report.rows) == (output, 40)
        again = vectorize(source, output, model=model, device="cpu")
        assert (again.computed_tokens, again.rows) == (0, 40)
        key = output.removeprefix("s3://corpora/")
        assert bucket.Object(key).get()["Body"].read() == (tmp_path / "local.parquet").read_bytes()
