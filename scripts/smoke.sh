#!/usr/bin/env bash
# Builds the sdist, the wheel from it, installs that into an empty environment and uses it outside the tree.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
unset PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

make install
.venv/bin/python -m build --no-isolation --outdir "$work/dist" . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
.venv/bin/python -m venv --without-pip "$work/env"
.venv/bin/python -m pip --python "$work/env/bin/python" install -q -c constraints.txt "$work"/dist/*.whl

# Every tracked file of the two packages is in the wheel.
git ls-files hfaccel kernels/hfaccel_kernels | sed 's|^kernels/||' | sort >"$work/tracked"
"$work/env/bin/python" -m zipfile -l "$work"/dist/*.whl | awk '{print $1}' | sort >"$work/packed"
missing=$(comm -23 "$work/tracked" "$work/packed")
[ -z "$missing" ] || { printf 'not in the wheel:\n%s\n' "$missing"; exit 1; }

cd "$work"
HFACCEL_CACHE="$work/cache" HF_HUB_OFFLINE=1 PATH="$work/env/bin:$PATH" ./env/bin/python "$root/scripts/smoke.py"
