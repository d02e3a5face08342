"""A worker that compiles, on one core: ``{spec, target, choices, path}`` -> ``{}``.

With ``"explain": true`` it writes the program and its assembly beside that path instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.child import serve


def compile_one(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one candidate into a shared library."""
    from tvmpaged.build import build_artifact

    if request.get("ping"):
        return {}
    path, choices = Path(request["path"]), request["choices"]
    spec, target = AttentionSpec.parse(request["spec"]), TargetKey.parse(request["target"])
    if request.get("explain"):
        return _explain(spec, target, choices, path)
    # A compiler that dies half-way leaves no file of that name.
    partial = path.with_suffix(".partial.so")
    build_artifact(spec, target, choices, partial)
    partial.rename(path)
    return {}


def _explain(
    spec: AttentionSpec, target: TargetKey, choices: dict[str, Any], path: Path
) -> dict[str, Any]:
    import tvm

    from tvmpaged.build import build_module, tvm_target

    module = build_module(spec, target, choices)
    path.with_suffix(".py").write_text(module.script(), encoding="utf-8")
    compiled = tvm.compile(module, target=tvm_target(target))
    path.with_suffix(".s").write_text(compiled.mod.inspect_source("asm"), encoding="utf-8")
    return {}


if __name__ == "__main__":
    serve(compile_one)
