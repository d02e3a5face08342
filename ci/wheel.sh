#!/usr/bin/env bash
# Builds the wheel and the sdist into DIR.   Usage: bash ci/wheel.sh DIR
#
# The wheel carries TVM's runtime libraries from the pinned apache-tvm and the base bundle for every
# CPU with AVX2, so that serving needs no compiler. It is built out of the unpacked sdist: what the
# sdist lacks, the wheel would lack too.
set -euo pipefail
(($# == 1)) || { echo "usage: bash ci/wheel.sh DIR" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/telemetry.sh
python=$PWD/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Asked of the metadata, not of the package: importing it takes a second and changes nothing.
read -r tvm version platform < <("$python" - <<'PYTHON'
from importlib.metadata import distribution

tvm = distribution("apache-tvm")
tags = [line.split()[-1] for line in tvm.read_text("WHEEL").splitlines() if line.startswith("Tag")]
print(tvm.locate_file("tvm"), tvm.version, tags[-1].split("-")[-1])
PYTHON
)

# A copy of what git knows: no build left from before can slip in, and the checkout keeps finding
# the libraries of whatever apache-tvm is installed.
mkdir "$work/tree" "$work/sdist"
git ls-files -z --cached --others --exclude-standard |
    tar --create --null --files-from=- --ignore-failed-read | tar --extract -C "$work/tree"

bundles=$work/tree/tvmpaged/data/bundles
.venv/bin/tvmpaged package --target cpu/x86-64-v3 --base --out "$bundles" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; exit 1; }
find "$bundles" -name .lock -delete

lib=$work/tree/tvmpaged/data/lib
mkdir -p "$lib"
cp "$tvm"/lib/libtvm_runtime.so "$tvm"/lib/libtvm_runtime_cuda.so "$lib"
cp -r "$tvm"/LICENSE "$tvm"/NOTICE "$tvm"/licenses "$lib"
printf '%s\n' "$version" >"$lib/VERSION"

build() {
    "$python" -m build --no-isolation --outdir "$work/dist" "$@" >"$work/log" 2>&1 ||
        { cat "$work/log" >&2; exit 1; }
}
build --sdist "$work/tree"
tar --extract --strip-components=1 -C "$work/sdist" -f "$work"/dist/tvmpaged-*.tar.gz
build --wheel -C--build-option=--plat-name="$platform" "$work/sdist"
cp "$work"/dist/* "$out"
ls -l "$out"
