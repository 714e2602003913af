"""Rank 0's decisions reach the store in the order that makes a kill harmless, and none of them is ever lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.leasing import Leasing
from grpo_core.prompts import PromptStream, Row
from grpo_core.recipe import parse
from grpo_core.refit.control import EngineAddress
from grpo_core.refit.coordinator import BrokenEngine, RefitFailed, RefitResult
from grpo_core.schedule.admission import NothingAdmissible
from grpo_core.schedule.frontier import Frontier, FrontierState, OrdinalState
from grpo_core.schedule.window import Window
from grpo_core.training import conductor as conductor_module
from grpo_core.training.commands import Idle, Refit, Save, Step, TrainerStuck
from grpo_core.training.conductor import Conductor
from grpo_core.training.planning import SequenceTooLong
from grpo_core.training.step import FILLER, StepPlan, StepResult
from grpo_core.trajectory import Stamp
from storage import layout
from storage.attempts import Fence
from storage.errors import Fenced
from storage.layout import PartName
from storage.ledger import LedgerWriter, Totals, ledger_names, newest_footer, read_ledger, read_ledger_footer
from storage.pool import PoolChange, RefitRecord, read_refit, write_pool_change, write_refit
from tests.grpo_core.training.parts import Run, group, tombstone


@dataclass
class Stage:
    """A conductor over a real store, and the ranks that would carry out its commands.

    `waiting` is called whenever the conductor looks whether it should stop, which it does each time it looks for work.
    `commands` lists what was carried out, in order.
    """

    run: Run
    steps: int = 2
    prompts: int | None = None
    ranks: int = 1
    done: int = 0
    changes: dict[str, Any] = field(default_factory=dict)
    waiting: Callable[[], None] = lambda: None
    on_command: Callable[[Any], None] = lambda command: None
    stop: bool = False
    commands: list[Any] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    failing_refits: int = 0
    breaking: set[str] = field(default_factory=set)

    def engine(self, number: int, *joined: str, left: tuple[str, ...] = ()) -> None:
        change = PoolChange({name: f"http://{name}" for name in joined}, left)
        write_pool_change(self.run.store, self.run.attempt, number, change)

    def conduct(self) -> list[Any]:
        values = {
            "model": {"context_length": 32},
            "generation": {
                "max_completion_length": 8,
                "flush_seconds": 0.05,
                "lease_timeout_seconds": 20,
                "request_timeout_seconds": 10,
                "tool_timeout_seconds": 10,
            },
            "rewards": {"timeout_seconds": 10},
            "packing": {"token_budget": 32},
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
            "checkpointing": {"save_period": 1},
            "training": {"step_timeout_seconds": 30, "ranks": self.ranks},
        }
        for section, keys in self.changes.items():
            values[section] = {**values.get(section, {}), **keys}
        config = parse(values, where="test")
        store, attempt = self.run.store, self.run.attempt
        fence = Fence(store, attempt).check
        footer = newest_footer(store)
        conductor = Conductor(
            config=config,
            store=store,
            attempt=attempt,
            window=replace(
                Window.of(config.grpo, config.refit, prompts=None), steps=self.steps, prompts=self.prompts, epochs=1
            ),
            done=self.done,
            feed=self.run.feed,
            ledger=LedgerWriter(store, attempt, fence=fence),
            totals=Totals() if footer is None else footer.totals,
            fence=fence,
            stopping=self._stopping,
            report=self.reports.append,
            prompts=lambda: self.prompts,
            ranks=self.ranks,
        )
        commands = conductor.commands()
        answer = None
        while True:
            try:
                command = commands.send(answer)
            except StopIteration:
                return self.commands
            self.commands.append(command)
            self.on_command(command)
            answer = self._carry_out(command)

    def _stopping(self) -> bool:
        self.waiting()
        return self.stop

    def _carry_out(self, command: Any) -> Any:
        match command:
            case Step(plan):
                return self._result(plan)
            case Refit(stamp, engines):
                names = tuple(engine.name for engine in engines)
                if self.failing_refits:
                    self.failing_refits -= 1
                    return RefitFailed(stamp, [BrokenEngine(name, "transfer", "gone") for name in names])
                whole = tuple(name for name in names if name not in self.breaking)
                broken = tuple(BrokenEngine(name, "canary", "off") for name in names if name in self.breaking)
                return RefitResult(stamp, whole, broken, {"transfer": 0.1}, dict.fromkeys(whole, 1e-7))
            case Save():
                return {"checkpoint_blocked_seconds": 0.25}
        return None

    def _result(self, plan: StepPlan) -> StepResult:
        rows = self.run.feed.cache.rows(plan.places)
        logprobs = {i: np.full(int(row.generated.sum()), -0.25, np.float32) for i, row in enumerate(rows)}
        return StepResult(0.5, 2.0, {"ratio": (6.0, 6.0)}, 0.01, logprobs)

    def kinds(self) -> list[str]:
        return [type(command).__name__ for command in self.commands]

    def decided(self) -> dict[int, tuple[str, str | None]]:
        return {row["ordinal"]: (row["state"], row["reason"]) for row in read_ledger(self.run.store).to_pylist()}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    made = Stage(Run.start(tmp_path / "store"))
    made.engine(0, "e0")
    return made


def test_a_run_is_refits_steps_and_saves_in_their_order(stage: Stage) -> None:
    stage.run.whole(*(group(ordinal) for ordinal in range(4)))
    stage.conduct()
    assert stage.kinds() == ["Refit", "Step", "Refit", "Save", "Step", "Refit", "Save"]
    refits = [command for command in stage.commands if isinstance(command, Refit)]
    assert [command.stamp for command in refits] == [Stamp(1, 0), Stamp(1, 1), Stamp(1, 2)]
    assert refits[0].engines == (EngineAddress("e0", "http://e0"),)
    assert stage.decided() == {ordinal: ("trained", None) for ordinal in range(4)}
    footer = newest_footer(stage.run.store)
    assert footer is not None and footer.totals.trained == 4 and footer.metrics["grad_norm"] == 2.0


def test_a_run_that_reached_its_goal_ends_after_the_step_with_its_weights_out_and_its_checkpoint_written(
    stage: Stage,
) -> None:
    stage.steps, stage.changes = 4, {"checkpointing": {"save_period": 4}}
    stage.run.whole(*(group(ordinal) for ordinal in range(8)))

    def look(command: Any) -> None:
        if isinstance(command, Step):
            stage.run.store.put(layout.goal(stage.run.attempt), b"{}")

    stage.on_command = look
    stage.conduct()
    assert stage.kinds() == ["Refit", "Step", "Refit", "Save"]
    assert stage.decided() == {ordinal: ("trained", None) for ordinal in range(2)}


def test_ledger_is_durable_before_the_refit_and_the_refit_before_the_manifest(stage: Stage) -> None:
    stage.run.whole(*(group(ordinal) for ordinal in range(4)))
    store = stage.run.store
    seen = []

    def look(command: Any) -> None:
        match command:
            case Refit(stamp):
                ledger = store.exists(layout.ledger_step(1, stamp.version)) or stamp.version == 0
                seen.append(("refit", ledger, read_refit(store, 1, stamp.version) is None))
            case Save(step):
                live = read_refit(store, 1, step)
                seen.append(("save", store.exists(layout.ledger_step(1, step)), live is not None))

    stage.on_command = look
    stage.conduct()
    assert seen == [("refit", True, True)] + [("refit", True, True), ("save", True, True)] * 2


def test_useless_groups_are_ledgered_while_the_step_is_still_waited_for(stage: Stage) -> None:
    stage.done = 4
    stage.steps = 5
    stage.run.whole(tombstone(0, "RewardError: x"), group(1, versions=(0,)), group(2, versions=(4,)))

    def waiting() -> None:
        if 0 in stage.decided() and 3 not in stage.run.feed.groups:
            stage.waiting = lambda: None
            assert stage.decided() == {0: ("dropped", "generation_failed"), 1: ("returned", "stale")}
            assert stage.run.feed.frontier.members(OrdinalState.RETURNED) == [1]
            stage.run.whole(group(3, versions=(3,)))

    stage.waiting = waiting
    stage.conduct()
    assert [name.drops for name in ledger_names(stage.run.store)] == [0, None]
    assert stage.decided()[2] == stage.decided()[3] == ("trained", None)
    counts = stage.run.feed.frontier.counts()
    assert (counts.trained, counts.dropped, counts.returned) == (2, {"generation_failed": 1}, 1)


def test_drops_come_before_the_step_that_was_decided_with_them(stage: Stage) -> None:
    stage.changes = {"generation": {"flush_seconds": 1000}}
    stage.steps = 1
    stage.run.whole(tombstone(0), group(1), group(2))
    stage.on_command = lambda command: isinstance(command, Step) and seen.append(dict(stage.decided()))
    seen: list[Any] = []
    stage.conduct()
    assert seen == [{0: ("dropped", "generation_failed")}]


def test_an_engine_that_replaces_another_is_refitted_alone(stage: Stage) -> None:
    stage.run.whole(group(0), group(1))

    def waiting() -> None:
        if stage.kinds()[-1:] == ["Save"]:
            stage.waiting = lambda: None
            stage.engine(1, "e1", left=("e0",))
            stage.run.whole(group(2), group(3))

    stage.waiting = waiting
    stage.conduct()
    refits = [command for command in stage.commands if isinstance(command, Refit)]
    assert [[engine.name for engine in command.engines] for command in refits] == [["e0"], ["e0"], ["e1"]]


def test_a_late_engine_is_served_while_the_step_waits(stage: Stage) -> None:
    stage.steps = 1
    stage.run.whole(group(0))
    calls = []

    def waiting() -> None:
        calls.append(1)
        if len(calls) == 5:
            stage.engine(1, "e1")
        if stage.kinds().count("Refit") == 2:
            stage.waiting = lambda: None
            stage.run.whole(group(1))

    stage.waiting = waiting
    stage.conduct()
    assert stage.kinds() == ["Refit", "Refit", "Step", "Refit", "Save"]
    second = stage.commands[1]
    # The others carry these weights already and are not paused for it.
    assert second.stamp == Stamp(1, 0) and [engine.name for engine in second.engines] == ["e1"]


def test_a_late_engine_that_breaks_does_not_hold_up_the_others(stage: Stage) -> None:
    stage.steps = 1
    stage.run.whole(group(0))
    calls = []

    def waiting() -> None:
        calls.append(1)
        if len(calls) == 5:
            stage.failing_refits = 1
            stage.engine(1, "e1")
        if stage.kinds().count("Refit") == 2:
            stage.waiting = lambda: None
            stage.run.whole(group(1))

    stage.waiting = waiting
    stage.conduct()
    refits = [[engine.name for engine in each.engines] for each in stage.commands if isinstance(each, Refit)]
    assert refits == [["e0"], ["e1"], ["e0"]] and stage.kinds()[-1] == "Save"


def test_between_refits_a_late_engine_waits_for_the_next_version(stage: Stage) -> None:
    """It would carry newer weights than the others under the same version."""
    stage.changes = {"refit": {"every_steps": 2}}
    stage.run.whole(group(0), group(1))
    calls = []

    def waiting() -> None:
        if stage.kinds()[-1:] == ["Save"]:
            calls.append(1)
            if len(calls) == 2:
                stage.engine(1, "e1")
            if len(calls) == 5:
                stage.waiting = lambda: None
                stage.run.whole(group(2), group(3))

    stage.waiting = waiting
    stage.conduct()
    assert stage.kinds() == ["Refit", "Step", "Save", "Step", "Refit", "Save"]
    assert [engine.name for engine in stage.commands[4].engines] == ["e0", "e1"]


def test_an_engine_whose_groups_come_back_foreign_is_refitted_again(stage: Stage) -> None:
    """It says that it carries our weights, and samples from others:
    a dead attempt reached it once more, or it restarted."""
    stage.steps = 1
    stage.engine(1, "e1")
    calls: list[int] = []

    def waiting() -> None:
        if not stage.kinds():
            return
        calls.append(1)
        if len(calls) == 1:
            stage.run.whole(group(0, engine="e1", attempt=7), group(1, engine="e0"))
        if stage.kinds().count("Refit") == 2:
            stage.waiting = lambda: None
            stage.run.whole(group(2, engine="e1"))

    stage.waiting = waiting
    stage.conduct()
    refits = [command for command in stage.commands if isinstance(command, Refit)][:2]
    assert [command.stamp for command in refits] == [Stamp(1, 0)] * 2
    assert [[engine.name for engine in command.engines] for command in refits] == [["e0", "e1"], ["e1"]]
    assert stage.decided()[0] == ("returned", "foreign version")


def test_what_an_engine_was_asked_before_its_refit_does_not_tell_against_it(stage: Stage) -> None:
    straggler = stage.run.lease(0)
    stage.run.whole(group(1), group(2))
    looks: list[int] = []

    def waiting() -> None:
        if stage.kinds()[-1:] == ["Save"]:
            looks.append(1)
            if len(looks) == 1:
                stage.run.arrive(straggler, group(0, attempt=7), last=True)
            if len(looks) == 5:
                stage.waiting = lambda: None
                stage.run.whole(group(3), group(4))

    stage.waiting = waiting
    stage.conduct()
    assert stage.kinds() == ["Refit", "Step", "Refit", "Save", "Step", "Refit", "Save"]
    assert stage.decided()[0] == ("returned", "foreign version")


def test_groups_of_a_dead_attempt_do_not_tell_against_an_engine_of_this_one(stage: Stage, tmp_path: Path) -> None:
    part = stage.run.whole(group(0, attempt=7), group(1))
    stage.run.feed.poll()
    frontier = Frontier.resume(stage.run.feed.frontier.checkpoint())
    second = Stage(Run.start(tmp_path / "store", parent=(1, 1), frontier=frontier), done=1, steps=2)
    second.run.feed.restore([part], [0, 1])
    second.engine(0, "e0")
    second.run.lease(3)
    looks: list[int] = []

    def waiting() -> None:
        if second.kinds()[-1:] == ["Refit"]:
            looks.append(1)
            if len(looks) == 5:
                second.waiting = lambda: None
                second.run.whole(group(2, attempt=2, versions=(1,)))

    second.waiting = waiting
    second.conduct()
    assert second.kinds() == ["Refit", "Step", "Refit", "Save"]


def test_the_report_names_every_engine_that_ever_broke(stage: Stage) -> None:
    """It is overwritten, and whoever reads it may be busy for several refits."""
    stage.run.whole(*(group(ordinal) for ordinal in range(4)))
    stage.engine(1, "e1", "e2")
    stage.breaking = {"e1"}

    def break_another(command: Any) -> None:
        if isinstance(command, Step):
            stage.breaking = {"e2"} if command.plan.step == 1 else set()

    stage.on_command = break_another
    stage.conduct()
    last = [report["broken_engines"] for report in stage.reports if "broken_engines" in report][-1]
    assert last == {"e1": "canary: off", "e2": "canary: off"}


def test_a_refit_that_fails_everywhere_waits_for_another_engine(stage: Stage) -> None:
    stage.steps = 1
    stage.failing_refits = 1
    stage.run.whole(group(0, engine="e1"), group(1, engine="e1"))

    def waiting() -> None:
        if stage.kinds() == ["Refit"]:
            stage.waiting = lambda: None
            stage.engine(1, "e1")

    stage.waiting = waiting
    stage.conduct()
    assert [engine.name for engine in stage.commands[1].engines] == ["e1"]
    assert {"broken_engines": {"e0": "transfer: gone"}} in stage.reports
    record = read_refit(stage.run.store, 1, 0)
    assert record is not None and record.engines == ("e1",)


def test_being_stopped_saves_what_was_trained(stage: Stage) -> None:
    stage.changes = {"checkpointing": {"save_period": 100}}
    stage.steps = 10
    stage.run.whole(group(0), group(1), group(2))

    def waiting() -> None:
        stage.stop = "Step" in stage.kinds()

    stage.waiting = waiting
    stage.conduct()
    assert stage.kinds()[-1] == "Save" and stage.commands[-1].step == 1
    facts = stage.commands[-1].facts
    assert facts["frontier"]["buffered"] == [2] and facts["pinned"] == [[1, 0, 0]]


def test_being_stopped_before_anything_was_trained_saves_nothing(stage: Stage) -> None:
    stage.stop = True
    assert stage.conduct() == []


@pytest.mark.parametrize("flush_seconds", [0.05, 1000])
def test_after_a_stop_and_a_resume_every_ordinal_is_accounted_for_once(
    stage: Stage, tmp_path: Path, flush_seconds: float
) -> None:
    """What is decided while a step is waited for that never comes is decided again, by whoever takes that step."""
    stage.changes = {"generation": {"flush_seconds": flush_seconds}, "checkpointing": {"save_period": 100}}
    stage.done, stage.steps = 4, 7
    stage.run.whole(*(group(ordinal, versions=(2,)) for ordinal in range(3)))
    stage.run.lease(5)

    def waiting() -> None:
        if "Step" in stage.kinds() and stage.run.leases == 2:
            stage.run.whole(tombstone(3), group(4, versions=(0,)))
        decided = stage.run.feed.frontier.next_ordinal == 6 and stage.run.feed.groups == {}
        stage.stop = decided and (flush_seconds == 1000 or 3 in stage.decided())

    stage.waiting = waiting
    stage.conduct()
    assert stage.kinds()[-1] == "Save" and stage.commands[-1].step == 5
    facts = stage.commands[-1].facts
    state = FrontierState.from_json(facts["frontier"])
    assert state.buffered == [2] and facts["pinned"] == [[1, 0, 0]]

    second = Stage(Run.start(tmp_path / "store", parent=(1, 5), frontier=Frontier.resume(state)), done=5, steps=7)
    second.run.feed.restore([PartName(*part) for part in facts["pinned"]], state.buffered)
    second.engine(0, "f0")
    second.run.whole(group(6, attempt=2, versions=(5,)))
    leased: set[int] = set()

    def generate() -> None:
        for ordinal in set(second.run.feed.frontier.members(OrdinalState.RETURNED)) - leased:
            leased.add(ordinal)
            second.run.whole(tombstone(3) if ordinal == 3 else group(ordinal, attempt=2, versions=(5,)))

    second.waiting = generate
    second.conduct()
    ended = [row for row in read_ledger(stage.run.store).to_pylist() if row["state"] != "returned"]
    assert sorted(row["ordinal"] for row in ended) == list(range(7))
    assert [row["ordinal"] for row in ended if row["state"] == "dropped"] == [3]
    assert second.run.feed.frontier.frontier == 7


def test_a_group_of_a_dead_branch_is_never_trained(stage: Stage, tmp_path: Path) -> None:
    """Its version number is one that the living branch has too."""
    second = Stage(Run.start(tmp_path / "store", parent=(1, 1)), done=3, steps=4)
    second.engine(0, "f0")
    second.run.whole(group(0, versions=(1, 2)), group(1, versions=(1,)), group(2, attempt=2, versions=(3,)))
    second.conduct()
    assert second.decided() == {0: ("returned", "foreign version"), 1: ("trained", None), 2: ("trained", None)}


def test_a_run_resumes_from_what_its_checkpoint_pins(stage: Stage, tmp_path: Path) -> None:
    stage.steps = 10
    stage.run.whole(group(0), group(1), group(2))
    lost = stage.run.lease(3)
    stage.waiting = lambda: setattr(stage, "stop", "Save" in stage.kinds())
    stage.conduct()
    facts = stage.commands[-1].facts
    # After its last checkpoint the first attempt still received this; the second must generate it again.
    stage.run.arrive(lost, group(3), last=True)

    frontier = Frontier.resume(FrontierState.from_json(facts["frontier"]))
    second = Stage(Run.start(tmp_path / "store", parent=(1, 1), frontier=frontier), done=1, steps=2)
    second.run.feed.restore([PartName(*part) for part in facts["pinned"]], facts["frontier"]["buffered"])
    second.engine(0, "f0")
    assert second.run.feed.frontier.members(OrdinalState.RETURNED) == [3]
    second.run.whole(group(3, attempt=2))
    second.conduct()
    assert second.commands[0].stamp == Stamp(2, 1)
    rows = read_ledger(stage.run.store).to_pylist()
    assert [(row["attempt"], row["step"], row["ordinal"]) for row in rows] == [
        (1, 1, 0),
        (1, 1, 1),
        (2, 2, 2),
        (2, 2, 3),
    ]
    assert {row["ordinal"]: row["lease_attempt"] for row in rows}[3] == 2
    footer = newest_footer(stage.run.store)
    assert footer is not None and footer.totals.trained == 4


def test_a_fenced_trainer_writes_nothing_more(stage: Stage, tmp_path: Path) -> None:
    stage.run.whole(*(group(ordinal) for ordinal in range(4)))
    stage.on_command = lambda command: isinstance(command, Step) and Run.start(tmp_path / "store")
    with pytest.raises(Fenced):
        stage.conduct()
    assert stage.kinds() == ["Refit", "Step"]
    assert ledger_names(stage.run.store, all_attempts=True) == []


def test_other_ranks_hear_of_a_long_wait(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor_module, "IDLE_SECONDS", 0.0)
    stage.steps = 1
    stage.run.whole(group(0))

    def waiting() -> None:
        if stage.kinds()[-2:] == ["Idle", "Idle"]:
            stage.waiting = lambda: None
            stage.run.whole(group(1))

    stage.waiting = waiting
    stage.conduct()
    assert isinstance(stage.commands[1], Idle) and stage.kinds()[-1] == "Save"


def test_waiting_without_end_names_what_is_missing(stage: Stage) -> None:
    stage.changes = {
        "training": {"step_timeout_seconds": 0.1},
        "generation": {"lease_timeout_seconds": 0.05, "request_timeout_seconds": 0.01, "tool_timeout_seconds": 0.01},
        "rewards": {"timeout_seconds": 0.01},
    }
    stage.run.whole(group(0))
    stage.run.lease(1, 2, 3)
    with pytest.raises(TrainerStuck, match="1 of 2 are buffered, 3 in flight"):
        stage.conduct()


def test_without_any_engine_the_refit_does_not_wait_for_ever(tmp_path: Path) -> None:
    stage = Stage(Run.start(tmp_path / "store"))
    stage.changes = {
        "pool": {"kind": "local", "start_timeout_seconds": 0.05},
        "refit": {"transfer_timeout_seconds": 0.05},
    }
    with pytest.raises(TrainerStuck, match="no engine took the weights 1.0"):
        stage.conduct()


def test_stale_tokens_are_counted_as_masked_and_in_no_denominator(stage: Stage) -> None:
    stage.done, stage.steps = 4, 5
    stage.run.whole(group(0, versions=(1, 2, 4)), group(1, versions=(4,)))
    stage.conduct()
    plan = next(command.plan for command in stage.commands if isinstance(command, Step))
    assert plan.oldest_version == 2
    assert (plan.denominators.tokens, plan.denominators.sequences, plan.denominators.constant) == (10.0, 4.0, 32.0)
    row = read_ledger(stage.run.store).to_pylist()[0]
    assert (row["tokens_generated"], row["tokens_trained"], row["tokens_masked"]) == (6, 4, 2)
    assert (row["version_min"], row["version_max"], row["lag_max"]) == (1, 4, 2)
    footer = newest_footer(stage.run.store)
    assert footer is not None and footer.totals.lag_tokens == {0: 8, 2: 2}


def test_fillers_are_planned_and_do_not_reach_the_ledger(stage: Stage) -> None:
    stage.steps, stage.ranks = 1, 3
    stage.changes = {"grpo": {"num_prompts_per_step": 2}, "packing": {"share_prefixes": False}}
    long = {"completion": 28}
    stage.run.whole(group(0, **long), group(1, **long))
    stage.conduct()
    plan = next(command.plan for command in stage.commands if isinstance(command, Step))
    assert plan.places[4:] == [FILLER, FILLER] and plan.advantages[4:] == [0.0, 0.0]
    assert [len(micro_batch) for micro_batch in plan.micro_batches] == [3, 3]
    assert all(row for micro_batch in plan.micro_batches for row in micro_batch)
    assert sorted(stage.decided()) == [0, 1]
    footer = newest_footer(stage.run.store)
    assert footer is not None and footer.metrics["completion_tokens_mean"] == 28.0
    assert plan.denominators.tokens == 4 * 28


def test_a_sequence_that_no_micro_batch_holds_is_named(stage: Stage) -> None:
    stage.run.whole(group(7), group(8, completion=40))
    with pytest.raises(SequenceTooLong, match="ordinal 8 has 42 tokens, more than packing.token_budget=32"):
        stage.conduct()


def test_slow_refits_leave_the_version_as_it_is_between_them(stage: Stage) -> None:
    stage.changes = {"refit": {"every_steps": 2}}
    stage.run.whole(*(group(ordinal) for ordinal in range(4)))
    stage.conduct()
    assert stage.kinds() == ["Refit", "Step", "Save", "Step", "Refit", "Save"]
    assert [command.facts["version"] for command in stage.commands if isinstance(command, Save)] == [0, 1]


def test_a_group_that_nobody_could_score_is_dropped_and_others_average_what_was_scored(stage: Stage) -> None:
    stage.steps = 1
    stage.run.whole(group(0, rewards=(None, None)), group(1, rewards=(None, 3.0)), group(2, rewards=(0.0, 1.0)))
    stage.conduct()
    assert stage.decided()[0] == ("dropped", "generation_failed")
    metrics = stage.commands[-1].facts["metrics"]
    assert metrics["reward_mean"] == pytest.approx(4 / 3)
    assert metrics["zero_variance_share"] == 0.5
    assert all(math.isfinite(value) for value in metrics.values())


def asynchronous(**settings: Any) -> dict[str, Any]:
    return {"grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "async_grpo": settings}}


def test_equal_rewards_are_dropped_and_replaced_before_the_step_when_asked_for(stage: Stage) -> None:
    stage.changes = {"grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "use_dynamic_sampling": True}}
    stage.steps = 1
    stage.run.whole(group(0, rewards=(1.0, 1.0)), group(1), group(2, rewards=(0.5, 0.5)))

    def waiting() -> None:
        if 0 in stage.decided() and 3 not in stage.run.feed.groups:
            stage.waiting = lambda: None
            stage.run.whole(group(3))

    stage.waiting = waiting
    stage.conduct()
    assert stage.decided() == {
        0: ("dropped", "zero_variance"),
        2: ("dropped", "zero_variance"),
        1: ("trained", None),
        3: ("trained", None),
    }
    footer = newest_footer(stage.run.store)
    assert footer is not None and footer.metrics["reward_mean"] == 0.5
    assert footer.metrics["reward_mean_decided"] == (4 * 0.5 + 2 * 1.0 + 2 * 0.5) / 8


def test_six_useless_groups_of_eight_free_their_capacity_while_the_step_waits_for_four(stage: Stage) -> None:
    """The flow's side learns of the drops from the store alone, before the step could happen."""
    stage.changes = {"grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2}}
    stage.steps = 1
    flow = Leasing(
        stage.run.store,
        1,
        Window(prompts_per_step=4, max_age=1, every_steps=1, steps=2),
        PromptStream([Row([], {})], seed=0),
        None,
        keep_buffered=True,
    )
    write_refit(stage.run.store, RefitRecord(1, 0, 0, ("e0",), {}, {}))
    flow.observe()
    record = flow.next_lease(8)
    assert record is not None and flow.next_lease(8) is None, "the window is full"
    useless = [tombstone(ordinal) for ordinal in range(6)]
    stage.run.parts[0] = 0
    stage.run.arrive(0, *useless, group(6), group(7), last=True)

    def waiting() -> None:
        flow.observe()
        more = flow.next_lease(8)
        if more is not None:
            stage.waiting = lambda: None
            assert more.ordinals == tuple(range(8, 14))
            stage.run.arrive(more.lease, *(group(ordinal) for ordinal in more.ordinals), last=True)

    stage.waiting = waiting
    stage.conduct()
    assert [row for row in stage.decided().values()].count(("trained", None)) == 4


def test_batches_without_one_group_that_can_be_trained_end_the_run_with_their_cause(stage: Stage) -> None:
    stage.changes = asynchronous(max_batches_without_group=2)
    stage.run.whole(*(tombstone(ordinal, "RewardError: no such column") for ordinal in range(4)))
    with pytest.raises(NothingAdmissible, match="4 groups in a row .*generation_failed"):
        stage.conduct()


def test_in_order_a_step_trains_the_groups_that_were_leased_for_it(stage: Stage) -> None:
    stage.changes = asynchronous(sampler="in_order")
    stage.run.whole(group(0), group(1), target_step=2)
    stage.run.whole(group(2), group(3), target_step=1)
    stage.conduct()
    steps = {row["ordinal"]: row["step"] for row in read_ledger(stage.run.store).to_pylist()}
    assert steps == {0: 2, 1: 2, 2: 1, 3: 1}


def test_a_step_waits_for_the_open_lease_that_it_would_leave_behind(stage: Stage) -> None:
    stage.changes = asynchronous(max_trajectory_age_steps=1, stale_policy="wait")
    stage.done, stage.steps = 1, 3
    old = stage.run.lease(0, version=0)
    stage.run.whole(group(1, versions=(1,)), group(2, versions=(1,)), group(3, versions=(1,)))
    looks = []

    def waiting() -> None:
        looks.append(stage.kinds().count("Step"))
        if len(looks) == 5:
            stage.run.arrive(old, group(0, versions=(0,)), last=True)

    stage.waiting = waiting
    stage.conduct()
    assert looks[:5] == [0] * 5, "the step began although it would have left a lease behind"
    assert {row["ordinal"]: row["step"] for row in read_ledger(stage.run.store).to_pylist()} == {0: 2, 1: 2, 2: 3, 3: 3}


def test_a_lease_that_expires_is_waited_for_no_longer(stage: Stage) -> None:
    stage.changes = asynchronous(max_trajectory_age_steps=1, stale_policy="wait")
    stage.done, stage.steps = 1, 3
    old = stage.run.lease(0, version=0)
    stage.run.whole(*(group(ordinal, versions=(1,)) for ordinal in range(1, 5)))
    looks = []

    def waiting() -> None:
        looks.append(stage.kinds().count("Step"))
        if len(looks) == 5:
            stage.run.trajectories.seal(old, [0])

    stage.waiting = waiting
    stage.conduct()
    assert looks[:5] == [0] * 5
    assert stage.run.feed.frontier.members(OrdinalState.RETURNED) == [0]


def test_what_is_left_of_the_data_ends_in_the_ledger_when_it_fills_no_step(stage: Stage) -> None:
    """Six ordinals in steps of two: one fails, so the last step lacks a group and the other one is left over."""
    stage.steps, stage.prompts = 100, 6
    stage.run.whole(group(0), group(1), group(2))
    stage.run.whole(group(3), tombstone(4), group(5))
    stage.conduct()
    assert stage.kinds().count("Step") == 2
    assert stage.decided()[4] == ("dropped", "generation_failed")
    assert stage.decided()[5] == ("dropped", "end_of_data")
    counts = stage.run.feed.frontier.counts()
    assert (counts.trained, counts.buffered, counts.in_flight) == (4, 0, 0)
    footer = newest_footer(stage.run.store)
    assert footer is not None and footer.step_done == 2 and footer.totals.settled == 6


def test_how_many_groups_lay_ready_is_told_with_each_step(stage: Stage) -> None:
    stage.run.whole(*(group(ordinal) for ordinal in range(5)))
    stage.conduct()
    names = ledger_names(stage.run.store)
    assert [read_ledger_footer(stage.run.store, name).metrics["ready_groups"] for name in names] == [5.0, 3.0]


def test_a_step_reports_what_was_given_up_before_it_and_what_held_it_up(stage: Stage) -> None:
    stage.run.whole(*(group(ordinal) for ordinal in range(4)), group(4, rewards=(None, None)))
    stage.conduct()
    first, second = (
        read_ledger_footer(stage.run.store, name).metrics
        for name in ledger_names(stage.run.store)
        if name.drops is None
    )
    assert first["dropped_groups/generation_failed"] == 1.0 and "dropped_groups/generation_failed" not in second
    assert first["wasted_tokens/generation_failed"] > 0 == second["wasted_token_share"]
    assert first["buffered_groups"] == 2.0 and second["buffered_groups"] == 0.0
    assert first["refit_phase_seconds/transfer"] == second["refit_phase_seconds/transfer"] == 0.1
    assert "iteration_seconds" not in first and second["iteration_seconds"] > 0
    assert first["length_ratio"] == 1.0 and second["lag_tokens/1"] == second["trained_tokens"]


def test_what_a_save_cost_is_told_with_the_next_step(stage: Stage) -> None:
    stage.run.whole(*(group(ordinal) for ordinal in range(4)))
    stage.conduct()
    first, second = (read_ledger_footer(stage.run.store, name).metrics for name in ledger_names(stage.run.store))
    assert "checkpoint_blocked_seconds" not in first
    assert second["checkpoint_blocked_seconds"] == 0.25
