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
import json
import pathlib
import random
import re
import struct
import sys

import gguf
import numpy as np
import tokenizers
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent
NUM_POSITIONS = 208  # of each prompt with its continuation
NUM_PROBES = 32
CHAT_TOKENS = 64
FORMAT_VERSION = 1

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


def tokenizer_texts(essay):
    texts = [
        "", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "\n  \n", "a", " a", "a ", "  a", "a  b", "a   b",
        "Hello", "Hello, world!", " Hello", "hello world", "HELLO WORLD", "Hello\nworld", "Hello\n\n\nworld  ",
        "trailing spaces   ", "   leading spaces", "tabs\tand\t\ttabs", "mixed \t \n \r\n whitespace", "x\n    y",
        "0", "1", "12", "123", "1234567890", "3.14159", "1,000,000", "2024-11-05", "v1.2.3", "0x1F", "1e-5", " 7", "  7",
        "a1b2c3", "007", "4 4", "4  4", "No. 5", "50%", "$19.99", "10:30", "1/2", "½ cup", "x²+y³", "①②③", "Ⅻ", "٣٤٥", "१२३",
        "I'm", "you're", "they've", "we'll", "he'd", "it's", "don't", "IT'S", "I'M", "'s", "'S", "'tis", "rock 'n' roll",
        "''", "'''", "isn't it's I'd've", "O'Reilly's", "’s curly’s",
        "!", "!!!", "...", "…", "?!", "(a)", "[b]", "{c}", "<d>", "a.b.c", "a,b;c:d", "-", "--", "—", "–", "a-b", "a--b",
        "#hashtag", "@user", "user@example.com", "https://example.com/a?b=c&d=e#f", "C:\\path\\file.txt", "~/.config",
        "`code`", "**bold**", "_under_score_", "snake_case_name", "camelCaseName", "CONSTANT_NAME", "kebab-case",
        "for (int i = 0; i < n; i++) {", "    return x;\n}\n", "def f(x):\n\treturn x ** 2\n", "if (a && b || !c)",
        "x = y->z; // comment", "/* block */", "#include <stdio.h>\n", "printf(\"%d\\n\", 42);", "a[i][j] += b[j];",
        "SELECT * FROM t WHERE a='b';", "{\"key\": [1, 2, null, true]}", "<html><body class=\"x\">&amp;</body></html>",
        "$\\alpha + \\beta = \\gamma$", "\\begin{equation}", "E = mc^2", "∑∞∫√", "a ≤ b ≠ c", "→←↑↓", "°C", "10µm", "€5", "£5", "¥5",
        "café", "cafe\u0301", "naïve résumé", "Ünïcödé", "straße", "Æsir", "Łódź", "Škoda", "İstanbul", "ıi", "ﬁne", "Ⓐ",
        "привет мир", "Ελληνικά", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก", "こんにちは世界", "你好，世界！", "안녕하세요",
        "한국어 テスト 中文", "ქართული", "հայերեն", "አማርኛ", "தமிழ்", "বাংলা", "བོད", "ខ្មែរ", "ᏣᎳᎩ", "𐍈𐌰", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𠜎𠜱",
        "🙂", "🙂🙂", " 🙂 ", "👍🏽", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "❤️", "☃", "🏴‍☠️", "text🙂text", "😀1😀", "🤖 beep",
        "\u00a0", "a\u00a0b", "\u2003x", "\u3000全角", "\u200b", "a\u200bb", "\u200d", "\ufeffBOM", "\u2028", "a\u2029b", "\u0085x",
        "\u180ex", " \u180e ", "\u00ad", "\u202eabc", "a\u0300\u0301\u0302", "\u1680 x", "\ufffd", "\U0010ffff",
        "\x00", "a\x00b", "\x01\x02", "\x04", "a\x06b", "\x1b[31mred\x1b[0m", "\x7f", "\x0b\x0c", "\x1c\x1d\x1e\x1f", "\U00040000",
        "   \n   \n   x", "\n\n\n\n\n\n\n\n", " " * 64, " " * 65 + "x", "\t" * 17, "\n" * 40 + "end", "a" * 100, "ab" * 80,
        "!" * 50, "=" * 80, "-" * 33, "." * 21, "ha" * 30, "0" * 40, "é" * 25, "🙂" * 9, "a\n" * 20, " a" * 30,
        "The quick brown fox jumps over the lazy dog.", "Lorem ipsum dolor sit amet, consectetur adipiscing elit.",
        "antidisestablishmentarianism", "Pneumonoultramicroscopicsilicovolcanoconiosis", "supercalifragilisticexpialidocious",
        "xkcdqzjv", "QWERTYUIOPASDF", "aAbBcCdD", "iPhone15Pro", "H2O and CO2", "COVID-19", "B2B", "R2-D2", "3rd", "1st 2nd",
        "Mr. Smith went to Washington, D.C., in 1939.", "\"Quoted,\" he said.", "“smart” ‘quotes’", "«guillemets»", "¿Qué?", "¡Hola!",
        "line one\nline two\r\nline three\rline four", "a\u0000\u0000b", "end with newline\n", "end with space ", "end with tab\t",
        "<|endoftext|>", "<|im_start|>", "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>system\nYou are a helpful AI assistant "
        "named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|><|im_end|>", "a<|im_end|>b", " <|im_end|> ", "<|im_end", "|im_end|>", "<|im_end|", "<<|im_end|>>", "<repo_name>x",
        "<reponame><file_sep>", "<jupyter_start><jupyter_text>", "<jupyter_cod>", "<|IM_END|>", "<filename>a.py<gh_stars>100-1000",
        "5<|im_end|>5", "'s<|im_start|>'s", "  <|im_start|>  ",
    ]
    texts += [p for p in PROMPTS]
    texts += [paragraph for paragraph in essay.split("\n\n")[1:7]]
    # Mixed runs from a fixed seed: places where classes of characters meet.
    rng = random.Random(20240501)
    pieces = ["a", "Zz", " ", "  ", "\n", "\t", "1", "42", ".", ",", "!?", "'s", "'", "é", "ß", "ж", "中", "🙂", "\u00a0", "_", "-",
              "<|im_end|>", "²", "\u0301", "the", " the", "ing"]
    for _ in range(60):
        texts.append("".join(rng.choice(pieces) for _ in range(rng.randint(2, 24))))
    return texts


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
    for text in tokenizer_texts(essay):
        shown = {"hex": text.encode().hex()} if "\0" in text else {"text": text}  # C strings end at a zero
        cases.append({**shown, "ids": special.encode(text, add_special_tokens=False).ids,
                      "plain_ids": plain.encode(text, add_special_tokens=False).ids,
                      "pieces": {name: piece_bytes(pre, text) for name, pre in pre_tokenizers.items()}})
    write_json("tokenizer.json", {"cases": cases, "invalid_utf8_hex": INVALID_UTF8})
    print(f"{len(cases)} tokenizer cases")


# --- recording ------------------------------------------------------------------------------------

def write_json(name, value):
    text = json.dumps(value, ensure_ascii=True, indent=None, separators=(",", ":"))
    (HERE / name).write_text(re.sub(r'([{])(?="(text|hex|messages)")', r"\n\1", text) + "\n", encoding="ascii")


def extend_greedily(model, ids, num_total, banned=(), stop=None):
    """Appends the argmax token until there are `num_total`, or after `stop`. Also the difference
    between the two best logits at each step: how close another choice was."""
    ids, margins, cache, given = list(ids), [], None, list(ids)
    with torch.no_grad():
        while len(ids) < num_total:
            result = model(torch.tensor([given]), past_key_values=cache, use_cache=True)
            logits, cache = result.logits[0, -1].clone(), result.past_key_values
            for token in banned:
                logits[token] = -float("inf")
            top = torch.topk(logits, 2)
            margins.append(round((top.values[0] - top.values[1]).item(), 5))
            given = [top.indices[0].item()]
            ids += given
            if given[0] == stop:
                break
    return ids, margins


def write_logits(model, tokenizer, num_vocabulary):
    rng = random.Random(7)
    probes = sorted(rng.sample(range(num_vocabulary), NUM_PROBES))
    out = bytearray(b"FVLG")
    out += struct.pack("<5I", FORMAT_VERSION, len(PROMPTS), NUM_PROBES, num_vocabulary, 0)
    out += struct.pack(f"<{NUM_PROBES}i", *probes)
    for prompt in PROMPTS:
        start = tokenizer.encode(prompt, add_special_tokens=False).ids
        ids, _ = extend_greedily(model, start, NUM_POSITIONS, banned=(0, 2))
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        top = torch.topk(logits, 2, dim=-1)
        normaliser = torch.logsumexp(logits, dim=-1)
        out += struct.pack("<2I", len(start), len(ids)) + struct.pack(f"<{len(ids)}i", *ids)
        for position in range(len(ids)):
            out += struct.pack("<2i", *top.indices[position].tolist())
            out += struct.pack("<3f", *top.values[position].tolist(), normaliser[position].item())
            out += struct.pack(f"<{NUM_PROBES}f", *logits[position, probes].tolist())
        print(repr(tokenizer.decode(ids)[:140]))
    (HERE / "logits.bin").write_bytes(out)


def write_essay(model, tokenizer, essay):
    ids = tokenizer.encode(essay, add_special_tokens=False).ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    nll = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    out = b"FVNL" + struct.pack("<2I", FORMAT_VERSION, len(ids)) + struct.pack(f"<{len(ids)}i", *ids)
    out += struct.pack(f"<{len(ids) - 1}f", *nll.tolist())
    (HERE / "essay.bin").write_bytes(out)
    print(f"essay: {len(ids)} tokens, perplexity {nll.mean().exp().item():.6f}")


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
    write_essay(model, special, essay)
    write_logits(model, special, fields["llama.vocab_size"])

    print("model sha256:", hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest())
    for module in (torch, transformers, tokenizers, np):
        print(module.__name__, module.__version__)
    import importlib.metadata
    print("gguf", importlib.metadata.version("gguf"), "python", sys.version.split()[0])


if __name__ == "__main__":
    main()
