"""``bench --profile``: command lines that a shell runs as they stand, for the device's profiler."""

import json
import shlex

import pytest

from tvmpaged.bench_profile import profile_commands
from tvmpaged.cli.app import main
from tvmpaged.spec import AttentionSpec

SPECS = [AttentionSpec.make(kernel, "bfloat16", 128, 8, 16) for kernel in ("decode", "prefill")]
SIZES = {"bundle": "my bundle", "batch": 32, "context": 4096}


def test_a_gpu_gets_a_timeline_and_its_kernels_by_name() -> None:
    systems, compute = profile_commands(SPECS, device="cuda:1", **SIZES)
    for command in (systems, compute):
        variable, *words = shlex.split(command)
        assert variable == "TVMPAGED_NVTX=1"
        bench = words[words.index("tvmpaged") :]
        assert bench[:3] == ["tvmpaged", "bench", "my bundle"]
        for flag, value in (("--device", "cuda:1"), ("--batch", "32"), ("--context", "4096")):
            assert bench[bench.index(flag) + 1] == value
        assert [bench[i + 1] for i, word in enumerate(bench) if word == "--spec"] == [
            str(spec) for spec in SPECS
        ]
    assert shlex.split(systems)[1:4] == ["nsys", "profile", "--trace=cuda,nvtx"]
    names = shlex.split(compute)[shlex.split(compute).index("--kernel-name") + 1]
    assert names == "regex:^(decode|merge|prefill)_kernel$"


def test_a_cpu_gets_perf() -> None:
    (command,) = profile_commands(SPECS[:1], device="cpu", **SIZES)
    assert shlex.split(command)[:6] == ["perf", "record", "-g", "-o", "tvmpaged-bench.perf", "--"]


def test_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--spec", str(SPECS[0]), "--profile"]
    assert main(arguments) == 0
    line = capsys.readouterr().out.strip()
    assert line.startswith("perf record")
    # What it names is a command that parses: the profiler's part is cut off.
    words = shlex.split(line)
    again = words[words.index("bench") :]
    assert main([*again, "--profile", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["commands"] == [line]
