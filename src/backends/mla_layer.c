/* The MLA layer around a plan: products by the caller's GEMM, norms and rotations by the plan's kernels.
 *
 *   workspace   the plan's | down [T, q_latent Lq, latent L + R] | q [T, H (P + R)] | attended [T, H V]
 *
 * q_latent and latent share rows, so that one product makes both where q_down and kv_down lie together. q and latent are
 * rotated in place, each in its last R elements of a head, by the kernel that writes the cache. */
#include "fovea/mla.h"

#include "backends/schedule.h"
#include "core/error.h"
#include "ops/ops_check.h"

typedef struct mla_buffers {
    size_t down, q, attended;
    int64_t latent_column; /* where latents begin in a row of down: Lq or more, whole FV_WORKSPACE_ALIGNMENTs */
    size_t bytes;
} mla_buffers;

static size_t take(size_t *at, int64_t num_rows, int64_t elements, fv_dtype dtype)
{
    const size_t offset = *at;
    *at += (size_t)fv_round_up(num_rows * elements * (int64_t)fv_dtype_bytes(dtype), FV_WORKSPACE_ALIGNMENT);
    return offset;
}

static int32_t q_size(const fv_mla_shape *mla)
{
    return mla->num_heads * (mla->qk_nope_head_dim + mla->qk_rope_head_dim);
}

static int32_t entry_size(const fv_mla_shape *mla) { return mla->kv_lora_rank + mla->qk_rope_head_dim; }

static mla_buffers lay_out(const fv_plan *plan, int64_t q_lora_rank)
{
    const fv_problem *problem = &plan->problem;
    const fv_mla_shape *mla = &problem->mla;
    const int64_t rows = plan->bounds.max_num_tokens;
    size_t at = (size_t)fv_round_up((int64_t)plan->workspace.bytes, FV_WORKSPACE_ALIGNMENT);
    mla_buffers buffers;
    buffers.latent_column = fv_round_up(q_lora_rank,
                                        FV_WORKSPACE_ALIGNMENT / (int64_t)fv_dtype_bytes(problem->q_dtype));
    buffers.down = take(&at, rows, buffers.latent_column + entry_size(mla), problem->q_dtype);
    buffers.q = take(&at, rows, q_size(mla), problem->q_dtype);
    buffers.attended = take(&at, rows, (int64_t)mla->num_heads * mla->v_head_dim, problem->out_dtype);
    buffers.bytes = at;
    return buffers;
}

size_t fv_mla_workspace_bytes(const fv_plan *plan, int32_t q_lora_rank)
{
    return plan ? lay_out(plan, fv_max_i32(0, q_lora_rank)).bytes : 0;
}

/* --- checks ------------------------------------------------------------------------------------------------- */

static fv_status check_plan(const fv_plan *plan, const fv_mla_layer *layer, const void *workspace)
{
    if (!plan || !layer || !workspace) return fv_fail(FV_ERR_INVALID, "plan, layer or workspace is NULL");
    fv_status status = fv_plan_check_workspace(workspace);
    if (status != FV_OK) return status;
    status = fv_check_struct_size("fv_mla_layer", layer->struct_size, sizeof(*layer));
    if (status != FV_OK) return status;
    const fv_problem *problem = &plan->problem;
    if (problem->kind != FV_ATTENTION_MLA || problem->mla.absorbed) {
        return fv_fail(FV_ERR_INVALID, "the plan's problem is %s; accepted: MLA that is not absorbed",
                       problem->kind == FV_ATTENTION_MLA ? "absorbed" : "MHA");
    }
    if (problem->context_parallel.world > 1 && !layer->attended.data) {
        return fv_fail(FV_ERR_INVALID,
                       "context_parallel.world is %d and attended has no data; accepted: 1, or a rank "
                       "that ends with attended and lse",
                       problem->context_parallel.world);
    }
    if (!layer->attended.data != !layer->lse.data) {
        return fv_fail(FV_ERR_INVALID, "only one of attended and lse is given");
    }
    if (!plan->updated) return fv_fail(FV_ERR_INVALID, "fv_mla_run before a successful fv_plan_update");
    if (!layer->gemm) return fv_fail(FV_ERR_INVALID, "fv_mla_layer.gemm is NULL");
    return FV_OK;
}

/* [num_rows, columns] with dense rows; x and out may have more rows. */
static fv_status check_matrix(const char *name, const fv_tensor *tensor, int64_t num_rows, int64_t columns,
                              int32_t is_activation)
{
    if (!tensor->data) return fv_fail(FV_ERR_INVALID, "%s has no data", name);
    const int32_t has_rows = is_activation ? tensor->shape[0] >= num_rows : tensor->shape[0] == num_rows;
    if (tensor->num_dims == 2 && has_rows && tensor->shape[1] == columns &&
        tensor->stride_bytes[1] == (int64_t)fv_dtype_bytes(tensor->dtype)) {
        return FV_OK;
    }
    return fv_fail(FV_ERR_INVALID, "%s has %d dimensions [%lld, %lld]; accepted: 2, [%lld%s, %lld], dense rows", name,
                   tensor->num_dims, (long long)tensor->shape[0], (long long)tensor->shape[1], (long long)num_rows,
                   is_activation ? " or more" : "", (long long)columns);
}

static fv_status check_dtype(const char *name, const fv_tensor *tensor, fv_dtype dtype)
{
    if (tensor->dtype == dtype) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "%s is %s; the problem says %s", name, fv_dtype_name(tensor->dtype),
                   fv_dtype_name(dtype));
}

/* Absent, or [size] dense of a dtype that rms_norm takes. */
static fv_status check_norm(const char *name, const fv_tensor *norm, int64_t size, const fv_plan *plan)
{
    if (!norm->data) return FV_OK;
    if (!plan->kernels->rms_norm) {
        return fv_fail(FV_ERR_UNSUPPORTED, "%s is given; kernels %s of device %s have no rms_norm", name,
                       plan->kernels->name, plan->device->name);
    }
    const int32_t is_taken = norm->dtype == FV_DTYPE_F32 || norm->dtype == FV_DTYPE_F16 || norm->dtype == FV_DTYPE_BF16;
    if (is_taken && norm->num_dims == 1 && norm->shape[0] == size &&
        norm->stride_bytes[0] == (int64_t)fv_dtype_bytes(norm->dtype)) {
        return FV_OK;
    }
    return fv_fail(FV_ERR_INVALID,
                   "%s is %s with %d dimensions [%lld]; accepted: float32, float16 or bfloat16, 1, [%lld], dense", name,
                   fv_dtype_name(norm->dtype), norm->num_dims, (long long)norm->shape[0], (long long)size);
}

static fv_status check_weights(const fv_plan *plan, const fv_mla_layer *layer)
{
    const fv_mla_shape *mla = &plan->problem.mla;
    const int64_t hidden = layer->x.shape[1];
    const int64_t q_lora = layer->q_down.data ? layer->q_down.shape[0] : 0;
    fv_status status = FV_OK;
    if (layer->q_down.data && q_lora < 1) {
        return fv_fail(FV_ERR_INVALID, "q_down has %lld rows; accepted: 1 or more, or no data", (long long)q_lora);
    }
    if (q_lora > 0) status = check_matrix("q_down", &layer->q_down, q_lora, hidden, 0);
    if (status == FV_OK && layer->q_norm.data && !q_lora) {
        status = fv_fail(FV_ERR_INVALID, "q_norm is given without q_down");
    }
    if (status == FV_OK) status = check_norm("q_norm", &layer->q_norm, q_lora, plan);
    if (status == FV_OK) status = check_matrix("q_up", &layer->q_up, q_size(mla), q_lora ? q_lora : hidden, 0);
    if (status == FV_OK) status = check_matrix("kv_down", &layer->kv_down, entry_size(mla), hidden, 0);
    if (status == FV_OK) status = check_norm("kv_norm", &layer->kv_norm, mla->kv_lora_rank, plan);
    if (status == FV_OK && !(layer->rms_epsilon >= 0)) {
        status = fv_fail(FV_ERR_INVALID, "rms_epsilon is %g; accepted: 0 or more", (double)layer->rms_epsilon);
    }
    return status;
}

/* What fv_rope does not check: that the rotation is that of the plan's keys. */
static fv_status check_rotation(const fv_plan *plan, const fv_rotation *rotation)
{
    const fv_mla_shape *mla = &plan->problem.mla;
    if (mla->qk_rope_head_dim == 0) return FV_OK;
    if (!plan->kernels->rope_kv_write) {
        return fv_fail(FV_ERR_UNSUPPORTED, "kernels %s of device %s have no rope_kv_write", plan->kernels->name,
                       plan->device->name);
    }
    if (rotation->rope_dim != mla->qk_rope_head_dim) {
        return fv_fail(FV_ERR_INVALID, "rotation.rope_dim is %d; the problem says %d", rotation->rope_dim,
                       mla->qk_rope_head_dim);
    }
    if (!mla->rotate_at_reading) return FV_OK;
    if (rotation->style != FV_ROPE_HALF) {
        return fv_fail(FV_ERR_UNSUPPORTED, "rotation.style is interleaved; keys are rotated at reading by halves");
    }
    if (rotation->row_stride != 0 && rotation->row_stride != rotation->rope_dim / 2) {
        return fv_fail(FV_ERR_INVALID, "rotation.row_stride is %lld; accepted where keys are rotated at reading: %d",
                       (long long)rotation->row_stride, rotation->rope_dim / 2);
    }
    return FV_OK;
}

/* Where the run ends: with the layer's output ... */
static fv_status check_output(const fv_problem *problem, const fv_mla_layer *layer, int64_t num_rows)
{
    const int64_t hidden = layer->x.shape[1], attended_size = (int64_t)problem->mla.num_heads * problem->mla.v_head_dim;
    fv_status status = check_matrix("out", &layer->out, num_rows, hidden, 1);
    if (status == FV_OK) status = check_dtype("out", &layer->out, problem->out_dtype);
    return status == FV_OK ? check_matrix("o", &layer->o, hidden, attended_size, 0) : status;
}

/* ... or with what its heads attended. */
static fv_status check_attended(const fv_plan *plan, const fv_mla_layer *layer, int64_t num_rows)
{
    const fv_problem *problem = &plan->problem;
    const fv_mla_shape *mla = &problem->mla;
    const fv_status status = fv_ops_check_rows(plan->device, "attended", &layer->attended, problem->out_dtype, num_rows,
                                               mla->num_heads, mla->v_head_dim);
    if (status != FV_OK) return status;
    return fv_ops_check_rows(plan->device, "lse", &layer->lse, FV_DTYPE_F32, num_rows, mla->num_heads, 0);
}

static fv_status check_alignment(const fv_device *device, const fv_mla_layer *layer)
{
    const struct {
        const char *name;
        const fv_tensor *tensor;
    } all[] = {
        {"x", &layer->x},       {"out", &layer->out},         {"q_down", &layer->q_down}, {"q_norm", &layer->q_norm},
        {"q_up", &layer->q_up}, {"kv_down", &layer->kv_down}, {"o", &layer->o},           {"kv_norm", &layer->kv_norm},
    };
    fv_status status = FV_OK;
    for (int32_t i = 0; i < FV_ARRAY_LEN(all) && status == FV_OK; i++)
        if (all[i].tensor->data) status = fv_ops_check_alignment(device, all[i].name, all[i].tensor);
    return status;
}

static fv_status check_layer(const fv_plan *plan, const fv_mla_layer *layer, int64_t num_rows)
{
    const fv_problem *problem = &plan->problem;
    fv_status status = check_matrix("x", &layer->x, num_rows, layer->x.shape[1], 1);
    if (status == FV_OK) status = check_dtype("x", &layer->x, problem->q_dtype);
    if (status == FV_OK)
        status = layer->attended.data ? check_attended(plan, layer, num_rows) : check_output(problem, layer, num_rows);
    if (status == FV_OK) status = check_weights(plan, layer);
    if (status == FV_OK) status = check_alignment(plan->device, layer);
    return status == FV_OK ? check_rotation(plan, &layer->rotation) : status;
}

/* --- the stages --------------------------------------------------------------------------------------------- */

typedef struct mla_run {
    fv_plan *plan;
    const fv_mla_layer *layer;
    fv_tensor down;                          /* q_latent and latent */
    fv_tensor q_latent, q, latent, attended; /* [num_rows, ...] in the workspace */
    int64_t num_rows;
    fv_launch launch;
} mla_run;

/* A static grid on a device is launched by the bounds, so that a captured graph serves every step. */
static int64_t launch_rows(const fv_plan *plan)
{
    const int32_t sized_by_bounds = plan->static_grid && !plan->device->host_is_device;
    return sized_by_bounds ? plan->bounds.max_num_tokens : plan->batch.num_tokens;
}

/* `columns` of the rows of `matrix`, from `first` on. */
static fv_tensor columns_of(const fv_tensor *matrix, int64_t first, int64_t columns)
{
    fv_tensor part = *matrix;
    part.data = (char *)part.data + first * part.stride_bytes[1];
    part.shape[1] = columns;
    return part;
}

static mla_run make_run(fv_plan *plan, const fv_mla_layer *layer, char *workspace, fv_stream stream)
{
    const fv_problem *problem = &plan->problem;
    const fv_mla_shape *mla = &problem->mla;
    const int64_t rows = launch_rows(plan), q_lora = layer->q_down.data ? layer->q_down.shape[0] : 0;
    const mla_buffers buffers = lay_out(plan, q_lora);
    const int64_t width = buffers.latent_column + entry_size(mla);
    const fv_tensor down = fv_tensor_2d(workspace + buffers.down, problem->q_dtype, rows, width);
    return (mla_run){
        .plan = plan,
        .layer = layer,
        .down = down,
        .q_latent = columns_of(&down, 0, q_lora),
        .q = fv_tensor_2d(workspace + buffers.q, problem->q_dtype, rows, q_size(mla)),
        .latent = columns_of(&down, buffers.latent_column, entry_size(mla)),
        .attended = fv_tensor_2d(workspace + buffers.attended, problem->out_dtype, rows,
                                 (int64_t)mla->num_heads * mla->v_head_dim),
        .num_rows = rows,
        .launch = {plan->device, &plan->context->executor, stream},
    };
}

/* y = x weights^T. */
static fv_status multiply(const mla_run *run, const fv_tensor *y, const fv_tensor *x, const fv_tensor *weights)
{
    const fv_gemm gemm = {
        .struct_size = sizeof(gemm),
        .num_matrices = 1,
        .m = (int32_t)run->num_rows,
        .n = (int32_t)weights->shape[0],
        .k = (int32_t)weights->shape[1],
        .b_is_transposed = 1,
        .a_dtype = x->dtype,
        .b_dtype = weights->dtype,
        .c_dtype = y->dtype,
        .a = x->data,
        .a_row_stride = x->stride_bytes[0],
        .b = weights->data,
        .b_row_stride = weights->stride_bytes[0],
        .c = y->data,
        .c_row_stride = y->stride_bytes[0],
    };
    return run->layer->gemm(run->layer->gemm_user, &gemm, run->launch.stream);
}

/* The first elements of each row, as many as the norm has. */
static fv_status norm_rows(const mla_run *run, const fv_tensor *rows, const fv_tensor *norm)
{
    if (!norm->data) return FV_OK;
    const fv_rms_norm_params params = {
        .rows = rows->data,
        .row_stride = rows->stride_bytes[0],
        .dtype = rows->dtype,
        .weight = norm->data,
        .weight_dtype = norm->dtype,
        .epsilon = run->layer->rms_epsilon,
        .num_rows = (int32_t)run->num_rows,
        .size = (int32_t)norm->shape[0],
    };
    return run->plan->kernels->rms_norm(&run->launch, &params);
}

/* The rows of kv_down follow those of q_down, and so do their outputs in a row of `down`. */
static int32_t is_joined(const mla_run *run)
{
    const fv_tensor *q_down = &run->layer->q_down, *kv_down = &run->layer->kv_down;
    return q_down->data && q_down->dtype == kv_down->dtype && q_down->stride_bytes[0] == kv_down->stride_bytes[0] &&
           (char *)q_down->data + q_down->shape[0] * q_down->stride_bytes[0] == kv_down->data &&
           q_down->shape[0] + kv_down->shape[0] == run->down.shape[1];
}

/* Both latents of x. */
static fv_status project_down(const mla_run *run)
{
    const fv_mla_layer *layer = run->layer;
    fv_status status = FV_OK;
    if (is_joined(run)) {
        fv_tensor weights = layer->q_down;
        weights.shape[0] += layer->kv_down.shape[0];
        status = multiply(run, &run->down, &layer->x, &weights);
    } else {
        if (layer->q_down.data) status = multiply(run, &run->q_latent, &layer->x, &layer->q_down);
        if (status == FV_OK) status = multiply(run, &run->latent, &layer->x, &layer->kv_down);
    }
    if (status == FV_OK) status = norm_rows(run, &run->q_latent, &layer->q_norm);
    return status == FV_OK ? norm_rows(run, &run->latent, &layer->kv_norm) : status;
}

/* What queries are made of. */
static const fv_tensor *query_input(const mla_run *run)
{
    return run->layer->q_down.data ? &run->q_latent : &run->layer->x;
}

static fv_status project_up(const mla_run *run) { return multiply(run, &run->q, query_input(run), &run->layer->q_up); }

/* `rows` as [num_rows, num_heads, head_size]. */
static fv_tensor heads_of(const fv_tensor *rows, int64_t num_heads)
{
    fv_tensor heads = fv_tensor_3d(rows->data, rows->dtype, rows->shape[0], num_heads, rows->shape[1] / num_heads);
    heads.stride_bytes[0] = rows->stride_bytes[0];
    return heads;
}

/* The last rope_dim elements of each head. */
static fv_tensor rope_part(const fv_tensor *rows, int64_t num_heads, int64_t rope_dim)
{
    fv_tensor part = heads_of(rows, num_heads);
    part.data = (char *)part.data + (part.shape[2] - rope_dim) * (int64_t)fv_dtype_bytes(part.dtype);
    part.shape[2] = rope_dim;
    return part;
}

/* Of queries, and of keys unless the cache holds them as they come. */
static fv_status find_rotation(fv_rope_params *params, const mla_run *run)
{
    const fv_plan *plan = run->plan;
    const fv_mla_shape *mla = &plan->problem.mla;
    const fv_tensor q = rope_part(&run->q, mla->num_heads, mla->qk_rope_head_dim);
    const fv_tensor k = rope_part(&run->latent, 1, mla->qk_rope_head_dim);
    return fv_rope_params_init(params, plan->device, &q, mla->rotate_at_reading ? NULL : &k, &run->layer->rotation,
                               (int32_t)run->num_rows);
}

/* From the latents to what heads attended. */
static fv_status attend(const mla_run *run, char *workspace)
{
    const fv_mla_layer *layer = run->layer;
    const int64_t num_heads = run->plan->problem.mla.num_heads;
    const fv_layer attention = {
        .struct_size = sizeof(attention),
        .q = heads_of(&run->q, num_heads),
        .k = heads_of(&run->latent, 1),
        .kv_cache = layer->kv_cache,
        .out = layer->attended.data ? layer->attended : heads_of(&run->attended, num_heads),
        .lse = layer->lse,
        .k_scale = layer->k_scale,
        .kv_up = layer->kv_up,
        .gemm = layer->gemm,
        .gemm_user = layer->gemm_user,
        .rope_cos = layer->rotation.cos,
        .rope_sin = layer->rotation.sin,
        .num_rope_positions = layer->rotation.max_position,
    };
    if (run->plan->problem.mla.qk_rope_head_dim == 0) {
        const fv_status status = project_up(run);
        return status == FV_OK ? fv_plan_run(run->plan, &attention, workspace, run->launch.stream) : status;
    }
    fv_rope_params rope;
    fv_status status = find_rotation(&rope, run);
    if (status != FV_OK) return status;
    fv_before_layer before = {&rope, query_input(run), &layer->q_up};
    if (!fv_plan_makes_queries(run->plan, &attention, &before)) {
        before.x = NULL;
        status = project_up(run);
    }
    return status == FV_OK ? fv_plan_run_behind(run->plan, &attention, &before, workspace, run->launch.stream) : status;
}

fv_status fv_mla_run(fv_plan *plan, const fv_mla_layer *layer, void *workspace, fv_stream stream)
{
    fv_status status = check_plan(plan, layer, workspace);
    if (status != FV_OK) return status;
    const int64_t num_rows = launch_rows(plan);
    if (num_rows == 0) return FV_OK;
    status = check_layer(plan, layer, num_rows);
    if (status != FV_OK) return status;

    const mla_run run = make_run(plan, layer, workspace, stream);
    status = project_down(&run);
    if (status == FV_OK) status = attend(&run, workspace);
    if (layer->attended.data) return status;
    return status == FV_OK ? multiply(&run, &layer->out, &run.attended, &layer->o) : status;
}
