import json

import pyarrow as pa
import pytest

from gte_vectorize.errors import OutputError
from gte_vectorize.writer.schema import output_schema, schema_fingerprint

COLUMNS = pa.schema(
    [("id", pa.int64()), ("tags", pa.list_(pa.string()))], metadata={"huggingface": "{}", "pandas": "{}"}
)


def test_columns_follow_the_pass_through_ones_and_one_key_describes_them():
    schema = output_schema(COLUMNS, dim=3, embeddings={"model": "合同", "dim": 3})

    assert schema.names == ["id", "tags", "embedding", "n_tokens", "truncated", "status", "text_hash"]
    vector = schema.field("embedding")
    assert vector.nullable
    assert (vector.type.list_size, vector.type.value_type, vector.type.value_field.nullable) == (3, pa.float32(), False)
    assert list(schema.metadata) == [b"embeddings"]
    assert json.loads(schema.metadata[b"embeddings"]) == {"model": "合同", "dim": 3}


def test_equal_descriptions_make_equal_schemas():
    one = output_schema(COLUMNS, dim=3, embeddings={"a": 1, "b": 2})
    same = output_schema(COLUMNS, dim=3, embeddings={"b": 2, "a": 1})
    other = output_schema(COLUMNS, dim=3, embeddings={"a": 1, "b": 3})

    assert schema_fingerprint(one) == schema_fingerprint(same) != schema_fingerprint(other)


@pytest.mark.parametrize("name", ["embedding", "n_tokens", "truncated", "status", "text_hash"])
def test_an_input_column_cannot_hide_an_added_one(name):
    with pytest.raises(OutputError, match=rf"'{name}'.*rename it.*--columns"):
        output_schema(pa.schema([(name, pa.string())]), dim=3, embeddings={})


def test_a_type_that_parquet_cannot_hold_is_refused_by_name():
    columns = pa.schema([("fine", pa.string()), ("period", pa.month_day_nano_interval())])

    with pytest.raises(OutputError, match=r"'period'.*month_day_nano_interval.*--columns"):
        output_schema(columns, dim=3, embeddings={})
