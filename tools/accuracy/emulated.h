/* A round of samples through the emulated AMX kernels, which are in no plan. */
#ifndef FV_TOOLS_ACCURACY_EMULATED_H
#define FV_TOOLS_ACCURACY_EMULATED_H

#include "accuracy/sample.h"
#include "core/executor.h"
#include "ops/kernel_table.h"

/* Its variant of that name. NULL: there is none. */
const fv_attend_variant *accuracy_emulated_variant(const char *name);

/* Bytes of scratch of all workers, aligned to FV_CACHE_LINE. */
size_t accuracy_emulated_scratch(const fv_attend_variant *variant, const accuracy_samples *samples,
                                 int32_t num_workers);

/* out [num_samples, num_heads, 512] bf16 = the variant's result for the first num_samples samples, each one item of all
 * its keys. `scratch` is host memory of accuracy_emulated_scratch(). */
fv_status accuracy_emulated_run(uint16_t *out, const fv_attend_variant *variant, const accuracy_samples *samples,
                                int32_t num_samples, const fv_executor *executor, void *scratch);

#endif
