/* A small fp32 problem for the tests of the reference: random tensors, a paged cache that is NaN where
 * no key lies, and the same keys kept dense, for a softmax written another way. */
#ifndef FV_TESTS_REFERENCE_SCENE_H
#define FV_TESTS_REFERENCE_SCENE_H

#include "reference/reference.h"

#define MAX_SEQS 4
#define MAX_TOKENS 16
#define MAX_KEYS 64
#define MAX_HEADS 8
#define MAX_SIZE 640
#define MAX_BLOCKS 80

typedef struct scene {
    uint64_t random_state;
    float q[MAX_TOKENS * MAX_HEADS * MAX_SIZE];
    float out[MAX_TOKENS * MAX_HEADS * MAX_SIZE];
    float lse[MAX_TOKENS * MAX_HEADS];
    float k[MAX_SEQS][MAX_KEYS * MAX_HEADS * MAX_SIZE]; /* [key, Hkv, D] */
    float v[MAX_SEQS][MAX_KEYS * MAX_HEADS * MAX_SIZE];
    float *cache;
    float partial_out[MAX_TOKENS * 8 * MAX_HEADS * MAX_SIZE];
    float partial_max[MAX_TOKENS * 8 * MAX_HEADS];
    float partial_sum[MAX_TOKENS * 8 * MAX_HEADS];
    float sinks[MAX_HEADS], slopes[MAX_HEADS];
    uint8_t causal[MAX_SEQS];
    uint64_t tree[MAX_TOKENS];
    int32_t query_start[MAX_SEQS + 1], seq_lens[MAX_SEQS], table[MAX_SEQS * MAX_KEYS];
    fv_attend_params params;
} scene;

/* A scene of `num_seqs` sequences whose blocks are dealt out backwards. The same `seed`, the same numbers. */
scene *scene_create(uint64_t seed, int32_t num_seqs, const int32_t *query_lens, const int32_t *seq_lens,
                    int32_t num_heads, int32_t num_kv_heads, int32_t head_size, int32_t block_size);
void scene_destroy(scene *s);

/* `count` numbers in [-1, 1). */
void scene_fill_random(scene *s, float *values, size_t count);

/* Writes the dense keys that live on the rank of the context parallelism to the cache. */
void scene_write_cache(scene *s);

/* Runs attend_paged of the reference. */
void scene_attend(scene *s);

/* |value - expected| <= tolerance; -inf is only near -inf, NaN near nothing. */
void assert_near(double value, double expected, double tolerance);

/* Compares out and lse with the plain way: the weights of all keys first, then one weighted sum for
 * each element of the output. */
void scene_assert_dense(const scene *s, double tolerance);

#endif
