#!/bin/bash
# Resolves requirements/{gpu,cpu}.in into lock files with hashes; the CPU machine gets the GPU machine's versions.
set -euo pipefail
cd "$(dirname "$0")"
uv="../$VENV/bin/uv"
compile="$uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --override overrides.txt"
$compile gpu.in -o gpu.lock
grep -E '^[A-Za-z0-9_.-]+==' gpu.lock | sed 's/ *\\$//' > /tmp/gpu-pins.txt
$compile --constraint /tmp/gpu-pins.txt cpu.in -o cpu.lock
