#!/usr/bin/env bash
# A folder of src/ may include only itself and those before it in this list; the public headers only
# each other. tools/ and tests/ may include all.
set -euo pipefail
cd "$(dirname "$0")/.."
order="core kvcache ops reference kernels planner backends tuning engine"

fail=0
allowed=""
for folder in $order; do
    allowed="$allowed${allowed:+|}$folder"
    bad=$(grep -rnE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' "src/$folder" --include='*.[ch]' --include='*.def' 2>/dev/null |
        grep -vE "\"(fovea|$allowed)/|\"[^/\"]+\"" || true)
    [ -z "$bad" ] || { echo "src/$folder may include fovea/ and $allowed only:"; echo "$bad"; fail=1; }
done
bad=$(grep -rnE '#[[:space:]]*include[[:space:]]*"' include | grep -v '"fovea/' || true)
[ -z "$bad" ] || { echo "public headers include fovea/ only:"; echo "$bad"; fail=1; }
for folder in src/*/; do
    [[ " $order " == *" $(basename "$folder") "* ]] || { echo "$folder is not in the order of $0"; fail=1; }
done
exit $fail
