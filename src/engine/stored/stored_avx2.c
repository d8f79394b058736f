/* The kernels for AVX2. On Zen 3 (3.1 GHz) 32 weights of Q4_1 take one row of X 0.8 to 1 ns, about what their 20 bytes take
 * from memory. */
#include "engine/stored/stored.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

enum { FV_STORED_MIN_INTEGERS = 16 };

#include "engine/stored/stored_kernels.h"

const fv_stored_table fv_stored_table_avx2 = {
    .isa = FV_ISA_AVX2,
    .name = "avx2",
    .load_x = load_x,
    .many_bytes = sizeof(many_memory),
    .kernels = kernels,
    .num_kernels = FV_ARRAY_LEN(kernels),
};

#endif
