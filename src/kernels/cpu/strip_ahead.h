/* Memory that is prefetched between the keys of a strip's scores (strip_product.h), a few lines for each step of keys:
 * bursts would find the core's miss buffers full. */
#ifndef FV_KERNELS_CPU_STRIP_AHEAD_H
#define FV_KERNELS_CPU_STRIP_AHEAD_H

#include "kernels/cpu/prefetch_stream.h"

typedef struct fv_strip_ahead {
    fv_prefetch_stream stream;
    int32_t num_lines; /* of a step; 0: nothing is asked for */
} fv_strip_ahead;

/* `num_lines` of a stream in as many steps; no lines: nothing. */
static inline fv_strip_ahead fv_strip_ahead_of(fv_prefetch_stream stream, int64_t num_lines, int64_t num_steps)
{
    if (num_lines > 0) fv_prefetch_next_run(&stream);
    return (fv_strip_ahead){stream, (int32_t)fv_ceil_div(num_lines, num_steps)};
}

/* Asks for the lines of some steps. */
FV_ALWAYS_INLINE void fv_strip_ahead_ask(fv_strip_ahead *ahead, int32_t num_steps)
{
    for (int32_t i = 0; i < num_steps * ahead->num_lines; i++)
        __builtin_prefetch(fv_prefetch_take(&ahead->stream, FV_CACHE_LINE), 0, 2);
}

#endif
