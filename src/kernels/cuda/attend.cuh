/* The attention kernels as their launcher (attend.cu) knows them. */
#ifndef FV_KERNELS_CUDA_ATTEND_CUH
#define FV_KERNELS_CUDA_ATTEND_CUH

#include "kernels/cuda/attend_job.cuh"
#include "kernels/cuda/overlap.cuh"
#include "ops/kernel_table.h"

enum {
    FV_CUDA_FEWEST_ROWS = 8, /* kernels of few rows have a form for so many */
    FV_CUDA_FEW_ROWS = 16,
    FV_CUDA_FEW_LATENT_ROWS = 32, /* of the 656-byte entry */
    FV_CUDA_MANY_ROWS = 64,       /* head sizes above 128 */
    FV_CUDA_MANY_SHORT_ROWS = 128 /* head sizes up to 128 */
};

typedef struct fv_cuda_attend_kernel {
    void (*kernel)(attend_args args);
    int32_t shared_bytes;
    int32_t num_threads;
    int32_t block_m;         /* rows that it takes at once */
    int32_t takes_row_parts; /* 1: the rows of an item are dealt out to attend_args.row_parts blocks, block_m to each */
    int32_t stays;        /* blocks of threads on a multiprocessor that take one job after the other; 0: one job each */
    int32_t heads;        /* KV heads of a job; 0: one */
    int32_t splits_items; /* 1: two of its blocks can share an item's keys */
    int32_t map_tile;         /* keys of a tile that may come by maps of keys and values (fv_cuda_map_planes); 0: none does */
    int32_t narrows_partials; /* 1: its partial results are of 16 bits where narrow_partial.cuh allows it */
} fv_cuda_attend_kernel;

/* Those of one head size: [0] bf16, [1] fp16. */
typedef struct fv_cuda_attend_kernels {
    int32_t head_size, v_head_size; /* at most */
    fv_cuda_attend_kernel few[2];   /* 16 rows */
    fv_cuda_attend_kernel many[2];  /* 64 or 128 */
} fv_cuda_attend_kernels;

extern const fv_cuda_attend_kernels fv_cuda_attend_128;
extern const fv_cuda_attend_kernels fv_cuda_attend_256;
extern const fv_cuda_attend_kernels fv_cuda_attend_512;
extern const fv_cuda_attend_kernels fv_cuda_attend_latent;

/* Few rows over plain caches (attend_few.cuh), by head size, ascending. */
typedef struct fv_cuda_attend_few_kernels {
    int32_t head_size; /* of keys and values, at most */
    /* Items of up to 8 rows, and of more; queries of bf16 or fp16. */
    fv_cuda_attend_kernel wide[2];   /* entries of the queries' dtype */
    fv_cuda_attend_kernel narrow[2]; /* entries of one byte */
    /* As narrow[0], of more warps, for jobs that are one round of two blocks a multiprocessor; `kernel` NULL: there is
     * none. */
    fv_cuda_attend_kernel narrow_of_two;
    /* As wide[0], of fewer warps, for jobs that are one round of three blocks a multiprocessor, not of two; or NULL. */
    fv_cuda_attend_kernel wide_of_three;
    /* Entries of one byte, jobs of two KV heads of up to half of FV_CUDA_FEWEST_ROWS each; or NULL. */
    fv_cuda_attend_kernel narrow_pair;
} fv_cuda_attend_few_kernels;

enum { FV_CUDA_NUM_ATTEND_FEW = 3 };
extern const fv_cuda_attend_few_kernels fv_cuda_attend_few[FV_CUDA_NUM_ATTEND_FEW];

/* fp32 arithmetic without tensor cores, for every dtype and head size; its shared memory is by head size. [1] has
 * shorter tiles, for long heads where a block may have less than 112 KB, as on compute capability 8.6, 8.9 and 12.0. */
extern const fv_cuda_attend_kernel fv_cuda_attend_f32[2];
fv_cuda_attend_kernel fv_cuda_find_f32_kernel(const fv_attend_params *params, int32_t max_shared);

/* Sets key_map and map_rows of a call over latents where tiles of 64 are whole pages, parts of one, or made of some:
 * pages of multiples of 64 tokens, or of 16 or 32. Else leaves map_rows 0. */
void fv_cuda_map_keys(attend_args *args, const fv_cuda_state *state);

/* The same, and maps[1], of keys and values of heads, for tiles of `tile` keys: pages of multiples of 16 tokens, whose heads lie
 * side by side or one behind the other. */
void fv_cuda_map_planes(attend_args *args, const fv_cuda_state *state, int32_t tile);

/* Launches the kernel that serves the call best: of blocks of block_m rows, or of fewer; Hopper's own only where
 * may_be_hopper. */
fv_status fv_cuda_attend_launch(const fv_launch *launch, const fv_attend_params *params, int32_t block_m,
                                fv_rescaling rescaling, bool may_be_hopper);

/* Does the kernel that it launches for latents, where it may be Hopper's own, write partial results in 16 bits? */
bool fv_cuda_narrows_partials(const fv_launch *launch, const fv_attend_params *params, fv_rescaling rescaling);

#endif
