#!/usr/bin/env bash
# bench.sh SPEC...: runs `fovea bench` and keeps the result in bench/results/<cpu>-<date>.json, which
# `fovea bench --compare` reads.
set -euo pipefail
cd "$(dirname "$0")/.."
cpu=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1 | tr -cs 'A-Za-z0-9\n' '-' | tr 'A-Z' 'a-z')
FOVEA_COMMIT=$(git describe --always --dirty 2>/dev/null || echo unknown)
export FOVEA_COMMIT
mkdir -p bench/results
result="bench/results/${cpu:-unknown}-$(date -u +%Y-%m-%d).json"
build/fovea bench "$@" --output "$result"
echo
echo "kept in $result; compare later with: build/fovea bench $* --compare $result"
