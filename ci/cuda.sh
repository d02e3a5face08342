#!/usr/bin/env bash
# Every common spec and every base spec for every CUDA architecture: nvcc compiles the untuned defaults
# (1,246 cases), and none may keep anything outside registers; and all tests of the tensor-core
# programs, executed on PoCL. Wants nvcc; no GPU. Two processes, 45 minutes or less;
# TVMPAGED_TEST_JOBS sets their number, further arguments go to pytest. ci/check.sh has a few of each.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/telemetry.sh

bash ci/setup.sh
TVMPAGED_TEST_SPECS=full .venv/bin/python -m pytest -n "${TVMPAGED_TEST_JOBS:-2}" \
    tests/test_cuda_build.py tests/test_walk_warps.py tests/test_warp_faults.py \
    tests/test_warp_edges.py "$@"
