/* The pre-tokenizer: cuts text into pieces that tokens never cross, by the regular expressions that
 * the model was trained with. A file names one (`tokenizer.ggml.pre`); the table in the source file
 * holds those known here. */
#ifndef FV_ENGINE_PRE_TOKENIZER_H
#define FV_ENGINE_PRE_TOKENIZER_H

#include <stdbool.h>

#include "engine/gguf.h"

typedef struct fv_pre_tokenizer fv_pre_tokenizer;

/* FV_ERR_UNSUPPORTED with the list of those accepted when `name` is not in the table. */
fv_status fv_pre_tokenizer_create(fv_pre_tokenizer **pre_tokenizer, fv_text name);

/* Takes NULL. */
void fv_pre_tokenizer_destroy(fv_pre_tokenizer *pre_tokenizer);

/* A piece that is a token as a whole becomes that token without looking at merges. */
bool fv_pre_tokenizer_ignores_merges(const fv_pre_tokenizer *pre_tokenizer);

/* Whether models of this kind start with the BOS token when the file does not say. */
bool fv_pre_tokenizer_adds_bos(const fv_pre_tokenizer *pre_tokenizer);

/* Receives one piece; a failure ends the split. */
typedef fv_status fv_take_piece(void *context, const char *piece, size_t length);

/* Hands the pieces of `text` to `take` in order; together they are the text. Bytes that are not
 * UTF-8 are pieces of their own. May be called from several threads at once. */
fv_status fv_pre_tokenizer_split(const fv_pre_tokenizer *pre_tokenizer, const char *text, size_t length,
                                 fv_take_piece *take, void *context);

#endif
