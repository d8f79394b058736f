/* Swizzle of 128 bytes, of shared addresses: where a byte of a row of 128 lies when the hardware, and not the kernel, finds
 * its place (PTX ISA, "Swizzling Modes"). Of the address, so what begins at no multiple of 1024 begins in the middle of the
 * pattern. */
#ifndef CUDA_EMULATOR_SWIZZLE_H
#define CUDA_EMULATOR_SWIZZLE_H

#include <stdint.h>

/* The 16-byte chunk is that of the address xor the row of 128 bytes, of eight. */
static inline uint32_t swizzle_128(uint32_t address) { return address ^ (address >> 3 & 0x70); }

#endif
