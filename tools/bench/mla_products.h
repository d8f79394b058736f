/* The matrix products of MLA with weights: the engine's GEMM where it is built. */
#ifndef FV_TOOLS_BENCH_MLA_PRODUCTS_H
#define FV_TOOLS_BENCH_MLA_PRODUCTS_H

#include "fovea/plan.h"

typedef struct fv_mla_products fv_mla_products;

/* FV_ERR_UNSUPPORTED in a build without the engine. Fills layer->gemm and gemm_user. */
fv_status fv_mla_products_create(fv_mla_products **products, fv_layer *layer, fv_context *context);
void fv_mla_products_destroy(fv_mla_products *products); /* takes NULL */

#endif
