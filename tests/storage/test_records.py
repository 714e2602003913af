import pytest

from storage import records
from storage.errors import DamagedRecord, Fenced, ObjectMissing
from storage.objects import ObjectStore


def test_a_record_is_read_back_as_written(store: ObjectStore) -> None:
    fields = {"text": "ü ✓", "list": [1, 2.5, None], "nested": {"a": True}}
    records.write_record(store, "a.json", fields)
    assert records.read_record(store, "a.json") == fields


def test_a_second_writer_of_a_record_is_fenced(store: ObjectStore) -> None:
    records.write_record(store, "a.json", {"a": 1})
    with pytest.raises(Fenced, match=r"a\.json"):
        records.write_record(store, "a.json", {"a": 1})


def test_every_truncation_and_every_flipped_bit_is_noticed() -> None:
    data = records.encode_record({"frontier": 17, "text": "abc"}).rstrip(b"\n")
    for length in range(len(data)):
        with pytest.raises(DamagedRecord):
            records.decode_record(data[:length], "a.json")
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(DamagedRecord):
                records.decode_record(bytes(damaged), "a.json")


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b'{"sha256": 1}', b"\xff", b'"text"', b"[" * 100_000])
def test_anything_else_is_no_record(data: bytes) -> None:
    with pytest.raises(DamagedRecord):
        records.decode_record(data, "a.json")


def test_a_value_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError):
        records.encode_record({"loss": float("nan")})


def test_a_missing_record_is_a_missing_object(store: ObjectStore) -> None:
    with pytest.raises(ObjectMissing):
        records.read_record(store, "none.json")
