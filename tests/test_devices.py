"""Where candidates are measured: which GPUs, who else is there, and several side by side."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_tools import H200_TARGET, Program, gpu, gpus_here
from tune_tools import SPEC, FakeMachine

from tvmpaged import tune
from tvmpaged.cli.devices import parse_devices
from tvmpaged.cpu import native_target
from tvmpaged.errors import UserError
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.device import DEVICE_VARIABLE, Device, Watch, find_gpus, measuring_process
from tvmpaged.tuning.machine import Machine, measuring_processes, open_machine
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.task import Task
from tvmpaged.tuning.trial import Choices, choices_key
from tvmpaged.tuning.work import Settings
from tvmpaged.tuning.workload import Workload

NATIVE = native_target()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.setenv("PATH", str(tmp_path))
    return Program.write(tmp_path)


def test_a_gpu_as_what_times_hold_for() -> None:
    found = Device.here(H200_TARGET, [gpu()])
    assert (found.name, found.num_threads) == ("NVIDIA H200", 132)
    assert found.caches_bytes == {"L2": 60 << 20}
    assert found.rotation_bytes == 120 << 20
    settings = Settings()
    workload = settings.workload(SPEC, "cuda")
    assert workload == Workload.representative(SPEC, 8, "cuda") != settings.workload(SPEC, "cpu")
    assert Setting.here(workload, H200_TARGET, found).device == "NVIDIA H200"


def test_devices_are_those_of_the_target() -> None:
    with gpus_here(gpu(), gpu(1), gpu(2, "NVIDIA L4", (8, 9))):
        assert [each.index for each in find_gpus(H200_TARGET)] == [0]
        assert [each.index for each in find_gpus(H200_TARGET, ["cuda:1", "cuda:0"])] == [1, 0]
        exactly = TargetKey("cuda", "sm_90a", "nvidia-h200")
        assert find_gpus(exactly) == find_gpus(H200_TARGET)
        for devices, said in (
            (["cuda:0", "cuda:2"], "cuda:2 is cuda/sm_89/nvidia-l4, not target=cuda/sm_90/nvidia"),
            (["cuda:0", "cuda:0"], "name one GPU twice"),
            (["cuda:3"], "is not there"),
            (["cpu"], "is no GPU"),
        ):
            with pytest.raises(ValueError, match=said):
                find_gpus(H200_TARGET, devices)
    assert find_gpus(NATIVE) == ()
    with pytest.raises(ValueError, match="are GPUs, and target=cpu/"):
        find_gpus(NATIVE, ["cuda:0"])


def test_all_devices_are_those_of_the_targets_kind() -> None:
    l4 = gpu(1, "NVIDIA L4", (8, 9))
    with gpus_here(gpu(), l4, gpu(2)):
        for text, indices in (
            ("cuda", [0, 2]),
            ("cuda/sm_90a/nvidia-h200", [0, 2]),
            ("cuda/sm_89/nvidia-l4", [1]),
        ):
            target = tune.parse_target(text, parse_devices("all"))
            assert [each.index for each in find_gpus(target, ["all"])] == indices
        with pytest.raises(ValueError, match="devices=all,cuda:1: all are named alone"):
            tune.parse_target("cuda", parse_devices("all, cuda:1"))
        with pytest.raises(ValueError, match="devices=all are GPUs, and target=cpu/"):
            tune.parse_target("native", ["all"])
    with gpus_here(l4), pytest.raises(ValueError, match=r"GPUs are: cuda/sm_89/nvidia-l4$"):
        tune.parse_target(str(H200_TARGET), ["all"])
    with gpus_here(), pytest.raises(ValueError, match=r"of target=cuda/.*GPUs are: none$"):
        find_gpus(H200_TARGET, ["all"])
    with gpus_here(), pytest.raises(ValueError, match="the CUDA driver finds none"):
        tune.parse_target("cuda", ["all"])


def test_the_target_to_tune_follows_from_the_devices() -> None:
    with gpus_here(gpu(), gpu(1, "NVIDIA L4", (8, 9))):
        assert tune.parse_target("cuda") == H200_TARGET
        assert str(tune.parse_target("cuda", ["cuda:1"])) == "cuda/sm_89/nvidia-l4"
        assert tune.parse_target("cuda/sm_90a/nvidia-h200").arch == "sm_90a"
        with pytest.raises(ValueError, match="not target=cuda/sm_90/nvidia-h100"):
            tune.parse_target("cuda/sm_90/nvidia-h100")
    with gpus_here(), pytest.raises(ValueError, match="the CUDA driver finds none"):
        tune.parse_target("cuda")


def test_a_busy_card_is_refused_unless_told_and_others_are_recorded(program: Program) -> None:
    program.computes(17)
    with pytest.raises(UserError, match=r"compute on cuda:0 \(NVIDIA H200\).*--allow-busy"):
        Watch([gpu()])
    watch = Watch([gpu()], allow_busy=True)
    # Our own process is there now, too.
    program.computes(17, 18)
    state = watch.state()
    assert state is not None
    assert (state["other_processes"], state["pstate"]) == ("1", "P0")
    program.computes()  # a container may show none of them
    assert (watch.state() or {})["other_processes"] == "1"


def test_who_comes_later_is_recorded(program: Program) -> None:
    watch = Watch([gpu()])
    program.computes(18)  # ours
    assert (watch.state() or {})["other_processes"] == "0"
    program.computes(18, 19, 20)
    assert (watch.state() or {})["other_processes"] == "2"


def test_a_cpu_has_no_state_and_the_driver_is_not_asked(program: Program) -> None:
    assert Watch().state() is None
    assert program.asked == []


def test_each_gpu_has_a_process_without_a_limit_of_memory() -> None:
    made = measuring_processes([gpu(), gpu(3)])
    assert [each.environment[DEVICE_VARIABLE] for each in made] == ["cuda:0", "cuda:3"]
    assert [each.memory_bytes for each in made] == [None, None]
    (cpu,) = measuring_processes([])
    assert cpu.environment[DEVICE_VARIABLE] == "cpu"
    assert cpu.memory_bytes
    with open_machine(gpus=[gpu(), gpu(1)]) as machine:
        assert (machine.num_devices, machine.num_workers) == (2, 132)


class SideBySide(FakeMachine):
    """Answers only when as many candidates are being measured as there are devices.

    Who takes the lead is asked for again, with others or without.
    """

    def __init__(self, folder: Path, num_devices: int) -> None:
        super().__init__(folder)
        self.num_devices = num_devices
        self.together = threading.Barrier(num_devices, timeout=20)
        self.alone: list[int] = []
        self.asked: set[str] = set()

    def measure(self, spec: Any, workload: Any, merge: Any, candidates: Any, **kw: Any) -> Answer:
        self.alone.append(len(candidates))
        key = choices_key(candidates[-1])
        if len(candidates) > 1 and key not in self.asked:
            self.asked.add(key)
            self.together.wait()
        elif len(candidates) == 1:
            time.sleep(0.2)  # who does not wait for it, comes without it
        return super().measure(spec, workload, merge, candidates, **kw)


def batch_of(count: int) -> list[Choices]:
    from tvmpaged import schedules

    default = schedules.default_choices(SPEC, NATIVE)
    return [default | {"split_length": 128 * (1 + index)} for index in range(count)]


def task(machine: Any, default: Choices) -> Task:
    workload = Workload(1, (1,), (1,))
    return Task(machine, SPEC, NATIVE, workload, Path("merge"), default, 1, 0)


def test_candidates_are_measured_side_by_side_after_the_default(tmp_path: Path) -> None:
    default, *others = batch_of(5)
    machine = SideBySide(tmp_path, 2)
    run = task(machine, default)
    run.answers = {}
    trials = run.run_all([default, *others])
    assert [each.choices for each in trials] == [default, *others]
    assert all(each.latency_us for each in trials)
    # The default, alone; all others beside it.
    assert machine.alone[0] == 1
    assert machine.alone.count(1) == 1


def test_an_error_of_one_device_ends_the_batch(tmp_path: Path) -> None:
    default, *others = batch_of(9)
    machine = FakeMachine(tmp_path)
    machine.num_devices = 2

    def fate(choices: Choices) -> Answer | None:
        if choices == others[0]:
            raise OSError("no space left")
        return None

    machine.fate = fate
    with pytest.raises(OSError, match="no space left"):
        task(machine, default).run_all([default, *others])


def test_compiling_takes_all_devices_and_measuring_one(tmp_path: Path) -> None:
    busy: list[str] = []
    seen: list[set[str]] = []
    lock = threading.Lock()

    class Worker:
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, *_arguments: Any) -> Answer:
            with lock:
                busy.append(self.name)
                seen.append(set(busy))
            threading.Event().wait(0.02)
            with lock:
                busy.remove(self.name)
            return Answer({"error": "nothing is done"})

    machine = Machine([], [Worker("a"), Worker("b")], tmp_path, 1)  # type: ignore[list-item]

    def compile_nothing() -> None:
        with machine._compiling, machine._taking(2), lock:
            assert busy == []

    spec = AttentionSpec.make("decode", "float32", 64, 3, 16)
    calls: list[Callable[[], Any]] = [
        lambda: machine.measure(
            spec, Workload(1, (1,), (1,)), tmp_path, [], rotation_bytes=1, seed=0
        ),
        compile_nothing,
    ]
    for some in (calls[:1] * 4, calls * 6):
        threads = [threading.Thread(target=call) for call in some]
        for each in threads:
            each.start()
        for each in threads:
            each.join(20)
        assert {"a", "b"} in seen


def test_a_process_on_a_cpu_measures_where_it_is_told() -> None:
    worker = measuring_process("cpu")
    try:
        assert worker.ask({"ping": True}, 60).reply == {}
    finally:
        worker.kill()
    broken = measuring_process("cuda:0")
    try:
        # No GPU here: what is wrong is the answer, and not a crash.
        assert "error" in json.loads(json.dumps(broken.ask({"ping": True}, 60).reply))
    finally:
        broken.kill()
