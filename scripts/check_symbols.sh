#!/usr/bin/env bash
# check_symbols.sh BUILD: the libraries of a build export exactly what is declared FV_API, all of it
# fv_*, and libfovea needs nothing but libc, libm and the loader.
set -euo pipefail
build=${1:?usage: check_symbols.sh BUILD}
cd "$(dirname "$0")/.."
fail=0

# Names of the functions that are declared FV_API in the given headers and headers' folders.
declared() {
    find "$@" -name '*.h' -print0 | xargs -0 cat | tr '\n' ' ' | grep -oE 'FV_API [^;(]*\(' |
        grep -oE 'fv_[a-z0-9_]+\(' | tr -d '(' | sort -u
}
exported() { nm -D --defined-only "$1" | awk '{print $3}' | sort -u; }

differ() { # differ LIBRARY DECLARED
    local difference
    difference=$(diff <(echo "$2") <(echo "$(exported "$1")") || true)
    [ -z "$difference" ] || { echo "$1: declared FV_API (<) and exported (>) differ:"; echo "$difference"; fail=1; }
}

engine=$(declared include/fovea/engine.h src/engine 2>/dev/null || true)
differ "$build/libfovea.so" "$(declared include src | grep -vxF -e "${engine:-none}")"
[ ! -e "$build/libfovea-engine.so" ] || differ "$build/libfovea-engine.so" "$engine"

needed=$(objdump -p "$build/libfovea.so" | awk '/NEEDED/ {print $2}' | grep -vE '^(libc|libm|ld-linux.*)\.so' || true)
[ -z "$needed" ] || { echo "libfovea.so needs: $needed"; fail=1; }

# No global state that can change: constants with pointers are in .data.rel.ro, not here. What the
# compiler's own run-time brings (the CPU model) is let pass.
writable=$(objdump -t "$build/libfovea.so" | awk '/ O [.](data|bss)\t/ {print $NF}' |
    grep -vE '^(__cpu_model|__cpu_features2|completed\.0|__dso_handle|__TMC_END__)$' || true)
[ -z "$writable" ] || { echo "libfovea.so has global variables: $writable"; fail=1; }
exit $fail
