"""The microarchitecture table against LLVM's own feature lists, and detection from flags."""

import os
from itertools import combinations

import pytest

from tvmpaged.cpu import MICROARCHITECTURES, detect_microarchitecture, num_threads

#: LLVM's name -> the kernel's in /proc/cpuinfo, where they differ by more than underscores.
KERNEL_NAMES = {"bmi": "bmi1", "lzcnt": "abm", "sha": "sha_ni", "pclmul": "pclmulqdq"}

#: What LLVM emits without being asked for it by an intrinsic, over every x86-64 with AVX2.
EMITTED = set(
    "avx avx2 bmi bmi2 f16c fma lzcnt movbe sse4a gfni avxvnni avx512f avx512bw avx512cd avx512dq "
    "avx512vl avx512ifma avx512vbmi avx512vbmi2 avx512vnni avx512bitalg avx512vpopcntdq avx512bf16 "
    "avx512fp16".split()
)


def kernel_name(llvm_name: str, known: set[str]) -> str:
    """Return the kernel's name of a feature, such as ``avx512_vbmi2`` for ``avx512vbmi2``."""
    name = KERNEL_NAMES.get(llvm_name, llvm_name.replace("-", "_"))
    squeezed = {each.replace("_", ""): each for each in known}
    return squeezed.get(name.replace("_", ""), name)


def llvm_features(name: str) -> set[str]:
    tvm = pytest.importorskip("tvm")
    codegen = pytest.importorskip("tvm.target.codegen")
    target = tvm.target.Target({"kind": "llvm", "mcpu": name})
    return {str(each) for each in codegen.llvm_get_cpu_features(target)}


@pytest.mark.parametrize("name", MICROARCHITECTURES)
def test_no_machine_is_refused_for_a_feature_that_llvm_does_not_turn_on(name: str) -> None:
    table = set(MICROARCHITECTURES[name])
    assert table <= {kernel_name(each, table) for each in llvm_features(name)}


@pytest.mark.parametrize("name", MICROARCHITECTURES)
def test_every_feature_that_llvm_may_emit_is_checked(name: str) -> None:
    table = set(MICROARCHITECTURES[name])
    emitted = llvm_features(name) & EMITTED
    assert len(emitted) >= 8
    assert {kernel_name(each, table) for each in emitted} <= table


@pytest.mark.parametrize("name", MICROARCHITECTURES)
def test_a_machine_with_just_these_features_is_detected_as_that(name: str) -> None:
    assert detect_microarchitecture(MICROARCHITECTURES[name]) == name
    assert detect_microarchitecture(MICROARCHITECTURES[name] | {"fpu", "vme"}) == name


def test_richer_names_come_first() -> None:
    for (first, more), (second, fewer) in combinations(MICROARCHITECTURES.items(), 2):
        assert not more < fewer, f"{second} can never be detected behind {first}"


@pytest.mark.parametrize("name", MICROARCHITECTURES)
def test_one_missing_feature_makes_it_a_poorer_machine(name: str) -> None:
    for missing in MICROARCHITECTURES[name]:
        flags = MICROARCHITECTURES[name] - {missing}
        if missing in MICROARCHITECTURES["x86-64-v3"]:
            with pytest.raises(ValueError, match=missing):
                detect_microarchitecture(flags)
        else:
            assert detect_microarchitecture(flags) != name


def test_a_hidden_model_number_does_not_matter() -> None:
    """A guest calls itself what it likes; a CPU with AMX and FP16 is a Sapphire Rapids."""
    flags = MICROARCHITECTURES["sapphirerapids"] | {"hypervisor", "tsxldtrk"}
    assert detect_microarchitecture(flags) == "sapphirerapids"
    assert detect_microarchitecture(flags - {"amx_tile"}) == "icelake-server"


def test_a_cpu_without_avx2_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"lacks .*avx2.*x86-64-v3"):
        detect_microarchitecture(frozenset({"sse4_2", "avx"}))


def test_threads_follow_the_variable_then_the_usable_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TVMPAGED_NUM_THREADS", raising=False)
    assert num_threads() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("TVMPAGED_NUM_THREADS", " 3 ")
    assert num_threads() == 3
    for wrong in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv("TVMPAGED_NUM_THREADS", wrong)
        with pytest.raises(ValueError, match=f"TVMPAGED_NUM_THREADS='{wrong}'"):
            num_threads()
