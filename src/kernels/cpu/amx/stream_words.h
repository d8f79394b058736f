/* Results past the caches: a line that nobody reads soon is not fetched to be overwritten. */
#ifndef FV_KERNELS_CPU_AMX_STREAM_WORDS_H
#define FV_KERNELS_CPU_AMX_STREAM_WORDS_H

#include "kernels/cpu/lanes.h"

/* To a whole line. Other threads see it after fv_words_stream_end. */
FV_ALWAYS_INLINE void fv_words_stream(char *to, fv_words words)
{
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i *)(void *)to, (__m512i)words);
#else
    fv_words_store(to, words);
#endif
}

static inline void fv_words_stream_end(void)
{
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

#endif
