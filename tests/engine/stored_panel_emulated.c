/* The panels of stored_panel.h as AVX-512 has them, of lanes in plain C. */
#include "stored_panel_emulated.h"

#if defined(__AVX2__)

#define FV_STORED_LANES_EMULATED 1
#include "engine/gguf.h"
#include "engine/stored/stored_panel.h"
#include "engine/stored/stored_panel_floats.h"

#define DEFINE(name, function, how)                                                                   \
    static void multiply_many_##name(float *y, int64_t y_stride, const fv_stored_x *x, int64_t num_x, \
                                     const fv_stored_rows *w, void *memory)                           \
    {                                                                                                 \
        function(y, y_stride, x, num_x, w, memory, how);                                              \
    }

DEFINE(q4_0, fv_stored_multiply_panels, &fv_stored_q4_0)
DEFINE(q4_1, fv_stored_multiply_panels, &fv_stored_q4_1)
DEFINE(q5_0, fv_stored_multiply_panels, &fv_stored_q5_0)
DEFINE(q5_1, fv_stored_multiply_panels, &fv_stored_q5_1)
DEFINE(q8_0, fv_stored_multiply_panels, &fv_stored_q8_0)
DEFINE(q4_k, fv_stored_multiply_panels, &fv_stored_q4_k)
DEFINE(q5_k, fv_stored_multiply_panels, &fv_stored_q5_k)
DEFINE(q6_k, fv_stored_multiply_panels, &fv_stored_q6_k)
DEFINE(f16, fv_stored_multiply_float_panels, fv_stored_load_f16)
DEFINE(bf16, fv_stored_multiply_float_panels, fv_stored_load_bf16)

static const fv_stored_kernel kernels[] = {
    {.type = FV_GGUF_Q4_0, .multiply_many = multiply_many_q4_0},
    {.type = FV_GGUF_Q4_1, .multiply_many = multiply_many_q4_1},
    {.type = FV_GGUF_Q5_0, .multiply_many = multiply_many_q5_0},
    {.type = FV_GGUF_Q5_1, .multiply_many = multiply_many_q5_1},
    {.type = FV_GGUF_Q8_0, .multiply_many = multiply_many_q8_0},
    {.type = FV_GGUF_Q4_K, .multiply_many = multiply_many_q4_k},
    {.type = FV_GGUF_Q5_K, .multiply_many = multiply_many_q5_k},
    {.type = FV_GGUF_Q6_K, .multiply_many = multiply_many_q6_k},
    {.type = FV_GGUF_F16, .multiply_many = multiply_many_f16},
    {.type = FV_GGUF_BF16, .multiply_many = multiply_many_bf16},
};

static const fv_stored_table emulated = {
    .isa = FV_ISA_AVX2,
    .name = "emulated",
    .many_bytes = sizeof(fv_stored_many) + sizeof(fv_stored_many_floats),
    .kernels = kernels,
    .num_kernels = FV_ARRAY_LEN(kernels),
};

const fv_stored_table *fv_stored_panel_emulated(void) { return &emulated; }

#else

const fv_stored_table *fv_stored_panel_emulated(void) { return NULL; }

#endif
