/* Three new tokens of one sequence attend to each other through a paged cache: problem, plan, update,
 * run. All keys are equal, so that each token gets the mean of the values up to its own.
 *
 *   cc attend.c $(pkg-config --cflags --libs fovea) -o attend && ./attend      ->  1.0 1.5 2.0 */
#include <fovea/fovea.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 3, HEADS = 4, KV_HEADS = 2, HEAD_SIZE = 64, BLOCK_SIZE = 16, BLOCKS = 2 };

int main(void)
{
    static float q[TOKENS][HEADS][HEAD_SIZE], k[TOKENS][KV_HEADS][HEAD_SIZE], v[TOKENS][KV_HEADS][HEAD_SIZE];
    static float cache[BLOCKS][2][BLOCK_SIZE][KV_HEADS][HEAD_SIZE], out[TOKENS][HEADS][HEAD_SIZE];
    for (int i = 0; i < TOKENS * KV_HEADS * HEAD_SIZE; i++) {
        v[i / (KV_HEADS * HEAD_SIZE)][i / HEAD_SIZE % KV_HEADS][i % HEAD_SIZE] = 1.0f + i / (KV_HEADS * HEAD_SIZE);
    }

    const fv_problem problem = {.struct_size = sizeof(problem),
                                .kind = FV_ATTENTION_MHA,
                                .q_dtype = FV_DTYPE_F32,
                                .mha = {.num_heads = HEADS, .num_kv_heads = KV_HEADS, .head_size = HEAD_SIZE},
                                .kv_layout = FV_KV_LAYOUT_NB_2_BS_H_D,
                                .block_size = BLOCK_SIZE};
    const fv_bounds bounds = {
        .struct_size = sizeof(bounds), .max_num_seqs = 1, .max_num_tokens = TOKENS, .max_seq_len = BLOCK_SIZE};
    const fv_batch batch = {.struct_size = sizeof(batch),
                            .num_seqs = 1,
                            .num_tokens = TOKENS,
                            .query_start = (int32_t[]){0, TOKENS},
                            .seq_lens = (int32_t[]){TOKENS},
                            .block_table = (int32_t[]){1},
                            .block_table_stride = 1,
                            .block_table_width = 1,
                            .slot_mapping = (int64_t[]){BLOCK_SIZE, BLOCK_SIZE + 1, BLOCK_SIZE + 2}};
    fv_layer layer = {.struct_size = sizeof(layer),
                      .q = fv_tensor_3d(q, FV_DTYPE_F32, TOKENS, HEADS, HEAD_SIZE),
                      .k = fv_tensor_3d(k, FV_DTYPE_F32, TOKENS, KV_HEADS, HEAD_SIZE),
                      .v = fv_tensor_3d(v, FV_DTYPE_F32, TOKENS, KV_HEADS, HEAD_SIZE),
                      .out = fv_tensor_3d(out, FV_DTYPE_F32, TOKENS, HEADS, HEAD_SIZE)};

    fv_context *context = NULL;
    fv_plan *plan = NULL;
    fv_status status = fv_context_create(&context, NULL);
    if (!status) status = fv_plan_create(&plan, context, &problem, &bounds, NULL);
    if (!status) {
        status = fv_kv_view_init(&layer.kv_cache, cache, problem.kv_layout, FV_DTYPE_F32, BLOCKS, BLOCK_SIZE, KV_HEADS,
                                 HEAD_SIZE);
    }
    void *workspace = status ? NULL : aligned_alloc(256, (fv_plan_workspace_bytes(plan) + 256) / 256 * 256);
    if (!status) status = fv_plan_update(plan, &batch, NULL);
    if (!status) status = fv_plan_run(plan, &layer, workspace, NULL);
    if (!status) printf("%.1f %.1f %.1f\n", out[0][0][0], out[1][0][0], out[2][0][0]);
    if (status) fprintf(stderr, "%s: %s\n", fv_status_name(status), fv_last_error());

    free(workspace);
    fv_plan_destroy(plan);
    fv_context_destroy(context);
    return status != FV_OK;
}
