/* The instances of Hopper's attention kernels: the files here are compiled for sm_90a alone. */
#include "kernels/cuda/hopper/attend.cuh"
#include "kernels/cuda/hopper/attend_entry.cuh"
#include "kernels/cuda/hopper/attend_few_latent.cuh"
#include "kernels/cuda/hopper/attend_latent.cuh"
#include "kernels/cuda/hopper/attend_rows.cuh"
#include "kernels/cuda/hopper/few_meeting.h"
#include "kernels/cuda/kernels.h"

template <class T> using rows_64 = rows_shape<T, 64, 64, 128>;
template <class T> using rows_128 = rows_shape<T, 128, 128, 96>;

const fv_cuda_hopper_kernels fv_cuda_hopper = {
    {wgmma_rows_of<rows_64<__nv_bfloat16>>(), wgmma_rows_of<rows_64<__half>>()},
    {wgmma_rows_of<rows_128<__nv_bfloat16>>(), wgmma_rows_of<rows_128<__half>>()},
    {wgmma_latent_of<latent_form<__nv_bfloat16, false>>(), wgmma_latent_of<latent_form<__half, false>>()},
    {wgmma_latent_of<latent_form<__nv_bfloat16, true>>(), wgmma_latent_of<latent_form<__half, true>>()},
    {wgmma_few_latent_of<few_latent_form<__nv_bfloat16, 16>>(), wgmma_few_latent_of<few_latent_form<__half, 16>>()},
    {wgmma_few_latent_of<few_latent_form<__nv_bfloat16, 32>>(), wgmma_few_latent_of<few_latent_form<__half, 32>>()},
    {wgmma_entry_of<16>(), wgmma_entry_of<32>(), wgmma_entry_of<64>()},
    fv_hopper_mla_query_kernels,
    fv_hopper_few_meeting,
};
