"""The deployments: registered, registered again, and the form that the pydantic config becomes."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import deploy as module
from flows.deploy import CHECKOUT, PREFECT_FILE, api_url, deploy, read_deployments
from flows.server import SETTINGS, DeployError
from grpo_core import recipe
from grpo_core.config import RunConfig
from tests.flows.conftest import POOL, Server

QUICKSTART = CHECKOUT / "deployments" / "recipes" / "quickstart.yaml"


def create(server: Server, client: SyncPrefectClient, name: str, config: dict[str, Any]) -> httpx.Response:
    """Ask for a flow run as the form does. It is scheduled far ahead, so that no worker takes it."""
    identity = client.read_deployment_by_name(name).id
    state = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2099-01-01T00:00:00Z"}}
    url = f"{server.url}/api/deployments/{identity}/create_flow_run"
    return httpx.post(url, json={"parameters": {"config": config}, "state": state}, timeout=30)


def settings_file() -> dict[str, str]:
    lines = (CHECKOUT / "deployments" / "prefect.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_settings_of_the_documented_server_are_those_of_the_local_one():
    assert SETTINGS.items() <= settings_file().items()


def test_the_deployment_is_filled_in_with_the_quickstart():
    entry, collection = read_deployments(CHECKOUT / PREFECT_FILE)
    assert collection["parameters"]["run_id"] == "quickstart"
    assert RunConfig.model_validate(entry["parameters"]["config"]) == recipe.load(QUICKSTART, ())


def test_address_of_a_server_is_taken_with_and_without_api():
    assert api_url("http://host:4200") == api_url("http://host:4200/api/") == "http://host:4200/api"


def test_without_a_server_the_error_says_how_to_name_one():
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        with pytest.raises(DeployError, match=r"no Prefect server is named.*--server"):
            api_url(None)


def test_a_server_that_does_not_answer_is_named():
    with pytest.raises(DeployError, match=r"http://127\.0\.0\.1:9/api does not answer"):
        deploy("http://127.0.0.1:9")


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(DeployError, match=r"prefect\.yaml is missing"):
        read_deployments(tmp_path / "prefect.yaml")


@pytest.mark.prefect
def test_a_file_that_prefect_refuses_is_an_error(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entry = {"name": "broken", "entrypoint": "flows/absent.py:train", "work_pool": {"name": POOL}}
    (tmp_path / PREFECT_FILE.parent).mkdir()
    (tmp_path / PREFECT_FILE).write_text(yaml.safe_dump({"deployments": [entry]}))
    monkeypatch.setattr(module, "CHECKOUT", tmp_path)
    with pytest.raises(DeployError, match="absent"):
        deploy(server.url)


@pytest.mark.prefect
def test_deploying_again_changes_nothing(server: Server, client: SyncPrefectClient, deployment: str):
    before = client.read_deployment_by_name(deployment)
    client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=7))
    assert deploy(server.url) == [deployment, "gc/gc"]
    after = client.read_deployment_by_name(deployment)
    assert after.id == before.id
    assert [schedule.slug for schedule in after.schedules] == ["nightly"]
    assert client.read_work_pool(POOL).concurrency_limit == 7


@pytest.mark.prefect
def test_a_new_pool_runs_one_flow_at_a_time(client: SyncPrefectClient, deployment: str):
    module.ensure_pool(client, "another")
    assert client.read_work_pool("another").concurrency_limit == 1
    assert client.read_work_pool("another").type == "process"


@pytest.mark.prefect
def test_the_schedule_waits_until_it_is_activated(client: SyncPrefectClient, deployment: str):
    found = client.read_deployment_by_name(deployment)
    (schedule,) = found.schedules
    assert not schedule.active
    client.update_deployment_schedule(found.id, schedule.id, active=True)
    try:
        (schedule,) = client.read_deployment_by_name(deployment).schedules
        assert schedule.active
    finally:
        client.update_deployment_schedule(found.id, schedule.id, active=False)


@pytest.mark.prefect
def test_the_form_has_every_section_with_its_help_and_defaults(client: SyncPrefectClient, deployment: str):
    schema = client.read_deployment_by_name(deployment).parameter_openapi_schema
    definitions = schema["definitions"]
    form = definitions["RunConfig"]["properties"]
    assert set(form) == set(RunConfig.model_fields)
    steps = definitions["GRPOConfig"]["properties"]["max_num_steps"]
    assert steps["default"] == RunConfig().grpo.max_num_steps
    window = definitions["AsyncGRPOConfig"]["properties"]["max_trajectory_age_steps"]
    assert window["minimum"] == 0 and "lag" in window["description"]
    assert all(definition.get("additionalProperties") is False for definition in definitions.values())
    assert all("description" in definition for definition in definitions.values())


@pytest.mark.prefect
@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"run_id": "x", "grpo": {"max_steps": 3}}, "max_steps"),
        ({"run_id": "x", "grpo": {"num_generations_per_prompt": 1}}, "num_generations_per_prompt"),
        ({"run_id": "no/slash"}, "run_id"),
    ],
)
def test_a_form_filled_in_wrongly_is_refused(
    server: Server, client: SyncPrefectClient, deployment: str, config: dict[str, Any], named: str
):
    answer = create(server, client, deployment, config)
    assert answer.status_code == 409
    assert named in answer.text


@pytest.mark.prefect
def test_a_form_filled_in_rightly_is_taken(server: Server, client: SyncPrefectClient, deployment: str):
    assert create(server, client, deployment, {"run_id": "x", "grpo": {"max_num_steps": 3}}).status_code == 201
