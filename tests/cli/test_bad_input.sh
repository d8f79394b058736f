#!/usr/bin/env bash
# test_bad_input.sh FOVEA MODEL: what is wrong on the command line or in a model file gives exactly one
# line of error on stderr, which names the cause and what is accepted, and an exit code from 1 to 125.
# MODEL may be "" in a build without the engine.
set -uo pipefail
fovea=$1 model=$2
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib.sh"

refuses "unknown command 'chat'.*bench" "$fovea" chat
refuses "unknown option '--frobnicate'" "$fovea" bench --frobnicate
refuses "--heads is '32/5'" "$fovea" bench --heads 32/5 q1
for heads in "32/ 8" "+32/+8" " 32" "32/-8" "32/" "/8" "0" "32/0" "32/8x" 65537 99999999999999999999; do
    misused "--heads is '.*'; accepted: .*each from 1 to 65536" "$fovea" backends --heads "$heads"
done
prints "^65536/65536 heads" "$fovea" backends --heads 65536
prints "^12/4 heads" "$fovea" backends --heads 12/4
refuses "--heads" "$fovea" bench --heads
refuses "q1z" "$fovea" bench q1z
refuses "0q1|count" "$fovea" bench 0q1
refuses "q9s4|q9" "$fovea" bench q9s4
refuses "dtype.*accepted.*bfloat16" "$fovea" bench --dtype int3 q1
refuses "NOPE.*TRITON_ATTN" "$fovea" bench --backend NOPE q1
for name in "--backend foo" "--kernels foo" "--variant foo" "--variant foo --kernels all" \
    "--backend all --kernels foo"; do
    # shellcheck disable=SC2086 # options and their values
    misused "'foo'.*(accepted|options are|that serve the problem):" \
        "$fovea" bench --output "$work/none.json" $name q1s64
    judge "$([ -e "$work/none.json" ] && echo 'the output was made')" bench "$name"
done
misused "batch ''" "$fovea" backends --batch ''
misused "batch ''" "$fovea" bench ''
misused "no device 'cuda:x'.*accepted" "$fovea" check --device cuda:x
misused "kernels is 'foo'; accepted" "$fovea" check --kernels foo
misused "no device 'cuda:x'.*accepted" "$fovea" accuracy --device cuda:x
env FOVEA_PLUGIN_PATH= "$fovea" check --device nope >"$work/out" 2>"$work/err"
judge "$([ $? -eq 1 ] || echo 'the exit code is not 1')" check --device nope
refuses "block-size is 'x'" "$fovea" bench --block-size x q1
refuses "threads is '-2'" "$fovea" bench --threads -2 q1
refuses "threads is '.2'; accepted: a whole number" "$fovea" bench --threads $'\t2' q1
refuses "threads is '[+]2'; accepted: a whole number" "$fovea" bench --threads +2 q1
refuses "soft-cap is '0x1p3'; accepted: a number" "$fovea" backends --soft-cap 0x1p3
refuses "soft-cap is '.3'; accepted: a number" "$fovea" backends --soft-cap $'\t3'
refuses "csv does not go with --json; accepted" "$fovea" bench --json --csv q1
refuses "cliffs does not go with --csv; accepted" "$fovea" bench --cliffs --csv q1
refuses "stored does not go with --type encoder.*accepted" "$fovea" bench --type encoder --stored q8
refuses "shared-prefix does not go with --type encoder" "$fovea" bench --type encoder --shared-prefix 16 2q32
refuses "no-such.json" "$fovea" bench --compare "$work/no-such.json" q1
quick=("$fovea" bench --threads 2 --min-time 0 --repeat 2 --kernels best --heads 2 --head-size 64)
runs "${quick[@]}" --output "$work/old.json" q1s64
prints " [0-9.]+ x the old speed" "${quick[@]}" --compare "$work/old.json" --output "$work/old.json" q1s64
json_holds "len(d['rows']) == 1 and d['rows'][0]['times_faster_than_old'] > 0" cat "$work/old.json"
notes() { # notes COUNT COMMAND...: so many lines say that nothing is compared, and all rows or none are
    local count=$1
    shift
    runs "$@" || return
    judge "$([ "$(grep -c 'note: --compare .* has no row of the same' "$work/err")" -eq "$count" ] &&
        [ "$(grep -c 'the old speed' "$work/out")" -eq $((1 - count)) ] || echo "not $count notes")" "$@"
}
notes 0 "${quick[@]}" --compare "$work/old.json" q1s64
notes 1 "${quick[@]}" --compare "$work/old.json" q1s65
notes 1 "${quick[@]}" --compare "$work/old.json" --stored q1s64
notes 1 "${quick[@]}" --compare "$work/old.json" --shared-prefix 32 q1s64
runs "${quick[@]}" --output "$work/stored.json" --stored q1s64
notes 1 "${quick[@]}" --compare "$work/stored.json" q1s64
cat "$work/stored.json" "$work/old.json" >"$work/both.json"
notes 0 "${quick[@]}" --compare "$work/both.json" q1s64
notes 0 "${quick[@]}" --compare "$work/both.json" --stored q1s64
refuses "compare does not go with --csv.*accepted: --json" "${quick[@]}" --compare "$work/old.json" --csv q1s64
head -c -3 "$work/old.json" >"$work/cut.json"
refuses "cut.json', which ends early; accepted" "${quick[@]}" --compare "$work/cut.json" q1s64
head -c -1 "$work/old.json" >"$work/cut.json" # the end of a line alone
runs "${quick[@]}" --compare "$work/cut.json" q1s64
refuses "compare is '$work': Is a directory" "${quick[@]}" --compare "$work" q1s64
refuses "compare is '$0', which has no rows" "${quick[@]}" --compare "$0" q1s64
refuses "output is '$work': Is a directory" "${quick[@]}" --output "$work" q1s64
refuses "output is '$work/no-such/new.json': No such file" "${quick[@]}" --output "$work/no-such/new.json" q1s64
judge "$([ -s "$work/out" ] && echo 'it ran before')" bench --output "$work/no-such/new.json"
refuses "output '/dev/full' could not be written" "${quick[@]}" --output /dev/full q1s64
room="the batch needs [0-9.]+ GiB .cache [0-9.]+, queries to output [0-9.]+, tables [0-9.]+.; accepted here: up to"
refuses "$room" "$fovea" bench --heads 4096/1 q1024k # queries of 1 TiB over a cache of 0.5 GiB
refuses "$room" "$fovea" bench 65536q1s256k
refuses "$room" "$fovea" bench --block-size 1 --heads 1 --head-size 1 16383q1_q1s8192k # tables of 0.5 TiB
refuses "$room" "$fovea" backends --block-size 1 65535q1_q1s8192k
refuses "no device 'nope:0'.*libfovea-nope" "$fovea" bench --device nope q1
refuses "no device 'cuda:x'.*accepted.*cuda:1" "$fovea" bench --device cuda:x q1
refuses "no device 'cuda:1023'" "$fovea" bench --device cuda:1023 q1
refuses "no device 'cuda:1023'" "$fovea" bench mla-layer --device cuda:1023
refuses "check compares a device.*accepted: cuda" "$fovea" bench mla-layer --check
refuses "no device 'nope:0'.*libfovea-nope" "$fovea" accuracy --device nope
for order in "--samples 1 --heads 3 --quick" "--quick --samples 1 --heads 3"; do
    # shellcheck disable=SC2086 # options and their values
    json_holds "(d['samples'], d['heads']) == (1, 3)" "$fovea" accuracy --context 64 --json $order
done
json_holds "(d['samples'], d['heads']) == (4, 32)" "$fovea" accuracy --context 64 --json --quick
refuses "dtype is 'bfloat16' with --mla=weights on cpu; accepted: float32" \
    "$fovea" bench --mla=weights --dtype bfloat16 q1
judge "$([ -s "$work/out" ] && echo 'something was printed before')" bench --mla=weights --dtype bfloat16
refuses "dtype is 'float16' on cpu; accepted: float32" "$fovea" bench mla-layer --dtype float16
refuses "length is .x.*whole number" "$fovea" bench mla-layer --length 512,x
for list in "" "512," ",512" "512,,1" "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17"; do
    refuses "length is '$list'; accepted: up to 16 lengths" "$fovea" bench mla-layer --length "$list"
done
refuses "unknown option.*--frobnicate" "$fovea" bench mla-layer --frobnicate
json_holds "[r['length'] for r in d['lengths']] == [5, 20]" \
    "$fovea" bench mla-layer --batch 2 --dim 64 --heads 2 --repeat 1 --json --length "5, 20"
refuses "unknown option" "$fovea" backends --frobnicate
refuses "head-size is '33x'" "$fovea" backends --head-size 33x
refuses "'--json=1': the option takes no value" "$fovea" backends --json=1
refuses "soft-cap is '1e-50'; accepted: 0" "$fovea" backends --soft-cap 1e-50
refuses "head-size does not go with --mla" "$fovea" backends --mla --head-size 64
refuses "heads with KV heads does not go with --mla" "$fovea" backends --mla --heads 32/8
refuses "unknown option" "$fovea" info --frobnicate
refuses "machine is 'abacus'.*ascend910" "$fovea" info --tiling --machine abacus
refuses "without --tiling" "$fovea" info --rows 16
refuses "measure.*ascend910" "$fovea" info --tiling --machine ascend910 --measure
refuses "measure.*machine amx; accepted: cpu or (portable|avx2|avx512), " "$fovea" info --tiling --machine amx --measure
refuses "no durations.*3:2" "$fovea" pipeline
refuses "'3:x'.*C1:V1" "$fovea" pipeline 3:x
refuses "unknown option '-1'" "$fovea" pipeline -1:2
refuses "every stage takes 0" "$fovea" pipeline 0:0 0
refuses "blocks is '0'" "$fovea" pipeline --blocks 0 3:2
refuses "amla.*'2:2'" "$fovea" pipeline --amla 1:1 2:2
refuses "no-such/plot.svg" "$fovea" pipeline 3:2 --svg "$work/no-such/plot.svg"
json_holds "(d['pairs'][0]['matrix'], d['cycle'], d['run']['total']) == (12345.678, 12346.678, 24693.356)" \
    "$fovea" pipeline --json --blocks 2 12345.678:0.001 1:0
refuses "unknown option|accepted" "$fovea" check --frobnicate
refuses "only is 'no_such'; no such case" "$fovea" check --list --json --only no_such
judge "$([ -s "$work/out" ] && echo 'something was printed before')" check --list --json --only no_such
refuses "nothing was run: --kernels is 'amx-emulated'.*'rope'.*accepted" \
    "$fovea" check --only rope --kernels amx-emulated
misused "nothing was run" "$fovea" check --json --only rope --kernels amx-emulated
json_holds "d[0]['name'] == 'random.7' and 'heads, D ' in d[0]['text'] and len(d) == 1" \
    "$fovea" check --list --json --only random.7
json_holds "[c['name'] for c in d] == ['mutants']" "$fovea" check --list --json --only mutants
json_holds "len(d) > 600 and {'mutants', 'rope'} < {c['name'] for c in d}" "$fovea" check --list --json --quick
json_holds "(d['device'], d['isa'], d['kernels'], d['backends']) == ('cpu', None, 'portable', ['ROCM_ATTN'])" \
    "$fovea" check --json --only random.7 --kernels portable --backends ROCM_ATTN
full() { # full COMMAND...: what cannot be written is an error
    refuses "cannot write to standard output" bash -c 'exec "$@" >/dev/full' - "$@"
}
full "$fovea" info
full "$fovea" info --help
full "$fovea" --help
full "$fovea" --version
full "$fovea" backends --json
full "$fovea" check --list --quick
refuses "isa.*accepted|sse9" env FOVEA_ISA=sse9 "$fovea" bench q1

if [ -n "$model" ]; then
    json_holds "'float32, cache float32' in d['problem'] and all('median_us' in r for r in d['rows'])" \
        "$fovea" bench --mla=weights --heads 4 --min-time 0 --repeat 2 --kernels best --json q1s64 q70s90
    generate() { # generate PATTERN OPTION...
        local pattern=$1
        shift
        refuses "$pattern" "$fovea" generate -m "$model" --max-tokens 4 "$@"
    }
    refuses "no-such.gguf" "$fovea" generate -m "$work/no-such.gguf" hello
    refuses "$work|directory" "$fovea" generate -m "$work" hello
    refuses "gguf" "$fovea" generate -m "$0" hello
    mkfifo "$work/fifo.gguf"
    refuses "fifo.gguf: not a regular file" "$fovea" generate -m "$work/fifo.gguf" hello
    for kind in empty header-cut data-cut magic version tensor-count key-count string-length architecture \
        huge-offset far-offset overlap huge-dimension type; do
        if ! python3 "$here/damage_gguf.py" "$model" "$work/$kind.gguf" $kind; then
            echo "FAILED: cannot make $kind.gguf"
            failed=$((failed + 1))
            continue
        fi
        case $kind in
        magic) pattern="magic|not a GGUF" ;;
        version) pattern="version.*99|99.*version" ;;
        architecture) pattern="architecture.*llama" ;;
        overlap) pattern="overlap" ;;
        *-offset) pattern="offset|past the end|outside" ;;
        type) pattern="type.*77|77.*type" ;;
        *) pattern="." ;;
        esac
        refuses "$pattern" "$fovea" generate -m "$work/$kind.gguf" --max-tokens 4 hello
        rm -f "$work/$kind.gguf"
    done
    generate "block.size.*0" --block-size 0 hello
    generate "block.size.*-3" --block-size -3 hello
    generate "block.size.*many" --block-size many hello
    generate "block.size.*99999999999" --block-size 99999999999 hello
    generate "NOPE.*TRITON_ATTN" --attention-backend NOPE hello
    refuses "NOPE.*TRITON_ATTN" env VLLM_ATTENTION_BACKEND=NOPE "$fovea" generate -m "$model" --max-tokens 4 hello
    generate "int3.*accepted|accepted.*fp8" --kv-cache-dtype int3 hello
    generate "max-tokens.*accepted" --max-tokens 0x hello
    generate "threads.*accepted" --threads 0 hello
    generate "temperature.*accepted" --temperature warm hello
    generate "no-such.txt" -f "$work/no-such.txt"
    generate "unknown option" --frobnicate hello
    generate "unknown option '--max', or the begin of several" --max 3 hello
    generate "top-p is '0'" --top-p 0 hello
    refuses "1073741829 together" "$fovea" generate --random-weights tiny --prompt-tokens 5 --max-tokens 1073741824
    runs "$fovea" generate -m "$model" --max-tokens 1 $'a\xc0\xffb'
    judge "$(grep -qx 'fovea generate: note: bytes of the prompt that no token stands for, left out: 2' "$work/err" ||
        echo 'no note of dropped bytes')" generate $'a\xc0\xffb'
    # Two minutes of text, but for a few of its tokens; several prompts are printed as they end.
    full "$fovea" generate -m "$model" --max-tokens 8000 --ignore-eos hello
    printf 'hello\nthere\n' >"$work/two.txt"
    full "$fovea" generate -m "$model" --max-tokens 2 -f "$work/two.txt"
    full "$fovea" generate -m "$model" --max-tokens 2 --json hello
    full "$fovea" generate --random-weights tiny --prompt-tokens 5 --max-tokens 5
    generate "a second file of prompts, 'b.txt', behind '$work/two.txt'; accepted: one" -f "$work/two.txt" -f b.txt
    printf '\xef\xbb\xbf\r\n\n' >"$work/mark.txt" # a byte order mark is no prompt, nor of one
    generate "mark.txt: no prompt in it" -f "$work/mark.txt"
    printf '\xef\xbb\xbfhello\n\xef\xbb\xbfthere\n' >"$work/mark.txt"
    json_holds "[r['prompt'] for r in d['replies']] == ['hello', '\ufeffthere']" \
        "$fovea" generate -m "$model" --max-tokens 1 --json -f "$work/mark.txt"
    python3 -c "print('word ' * 20000)" >"$work/long.txt"
    generate "context|longer|tokens" -f "$work/long.txt"
    # One of several prompts that does not fit leaves the others their answers.
    { echo hello && cat "$work/long.txt" && echo there; } >"$work/three.txt"
    generate "^fovea generate: 1 of 3 prompts are not answered" -f "$work/three.txt"
    judge "$(grep -q 'note: prompt 2 is not answered: .*context' "$work/err" || echo 'no note')" generate -f three.txt
    judge "$([ "$(grep -c '^\[[13]\] ' "$work/out")" -eq 2 ] || echo 'not two answers')" generate -f three.txt
    "$fovea" generate -m "$model" --max-tokens 4 -f "$work/three.txt" --json >"$work/three.json" 2>"$work/err"
    judge "$([ $? -eq 1 ] || echo 'the exit code is not 1')" generate --json -f three.txt
    json_holds "['error' in r for r in d['replies']] == [not r['text'] for r in d['replies']] == [False, True, False]" \
        cat "$work/three.json"
    generate "2 of 2 prompts are not answered" -f <(cat "$work/long.txt" "$work/long.txt")
    generate "cache.tokens" --cache-tokens -1 hello
    generate "no device 'nope:0'.*libfovea-nope" --device nope hello
    generate "no device 'cuda:1023'" --device cuda:1023 hello
    generate "prompt-tokens without --random-weights" --prompt-tokens 5 hello
    refuses "random-weights is 'huge'.*tiny, llama-8b" "$fovea" generate --random-weights huge
    refuses "hello with --random-weights.*prompt-tokens" "$fovea" generate --random-weights tiny hello
    refuses "--raw with --random-weights" "$fovea" generate --random-weights tiny --raw
    refuses "--profile with --random-weights" "$fovea" generate --random-weights tiny --profile
    refuses "prompt-tokens is 200000000; accepted: 1 to 2048, the context length of tiny" \
        "$fovea" generate --random-weights tiny --prompt-tokens 200000000
    refuses "prompt-tokens is '0'" "$fovea" generate --random-weights tiny --prompt-tokens 0
    refuses "no device 'nope:0'" "$fovea" generate --random-weights tiny --device nope
    prints "^ *59 +[0-9.]+ " "$fovea" generate --random-weights tiny --prompt-tokens 20 --max-tokens 40
    json_holds "d['tokens'] == 49" \
        "$fovea" generate --random-weights tiny --prompt-tokens 2000 --max-tokens 100000000 --json --progress
    judge "$(grep -aq 'random weights 100%' "$work/err" || echo 'no progress line')" generate --random-weights tiny
    json_holds "[c['context'] for c in d['contexts']] == [1024, 1099] and d['tokens'] == 600" \
        "$fovea" generate --random-weights tiny --max-tokens 600 --json
fi

finish
