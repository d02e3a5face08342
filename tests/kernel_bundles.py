"""Bundles of real kernels for the tests: compiled once per state of the sources, shared by all.

``python tests/kernel_bundles.py full 2`` builds a set ahead, with two processes and printed
progress; the fixtures of `conftest` build what they need by the same way.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from itertools import combinations, product
from pathlib import Path

from filelock import FileLock

from tvmpaged.bundle.folder import read_manifest
from tvmpaged.bundle.manifest import Manifest
from tvmpaged.cpu import native_target
from tvmpaged.spec import ATTENTION_KERNELS, DTYPES, AttentionSpec

ROOT = Path(__file__).parent.parent

# Why each size stands in the product.
BLOCK_SIZES = (1, 7, 16, 32, 256)  # least; no power of two; two usual ones; largest
HEAD_DIMS = (64, 80, 128, 256)  # usual; no power of two; usual; largest but 512
GROUP_SIZES = (1, 3, 4, 7, 71)  # none; odd; usual; 28 heads over 4; more than any row tile
LAYOUTS = ("HND", "NHD")

#: Sizes outside the product that models have: (dtype, head_dim, group_size, block_size, layout).
MORE_CASES = (
    ("float32", 32, 5, 16, "HND"),
    ("bfloat16", 72, 6, 16, "HND"),
    ("float16", 96, 17, 16, "NHD"),
    ("float32", 112, 48, 4, "HND"),
    ("bfloat16", 192, 5, 8, "HND"),
    ("float16", 512, 6, 16, "HND"),
    ("float32", 8, 3, 5, "NHD"),
    ("float32", 64, 3, 16, "HND"),
    ("bfloat16", 128, 8, 16, "HND"),
)

#: Specs whose artifacts choose how the cache lies.
NATIVE_CASES = (
    # Pairs: tiles of V whole in a block, or halves of two; few rows, many; with a head's tail.
    ("bfloat16", 128, 4, 32, "native"),
    ("bfloat16", 64, 3, 16, "native"),
    ("bfloat16", 80, 1, 48, "native"),
    ("bfloat16", 112, 17, 16, "native"),
    ("bfloat16", 96, 71, 64, "native"),
    ("bfloat16", 512, 6, 256, "native"),
    ("bfloat16", 16, 16, 32, "native"),
    # And where native means HND.
    ("bfloat16", 64, 3, 7, "native"),
    ("float32", 64, 3, 16, "native"),
)

Sizes = tuple[str, int, int, int, str]


def covering_rows(*factors: tuple[object, ...]) -> list[tuple[object, ...]]:
    """Return rows in which every pair of values of two factors meets; greedy, always the same."""
    pairs = list(combinations(range(len(factors)), 2))
    missing = {(i, a, j, b) for i, j in pairs for a in factors[i] for b in factors[j]}

    def met(row: tuple[object, ...]) -> set[tuple[int, object, int, object]]:
        return {(i, row[i], j, row[j]) for i, j in pairs}

    rows = []
    while missing:
        rows.append(max(product(*factors), key=lambda row: len(met(row) & missing)))
        missing -= met(rows[-1])
    return rows


@cache
def sizes_of(name: str) -> list[Sizes]:
    """Return the sizes of a set: ``covering``, ``full`` or ``native``."""
    if name == "native":
        return list(NATIVE_CASES)
    factors = (DTYPES, HEAD_DIMS, GROUP_SIZES, BLOCK_SIZES)
    if name == "full":
        return [(*row, "HND") for row in product(*factors)]
    rows = covering_rows(*factors, LAYOUTS)
    return [*dict.fromkeys([*rows, *MORE_CASES])]  # type: ignore[list-item]


def specs_of(sizes: Iterable[Sizes]) -> list[AttentionSpec]:
    """Return the specialised specs, two kernels for each case."""
    return [
        AttentionSpec.make(kernel, *each[:4], layout=each[4])
        for each in sizes
        for kernel in ATTENTION_KERNELS
    ]


@cache
def bundle(name: str, jobs: int = 2) -> Path:
    """Return the bundle of a set: ``base`` (generic) or a set of `sizes_of` (specialised too).

    Built in processes of its own, so that it works where this one cannot import the compiler.
    """
    folder = _folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "built").exists():
            code = f"import kernel_bundles; kernel_bundles.build({name!r}, {jobs})"
            subprocess.run([sys.executable, "-c", code], check=True, env=_with_compiler())
    return folder / "bundle"


def _with_compiler() -> dict[str, str]:
    """Return the environment without the folder that hides the compiler (`ci/no_tvm`)."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    shown = [path for path in paths if path and Path(path).name != "no_tvm"]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*shown, str(Path(__file__).parent)])}


@cache
def manifest(folder: Path) -> Manifest:
    """Return what a bundle says of this machine's target."""
    return read_manifest(folder, native_target())


def _folder(name: str) -> Path:
    from tvmpaged.build import source_sha256

    specs = [] if name == "base" else specs_of(sizes_of(name))
    key = [source_sha256("cpu"), str(native_target()), version("apache-tvm"), *map(str, specs)]
    digest = hashlib.sha256("\n".join(key).encode()).hexdigest()
    return ROOT / "build" / "test_bundles" / f"{name}-{digest[:16]}"


def build(name: str, jobs: int) -> None:
    """Compile a set into its folder."""
    from tvmpaged.package import package

    folder = _folder(name)

    def progress(done: int, total: int, what: str) -> None:
        if done % 20 == 0 or done == total:
            print(f"{name}: {done}/{total} {what}", file=sys.stderr, flush=True)

    for packaged in package(
        [] if name == "base" else specs_of(sizes_of(name)),
        [native_target()],
        folder / "bundle",
        records_dir=folder / "no_records",  # untuned defaults, whatever was tuned here
        base=True,
        jobs=jobs,
        progress=progress,
    ):
        for spec, reason in packaged.failures.items():
            print(f"{spec}: {reason}", file=sys.stderr)
        if packaged.failures:
            sys.exit(f"{name}: {len(packaged.failures)} artifacts could not be built")
    (folder / "built").touch()


if __name__ == "__main__":
    print(bundle(sys.argv[1], int(sys.argv[2])))
