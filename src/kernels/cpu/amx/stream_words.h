/* Results past the caches: a line that nobody reads soon is not fetched to be overwritten. */
#ifndef FV_KERNELS_CPU_AMX_STREAM_WORDS_H
#define FV_KERNELS_CPU_AMX_STREAM_WORDS_H

#include "kernels/cpu/lanes.h"

/* fv_words_store_natural to a whole line. Other threads see it after fv_words_stream_end. */
FV_ALWAYS_INLINE void fv_words_stream_natural(char *to, const float *low, const float *high, fv_lanes factor)
{
#if defined(__AVX512F__)
    const fv_words words = fv_words_of(fv_lanes_load(low) * factor, fv_lanes_load(high) * factor);
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    _mm512_stream_si512((__m512i *)(void *)to, _mm512_permutexvar_epi64(order, (__m512i)words));
#else
    fv_words_store_natural(to, low, high, factor);
#endif
}

static inline void fv_words_stream_end(void)
{
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

#endif
