"""The house's import rules: imports go down only, and serving never reaches the compiler.

`violations` parses every import, those inside functions and under ``TYPE_CHECKING`` included.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: Import name -> folder.
PACKAGES = {
    "tvmpaged": "tvmpaged",
    "tvmpaged.runtime": "runtime",
    "tvmpaged.schedules": "schedules",
}

#: Module or package -> its floor. Whatever is not named here is what a command does: "work".
FLOORS = {
    "tvmpaged": "door",
    "tvmpaged.__main__": "cli",
    "tvmpaged.cli": "cli",
    "tvmpaged.bench": "bench",
    "tvmpaged.bench_case": "bench",
    "tvmpaged.bench_log": "bench",
    "tvmpaged.bench_profile": "bench",
    "tvmpaged.runtime": "runtime",
    "tvmpaged.schedules": "schedules",
    "tvmpaged.kernels": "kernels",
    "tvmpaged.reference": "reference",
    "tvmpaged.bundle": "bundle",
    "tvmpaged.planning": "planning",
    "tvmpaged.worklist": "worklist",
    "tvmpaged.spec": "base",
    "tvmpaged.cpu": "base",
    "tvmpaged.driver": "base",
    "tvmpaged.errors": "base",
    "tvmpaged.files": "base",
    "tvmpaged.freshness": "base",
    "tvmpaged.gpu": "base",
    "tvmpaged.host_memory": "base",
    "tvmpaged.layout": "base",
    "tvmpaged.model_source": "base",
    "tvmpaged.nvcc": "base",
    "tvmpaged.roofs": "base",
    "tvmpaged.sm": "base",
    "tvmpaged.sources": "base",
    "tvmpaged.tvm_libs": "base",
}

_BELOW_WORK = {"schedules", "kernels", "reference", "bundle", "planning", "worklist", "base"}

#: Floor -> the floors it may import, besides itself.
MAY_IMPORT = {
    "door": {"runtime", "reference", "base"},
    "cli": {"bench", "work", "runtime"} | _BELOW_WORK,
    "bench": {"work", "runtime"} | _BELOW_WORK,
    "work": _BELOW_WORK,
    "runtime": {"bundle", "reference", "planning", "worklist", "base"},
    "schedules": {"kernels", "worklist", "base"},
    "kernels": {"worklist", "base"},
    "reference": {"worklist", "base"},
    "bundle": {"base"},
    "planning": {"worklist", "base"},
    "worklist": {"base"},
    "base": set(),
}

COMPILER = {"tvm", "xgboost", "mlflow"}
#: What measures exported candidates, besides the runtime: it runs where there is no compiler.
MEASURING = ("tvmpaged.cli.measure", "tvmpaged.measure", "tvmpaged.tuning.measure_worker")
#: The allocator knows nothing of tensors.
TENSORS = {"torch", "numpy", "tvm_ffi"}
ALLOCATOR = "tvmpaged.runtime.block_manager"


@dataclass(frozen=True)
class Import:
    """One imported name, where it stands, and whether only the type checker sees it."""

    name: str
    line: int
    for_types: bool = False


def modules(root: Path) -> dict[str, Path]:
    """Return every module of the package: import name -> file."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in sorted((root / folder).rglob("*.py")):
            parts = file.relative_to(root / folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((package, *parts))] = file
    return found


def imports(module: str, file: Path, known: dict[str, Path]) -> Iterator[Import]:
    """Yield what `file` imports, our own modules by their full name."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typed = _lines_for_types(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, node.lineno in typed)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*above, base)).rstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                name = full if full in known else base
                yield Import(name, node.lineno, node.lineno in typed)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node.func):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(first.value, node.lineno)


def _lines_for_types(tree: ast.Module) -> set[int]:
    """Return the lines under ``if TYPE_CHECKING``, which never run."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in node.body
        for line in range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)
    }


def _is_dynamic_import(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def floor(module: str) -> str:
    """Return the floor of the nearest named module or package above `module`."""
    name = module
    while name != "tvmpaged":
        if name in FLOORS:
            return FLOORS[name]
        name = name.rpartition(".")[0]
    return FLOORS["tvmpaged"] if module == "tvmpaged" else "work"


def _ours(name: str, known: dict[str, Path]) -> str | None:
    """Return the module of ours that an imported name stands for."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def violations(root: Path) -> list[str]:
    """Return what breaks the rules in the tree at `root`, one line each."""
    known = modules(root)
    found: list[str] = []
    edges: dict[str, set[str]] = {}
    outside: dict[str, list[Import]] = {}
    for module, file in known.items():
        edges[module], outside[module] = set(), []
        for one in imports(module, file, known):
            target = _ours(one.name, known) if one.name.startswith("tvmpaged") else None
            where = f"{file.relative_to(root)}:{one.line}"
            if target is None:
                outside[module].append(one)
            elif target == module:
                continue
            elif target == "tvmpaged":
                found.append(f"{where}: import the module itself, not the lazy names of tvmpaged")
            else:
                if not one.for_types:
                    edges[module].add(target)
                if floor(target) not in MAY_IMPORT[floor(module)] | {floor(module)}:
                    found.append(
                        f"{where}: {module} ({floor(module)}) imports {target} ({floor(target)})"
                    )
    found += [f"imports go round in a circle: {' -> '.join(ring)}" for ring in _rings(edges)]
    return found + _serving(root, known, edges, outside)


def _serving(
    root: Path,
    known: dict[str, Path],
    edges: dict[str, set[str]],
    outside: dict[str, list[Import]],
) -> list[str]:
    """Check the runtime, and what measures, with everything they import."""
    runtime = _reached({module for module in known if floor(module) == "runtime"}, edges)
    measuring = _reached(known.keys() & set(MEASURING), edges)
    found, doors = [], set()
    for module in sorted(runtime | measuring):
        what = "serving" if module in runtime else "measuring"
        for one in outside[module]:
            top = one.name.partition(".")[0]
            where = f"{known[module].relative_to(root)}:{one.line}"
            if top in COMPILER:
                found.append(f"{where}: {what} must not import {top}")
            if top == "tvm_ffi" and module in runtime:
                doors.add(str(known[module].relative_to(root)))
            if module == ALLOCATOR and top in TENSORS:
                found.append(f"{where}: the block manager must not import {top}")
    if len(doors) > 1:
        found.append(f"only one file of the runtime may import tvm_ffi: {', '.join(sorted(doors))}")
    return found


def _reached(start: set[str], edges: dict[str, set[str]]) -> set[str]:
    """Return modules with everything they import, directly or not."""
    reached, queue = set(start), list(start)
    while queue:
        new = edges[queue.pop()] - reached
        reached |= new
        queue += new
    return reached


def _rings(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return circles among modules; a package's own __init__ gathers its modules and is left out.

    Depth first: a ring is an edge back to a module that is still on the path.
    """
    rings: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            rings.append([*path[path.index(module) :], module])
        elif module not in done:
            for target in sorted(edges[module]):
                if not module.startswith(f"{target}."):
                    visit(target, [*path, module])
            done.add(module)

    for module in sorted(edges):
        visit(module, [])
    return rings


def test_the_tree_holds_the_rules() -> None:
    assert violations(ROOT) == []


def test_the_checker_sees_the_whole_tree() -> None:
    known = modules(ROOT)
    for name in ("tvmpaged.spec", "tvmpaged.cli.app", "tvmpaged.runtime", "tvmpaged.schedules"):
        assert name in known


GOOD = {
    "tvmpaged/__init__.py": "",
    "tvmpaged/spec.py": "",
    "tvmpaged/worklist.py": "from tvmpaged.spec import AttentionSpec",
    "tvmpaged/bundle.py": "from tvmpaged import spec",
    "tvmpaged/reference.py": "import numpy",
    "tvmpaged/tune.py": "import tvm\nfrom tvmpaged.schedules import cpu\nimport tvmpaged.bundle",
    "tvmpaged/bench.py": "def run():\n    from tvmpaged.runtime.engine import Engine",
    "tvmpaged/cli/__init__.py": "",
    "tvmpaged/cli/tune.py": "def run():\n    from tvmpaged.tune import tune",
    "tvmpaged/kernels/__init__.py": "",
    "tvmpaged/kernels/merge.py": "import tvm\nfrom tvmpaged.worklist import STEP",
    "schedules/__init__.py": "",
    "schedules/cpu.py": "from tvmpaged.kernels import merge",
    "runtime/__init__.py": "",
    "runtime/kernel_set.py": "import tvm_ffi\nfrom tvmpaged.bundle import resolve",
    "runtime/engine.py": "from tvmpaged.runtime import kernel_set",
    "runtime/block_manager.py": "import collections",
}


def plant(root: Path, **changed: str) -> Path:
    for name, text in (GOOD | changed).items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def test_a_good_planted_tree_passes(tmp_path: Path) -> None:
    assert violations(plant(tmp_path)) == []


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        # Up the stairs, in each way an import can be written.
        ("tvmpaged/spec.py", "import tvmpaged.worklist", "spec.py:1: tvmpaged.spec (base)"),
        ("tvmpaged/spec.py", "from tvmpaged import worklist", "imports tvmpaged.worklist"),
        ("tvmpaged/spec.py", "from . import worklist", "imports tvmpaged.worklist"),
        ("tvmpaged/spec.py", "from .worklist import STEP", "imports tvmpaged.worklist"),
        ("tvmpaged/spec.py", "def f():\n  import tvmpaged.tune", "spec.py:2: tvmpaged.spec"),
        ("tvmpaged/kernels/merge.py", "from ..schedules import cpu", "imports tvmpaged.schedules"),
        ("schedules/cpu.py", "import tvmpaged.tune", "imports tvmpaged.tune (work)"),
        ("tvmpaged/new.py", "import tvmpaged.cli.tune", "tvmpaged.new (work)"),
        (
            "tvmpaged/bundle.py",
            "import importlib\nimportlib.import_module('tvmpaged.tune')",
            "tune",
        ),
        # Only the command line and the benchmark reach serving.
        ("tvmpaged/tune.py", "from tvmpaged.runtime import engine", "imports tvmpaged.runtime"),
        ("tvmpaged/tune.py", "from tvmpaged import Engine", "not the lazy names"),
        (
            "runtime/engine.py",
            "import tvmpaged.kernels.merge",
            "(runtime) imports tvmpaged.kernels",
        ),
        # Serving and all it imports never reach the compiler.
        ("runtime/engine.py", "def f():\n  import tvm.target", "must not import tvm"),
        ("runtime/engine.py", "from mlflow import log_metric", "must not import mlflow"),
        ("tvmpaged/bundle.py", "def f():\n  import xgboost", "bundle.py:2: serving must not"),
        ("runtime/engine.py", "import tvm_ffi", "only one file of the runtime"),
        ("tvmpaged/bundle.py", "import tvm_ffi\n", "only one file of the runtime"),
        ("runtime/block_manager.py", "import torch", "block manager must not import torch"),
        # Nor does what measures where there is no compiler.
        ("tvmpaged/measure.py", "from tvmpaged import tune", "tune.py:1: measuring must not"),
        ("tvmpaged/tuning/measure_worker.py", "import xgboost", "measuring must not import xgb"),
    ],
)
def test_a_planted_violation_is_seen(tmp_path: Path, file: str, text: str, said: str) -> None:
    found = violations(plant(tmp_path, **{file: text}))
    assert any(said in line for line in found), found


def test_two_modules_of_one_floor_may_name_each_others_types(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from tvmpaged import b, a"
    planted = {"tvmpaged/a.py": text, "tvmpaged/b.py": "from tvmpaged import a"}
    assert violations(plant(tmp_path, **planted)) == []
    upward = text.replace("b, a", "tune")
    assert len(violations(plant(tmp_path, **planted, **{"tvmpaged/spec.py": upward}))) == 1


def test_a_circle_through_several_modules_is_seen(tmp_path: Path) -> None:
    planted = {
        "tvmpaged/a.py": "from tvmpaged import b",
        "tvmpaged/b.py": "def f():\n  import tvmpaged.c",
        "tvmpaged/c.py": "from tvmpaged.a import x",
    }
    assert violations(plant(tmp_path, **planted)) == [
        "imports go round in a circle: tvmpaged.a -> tvmpaged.b -> tvmpaged.c -> tvmpaged.a"
    ]
