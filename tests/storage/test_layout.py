import pytest

from storage import layout
from storage.errors import InvalidKey
from storage.layout import CheckpointName, EvaluationName, LeaseName, LedgerName, MetricsName, PartName, VersionName


def test_names_are_those_of_the_documented_layout() -> None:
    assert layout.run() == "run.json"
    assert layout.attempt(3) == "attempts/000003.json"
    assert layout.progress(3, "trainer") == "attempts/000003.trainer.json"
    assert layout.lease(3, 12345) == "leases/000003/000012/lease-000012345.json"
    assert layout.part(3, 12345, 2) == "trajectories/000003/000012/lease-000012345.part-002.parquet"
    assert layout.ledger_step(3, 1000) == "ledger/000003/000001/step-000001000.parquet"
    assert layout.drops(3, 999, 1) == "ledger/000003/000000/step-000000999.drops-001.parquet"
    assert layout.pool_change(3, 4) == "pool/000003/change-000004.json"
    assert layout.manifest(3, 7) == "checkpoints/000003/step-000000007/MANIFEST.json"
    assert layout.weights(3, 7) == "weights/000003/version-000000007/"
    assert layout.refit(3, 7) == "refits/000003/version-000000007.json"
    assert layout.refit(3, 7, 2) == "refits/000003/version-000000007.late-002.json"
    assert layout.pool_wish(4) == "pool/wishes/wish-000004.json"
    assert layout.metrics(MetricsName(3, 12)) == "metrics/000003/000000/chunk-000000012.parquet"
    assert layout.evaluation(3, 7) == "evaluations/000003/version-000000007.parquet"
    assert layout.evaluation(3, 7, "held-out") == "evaluations/000003/version-000000007.held-out.parquet"


@pytest.mark.parametrize("number", [0, 7, 999, 1000, 123_456_789, 12_345_678_901])
def test_parsers_are_the_inverse_of_names(number: int) -> None:
    assert layout.parse_attempt(layout.attempt(number)) == number
    assert layout.parse_lease(layout.lease(2, number)) == LeaseName(2, number)
    assert layout.parse_part(layout.part(2, number, 1234)) == PartName(2, number, 1234)
    assert layout.parse_ledger(layout.ledger_step(2, number)) == LedgerName(2, number)
    assert layout.parse_ledger(layout.drops(2, number, 5)) == LedgerName(2, number, 5)
    assert layout.parse_checkpoint(layout.checkpoint(2, number)) == CheckpointName(2, number)
    assert layout.parse_weights(layout.weights(2, number)) == VersionName(2, number)
    assert layout.parse_metrics(layout.metrics(MetricsName(2, number))) == MetricsName(2, number)
    assert layout.parse_evaluation(layout.evaluation(2, number, "gsm")) == EvaluationName(2, number, "gsm")


def test_a_progress_hint_is_not_taken_for_an_attempt() -> None:
    assert layout.parse_attempt(layout.progress(1, "flow")) is None


def test_drops_of_a_step_sort_before_the_step() -> None:
    names = [LedgerName(1, 2), LedgerName(1, 2, 1), LedgerName(1, 1), LedgerName(1, 2, 0)]
    ordered = sorted(names, key=lambda name: name.written_order)
    assert ordered == [LedgerName(1, 1), LedgerName(1, 2, 0), LedgerName(1, 2, 1), LedgerName(1, 2)]


def test_listing_prefixes_cover_every_part_of_the_leases_and_no_more_directories_than_needed() -> None:
    assert layout.parts_of(1, [12]) == ["trajectories/000001/000000/lease-000000012.part-"]
    prefixes = layout.parts_of(1, [12, 15, 1001])
    assert len(prefixes) == 2
    for lease in (12, 15, 1001):
        assert any(layout.part(1, lease, 0).startswith(prefix) for prefix in prefixes)


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "../x", "-x", "a\\b", "a b", "ü", "a\n", "x" * 129])
def test_a_run_id_that_is_not_one_plain_segment_is_refused(run_id: str) -> None:
    with pytest.raises(InvalidKey):
        layout.run_root("s3://bucket/runs", run_id)


def test_a_run_lives_below_the_root() -> None:
    assert layout.run_root("s3://bucket/runs/", "math-1.5b") == "s3://bucket/runs/math-1.5b"


@pytest.mark.parametrize("who", ["", "../x", "A", "a.b"])
def test_a_hostile_word_never_becomes_part_of_a_path(who: str) -> None:
    with pytest.raises(InvalidKey):
        layout.progress(1, who)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(InvalidKey):
        layout.lease(1, -1)


def test_a_goal_is_told_from_a_claim() -> None:
    assert layout.parse_attempt(layout.goal(2)) is None
