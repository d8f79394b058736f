/* Weights that stay as the file stores them, in one of three ways:
 *
 *   stripes of W and rows of X go to the kernels of stored/, which have a form for few rows and one for many
 *   many rows, AMX: a chunk of W becomes a panel of tiles, which are multiplied with blocks of rows of X
 *   many rows, kernels in plain C: a panel of floats, which the library's kernel packs and multiplies
 *
 *     stripes  ->  tiles of bf16                ->  blocks of Y
 *     stripes  ->  floats  ->  (bf16, packed)   ->  blocks of Y */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/compiler.h"
#include "core/context.h"
#include "engine/gemm_private.h"
#include "engine/gguf.h"

enum {
    min_panel_rows = 16,     /* below, making a panel takes longer than multiplying with it */
    x_rows_of_task = 64,     /* rows of X that one task of the kernels for few rows multiplies */
    least_bytes = 16 << 10,  /* of W, of a task */
    cached_bytes = 32 << 10, /* stays in the first cache for several rows of X */
    most_bytes = 128 << 10,  /* of W, of a task for few rows */
    stripes_at_once = 2,     /* that the kernels have beside each other for several rows of X */
    many_stripes = 6,        /* of which tasks for many rows have a multiple, up to all of a call's */
    many_tasks_per_worker = 4,
    min_many_rows_of_task = 32, /* of X, where weights have too few stripes for all workers */
    tasks_per_worker = 8,
    tile_outputs = 32,            /* of a panel of tiles, at least */
    tile_panel_bytes = 512 << 10, /* of one that has more: the second cache holds it beside rows of X */
    tile_features = 4096,         /* of it, at most: more are multiplied in parts */
    tile_row_block = 128,         /* rows of X that a panel is at least made for, where there are so many */
    tile_tasks_per_worker = 4,    /* where panels are the smallest; each is made anew for every task */
};

void fv_gemm_stored_init(fv_gemm_stored *stored, fv_isa limit)
{
    stored->table = fv_stored_find_table(limit);
    stored->tiles = fv_stored_find_tiles(limit);
}

/* Does the library multiply weights as stored, where there are many rows? */
static bool has_library(const fv_gemm_stored *stored) { return !stored->tiles && stored->table->expand; }

static bool uses_panels(const fv_gemm_job *job)
{
    const fv_gemm_stored *stored = &job->gemm->stored;
    return !job->batch_invariant && job->num_rows >= min_panel_rows && (stored->tiles || has_library(stored));
}

bool fv_gemm_stored_is_smaller(const fv_gemm_library *gemm, int64_t in_features, const fv_gemm_rows *parts,
                               int32_t num_parts)
{
    if (!gemm->stored.table) return false;
    size_t bytes = 0, expanded_bytes = 0;
    for (int32_t i = 0; i < num_parts; i++) {
        const fv_stored_layout *layout = fv_stored_find_layout(parts[i].type);
        if (!layout) return false;
        bytes += (size_t)parts[i].num_rows * fv_gguf_type_bytes(parts[i].type, in_features);
        expanded_bytes += (size_t)(parts[i].num_rows * in_features) * fv_dtype_bytes(gemm->kernel->dtype);
    }
    return bytes < expanded_bytes;
}

static size_t bytes_of_part(const fv_stored_rows *part)
{
    return (size_t)fv_ceil_div(part->num_rows, FV_STORED_ROWS) *
           fv_stored_stripe_bytes(part->layout, part->in_features);
}

fv_status fv_gemm_stored_prepare(fv_gemm_weight *weight, fv_gemm_library *gemm, const fv_gemm_rows *parts,
                                 int32_t num_parts)
{
    fv_gemm_stored *stored = &gemm->stored;
    for (int32_t i = 0; i < num_parts; i++) {
        fv_stored_rows *part = &weight->parts[i];
        *part = (fv_stored_rows){
            .layout = fv_stored_find_layout(parts[i].type),
            .num_rows = parts[i].num_rows,
            .in_features = weight->in_features,
        };
        if (part->in_features % part->layout->values != 0) {
            return fv_fail(FV_ERR_INVALID, "rows of %lld elements of type %s; accepted: multiples of %d",
                           (long long)part->in_features, fv_gguf_type_name(parts[i].type), part->layout->values);
        }
        weight->bytes += (size_t)fv_round_up((int64_t)bytes_of_part(part), FV_GEMM_ALIGNMENT);
        if (!has_library(stored)) continue;
        size_t packed_bytes = 0;
        const fv_status status = fv_gemm_prepare_shapes(&packed_bytes, gemm, part->num_rows, part->in_features);
        if (status != FV_OK) return status;
        if (packed_bytes > stored->max_packed_bytes) stored->max_packed_bytes = packed_bytes;
    }
    weight->num_parts = num_parts;
    if (!stored->is_used) {
        const size_t used = strlen(gemm->description);
        snprintf(gemm->description + used, sizeof(gemm->description) - used, ", weights as stored: %s%s%s",
                 stored->table->name, stored->tiles ? ", many rows: " : "", stored->tiles ? stored->tiles->name : "");
    }
    stored->is_used = true;
    stored->max_in_features = fv_max_i64(stored->max_in_features, weight->in_features);
    return FV_OK;
}

/* --- filling ------------------------------------------------------------------------------------- */

typedef struct fill_job {
    const fv_stored_rows *part;
    const uint8_t *rows;
    uint8_t *stripes;
} fill_job;

static void fill_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const fill_job *job = user;
    const fv_stored_rows *part = job->part;
    const int64_t first_row = index * FV_STORED_ROWS;
    const size_t row_bytes = fv_gguf_type_bytes(part->layout->type, part->in_features);
    fv_stored_pack_stripe(job->stripes + (size_t)index * fv_stored_stripe_bytes(part->layout, part->in_features),
                          job->rows + (size_t)first_row * row_bytes,
                          fv_min_i64(FV_STORED_ROWS, part->num_rows - first_row), part->in_features, part->layout);
}

void fv_gemm_stored_fill(fv_gemm_weight *weight, fv_gemm_library *gemm, const fv_gemm_rows *parts)
{
    uint8_t *at = weight->data;
    for (int32_t i = 0; i < weight->num_parts; i++) {
        fv_stored_rows *part = &weight->parts[i];
        part->stripes = at;
        fill_job job = {part, parts[i].data, at};
        fv_context_parallel_for(gemm->context, fv_ceil_div(part->num_rows, FV_STORED_ROWS), fill_task, &job);
        at += fv_round_up((int64_t)bytes_of_part(part), FV_GEMM_ALIGNMENT);
    }
}

/* --- room ---------------------------------------------------------------------------------------- */

/* Integers, scales and sums of one row of X. */
static size_t bytes_of_x(int64_t in_features)
{
    const int64_t num_blocks = fv_ceil_div(in_features, FV_STORED_X_BLOCK);
    const int64_t bytes = num_blocks * (FV_STORED_X_BLOCK * (int64_t)sizeof(int16_t) + 2 * (int64_t)sizeof(float));
    return (size_t)fv_round_up(bytes, FV_GEMM_ALIGNMENT);
}

/* Of a chunk of the library's kernel, as floats. */
static size_t bytes_of_floats(const fv_gemm_kernel *kernel, int64_t in_features)
{
    return (size_t)fv_round_up(kernel->chunk_outputs * in_features * (int64_t)sizeof(float), FV_GEMM_ALIGNMENT);
}

static size_t bytes_of_panel(const fv_gemm_library *gemm)
{
    const fv_gemm_stored *stored = &gemm->stored;
    int64_t bytes = (int64_t)stored->table->many_bytes;
    if (stored->tiles) bytes = fv_max_i64(bytes, tile_panel_bytes);
    if (has_library(stored)) {
        bytes = (int64_t)bytes_of_floats(gemm->kernel, stored->max_in_features);
        if (gemm->kernel->pack) bytes += (int64_t)stored->max_packed_bytes;
    }
    return (size_t)fv_round_up(bytes, FV_GEMM_ALIGNMENT);
}

static void free_room(fv_gemm_stored *stored)
{
    free(stored->x);
    free(stored->x_memory);
    free(stored->x_tiles);
    free(stored->panels);
    free(stored->ranges);
    stored->x = NULL;
    stored->x_memory = NULL;
    stored->x_tiles = NULL;
    stored->panels = NULL;
    stored->ranges = NULL;
    stored->x_rows = 0;
}

fv_status fv_gemm_stored_make_room(fv_gemm_library *gemm)
{
    fv_gemm_stored *stored = &gemm->stored;
    if (!stored->is_used) return FV_OK;
    const size_t x_bytes = bytes_of_x(stored->max_in_features), panel_bytes = bytes_of_panel(gemm);
    const bool is_enough = gemm->max_rows <= stored->x_rows && x_bytes <= stored->x_bytes &&
                           panel_bytes <= stored->panel_bytes;
    if (is_enough) return FV_OK;
    const size_t workers = (size_t)fv_context_num_workers(gemm->context), all_panels = panel_bytes * workers;
    fv_gemm_stored made = *stored; /* the room that is there is others', too, and stays where this fails */
    made.x = calloc((size_t)gemm->max_rows + 1, sizeof(*made.x));
    made.x_memory = aligned_alloc(FV_GEMM_ALIGNMENT, x_bytes * ((size_t)gemm->max_rows + 1));
    made.panels = aligned_alloc(FV_GEMM_ALIGNMENT, all_panels);
    made.ranges = aligned_alloc(FV_CACHE_LINE, workers * sizeof(*made.ranges));
    made.x_tiles = NULL;
    if (made.tiles)
        made.x_tiles = aligned_alloc(FV_GEMM_ALIGNMENT,
                                     fv_stored_tiles_bytes(gemm->max_rows + 1, stored->max_in_features));
    if (!made.x || !made.x_memory || !made.panels || !made.ranges || (made.tiles && !made.x_tiles)) {
        free_room(&made);
        return fv_fail(FV_ERR_NO_MEMORY, "no memory for %lld rows of activations and %zu bytes of weights",
                       (long long)gemm->max_rows, all_panels);
    }
    free_room(stored);
    *stored = made;
    stored->x_rows = gemm->max_rows;
    stored->x_bytes = x_bytes;
    stored->panel_bytes = panel_bytes;
    return FV_OK;
}

void fv_gemm_stored_deinit(fv_gemm_stored *stored) { free_room(stored); }

/* --- the kernels --------------------------------------------------------------------------------- */

static void load_x_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const fv_gemm_job *job = user;
    const fv_gemm_stored *stored = &job->gemm->stored;
    const int64_t in_features = job->weight->in_features, num_blocks = in_features / FV_STORED_X_BLOCK;
    const int64_t end = fv_min_i64(job->num_rows, (index + 1) * FV_STORED_MAX_X);
    for (int64_t row = index * FV_STORED_MAX_X; row < end; row++) {
        fv_stored_x *x = &stored->x[row];
        uint8_t *memory = (uint8_t *)stored->x_memory + (size_t)row * stored->x_bytes;
        x->values = job->x + row * in_features;
        x->integers = (int16_t *)(void *)memory;
        x->scales = (float *)(void *)(memory + (size_t)(num_blocks * FV_STORED_X_BLOCK) * sizeof(int16_t));
        x->sums = x->scales + num_blocks;
        if (stored->table->load_x) stored->table->load_x(x, in_features);
    }
}

static int64_t num_stripes(const fv_stored_rows *part) { return fv_ceil_div(part->num_rows, FV_STORED_ROWS); }

static int64_t stripes_of_weight(const fv_gemm_weight *weight)
{
    int64_t count = 0;
    for (int32_t i = 0; i < weight->num_parts; i++) count += num_stripes(&weight->parts[i]);
    return count;
}

/* Of chunk_stripes each; none is of two parts. */
static int64_t chunks_of_weight(const fv_gemm_weight *weight, int64_t chunk_stripes)
{
    int64_t count = 0;
    for (int32_t i = 0; i < weight->num_parts; i++) count += fv_ceil_div(num_stripes(&weight->parts[i]), chunk_stripes);
    return count;
}

/* For up to FV_STORED_MAX_X rows of X as much as is worth a task, for more what a cache holds; so little that each worker has
 * several tasks of the weight, where it has so many stripes. */
static int64_t stripes_of_task(const fv_gemm_job *job)
{
    const fv_gemm_weight *weight = job->weight;
    const int64_t workers = fv_context_num_workers(job->gemm->context);
    const int64_t most = job->num_rows <= FV_STORED_MAX_X ? most_bytes : cached_bytes;
    const int64_t share = (int64_t)weight->bytes / (workers * tasks_per_worker);
    const int64_t bytes = fv_max_i64(least_bytes, fv_min_i64(most, share));
    const int64_t at_once = job->num_rows > 1 ? stripes_at_once : 1;
    return fv_max_i64(at_once, bytes * stripes_of_weight(weight) / (int64_t)weight->bytes);
}

/* Stripes [first, first + chunk_stripes) of the part that chunk `index` is of, as far as they are there. Returns the
 * output of its first row. */
static int64_t stripes_at(fv_stored_rows *rows, const fv_gemm_job *job, int64_t index)
{
    int64_t first_output = 0;
    const fv_stored_rows *part = job->weight->parts;
    for (;; part++) {
        const int64_t num_chunks = fv_ceil_div(num_stripes(part), job->chunk_stripes);
        if (index < num_chunks) break;
        index -= num_chunks;
        first_output += part->num_rows;
    }
    const int64_t first_row = index * job->chunk_stripes * FV_STORED_ROWS;
    *rows = *part;
    rows->stripes += (size_t)(index * job->chunk_stripes) * fv_stored_stripe_bytes(part->layout, part->in_features);
    rows->num_rows = fv_min_i64(job->chunk_stripes * FV_STORED_ROWS, part->num_rows - first_row);
    return first_output + first_row;
}

/* --- tasks of stripes ---------------------------------------------------------------------------- */

typedef void (*stripes_task_fn)(const fv_gemm_job *job, int64_t index, int32_t worker);

typedef struct task_loop {
    const fv_gemm_job *job;
    stripes_task_fn task;
    fv_task_ranges ranges;
} task_loop;

/* A worker's tasks, until there are none. */
static void take_tasks(void *user, int64_t index, int32_t worker)
{
    const task_loop *loop = user;
    for (int64_t task; (task = fv_task_ranges_take(&loop->ranges, index)) >= 0;) loop->task(loop->job, task, worker);
}

static void run_tasks(const fv_gemm_job *job, int64_t num_tasks, stripes_task_fn task)
{
    fv_context *context = job->gemm->context;
    const fv_task_ranges ranges = {job->gemm->stored.ranges, fv_min_i64(num_tasks, fv_context_num_workers(context))};
    fv_task_ranges_fill(&ranges, num_tasks);
    task_loop loop = {job, task, ranges};
    fv_context_parallel_for(context, ranges.count, take_tasks, &loop);
}

static void multiply_chunk(const fv_gemm_job *job, int64_t index, int32_t worker)
{
    const fv_gemm_stored *stored = &job->gemm->stored;
    fv_stored_rows rows;
    const int64_t output = stripes_at(&rows, job, index % job->num_chunks), y_stride = job->weight->out_features;
    const fv_stored_kernel *kernel = fv_stored_find_kernel(stored->table, rows.layout->type);
    const int64_t first = index / job->num_chunks * job->rows_of_task;
    const int64_t end = fv_min_i64(job->num_rows, first + job->rows_of_task);
    if (job->is_many) {
        kernel->multiply_many(job->y + first * y_stride + output, y_stride, &stored->x[first], end - first, &rows,
                              stored->panels + (size_t)worker * stored->panel_bytes);
        return;
    }
    for (int64_t row = first; row < end; row += FV_STORED_MAX_X) {
        const int32_t count = (int32_t)fv_min_i64(end - row, FV_STORED_MAX_X);
        kernel->multiply(job->y + row * y_stride + output, y_stride, &stored->x[row], count, &rows);
    }
}

/* Are there enough rows for the kernels for many, of all parts? */
static bool is_for_many(const fv_gemm_job *job)
{
    for (int32_t i = 0; i < job->weight->num_parts; i++) {
        const int32_t type = job->weight->parts[i].layout->type;
        const fv_stored_kernel *kernel = fv_stored_find_kernel(job->gemm->stored.table, type);
        if (!kernel->multiply_many || job->num_rows < kernel->min_many_x) return false;
    }
    return true;
}

/* For many rows: as many as leave each worker several tasks, up to all of a call's. */
static int64_t stripes_of_many_task(const fv_gemm_job *job)
{
    const int64_t num_tasks = (int64_t)fv_context_num_workers(job->gemm->context) * many_tasks_per_worker;
    const int64_t num_blocks = fv_ceil_div(job->num_rows, FV_STORED_MANY_X);
    const int64_t share = stripes_of_weight(job->weight) * num_blocks / num_tasks;
    const int64_t stripes = fv_min_i64(share, FV_STORED_MANY_ROWS / FV_STORED_ROWS) / many_stripes * many_stripes;
    return fv_max_i64(many_stripes, stripes);
}

/* All rows of X, or even parts of them: up to a call's, and fewer where there are too few chunks for all workers. */
static int64_t rows_of_many_task(const fv_gemm_job *job)
{
    const int64_t num_tasks = 2 * (int64_t)fv_context_num_workers(job->gemm->context);
    int64_t num_blocks = fv_ceil_div(job->num_rows, FV_STORED_MANY_X);
    while (job->num_chunks * num_blocks < num_tasks && job->num_rows / (2 * num_blocks) >= min_many_rows_of_task)
        num_blocks *= 2;
    return fv_round_up(fv_ceil_div(job->num_rows, num_blocks), FV_STORED_MAX_X);
}

static fv_status multiply_stripes(fv_gemm_job *job)
{
    fv_context *context = job->gemm->context;
    fv_context_parallel_for(context, fv_ceil_div(job->num_rows, FV_STORED_MAX_X), load_x_task, job);
    job->is_many = is_for_many(job);
    job->chunk_stripes = job->is_many ? stripes_of_many_task(job) : stripes_of_task(job);
    job->num_chunks = chunks_of_weight(job->weight, job->chunk_stripes);
    job->rows_of_task = job->is_many ? rows_of_many_task(job) : x_rows_of_task;
    run_tasks(job, fv_ceil_div(job->num_rows, job->rows_of_task) * job->num_chunks, multiply_chunk);
    return FV_OK;
}

/* --- panels -------------------------------------------------------------------------------------- */

/* The panel of `rows`, as the library's kernel wants it, in the worker's memory. */
static fv_status make_panel(fv_gemm_chunk *panel, const fv_gemm_job *job, const fv_stored_rows *rows, int32_t worker)
{
    const fv_gemm_stored *stored = &job->gemm->stored;
    const fv_gemm_kernel *kernel = job->gemm->kernel;
    uint8_t *memory = stored->panels + (size_t)worker * stored->panel_bytes;
    float *floats = (float *)(void *)memory;
    stored->table->expand(floats, rows);
    *panel = (fv_gemm_chunk){.data = floats, .num_outputs = rows->num_rows, .in_features = rows->in_features};
    if (!kernel->pack) return FV_OK;
    panel->data = memory + bytes_of_floats(kernel, rows->in_features);
    return kernel->pack(job->gemm->state, panel, floats, worker);
}

static void panel_task(void *user, int64_t index, int32_t worker)
{
    fv_gemm_job *job = user;
    const fv_gemm_kernel *kernel = job->gemm->kernel;
    const int64_t y_stride = job->weight->out_features;
    fv_stored_rows rows;
    const int64_t output = stripes_at(&rows, job, index % job->num_chunks);
    const int64_t first = index / job->num_chunks * job->blocks_per_task * kernel->row_block;
    const int64_t end = fv_min_i64(job->num_rows, first + job->blocks_per_task * kernel->row_block);

    const int before = fv_gemm_hold_openmp();
    fv_gemm_chunk panel;
    fv_status status = make_panel(&panel, job, &rows, worker);
    for (int64_t row = first; row < end && status == FV_OK; row += kernel->row_block) {
        status = kernel->run(job->gemm->state, job->y + row * y_stride + output, y_stride, job->x, row,
                             fv_min_i64(kernel->row_block, end - row), &panel, false, worker);
    }
    fv_gemm_release_openmp(before);
    if (status != FV_OK) fv_gemm_keep_failure(job, status);
}

static void load_tiles_task(void *user, int64_t index, int32_t worker)
{
    (void)worker;
    const fv_gemm_job *job = user;
    const fv_gemm_stored *stored = &job->gemm->stored;
    const int64_t in_features = job->weight->in_features, first = index * FV_STORED_TILE_ROWS;
    stored->tiles->load_x(stored->x_tiles + fv_stored_tiles_bytes(first, in_features), job->x + first * in_features,
                          fv_min_i64(FV_STORED_TILE_ROWS, job->num_rows - first), in_features);
}

static void multiply_panel(const fv_gemm_job *job, int64_t index, int32_t worker)
{
    const fv_gemm_stored *stored = &job->gemm->stored;
    const int64_t y_stride = job->weight->out_features;
    fv_stored_rows rows;
    const int64_t output = stripes_at(&rows, job, index % job->num_chunks);
    const int64_t first = index / job->num_chunks * job->blocks_per_task * tile_row_block;
    const int64_t num_rows = fv_min_i64(job->num_rows - first, job->blocks_per_task * tile_row_block);
    uint8_t *panel = stored->panels + (size_t)worker * stored->panel_bytes;
    for (int64_t feature = 0; feature < rows.in_features; feature += tile_features) {
        const int64_t count = fv_min_i64(rows.in_features - feature, tile_features);
        stored->tiles->expand(panel, &rows, feature, count);
        stored->tiles->multiply(&(fv_tile_product){
            .y = job->y + first * y_stride + output,
            .y_stride = y_stride,
            .num_rows = num_rows,
            .num_outputs = rows.num_rows,
            .x_tiles = stored->x_tiles + fv_stored_tiles_bytes(first, rows.in_features) +
                       fv_stored_tiles_bytes(1, feature),
            .x_depth = fv_stored_tile_depth(rows.in_features),
            .w_tiles = panel,
            .depth = fv_stored_tile_depth(count),
            .adds = feature > 0,
        });
    }
}

/* What a panel is of, and how many tasks that makes: a panel serves as many blocks of rows as leave each worker
 * `tasks_each`. */
static int64_t deal_out_panels(fv_gemm_job *job, int64_t outputs, int64_t row_block, int64_t tasks_each)
{
    job->chunk_stripes = outputs / FV_STORED_ROWS;
    job->num_chunks = chunks_of_weight(job->weight, job->chunk_stripes);
    const int64_t num_blocks = fv_ceil_div(job->num_rows, row_block);
    const int64_t num_tasks = (int64_t)fv_context_num_workers(job->gemm->context) * tasks_each;
    job->blocks_per_task = fv_max_i64(1, num_blocks * job->num_chunks / num_tasks);
    return fv_ceil_div(num_blocks, job->blocks_per_task) * job->num_chunks;
}

/* Outputs of a panel of tiles: as many as its memory holds, and as leave each worker several of the weight. */
static int64_t outputs_of_tiles(const fv_gemm_job *job)
{
    const int64_t num_tasks = (int64_t)fv_context_num_workers(job->gemm->context) * tasks_per_worker;
    const int64_t features = fv_min_i64(job->weight->in_features, tile_features);
    const int64_t held = tile_panel_bytes / (int64_t)fv_stored_tiles_bytes(1, features);
    const int64_t outputs = fv_min_i64(held * FV_STORED_TILE_ROWS, job->weight->out_features / num_tasks);
    return fv_max_i64(tile_outputs, outputs / tile_outputs * tile_outputs);
}

static fv_status multiply_panels(fv_gemm_job *job)
{
    const fv_gemm_kernel *kernel = job->gemm->kernel;
    if (job->gemm->stored.tiles) {
        const int64_t num_blocks = fv_ceil_div(job->num_rows, FV_STORED_TILE_ROWS);
        fv_context_parallel_for(job->gemm->context, num_blocks, load_tiles_task, job);
        run_tasks(job, deal_out_panels(job, outputs_of_tiles(job), tile_row_block, tile_tasks_per_worker),
                  multiply_panel);
        return FV_OK;
    }
    fv_gemm_load_rows(job);
    return fv_gemm_run_job(job, deal_out_panels(job, kernel->chunk_outputs, kernel->row_block, tasks_per_worker),
                           panel_task);
}

fv_status fv_gemm_stored_run(fv_gemm_job *job)
{
    return uses_panels(job) ? multiply_panels(job) : multiply_stripes(job);
}
