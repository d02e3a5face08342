"""The door to compiled code: misses, compiling on a miss, one load per digest, and forks."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from record_tools import make_record

from tvmpaged import PagedAttention, records, schedules
from tvmpaged.build import build_artifact, source_sha256
from tvmpaged.bundle import read_manifest
from tvmpaged.bundle.trust import sha256
from tvmpaged.cpu import native_target, num_threads
from tvmpaged.package import package
from tvmpaged.runtime.kernel_set import load_kernel
from tvmpaged.spec import AttentionSpec

SPEC = AttentionSpec.make("copy_blocks", "float32")
TUNED = AttentionSpec.make("decode", "float32", 64, 3, 16)
NATIVE = native_target()


@pytest.fixture
def no_bundles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TVMPAGED_BUNDLE", raising=False)
    monkeypatch.delenv("TVMPAGED_COMPILE_ON_MISS", raising=False)


@pytest.mark.usefixtures("no_bundles")
def test_a_miss_names_the_command_that_builds_what_is_missing() -> None:
    with pytest.raises(FileNotFoundError, match="tvmpaged package --target native --spec"):
        load_kernel(SPEC)


@pytest.mark.usefixtures("no_bundles")
def test_a_miss_is_compiled_when_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVMPAGED_COMPILE_ON_MISS", "1")
    kernel = load_kernel(SPEC)
    assert kernel.kind == "compiled"
    assert "cache" in kernel.description["artifact"]
    again = load_kernel(SPEC)
    assert again.kind == "generic"
    assert again.call is kernel.call


@pytest.mark.usefixtures("no_bundles")
def test_what_cannot_be_compiled_says_what_the_compiler_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TVMPAGED_COMPILE_ON_MISS", "1")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(FileNotFoundError, match="compiling it failed"):
        load_kernel(SPEC)


@pytest.mark.usefixtures("no_bundles")
def test_the_reference_runs_on_request_only_and_says_so() -> None:
    with pytest.raises(FileNotFoundError):
        PagedAttention(2, 1, 64, dtype="float32")
    assert PagedAttention.supports(2, 1, 64, dtype="float32")
    attn = PagedAttention(2, 1, 64, dtype="float32", allow_reference=True)
    assert attn.describe()["kind"] == "reference"
    assert PagedAttention.supports(2, 1, 64, dtype="float32", allow_reference=True) == []
    with pytest.raises(FileNotFoundError, match="strict=True"):
        PagedAttention(2, 1, 64, dtype="float32", strict=True, allow_reference=True)


@pytest.fixture(scope="module")
def tuned_on_a_z80(tmp_path_factory: pytest.TempPathFactory, base_bundle: Path) -> list[Path]:
    """A bundle with one kernel of a record, and the base bundle for the others."""
    folder = tmp_path_factory.mktemp("tuned")
    choices = {**schedules.default_choices(TUNED, NATIVE), "split_length": 256}
    values = {
        "spec": TUNED,
        "target": NATIVE,
        "choices": choices,
        "source_sha256": source_sha256("cpu"),
    }
    records.save(folder / "logs", make_record(**values, device="Z80", num_threads=num_threads()))
    (done,) = package([TUNED], [NATIVE], folder / "bundle", records_dir=folder / "logs")
    assert not done.failures
    # The record alone was enough, and the manifest alone is enough: no database is left.
    shutil.rmtree(folder / "logs")
    (made,) = read_manifest(folder / "bundle", NATIVE).artifacts
    assert made.choices == choices
    build_artifact(TUNED, NATIVE, made.choices, folder / "again.so")
    assert sha256((folder / "again.so").read_bytes()) == made.sha256
    return [folder / "bundle", base_bundle]


def test_describe_says_stale_and_tuned_elsewhere(
    tuned_on_a_z80: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned, base = tuned_on_a_z80
    monkeypatch.setenv("TVMPAGED_BUNDLE", str(base))

    def states() -> tuple[str, str, str]:
        found = PagedAttention(6, 2, 64, 16, "float32", bundle=tuned).describe()
        kernels = found["kernels"]
        assert kernels["decode"]["kind"] == "tuned"
        return found["state"], kernels["decode"]["state"], kernels["merge"]["state"]

    # Decode is tuned, but prefill is not: so is not the whole.
    assert PagedAttention(6, 2, 64, 16, "float32", bundle=tuned).describe()["kind"] == "generic"
    assert states() == ("tuned elsewhere", "tuned elsewhere", "current")
    monkeypatch.setattr("tvmpaged.freshness.cpu_model", lambda: "Z80")
    assert states() == ("current", "current", "current")
    monkeypatch.setenv("TVMPAGED_NUM_THREADS", str(num_threads() + 1))
    assert states() == ("tuned elsewhere", "tuned elsewhere", "current")
    monkeypatch.setattr("tvmpaged.freshness.source_sha256", lambda _kind: "0" * 64)
    assert states() == ("stale", "stale", "stale")


#: The child ends as those of multiprocessing do. By `sys.exit` it would wait for ever in the
#: destructor of TVM's pool, for a thread that slept when the process was forked.
FORK = """
import os, sys, time, traceback
from tvmpaged import PagedAttention
attn = PagedAttention(2, 1, 8, 4, "float32", bundle=sys.argv[1])
k_cache, v_cache = attn.new_cache(4)
plan = attn.plan([0, 1], [3], [[2]])
run = lambda: attn.run(plan, k_cache.new_zeros(1, 2, 8), k_cache, v_cache)
if sys.argv[2] != "before the first call":
    run()
    time.sleep(0.1)
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
code = 1
try:
    print(len(run()), flush=True)
    code = 0
except Exception:
    traceback.print_exc()
os._exit(code)
"""


@pytest.mark.parametrize(
    ("when", "threads", "refused"),
    [
        ("before the first call", 2, False),
        ("after a call", 2, True),
        ("after a call", 1, False),
    ],
)
def test_a_fork_after_a_call_is_refused_instead_of_hanging(
    base_bundle: Path, when: str, threads: int, refused: bool
) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", FORK, str(base_bundle), when],
        env={**os.environ, "TVMPAGED_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = program.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)  # a child that waits is not left behind
    assert (program.returncode, out) == ((1, "") if refused else (0, "1\n")), err
    assert ("start processes with multiprocessing's 'spawn'" in err) == refused
