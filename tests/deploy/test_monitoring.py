"""Prometheus and Grafana under the profile `monitoring`: what they ask for exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import yaml
from metric_names import GATEWAY_GOLDEN, names_types_labels
from prometheus_client import CollectorRegistry, generate_latest

from pagemesh.tokenizer_svc.metrics import TokenizerMetrics

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
DASHBOARD: Final[dict[str, Any]] = json.loads(
    (DEPLOY / "grafana/dashboards/pagemesh.json").read_text()
)
SERIES: Final = re.compile(r"\b(?:pagemesh_|vllm:|http_request)\w+")
LABELS: Final = re.compile(r"\bby \(([^)]*)\)")
BUCKET: Final = "_bucket"


def known() -> dict[str, set[str]]:
    """The labels of every series of a gateway, and of a tokenizer service, by name."""
    registry = CollectorRegistry()
    TokenizerMetrics(registry, in_flight=int, waiting=int)
    lines = GATEWAY_GOLDEN.read_text() + names_types_labels(generate_latest(registry).decode())
    series: dict[str, set[str]] = {}
    for name, kind, *labels in map(str.split, lines.splitlines()):
        series[name + (BUCKET if kind == "histogram" else "")] = set(labels)
    return series


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_series_of_the_dashboard_exists() -> None:
    series = known()
    asked = [*queries(), DASHBOARD["templating"]["list"][0]["query"]]
    named = {name for query in asked for name in SERIES.findall(query)}
    assert len(named) > 15
    assert named <= series.keys()


def test_every_label_that_is_grouped_by_exists() -> None:
    series = known()
    for query in queries():
        grouped = {label.strip() for by in LABELS.findall(query) for label in by.split(",")}
        names = SERIES.findall(query)
        if names:
            assert grouped - {"le"} <= set.intersection(*(series[name] for name in names)), query


def test_the_dashboard_finds_its_data() -> None:
    sources = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"]
    assert {
        target["datasource"]["uid"] for panel in DASHBOARD["panels"] for target in panel["targets"]
    } == {source["uid"] for source in sources}
    [provider] = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/dashboards/files.yaml").read_text()
    )["providers"]
    [mount] = [
        volume
        for volume in compose()["services"]["grafana"]["volumes"]
        if volume.startswith("./deploy/grafana/dashboards:")
    ]
    assert mount.split(":")[1] == provider["options"]["path"]


def test_every_service_is_scraped_where_it_listens() -> None:
    plain, tls = (
        yaml.safe_load((DEPLOY / name).read_text())
        for name in ("prometheus.yaml", "prometheus.tls.yaml")
    )
    jobs = {job["job_name"]: job for job in plain["scrape_configs"]}
    assert jobs.keys() == {"gateway", "tokenizer", "scheduler", "worker", "balancer"}
    for name, job in jobs.items():
        if name != "balancer":
            [names] = job["dns_sd_configs"]
            assert names["names"] == [name]
            assert names["port"] == (8000 if name == "gateway" else 7000)
    without_tls = [
        {key: value for key, value in job.items() if key not in ("scheme", "tls_config")}
        for job in tls["scrape_configs"]
    ]
    assert without_tls == plain["scrape_configs"]


def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY.parent / "compose.yaml").read_text())
    return content
