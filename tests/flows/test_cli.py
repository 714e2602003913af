"""The command line: what is asked for wrongly is one sentence, and every verb reaches a store that needs options."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from flows import cli, export
from flows.supervise import Child, Command
from grpo_core.config import RunConfig
from storage.layout import CheckpointName
from storage.objects import ObjectStore

VERBS: dict[str, list[str]] = {
    "status": [],
    "ledger": [],
    "trace": ["3"],
    "report": [],
    "gc": [],
    "export": ["-o", "out"],
    "pool": ["--add", "http://a:1"],
}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.stderr


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("options", "said"), [("{", "is not JSON"), ("[1]", "is not a JSON object")])
def test_storage_options_that_are_no_object_are_refused(verb: str, options: str, said: str) -> None:
    status, error = run(verb, "x", *VERBS[verb], "--storage-options", options)
    assert status == 1 and error.startswith("forebay: --storage-options") and said in error


@pytest.mark.parametrize("verb", VERBS)
def test_storage_options_reach_the_store(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    opened = ObjectStore.open

    def open_store(url: str, options: dict[str, Any], **rest: Any) -> ObjectStore:
        given.append(options)
        return opened(url, **rest)

    monkeypatch.setattr(ObjectStore, "open", open_store)
    status, error = run(verb, "x", *VERBS[verb], "--root", str(tmp_path), "--storage-options", '{"anon": true}')
    assert status == 1 and "there is no run x" in error
    assert given == [{"anon": True}]


def test_an_export_that_does_not_end_is_stopped_and_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Child] = []

    def child(command: Command) -> Child:
        started.append(Child(Command("export", ["sleep", "300"], command.environment, tmp_path / "log", 0.1)))
        return started[0]

    store = SimpleNamespace(url="file:///nowhere", local_path=lambda key: tmp_path)
    monkeypatch.setattr(export, "Child", child)
    monkeypatch.setattr(export, "EXPORT_SECONDS", 0.05)
    monkeypatch.setattr(cli, "existing", lambda *_: store)
    monkeypatch.setattr(export, "recorded_run", lambda _: SimpleNamespace(config=RunConfig()))
    monkeypatch.setattr(export, "committed", lambda _: [CheckpointName(1, 2)])
    monkeypatch.setattr(export, "policy_of", lambda *_: tmp_path)
    status, error = run("export", "x", "-o", str(tmp_path / "out"))
    assert status == 1 and "the export did not end within 0.05 s" in error
    assert started[0].poll() is not None
