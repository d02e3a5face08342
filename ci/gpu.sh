#!/usr/bin/env bash
# On a machine with a GPU, torch and no network, in at most 8 minutes: are the kernels right, how fast
# are they, and which candidates are the best? From what ci/gpu_pack.sh packed elsewhere.
# Usage: bash ci/gpu.sh PACK --out DIR [--device cuda:0] [--minutes 8] [--allow-busy]
#
# DIR gets table.txt, report.json with all numbers, and results.json, which is put back into PACK's
# candidates/ for `tvmpaged tune --import-results` where it was packed. PYTHON names the interpreter
# (default python3). With --device cpu it rehearses on artifacts for this CPU.
set -euo pipefail
(($# >= 1)) && [[ -d $1/site ]] || { echo "usage: bash ci/gpu.sh PACK --out DIR" >&2; exit 2; }
pack=$(cd "$1" && pwd)
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/telemetry.sh"
unset "${!TVMPAGED_@}"
export PYTHONPATH=$pack/site${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# The checkout that this may be started in holds a tvmpaged, too.
export PYTHONSAFEPATH=1
exec "${PYTHON:-python3}" "$here/gpu_run.py" "$pack" "$@"
