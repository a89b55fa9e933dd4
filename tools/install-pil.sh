#!/bin/sh
# PIL for the environment whose python is $1: pillow-simd, built from source, or plain pillow where that cannot be built.
# Both own the module PIL, so there is only ever one of them in an environment.
set -eu
python=$1

has() {
    "$python" -c "import importlib.metadata as m, sys; m.version(sys.argv[1])" "$1" 2>/dev/null
}

if has pillow-simd && "$python" -c "import PIL.Image" 2>/dev/null; then
    exit 0
fi
log=$(mktemp)
directory=$(mktemp -d)
trap 'rm -rf "$log" "$directory"' EXIT
if "$python" -m pip wheel --quiet --no-deps --wheel-dir "$directory" --constraint constraints.txt pillow-simd >"$log" 2>&1; then
    if has pillow; then
        "$python" -m pip uninstall --quiet --yes pillow
    fi
    "$python" -m pip install --quiet --no-deps --no-index --find-links "$directory" pillow-simd
    exit 0
fi
tail -n 15 "$log"
echo "note: pillow-simd could not be built (see above); using plain pillow, which resamples several times slower"
"$python" -m pip install --quiet --constraint constraints.txt pillow
