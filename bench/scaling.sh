#!/usr/bin/env bash
# scaling.sh OUTPUT.json [THREADS...]: what more threads give (1, 2, 4, ... all CPUs), with build/fovea (or $FOVEA), a
# minute or so. The rows of all runs go to OUTPUT.json, the table to stdout and to the same name in .txt, which
# docs/scaling.gp draws. Each row takes $FOVEA_MIN_TIME seconds at least (0.3).
#
#   speedup   time with the first number of threads over this time, in threads: with 1 thread first, 16 on 16 is linear
#   linear    speedup over threads
#   ceiling   the read of the same pages, or the peak of the multiply-add units, with as many threads in the same run
#   of it     what the time reaches of that
#   reached   the larger of `linear` and `of it`: what there is to gain ends at whichever limit comes first
#   kept      `of it` over that of the first number of threads: what threads cost beside a limit that does not grow with
#             them; it may pass 100%
#
# The last table is one long sequence among 31 short ones against 32 equal ones of the same bytes: 1.00 where no thread
# waits for the long one.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:?usage: scaling.sh OUTPUT.json [THREADS...]}
shift
fovea=${FOVEA:-build/fovea}
min_time=${FOVEA_MIN_TIME:-0.3}
FOVEA_COMMIT=${FOVEA_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
export FOVEA_COMMIT
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

uneven=1q1s32k_31q1s512 even=32q1s1520 # 48,640 keys each

powers_of_two() { # up to the number of CPUs, and that
    local cpus threads
    cpus=$(nproc)
    for ((threads = 1; threads < cpus; threads *= 2)); do echo "$threads"; done
    echo "$cpus"
}

run() { # run NAME THREADS OPTION... SPEC...
    local name=$1 threads=$2
    shift 2
    "$fovea" bench --threads "$threads" --kernels best --min-time "$min_time" --csv \
        --output "$work/$(printf '%04d' "$threads")-$name.json" "$@" |
        awk -F, -v name="$name" -v threads="$threads" 'NR > 1 && $7 != "" {
            print name, $1, threads, $7, $14, $15, $3, $9, $12, $13}' >>"$work/rows"
}

if [ $# -eq 0 ]; then
    mapfile -t counts < <(powers_of_two)
    set -- "${counts[@]}"
fi
for threads in "$@"; do
    run gqa "$threads" 32q1s4k 1q1s32k q2k $even $uneven
    run mla "$threads" --mla --heads 128 --block-size 64 8q1s4k
done

table() {
    sed -n 's/^  "\(command\|date\|commit\|cpu\|problem\)": "\(.*\)",$/\1 \2/p' "$work"/*.json | sed 's| --output [^ ]*||' |
        sort -u -k1,1 -k2 | awk '{name = $1; sub(/^[^ ]* /, ""); if (name != "command" && name != "date") print name, $0}'
    echo
    awk -v even=$even -v uneven=$uneven '
        BEGIN {
            format = "%-5s %-18s %7s %9s %11s %8s %7s %9s %7s %8s %6s\n"
            printf format, "shape", "batch", "threads", "kernels", "median us", "speedup", "linear", "ceiling", "of it", \
                "reached", "kept"
        }
        {
            key = $1 " " $2
            if (!(key in first)) {first[key] = $4; share[key] = $6 / $4; threads[key] = $3; order[++count] = key}
            speedup = first[key] * threads[key] / $4
            linear = speedup / $3
            of_ceiling = $6 / $4
            reached = linear > of_ceiling ? linear : of_ceiling
            line[key] = line[key] sprintf(format, $1, $2, $3, $7, sprintf("%.1f", $4), sprintf("%.2f", speedup),
                sprintf("%.0f%%", 100 * linear), $5, sprintf("%.0f%%", 100 * of_ceiling), sprintf("%.0f%%", 100 * reached),
                sprintf("%.0f%%", 100 * of_ceiling / share[key]))
            if ($2 == even || $2 == uneven) us[$2, $3] = $4
            if ($2 == uneven) {at_most[++num_counts] = $3; ceiling_us[$3] = $6}
        }
        END {
            for (i = 1; i <= count; i++) printf "%s\n", line[order[i]]
            printf "%7s %19s %19s %17s\n", "threads", uneven " us", even " us", "uneven over even"
            for (i = 1; i <= num_counts; i++) {
                threads_now = at_most[i]
                printf "%7d %19.1f %19.1f %17.2f\n", threads_now, us[uneven, threads_now], us[even, threads_now],
                    us[uneven, threads_now] / us[even, threads_now]
            }
        }' "$work/rows"
}

table | tee "${output%.json}.txt"
{ # an array of what each run wrote
    separator="["
    for file in "$work"/*.json; do
        echo "$separator"
        sed 's| --output [^ "]*||' "$file" # of this script
        separator=","
    done
    echo "]"
} >"$output"
echo "kept in $output and ${output%.json}.txt"
