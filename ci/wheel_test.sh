#!/usr/bin/env bash
# Installs a wheel in an empty environment, as a user who only serves would, and tries it there.
# Usage: bash ci/wheel_test.sh WHEEL
set -euo pipefail
(($# == 1)) && [[ -f $1 ]] || { echo "usage: bash ci/wheel_test.sh WHEEL" >&2; exit 2; }
wheel=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
ci=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
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
echo "ci/wheel_test.sh: $(basename "$wheel") works"
