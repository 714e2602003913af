"""The deployments of deployments/prefect.yaml, registered on a Prefect server.

Contract: that file is the only description; Prefect's own `deploy` reads it, and here is added what it expects to find:
the work pools that the file names. Doing it again changes nothing but what the file changed: deployments are updated in
place, and a pool that exists stays as it is.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.exceptions import ObjectAlreadyExists, PrefectException
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.process import ProcessWorker

from flows.server import DeployError

CHECKOUT = Path(__file__).resolve().parents[1]
PREFECT_FILE = Path("deployments") / "prefect.yaml"
# A run takes the whole machine. The limit sits at the pool, where it needs no leases:
# they would not outlive the server.
RUNS_AT_A_TIME = 1
DEPLOY_SECONDS = 300.0


def deploy(server_url: str | None = None) -> list[str]:
    """Register every deployment and make the work pools they name.

    Args:
        server_url: A Prefect server, with or without `/api`; by default the one of the Prefect settings in force.

    Returns:
        The names of the deployments, as `flow/deployment`.

    Raises:
        DeployError: no server is named, it does not answer, or Prefect refuses the file.
    """
    entries = read_deployments(CHECKOUT / PREFECT_FILE)
    url = api_url(server_url)
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        if (error := client.api_healthcheck()) is not None:
            raise DeployError(
                f"the Prefect server at {url} does not answer ({error}); start it with `prefect server start`, or name another with --server"
            )
        try:
            for pool in sorted({entry["work_pool"]["name"] for entry in entries}):
                ensure_pool(client, pool)
            run_prefect_deploy(url)
            return registered(client, [entry["name"] for entry in entries])
        except (httpx.HTTPError, PrefectException) as error:
            raise DeployError(
                f"the Prefect server at {url} refused the deployments of {PREFECT_FILE}: {error}"
            ) from error


def read_deployments(path: Path) -> list[dict[str, Any]]:
    """The entries of a prefect.yaml. Raise DeployError."""
    if not path.is_file():
        raise DeployError(
            f"{path} is missing; deploy from a checkout of Forebay that is installed with `pip install -e`"
        )
    entries: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["deployments"]
    return entries


def api_url(server_url: str | None) -> str:
    """The address of a server's API. Raise DeployError when none is named."""
    url = server_url or PREFECT_API_URL.value()
    if not url:
        raise DeployError(
            "no Prefect server is named; start one with `prefect server start` and pass --server http://127.0.0.1:4200, or set PREFECT_API_URL"
        )
    return url.rstrip("/").removesuffix("/api") + "/api"


def ensure_pool(client: SyncPrefectClient, name: str) -> None:
    """Make a work pool of processes unless it exists."""
    pool = WorkPoolCreate(
        name=name,
        type=ProcessWorker.type,
        description="One machine: its flow runs are processes that start their own engines and trainer",
        base_job_template=ProcessWorker.get_default_base_job_template(),
        concurrency_limit=RUNS_AT_A_TIME,
    )
    try:
        client.create_work_pool(pool)
    except ObjectAlreadyExists:
        return  # made before; its limit may have been changed on purpose


def run_prefect_deploy(url: str) -> None:
    """Prefect's own command on the file, from the checkout, which becomes the working directory of flow runs."""
    arguments = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_FILE)]
    try:
        done = subprocess.run(
            arguments,
            cwd=CHECKOUT,
            env={**os.environ, "PREFECT_API_URL": url},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEPLOY_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeployError(f"`prefect deploy` did not end within {DEPLOY_SECONDS:.0f} s on {url}; try again") from error
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[-500:]
        raise DeployError(f"`prefect deploy` refused {PREFECT_FILE}: {said}")


def registered(client: SyncPrefectClient, names: list[str]) -> list[str]:
    """The full names of these deployments on the server. Raise DeployError when one is missing."""
    wanted = DeploymentFilter(name=DeploymentFilterName(any_=names))
    found = {deployment.name: deployment for deployment in client.read_deployments(deployment_filter=wanted)}
    if missing := [name for name in names if name not in found]:
        raise DeployError(f"`prefect deploy` left out {', '.join(missing)} of {PREFECT_FILE}; check these entries")
    return [f"{client.read_flow(found[name].flow_id).name}/{name}" for name in names]
