/* The instances of Hopper's attention kernels: the files here are compiled for sm_90a alone. */
#include "kernels/cuda/hopper/attend.cuh"
#include "kernels/cuda/hopper/attend_entry.cuh"
#include "kernels/cuda/hopper/attend_few_latent.cuh"
#include "kernels/cuda/hopper/attend_latent.cuh"
#include "kernels/cuda/hopper/few_meeting.h"
#include "kernels/cuda/hopper/many_rows.h"
#include "kernels/cuda/kernels.h"

const fv_cuda_hopper_kernels fv_cuda_hopper = {
    {fv_hopper_rows_64, fv_hopper_rows_128, fv_hopper_rows_256},
    fv_hopper_narrow_rows,
    {wgmma_latent_of<latent_form<__nv_bfloat16, false>>(), wgmma_latent_of<latent_form<__half, false>>()},
    {wgmma_latent_of<latent_form<__nv_bfloat16, true>>(), wgmma_latent_of<latent_form<__half, true>>()},
    {wgmma_few_latent_of<few_latent_form<__nv_bfloat16, 16>>(), wgmma_few_latent_of<few_latent_form<__half, 16>>()},
    {wgmma_few_latent_of<few_latent_form<__nv_bfloat16, 32>>(), wgmma_few_latent_of<few_latent_form<__half, 32>>()},
    {wgmma_entry_of<16>(), wgmma_entry_of<32>(), wgmma_entry_of<64>()},
    fv_hopper_mla_query_kernels,
    fv_hopper_few_meeting,
};
