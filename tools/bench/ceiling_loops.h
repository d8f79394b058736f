/* The loops of the ceilings for one vector width. Included once for each, with
 *   LOOPS         suffix of the names
 *   LOOPS_TARGET  function attribute that allows the instructions, or nothing
 *   LOOPS_BYTES   of a vector
 * No include guard. */

#define LOOPS_JOIN2(a, b) a##b
#define LOOPS_JOIN(a, b) LOOPS_JOIN2(a, b)
#define LOOPS_NAME(name) LOOPS_JOIN(name, LOOPS)

typedef uint64_t LOOPS_NAME(words) __attribute__((vector_size(LOOPS_BYTES), aligned(1), may_alias));
typedef float LOOPS_NAME(floats) __attribute__((vector_size(LOOPS_BYTES)));

/* Sums the bytes as 64-bit words; four sums, so that loads do not wait for additions. */
LOOPS_TARGET static uint64_t LOOPS_NAME(read_)(const char *data, int64_t bytes)
{
    LOOPS_NAME(words) a = {0}, b = {0}, c = {0}, d = {0};
    const int64_t step = 4 * (int64_t)LOOPS_BYTES;
    int64_t at = 0;
    for (; at + step <= bytes; at += step) {
        const LOOPS_NAME(words) *from = (const LOOPS_NAME(words) *)(const void *)(data + at);
        a += from[0];
        b += from[1];
        c += from[2];
        d += from[3];
    }
    a += b + c + d;
    uint64_t sum = 0;
    for (int32_t lane = 0; lane < (int32_t)(LOOPS_BYTES / 8); lane++) sum += a[lane];
    for (; at < bytes; at++) sum += (unsigned char)data[at];
    return sum;
}

/* COMPUTE_CHAINS independent chains of multiply-adds: enough to cover the latency of two units. */
LOOPS_TARGET static float LOOPS_NAME(compute_)(int32_t rounds)
{
    LOOPS_NAME(floats) chain[COMPUTE_CHAINS], factor, term;
    for (int32_t lane = 0; lane < (int32_t)(LOOPS_BYTES / 4); lane++) {
        factor[lane] = 0.999f;
        term[lane] = 0.001f;
    }
    for (int32_t i = 0; i < COMPUTE_CHAINS; i++) chain[i] = term * (float)i;
    __asm__ volatile("" : "+m"(factor), "+m"(term)); /* not constants for the compiler */
    for (int32_t round = 0; round < rounds; round++) {
        for (int32_t i = 0; i < COMPUTE_CHAINS; i++) chain[i] = chain[i] * factor + term;
    }
    float sum = 0;
    for (int32_t i = 0; i < COMPUTE_CHAINS; i++) sum += chain[i][0];
    return sum;
}

#undef LOOPS_NAME
#undef LOOPS_JOIN
#undef LOOPS_JOIN2
#undef LOOPS
#undef LOOPS_TARGET
#undef LOOPS_BYTES
