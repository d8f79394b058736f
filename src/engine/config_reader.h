/* Reading and checking single values of a model's metadata, for the files that read its parts. Keys begin with
 * the name of the architecture: "block_count" is "<architecture>.block_count". */
#ifndef FV_ENGINE_CONFIG_READER_H
#define FV_ENGINE_CONFIG_READER_H

#include "engine/model_config.h"

typedef struct fv_config_reader {
    const fv_gguf *gguf;
    const char *path;
    const char *architecture;
} fv_config_reader;

typedef struct fv_config_key {
    char text[96];
} fv_config_key;

fv_config_key fv_config_key_of(const fv_config_reader *from, const char *name);
bool fv_config_has(const fv_config_reader *from, const char *name);

/* Is a text of the file this one? */
bool fv_config_text_is(fv_text text, const char *expected);

/* A count in [1, max]. FV_ERR_IO with the key's name where it is missing or outside. */
fv_status fv_config_read_count(int32_t *value, const fv_config_reader *from, const char *name, uint32_t max);

/* The same where a missing key means `absent`. */
fv_status fv_config_read_optional_count(int32_t *value, const fv_config_reader *from, const char *name, uint32_t max,
                                        int32_t absent);

/* A number above `min`; `absent` where the key is missing. */
fv_status fv_config_read_optional_number(float *value, const fv_config_reader *from, const char *name, float min,
                                         float absent);

/* False where the key is missing. */
fv_status fv_config_read_optional_flag(bool *value, const fv_config_reader *from, const char *name);

/* How the angles of layers without a window are stretched: not, linearly, or as YaRN says where takes_yarn.
 * *score_factor is what YaRN multiplies the scores with, 1 without it. */
fv_status fv_config_read_rope_scaling(fv_rope_scaling *scaling, float *score_factor, const fv_config_reader *from,
                                      bool takes_yarn);

/* The parts of models with latents: heads (read_heads of model_config.c for the others), and experts. */
fv_status fv_config_read_latent_heads(fv_model_config *config, const fv_config_reader *from);
fv_status fv_config_read_experts(fv_model_config *config, const fv_config_reader *from);

#endif
