#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Create .venv in the current directory and install the pinned versions; called by the Makefile.
# Reads PYTHON (interpreter, may be empty), TORCH_VERSION and TORCH_INDEX (may be empty).
set -eu

say() { printf 'venv: %s\n' "$*"; }
die() { printf 'venv: error: %s\n' "$*" >&2; exit 1; }
supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null
}

python=${PYTHON:-}
if [ -n "$python" ]; then
    supported "$python" || die "PYTHON=$python is not Python 3.11 or 3.12: name one that is"
else
    for candidate in python3.11 python3.12 python3 python; do
        if supported "$candidate"; then python=$candidate; break; fi
    done
    [ -n "$python" ] || die "found no Python 3.11 or 3.12: install one or name it, make PYTHON=/path/to/python3.11"
fi
command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null ||
    say "note: no C compiler found; kernels that compile at run time need one (Debian: apt-get install gcc)"

if [ -x .venv/bin/python ] && ! supported .venv/bin/python; then
    say "the .venv that is here is of another Python; making it anew"
    rm -rf .venv
fi
if [ ! -x .venv/bin/python ]; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python lacks the venv module: install it (Debian: apt-get install python3-venv) or set PYTHON"
    say "creating .venv with $("$python" --version)"
    "$python" -m venv .venv
fi

# Another torch than the pinned one brings another triton.
pins=constraints.txt
if ! grep -qx "torch==$TORCH_VERSION" constraints.txt; then
    pins=.venv/constraints.txt
    grep -v -E '^(torch|triton)==' constraints.txt > "$pins"
fi
install() {
    .venv/bin/python -m pip install --disable-pip-version-check -c "$pins" "$@" ||
        die "pip could not install the pinned packages (see above); is the package registry reachable?"
}

# torch by itself and first: no other package's wish for torch may then choose a build of it.
say "installing torch $TORCH_VERSION (0.2 GB for CPU builds, 3 GB and more with CUDA) ..."
if [ -n "${TORCH_INDEX:-}" ]; then
    install "torch==$TORCH_VERSION" --extra-index-url "$TORCH_INDEX"
else
    install "torch==$TORCH_VERSION"
fi
say "installing $(grep -c == constraints.txt) pinned packages and this checkout ..."
install -qq setuptools
install -qq --no-build-isolation --config-settings editable_mode=compat \
    -e ./megatron_core -e '.[monitor,data,serve,dev]'
say "ready: .venv ($(.venv/bin/python --version), torch $(.venv/bin/python -c 'import torch; print(torch.__version__)'))"
