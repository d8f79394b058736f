#!/usr/bin/env bash
# test_bench_device.sh FOVEA PLUGINS: fovea bench on a device other than the CPU: the null device of the folder
# PLUGINS, whose clock counts events, so that times mean nothing and everything else does.
set -uo pipefail
fovea=$1 plugins=$2
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib.sh"
export FOVEA_PLUGIN_PATH=$plugins

bench() { # bench CHECK PATTERN_OR_EXPRESSION OPTION...
    local check=$1 what=$2
    shift 2
    $check "$what" "$fovea" bench --device null --min-time 0 --repeat 2 --heads 4/2 --head-size 32 "$@"
}
bench prints 'GEMM 64: bf16' 2q1s64
bench prints '^2q1s64 +[A-Z_]+ +null +' 2q1s64
bench json_holds "d['device'].startswith('null device') and d['empty_graph_us'] == 1" --json 2q1s64
row="d['rows'][0]"
bench json_holds "${row}['median_us'] == ${row}['list_us'] == ${row}['plain_us'] == ${row}['read_us'] == 1" --json 2q1s64
bench json_holds "${row}['cache_copies'] >= 2 and ${row}['state'] == 'cold'" --json 2q1s64
bench json_holds "${row}['read_bytes'] == 2 * 64 * 2 * 2 * 32 * 2" --json 2q1s64
bench json_holds "len([r for r in d['rows'] if 'median_us' in r]) >= 3" --backend all --json 2q1s64
bench json_holds "len(d['rows']) == 2" --kv-cache-dtype int8 --json q1s40 q20s90
bench prints '2 steps between neighbours' --cliffs q1s64 2q1s64 3q1s64
bench prints '^q1s64,' --csv q1s64
bench prints ',skipped,list_us,plain_us,quiet_runs,all_runs$' --csv q1s64
bench prints '^q1s64,.*,[0-9]+[.][0-9]+,[0-9]+[.][0-9]+,,$' --csv q1s64
refuses '^fovea bench: --quiet does not go with --device null, .*; accepted: cpu$' "$fovea" bench --device null --quiet q1s64
"$fovea" bench --device null --min-time 0 --repeat 2 --output "$work/old.json" q1s64 >"$work/out" 2>"$work/err"
prints '1.00 x the old speed' "$fovea" bench --device null --min-time 0 --repeat 2 --compare "$work/old.json" q1s64
other=("$fovea" bench --device null --min-time 0 --heads 4/2 --compare "$work/old.json" q1s64)
runs "${other[@]}" && judge "$(grep -q 'x the old speed' "$work/out" && echo 'rows of another problem compared')" "${other[@]}"
refuses "no kernels 'reference' on device null" "$fovea" bench --device null --kernels reference q1s64

layer() { # layer CHECK PATTERN OPTION...
    local check=$1 what=$2
    shift 2
    $check "$what" "$fovea" bench mla-layer --device null --batch 3 --dim 64 --heads 2 --length 70 --repeat 2 "$@"
}
layer prints '^  W_o '
layer json_holds "d['device'].startswith('null device') and len(d['lengths'][0]['stages']) == 6" --json
layer refuses 'repeat does not go with --check.*accepted' --check
sizes=("$fovea" bench mla-layer --device null --batch 3 --dim 64 --heads 2 --length "70, 80")
prints 'length 70: largest relative error .* 0\.0[01]' "${sizes[@]}" --check
prints 'length 80: largest relative error .* 0\.0[01]' "${sizes[@]}" --check --rotated
refuses 'json does not go with --check.*accepted' "${sizes[@]}" --check --json
finish
