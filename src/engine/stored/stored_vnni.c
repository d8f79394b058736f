/* The kernels for AVX512_VNNI; vectors of 256 bits, as two rows of W of 512 would have to be put together first. */
#include "engine/stored/stored.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)

enum { FV_STORED_MIN_INTEGERS = 7, FV_STORED_MIN_FLOATS = 7 };

#include "engine/stored/stored_kernels.h"

static const fv_stored_table vnni = {
    .isa = FV_ISA_AVX512,
    .name = "avx512_vnni",
    .load_x = load_x,
    .many_bytes = sizeof(many_memory),
    .kernels = kernels,
    .num_kernels = FV_ARRAY_LEN(kernels),
};

const fv_stored_table *fv_stored_find_vnni(void) { return __builtin_cpu_supports("avx512vnni") ? &vnni : NULL; }

#else

const fv_stored_table *fv_stored_find_vnni(void) { return NULL; }

#endif
