"""The panels as a dashboard of Grafana: `python deploy/make_dashboard.py > deploy/grafana/stagecoach.json`."""

import json
from collections.abc import Iterator
from typing import Any

from stagecoach.coordinator.page.panels import PANELS, TRAINING_METRIC, Line, Panel, training_query

_WIDTH, _HEIGHT, _SMALL_WIDTH = 12, 8, 6
_COLUMNS = 24
_UNITS = {"bytes": "bytes", "share": "percentunit"}
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_VARIABLES = [
    {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
    {
        "name": "run", "label": "Run", "type": "query", "datasource": _DATASOURCE, "multi": True, "includeAll": True,
        "query": {"query": "label_values(stagecoach_run_info, run)", "refId": "run"},
        "definition": "label_values(stagecoach_run_info, run)", "refresh": 2, "sort": 1,
        "current": {"text": ["All"], "value": ["$__all"]},
    },
]  # fmt: skip


def dashboard() -> dict[str, Any]:
    return {
        "uid": "stagecoach", "title": "Stagecoach", "tags": ["stagecoach"], "schemaVersion": 39, "editable": True,
        "time": {"from": "now-1h", "to": "now"}, "refresh": "10s", "timezone": "browser",
        "templating": {"list": _VARIABLES}, "panels": list(_laid_out()),
    }  # fmt: skip


def targets(panel: Panel) -> list[tuple[str, str]]:
    """Legend and query of all that a panel draws of Prometheus; none for one that Prometheus knows nothing of."""
    found = [target for line in panel.lines for target in _of_line(line)]
    return found + [(f"{{{{run}}}} {label}", query) for label, query in panel.queries]


def _of_line(line: Line) -> Iterator[tuple[str, str]]:
    if not line.query:
        return
    label = "{{stage}}" if line.metric.endswith("*") else line.label
    yield f"{{{{run}}}} {f'{line.label} {{{{of}}}}' if TRAINING_METRIC in line.query else label}", line.query
    for name in line.band or ():
        yield f"{{{{run}}}} {name.rpartition('_')[2]}", training_query(name)


def _laid_out() -> Iterator[dict[str, Any]]:
    """Two panels a row, small ones four, below the title of each group."""
    number, x, y, height, group = 0, 0, 0, 0, ""
    for panel in PANELS:
        for title, width, drawn in _charts(panel):
            number += 1
            if panel.group != group:
                group, x, y, height = panel.group, 0, y + height, 1
                yield {"id": number, "type": "row", "title": group, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1}}  # fmt: skip
                number, y, height = number + 1, y + 1, 0
            if x + width > _COLUMNS:
                x, y, height = 0, y + height, 0
            yield _chart(panel, title, drawn) | {"id": number, "gridPos": {"x": x, "y": y, "w": width, "h": _HEIGHT}}
            x, height = x + width, _HEIGHT


def _charts(panel: Panel) -> Iterator[tuple[str, int, list[tuple[str, str]]]]:
    if panel.kind == "multiples":
        for line in panel.lines:
            yield f"{panel.title}: {line.label}", _SMALL_WIDTH, list(_of_line(line))
    elif found := targets(panel):
        yield panel.title, _WIDTH, found


def _chart(panel: Panel, title: str, drawn: list[tuple[str, str]]) -> dict[str, Any]:
    stacked = {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 60} if panel.kind == "shares" else {}
    return {
        "type": "timeseries", "title": title, "description": panel.note, "datasource": _DATASOURCE,
        "fieldConfig": {
            "defaults": {"unit": _UNITS.get(panel.unit, "short"), "custom": {"drawStyle": "line"} | stacked},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _DATASOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(drawn)
        ],
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2, ensure_ascii=False))
