#!/usr/bin/env bash
# Installs a wheel in an empty environment, as a user who only serves would, and tries it there.
# Usage: bash ci/wheel_test.sh WHEEL
set -euo pipefail
(($# == 1)) && [[ -f $1 ]] || { echo "usage: bash ci/wheel_test.sh WHEEL" >&2; exit 2; }
wheel=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
ci=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$ci/telemetry.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${TVMPAGED_PYTHON:-python3.11}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip --disable-pip-version-check install --quiet --quiet \
    -c "$ci/constraints.txt" "$wheel"

# Away from the checkout, so that only what is installed can be found.
cd "$work"
export PATH="$work/venv/bin:$PATH"
export XDG_CACHE_HOME=$work/cache
unset PYTHONPATH "${!TVMPAGED_@}"
python - <<'PYTHON'
import importlib.util

from tvmpaged import tvm_libs

for module in ("tvm", "xgboost", "mlflow", "transformers"):
    assert importlib.util.find_spec(module) is None, f"{module} came with the base requirements"
for name in (tvm_libs.RUNTIME, tvm_libs.RUNTIME_CUDA):
    place = tvm_libs.find(name)
    assert place.parent.name == "lib" and place.parent.parent.parent.name == "tvmpaged", place
    print(f"{name}: {place.stat().st_size / 1e6:.1f} MB")
assert (place.parent / "NOTICE").is_file()
PYTHON
tvmpaged --help >/dev/null
tvmpaged env
tvmpaged env --json | python -c 'import json, sys; assert json.load(sys.stdin)["schema_version"]'
tvmpaged show
tvmpaged verify "$(python -c 'import tvmpaged; print(tvmpaged.__path__[0])')/data/bundles" --static
python - <<'PYTHON'
import numpy as np
import torch

import tvmpaged

attn = tvmpaged.PagedAttention(num_qo_heads=6, num_kv_heads=2, head_dim=72, dtype="bfloat16")
assert attn.describe()["kind"] == "generic" and "data/bundles" in attn.describe()["artifact"]
k_cache, v_cache = attn.new_cache(num_blocks=4)
step = (np.array([0, 20, 21]), np.array([20, 9]), np.array([[3, 0], [2, -1]]))
plan = attn.plan(*step)
k, v, q = (torch.randn(21, heads, 72, dtype=torch.bfloat16) for heads in (2, 2, 6))
attn.append_kv(k, v, k_cache, v_cache, plan.slot_mapping)
out = attn.run(plan, q, k_cache, v_cache).double().numpy()
truth = tvmpaged.reference.paged_attention(q, k_cache, v_cache, *step)
error = np.linalg.norm(out - truth) / np.linalg.norm(truth)
assert error < 5e-3, error
print(f"attention from the wheel's own bundle: relative error {error:.1e}")
PYTHON
echo "ci/wheel_test.sh: $(basename "$wheel") works"
