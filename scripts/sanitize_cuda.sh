#!/usr/bin/env bash
# shellcheck disable=SC2086 # options are split into words
# sanitize_cuda.sh [TOOL...]: NVIDIA's compute-sanitizer over single cases of `fovea check --device cuda`, of every kind of
# kernel, on a GPU: memcheck, racecheck, synccheck, initcheck (all). A line for each case; the exit code is not 0 if one has an
# error or a hazard. build/fovea (or $FOVEA), compute-sanitizer of the path (or $COMPUTE_SANITIZER), and $JOBS cases at once
# (4). Reports go to build/sanitizer (or $REPORTS), with lines of the source where the plugin was configured with
# -DCMAKE_CUDA_FLAGS=-lineinfo. racecheck wants -DFOVEA_CUDA_EACH_ARRIVES=ON, too (docs/cuda.md, "Checking"), and takes up to
# minutes for a case; its --launch-count ends in a fault of the tool's own (13.0.85). SANITIZER_OPTIONS: more of its options.
set -euo pipefail
cd "$(dirname "$0")/.."
fovea=${FOVEA:-build/fovea} sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer} reports=${REPORTS:-build/sanitizer}
tools=${*:-memcheck racecheck synccheck initcheck}
command -v "$sanitizer" >/dev/null || { echo "$sanitizer is not there"; exit 2; }
mkdir -p "$reports"
export fovea sanitizer reports

# Cases, with options behind them where they need some.
cases="
equal_decodes.0
equal_decodes.5
equal_decodes.17
many_decodes.0
many_decodes.3
paged_decode.24
flash.14
flash.20
cascade.0
shared_prefix_verify.0
triton_unified.0
triton_unified.100
triton_unified_diffkv.0
mla_backends.1
mla_backends.3
mla_backends.5
mla_backends.11
mla_decode.55
mla_decode.59
mla_decode.63
mla_decode.111
mla_decode.119
mla_decode.167
mla_decode.171
mla_backends.1 --backends AMLA
mla_decode.63 --backends AMLA
flash.14 --kernels portable
mla_decode.59 --kernels portable
reduce_segments
merge_states
merge_ranks
kv_copy
copy_rows
rope
rope_kv_write
rms_norm
mla_query
mla_weights"

run() { # run TOOL CASE [OPTION...]
    local tool=$1 options=() report
    shift
    report="$reports/$tool.${*// /}"
    report=${report// /}
    [ "$tool" = racecheck ] && options=(--racecheck-report analysis)
    if "$sanitizer" --tool "$tool" "${options[@]}" ${SANITIZER_OPTIONS:-} --error-exitcode 9 \
        "$fovea" check --device cuda --threads 1 --quick --only "$@" >"$report" 2>&1; then
        echo "ok    $tool $*"
    else
        echo "FAIL  $tool $*: $(grep -h SUMMARY "$report" | tr -d =)"
        return 1
    fi
}
export -f run

for tool in $tools; do
    while read -r line; do [ -z "$line" ] || echo "$tool $line"; done <<<"$cases"
done | xargs -P "${JOBS:-4}" -I{} bash -c 'run {}'
