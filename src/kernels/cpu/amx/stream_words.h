/* Results past the caches: a line that nobody reads soon is not fetched to be overwritten. */
#ifndef FV_KERNELS_CPU_AMX_STREAM_WORDS_H
#define FV_KERNELS_CPU_AMX_STREAM_WORDS_H

#include "kernels/cpu/lanes.h"

/* fv_words_store_natural to a whole line. Other threads see it after fv_words_stream_end. */
FV_ALWAYS_INLINE void fv_words_stream_natural(char *to, const float *low, const float *high, fv_lanes factor)
{
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i *)(void *)to, (__m512i)fv_words_natural(low, high, factor));
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
