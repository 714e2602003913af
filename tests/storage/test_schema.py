import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import schema
from storage.errors import DamagedShard, UnknownSchema

MakeTable = Callable[..., pa.Table]


def test_what_is_encoded_is_what_is_decoded(shard_table: MakeTable) -> None:
    table = shard_table(1, 2)
    decoded, metadata = schema.decode(schema.encode(table, schema.SHARD, {"writer": "w"}))
    assert decoded.equals(table)
    assert metadata["writer"] == "w"
    assert metadata["schema_version"] == str(schema.SCHEMA_VERSION)


def test_decoding_some_columns_gives_just_these(shard_table: MakeTable) -> None:
    data = schema.encode(shard_table(1, 2), schema.SHARD, {})
    decoded, _ = schema.decode(data, ["ordinal", "reward"])
    assert decoded.column_names == ["ordinal", "reward"]
    assert decoded.column("ordinal").to_pylist() == [1, 1, 2, 2]


def test_an_empty_shard_survives() -> None:
    decoded, _ = schema.decode(schema.encode(schema.SHARD.empty_table(), schema.SHARD, {}))
    assert decoded.num_rows == 0
    assert decoded.column_names == schema.SHARD.names


def test_slices_and_chunks_encode_like_a_fresh_table(shard_table: MakeTable) -> None:
    table = shard_table(1, 2, 3)
    pieces = pa.concat_tables([table.slice(2, 1), table.slice(3, 2)])
    decoded, _ = schema.decode(schema.encode(pieces, schema.SHARD, {}))
    assert decoded.to_pylist() == table.to_pylist()[2:5]


def test_nulls_nan_and_nested_lists_survive() -> None:
    rows = [
        {"attempt": 1, "step": 2, "ordinal": 3, "state": "trained", "rewards": [0.5, None, float("nan")]},
        {"attempt": 1, "step": 2, "ordinal": 4, "state": "dropped", "reason": "stale", "trainer_logprobs": None},
        {"attempt": 1, "step": 2, "ordinal": 5, "state": "trained", "trainer_logprobs": [[-1.0, -2.0], None, []]},
    ]
    table = schema.table(rows, schema.LEDGER)
    decoded, _ = schema.decode(schema.encode(table, schema.LEDGER, {}))
    assert decoded.column("trainer_logprobs").to_pylist() == [None, None, [[-1.0, -2.0], None, []]]
    assert np.isnan(decoded.column("rewards")[0].as_py()[2])
    assert decoded.column("reason").to_pylist() == [None, "stale", None]


def test_evaluations_survive() -> None:
    row = {
        "version": 3, "due_version": 2, "dataset_index": 7, "mode": "greedy", "reward": 1.0, "prompt": "2 + 2 = ?",
        "completion": "4", "tokens": 1, "finish_reason": "stop", "min_version": 3, "max_version": 4, "version_tokens": None,
    }  # fmt: skip
    decoded, _ = schema.decode(schema.encode(schema.table([row], schema.EVALUATION), schema.EVALUATION, {}))
    assert decoded.to_pylist() == [row]


def test_token_columns_are_byte_stream_split_without_dictionary(shard_table: MakeTable) -> None:
    data = schema.encode(shard_table(*range(20)), schema.SHARD, {})
    described = pq.read_metadata(pa.BufferReader(data))
    assert described.num_row_groups == 1
    group = described.row_group(0)
    columns = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}
    for path in ("token_ids.list.element", "logprobs.list.element"):
        assert "BYTE_STREAM_SPLIT" in columns[path].encodings
        assert not columns[path].has_dictionary_page
        assert columns[path].compression == "ZSTD"
    assert columns["environment"].has_dictionary_page


@pytest.mark.parametrize("column", ["token_ids", "logprobs", "loss_mask"])
def test_a_null_token_is_refused(shard_table: MakeTable, column: str) -> None:
    table = shard_table(1)
    loose = pa.array([[None], [None]], pa.list_(schema.SHARD.field(column).type.value_type))
    table = table.set_column(table.column_names.index(column), column, loose)
    with pytest.raises(ValueError, match=column):
        schema.encode(table, schema.SHARD, {})


def test_a_missing_or_unknown_column_is_refused(shard_table: MakeTable) -> None:
    with pytest.raises(ValueError, match="reward"):
        schema.encode(shard_table(1).drop_columns(["reward"]), schema.SHARD, {})
    with pytest.raises(ValueError, match="rewrad"):
        schema.table([{"rewrad": 1.0}], schema.SHARD)


def test_any_truncation_is_noticed(shard_table: MakeTable) -> None:
    data = schema.encode(shard_table(1, 2), schema.SHARD, {})
    for length in [*range(0, 12), *range(12, len(data), 997), len(data) - 1]:
        with pytest.raises(DamagedShard, match="part-7"):
            schema.decode(data[:length], name="part-7")


def test_a_flipped_bit_is_noticed_or_changes_nothing(shard_table: MakeTable) -> None:
    table = shard_table(1, 2, 3)
    data = schema.encode(table, schema.SHARD, {"writer": "w"})
    choice = random.Random(0)
    noticed = 0
    for position in choice.sample(range(len(data)), 600):
        damaged = bytearray(data)
        damaged[position] ^= 1 << choice.randrange(8)
        try:
            decoded, metadata = schema.decode(bytes(damaged))
        except (DamagedShard, UnknownSchema):
            noticed += 1
        else:
            assert decoded.equals(table) and metadata["writer"] == "w", f"altered byte {position}"
    assert noticed > 300


def test_a_parquet_file_of_somebody_else_is_refused() -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"ordinal": [1]}), sink)
    with pytest.raises(DamagedShard, match="not written by this program"):
        schema.decode(bytes(sink.getvalue()))


def test_a_newer_schema_is_refused(shard_table: MakeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(schema, "SCHEMA_VERSION", 99)
        data = schema.encode(shard_table(1), schema.SHARD, {})
    with pytest.raises(UnknownSchema, match="99"):
        schema.decode(data)


def test_metadata_is_read_from_the_end_alone(shard_table: MakeTable) -> None:
    data = schema.encode(shard_table(*range(50)), schema.SHARD, {"writer": "w"})
    footer = int.from_bytes(data[-8:-4], "little") + 8
    metadata = schema.decode_metadata(data[-footer:])
    assert metadata is not None and metadata["writer"] == "w"
    assert schema.decode_metadata(data[-footer + 1 :]) is None


@pytest.mark.parametrize("column", ["token_ids", "logprobs", "loss_mask"])
def test_list_views_agree_with_python_lists_on_slices_and_chunks(shard_table: MakeTable, column: str) -> None:
    table = shard_table(1, 2, 3)
    chunked = pa.concat_tables([table.slice(3), table.slice(1, 2), table.slice(0, 0)])
    for listed in (table[column], table[column].slice(2, 3), chunked[column], table[column].chunk(0).slice(1)):
        offsets, values = schema.list_views(listed)
        assert offsets[0] == 0 and offsets[-1] == len(values)
        views = [values[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
        assert views == listed.to_pylist()


def test_list_views_of_one_chunk_share_its_memory(shard_table: MakeTable) -> None:
    array = shard_table(1)["token_ids"].chunk(0)
    _, values = schema.list_views(array)
    assert values.__array_interface__["data"][0] == array.values.buffers()[1].address


def test_list_views_of_no_rows_keep_their_type() -> None:
    offsets, values = schema.list_views(schema.SHARD.empty_table()["token_ids"])
    assert offsets.tolist() == [0] and values.dtype == np.int32


def test_list_views_refuse_null_lists() -> None:
    with pytest.raises(ValueError, match="null"):
        schema.list_views(pa.array([[1], None]))


def test_errors_are_one_sentence(shard_table: MakeTable) -> None:
    data: Any = schema.encode(shard_table(1), schema.SHARD, {})
    with pytest.raises(DamagedShard) as caught:
        schema.decode(data[:50])
    assert re.fullmatch(r"[^\n]+\.", str(caught.value))


@pytest.mark.parametrize("columns", [None, ["reward"]])
def test_values_that_do_not_match_the_footer_are_noticed(shard_table: MakeTable, columns: list[str] | None) -> None:
    data = schema.encode(shard_table(1, reward=0.5), schema.SHARD, {})
    footer = pq.read_metadata(pa.BufferReader(data)).metadata
    kept = {key: footer[key] for key in (schema.METADATA_KEY, schema.METADATA_DIGEST_KEY)}
    sink = pa.BufferOutputStream()
    pq.write_table(shard_table(1, reward=0.75).replace_schema_metadata(kept), sink, write_page_checksum=True)
    with pytest.raises(DamagedShard, match="do not match the digests"):
        schema.decode(bytes(sink.getvalue()), columns)
