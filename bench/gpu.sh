#!/usr/bin/env bash
# shellcheck disable=SC2086 # lists of batches are split into words
# gpu.sh OUTPUT.json [PART...]: the shapes that attention on a GPU is judged by, in a few minutes, with
# build/fovea (or $FOVEA) on device cuda (or $FOVEA_DEVICE). Tables go to stdout, the rows of all parts but `cliffs`
# to OUTPUT.json, which `fovea bench --compare` reads. Parts: decode, graphs, fp8, verify, prefill, mla, between, layer, cliffs (all).
# Each row takes $FOVEA_MIN_TIME seconds at least (0.2).
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:?usage: gpu.sh OUTPUT.json [PART...]}
shift
all="decode graphs fp8 verify prefill mla between layer cliffs"
parts=${*:-$all}
fovea=${FOVEA:-build/fovea} device=${FOVEA_DEVICE:-cuda}
min_time=${FOVEA_MIN_TIME:-0.2}
FOVEA_COMMIT=${FOVEA_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
export FOVEA_COMMIT
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
count=0

run() { # run OPTION... SPEC...
    count=$((count + 1))
    "$fovea" bench --device "$device" --min-time "$min_time" --output "$work/$(printf %03d $count).json" "$@"
    echo
}

gqa="1q1s1k 1q1s8k 1q1s64k 8q1s1k 8q1s8k 32q1s1k 32q1s8k 128q1s1k 128q1s8k 256q1s4k"

# Attention alone, as peers are timed (--stored), and once with the write of the new keys and values.
decode() {
    run $gqa
    for block_size in 16 64; do run --stored --block-size $block_size $gqa; done
    for shape in "64/8 128" "32/4 128" "32/8 64" "16/8 256"; do
        read -r heads head_size <<<"$shape"
        for block_size in 16 64; do
            run --stored --heads "$heads" --head-size "$head_size" --block-size $block_size 1q1s8k 8q1s8k 32q1s8k 128q1s1k
        done
    done
}

# The same schedule with a graph and without one.
graphs() { run --static-grid 1q1s512 1q1s1k 2q1s1k 4q1s1k 8q1s1k 16q1s1k; }

# K and V of a head apart, and side by side.
fp8() {
    for layout in any packed_nhd; do run --stored --kv-cache-dtype fp8_e4m3 --block-size 64 --layout $layout $gqa; done
}

verify() { run --stored 8q1s8k 8q4s8k 32q1s8k 32q4s8k; }

prefill() {
    for block_size in 16 64 1; do run --block-size $block_size q1k q4k q16k 4q4k 16q128s8k; done
    run --head-size 64 q4k q16k 4q4k
    run --heads 16/8 --head-size 256 q4k q16k 4q4k 16q128s8k
    for block_size in 16 64; do run --kv-cache-dtype fp8_e4m3 --block-size $block_size q1k q4k q16k 4q4k 16q128s8k; done
    run --kv-cache-dtype fp8_e4m3 --head-size 64 q4k q16k 4q4k
    run --kv-cache-dtype fp8_e4m3 --heads 16/8 --head-size 256 q4k q16k 4q4k 16q128s8k
}

mla() {
    run --stored --mla --heads 128 --block-size 64 96q1s1k 96q1s2k 96q1s3k 96q1s4k 96q1s6k 96q1s16k \
        96q2s1k 96q2s2k 96q2s3k 96q2s4k 96q2s6k 96q2s16k 1q1s4k 1q1s32k 4q1s8k
    for heads in 16 64; do run --stored --mla --heads $heads --block-size 64 64q1s8k; done
    run --stored --mla --heads 128 --block-size 64 96q1s4k 32q1s2k_32q1s4k_32q1s6k 48q1s1k_48q1s7k # as many keys
    run --stored --mla --backend AMLA --heads 128 --block-size 64 96q1s1k 96q1s4k 96q1s16k
    for block_size in 1 16; do run --stored --mla --heads 128 --block-size $block_size 96q1s4k; done
    for heads in 16 32 128; do # the 656-byte entry beside bf16
        run --stored --mla --heads $heads --block-size 64 128q1s4k 128q1s32k
        run --stored --mla --heads $heads --block-size 64 --layout latent_fp8_ds --kv-cache-dtype fp8_e4m3 \
            --kv-scaling none 128q1s4k 128q1s32k
    done
}

# Batches that fill no whole rounds of the device's blocks.
between() {
    run --stored --kv-cache-dtype fp8_e4m3 --block-size 64 17q1s4k 20q1s4k 24q1s4k 24q1s16k 34q1s1k 34q1s4k 48q1s2k 72q1s1k
    run --stored --heads 32/1 --block-size 64 1q1s4k 8q1s4k 67q1s4k 100q1s16k 200q1s16k
    for heads in 16 32 64 128; do
        run --stored --mla --heads $heads --block-size 64 34q1s4k 48q1s4k 67q1s4k 80q1s4k 100q1s4k 34q1s16k 67q1s16k 100q1s16k
    done
    # So long that partial results of all would not fit, or more than 256 sequences.
    run --stored --mla --heads 64 --block-size 64 105q1s32k 90q1s64k 105q1s64k 200q1s64k 300q1s4k
}

layer() {
    count=$((count + 1))
    "$fovea" bench mla-layer --device "$device" --repeat 15
    "$fovea" bench mla-layer --device "$device" --repeat 15 --rotated
    "$fovea" bench mla-layer --device "$device" --repeat 15 --json >"$work/$(printf %03d $count).json"
    count=$((count + 1))
    "$fovea" bench mla-layer --device "$device" --repeat 15 --rotated --json >"$work/$(printf %03d $count).json"
    echo
}

# Neighbours: batches of 1, 2, 3 ... 64, and lengths from 512 to 32k by 6%.
cliffs() {
    local length batch specs
    for length in 1k 4k 32k; do
        specs=$(for batch in $(seq 64); do echo "${batch}q1s$length"; done)
        "$fovea" bench --device "$device" --min-time 0.02 --stored --cliffs $specs
        echo
    done
    for batch in 1 8 64; do
        specs=$(awk -v batch=$batch 'BEGIN {for (x = 512; x <= 32768; x *= 1.06) printf "%dq1s%d ", batch, x}')
        "$fovea" bench --device "$device" --min-time 0.02 --stored --cliffs $specs
        echo
    done
}

for part in $parts; do
    case " $all " in
    *" $part "*) "$part" ;;
    *) echo "gpu.sh: no part '$part'; accepted: ${all// /, }" >&2 && exit 2 ;;
    esac
done

{ # an array of what each run wrote
    separator="["
    for file in "$work"/*.json; do
        [ -e "$file" ] || continue
        echo "$separator"
        sed 's| --output [^ "]*||' "$file" # of this script
        separator=","
    done
    [ "$separator" = "[" ] && echo "["
    echo "]"
} >"$output"
echo "kept in $output"
