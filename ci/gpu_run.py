"""What ci/gpu.sh does: each step in a process of its own, with a time of its own.

Whatever breaks, hangs or does not fit in the time leaves the other steps' numbers: the report is
written after each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TVMPAGED = [sys.executable, "-m", "tvmpaged"]
#: Of the whole time: kept back for the report, and for measuring candidates at least.
REPORT_S, MEASURE_SHARE = 15.0, 0.35
#: Exit code when a kernel touched memory that is not its own.
SANITIZER_FOUND = 9
#: By the kind of device, (kernel, batch, context) of what is timed.
CASES = {
    "cuda": (("decode", 32, 4096), ("decode", 1, 16384), ("prefill", 1, 4096)),
    "cpu": (("decode", 2, 256), ("prefill", 1, 128)),
}
#: Of a log that a broken step leaves in the report.
_TAIL = 4000


@dataclass
class Step:
    """One part of the run.

    Parameters
    ----------
    name : str
        What it is called in the report.
    command : list of str
        Prints JSON alone on stdout.
    limit_s : float
        Its time; less where less is left.
    must_pass : bool
        Whether the run fails with it.
    failure : int or None
        The only exit code that is one; others say that it could not be done here.
    """

    name: str
    command: list[str]
    limit_s: float
    must_pass: bool = True
    failure: int | None = None
    rc: int | None = None
    seconds: float = 0.0
    result: Any = None
    said: str = ""

    def run(self, left_s: float) -> None:
        """Run it within the time that is left."""
        begin = time.monotonic()
        if left_s < 1:
            self.said = "not run: no time was left"
            return
        with tempfile.TemporaryFile("w+") as log:
            try:
                done = subprocess.run(
                    self.command,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    timeout=min(self.limit_s, left_s),
                    check=False,
                )
                self.rc, text = done.returncode, done.stdout
            except (OSError, subprocess.TimeoutExpired) as error:
                self.rc, text = 124, ""
                log.write(f"{error}\n")
            log.seek(0)
            self.said = log.read()[-_TAIL:]
        self.seconds = round(time.monotonic() - begin, 1)
        try:
            self.result = json.loads(text)
        except ValueError:
            self.said += text[-_TAIL:]

    @property
    def passed(self) -> bool:
        """Whether it ended well."""
        return self.rc == 0 if self.failure is None else self.rc != self.failure


@dataclass
class Run:
    """All steps, and what is left of the time.

    Parameters
    ----------
    pack, out : Path
        From where, and to where.
    device : str
        ``cpu``, or a GPU such as ``cuda:0``.
    seconds : float
        Of the whole run.
    allow_busy : bool
        Whether others may compute on the GPU meanwhile.
    """

    pack: Path
    out: Path
    device: str
    seconds: float
    allow_busy: bool
    steps: list[Step] = field(default_factory=list)

    def go(self) -> bool:
        """Run all steps; return whether those that must pass did."""
        end = time.monotonic() + self.seconds - REPORT_S
        with tempfile.TemporaryDirectory(prefix="tvmpaged-gpu-") as folder:
            work = Path(folder)
            for name in ("bundle", "candidates"):
                private_copy(self.pack / name, work / name)
            for step in self.plan(work):
                left = end - time.monotonic()
                if step.name != "measure":
                    left -= MEASURE_SHARE * self.seconds
                else:
                    # It writes what it has when its own time is up.
                    step.command += ["--time-limit", f"{max(1.0, left - 20):.0f}s"]
                print(f"{step.name} ...", file=sys.stderr, flush=True)
                self.steps.append(step)
                step.run(left)
                self.report()
            for name in ("results.json", "results.jsonl"):
                if (work / "candidates" / name).exists():
                    shutil.copy(work / "candidates" / name, self.out / name)
        return all(each.passed for each in self.steps if each.must_pass)

    def plan(self, work: Path) -> Iterator[Step]:
        """Yield the steps: correct before fast."""
        bundle, device = str(work / "bundle"), ["--device", self.device]
        busy = ["--allow-busy"] if self.allow_busy else []
        on_gpu = self.device != "cpu"
        check = [sys.executable, str(HERE / "gpu_step.py"), bundle, *device]
        yield Step("environment", [*TVMPAGED, "env", "--json"], 60, must_pass=False)
        numbers = [*TVMPAGED, "verify", bundle, "--numbers", "--json", *device]
        yield Step("edges against float64", numbers, 120)
        yield Step("steps against torch in float32", check, 90)
        for kernel, batch, context in CASES["cuda" if on_gpu else "cpu"]:
            command = [*TVMPAGED, "bench", bundle, "--no-mlflow", "--json"]
            for spec in specs_in(work / "bundle", kernel):
                command += ["--spec", spec]
            command += ["--batch", str(batch), "--context", str(context), *device, *busy]
            yield Step(f"bench {kernel} {batch} x {context}", command, 90)
        sanitizer = shutil.which("compute-sanitizer")
        if on_gpu and sanitizer:
            command = [sanitizer, "--tool", "memcheck", "--report-api-errors", "no"]
            command += ["--error-exitcode", str(SANITIZER_FOUND), *check, "--small"]
            yield Step("compute-sanitizer", command, 90, failure=SANITIZER_FOUND)
        command = [*TVMPAGED, "measure", str(work / "candidates"), "--json", *busy]
        yield Step("measure", command + (["--devices", self.device] if on_gpu else []), 600)

    def report(self) -> None:
        """Write what is known so far."""
        steps = list(map(asdict, self.steps))
        report = {"schema_version": 1, "device": self.device, "steps": steps}
        (self.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (self.out / "table.txt").write_text("\n".join(self.table()) + "\n")

    def table(self) -> Iterator[str]:
        """Yield the report for a person."""
        for step in self.steps:
            state = "ok" if step.rc == 0 else f"exit code {step.rc}"
            state = state if step.passed else f"FAILED ({step.rc})"
            yield f"{state:12} {step.seconds:6.1f} s  {step.name}"
        yield ""
        yield (
            f"{'spec':64} {'batch x context':>15} {'us':>9} {'rate':>15} {'roof':>10} "
            f"{'of roof':>7} {'/torch':>7} {'/FlashInfer':>11} {'error':>8}"
        )
        for step in self.steps:
            rows = (step.result or {}).get("rows", []) if step.name.startswith("bench") else []
            yield from map(bench_line, rows)
        yield ""
        yield f"{'spec':64} {'winner':>10} {'us':>9} {'default us':>10} {'speed-up':>8}"
        for step in self.steps:
            found = (step.result or {}).get("specs", []) if step.name == "measure" else []
            yield from map(measured_line, found)


def specs_in(bundle: Path, kernel: str) -> list[str]:
    """Return the specs of a bundle's artifacts of a kernel."""
    return [
        artifact["spec"]
        for manifest in sorted(bundle.rglob("manifest.json"))
        for artifact in json.loads(manifest.read_text())["artifacts"]
        if artifact["kernel"] == kernel
    ]


def bench_line(row: dict[str, Any]) -> str:
    """Return one row of a benchmark."""
    unit = "gb" if row["roof_gb_per_s"] is not None else "gflop"
    rate, roof = row[f"{unit}_per_s"], row[f"roof_{unit}_per_s"]
    where = f"{row['batch']} x {row['context']}"
    return (
        f"{row['spec']:64} {where:>15} {row['median_us']:9.1f} {rate:9.0f} {unit.upper()}/s"
        f" {roof:10.0f} {row['roof_fraction']:7.0%} {ratio(row['torch_ratio']):>7} "
        f"{ratio(row['flashinfer_ratio']):>11} {row['error'] or 0:8.1e}"
    )


def measured_line(found: dict[str, Any]) -> str:
    """Return what became of one spec's candidates."""
    won = found["winner"]
    if won is None:
        return f"{found['spec']:64} {found['failure']}"
    name = "default" if won["is_default"] else "candidate"
    us, default_us = (won[key]["median"] for key in ("latency_us", "default_latency_us"))
    return f"{found['spec']:64} {name:>10} {us:9.1f} {default_us:10.1f} {won['speedup']:8.2f}"


def ratio(value: float | None) -> str:
    """Return a ratio, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def private_copy(source: Path, destination: Path) -> None:
    """Copy a folder so that nobody else may write there, whatever carried it here.

    Digests are checked by whoever reads it.
    """
    shutil.copytree(source, destination)
    for path in (destination, *destination.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o022)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--allow-busy", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    run = Run(given.pack, given.out, given.device, 60 * given.minutes, given.allow_busy)
    passed = run.go()
    print((given.out / "table.txt").read_text())
    for step in run.steps:
        if not step.passed:
            print(f"\n{step.name}: {step.said}", file=sys.stderr)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
