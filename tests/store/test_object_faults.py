"""A bucket behind a proxy that goes wrong: same bytes, or a refusal that says so, and never a hang."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
from object_world import NAMES, objects, states, uploads
from proxy import Proxy, Request
from small_run import FIELDS, run

from gte_vectorize.errors import OutputError, TemporaryError
from gte_vectorize.store import bucket as bucket_module
from gte_vectorize.store import s3

SECRET = "wJalrXUtnFEMI"
pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def proxy(s3_server: str, bucket: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    with Proxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


def first_time(proxy: Proxy, fault: str, *, methods: str = "GET PUT HEAD POST DELETE", word: str = "") -> None:
    """The first request of its kind for each object goes wrong."""
    seen: set[Request] = set()

    def choose(request: Request) -> str | None:
        new = request not in seen and request.method in methods and word in request.path
        seen.add(request)
        return fault if new else None

    proxy.fault = choose


def test_one_request_in_ten_fails(bucket, local, proxy):
    rng = random.Random(0)
    proxy.fault = lambda request: rng.choice(["500", "503"]) if rng.random() < 0.1 else None
    run("s3://corpora/out")
    assert objects(bucket) == local["out"]
    assert len(proxy.requests) > 50


def test_an_outage_ends_in_bounded_time_and_keeps_what_is_published(bucket, local, proxy, monkeypatch):
    monkeypatch.setattr(bucket_module, "ATTEMPTS", 3)
    run("s3://corpora/out", tasks=2)
    before = states(bucket)
    proxy.fault, proxy.requests = lambda request: "503", []
    started = time.monotonic()
    with pytest.raises(TemporaryError, match=r"answered with 503.*run the same command again"):
        run("s3://corpora/out")
    assert time.monotonic() - started < 5
    assert len(proxy.requests) == 3
    assert states(bucket) == before

    def outage() -> None:
        proxy.fault = lambda request: "503" if len(proxy.requests) > 60 else None

    proxy.requests = []
    with pytest.raises(TemporaryError, match="answered with 503"):
        run("s3://corpora/out", step=outage)
    proxy.fault = lambda request: None
    run("s3://corpora/out")
    assert objects(bucket) == local["out"]


def test_every_first_answer_is_lost(bucket, local, proxy):
    first_time(proxy, "lose")
    run("s3://corpora/out.parquet")
    assert objects(bucket) == local["out.parquet"]
    sent = [request.path for request in proxy.requests if request.method == "PUT" and "part-000001" in request.path]
    assert len(sent) == 2  # the second was refused, and adopted
    before = states(bucket)
    run("s3://corpora/out.parquet")
    assert states(bucket) == before


def test_every_first_answer_about_a_file_in_pieces_is_lost(bucket, local, proxy, monkeypatch):
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(s3, "LARGEST_PUT", 100_000)
    monkeypatch.setattr(s3, "PIECE", 100_000)
    first_time(proxy, "lose", methods="PUT POST", word="uploadId=")
    run("s3://corpora/out.parquet")
    assert objects(bucket) == local["out.parquet"]
    assert uploads(bucket) == set()


@pytest.mark.parametrize("fault", ["409", "stall"])
def test_a_conflict_or_a_stall_is_tried_again(bucket, local, proxy, fault, monkeypatch):
    monkeypatch.setattr(bucket_module, "READ_TIMEOUT", 1)
    first_time(proxy, fault, methods="PUT", word="part-000001")
    run("s3://corpora/out")
    assert objects(bucket) == local["out"]


def test_a_store_that_is_silent_ends_the_run(bucket, proxy, monkeypatch):
    monkeypatch.setattr(bucket_module, "READ_TIMEOUT", 1)
    monkeypatch.setattr(bucket_module, "ATTEMPTS", 2)
    proxy.fault = lambda request: "stall"
    started = time.monotonic()
    with pytest.raises(TemporaryError, match=r"no whole answer \(ReadTimeoutError\)"):
        run("s3://corpora/out")
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("name", NAMES)
def test_a_store_that_ignores_conditions_is_refused_before_anything_is_written(bucket, proxy, name):
    proxy.fault = lambda request: "strip"
    with pytest.raises(OutputError, match="ignores If-None-Match"):
        run(f"s3://corpora/{name}")
    assert states(bucket) == {}


@pytest.mark.parametrize("fault", ["cut", "short"])
def test_truncated_answers_are_asked_for_again(bucket, local, proxy, fault):
    run("s3://corpora/out.parquet", tasks=5)
    first_time(proxy, fault, methods="GET", word="0000")
    run("s3://corpora/out.parquet")
    assert objects(bucket) == local["out.parquet"]


def test_answers_that_are_always_cut_take_nothing_away(bucket, local, proxy):
    run("s3://corpora/out.parquet", tasks=5)
    before = objects(bucket)
    proxy.fault = lambda request: "cut" if request.method == "GET" and "part-" in request.path else None
    with pytest.raises(TemporaryError, match="no whole answer"):
        run("s3://corpora/out.parquet")
    assert objects(bucket) == before
    proxy.fault = lambda request: None
    run("s3://corpora/out.parquet")
    assert objects(bucket) == local["out.parquet"]


def test_an_outage_does_not_make_damage_of_what_others_wrote(bucket, tmp_path, proxy, monkeypatch):
    run("s3://corpora/out", tasks=0)
    run(tmp_path / "other", fields={**FIELDS, "model": "other/model"}, tasks=1)
    theirs = (tmp_path / "other/part-000000.parquet").read_bytes()
    bucket.Object("out/part-000000.parquet").put(Body=theirs, Metadata={"sha256": "0" * 64})
    monkeypatch.setattr(bucket_module, "ATTEMPTS", 2)
    proxy.fault = lambda request: "503" if request.method == "GET" and "part-" in request.path else None
    with pytest.raises(TemporaryError, match="answered with 503"):
        run("s3://corpora/out")
    assert objects(bucket)["out/part-000000.parquet"] == theirs


@pytest.mark.parametrize("tasks", [0, 3])
def test_a_denial_is_named(bucket, local, proxy, tasks):
    if tasks:
        run("s3://corpora/out", tasks=tasks)
    before = objects(bucket)
    proxy.fault = lambda request: "403" if request.method == "PUT" or not tasks else None
    with pytest.raises(OutputError, match=r"answered with 403 .*check that the credentials"):
        run("s3://corpora/out")
    assert objects(bucket) == before
    proxy.fault = lambda request: None
    run("s3://corpora/out")
    assert objects(bucket) == local["out"]


@pytest.mark.parametrize("endpoint", [f"http://user:{SECRET}@127.0.0.1:9", f"http://user:{SECRET}@[/"])
def test_an_endpoint_that_cannot_be_reached_is_not_echoed(bucket, monkeypatch, endpoint):
    monkeypatch.setattr(bucket_module, "ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises((TemporaryError, OutputError), match="AWS_") as error:
        run("s3://corpora/out")
    assert SECRET not in str(error.value)
