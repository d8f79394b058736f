/* Products of base tiles for one vector width, a function for each shape. Included once for each width, with
 *   LOOPS         suffix of the names
 *   LOOPS_TARGET  function attribute that allows the instructions
 *   LOOPS_LANES   floats of a vector
 *   LOOPS_SHAPES  the shapes, TILE(rows, vectors) each
 * No include guard. */

#define LOOPS_JOIN2(a, b) a##b
#define LOOPS_JOIN(a, b) LOOPS_JOIN2(a, b)
#define LOOPS_NAME(name) LOOPS_JOIN(name, LOOPS)

typedef float LOOPS_NAME(vector_) __attribute__((vector_size(4 * LOOPS_LANES), aligned(4), may_alias));

/* sums [m][n vectors] += a [m][depth] b [depth][n vectors] */
#define TILE(m, n)                                                                                           \
    LOOPS_TARGET static void LOOPS_NAME(tile_##m##x##n##_)(float *sums, int64_t sums_stride, const float *a, \
                                                           int64_t a_stride, const float *b, int32_t depth)  \
    {                                                                                                        \
        LOOPS_NAME(vector_) sum[m][n];                                                                       \
        UNROLL for (int32_t i = 0; i < (m); i++)                                                             \
        {                                                                                                    \
            UNROLL for (int32_t j = 0; j < (n); j++)                                                         \
            {                                                                                                \
                sum[i][j] = *(LOOPS_NAME(vector_) *)(void *)(sums + i * sums_stride + j * LOOPS_LANES);      \
            }                                                                                                \
        }                                                                                                    \
        for (int32_t k = 0; k < depth; k++) {                                                                \
            const LOOPS_NAME(vector_) *row = (const LOOPS_NAME(vector_) *)(const void *)b;                   \
            UNROLL for (int32_t i = 0; i < (m); i++)                                                         \
            {                                                                                                \
                const float scalar = a[i * a_stride + k];                                                    \
                UNROLL for (int32_t j = 0; j < (n); j++) sum[i][j] += scalar * row[j];                       \
            }                                                                                                \
            b += (n)*LOOPS_LANES;                                                                            \
        }                                                                                                    \
        UNROLL for (int32_t i = 0; i < (m); i++)                                                             \
        {                                                                                                    \
            UNROLL for (int32_t j = 0; j < (n); j++)                                                         \
            {                                                                                                \
                *(LOOPS_NAME(vector_) *)(void *)(sums + i * sums_stride + j * LOOPS_LANES) = sum[i][j];      \
            }                                                                                                \
        }                                                                                                    \
    }
LOOPS_SHAPES
#undef TILE

#define TILE(m, n) {m, (n)*LOOPS_LANES, LOOPS_NAME(tile_##m##x##n##_)},
static const tile_shape LOOPS_NAME(shapes_)[] = {LOOPS_SHAPES};
#undef TILE

#undef LOOPS_NAME
#undef LOOPS_JOIN
#undef LOOPS_JOIN2
#undef LOOPS
#undef LOOPS_TARGET
#undef LOOPS_LANES
#undef LOOPS_SHAPES
