#!/usr/bin/env bash
# check_cuda.sh PLUGIN: the machine code of libfovea-cuda.so, without a GPU. The plugin exports its entry alone
# and needs libc alone; no kernel has local memory; attention kernels on tensor cores have matrix
# instructions, and there are up to 32 of them for an architecture, 54 for sm_90a, for they take the time of a build.
# What reads machine code is cuobjdump, of CUDA, with nvdisasm: where they are missing (`scripts/setup.sh cuobjdump`
# gets them; set CUOBJDUMP), spills and local memory have been errors of the build already.
set -euo pipefail
plugin=${1:?usage: check_cuda.sh PLUGIN}
fail=0

exported=$(nm -D --defined-only "$plugin" | awk '{print $3}')
[ "$exported" = fv_plugin_entry ] || { echo "$plugin exports: $exported"; fail=1; }
needed=$(objdump -p "$plugin" | awk '/NEEDED/ {print $2}' | grep -vE '^(libc|libm|libdl|librt|libpthread|ld-linux.*)\.so' || true)
[ -z "$needed" ] || { echo "$plugin needs: $needed"; fail=1; }

cuobjdump=${CUOBJDUMP:-$(command -v cuobjdump || echo /usr/local/cuda/bin/cuobjdump)}
PATH=$(dirname "$cuobjdump"):$PATH
if [ ! -x "$cuobjdump" ] || ! command -v nvdisasm >/dev/null; then
    echo "cuobjdump or nvdisasm is not there; the machine code is not looked at"
    exit $fail
fi

usage=$("$cuobjdump" --dump-resource-usage "$plugin" 2>/dev/null)
# A line for each architecture with machine code (not PTX): its name, its kernels, those of them that are attention.
counts=$(awk '
    /^Fatbin/ {is_code = $2 == "elf"}
    /^arch = / && is_code {arch = $3}
    /^ *Function .*:$/ {kernels[arch]++; if (/attend|wgmma/ && !/mla_query/) attention[arch]++}
    END {for (arch in kernels) print arch, kernels[arch], attention[arch] + 0}' <<<"$usage" | sort)
[ -n "$counts" ] || { echo "$plugin has no kernels"; fail=1; }
awk 'NF {print $1 ": " $2 " kernels, " $3 " of them attention"}' <<<"$counts"
too_many=$(awk '$3 > ($1 == "sm_90a" ? 54 : 32) {print $1}' <<<"$counts")
[ -z "$too_many" ] || { echo "accepted are up to 32 attention kernels, for sm_90a 54: $too_many"; fail=1; }
local_memory=$(grep -B1 -E 'STACK:[1-9]|LOCAL:[1-9]' <<<"$usage" || true)
[ -z "$local_memory" ] || { echo "kernels with local memory:"; echo "$local_memory"; fail=1; }

# Every attend_kernel on tensor cores has HMMA, every wgmma kernel HGMMA.
without=$("$cuobjdump" -sass "$plugin" 2>/dev/null | awk '
    function look() {
        if (name ~ /attend_kernel|attend_few/ && !mma) print name, arch
        if (name ~ /wgmma/ && !wgmma) print name, arch
        mma = wgmma = 0
    }
    /code for/ {look(); name = ""; arch = $3} /Function :/ {look(); name = $3} /HMMA/ {mma = 1} /HGMMA/ {wgmma = 1}
    END {look()}')
[ -z "$without" ] || { echo "attention kernels without matrix instructions: $without"; fail=1; }
exit $fail
