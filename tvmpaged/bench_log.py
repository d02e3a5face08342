"""The rows of ``tvmpaged bench`` as runs in MLflow: a parent per command, a child per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from tvmpaged.bench import SCHEMA_VERSION, Row
from tvmpaged.env import hide_secrets
from tvmpaged.freshness import device_here
from tvmpaged.spec import TargetKey

#: To make a database's tables, and for the rows.
TIMEOUT_S = 120.0
_METRICS = (
    "median_us",
    "p10_us",
    "p90_us",
    "gb_per_s",
    "gflop_per_s",
    "roof_gb_per_s",
    "roof_gflop_per_s",
    "roof_fraction",
    "torch_ratio",
    "flashinfer_ratio",
    "error",
    "rounds",
)


def is_installed() -> bool:
    """Return whether there is anything to log with: serving alone does not need it."""
    return find_spec("mlflow") is not None


def log_rows(
    rows: Sequence[Row],
    params: Mapping[str, Any],
    mlflow_uri: str | None,
    on_warning: Callable[[str], None],
) -> None:
    """Log what was measured, when nothing is measured any more; a failure costs a warning.

    Parameters
    ----------
    rows : sequence of Row
        What was measured.
    params : mapping
        Of the command.
    mlflow_uri : str or None
        Tracking server; None takes MLFLOW_TRACKING_URI or the default.
    on_warning : callable
        Told why it was not logged.

    Raises
    ------
    ValueError
        When the address is a plain folder.
    """
    from tvmpaged.tuning.background import Background
    from tvmpaged.tuning.tracking import tracking_uri

    uri = tracking_uri(mlflow_uri)

    def warn(why: str) -> None:
        shown = hide_secrets("", why.strip().splitlines()[0])
        on_warning(f"MLflow: {shown}; what was measured is not logged")

    background = Background(warn)
    background.submit(lambda: _log(uri, rows, params), TIMEOUT_S)
    if not background.settle(TIMEOUT_S):
        background.fail("no answer in time")


def _log(uri: str, rows: Sequence[Row], params: Mapping[str, Any]) -> None:
    from tvmpaged.tuning.tracking import PARENT_TAG, Tracking

    server = Tracking(uri)
    target = rows[0].target  # all of one command are measured on one device
    here = {"device": device_here(TargetKey.parse(target))[0], "target": target}
    parent = server.create_run("bench", {}, {**params, **here})
    data = {"schema_version": SCHEMA_VERSION, "rows": [row.as_dict() for row in rows]}
    server.client.log_dict(parent, data, "bench.json")
    for row in rows:
        values = row.as_dict()
        points = [(name, float(values[name]), 0) for name in _METRICS if values[name] is not None]
        facts = {name: value for name, value in values.items() if name not in _METRICS}
        run_id = server.create_run(row.spec, {PARENT_TAG: parent}, {**facts, **here})
        server.log(run_id, points=points)
        server.client.set_terminated(run_id, "FINISHED")
    server.client.set_terminated(parent, "FINISHED")
