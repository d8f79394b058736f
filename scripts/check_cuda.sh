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
attention=$(grep -cE '^ *Function .*(attend|wgmma).*:$' <<<"$usage" || true)
architectures=$(awk '/^Fatbin/ {kind = $2} /^arch = / && kind == "elf" {print $3}' <<<"$usage" | sort -u | wc -l) # not PTX
[ "$kernels" -gt 0 ] || { echo "$plugin has no kernels"; fail=1; }
# These are what takes the time of a build.
if [ "$architectures" -gt 0 ] && [ $((attention / architectures)) -gt 40 ]; then
    echo "$((attention / architectures)) attention kernels for each architecture; accepted: up to 40"
    fail=1
fi
local_memory=$(grep -B1 -E 'STACK:[1-9]|LOCAL:[1-9]' <<<"$usage" || true)
[ -z "$local_memory" ] || { echo "kernels with local memory:"; echo "$local_memory"; fail=1; }

# Every attend_kernel on tensor cores has HMMA, every wgmma kernel of sm_90a HGMMA.
without=$("$cuobjdump" -sass "$plugin" 2>/dev/null | awk '
    function look() {
        if (name ~ /attend_kernel/ && !mma) print name, arch
        if (name ~ /wgmma/ && arch == "sm_90a" && !wgmma) print name, arch
        mma = wgmma = 0
    }
    /code for/ {look(); name = ""; arch = $3} /Function :/ {look(); name = $3} /HMMA/ {mma = 1} /HGMMA/ {wgmma = 1}
    END {look()}')
[ -z "$without" ] || { echo "attention kernels without matrix instructions: $without"; fail=1; }
echo "$kernels kernels for $architectures architectures, $attention of them attention"
exit $fail
