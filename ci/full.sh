#!/usr/bin/env bash
# The long checks, beyond ci/check.sh: every kernel of the full product of sizes against the
# reference; a real search, killed ten times. Stops at the first step that fails. TVMPAGED_TEST_JOBS sets the number of processes
# (default 2); further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/telemetry.sh

jobs=${TVMPAGED_TEST_JOBS:-2}
python=.venv/bin/python

bash ci/setup.sh
printf '\n== compile the full product\n'
"$python" tests/kernel_bundles.py full "$jobs"
printf '\n== the full product against the reference\n'
TVMPAGED_TEST_SPECS=full "$python" -m pytest -n "$jobs" tests/test_kernels.py "$@"
printf '\n== kill a real search at random moments, and resume it\n'
"$python" ci/kill_tune.py
printf '\nci/full.sh: all passed in %d s\n' "$SECONDS"
