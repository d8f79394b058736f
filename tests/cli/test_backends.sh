#!/usr/bin/env bash
# test_backends.sh FOVEA: fovea bench with several backends and shared prefixes, and the table of backends with
# the reasons of those that refuse; as text and as JSON, and what wrong values give.
set -uo pipefail
fovea=$1
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib.sh"

mha='{"TRITON_ATTN", "ROCM_AITER_UNIFIED_ATTN", "ROCM_ATTN", "ROCM_AITER_FA"}'

# --- fovea bench --backend all: a row for each backend that serves the problem, with what it uses -----------
bench() { # bench CHECK PATTERN_OR_EXPRESSION OPTION...
    local check=$1 what=$2
    shift 2
    $check "$what" "$fovea" bench --threads 2 --min-time 0.001 --repeat 2 --kernels best --heads 4/2 --head-size 64 "$@"
}
measured='[r for r in d["rows"] if "median_us" in r]'
bench json_holds "names($measured) == $mha" --backend all --json 2q1s128
bench json_holds "{(r['batch'], r['backend']) for r in $measured} == {(b, n) for b in ('q1s64', 'q20s90') for n in $mha}" \
    --backend all --json q1s64 q20s90
bench json_holds "all(r['workspace_bytes'] > 0 and r['plan_buffer_bytes'] > 0 and r['layout'] for r in $measured)" \
    --backend all --json 2q1s128
bench json_holds "len({r['layout'] for r in $measured}) == 4" --backend all --json 2q1s128
bench json_holds "len(d['best_of_batch']) == 1 and names(d['best_of_batch']) <= $mha" --backend all --json 2q1s128
bench json_holds "min(b['worst_ratio'] for b in d['backends'] if b['measured']) == 1" --backend all --json q1s64
bench prints '^ROCM_AITER_FA +[0-9.]+ +2q1s128 +[01] of 1$' --backend all 2q1s128
bench prints '^2q1s128,ROCM_ATTN,' --backend all --csv 2q1s128
# A layout that only some take: the others are named with their reason, and the run goes on.
bench prints 'TRITON_ATTN +[a-z0-9_]+ +skipped: .*layout x_packed not supported \(accepted: .*nb_2_bs_h_d' \
    --backend all --layout x_packed q1s64
bench json_holds "names($measured) == {'ROCM_ATTN'}" --backend all --layout x_packed --json q1s64
bench json_holds "all(b['refused'] == 1 for b in d['backends'] if b['backend'] != 'ROCM_ATTN')" \
    --backend all --layout x_packed --json q1s64
bench json_holds "names($measured) == $mha" --backend all --kv-cache-dtype int8 --json q1s64
bench json_holds "names($measured) == $mha" --backend all --window 40 --soft-cap 20 --sinks --alibi --json 2q3s100
bench prints '^q1s64 +ROCM_AITER_FA ' --backend ROCM_AITER_FA q1s64

# Runs that are asked for are made whatever they take, of the reference where it is.
bench json_holds "[r['runs'] for r in d['rows']] == [7]" --min-time 0 --repeat 7 --json q1s64
bench json_holds "[r['runs'] for r in d['rows']] == [7]" --min-time 0 --repeat 7 --kernels reference --json q1s64
# Quiet runs are those that count, of ten times as many as are asked for at most; all count where none is.
bench json_holds "all(r['runs'] == (r['quiet_runs'] or r['all_runs']) <= r['all_runs'] <= 30 for r in d['rows'])" \
    --quiet --repeat 3 --backend all --json 2q1s64
bench json_holds "d['quiet_limit_us'] > 0" --quiet --json q1s64
bench prints ' runs quiet(, all count)?$' --quiet q1s64
bench prints '^q1s64,.*,,,,[0-9]+,[0-9]+$' --quiet --csv q1s64
bench prints '^q1s64,.*,,,,,$' --csv q1s64
# Neighbours are batches of one backend with the same kernels, and the reference kernels have none.
bench prints '^4 steps between neighbours' --backend all --cliffs q1s64 q1s65
prints '^2 steps between neighbours' "$fovea" bench --threads 2 --min-time 0.001 --repeat 2 --heads 4/2 --head-size 64 \
    --cliffs q1s64 q1s65 q1s66

# --- shared prefixes -----------------------------------------------------------------------------------------
bench prints 'first 64 keys of a group shared' --backend all --shared-prefix 64 --cascade always 4q1s100
bench json_holds "d['shared_prefix'] == 64 and names($measured) == $mha" \
    --backend all --shared-prefix 64 --cascade off --json 4q1s100
bench json_holds "names($measured) == $mha" --backend all --shared-prefix 1000 --cascade auto --json 4q1s100
bench json_holds "'shared_prefix' not in d or not d['shared_prefix']" --shared-prefix 0 --json q1s64

why() { # why CHECK PATTERN_OR_EXPRESSION OPTION...
    local check=$1 what=$2
    shift 2
    $check "$what" "$fovea" backends --why "$@"
}
why prints 'cascade: sequences 0 to 3 share 512 keys; .* taken, as asked for' --shared-prefix 512 --cascade always 4q1s1k
why prints 'sequences 0 to 7 share 2048 keys; gain \+[0-9]+' --shared-prefix 2048 8q1s4k
why prints 'cascade: 1 shared prefixes, 512 keys' --shared-prefix 512 --cascade always 4q1s1k
why json_holds "len(d['shared_prefixes']) == 2" --shared-prefix 512 --cascade always --json 4q1s1k_3q1s2k
why json_holds "d['shared_prefixes'] == []" --json 4q1s1k
why json_holds "all('cascade' not in b['plan'] for b in d['backends'] if 'plan' in b)" --shared-prefix 512 --cascade off --json 4q1s1k
why json_holds "all('cascade: 2 shared' in b['plan'] for b in d['backends'] if b['serves'])" \
    --shared-prefix 512 --cascade always --json 4q1s1k_3q1s2k

# --- fovea backends --why ------------------------------------------------------------------------------------
why prints 'auto takes ROCM_AITER_UNIFIED_ATTN$'
for backend in TRITON_ATTN ROCM_AITER_UNIFIED_ATTN ROCM_ATTN ROCM_AITER_FA; do
    why prints "^ +[0-9-]+ +$backend +(chosen|can) "
done
why json_holds "$mha <= names(d['backends'])" --json
why json_holds "[b['rank'] for b in d['backends'] if b['rank']] == sorted(b['rank'] for b in d['backends'] if b['rank'])" --json
why json_holds "[b['name'] for b in d['backends'] if b['answer'] == 'chosen'] == [d['auto']]" --json
why json_holds "all(bool(b['why_not']) != b['serves'] for b in d['backends'])" --json --layout x_packed
why json_holds "d['auto'] == 'ROCM_ATTN'" --json --layout x_packed
why json_holds "d['auto'] == 'ROCM_AITER_FA'" --json --layout shuffled
why prints 'auto takes ROCM_ATTN$' --layout x_packed
why prints '^ +- layout x_packed not supported \(accepted: .*packed_nhd' --layout x_packed
why prints '^ +- head_size not supported \(33, ' --head-size 33
why prints '^ +- ALiBi not supported with attention type cross' --type cross --alibi
why prints '^ +- attention type cross not supported' --type cross
why json_holds "'with weights, float32, cache float32' in d['problem']" --mla=weights --json
why json_holds "'with weights, bfloat16, cache bfloat16' in d['problem']" --mla=weights --dtype bfloat16 --json
why prints '^layer kind sliding_window; ' --window 128
why prints '^layer kind encoder_only_attention; ' --type encoder
why json_holds "d['layer_kind'] == 'cross_attention'" --type cross --json
# All reasons of a refusal, not the first.
why json_holds "any(len(b['why_not']) >= 2 for b in d['backends'])" --type cross --tree-mask --layout shuffled --json
# With a batch: what each plan does.
why prints 'kv_gather \([0-9]+ rows\)' q100s5k # a line may end before it
why prints 'partitioned decode' q1s5k
why json_holds "all(b['workspace_bytes'] > 0 and 'last step' in b['plan'] for b in d['backends'] if b['serves'])" \
    --json 2q1s1k_q100s5k
prints 'ROCM_AITER_FA +' "$fovea" backends
json_holds "$mha <= names(d['backends'])" "$fovea" backends --json

# --- wrong values --------------------------------------------------------------------------------------------
for command in "bench" "backends --why"; do
    wrong() { # wrong PATTERN OPTION...
        local pattern=$1
        shift
        # shellcheck disable=SC2086 # the command is one or two words
        refuses "$pattern" "$fovea" $command "$@"
    }
    wrong "cascade is 'maybe'; accepted: auto, off, always" --cascade maybe q1
    wrong "cascade needs a value" --cascade
    wrong "shared-prefix is 'x'; accepted: a whole number from 0" --shared-prefix x q1
    wrong "shared-prefix is '-1'; accepted" --shared-prefix -1 q1
    wrong "shared-prefix is '99999999999'; accepted" --shared-prefix 99999999999 q1
    wrong "shared-prefix needs a value" --shared-prefix
    wrong "decode-threshold.*accepted" --decode-threshold none q1
    wrong "max-workspace.*accepted" --max-workspace lots q1
    wrong "layout.*accepted|accepted.*x_packed" --layout diagonal q1
    wrong "kv-scaling.*accepted" --kv-scaling row q1
    wrong "type.*accepted.*encoder" --type decorder q1
    wrong "path.*accepted" --path 4d q1
    wrong "alibi.*accepted.*sqrt" --alibi=cubic q1
    wrong "window.*accepted" --window wide q1
    wrong "shared-prefix does not go with --type encoder.*accepted" --type encoder --shared-prefix 16 4q64
    wrong "segment-keys is 64 without.*accepted: with --path 3d or --batch-invariant" --segment-keys 64 q1s4k
    wrong "segment-keys is 64 without.*accepted" --segment-keys 64 --path 2d q1s4k
done
for option in "--cascade off" "--decode-threshold 2" "--max-workspace 1" "--variant nonsense" "--path 3d" \
    --batch-invariant --static-grid --static-list "--shared-prefix 16"; do
    # shellcheck disable=SC2086 # an option and its value
    refuses "^fovea backends: ${option%% *} without a batch; accepted: with SPEC" "$fovea" backends --why $option
done
# What is asked for is what a refusal says is enough.
refuses "max_workspace_bytes is 1024; accepted: .* from [0-9]+ bytes, [0-9]+ KiB, on" "$fovea" bench --threads 2 \
    --max-workspace 1 q1s8k
enough=$(grep -oE '[0-9]+ KiB' "$work/err")
bench json_holds "d['rows'][0]['workspace_bytes'] > 0" --heads 32/8 --head-size 128 --max-workspace "${enough% KiB}" \
    --json q1s8k
why prints 'attend_paged' --path 3d --segment-keys 64 q1s4k
refuses "NOPE.*ROCM_AITER_FA" "$fovea" bench --backend NOPE q1
refuses "'ALL'.*TRITON_ATTN" "$fovea" bench --backend ALL q1
refuses "ROCM_AITER_FA is not valid.*layout x_packed not supported .accepted" \
    "$fovea" bench --backend ROCM_AITER_FA --layout x_packed q1
refuses "needs a value" "$fovea" bench --backend
refuses "no device 'abacus'.*available: cpu|abacus.*cpu" "$fovea" backends --device abacus
refuses "batch|q9s4" "$fovea" backends --why q9s4
refuses "backends.*accepted.*TRITON_ATTN" "$fovea" check --backends TRITON,ROCM_ATTN

finish
