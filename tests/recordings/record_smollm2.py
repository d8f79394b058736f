#!/usr/bin/env python3
"""Records what an independent implementation says about one GGUF file, as data for fovea's tests.

Run by hand, never in CI; the tests only read the files that this script writes:

    python3 record_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf

The model is Hugging Face transformers' LlamaForCausalLM in fp32, eager attention, on the CPU. Its
weights are those of the same GGUF file, dequantised by the `gguf` package, so that both sides
compute with the same numbers. The tokenizer is Hugging Face `tokenizers`, built from the vocabulary
and the merges in the file. Nothing of fovea is used. File formats: README.md beside this script.

Needs: torch, transformers, accelerate, tokenizers, gguf, numpy, jinja2.
"""
import argparse
import hashlib
import pathlib
import sys

import gguf
import numpy as np
import tokenizers
import torch
import transformers

from recording import HERE, extend_greedily, tokenizer_texts, write_essay, write_json, write_logits

NUM_POSITIONS = 208  # of each prompt with its continuation
NUM_PROBES = 32
CHAT_TOKENS = 64

PROMPTS = [
    "The lighthouse keeper climbed the stairs slowly because",
    "Photosynthesis is the process by which",
    "In 1905, Albert Einstein published four papers that",
    "Once upon a time, in a village at the edge of a great forest, there lived a clockmaker who",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "The capital of France is Paris. The capital of Italy is",
    "To make a simple bread you need flour, water, salt and yeast. First,",
    "Dear Ms. Alvarez,\n\nThank you for your letter of 14 March. I am writing to",
    "The water cycle has several stages:\n\n1.",
    "Q: Why is the sky blue?\nA:",
    "#include <stdio.h>\n\nint main(void)\n{\n",
    "| Planet | Distance from the Sun | Moons |\n|---|---|---|\n| Mercury |",
    "La biblioteca de la ciudad abrió sus puertas en",
    "Abstract. We study the problem of scheduling jobs on",
    "Breaking news: scientists have discovered",
    "My favourite thing about autumn is",
    "SELECT name, COUNT(*) FROM orders",
    "The three laws of motion, stated by Isaac Newton, are",
    "\"I never said that,\" she whispered, and closed the door. Outside,",
    "3 + 4 = 7\n12 + 30 = 42\n100 + 250 =",
]

CHATS = [
    [("user", "What is gravity?")],
    [("user", "Write a short poem about the sea.")],
    [("system", "You are a terse assistant who answers in one sentence."), ("user", "Who wrote Hamlet?")],
    [("user", "Give me three tips for learning a language.")],
    [("user", "What is 7 plus 5?"), ("assistant", "7 plus 5 is 12."), ("user", "And if you add 10 more?")],
    [("user", "Explain what a hash table is to a ten year old.")],
]


# --- the file -------------------------------------------------------------------------------------

def read_fields(reader):
    return {name: field.contents() for name, field in reader.fields.items()}


def unpermute(weight, num_heads):
    """llama GGUF files store the rows of q and k for rotation of neighbouring pairs; transformers
    rotates the first half of a head against the second, so the rows go back to that order."""
    out_features, in_features = weight.shape
    pairs = weight.reshape(num_heads, out_features // num_heads // 2, 2, in_features)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(out_features, in_features))


def load_state(reader, fields):
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    layer_names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape([int(n) for n in reversed(tensor.shape)])
        if tensor.name == "token_embd.weight":
            state["model.embed_tokens.weight"] = state["lm_head.weight"] = torch.from_numpy(values.copy())
            continue
        if tensor.name == "output_norm.weight":
            state["model.norm.weight"] = torch.from_numpy(values.copy())
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind == "attn_q":
            values = unpermute(values, heads)
        if kind == "attn_k":
            values = unpermute(values, kv_heads)
        state[f"model.layers.{layer}.{layer_names[kind]}.weight"] = torch.from_numpy(values.copy())
    return state


def load_model(reader, fields):
    config = transformers.LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
    )
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(load_state(reader, fields), strict=False)
    if missing or unexpected:
        sys.exit(f"weights do not fit the model: missing {missing}, unexpected {unexpected}")
    return model


def cross_check(model, path, ids):
    """The same logits from transformers' own reader of GGUF, which permutes by itself."""
    path = pathlib.Path(path)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        difference = (model(torch.tensor([ids])).logits - other(torch.tensor([ids])).logits).abs().max().item()
    print(f"largest difference from transformers' own GGUF loading: {difference:.3g}")
    if not difference < 1e-3:
        sys.exit("the two ways to load the file disagree")


# --- the tokenizer --------------------------------------------------------------------------------

def load_tokenizers(fields):
    """One that reads the control tokens in text as such, and one that reads them as plain text."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocabulary = {text: index for index, text in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    result = []
    for with_special in (True, False):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ])
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        if with_special:
            tokenizer.add_special_tokens([
                tokenizers.AddedToken(text, special=True, normalized=False)
                for text, kind in zip(tokens, types) if kind == 3])
        result.append(tokenizer)
    return result


SPECIAL_TEXTS = [
    "<|endoftext|>", "<|im_start|>", "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>system\nYou are a helpful AI assistant "
    "named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|im_end|>", "a<|im_end|>b", " <|im_end|> ", "<|im_end", "|im_end|>", "<|im_end|", "<<|im_end|>>", "<repo_name>x",
    "<reponame><file_sep>", "<jupyter_start><jupyter_text>", "<jupyter_cod>", "<|IM_END|>", "<filename>a.py<gh_stars>100-1000",
    "5<|im_end|>5", "'s<|im_start|>'s", "  <|im_start|>  ",
]


LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                  r"\s*[\r\n]+|\s+(?!\S)|\s+")


def load_pre_tokenizers():
    """The pre-tokenizers that fovea knows besides that of this model, by their name in GGUF files."""
    pre = tokenizers.pre_tokenizers
    return {
        "gpt-2": pre.ByteLevel(add_prefix_space=False, use_regex=True),
        "llama-bpe": pre.Split(tokenizers.Regex(LLAMA3_PATTERN), behavior="isolated"),
    }


def piece_bytes(pre_tokenizer, text):
    """Length of each piece of `text` in bytes."""
    return [len(text[begin:end].encode()) for _, (begin, end) in pre_tokenizer.pre_tokenize_str(text)]


# Bytes that are not UTF-8: Python's tokenizers cannot take them, so there are no reference ids. The
# tests check that the bytes which have a token come back.
INVALID_UTF8 = ["80", "61ff62", "c3", "c328", "e282", "e28228", "f09f98", "f09f9861", "eda080", "f4908080", "c0af", "fefeffff",
                "6162c3", "20c320", "31c331", "e4b8", "f0808080", "61e2829f62e282"]


def write_tokenizer_cases(special, plain, essay):
    cases = []
    pre_tokenizers = load_pre_tokenizers()
    for text in tokenizer_texts(SPECIAL_TEXTS, "<|im_end|>", PROMPTS, essay):
        shown = {"hex": text.encode().hex()} if "\0" in text else {"text": text}  # C strings end at a zero
        cases.append({**shown, "ids": special.encode(text, add_special_tokens=False).ids,
                      "plain_ids": plain.encode(text, add_special_tokens=False).ids,
                      "pieces": {name: piece_bytes(pre, text) for name, pre in pre_tokenizers.items()}})
    write_json("tokenizer.json", {"cases": cases, "invalid_utf8_hex": INVALID_UTF8})
    print(f"{len(cases)} tokenizer cases")


# --- recording ------------------------------------------------------------------------------------

def write_all_logits(model, tokenizer, num_vocabulary):
    texts = []
    for prompt in PROMPTS:
        start = tokenizer.encode(prompt, add_special_tokens=False).ids
        ids, _ = extend_greedily(model, start, NUM_POSITIONS, banned=(0, 2))
        texts.append((len(start), ids))
        print(repr(tokenizer.decode(ids)[:140]))
    write_logits("logits.bin", model, texts, num_vocabulary, NUM_PROBES)


def chat_text(messages, fields):
    import jinja2
    environment = jinja2.Environment(trim_blocks=False, lstrip_blocks=False, keep_trailing_newline=True)
    template = environment.from_string(fields["tokenizer.chat_template"])
    return template.render(messages=[{"role": r, "content": c} for r, c in messages], add_generation_prompt=True)


def write_chats(model, tokenizer, fields):
    eos = fields["tokenizer.ggml.eos_token_id"]
    chats = []
    for messages in CHATS:
        text = chat_text(messages, fields)
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        ids, margins = extend_greedily(model, prompt, len(prompt) + CHAT_TOKENS, stop=eos)
        reply = ids[len(prompt):]
        chats.append({
            "messages": [{"role": role, "content": content} for role, content in messages],
            "prompt": text, "prompt_ids": prompt, "ids": reply, "ended": reply[-1] == eos,
            "text": tokenizer.decode(reply, skip_special_tokens=True), "margins": margins})
        print(repr(chats[-1]["text"]), f"smallest margin {min(margins):.4f}")
    write_json("chats.json", {"chats": chats})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the GGUF file")
    path = parser.parse_args().model
    torch.manual_seed(0)
    torch.set_num_threads(2)

    reader = gguf.GGUFReader(path)
    fields = read_fields(reader)
    special, plain = load_tokenizers(fields)
    essay = (HERE / "essay.txt").read_text(encoding="utf-8")
    write_tokenizer_cases(special, plain, essay)

    model = load_model(reader, fields)
    cross_check(model, path, special.encode(PROMPTS[0]).ids)
    write_chats(model, special, fields)
    write_essay("essay.bin", model, special.encode(essay, add_special_tokens=False).ids)
    write_all_logits(model, special, fields["llama.vocab_size"])

    print("model sha256:", hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest())
    for module in (torch, transformers, tokenizers, np):
        print(module.__name__, module.__version__)
    import importlib.metadata
    print("gguf", importlib.metadata.version("gguf"), "python", sys.version.split()[0])


if __name__ == "__main__":
    main()
