/* The engine's GEMM as the layer's. */
#include "bench/mla_products.h"

#include <stdlib.h>

#include "core/error.h"

#ifdef FV_HAVE_ENGINE

#include "engine/gemm_matrices.h"

struct fv_mla_products {
    fv_gemm_matrices matrices;
};

fv_status fv_mla_products_create(fv_mla_products **products, fv_layer *layer, fv_context *context)
{
    *products = calloc(1, sizeof(**products));
    if (!*products) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the GEMM");
    (*products)->matrices.context = context;
    layer->gemm = fv_gemm_matrices_run;
    layer->gemm_user = &(*products)->matrices;
    return FV_OK;
}

#else

fv_status fv_mla_products_create(fv_mla_products **products, fv_layer *layer, fv_context *context)
{
    (void)layer;
    (void)context;
    *products = NULL;
    return fv_fail(FV_ERR_UNSUPPORTED, "MLA with weights multiplies with the engine's GEMM, which this build lacks; "
                                       "accepted: bench --mla=latents");
}

#endif

void fv_mla_products_destroy(fv_mla_products *products) { free(products); }
