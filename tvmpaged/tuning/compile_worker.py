"""A worker that compiles, on one core: ``{spec, target, choices, path}`` -> ``{}``.

With ``"explain": true`` it writes the program, and its assembly or CUDA source, beside that path
instead -> ``{files}``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tvmpaged.compile_pool import build_in_child
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.child import serve


def compile_one(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one candidate into a shared library."""
    if request.get("ping"):
        return {}
    path, choices = Path(request["path"]), request["choices"]
    spec, target = AttentionSpec.parse(request["spec"]), TargetKey.parse(request["target"])
    if request.get("explain"):
        return _explain(spec, target, choices, path)
    # A compiler that dies half-way leaves no file of that name.
    partial = path.with_suffix(".partial.so")
    build_in_child(spec, target, choices, partial)
    partial.rename(path)
    return {}


def _explain(
    spec: AttentionSpec, target: TargetKey, choices: dict[str, Any], path: Path
) -> dict[str, Any]:
    from tvmpaged.build import build_module, tvm_target

    module = build_module(spec, target, choices)
    texts = {".py": module.script()}
    if target.kind == "cuda":
        from tvmpaged.cuda_child import compile_here

        texts[".cu"] = compile_here(module, target)[0].mod.imports[0].inspect_source("cuda")
    else:
        import tvm

        texts[".s"] = tvm.compile(module, target=tvm_target(target)).mod.inspect_source("asm")
    for suffix, text in texts.items():
        path.with_suffix(suffix).write_text(text, encoding="utf-8")
    return {"files": [str(path.with_suffix(suffix)) for suffix in texts]}


if __name__ == "__main__":
    serve(compile_one)
