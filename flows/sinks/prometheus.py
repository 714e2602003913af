"""The newest metrics of a run as a page in Prometheus' text format, served by the flow.

Contract: gauges only, named `forebay_…`, with the run as a label and the member of a family as the label `member`;
their help is the registry's. The page is that of the last step, whose number and time are on it.
"""

import re
import threading
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from grpo_core.metrics import metric
from storage.metrics import Point

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusPage:
    """Serves http://host:port/metrics until it is closed. Raise OSError when the port is taken."""

    def __init__(self, host: str, port: int, run_id: str) -> None:
        self._run_id = run_id
        self._metrics: dict[str, float] = {}
        self._facts: dict[str, float] = {}
        self._page = b""
        self._server = ThreadingHTTPServer((host, port), partial(_Handler, lambda: self._page))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def write(self, point: Point) -> None:
        """Show this point. An evaluation stays until the next one, and says nothing of the newest step; what a newer
        step does not have is gone."""
        kept = {name: value for name, value in self._metrics.items() if metric(name).scope == "evaluation"}
        evaluated = all(metric(name).scope == "evaluation" for name in point.metrics)
        self._metrics = (self._metrics if evaluated else kept) | dict(point.metrics)
        if not (evaluated and self._facts):
            self._facts = {"attempt": float(point.attempt), "step": float(point.step), "version": float(point.version)}
        self._page = render(self._run_id, self._metrics, self._facts | {"updated_at_seconds": point.at or 0.0})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0

    def __init__(self, page, *arguments) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002
        self._page = page
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer /metrics with the page as it is now, and nothing else."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        page = self._page()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *arguments: object) -> None:
        """A scrape is not worth a line."""


def render(run_id: str, metrics: Mapping[str, float], facts: Mapping[str, float]) -> bytes:
    """The page. `facts` are gauges of the run itself."""
    gauges: dict[tuple[str, str], list[str]] = {}
    for name, value in facts.items():
        gauges[f"forebay_{name}", f"{name} of the newest step"] = [_sample(f"forebay_{name}", {"run": run_id}, value)]
    for name, value in metrics.items():
        known = metric(name)
        stem = known.name.removesuffix("/*")
        gauge = "forebay_" + re.sub(r"\W", "_", stem)
        labels = {"run": run_id} | ({"member": name[len(stem) + 1 :]} if known.family else {})
        help_text = f"{known.description} [{known.unit}]".replace("\\", r"\\").replace("\n", " ")
        gauges.setdefault((gauge, help_text), []).append(_sample(gauge, labels, value))
    lines = [
        line
        for (gauge, help_text), samples in gauges.items()
        for line in (f"# HELP {gauge} {help_text}", f"# TYPE {gauge} gauge", *samples)
    ]
    return ("\n".join(lines) + "\n").encode()


def _sample(gauge: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{gauge}{{{shown}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
