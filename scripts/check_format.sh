#!/usr/bin/env bash
# Every C file is laid out as .clang-format says. --fix lays it out.
set -euo pipefail
cd "$(dirname "$0")/.."
formatter=clang-format-14 # versions differ in detail: all use the one of Debian 12
command -v $formatter >/dev/null || formatter=clang-format
mode=(--dry-run -Werror)
[ "${1:-}" != --fix ] || mode=(-i)
find include src tools tests examples -name '*.[ch]' -print0 | xargs -0 $formatter "${mode[@]}"
