"""Assets are recorded once, with what they were made from, and mirrored to Prefect only inside a flow run."""

from pathlib import Path
from typing import Any

import prefect.context
import prefect.events
import pytest

from flows import assets
from flows.assets import Materialisation, materialise, partition, read_materialisation, record_origin, record_progress
from flows.run import Run
from grpo_core.config import DirectoryModel, ModelConfig, RunConfig, WarmStart
from grpo_core.prompts import Row, Splits
from storage import layout
from storage.attempts import claim_next
from storage.checkpoints import Manifest, commit_manifest
from storage.digests import FileDigest, digest_file
from storage.objects import ObjectStore

SPLITS = Splits([Row([{"role": "user", "content": "1 + 1 ="}], {})], [])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    store = ObjectStore.open(str(tmp_path / "store" / "a run"))
    return Run(RunConfig(model=ModelConfig(warm_start=WarmStart())), store, SPLITS, {}, 100)


@pytest.fixture
def initial(tmp_path: Path) -> Path:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "policy"


def claim(run: Run, parent: tuple[int, int] | None = None) -> int:
    return claim_next(run.store, parent=parent, host="h", pid=1, pid_started_at=0.0, claimed_at=0.0).attempt


def checkpoint(run: Run, attempt: int, step: int, content: bytes) -> None:
    key = layout.checkpoint(attempt, step) + "weights.safetensors"
    run.store.put_if_absent(key, content)
    size, sha256 = run.store.digest(key)
    files = {"weights.safetensors": FileDigest(size, sha256)}
    commit_manifest(run.store, Manifest(attempt, step, step, files, {}, 0.0))


def test_lineage_goes_from_the_prompts_over_policy_and_checkpoints_to_evaluations(run: Run, initial: Path) -> None:
    policy = record_origin(run, initial)
    assert policy.inputs == {"prompts@whole": SPLITS.digest()}
    checkpoint(run, claim(run), 2, b"two")
    second = claim(run, parent=(1, 2))
    checkpoint(run, second, 4, b"four")
    run.store.put_if_absent(layout.evaluation(1, 0), b"zero")
    run.store.put_if_absent(layout.evaluation(second, 4), b"last")

    made = {(each.asset, each.partition): each for each in record_progress(run, policy)}
    prompts = read_materialisation(run.store, "prompts", "whole").as_input
    two, four = (made["checkpoints", partition(*name)] for name in ((1, 2), (2, 4)))
    assert two.inputs == {**prompts, **policy.as_input}
    assert four.inputs == {**prompts, **two.as_input}
    assert made["evaluations", partition(1, 0)].inputs == {**prompts, **policy.as_input}
    assert made["evaluations", partition(2, 4)].inputs == {**prompts, **four.as_input}
    assert len({each.data_version for each in made.values()}) == 4
    assert record_progress(run, policy) == []


def test_a_continued_run_keeps_the_first_record_of_its_policy(run: Run, initial: Path) -> None:
    first = record_origin(run, initial)
    assert first.metadata["bytes"] == digest_file(initial / "model.safetensors").bytes
    (initial / "model.safetensors").write_bytes(b"other weights")
    assert record_origin(run, initial) == first


def test_another_warm_start_and_other_weights_are_another_policy(run: Run, initial: Path, tmp_path: Path) -> None:
    first = record_origin(run, initial)
    other = Run(
        RunConfig(model=ModelConfig(warm_start=WarmStart(steps=7))),
        ObjectStore.open(str(tmp_path / "b")),
        SPLITS,
        {},
        1,
    )
    (initial / "model.safetensors").write_bytes(b"other weights")
    second = record_origin(other, initial)
    assert first.metadata["warm_start"] != second.metadata["warm_start"] and first.data_version != second.data_version


def test_a_policy_that_was_only_read_is_not_made_from_the_prompts(run: Run, initial: Path) -> None:
    config = RunConfig(model=ModelConfig(source=DirectoryModel(path=initial)))
    policy = record_origin(Run(config, run.store, SPLITS, {}, 1), initial)
    assert policy.inputs == {} and policy.metadata["warm_start"] is None


def test_a_partition_is_recorded_once(run: Run) -> None:
    made = Materialisation("prompts", "whole", "one", "1.0")
    assert materialise(run.store, made)
    assert not materialise(run.store, Materialisation("prompts", "whole", "two", "1.0"))
    assert read_materialisation(run.store, "prompts", "whole") == made


def test_an_event_is_sent_inside_a_flow_run_only(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(prefect.events, "emit_event", lambda event, **fields: sent.append({"event": event, **fields}))
    materialise(run.store, Materialisation("prompts", "whole", "one", "1.0"))
    assert sent == []
    monkeypatch.setattr(prefect.context.FlowRunContext, "get", lambda: object())
    made = Materialisation("policy", "whole", "two", "1.0", {"prompts@whole": "one"})
    assert materialise(run.store, made) and not materialise(run.store, made)
    (event,) = sent
    assert event["event"] == "prefect.asset.materialization.succeeded"
    assert event["resource"]["prefect.resource.id"] == assets.asset_key(run.store, "policy")
    assert event["resource"]["prefect.resource.id"].endswith("/a%20run/policy")
    assert event["resource"]["forebay.data-version"] == "two"
    assert [related["prefect.resource.id"] for related in event["related"]] == [assets.asset_key(run.store, "prompts")]
