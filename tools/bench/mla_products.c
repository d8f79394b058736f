#include "bench/mla_products.h"

#include <stdlib.h>
#include <string.h>

#include "core/device.h"
#include "core/error.h"
#include "core/float.h"

#ifdef FV_HAVE_ENGINE

#include "engine/gemm_matrices.h"

struct fv_mla_products {
    fv_gemm_matrices matrices;
};

static fv_status use_engine(fv_mla_products **products, fv_gemm_fn *gemm, void **gemm_user, fv_device *device)
{
    *products = calloc(1, sizeof(**products));
    if (!*products) return fv_fail(FV_ERR_NO_MEMORY, "no memory for the GEMM");
    (*products)->matrices.context = device->context;
    *gemm = fv_gemm_matrices_run;
    *gemm_user = &(*products)->matrices;
    return FV_OK;
}

#else

static fv_status use_engine(fv_mla_products **products, fv_gemm_fn *gemm, void **gemm_user, fv_device *device)
{
    (void)products, (void)gemm, (void)gemm_user, (void)device;
    return fv_fail(FV_ERR_UNSUPPORTED, "MLA with weights multiplies with the engine's GEMM, which this build lacks; "
                                       "accepted: bench --mla=latents");
}

#endif

fv_status fv_mla_products_create(fv_mla_products **products, fv_gemm_fn *gemm, void **gemm_user, fv_device *device)
{
    *products = NULL;
    if (device->host_is_device) return use_engine(products, gemm, gemm_user, device);
    *gemm = fv_device_gemm;
    *gemm_user = device;
    return FV_OK;
}

fv_status fv_mla_products_check(fv_dtype dtype, const char *device, const char *where)
{
    if (strcmp(device, "cpu") != 0 || dtype == FV_DTYPE_F32) return FV_OK;
    return fv_fail(FV_ERR_INVALID, "--dtype is '%s'%s on cpu; accepted: float32", fv_dtype_name(dtype), where);
}

static float plain_element(const fv_gemm *g, int32_t matrix, int32_t row, int32_t column)
{
    const int64_t a_bytes = (int64_t)fv_dtype_bytes(g->a_dtype), b_bytes = (int64_t)fv_dtype_bytes(g->b_dtype);
    const int64_t b_of_column = g->b_is_transposed ? g->b_row_stride : b_bytes;
    const int64_t b_step = g->b_is_transposed ? b_bytes : g->b_row_stride;
    const char *a = (const char *)g->a + matrix * g->a_matrix_stride + row * g->a_row_stride;
    const char *b = (const char *)g->b + matrix * g->b_matrix_stride + column * b_of_column;
    double sum = 0;
    for (int32_t i = 0; i < g->k; i++) {
        sum += (double)fv_float_load(a + i * a_bytes, g->a_dtype) * fv_float_load(b + i * b_step, g->b_dtype);
    }
    return (float)sum;
}

fv_status fv_mla_plain_gemm(void *user, const fv_gemm *gemm, fv_stream stream)
{
    (void)user, (void)stream;
    const int64_t c_bytes = (int64_t)fv_dtype_bytes(gemm->c_dtype);
    for (int32_t matrix = 0; matrix < gemm->num_matrices; matrix++) {
        for (int32_t row = 0; row < gemm->m; row++) {
            char *c = (char *)gemm->c + matrix * gemm->c_matrix_stride + row * gemm->c_row_stride;
            for (int32_t column = 0; column < gemm->n; column++) {
                fv_float_store(c + column * c_bytes, plain_element(gemm, matrix, row, column), gemm->c_dtype);
            }
        }
    }
    return FV_OK;
}

void fv_mla_products_destroy(fv_mla_products *products) { free(products); }
