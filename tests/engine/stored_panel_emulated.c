/* The panels of stored_panel.h as AVX-512 has them, of lanes in plain C. */
#include "stored_panel_emulated.h"

#if defined(__AVX2__)

#define FV_STORED_LANES_EMULATED 1
#include "engine/gguf.h"
#include "engine/stored/stored_panel.h"
#include "engine/stored/stored_panel_floats.h"

FV_STORED_DEFINE_MANY(q4_0, fv_stored_multiply_panels, &fv_stored_q4_0)
FV_STORED_DEFINE_MANY(q4_1, fv_stored_multiply_panels, &fv_stored_q4_1)
FV_STORED_DEFINE_MANY(q5_0, fv_stored_multiply_panels, &fv_stored_q5_0)
FV_STORED_DEFINE_MANY(q5_1, fv_stored_multiply_panels, &fv_stored_q5_1)
FV_STORED_DEFINE_MANY(q8_0, fv_stored_multiply_panels, &fv_stored_q8_0)
FV_STORED_DEFINE_MANY(q4_k, fv_stored_multiply_panels, &fv_stored_q4_k)
FV_STORED_DEFINE_MANY(q5_k, fv_stored_multiply_panels, &fv_stored_q5_k)
FV_STORED_DEFINE_MANY(q6_k, fv_stored_multiply_panels, &fv_stored_q6_k)
FV_STORED_DEFINE_MANY(f16, fv_stored_multiply_float_panels, fv_stored_load_f16)
FV_STORED_DEFINE_MANY(bf16, fv_stored_multiply_float_panels, fv_stored_load_bf16)

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
