/* A batch through the MLA layer: weights, tables, a cache with its context as an engine would have left it, a plan;
 * and the layer's definition written out in double. */
#ifndef FV_TESTS_BACKENDS_MLA_LAYER_SCENE_H
#define FV_TESTS_BACKENDS_MLA_LAYER_SCENE_H

#include "fovea/fovea.h"

enum {
    MLA_LAYER_MAX_SEQS = 8,
    MLA_LAYER_MAX_POSITIONS = 512,
    MLA_LAYER_PADDING = 3, /* elements after each row of x and out */
};

typedef struct mla_layer_lens {
    int32_t query_len, seq_len;
} mla_layer_lens;

/* What is tested. */
typedef struct mla_layer_setting {
    fv_mla_shape mla;
    int32_t hidden, q_lora;
    int32_t joins_down; /* 1: the rows of kv_down follow those of q_down */
    int32_t has_norms;
    fv_rope_style style;
    fv_dtype dtype, kv_dtype; /* of activations and weights; of the cache */
    fv_kv_layout layout;      /* 0: LATENT */
    float k_scale;            /* 0: the problem has none */
    int32_t block_size;
    const char *backend, *kernels;
    const mla_layer_lens *seqs;
    int32_t num_seqs;
    int32_t decode_threshold;
    int32_t tight_workspace; /* 1: the least that the plan takes */
    fv_context_parallel context_parallel;
} mla_layer_setting;

typedef struct mla_layer_scene {
    mla_layer_setting set;
    fv_context *context;
    fv_plan *plan;
    int32_t num_tokens, max_seq_len, max_query_len, width, num_blocks;
    int32_t query_start[MLA_LAYER_MAX_SEQS + 1], seq_lens[MLA_LAYER_MAX_SEQS];
    int32_t *block_table, *positions; /* [num_seqs, width]; [num_tokens] */
    int64_t *slots;
    float *cos, *sin;                 /* [MLA_LAYER_MAX_POSITIONS, R / 2] */
    double *keys[MLA_LAYER_MAX_SEQS]; /* [seq_len, L + R], not rotated; after read_back as the cache has them */
    int32_t keys_are_rotated;
    char *x, *out, *cache, *workspace;         /* x and out [num_tokens, N + MLA_LAYER_PADDING] */
    char *q_down, *q_up, *kv_down, *kv_up, *o; /* kv_down: of the memory of q_down */
    float *q_norm, *kv_norm;
    size_t entry_bytes;
    fv_kv_view view;
    fv_mla_layer layer;
} mla_layer_scene;

void mla_layer_scene_init(mla_layer_scene *s, const mla_layer_setting *set);
void mla_layer_scene_deinit(mla_layer_scene *s);

/* Ends the test with the library's text. */
void mla_layer_must(fv_status status);
void *mla_layer_alloc(size_t bytes);
double mla_layer_load(const char *from, int64_t index, fv_dtype dtype);

/* What an engine brings. */
fv_status mla_layer_gemm(void *user, const fv_gemm *g, fv_stream stream);

int32_t mla_layer_entry_size(const mla_layer_scene *s);
int32_t mla_layer_query_size(const mla_layer_scene *s);

/* The rope part of a key or query at its position. */
void mla_layer_rotate(double *rope, const mla_layer_scene *s, int32_t position);

/* The slot of a key in the cache; -1: the key is another rank's. */
int64_t mla_layer_slot(const mla_layer_scene *s, int32_t seq, int32_t key);

/* Element i of the entry in a slot, read by the definition of the layout; *unit: what the stored number stands for. */
double mla_layer_load_element(double *unit, const mla_layer_scene *s, int64_t slot, int32_t i);

/* --- mla_layer_check.c --- */

/* Appends the keys of the new tokens, raw, to those of the context. */
void mla_layer_expect_keys(mla_layer_scene *s);

/* The cache against the keys, within the rounding of its dtype. */
void mla_layer_check_cache(const mla_layer_scene *s);

/* From here on the keys of `to` are what the cache of `s` has, so that its rounding is no part of the output's
 * tolerance. */
void mla_layer_read_back(mla_layer_scene *to, const mla_layer_scene *s);

/* The output against the definition, and the padding of its rows. */
void mla_layer_check_outputs(const mla_layer_scene *s);

#endif
