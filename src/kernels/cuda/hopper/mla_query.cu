/* The instances of mla_query. */
#include "kernels/cuda/hopper/mla_query.cuh"

const fv_cuda_mla_query_kernel fv_hopper_mla_query_kernels[2] = {wgmma_mla_query_of<__nv_bfloat16>(),
                                                                 wgmma_mla_query_of<__half>()};
