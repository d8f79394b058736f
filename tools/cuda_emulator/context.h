/* Contexts of the driver: a stack of them for each thread, and each GPU's primary one. */
#ifndef CUDA_EMULATOR_CONTEXT_H
#define CUDA_EMULATOR_CONTEXT_H

#include <cuda_runtime_api.h>

int emu_num_gpus(void); /* FOVEA_EMULATOR_GPUS */

/* Of each call of the run-time that works in a context: fails in one that is not a GPU's primary one, which the plugin
 * never asks for. Where none is current it takes GPU 0's for good, as CUDA does. */
cudaError_t emu_context_check(void);

/* Has the thread one current? The driver's functions that work in a context do not take GPU 0's for it. */
bool emu_has_context(void);

/* The driver's function of that name; NULL: it is not here. */
void *emu_context_function(const char *name);

#endif
