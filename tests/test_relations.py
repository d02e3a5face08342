"""Relations that every artifact must satisfy, tuned or not, and that none can enter without."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_tools import SPEC, build_with_gcc
from hypothesis import given, settings
from hypothesis import strategies as st
from record_tools import make_record

from tvmpaged import PagedAttention, records, schedules, tryout
from tvmpaged.build import build_artifact, source_sha256
from tvmpaged.bundle import prefer, read_manifest, scan
from tvmpaged.cpu import native_target
from tvmpaged.package import Packaged, package
from tvmpaged.relations import relations
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.candidates import Candidates
from tvmpaged.verify_numbers import TOLERANCES, attention_of

TARGET = native_target()
Attention = Callable[..., PagedAttention]


def broken(attention: Any, kernel: str, dtype: str = "float32", seed: int = 0) -> str:
    tried = list(relations(attention, kernel, TOLERANCES[dtype], seed))
    assert len(tried) == 12
    return "\n".join(str(each) for each in tried if not each.holds)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_untuned_kernels_satisfy_them(
    generic: Attention, kernel: str, dtype: str, rng: np.random.Generator
) -> None:
    attention = generic(3, 64, 4, dtype)
    assert not broken(attention, kernel, dtype, int(rng.integers(2**31)))


# --- tuned kernels: any legal choices ------------------------------------------------------------

TUNED = [
    AttentionSpec.make("decode", "float32", 64, 3, 16),
    AttentionSpec.make("decode", "bfloat16", 80, 4, 5),
    AttentionSpec.make("prefill", "float32", 64, 3, 16),
    AttentionSpec.make("prefill", "bfloat16", 128, 7, 32),
]


def drawn(spec: AttentionSpec, random: np.random.Generator) -> dict[str, Any]:
    """Return random legal choices."""
    source = Candidates(
        schedules.space(spec, TARGET),
        lambda each: schedules.reject(spec, TARGET, each),
        schedules.default_choices(spec, TARGET),
    )
    return source.draw(random)


def pack_tuned(
    folder: Path, choices: dict[AttentionSpec, dict[str, Any]], **options: Any
) -> Packaged:
    """Package records of these choices, as a search would have left them."""
    for spec, each in choices.items():
        sources = source_sha256("cpu")
        made = make_record(spec=spec, target=TARGET, choices=each, source_sha256=sources)
        records.save(folder / "logs", made)
    merge = [AttentionSpec.make("merge", dtype) for dtype in ("float32", "bfloat16")]
    (found,) = package(
        [*choices, *merge],
        [TARGET],
        folder / "bundle",
        records_dir=folder / "logs",
        jobs=2,
        **options,
    )
    return found


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle of kernels with drawn choices; those of each run are others."""
    random = np.random.default_rng([int(os.environ["TVMPAGED_TEST_SEED"]), 7])
    folder = tmp_path_factory.mktemp("tuned")
    found = pack_tuned(folder, {spec: drawn(spec, random) for spec in TUNED})
    assert not found.failures
    assert not any("were not run" in each for each in found.notes)
    return folder / "bundle"


@pytest.mark.slow
@pytest.mark.parametrize("spec", TUNED, ids=str)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31))
def test_tuned_kernels_satisfy_them(tuned: Path, spec: AttentionSpec, seed: int) -> None:
    artifact = read_manifest(tuned, TARGET).find(spec)
    assert artifact is not None
    assert artifact.kind == "tuned"
    (folder,) = scan(tuned)
    with prefer(folder):
        attention = attention_of(artifact, PagedAttention)
        assert not broken(attention, spec.kernel, spec.out_dtype, seed)


# --- faults --------------------------------------------------------------------------------------


class Faulty:
    """An attention whose `run` is spoiled: a fault takes the call's arguments and its results."""

    def __init__(self, attention: PagedAttention, fault: Callable[..., Any]) -> None:
        self.attention, self.fault = attention, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attention, name)

    def run(self, plan: Any, q: Any, *caches: Any, out: Any, return_lse: bool) -> Any:
        before = out.clone()
        out, lse = self.attention.run(plan, q, *caches, out=out, return_lse=return_lse)
        return self.fault(q=q, caches=caches, before=before, out=out, lse=lse)


def depends_on_the_batch(out: Any, lse: Any, **_: Any) -> Any:
    return out * (1 + 1e-7 * len(out)), lse


def sees_what_nobody_owns(caches: Any, out: Any, lse: Any, **_: Any) -> Any:
    return out + 0 * caches[1].sum(), lse


def sees_where_keys_lie(caches: Any, out: Any, lse: Any, **_: Any) -> Any:
    return out + 1e-6 * caches[0][0].nan_to_num(0, 0, 0).mean(), lse


def leaves_a_head_unwritten(before: Any, out: Any, lse: Any, **_: Any) -> Any:
    out[:, -1] = before[:, -1]
    return out, lse


def counts_in_twos(out: Any, lse: Any, **_: Any) -> Any:
    return out, lse / np.log(2)


def forgets_a_key(out: Any, lse: Any, **_: Any) -> Any:
    return out * 0.9, lse


def loses_precision_in_large_logits(out: Any, lse: Any, **_: Any) -> Any:
    return out * (1 + 1e-4 * lse[:, :, None].nan_to_num(0, 0, 0).abs()), lse


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (depends_on_the_batch, "each sequence alone"),
        (sees_what_nobody_owns, "nan in unused slots"),
        (sees_where_keys_lie, "blocks in another order"),
        (leaves_a_head_unwritten, "nan in out beforehand"),
        (counts_in_twos, "lse is log of the keys"),
        (counts_in_twos, "merged"),
        (counts_in_twos, "lse moves by it"),
        (forgets_a_key, "out is the mean of V"),
        (loses_precision_in_large_logits, "a constant added to every logit: out stays"),
    ],
)
def test_a_fault_breaks_the_relation_that_it_should(
    generic: Attention, fault: Callable[..., Any], said: str
) -> None:
    assert said in broken(Faulty(generic(3, 64, 4, "float32"), fault), "prefill")


def test_a_kernel_that_does_not_know_its_causal_edge_differs_by_the_way_tokens_come(
    generic: Attention,
) -> None:
    class NotCausal(Faulty):
        def plan(self, *step: Any, causal: bool) -> Any:
            return self.attention.plan(*step, causal=False)

    attention = NotCausal(generic(3, 64, 4, "float32"), lambda out, lse, **_: (out, lse))
    assert "new tokens at once, one by one" in broken(attention, "prefill")


# --- packaging -----------------------------------------------------------------------------------

LIBRARY = (
    "int __tvm_ffi_{}(void *self, const void *args, int count, void *result) {{ {} return 0; }}"
)
FLAT = AttentionSpec.make("decode", "float32", 64, 3, 8)
CRASH = AttentionSpec.make("decode", "float32", 64, 3, 4)
RIGHT = AttentionSpec.make("decode", "float32", 64, 3, 16)


def build_some_wrong(
    spec: AttentionSpec, target: TargetKey, choices: dict[str, Any], path: Path
) -> None:
    """Build one kernel that does nothing and one that crashes, in place of the real ones."""
    bodies = {FLAT: "", CRASH: "*(volatile int *)0 = 1;"}
    if spec not in bodies:
        build_artifact(spec, target, choices, path)
        return
    source = path.with_suffix(".c")
    source.write_text(LIBRARY.format(spec.kernel, bodies[spec]))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True)


@pytest.mark.slow
def test_a_record_whose_kernel_is_wrong_does_not_enter_a_bundle(tmp_path: Path) -> None:
    choices = {spec: schedules.default_choices(spec, TARGET) for spec in (FLAT, RIGHT, CRASH)}
    found = pack_tuned(tmp_path, choices, compile_with=build_some_wrong)
    assert set(found.failures) == {FLAT, CRASH}
    assert "its record's kernel is wrong; numbers: error" in found.failures[FLAT]
    assert "ended the process with code -11" in found.failures[CRASH]
    held = {each.spec for each in read_manifest(tmp_path / "bundle", TARGET).artifacts}
    assert RIGHT in held
    assert not held & {FLAT, CRASH}


def test_a_kernel_that_hangs_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tryout, "_TIMEOUT_S", 0.01)
    assert "did not end within" in tryout._verify(tmp_path, tmp_path)[1]


def test_what_another_machine_is_for_is_not_run_and_that_is_said(tmp_path: Path) -> None:
    target = TargetKey("cuda", "sm_90", "nvidia-h200")
    choices = schedules.default_choices(SPEC, target)
    sources = source_sha256("cuda")
    made = make_record(spec=SPEC, target=target, choices=choices, source_sha256=sources)
    records.save(tmp_path / "logs", made)
    (found,) = package(
        [SPEC], [target], tmp_path / "bundle", records_dir=tmp_path / "logs",
        compile_with=build_with_gcc,
    )  # fmt: skip
    assert not found.failures
    assert any("tuned kernels were not run: " in each for each in found.notes)
    assert any("tvmpaged verify --numbers" in each for each in found.notes)
