"""The flags that say where runs are logged, the same for every command that logs any."""

from typing import Annotated

import typer

MlflowUriFlag = Annotated[
    str | None,
    typer.Option(help="Tracking server [$MLFLOW_TRACKING_URI, else sqlite:///mlflow.db]."),
]
NoMlflowFlag = Annotated[bool, typer.Option("--no-mlflow", help="Log no runs.")]
