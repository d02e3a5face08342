#!/usr/bin/env bash
# mypy over the whole package. mypy does not know setuptools' package-dir, so it is shown the tree
# as it is installed: links, with runtime/ and schedules/ inside tvmpaged/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

rm -rf build/typecheck/tvmpaged
mkdir -p build/typecheck/tvmpaged
ln -s "$root"/tvmpaged/* "$root/runtime" "$root/schedules" build/typecheck/tvmpaged/
cd build/typecheck
exec "$root/.venv/bin/python" -m mypy --config-file "$root/pyproject.toml" \
    --cache-dir "$root/.mypy_cache" -p tvmpaged "$@"
