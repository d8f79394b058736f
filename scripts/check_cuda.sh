#!/usr/bin/env bash
# check_cuda.sh PLUGIN: the machine code of libfovea-cuda.so, without a GPU. The plugin exports its entry alone
# and needs libc alone; no kernel has local memory; attention kernels on tensor cores have matrix
# instructions. What reads machine code is cuobjdump, of CUDA: where it is missing (set CUOBJDUMP), spills and
# local memory have been errors of the build already.
set -euo pipefail
plugin=${1:?usage: check_cuda.sh PLUGIN}
fail=0

exported=$(nm -D --defined-only "$plugin" | awk '{print $3}')
[ "$exported" = fv_plugin_entry ] || { echo "$plugin exports: $exported"; fail=1; }
needed=$(objdump -p "$plugin" | awk '/NEEDED/ {print $2}' | grep -vE '^(libc|libm|libdl|librt|libpthread|ld-linux.*)\.so' || true)
[ -z "$needed" ] || { echo "$plugin needs: $needed"; fail=1; }

cuobjdump=${CUOBJDUMP:-$(command -v cuobjdump || echo /usr/local/cuda/bin/cuobjdump)}
if [ ! -x "$cuobjdump" ]; then
    echo "cuobjdump is not there; the machine code is not looked at"
    exit $fail
fi

usage=$("$cuobjdump" --dump-resource-usage "$plugin" 2>/dev/null)
kernels=$(grep -c '^ *Function .*:$' <<<"$usage" || true)
architectures=$(grep -oE 'arch = sm_[0-9a-z]+' <<<"$usage" | sort | uniq | wc -l)
[ "$kernels" -gt 0 ] || { echo "$plugin has no kernels"; fail=1; }
if [ "$architectures" -gt 0 ] && [ $((kernels / architectures)) -gt 32 ]; then
    echo "$((kernels / architectures)) kernels for each architecture; accepted: up to 32"
    fail=1
fi
local_memory=$(grep -B1 -E 'STACK:[1-9]|LOCAL:[1-9]' <<<"$usage" || true)
[ -z "$local_memory" ] || { echo "kernels with local memory:"; echo "$local_memory"; fail=1; }

# Every attend_kernel on tensor cores has HMMA.
without=$("$cuobjdump" -sass "$plugin" 2>/dev/null |
    awk '/Function :/ {if (name ~ /attend_kernel/ && !has) print name; name = $3; has = 0} /HMMA/ {has = 1}
         END {if (name ~ /attend_kernel/ && !has) print name}')
[ -z "$without" ] || { echo "attention kernels without HMMA: $without"; fail=1; }
echo "$kernels kernels for $architectures architectures"
exit $fail
