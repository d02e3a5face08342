"""The door to compiled code: misses, compiling on a miss, and one load per digest."""

from pathlib import Path

import pytest

from tvmpaged import PagedAttention
from tvmpaged.runtime.kernel_set import load_kernel
from tvmpaged.spec import AttentionSpec

SPEC = AttentionSpec.make("copy_blocks", "float32")


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
