"""The page of a run: complete, self-contained, and deaf to what rollouts say."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flows.views import report as module
from flows.views.curves import Line, lines
from flows.views.report import (
    evaluation_points,
    evaluation_table,
    refit_table,
    report,
    time_budget,
    token_table,
    tool_table,
)
from flows.views.samples import Place, choose
from flows.views.series import flow_points, spread, step_points
from flows.views.standing import recorded_run
from storage import layout, schema
from storage.attempts import living_chain
from storage.layout import MetricsName, PartName
from storage.ledger import ledger_names
from storage.metrics import Point, write_points
from storage.objects import ObjectStore
from tests.flows.synthetic_run import HOSTILE, SyntheticRun, small_run

VOID = {"meta", "br", "path", "use", "rect", "line", "circle", "input", "img", "hr", "link"}


class Page(HTMLParser):
    """Tags with attributes, and whether they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.headings = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "synthetic"))


def page(store: ObjectStore, tmp_path: Path) -> str:
    return report(store, tmp_path / "pages" / "report.html").read_text(encoding="utf-8")


def test_the_page_is_whole_and_asks_for_nothing(store, tmp_path):
    small_run(store)
    text = page(store, tmp_path)
    parsed = Page(text)
    assert parsed.open == []
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "iframe", "img", "object", "embed", "base", "form"}
    assert not [
        attrs
        for _, attrs in parsed.tags
        for name in attrs
        if name in ("src", "srcset", "action") or name.startswith("on")
    ]
    assert all(attrs["href"].startswith("#") for _, attrs in parsed.tags if "href" in attrs)
    assert not re.search(r"@import|url\((?!#)|https?://", text)
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_hostile_rollouts_and_reasons_stay_text(store, tmp_path):
    small_run(store)
    text = page(store, tmp_path)
    assert "<script>" not in text and "&lt;script&gt;" in text
    assert "\x1b" not in text and "\u202e" not in text
    assert "‹U+202E›backwards" in text


def test_figures_and_tables_are_named_for_those_who_cannot_see_them(store, tmp_path):
    small_run(store)
    parsed = Page(page(store, tmp_path))
    figures = [attrs for tag, attrs in parsed.tags if tag == "svg"]
    assert len(figures) == 9
    assert all(attrs.get("role") == "img" and attrs.get("aria-label") for attrs in figures)
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in parsed.tags if tag == "th")


def test_every_section_has_its_facts(store, tmp_path):
    small_run(store)
    text = page(store, tmp_path)
    for fact in (
        "step 5 of 8",
        "0.250 ± 0.490",
        "+0.500 ± 0.693",
        "stale",
        "RolloutFailed: engine lost",
        "attempt 1 ended after its last checkpoint",
    ):
        assert fact in text, fact
    assert "num_prompts_per_step: 2" in text
    assert text.count("<article>") == 8


@pytest.mark.parametrize("stage", ["new", "claimed", "one step"])
def test_a_run_that_has_hardly_begun_has_a_page(store, tmp_path, stage):
    run = SyntheticRun(store)
    if stage != "new":
        run.claim()
    if stage == "one step":
        run.arrive(run.lease([0, 1]), {0: [1, 0], 1: [0, 1]}, last=True)
        run.step([0, 1])
    text = page(store, tmp_path)
    assert Page(text).open == []
    assert "No evaluation yet." in text
    assert ("No step yet." in text) == (stage != "one step")


def test_options_of_the_store_are_not_printed(store, tmp_path):
    SyntheticRun(store, storage={"options": {"key": "an access key"}})
    assert "an access key" not in page(store, tmp_path)


def test_the_evaluation_of_a_dead_branch_does_not_count(store):
    run = small_run(store)
    config = recorded_run(store).config
    found = evaluation_points(store, config, living_chain(store))
    assert [(e.version, metric, e.scores[metric].mean, e.scores[metric].samples) for e in found for metric in ("sampled", "greedy")] == [
        (0, "sampled", 0.25, 4), (0, "greedy", 0.5, 2), (4, "sampled", 0.75, 4), (4, "greedy", 1.0, 2)
    ]  # fmt: skip
    run.attempt = 1  # attempt 1 is dead from step 3 on
    run.evaluate(3, sampled=[0, 0])
    assert evaluation_points(store, config, living_chain(store)) == found
    first, _, passed = evaluation_table(found)
    assert first["change"][0] == pytest.approx(0.5)
    assert (first["metric"], passed["metric"]) == ("sampled", "pass@1")


def test_each_evaluation_and_what_it_was_due_for_is_on_the_page(store, tmp_path):
    run = small_run(store)
    run.evaluate(3, sampled=[1, 1, 1, 0], due=2)
    text = page(store, tmp_path)
    assert text.count('<th scope="row" class="number">') == 3
    assert '<th scope="row" class="number">3</th><td class="number">2</td>' in text
    assert '<th scope="row" class="number">4</th><td class="number">–</td>' in text


def test_time_and_refits_are_summed_by_part(store):
    small_run(store)
    names = [name for name in ledger_names(store) if name.drops is None]
    points = step_points(store, names, every_steps=1)
    assert {row["part"]: (row["mean"], row["share"]) for row in time_budget(points)} == {
        "wait": (0.5, 0.25), "step": (1.0, 0.5), "refit": (0.5, 0.25)
    }  # fmt: skip
    assert [(row["phase"], row["max"]) for row in refit_table(points)] == [("pause", 0.1), ("transfer", 0.4)]


def titles(text: str) -> set[str]:
    return set(re.findall(r"<figcaption>(.*?)<span>", text))


def test_what_was_measured_is_drawn_and_what_was_not_is_left_out(store, tmp_path):
    run = small_run(store)
    # One alone is the reward; no rollout has two turns; one pass@k has none to be compared with; the flow saw no step.
    absent = {"Reward by source", "Turns", "Passed in k tries", "Engines", "Effective sample size"}
    assert not titles(page(store, tmp_path)) & (absent | {"Groups and rollouts"})
    measured = {
        "reward/m:right": 0.5, "reward/m:short": 0.25, "rollout/turns_mean": 1.5, "rollout/turns_max": 4.0,
        "effective_sample_size": 3.0, "zero_variance_share": 0.5, "truncated_rollouts": 0.25,
    }  # fmt: skip
    run.arrive(run.lease([15, 16]), {15: [1, 0], 16: [0, 1]}, last=True)
    run.step([15, 16], **measured)
    write_points(store, MetricsName(2, 0), [Point(2, 6, 6, None, {"pool/utilisation": 0.75, "loss": 1.0})])
    data = [(i, mode, r) for i in range(2) for mode, r in (("sampled", 1.0), ("sampled", 0.0), ("greedy", 1.0))]
    rows = [
        {"version": 6, "dataset_index": i, "mode": mode, "reward": reward, "prompt": "[]", "completion": "4",
         "tokens": 1, "finish_reason": "stop"}
        for i, mode, reward in data
    ]  # fmt: skip
    table = schema.table(rows, schema.EVALUATION)
    store.put_if_absent(layout.evaluation(2, 6), schema.encode(table, schema.EVALUATION, {}))
    text = page(store, tmp_path)
    assert titles(text) >= absent | {"Groups and rollouts"}
    assert Page(text).open == []


def test_the_share_of_every_waste_and_the_use_of_every_tool_are_told(store, tmp_path):
    run = SyntheticRun(store)
    run.claim()
    used = {"tool_calls/search": 6.0, "tool_failures/search": 3.0, "tool_seconds/search": 0.5, "rollouts": 4.0}
    for step in range(2):
        ordinals = [2 * step, 2 * step + 1]
        run.arrive(run.lease(ordinals), {ordinal: [1, 0] for ordinal in ordinals}, last=True)
        run.step(
            ordinals, **used, **{"trained_tokens": 70.0, "wasted_tokens/stale": 20.0, "wasted_tokens/masked": 10.0}
        )
    points = step_points(store, ledger_names(store), every_steps=1)
    assert token_table(points) == [
        {"what": "trained", "share": 0.7}, {"what": "stale", "share": 0.2}, {"what": "masked", "share": 0.1}
    ]  # fmt: skip
    assert tool_table(points) == [{"tool": "search", "calls": 1.5, "failed": 0.5, "seconds": 0.5}]
    text = page(store, tmp_path)
    assert "What became of the generated tokens." in text and "search</th>" in text


def test_what_the_flow_measured_is_that_of_the_living_history(store):
    small_run(store)  # attempt 1 is dead from step 3 on
    for attempt, value in ((1, 0.25), (2, 0.75)):
        points = [Point(attempt, step, step, None, {"pool/utilisation": value}) for step in (2, 3)]
        write_points(store, MetricsName(attempt, 0), points)
    names = [name for name in ledger_names(store) if name.drops is None]
    assert flow_points(store, names, ["pool/utilisation", "pool/held_back"]) == {"pool/utilisation": {2: 0.25, 3: 0.75}}


def test_a_call_of_a_tool_is_shown_in_a_sample(store, tmp_path):
    run = SyntheticRun(store)
    run.claim()
    calling = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "<b>", "arguments": {}}}]}
    run.arrive(run.lease([0, 1]), {0: [1, 0], 1: [0, 1]}, last=True, messages=json.dumps([calling]))
    run.step([0, 1])
    assert "→ &lt;b&gt; {}" in page(store, tmp_path)


def test_long_runs_are_sampled(store, tmp_path, monkeypatch):
    run = SyntheticRun(store, steps=100)
    run.claim()
    for step in range(30):
        run.arrive(run.lease([2 * step, 2 * step + 1]), {2 * step: [1, 0], 2 * step + 1: [0, 1]}, last=True)
        run.step([2 * step, 2 * step + 1])
    read = []
    get = ObjectStore.get
    monkeypatch.setattr(ObjectStore, "get", lambda self, key: read.append(key) or get(self, key))
    monkeypatch.setattr(module, "MOST_POINTS", 5)
    assert "A sample of the steps" in page(store, tmp_path)
    assert len([key for key in read if key.startswith("trajectories/")]) == 8


def test_a_spread_has_both_ends(store):
    assert spread(3, 5) == [0, 1, 2]
    assert spread(101, 5) == [0, 25, 50, 75, 100]


def test_samples_are_of_different_prompts(store):
    places = [
        Place(step, PartName(1, step, 0), 2 * step + i, rollout, float(rollout))
        for step in range(9)
        for i in range(2)
        for rollout in range(4)
    ]
    chosen = choose(places)
    assert [kind for kind, _ in chosen] == ["best"] * 2 + ["worst"] * 2 + ["random"] * 4
    assert len({place.ordinal for _, place in chosen}) == 8
    assert {place.reward for kind, place in chosen if kind == "best"} == {3.0}
    assert {place.reward for kind, place in chosen if kind == "worst"} == {0.0}
    assert choose(places) == chosen
    assert choose([]) == []


def test_deleted_shards_are_left_out(store, tmp_path):
    small_run(store)
    store.delete_prefix("trajectories/000002/")
    assert "Sample rollouts" in page(store, tmp_path)


def test_labels_of_figures_are_escaped():
    svg = lines('"><script>', [Line("a", [1, 2, 3], [1.0, -2.0, 3.0])], zero=True)
    assert "<script>" not in svg
    assert HOSTILE not in svg
