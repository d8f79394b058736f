# shellcheck shell=bash
# lib.sh: what the tests of the command line share; sourced. A test calls refuses, prints and json_holds, and at
# the end finish.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

# judge PROBLEM COMMAND...: counts; PROBLEM is empty where all is well.
judge() {
    local problem=$1
    shift
    if [ -z "$problem" ]; then
        passed=$((passed + 1))
        return
    fi
    failed=$((failed + 1))
    echo "FAILED ($problem): ${*//$work/.}"
    head -c 2000 "$work/err" | head -n 20 | sed 's/^/    /'
}

# refuses PATTERN COMMAND...: the error line matches PATTERN (extended regular expression, any case).
refuses() {
    local pattern=$1
    shift
    local code problem=""
    timeout 120 "$@" >"$work/out" 2>"$work/err" </dev/null
    code=$?
    # A progress line ends in a carriage return or is erased: what remains are errors and notes.
    local errors
    errors=$(tr '\r' '\n' <"$work/err" | grep -aE '^fovea[a-z -]*: ' | grep -avE '^fovea[a-z -]*: (note|warning):' || true)
    if [ "$code" -eq 0 ] || [ "$code" -gt 125 ]; then problem="exit code $code"; fi
    if [ "$(grep -c . <<<"$errors")" -ne 1 ]; then problem="not exactly one line of error"; fi
    if grep -aqE 'Sanitizer|runtime error' "$work/err"; then problem="sanitizer report"; fi
    if ! grep -aqiE -e "$pattern" <<<"$errors"; then problem=${problem:-"no '$pattern' in the error"}; fi
    judge "$problem" "$@"
}

# misused PATTERN COMMAND...: the same, and the exit code is 2, that of wrong usage, with nothing printed before.
misused() {
    refuses "$@"
    shift
    timeout 120 "$@" >"$work/out" 2>"$work/err" </dev/null
    local code=$? problem=""
    [ "$code" -eq 2 ] || problem="exit code $code"
    [ ! -s "$work/out" ] || problem="something was printed before"
    judge "$problem" "$@"
}

# runs COMMAND...: exit code 0, output in $work/out; else prints why not and counts.
runs() {
    local code
    timeout 120 "$@" >"$work/out" 2>"$work/err" </dev/null
    code=$?
    if [ "$code" -ne 0 ]; then judge "exit code $code" "$@"; fi
    if grep -aqE 'Sanitizer|runtime error' "$work/err"; then
        judge "sanitizer report" "$@"
        code=1
    fi
    return "$code"
}

# prints PATTERN COMMAND...: succeeds, and some line of stdout matches PATTERN (extended regular expression).
prints() {
    local pattern=$1 problem=""
    shift
    runs "$@" || return
    grep -aqE -e "$pattern" "$work/out" || problem="no '$pattern' in the output"
    judge "$problem" "$@"
}

# json_holds EXPRESSION COMMAND...: succeeds, stdout is JSON, and the Python expression over it, d, is true. What
# it may use besides: names(list), the set of the rows' backends.
json_holds() {
    local expression=$1 problem=""
    shift
    runs "$@" || return
    python3 - "$expression" "$work/out" 2>>"$work/err" <<'PYTHON' || problem="not so: $expression"
import json
import sys

with open(sys.argv[2], encoding="utf-8") as file:
    d = json.load(file)


def names(rows):
    return {row.get("name") or row["backend"] for row in rows}


sys.exit(0 if eval(sys.argv[1], {"d": d, "names": names}) else 1)
PYTHON
    judge "$problem" "$@"
}

# The line that all checks end with; the exit code of the test.
finish() {
    echo "$passed passed, $failed failed, 0 skipped"
    [ "$failed" -eq 0 ]
}
