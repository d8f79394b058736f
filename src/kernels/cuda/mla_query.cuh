/* The kernel of mla_query as its launcher (mla_query.cu) knows it. */
#ifndef FV_KERNELS_CUDA_MLA_QUERY_CUH
#define FV_KERNELS_CUDA_MLA_QUERY_CUH

#include "kernels/cuda/ptx.cuh"
#include "ops/mla_query.h"

/* The sizes that it is made for, and the tokens of a block. */
enum { FV_MLA_QUERY_NOPE = 128, FV_MLA_QUERY_ROPE = 64, FV_MLA_QUERY_LATENT = 512, FV_MLA_QUERY_TOKENS = 128 };

/* Blocks (num_heads + writers, tiles of tokens). */
typedef struct mla_query_args {
    fv_tensor_map x_map;      /* [T, depth], boxes of 128 x 64 */
    fv_tensor_map up_map;     /* [H, P + R, depth], of a head's x 64 */
    fv_tensor_map absorb_map; /* [H, P, L], of a head's x 64 */
    fv_tensor_map out_map;    /* [T, H, L + R], of 64 x 1 x 64 */
    fv_rope_kv_write_params keys;
    int32_t num_heads;
    int32_t num_steps; /* 64 of the depth each */
} mla_query_args;

typedef struct fv_cuda_mla_query_kernel {
    void (*kernel)(mla_query_args args);
    int32_t shared_bytes;
    int32_t num_threads;
} fv_cuda_mla_query_kernel;

/* [0] bf16, [1] fp16; in plugins with machine code of sm_90a. */
extern const fv_cuda_mla_query_kernel fv_hopper_mla_query_kernels[2];

#endif
