/* An mbarrier: 64 bits of shared memory that count arrivals and bytes, phase after phase (PTX ISA, "mbarrier"). The state is
 * in these bits and nowhere else, as on a GPU, so a kernel that writes over a barrier, or forgets to initialise it, is found.
 *
 *   bits 0..19    arrivals that end a phase
 *   bits 20..39   arrivals that the phase still waits for
 *   bits 40..60   bytes that it waits for, 21 bits with a sign: they may come before they are expected
 *   bit  61       the phase's parity
 *   bits 62..63   1: is a barrier; memory that nobody wrote has 3 there
 *
 * Each function returns NULL, or what is wrong. */
#ifndef CUDA_EMULATOR_MBARRIER_H
#define CUDA_EMULATOR_MBARRIER_H

#include <stddef.h>
#include <stdint.h>

enum { MBARRIER_MOST = (1 << 20) - 1 }; /* of arrivals and of bytes */

typedef struct mbarrier_state {
    int32_t count, pending, bytes;
    uint32_t parity;
} mbarrier_state;

static inline uint64_t mbarrier_pack(const mbarrier_state *state)
{
    return (uint64_t)state->count | (uint64_t)state->pending << 20 | (uint64_t)(state->bytes & 0x1fffff) << 40 |
           (uint64_t)state->parity << 61 | (uint64_t)1 << 62;
}

static inline const char *mbarrier_read(mbarrier_state *state, uint64_t word)
{
    state->count = (int32_t)(word & 0xfffff);
    state->pending = (int32_t)(word >> 20 & 0xfffff);
    state->bytes = (int32_t)((uint32_t)(word >> 40) << 11) >> 11;
    state->parity = (uint32_t)(word >> 61 & 1);
    return word >> 62 == 1 && state->count > 0 ? NULL
                                               : "what is there is no mbarrier: never initialised, or written over";
}

static inline const char *mbarrier_init(uint64_t *word, uint32_t count)
{
    if (count < 1 || count > MBARRIER_MOST) return "an mbarrier of no arrivals, or of too many";
    const mbarrier_state state = {(int32_t)count, (int32_t)count, 0, 0};
    *word = mbarrier_pack(&state);
    return NULL;
}

/* So many arrivals, and so many more bytes to wait for; fewer, where bytes came. The phase ends where nothing is waited for. */
static inline const char *mbarrier_count(uint64_t *word, int32_t arrivals, int64_t bytes)
{
    mbarrier_state state;
    const char *fault = mbarrier_read(&state, *word);
    if (fault) return fault;
    if (arrivals > state.pending) return "more arrivals at an mbarrier than end its phase";
    const int64_t waits_for = state.bytes + bytes;
    if (waits_for > MBARRIER_MOST || waits_for < -MBARRIER_MOST)
        return "an mbarrier waits for more bytes than it can count";
    state.pending -= arrivals;
    state.bytes = (int32_t)waits_for;
    if (state.pending == 0 && state.bytes < 0) return "more bytes came to an mbarrier than its phase was to wait for";
    if (state.pending == 0 && state.bytes == 0) {
        state.pending = state.count;
        state.parity ^= 1;
    }
    *word = mbarrier_pack(&state);
    return NULL;
}

/* Whether a phase ended between two states. */
static inline bool mbarrier_has_turned(uint64_t before, uint64_t after) { return ((before ^ after) >> 61 & 1) != 0; }

/* Whether the phase of a parity has ended: the phase that goes on has the other one. */
static inline const char *mbarrier_test(bool *has_ended, uint64_t word, uint32_t parity)
{
    mbarrier_state state;
    const char *fault = mbarrier_read(&state, word);
    *has_ended = fault || state.parity != (parity & 1);
    return fault;
}

#endif
