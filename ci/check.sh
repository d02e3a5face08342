#!/usr/bin/env bash
# Everything that must hold before a change is merged. Stops at the first step that fails.
# TVMPAGED_TEST_JOBS sets the number of test processes (default 2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/telemetry.sh

jobs=${TVMPAGED_TEST_JOBS:-2}
# One seed here, so that a merge does not hang on a draw; ci/full.sh and plain pytest draw afresh.
export TVMPAGED_TEST_SEED=${TVMPAGED_TEST_SEED:-20261130}
# Idle OpenMP threads of one test process would otherwise spin on the core the other one needs.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-20000}
current=""
passed=()

finish() {
    local status=$?
    printf '\n'
    ((${#passed[@]})) && printf 'passed  %s\n' "${passed[@]}"
    if ((status)); then
        printf 'FAILED  %s (exit code %d)\n' "$current" "$status"
    else
        printf 'ci/check.sh: all passed in %d s\n' "$SECONDS"
    fi
}
trap finish EXIT

step() {
    current=$1
    shift
    local begin=$SECONDS
    printf '\n== %s\n' "$current"
    "$@"
    passed+=("$current ($((SECONDS - begin)) s)")
}

# The files whose tests are marked as runtime, so that no other file is even imported.
runtime_tests() {
    local files
    mapfile -t files < <(grep -rlE --include='test_*.py' 'pytest\.mark\.runtime\b' tests | sort)
    ((${#files[@]})) || { echo "no test is marked with pytest.mark.runtime"; return 1; }
    export PYTHONPATH=ci/no_tvm
    if "$python" -c 'import tvm' 2>/dev/null; then
        echo "tvm can still be imported: ci/no_tvm is without effect"
        return 1
    fi
    "$python" -m pytest -n "$jobs" -m runtime "${files[@]}"
}

python=.venv/bin/python
step "setup" bash ci/setup.sh
step "ruff check" "$python" -m ruff check .
step "ruff format" "$python" -m ruff format --check .
step "mypy" bash ci/typecheck.sh
step "tests" "$python" -m pytest -n "$jobs"
step "runtime tests without the compiler" runtime_tests
