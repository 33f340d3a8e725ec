"""The dashboard for Grafana, made from the definitions of the metrics.

    python -m deploy.watching            # writes deploy/dashboard.json

A query names metrics and labels that `deployments.metrics` defines, or nothing is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram, Metric

from deployments import metrics

DASHBOARD = Path(__file__).parent / "dashboard.json"
ALERTS = Path(__file__).parent / "alerts.yaml"
_KINDS = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}
_WIDTH, _HEIGHT = 12, 8  # of a panel, in Grafana's grid of 24 columns


@dataclass(frozen=True)
class MetricDefinition:
    """A metric as Prometheus sees it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    what: str


def list_metrics() -> list[MetricDefinition]:
    """Return every metric that `deployments.metrics` defines, in the order of its classes."""
    owners = (
        metrics.RequestMetrics("any"),
        metrics.IngressMetrics("any"),
        metrics.EngineMetrics("any", "target"),
        metrics.RetrieverMetrics("any"),
    )
    return [_define(each) for owner in owners for each in _instruments_in(vars(owner).values())]


def _instruments_in(values: Any) -> Iterator[Metric]:
    for value in values:
        if isinstance(value, dict):
            yield from _instruments_in(value.values())
        elif isinstance(value, Metric):
            yield value


def _define(instrument: Metric) -> MetricDefinition:
    told = instrument.info
    kind = _KINDS[type(instrument)]
    return MetricDefinition(
        f"ray_{told['name']}", kind, tuple(told["tag_keys"]), told["description"]
    )


def find_unknown(query: str) -> list[str]:
    """Return the names of metrics and labels in a query of PromQL that no definition has."""
    known: dict[str, set[str]] = {}
    for each in list_metrics():
        parts = ("_bucket", "_sum", "_count") if each.kind == "histogram" else ("",)
        known |= {each.name + part: {*each.labels, "le"} for part in parts}
    named = re.findall(r"\bray_\w+", query)
    asked = {
        label.split("=")[0].strip(" !~")
        for group in re.findall(r"by \(([^)]*)\)|\{([^}]*)\}", query)
        for label in ",".join(group).split(",")
        if label.strip()
    }
    labels = set[str]().union(*(known.get(name, set()) for name in named))
    return sorted({name for name in named if name not in known} | (asked - labels))


def _rate(name: str, *by: str, selector: str = "") -> str:
    chosen = ", ".join(filter(None, ('model_name=~"$model"', selector)))
    return f"sum by ({', '.join(('model_name', *by))}) (rate({name}{{{chosen}}}[$__rate_interval]))"


def _quantile(name: str, share: float) -> str:
    return f"histogram_quantile({share}, {_rate(f'{name}_bucket', 'le')})"


def _level(name: str, *by: str, how: str = "sum") -> str:
    return f'{how} by ({", ".join(("model_name", *by))}) ({name}{{model_name=~"$model"}})'


_PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (  # title, unit, query by legend
    (
        "Ready, at each ingress the least",
        "short",
        {"{{model_name}}": _level("ray_rapid_ready", how="min")},
    ),
    (
        "Requests by how they end",
        "reqps",
        {"{{outcome}} {{cause}}": _rate("ray_rapid_request_end_total", "outcome", "cause")},
    ),
    (
        "First text",
        "s",
        {
            f"{share:.0%}": _quantile("ray_vllm_time_to_first_token_seconds", share)
            for share in (0.5, 0.95)
        },
    ),
    (
        "Whole answers",
        "s",
        {
            f"{share:.0%}": _quantile("ray_vllm_e2e_request_latency_seconds", share)
            for share in (0.5, 0.95)
        },
    ),
    (
        "Waiting and running",
        "short",
        {
            "waiting": _level("ray_vllm_num_requests_waiting"),
            "running": _level("ray_vllm_num_requests_running"),
        },
    ),
    (
        "Where the time goes, 95 %",
        "s",
        {
            "place": _quantile("ray_rapid_admission_wait_seconds", 0.95),
            "leases": _quantile("ray_vllm_request_queue_time_seconds", 0.95),
            "prefill": _quantile("ray_vllm_request_prefill_time_seconds", 0.95),
            "retrieval": _quantile("ray_rapid_retrieval_seconds", 0.95),
            "draft": _quantile("ray_rapid_draft_seconds", 0.95),
            "verify": _quantile("ray_rapid_verify_seconds", 0.95),
        },
    ),
    (
        "Tokens",
        "short",
        {
            "read": _rate("ray_vllm_prompt_tokens_total"),
            "answered": _rate("ray_vllm_generation_tokens_total"),
        },
    ),
    (
        "Drafted tokens kept, share",
        "percentunit",
        {
            "{{model_name}}": _rate("ray_vllm_spec_decode_num_accepted_tokens_total")
            + " / "
            + _rate("ray_vllm_spec_decode_num_draft_tokens_total")
        },
    ),
    (
        "Answers by mode",
        "reqps",
        {"{{mode}}: {{reason}}": _rate("ray_rapid_mode_total", "mode", "reason")},
    ),
    (
        "What was lost",
        "reqps",
        {
            "gone on after: {{reason}}": _rate("ray_rapid_failover_total", "reason"),
            "without: {{reason}}": _rate("ray_rapid_fallback_total", "reason"),
        },
    ),
    (
        "KV in use",
        "percentunit",
        {"{{pool}}": _level("ray_vllm_kv_cache_usage_perc", "pool", how="max")},
    ),
    (
        "Prompt tokens found in the cache, share",
        "percentunit",
        {
            "{{pool}}": _rate("ray_vllm_prefix_cache_hits_total", "pool")
            + " / "
            + _rate("ray_vllm_prefix_cache_queries_total", "pool")
        },
    ),
    (
        "Time of a step",
        "s",
        {
            "{{pool}}": _rate("ray_rapid_engine_step_seconds_total", "pool")
            + " / "
            + _rate("ray_rapid_engine_steps_total", "pool")
        },
    ),
    (
        "Retrieval: waiting, and away",
        "short",
        {
            "waiting": _level("ray_rapid_retriever_waiting"),
            "away": _level("ray_rapid_retriever_away", how="max"),
        },
    ),
)


def make_dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it.

    Raises:
        ValueError: A query asks for what no metric or label is called.
    """
    panels = []
    for number, (title, unit, queries) in enumerate(_PANELS):
        for query in queries.values():
            if unknown := find_unknown(query):
                raise ValueError(f"{title}: {', '.join(unknown)}: no metric has it")
        row, column = divmod(number, 2)
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": title,
                "datasource": {"type": "prometheus", "uid": "${source}"},
                "gridPos": {
                    "x": column * _WIDTH,
                    "y": row * _HEIGHT,
                    "w": _WIDTH,
                    "h": _HEIGHT,
                },
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend}
                    for place, (legend, query) in enumerate(queries.items())
                ],
            }
        )
    return {
        "title": "RAPID Serve",
        "uid": "rapid-serve",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "model",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${source}"},
                    "query": "label_values(ray_rapid_ready, model_name)",
                    "includeAll": True,
                    "allValue": ".*",
                },
            ]
        },
        "panels": panels,
    }


def list_queries() -> list[str]:
    """Return the queries of the dashboard with Grafana's variables filled in."""
    return [
        query.replace("$model", ".*").replace("$__rate_interval", "5m")
        for _, _, queries in _PANELS
        for query in queries.values()
    ]


if __name__ == "__main__":
    DASHBOARD.write_text(json.dumps(make_dashboard(), indent=1) + "\n", encoding="utf-8")
