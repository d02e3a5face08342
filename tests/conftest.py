"""Fixtures that several files share."""

import os
import random
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import settings
from kernel_bundles import ROOT, bundle, manifest

from tvmpaged import PagedAttention
from tvmpaged.cli import app
from tvmpaged.spec import ATTENTION_KERNELS

SEED = "TVMPAGED_TEST_SEED"
Attention = Callable[..., PagedAttention]

settings.register_profile("no deadline", deadline=None)  # a busy machine is no fault
settings.load_profile("no deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help=f"Of all random inputs; also {SEED}. Default: new.")


def pytest_configure(config: pytest.Config) -> None:
    """Settle the seed before workers start, so that they share it; hide the user's own bundles."""
    given = config.getoption("--seed")
    fresh = random.SystemRandom().randrange(2**32)
    os.environ[SEED] = str(given if given is not None else os.environ.get(SEED, fresh))
    os.environ["XDG_CACHE_HOME"] = str(ROOT / "build" / "test_cache")
    os.environ.pop("TVMPAGED_BUNDLE", None)
    # A shell's background job ignores it, and what tests start would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {os.environ[SEED]} (the same inputs again: --seed {os.environ[SEED]})"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that follow from the seed and the test's name alone."""
    name = zlib.crc32(request.node.nodeid.encode())
    return np.random.default_rng([int(os.environ[SEED]), name])


@pytest.fixture(scope="session")
def base_bundle() -> Path:
    """Give the bundle that serves every spec: all sizes at run time."""
    return bundle("base")


@pytest.fixture(scope="session")
def generic(base_bundle: Path) -> Attention:
    """Return a function that makes a `PagedAttention` on the generic artifacts."""
    return _factory(base_bundle, "generic")


@pytest.fixture(scope="session")
def specialised() -> Attention:
    """Return a function that makes one on the artifacts of exactly its spec."""

    def make(*arguments: object, bundle_name: str = "covering", **more: object) -> PagedAttention:
        return _factory(bundle(bundle_name), "default")(*arguments, **more)

    return make


def _factory(folder: Path, kind: str) -> Attention:
    """Return what makes a `PagedAttention` and holds it to this bundle's artifacts."""
    artifacts = {str(each.spec): each.sha256 for each in manifest(folder).artifacts}

    def make(
        group_size: int,
        head_dim: int,
        block_size: int,
        dtype: str,
        *,
        num_kv_heads: int | None = None,
        layout: str = "HND",
        kv_dtype: str | None = None,
    ) -> PagedAttention:
        kv_heads = num_kv_heads or (1 if group_size > 16 else 2)
        attn = PagedAttention(
            kv_heads * group_size,
            kv_heads,
            head_dim,
            block_size,
            dtype,
            kv_dtype,
            layout,
            bundle=folder,
            strict=kind != "generic",
        )
        for name in ATTENTION_KERNELS:
            found = attn._kernels[name]
            spec = found.spec.generic() if kind == "generic" else found.spec
            assert found.kind == kind
            assert found.description["sha256"] == artifacts[str(spec)]
        return attn

    return make


@pytest.fixture
def install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., None]]:
    """Return a function that installs ``run`` as the command `tune`, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("TVMPAGED_"):
            monkeypatch.delenv(name)

    def install(run: Callable[..., object], example: str = "tvmpaged tune --trials 8") -> None:
        module = ModuleType("tvmpaged.cli.tune")
        module.run, module.EXAMPLE = run, example  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tvmpaged.cli.tune", module)
        app.load_command.cache_clear()

    yield install
    app.load_command.cache_clear()
