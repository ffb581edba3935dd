from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_run import FIELDS, SHARDS, make_plan

from gte_vectorize.batch import Shard
from gte_vectorize.store.plan import Plan, differences, make_tasks


def cut(*row_groups, task_rows):
    return [(task.first_row, task.num_rows) for task in make_tasks([Shard("a", 1, 1, row_groups)], task_rows=task_rows)]


def test_small_row_groups_stay_whole_and_large_ones_are_split_evenly():
    assert cut(40, 40, 40, task_rows=100) == [(0, 80), (80, 40)]
    assert cut(40, 250, 40, task_rows=100) == [(0, 40), (40, 83), (123, 83), (206, 84), (290, 40)]
    assert cut(100, 100, task_rows=100) == [(0, 100), (100, 100)]


def test_tasks_of_long_documents_are_bounded_by_bytes():
    shards = [Shard("short", 1000, 1, (100,)), Shard("long", 50_000, 1, (60, 40)), Shard("book", 9_000, 1, (1, 1))]
    tasks = make_tasks(shards, task_rows=70, task_bytes=5000)
    assert [(task.shard.uri, task.num_rows) for task in tasks] == [
        ("short", 50),
        ("short", 50),
        *[("long", 10)] * 10,
        ("book", 1),
        ("book", 1),
    ]


def test_a_shard_without_rows_is_a_task_of_none():
    assert cut(task_rows=100) == cut(0, 0, task_rows=100) == [(0, 0)]
    assert [task.shard.uri for task in make_plan().tasks] == [SHARDS[index].uri for index in (0, 0, 1, 2, 2)]


@given(st.lists(st.lists(st.integers(0, 300), max_size=6), max_size=4), st.integers(1, 100))
def test_every_row_is_in_one_task_in_order(shapes, task_rows):
    shards = [Shard(str(index), 1, 1, tuple(shape)) for index, shape in enumerate(shapes)]
    tasks = make_tasks(shards, task_rows=task_rows)

    assert [task.index for task in tasks] == list(range(len(tasks)))
    for shard in shards:
        rows = [
            row
            for task in tasks
            if task.shard is shard
            for row in range(task.first_row, task.first_row + task.num_rows)
        ]
        assert rows == list(range(shard.num_rows))
        sizes = [task.num_rows for task in tasks if task.shard is shard]
        assert sizes == [0] or all(0 < size <= task_rows for size in sizes)


def test_a_plan_survives_json_and_equal_plans_are_equal_bytes():
    plan = make_plan({"model": "m", "pooling": ("cls",)})
    back = Plan.from_json(plan.to_json())

    assert back.to_json() == plan.to_json() == make_plan({"pooling": ("cls",), "model": "m"}).to_json()
    assert (back.shards, back.tasks) == (plan.shards, plan.tasks)
    assert differences(back, plan) == []


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b'{"format":2}', make_plan().to_json()[:-9]])
def test_a_damaged_or_newer_plan_is_a_value_error(data):
    with pytest.raises(ValueError, match=r"."):
        Plan.from_json(data)


def test_a_file_name_that_is_not_utf8_survives():
    shard = Shard("/corpus/\udcff.parquet", 1, 1, (1,))

    assert Plan.from_json(make_plan(shards=(shard,)).to_json()).shards == (shard,)


def test_differences_name_both_sides():
    old, first = make_plan(), SHARDS[0]

    assert differences(old, make_plan({**FIELDS, "model": "other/model"})) == [
        "model: was 'thenlper/gte-large-zh', now 'other/model'"
    ]
    assert differences(old, replace(old, compute={"device": "cuda", "torch": "2.13.0"})) == [
        "device: was 'cpu', now 'cuda'"
    ]
    inserted = Shard("/corpus/aa.parquet", 5, 5, (5,))
    assert differences(old, make_plan(shards=(first, inserted, *SHARDS[1:]))) == [
        "input file '/corpus/aa.parquet' is new"
    ]
    assert differences(old, make_plan(shards=SHARDS[1:])) == ["input file '/corpus/a.parquet' is gone"]
    assert differences(old, make_plan(shards=(replace(first, size=1001), *SHARDS[1:]))) == [
        "input file '/corpus/a.parquet' has changed (was 1000 bytes, now 1001 bytes)"
    ]
    assert differences(old, make_plan(shards=SHARDS[::-1])) == ["the input files come in another order"]
    assert differences(old, replace(old, tasks=make_tasks(SHARDS, task_rows=100))) == [
        "the corpus is cut into other tasks"
    ]
    assert differences(old, replace(old, schema="other")) == [
        "the output columns, their types or their description differ"
    ]
    assert len(differences(old, replace(old, fingerprint="other"))) == 1


def test_a_hundred_thousand_shards_survive_json():
    shards = tuple(Shard(f"/corpus/{index:06d}.parquet", index, index, (100,) * 3) for index in range(100_000))
    plan = make_plan(shards=shards)

    assert Plan.from_json(plan.to_json()).tasks == plan.tasks
    assert len(plan.tasks) == 100_000
