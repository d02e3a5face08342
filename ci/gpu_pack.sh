#!/usr/bin/env bash
# Packs what ci/gpu.sh needs on a machine with a GPU, torch and nothing else: the project's runtime,
# TVM's runtime libraries, tvm_ffi, a bundle of untuned kernels, and candidates to be measured. Wants
# nvcc here, and no GPU.   Usage: bash ci/gpu_pack.sh DIR [--python 3.12] [--trials 12] ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/telemetry.sh
exec .venv/bin/python ci/gpu_pack.py "$@"
