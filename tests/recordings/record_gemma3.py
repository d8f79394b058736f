#!/usr/bin/env python3
"""Records what independent implementations say about the GGUF file of Gemma-3-270M, as data for
fovea's tests.

Run by hand, never in CI; the tests only read the files that this script writes:

    python3 record_gemma3.py gemma-3-270m-q4_k_m.gguf

The model is Hugging Face transformers' Gemma3ForCausalLM in fp32, eager attention, on the CPU. Its
weights are those of the same GGUF file, dequantised by the `gguf` package. The tokenizer is Google's
`sentencepiece`, on a model made of the tokens, scores and kinds in the file. Nothing of fovea is used.
File formats: README.md beside this script.

Needs: torch, transformers, accelerate, sentencepiece, protobuf, gguf, numpy.
"""
import argparse
import hashlib
import importlib.metadata
import pathlib
import sys

import gguf
import numpy as np
import sentencepiece
import torch
import transformers
from sentencepiece import sentencepiece_model_pb2 as sentencepiece_model

from recording import HERE, extend_greedily, tokenizer_texts, write_essay, write_json, write_logits

NUM_POSITIONS = 64  # of each short prompt with its continuation
NUM_PROBES = 16
LONG_CONTINUATION = 60
PAD, EOS, BOS, UNK, END_OF_TURN = 0, 1, 2, 3, 106
CONTROL, USER_DEFINED = 3, 4

PROMPTS = [
    "The lighthouse keeper climbed the stairs slowly because",
    "Photosynthesis is the process by which",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "The capital of France is Paris. The capital of Italy is",
    "La biblioteca de la ciudad abrió sus puertas en",
    "| Planet | Distance from the Sun | Moons |\n|---|---|---|\n| Mercury |",
    "東京は日本の首都であり、",
    "3 + 4 = 7\n12 + 30 = 42\n100 + 250 =",
]

# Parts of the essay longer than the window of 512: tokens [begin, end) of it.
LONG_PROMPTS = [(0, 700), (1000, 1850)]

SPECIAL_TEXTS = [
    "<bos>", "<eos>", "<start_of_turn>", "<start_of_turn>user\nHi<end_of_turn>\n",
    "<start_of_turn>user\nWhat is 2 + 2?<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn><end_of_turn>",
    "a<end_of_turn>b", " <end_of_turn> ", "<end_of_turn", "end_of_turn>", "<<end_of_turn>>", "<END_OF_TURN>", "<unk>", "<pad>",
    "<unused0>", "<unused12><unused1>", "<mask>", "[multimodal]", "x[multimodal]y", "<start_of_image><end_of_image>",
    "<table><tr><td>1</td></tr></table>", "<table >", "<ul><li>a</li></ul>", "<b>bold</b> <i>it</i>", "<h1>T</h1>\n\n<p>x</p>",
    "<bbox>", "</bbox></b", "<0x41>", "<0x0A>", "▁", "▁▁", "a▁b", "▁a ▁ b", " ▁", "\u2581\u2581\u2581x",
    " " * 31, " " * 32, " " * 33 + "x", "\n" * 31, "\n" * 33, "\t" * 31, "\t" * 33, "\n \n", "  \n\n\t\t  x", "\r", "\r\n\r\n",
]


# --- the file -------------------------------------------------------------------------------------

def read_fields(reader):
    return {name: field.contents() for name, field in reader.fields.items()}


def load_state(reader):
    layer_names = {
        "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = torch.from_numpy(values.reshape([int(n) for n in reversed(tensor.shape)]).copy())
        if "norm" in tensor.name:
            values -= 1.0  # the file has 1 + weight, and so does the layer
        if tensor.name == "token_embd.weight":
            state["model.embed_tokens.weight"] = state["lm_head.weight"] = values
        elif tensor.name == "output_norm.weight":
            state["model.norm.weight"] = values
        else:
            _, layer, kind, _ = tensor.name.split(".")
            state[f"model.layers.{layer}.{layer_names[kind]}.weight"] = values
    return state


def load_model(reader, fields):
    head_size, base = fields["gemma3.attention.key_length"], fields["gemma3.rope.freq_base"]
    config = transformers.Gemma3TextConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["gemma3.embedding_length"],
        intermediate_size=fields["gemma3.feed_forward_length"],
        num_hidden_layers=fields["gemma3.block_count"],
        num_attention_heads=fields["gemma3.attention.head_count"],
        num_key_value_heads=fields["gemma3.attention.head_count_kv"],
        head_dim=head_size,
        query_pre_attn_scalar=head_size,
        max_position_embeddings=fields["gemma3.context_length"],
        rms_norm_eps=fields["gemma3.attention.layer_norm_rms_epsilon"],
        sliding_window=fields["gemma3.attention.sliding_window"],
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": base},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        tie_word_embeddings=True,
    )
    config._attn_implementation = "eager"
    print("layers:", " ".join("full" if kind.startswith("full") else "-" for kind in config.layer_types))
    model = transformers.Gemma3ForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(load_state(reader), strict=False)
    if missing or unexpected:
        sys.exit(f"weights do not fit the model: missing {missing}, unexpected {unexpected}")
    return model


def cross_check(model, path, ids):
    """The same logits from transformers' own reader of GGUF, which makes the config by itself."""
    path = pathlib.Path(path)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        difference = (model(torch.tensor([ids])).logits - other(torch.tensor([ids])).logits).abs().max().item()
    print(f"largest difference from transformers' own GGUF loading, {len(ids)} tokens: {difference:.3g}")
    if not difference < 1e-3:
        sys.exit("the two ways to load the file disagree")


# --- the tokenizer --------------------------------------------------------------------------------

def load_tokenizer(fields, reads_control):
    """SentencePiece on the vocabulary of the file; with `reads_control` control tokens in a text are read
    as such, by making them user-defined ones."""
    model = sentencepiece_model.ModelProto()
    model.trainer_spec.model_type = sentencepiece_model.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(fields["tokenizer.ggml.tokens"])
    model.trainer_spec.pad_id, model.trainer_spec.eos_id = PAD, EOS
    model.trainer_spec.bos_id, model.trainer_spec.unk_id = BOS, UNK
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = fields["tokenizer.ggml.add_space_prefix"]
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    for index, (text, score, kind) in enumerate(zip(
            fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"], fields["tokenizer.ggml.token_type"])):
        if kind == USER_DEFINED:
            text = text.replace(" ", "\u2581")  # the file has them without the escape
        if kind == CONTROL and reads_control:
            kind = USER_DEFINED
        if index == UNK:
            kind = sentencepiece_model.ModelProto.SentencePiece.UNKNOWN  # SentencePiece wants one
        model.pieces.add(piece=text, score=score, type=kind)
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def write_tokenizer_cases(special, plain, essay):
    cases = []
    for text in tokenizer_texts(SPECIAL_TEXTS, "<end_of_turn>", PROMPTS, essay):
        shown = {"hex": text.encode().hex()} if "\0" in text else {"text": text}  # C strings end at a zero
        ids, plain_ids = special.encode(text), plain.encode(text)
        case = {**shown, "ids": ids, "plain_ids": plain_ids}
        if "<unk>" in text:
            case = {**shown, "plain_ids": plain_ids}  # here SentencePiece's own unknown token, never read as such
        cases.append(case)
    write_json("gemma3_tokenizer.json", {"cases": cases})
    print(f"{len(cases)} tokenizer cases")


# --- recording ------------------------------------------------------------------------------------

def write_all_logits(model, tokenizer, essay_ids):
    texts = []
    starts = [[BOS] + tokenizer.encode(prompt) for prompt in PROMPTS]
    starts += [[BOS] + essay_ids[begin:end] for begin, end in LONG_PROMPTS]
    for start in starts:
        num_tokens = NUM_POSITIONS if len(start) < NUM_POSITIONS else len(start) + LONG_CONTINUATION
        ids, margins = extend_greedily(model, start, num_tokens, banned=(PAD, EOS, END_OF_TURN))
        texts.append((len(start), ids))
        print(len(ids), repr(tokenizer.decode(ids[len(start):])[:140]), f"close calls: {sum(m <= 0.05 for m in margins)}")
    write_logits("gemma3_logits.bin", model, texts, model.config.vocab_size, NUM_PROBES)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the GGUF file")
    path = parser.parse_args().model
    torch.manual_seed(0)
    torch.set_num_threads(2)

    reader = gguf.GGUFReader(path)
    fields = read_fields(reader)
    special, plain = load_tokenizer(fields, True), load_tokenizer(fields, False)
    essay = (HERE / "essay.txt").read_text(encoding="utf-8")
    write_tokenizer_cases(special, plain, essay)

    model = load_model(reader, fields)
    essay_ids = plain.encode(essay)
    cross_check(model, path, [BOS] + essay_ids[:600])
    write_essay("gemma3_essay.bin", model, [BOS] + essay_ids)
    write_all_logits(model, plain, essay_ids)

    print("model sha256:", hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest())
    for module in (torch, transformers, sentencepiece, np):
        print(module.__name__, module.__version__)
    print("gguf", importlib.metadata.version("gguf"), "protobuf", importlib.metadata.version("protobuf"), "python",
          sys.version.split()[0])


if __name__ == "__main__":
    main()
