/* Memory that the host and the device under check see at the same addresses: page-locked memory of the
 * device, kept for the next case, as asking for it is slow. On the CPU plain memory. So the scenes of the
 * check, with all that is built into them to hurt, serve a GPU as they are. */
#ifndef FV_TOOLS_CHECK_DEVICE_MEMORY_H
#define FV_TOOLS_CHECK_DEVICE_MEMORY_H

#include "fovea/device.h"

/* From now on memory is the device's; NULL: plain. One device for the whole program, which the memory
 * outlives neither. */
void check_device_memory_use(fv_device *device);

/* 1: memory is a device's. */
int32_t check_device_memory_is_used(void);

/* At least `bytes`, aligned to 256; NULL where there is none. give takes NULL. */
void *check_device_memory_take(size_t bytes);
void check_device_memory_give(void *memory, size_t bytes);

#endif
