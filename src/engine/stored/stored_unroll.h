/* Loops whose every pass is to be written out, as its vectors are to stay in registers. */
#ifndef FV_ENGINE_STORED_STORED_UNROLL_H
#define FV_ENGINE_STORED_STORED_UNROLL_H

#if defined(FV_STORED_LANES_EMULATED) /* loops of lanes are long enough */
#define FV_STORED_UNROLL
#define FV_STORED_UNROLL_16
#elif defined(__clang__)
#define FV_STORED_UNROLL _Pragma("clang loop unroll(full)")
#define FV_STORED_UNROLL_16 FV_STORED_UNROLL
#else
#define FV_STORED_UNROLL _Pragma("GCC unroll 8")
#define FV_STORED_UNROLL_16 _Pragma("GCC unroll 16")
#endif

#endif
