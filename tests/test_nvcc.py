"""Finding NVIDIA's compiler, and reading what it says; none of it needs the compiler."""

from pathlib import Path

import pytest

from tvmpaged import nvcc
from tvmpaged.errors import UserError
from tvmpaged.sm import Resources

pytestmark = pytest.mark.runtime

SAYS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode_kernel' for 'sm_90'
ptxas info    : Function properties for decode_kernel
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 156 registers, used 1 barriers, 16 bytes cumulative stack size, 4352 bytes smem
"""


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a compiler, whose environment lies in the folder that is returned."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(nvcc, "_TOOLKITS", (str(tmp_path / "toolkit"),))
    monkeypatch.setattr(nvcc.sysconfig, "get_path", lambda _name: str(tmp_path / "site"))
    return tmp_path


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_missing_compiler_is_a_message_with_what_to_install(nowhere: Path) -> None:
    assert nvcc.find_nvcc() is None
    with pytest.raises(UserError, match=r"pip install 'cuda-toolkit\[nvcc,cudart,cccl\]==13"):
        nvcc.require_nvcc()


def test_the_path_comes_before_the_system_and_that_before_pip(nowhere: Path) -> None:
    for place in ("site/nvidia/cu13/bin/nvcc", "toolkit/bin/nvcc", "bin/nvcc"):
        found = put(nowhere / place)
        assert nvcc.require_nvcc() == found


def test_the_runtime_of_a_compiler_lies_in_its_toolkit(nowhere: Path) -> None:
    compiler = put(nowhere / "site/nvidia/cu13/bin/nvcc")
    assert nvcc.cuda_runtime(compiler) is None
    library = put(nowhere / "site/nvidia/cu13/lib/libcudart.so.13")
    assert nvcc.cuda_runtime(compiler) == library
    (nowhere / "bin").mkdir()
    (nowhere / "bin/nvcc").symlink_to(compiler)
    assert nvcc.cuda_runtime(nowhere / "bin/nvcc") == library


def test_what_ptxas_says_is_read() -> None:
    assert nvcc.read_resources(SAYS) == Resources(156, 4352, spill_bytes=20, stack_bytes=16)
    without = SAYS.replace(", 4352 bytes smem", "")
    assert nvcc.read_resources(without).shared_bytes == 0


@pytest.mark.parametrize("text", ["", SAYS + SAYS])
def test_silence_and_several_kernels_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ptxas speaks of \d kernels"):
        nvcc.read_resources(text)


SPILLS_UNLESS_TOLD = """#!/bin/sh
for file; do :; done
grep -q "launch_bounds__(128, 1)" "$file" && spilled={told} || spilled=20
while [ "$1" != -o ]; do shift; done
echo "bounds $spilled" >"$2"
echo "$spilled bytes stack frame, $spilled bytes spill stores, 0 bytes spill loads" >&2
echo "Used 48 registers" >&2
"""


@pytest.mark.parametrize(("told", "kept"), [(0, 0), (8, 8), (20, 20), (24, 20)])
def test_what_spills_is_compiled_again_for_one_block(tmp_path: Path, told: int, kept: int) -> None:
    """And the one that spills less is kept, the first where neither does."""
    compiler = put(tmp_path / "nvcc")
    compiler.write_text(SPILLS_UNLESS_TOLD.replace("{told}", str(told)))
    source = "__global__ void __launch_bounds__(128) kernel() {}"
    fatbin, taken = nvcc.compile_cuda(source, "sm_90", compiler)
    assert taken.spill_bytes == kept
    assert fatbin.decode().split() == ["bounds", str(kept)]
