"""What ``tvmpaged mlflow-sync --from-run`` does: rebuild a folder of logs from runs' artifacts.

What a server sends is data of a stranger: a file's place follows from the run's spec and target, as
parsed here, never from a name of the server's; a log or record is checked line by line before it is
written; a file that is here already is never replaced.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tvmpaged import records
from tvmpaged.errors import UserError
from tvmpaged.files import replace_file
from tvmpaged.records import RECORD_NAME, Record
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning import tracking
from tvmpaged.tuning.log import LOG_NAME, SCHEMA_VERSION, open_log, read_searches
from tvmpaged.tuning.summary import write_summary
from tvmpaged.tuning.tracking import PARENT_TAG, Tracking, answering, connect
from tvmpaged.tuning.trial import Trial

MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Fetched:
    """What became of one run.

    Parameters
    ----------
    run_id : str
        On the server.
    target, spec : str
        Of what; empty when it did not say.
    files : tuple of str
        Written here.
    unchanged : tuple of str
        Were here already.
    failure : str
        Why nothing was written.
    """

    run_id: str
    target: str = ""
    spec: str = ""
    files: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    failure: str = ""


def fetch(
    root: Path,
    uri: str,
    run_ids: Sequence[str],
    *,
    progress: Callable[[int, str], None] = lambda _done, _name: None,
) -> list[Fetched]:
    """Write the log and the record of runs below a folder.

    Parameters
    ----------
    root : Path
        A ``tuning_logs`` folder; made if there is none.
    uri : str
        From `tvmpaged.tuning.tracking.tracking_uri`.
    run_ids : sequence of str
        Runs of specs, or of whole commands: that is all their specs.
    progress : callable
        Called with how many are done, and the last one's name.

    Raises
    ------
    UserError
        When the server does not answer, or has no such run.
    """
    file = tracking.database(uri)
    if file is not None and not file.exists():
        raise UserError(f"{file} is no database; name another with --mlflow-uri")
    server = connect(uri, create=False)
    with answering(uri):
        found: dict[str, Fetched] = {}
        for done, run_id in enumerate(run_ids, start=1):
            for run in _spec_runs(server, run_id):
                found.setdefault(str(run.info.run_id), _fetch(server, root, run))
            progress(done, run_id)
    return list(found.values())


def _spec_runs(server: Tracking, run_id: str) -> list[Any]:
    run = server.client.get_run(run_id)
    children = server.client.search_runs(
        [run.info.experiment_id], f"tags.`{PARENT_TAG}` = '{run.info.run_id}'"
    )
    return list(children) or [run]


def _fetch(server: Tracking, root: Path, run: Any) -> Fetched:
    run_id, params = str(run.info.run_id), run.data.params
    target, spec = str(params.get("target", "")), str(params.get("spec", ""))
    try:
        if not target or not spec:
            raise ValueError("it is the run of no spec")
        key, wanted = TargetKey.parse(target), AttentionSpec.parse(spec)
        with tempfile.TemporaryDirectory(prefix="tvmpaged-fetch-") as folder:
            files = _download(server, run_id, Path(folder))
        record = _read_record(files[RECORD_NAME], key, wanted) if RECORD_NAME in files else None
        log = files.get(LOG_NAME)
        if log is not None:
            check_log(log)
        if log is None and record is None:
            raise ValueError("it holds neither log nor record; upload them with mlflow-sync first")
        written, unchanged = _write(root, key, wanted, log, record)
    except (UserError, ValueError) as error:
        return Fetched(run_id, target, spec, failure=f"run {run_id}: {error}")
    return Fetched(run_id, target, spec, tuple(written), tuple(unchanged))


def _download(server: Tracking, run_id: str, folder: Path) -> dict[str, bytes]:
    """Return the log and the record of a run, as the server sends them.

    Raises
    ------
    ValueError
        When the server names a file that would leave its folder, or one that is too large.
    """
    found = {}
    for each in server.client.list_artifacts(run_id):
        path = PurePosixPath(each.path)
        if path.is_absolute() or ".." in path.parts or "\\" in each.path or "\0" in each.path:
            raise ValueError(f"the server names an artifact {each.path!r}, which leaves its folder")
        if each.path not in (LOG_NAME, RECORD_NAME) or each.is_dir:
            continue
        if (each.file_size or 0) > MAX_BYTES:
            raise ValueError(f"{each.path} has {each.file_size} bytes; allowed: {MAX_BYTES}")
        server.client.download_artifacts(run_id, each.path, str(folder))
        place = folder / each.path
        if place.is_symlink() or not place.is_file():
            raise ValueError(f"the server sent no file as {each.path}")
        found[each.path] = place.read_bytes()
    return found


def _read_record(data: bytes, target: TargetKey, spec: AttentionSpec) -> Record:
    try:
        record = Record.from_dict(json.loads(data))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{RECORD_NAME} is no record: {type(error).__name__}: {error}") from error
    if (record.spec, record.target) != (spec, target):
        raise ValueError(f"{RECORD_NAME} is the record of {record.spec} for {record.target}")
    if not all(isinstance(value, int | str) for value in record.choices.values()):
        raise ValueError(f"{RECORD_NAME} has choices that are neither numbers nor words")
    return record


def check_log(data: bytes) -> None:
    """Check a log line by line.

    Raises
    ------
    ValueError
        When it is none, or one that this version does not read; torn lines belong to a log.
    """
    num_runs = 0
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            each = json.loads(line)
        except ValueError:
            continue  # torn
        try:
            if each["kind"] == "run":
                num_runs += 1
                _check_run(each)
            elif each["kind"] == "trial":
                Trial.from_dict(each)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{LOG_NAME}, line {number}: {type(error).__name__}: {error}"
            ) from error
    if not num_runs:
        raise ValueError(f"{LOG_NAME} holds no run")


def _check_run(line: dict[str, Any]) -> None:
    if line["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema version {line['schema_version']}, not {SCHEMA_VERSION}")
    text = json.dumps(line["setting"], sort_keys=True)
    if hashlib.sha256(text.encode()).hexdigest()[:16] != line["setting_key"]:
        raise ValueError("the setting is not the one that its key names")


def _write(
    root: Path, target: TargetKey, spec: AttentionSpec, log: bytes | None, record: Record | None
) -> tuple[list[str], list[str]]:
    """Write what is not here; return the names of what was written, and of what was here."""
    folder = records.folder(root, target, spec)
    written: list[str] = []
    unchanged: list[str] = []
    with open_log(folder) as here:
        old = here.path.read_bytes() if here.path.exists() else None
        # Ours may have gone on since it was uploaded.
        if old is not None and log is not None and not old.startswith(log):
            raise ValueError(f"{here.path} is here already and differs; move it away first")
        known = records.load(root, target, spec)
        if record is not None and known is not None and known != record and old is None:
            place = folder / RECORD_NAME
            raise ValueError(f"{place} is here already and differs; move it away first")
        if log is not None:
            (unchanged if old is not None else written).append(LOG_NAME)
        if log is not None and old is None:
            replace_file(here.path, log)
        if record is not None:
            (unchanged if known is not None else written).append(RECORD_NAME)
        if record is not None and known is None:
            records.save(root, record)
            trials = [
                each
                for search in read_searches(here.path)
                for each in search.trials.values()
                if search.record_id in (None, record.record_id)
            ]
            write_summary(folder, record, trials)
    return written, unchanged
