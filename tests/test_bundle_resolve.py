"""The decision which artifact serves a spec: every fact is an argument, so no machine is needed."""

from pathlib import Path

import pytest
from bundle_tools import OTHER_SPEC, SAPPHIRE, SPEC, V3, V4, artifact, header, host, manifest

from tvmpaged.bundle import Abi, Artifact, Folder, Manifest, Resolution, resolve
from tvmpaged.cpu import MICROARCHITECTURES
from tvmpaged.spec import TargetKey

pytestmark = pytest.mark.runtime

GENERIC = SPEC.generic()
H200 = TargetKey("cuda", "sm_90", "nvidia-h200")
H100 = TargetKey("cuda", "sm_90", "nvidia-h100")
H200A = TargetKey("cuda", "sm_90a", "nvidia-h200")
A100 = TargetKey("cuda", "sm_80", "nvidia-a100")
L40 = TargetKey("cuda", "sm_89", "nvidia-l40")


def folder(name: str, found: Manifest) -> Folder:
    return Folder(Path("/") / name, "argument", found.target, found)


def holding(name: str, target: TargetKey, *artifacts: Artifact) -> Folder:
    return folder(name, manifest(target, *artifacts))


def reasons(found: Resolution) -> str:
    return "\n".join(map(str, found.rejected))


TUNED, DEFAULT, ALL_SIZES = (
    artifact(SPEC, "tuned"),
    artifact(SPEC, "default"),
    artifact(GENERIC, "generic"),
)


@pytest.mark.parametrize(
    ("machine", "candidates", "best"),
    [
        # tuned anywhere beats default anywhere beats generic, whatever the search path says
        (SAPPHIRE, [("a", SAPPHIRE, DEFAULT), ("b", SAPPHIRE, TUNED)], "b"),
        (SAPPHIRE, [("a", SAPPHIRE, DEFAULT), ("b", V3, TUNED)], "b"),
        (SAPPHIRE, [("a", SAPPHIRE, ALL_SIZES), ("b", V3, DEFAULT)], "b"),
        # nearer beats farther
        (SAPPHIRE, [("a", V4, TUNED), ("b", SAPPHIRE, TUNED)], "b"),
        (SAPPHIRE, [("a", V3, TUNED), ("b", V4, TUNED)], "b"),
        (SAPPHIRE, [("a", V4, TUNED), ("b", TargetKey("cpu", "icelake-server"), TUNED)], "b"),
        (H200, [("a", H100, TUNED), ("b", H200, TUNED)], "b"),
        (L40, [("a", A100, TUNED), ("b", TargetKey("cuda", "sm_86", "x"), TUNED)], "b"),
        (H200, [("a", H200, DEFAULT), ("b", H100, TUNED)], "b"),
        # what only that GPU has
        (H200, [("a", H200, TUNED), ("b", H200A, TUNED)], "b"),
        (H200, [("a", H200A, DEFAULT), ("b", H200, TUNED)], "b"),
        # the search path breaks ties
        (V3, [("a", V3, TUNED), ("b", V3, TUNED)], "a"),
        (V3, [("a", V3, ALL_SIZES), ("b", V3, ALL_SIZES)], "a"),
    ],
)
def test_the_order(
    machine: TargetKey, candidates: list[tuple[str, TargetKey, Artifact]], best: str
) -> None:
    found = resolve(SPEC, host(machine), [holding(*each) for each in candidates])
    assert found.require().folder.bundle.name == best
    assert len(found.accepted) == len(candidates)


def test_the_exact_artifact_of_a_folder_beats_its_generic_one() -> None:
    both = holding("a", V3, DEFAULT, ALL_SIZES)
    accepted = resolve(SPEC, host(), [both]).require()
    assert (accepted.kind, accepted.artifact.spec) == ("default", SPEC)
    other = resolve(
        OTHER_SPEC, host(), [holding("a", V3, artifact(OTHER_SPEC.generic(), "generic"))]
    )
    assert other.require().kind == "generic"
    assert other.require().why == "generic, built for this target (cpu/x86-64-v3)"


def test_a_tuned_generic_artifact_still_counts_as_generic() -> None:
    found = resolve(
        SPEC, host(), [holding("a", V3, artifact(GENERIC, "tuned")), holding("b", V3, DEFAULT)]
    )
    assert [each.kind for each in found.accepted] == ["default", "generic"]


@pytest.mark.parametrize(
    ("machine", "built_for", "message"),
    [
        (V3, V4, "needs avx512bw, avx512cd, avx512dq, avx512f, avx512vl, this CPU"),
        (V4, SAPPHIRE, "amx_bf16"),
        (V3, H200, "is built for cuda/sm_90/nvidia-h200, this is cpu/x86-64-v3"),
        (H200, V3, "is built for cpu/x86-64-v3, this is cuda/sm_90/nvidia-h200"),
        (H200, A100, "is built for sm_80, this GPU is sm_90"),
        (A100, L40, "is built for sm_89, this GPU is sm_80"),
    ],
)
def test_another_machines_artifact_is_never_used(
    machine: TargetKey, built_for: TargetKey, message: str
) -> None:
    found = resolve(SPEC, host(machine), [holding("a", built_for, TUNED, ALL_SIZES)])
    assert not found.accepted
    assert message in reasons(found)


def test_arch_specific_device_code_runs_on_its_own_arch_only() -> None:
    machine = TargetKey("cuda", "sm_103", "x")
    for sm_arch, runs in (("sm_100", True), ("sm_100f", True), ("sm_100a", False)):
        found = manifest(TargetKey("cuda", "sm_100", "y"), TUNED, sm_arch=sm_arch)
        assert bool(resolve(SPEC, host(machine), [folder("a", found)]).accepted) is runs


def test_code_for_exactly_this_gpu_is_strict_too() -> None:
    assert resolve(SPEC, host(H200), [holding("a", H200A, DEFAULT)], strict=True).accepted
    other = TargetKey("cuda", "sm_90a", "nvidia-h100")
    found = resolve(SPEC, host(H200), [holding("a", other, DEFAULT)], strict=True)
    assert "strict=True, and it is built for cuda/sm_90a/nvidia-h100" in reasons(found)


def test_ptx_serves_newer_gpus_after_all_machine_code() -> None:
    machine = TargetKey("cuda", "sm_103", "x")
    old = folder("old", manifest(A100, TUNED, sm_arch="sm_80+ptx"))
    near = holding("b", TargetKey("cuda", "sm_100", "y"), TUNED)
    found = resolve(SPEC, host(machine), [old, near])
    assert [each.folder.bundle.name for each in found.accepted] == ["b", "old"]
    assert not resolve(SPEC, host(machine), [holding("a", A100, TUNED)]).accepted


def test_a_missing_feature_is_named_even_when_the_manifest_hides_it() -> None:
    hiding = folder("a", manifest(V4, TUNED, cpu_features=()))
    assert "needs avx512bw" in reasons(resolve(SPEC, host(V3), [hiding]))
    one = host(V4, cpu_flags=MICROARCHITECTURES["x86-64-v4"] - {"avx512f"})
    assert "needs avx512f, this CPU" in reasons(resolve(SPEC, one, [holding("a", V4, TUNED)]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tvm_ffi_version": "0.1.12"},
            "needs tvm_ffi >=0.1.13.post3,<0.1.16, found tvm_ffi 0.1.12",
        ),
        ({"tvm_ffi_version": "0.1.13.post2"}, "found tvm_ffi 0.1.13.post2"),
        ({"tvm_ffi_version": "0.1.16"}, "found tvm_ffi 0.1.16"),
        (
            {"runtime_version": "0.28.0"},
            "needs libtvm_runtime ==0.27.*, found libtvm_runtime 0.28.0",
        ),
        ({"runtime_version": "none"}, "found libtvm_runtime none"),
    ],
)
def test_wrong_versions_are_refused_with_both_values(changes: dict[str, str], message: str) -> None:
    found = resolve(SPEC, host(**changes), [holding("a", V3, TUNED)])
    assert not found.accepted
    assert message in reasons(found)


@pytest.mark.parametrize("version", ["0.1.13.post3", "0.1.14.post1", "0.1.15.post2"])
def test_the_whole_range_of_tvm_ffi_is_accepted(version: str) -> None:
    assert resolve(SPEC, host(tvm_ffi_version=version), [holding("a", V3, TUNED)]).accepted


def test_another_calling_convention_is_refused() -> None:
    old = folder("a", manifest(V3, TUNED, abi=Abi(kernels=0)))
    assert "calling convention is number 0" in reasons(resolve(SPEC, host(), [old]))


def test_strict_takes_only_this_spec_for_this_target() -> None:
    farther, generic, exact = (
        holding("a", V3, TUNED),
        holding("b", V4, ALL_SIZES),
        holding("c", V4, DEFAULT),
    )
    found = resolve(SPEC, host(V4), [farther, generic, exact], strict=True)
    assert [each.folder for each in found.accepted] == [exact]
    assert "built for cpu/x86-64-v3, not cpu/x86-64-v4" in reasons(found)
    assert "only the generic artifact" in reasons(found)
    with pytest.raises(FileNotFoundError, match="strict=True") as caught:
        resolve(SPEC, host(V4), [farther, generic], strict=True).require()
    assert str(caught.value).endswith(f"--spec '{SPEC}' --install")


def test_strict_takes_a_generic_artifact_that_was_itself_asked_for() -> None:
    assert resolve(GENERIC, host(), [holding("a", V3, ALL_SIZES)], strict=True).accepted


def test_a_miss_lists_every_candidate_and_the_command_that_helps() -> None:
    candidates = [
        Folder(Path("/gone"), "user cache", None, None, "cannot be opened: No such file"),
        holding("other", V3, artifact(OTHER_SPEC)),
        holding("amx", SAPPHIRE, TUNED),
    ]
    with pytest.raises(FileNotFoundError) as caught:
        resolve(SPEC, host(), candidates).require()
    text = str(caught.value)
    assert "/gone: cannot be opened: No such file [user cache]" in text
    assert "/other/cpu/x86-64-v3: none of its 1 artifacts is for this spec" in text
    assert "/amx/cpu/sapphirerapids: needs amx_bf16" in text
    assert text.endswith(f"tvmpaged package --target native --spec '{SPEC}' --base --install")
    with pytest.raises(FileNotFoundError, match="no bundle was found"):
        resolve(SPEC, host(H200), []).require()


def test_an_unknown_microarchitecture_is_judged_by_the_manifest() -> None:
    later = TargetKey("cpu", "somethinglake")
    found = manifest(later, TUNED, cpu_features=(*header().cpu_features, "avx99"))
    assert "needs avx99" in reasons(resolve(SPEC, host(), [folder("a", found)]))
    having = host(cpu_flags=MICROARCHITECTURES["x86-64-v3"] | {"avx99"})
    both = [folder("a", found), holding("b", V3, TUNED)]
    assert resolve(SPEC, having, both).require().folder.bundle.name == "b"
