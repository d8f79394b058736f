/* Which table runs on which CPU. */
#include "engine/stored/stored.h"

#include <stddef.h>

#include "core/compiler.h"

static const fv_stored_table *const tables[] = {
    &fv_stored_table_portable,
#if defined(__x86_64__)
    &fv_stored_table_avx2,
#endif
};

const fv_stored_table *fv_stored_find_table(fv_isa limit)
{
    int32_t best = 0;
    for (int32_t i = 1; i < FV_ARRAY_LEN(tables); i++) {
        if (tables[i]->isa <= limit) best = i;
    }
    const fv_stored_table *vnni = limit >= FV_ISA_AVX512 ? fv_stored_find_vnni() : NULL;
    return vnni ? vnni : tables[best];
}

const fv_stored_kernel *fv_stored_find_kernel(const fv_stored_table *table, int32_t type)
{
    for (int32_t i = 0; i < table->num_kernels; i++) {
        if (table->kernels[i].type == type) return &table->kernels[i];
    }
    return NULL;
}
