/* fovea bench mla-layer: the MLA decoding problem of a public kernel competition. */
#ifndef FV_TOOLS_BENCH_MLA_LAYER_H
#define FV_TOOLS_BENCH_MLA_LAYER_H

/* argv[0] is "mla-layer". Returns the program's exit code. */
int fv_bench_mla_layer(int argc, char **argv);

#endif
