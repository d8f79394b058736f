/* The matrix products of MLA with weights: on the CPU the engine's GEMM where it is built, elsewhere the device's. */
#ifndef FV_TOOLS_BENCH_MLA_PRODUCTS_H
#define FV_TOOLS_BENCH_MLA_PRODUCTS_H

#include "fovea/plan.h"

typedef struct fv_mla_products fv_mla_products;

/* FV_ERR_UNSUPPORTED on the CPU in a build without the engine. Fills *gemm and its first argument. */
fv_status fv_mla_products_create(fv_mla_products **products, fv_gemm_fn *gemm, void **gemm_user, fv_device *device);

/* FV_ERR_INVALID: the products on `device` do not take what --dtype names. `where` goes into the text, what else was
 * given. */
fv_status fv_mla_products_check(fv_dtype dtype, const char *device, const char *where);

/* An fv_gemm_fn: sums in double on the CPU, slow. */
fv_status fv_mla_plain_gemm(void *user, const fv_gemm *gemm, fv_stream stream);

void fv_mla_products_destroy(fv_mla_products *products); /* takes NULL */

#endif
