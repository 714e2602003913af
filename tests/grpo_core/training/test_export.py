"""An exported checkpoint is a plain model: adapters are in its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.training.export import export
from storage import layout
from storage.attempts import Fence, claim_next
from storage.checkpoints import Manifest, commit_manifest
from storage.digests import digest_directory, digests_from, fields_of
from storage.objects import ObjectStore
from storage.records import encode_record
from tests.grpo_core import tiny
from tests.grpo_core.training import ranks

CHANGES: dict[str, dict[str, dict[str, Any]]] = {"all weights": {}, "adapters": {"model": {"lora": ranks.LORA}}}


def save(policy: str, root: str, changes: dict[str, dict[str, Any]]) -> list[float]:
    """A step and its checkpoint; the log-probs of one sequence afterwards."""
    store = ObjectStore.open(root)
    claim_next(store, parent=None, host="here", pid=1, pid_started_at=0.0, claimed_at=0.0)
    learner = ranks.Learner(Path(policy), changes)
    learner.step(1)
    store.put(layout.run(), encode_record({"config": learner.config.model_dump(mode="json")}))
    directory = store.local_path(layout.checkpoint(1, 1))
    assert directory is not None
    directory.mkdir(parents=True)
    ranks.save(directory, learner.policy, learner.optimizer)
    manifest = Manifest(
        attempt=1,
        step=1,
        version=1,
        files=digests_from(fields_of(digest_directory(directory))),
        frontier={"cut": 0},
        created_at=0.0,
        pinned=(),
        metrics={},
        extra={},
    )
    commit_manifest(store, manifest, fence=Fence(store, 1).check)
    return learner.logprobs(ranks.make_rows(1, seed=7)[0]).tolist()


@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_exported_has_the_log_probs_of_the_trainer(tmp_path: Path, kind: str) -> None:
    policy, root, output = tiny.make(tmp_path / "policy"), tmp_path / "run", tmp_path / "exported"
    (expected,) = ranks.run(1, save, str(policy), str(root), CHANGES[kind])
    export(ObjectStore.open(str(root), read_only=True), 1, 1, policy, output)
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    row = ranks.make_rows(1, seed=7)[0]
    ids = torch.from_numpy(row.ids).long()
    with torch.no_grad():
        values = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / 0.9, -1).gather(1, ids[1:, None])[:, 0]
    np.testing.assert_allclose(values.numpy()[row.generated[1:]], expected, atol=1e-5)
    assert AutoTokenizer.from_pretrained(output).chat_template
