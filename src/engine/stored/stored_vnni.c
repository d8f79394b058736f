/* The kernels for AVX512_VNNI, which all CPUs of level avx512_bf16 have; vectors of 256 bits, as two rows of W of 512 would have to
 * be put together first. */
#include "engine/stored/stored.h"

#if defined(FV_HAVE_AVX512_BF16)

#include "engine/stored/stored_kernels.h"

const fv_stored_table fv_stored_table_vnni = {FV_ISA_AVX512_BF16,   "avx512_vnni", true, load_x, kernels,
                                              FV_ARRAY_LEN(kernels)};

#endif
