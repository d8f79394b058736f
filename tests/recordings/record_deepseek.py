#!/usr/bin/env python3
"""Makes two tiny models of the DeepSeek family with random weights, as GGUF files, and records what an
independent implementation computes with them, as data for fovea's tests.

Run by hand, never in CI; the tests only read the files that this script writes:

    python3 record_deepseek.py

    deepseek_v3.gguf       MLA with latents of queries; experts in groups, sigmoid gating with a bias; YaRN.
                           In the newer form: attn_k_b and attn_v_b, key_length_mla
    deepseek_v2_lite.gguf  MLA without latents of queries; softmax gating. In the older form: attn_kv_b

The models are Hugging Face transformers' DeepseekV3ForCausalLM and DeepseekV2ForCausalLM in fp32, eager
attention, on the CPU, with the weights that the `gguf` package reads from the files. The order of
the rotated elements is the same everywhere, neighbouring pairs: DeepSeek's checkpoints have it, and the
field's converter for `deepseek2` permutes nothing. Nothing of fovea is used. File formats: README.md
beside this script.

Needs: torch, transformers, tokenizers, gguf, numpy.
"""
import hashlib
import importlib.metadata
import json
import random
import sys

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from recording import HERE, extend_greedily, write_json, write_logits

NUM_POSITIONS = 64  # of each short prompt with its continuation
LONG_CONTINUATION = 40
NUM_PROBES = 16
BYTES, BOS, EOS = 256, 256, 257  # tokens 0 to 255 are bytes
VOCABULARY = ["<|begin|>", "<|end|>", "th", "in", "er", "an", "Ġt", "Ġa", "the", "Ġthe", "ing", "and", "Ġand", "re"]
MERGES = ["t h", "i n", "e r", "a n", "Ġ t", "Ġ a", "th e", "Ġ the", "in g", "an d", "Ġ and", "r e"]

# Where the tokenizers of DeepSeek-V3 and V2 cut a text, one after another.
# Letters with cases, of some scripts none: the list of ranges in DeepSeek-V2's tokenizer.json, in short.
CASED = (r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c88}\x{2d00}-\x{2d2d}\x{a790}-\x{ab68}"
         r"\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1df1e}]]")
PATTERNS = {
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
                    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
                    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"],
    "deepseek-llm": ["[\r\n]", r"\s?" + CASED + "+",
                     r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
                     r"\s+$", r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+", r"\p{N}+"],
}

TEXTS = ["The keeper of the lighthouse climbed", "2 + 2 = ", "int main(void)\n{\n", "Über die Brücke", "\x00\x01\x02", "a"]
LONG_LENGTHS = [130, 330]

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
        "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}

COMMON = dict(vocab_size=BYTES + len(VOCABULARY), hidden_size=64, intermediate_size=96, max_position_embeddings=512,
              rms_norm_eps=1e-6, tie_word_embeddings=False, attention_bias=False, bos_token_id=BOS, eos_token_id=EOS)

V3 = dict(COMMON, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=6, q_lora_rank=48, kv_lora_rank=64,
          qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=48, first_k_dense_replace=1, n_routed_experts=8,
          num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=32, n_group=4, topk_group=2,
          norm_topk_prob=True, routed_scaling_factor=2.5, rope_parameters=YARN, num_nextn_predict_layers=0)

V2_LITE = dict(COMMON, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None,
               kv_lora_rank=96, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=32, first_k_dense_replace=1,
               n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2, moe_intermediate_size=32, n_group=1,
               topk_group=1, topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0,
               rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


# --- the files ------------------------------------------------------------------------------------

def byte_tokens():
    """The printable character that GPT-2's byte-level vocabularies have for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def layer_shapes(config, layer):
    """(name, shape, gain) of the weights of a layer; the variance of a weight's output is gain^2 that of its input."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    experts, ffn = config["n_routed_experts"], config["moe_intermediate_size"]
    if config["q_lora_rank"]:
        yield "attn_q_a.weight", (config["q_lora_rank"], hidden), 1.0
        yield "attn_q_a_norm.weight", (config["q_lora_rank"],), 1.0
        yield "attn_q_b.weight", (heads * (nope + rope), config["q_lora_rank"]), 1.5
        yield "attn_k_b.weight", (heads, latent, nope), 1.5
        yield "attn_v_b.weight", (heads, value, latent), 1.0
    else:
        yield "attn_q.weight", (heads * (nope + rope), hidden), 1.5
        yield "attn_kv_b.weight", (heads * (nope + value), latent), 1.0
    yield "attn_kv_a_mqa.weight", (latent + rope, hidden), 1.0
    yield "attn_kv_a_norm.weight", (latent,), 1.0
    yield "attn_output.weight", (hidden, heads * value), 1.0
    yield "attn_norm.weight", (hidden,), 1.0
    yield "ffn_norm.weight", (hidden,), 1.0
    if layer < config["first_k_dense_replace"]:
        parts = [("", (), config["intermediate_size"])]
    else:
        parts = [("_exps", (experts,), ffn), ("_shexp", (), ffn * config["n_shared_experts"])]
        yield "ffn_gate_inp.weight", (experts, hidden), 2.0
        if "topk_method" not in config:
            yield "exp_probs_b.bias", (experts,), 0.1
    for suffix, leading, size in parts:
        yield f"ffn_gate{suffix}.weight", (*leading, size, hidden), 1.0
        yield f"ffn_up{suffix}.weight", (*leading, size, hidden), 1.0
        yield f"ffn_down{suffix}.weight", (*leading, hidden, size), 1.0


def make_weight(rng, name, shape, gain):
    noise = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name:
        return 1.0 + 0.2 * noise
    if name.endswith("bias"):
        return gain * noise
    fan_in = shape[-2] if "attn_k_b" in name else shape[-1]  # attn_k_b lies transposed
    return gain * noise / np.sqrt(np.float32(fan_in))


def add_weight(writer, name, values):
    """F32 for what files have in it, Q8_0 for parts of layers with experts, F16 for the rest."""
    if values.ndim == 1 or "gate_inp" in name:
        writer.add_tensor(name, values)
    elif "ffn" in name or "token_embd" in name:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values.astype(np.float16))


def add_metadata(writer, config):
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    head, value = config["qk_nope_head_dim"] + rope, config["v_head_dim"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(rope)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_kv_lora_rank(latent)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["q_lora_rank"]:  # the newer form
        writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_head_count_kv(1)
        writer.add_key_length(latent + rope)
        writer.add_value_length(latent)
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(value)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    else:
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(head)
        writer.add_value_length(value)
    scaling = config["rope_parameters"]
    if scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def add_tokenizer(writer):
    kinds = [gguf.TokenType.NORMAL] * BYTES + [gguf.TokenType.CONTROL] * 2
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("deepseek-v3")
    writer.add_token_list(byte_tokens() + VOCABULARY)
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (len(VOCABULARY) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)


def write_file(path, name, config, seed):
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_name(name)
    add_metadata(writer, config)
    add_tokenizer(writer)
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    add_weight(writer, "token_embd.weight", make_weight(rng, "token_embd", (vocabulary, hidden), np.sqrt(hidden)))
    add_weight(writer, "output_norm.weight", make_weight(rng, "output_norm", (hidden,), 1.0))
    output = make_weight(rng, "output", (vocabulary, hidden), 3.0)
    output[BOS:EOS + 1] = 0.0  # never the best: greedy texts need no exception for control tokens
    add_weight(writer, "output.weight", output)
    for layer in range(config["num_hidden_layers"]):
        for suffix, shape, gain in layer_shapes(config, layer):
            add_weight(writer, f"blk.{layer}.{suffix}", make_weight(rng, suffix, shape, gain))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    print(f"{path.name}: {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}")


# --- the models -----------------------------------------------------------------------------------

NAMES = {
    "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight", "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight", "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn_kv_b.weight": "self_attn.kv_b_proj.weight", "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight", "ffn_up.weight": "mlp.up_proj.weight", "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight", "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight", "ffn_down_exps.weight": "mlp.experts.down_proj",
}


def load_state(path):
    file, state = {}, {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        file[tensor.name] = torch.from_numpy(values.reshape([int(n) for n in reversed(tensor.shape)]).copy())
    state["model.embed_tokens.weight"] = file.pop("token_embd.weight")
    state["model.norm.weight"] = file.pop("output_norm.weight")
    state["lm_head.weight"] = file.pop("output.weight")
    for name in list(file):
        if name not in file:
            continue  # was the second of a pair
        _, layer, suffix = name.split(".", 2)
        block, prefix = f"blk.{layer}.", f"model.layers.{layer}."
        if suffix in ("attn_k_b.weight", "attn_v_b.weight"):
            keys, values = file.pop(block + "attn_k_b.weight"), file.pop(block + "attn_v_b.weight")
            joined = torch.cat([keys.transpose(1, 2), values], dim=1)
            state[prefix + "self_attn.kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
        elif suffix in ("ffn_gate_exps.weight", "ffn_up_exps.weight"):
            gate, up = file.pop(block + "ffn_gate_exps.weight"), file.pop(block + "ffn_up_exps.weight")
            state[prefix + "mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        else:
            state[prefix + NAMES[suffix]] = file.pop(name)
    return state


def load_model(path, config):
    if "topk_method" in config:
        config, kind = transformers.DeepseekV2Config(**config), transformers.DeepseekV2ForCausalLM
    else:
        config, kind = transformers.DeepseekV3Config(**config), transformers.DeepseekV3ForCausalLM
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = kind(config).float().eval()
    missing, unexpected = model.load_state_dict(load_state(path), strict=False)
    if missing or unexpected:
        sys.exit(f"weights do not fit the model: missing {missing}, unexpected {unexpected}")
    return model


# --- recording ------------------------------------------------------------------------------------

def write_all_logits(name, model):
    rng = random.Random(5)
    starts = [[BOS] + list(text.encode()) for text in TEXTS]
    starts += [[BOS] + [rng.randrange(BYTES) for _ in range(length)] for length in LONG_LENGTHS]
    texts = []
    for start in starts:
        num_tokens = NUM_POSITIONS if len(start) < NUM_POSITIONS else len(start) + LONG_CONTINUATION
        ids, margins = extend_greedily(model, start, num_tokens)
        texts.append((len(start), ids))
        print(f"{len(ids)} tokens, {len(set(ids[len(start):]))} different ones written, "
              f"least margin {min(margins)}, close calls: {sum(margin <= 0.05 for margin in margins)}")
    write_logits(name, model, texts, model.config.vocab_size, NUM_PROBES)


def routing_case(rng, router, kind, num_rows, **settings):
    """What a router of transformers makes of logits, given as the hidden state of a router whose weight is the
    identity."""
    count = settings["num_experts"]
    logits = torch.from_numpy(np.round(rng.standard_normal((num_rows, count)) * 512).astype(np.float32) / 512)
    bias = torch.from_numpy(0.3 * rng.standard_normal(count).astype(np.float32)) if settings["has_bias"] else None
    router.weight.data = torch.eye(count)
    if bias is not None:
        router.e_score_correction_bias.data = bias
    with torch.no_grad():
        _, weights, indices = router(logits)
    order = indices.argsort(dim=-1)
    return {**settings, "gating": kind, "bias": [] if bias is None else bias.tolist(), "logits": logits.tolist(),
            "experts": indices.gather(1, order).tolist(), "weights": weights.gather(1, order).tolist()}


def write_routing(name):
    rng = np.random.default_rng(9)
    cases = []
    for count, used, groups, used_groups, norm, scale in [(8, 3, 4, 2, True, 2.5), (256, 8, 8, 4, True, 2.5),
                                                          (16, 4, 1, 1, False, 1.0), (12, 6, 3, 2, True, 1.0)]:
        config = transformers.DeepseekV3Config(
            hidden_size=count, n_routed_experts=count, num_experts_per_tok=used, n_group=groups, topk_group=used_groups,
            norm_topk_prob=norm, routed_scaling_factor=scale)
        router = modeling_deepseek_v3.DeepseekV3TopkRouter(config)
        cases.append(routing_case(rng, router, 2, max(4, 128 // count), num_experts=count, num_used=used, num_groups=groups,
                                  num_used_groups=used_groups, normalises=norm, scale=scale, has_bias=True))
    for count, used, groups, used_groups, scale in [(6, 2, 1, 1, 1.0), (64, 6, 1, 1, 1.0), (160, 6, 8, 3, 16.0)]:
        config = transformers.DeepseekV2Config(
            hidden_size=count, n_routed_experts=count, num_experts_per_tok=used, n_group=groups, topk_group=used_groups,
            topk_method="greedy" if groups == 1 else "group_limited_greedy", routed_scaling_factor=scale,
            num_attention_heads=1)
        router = modeling_deepseek_v2.DeepseekV2TopkRouter(config)
        cases.append(routing_case(rng, router, 1, max(4, 128 // count), num_experts=count, num_used=used, num_groups=groups,
                                  num_used_groups=used_groups, normalises=False, scale=scale, has_bias=False))
    write_json(name, {"cases": cases})
    print(f"{len(cases)} routing cases")


def write_pieces(name):
    """The lengths of the pieces, in bytes, of the texts of tokenizer.json."""
    texts = [case.get("text", bytes.fromhex(case.get("hex", "")).decode())
             for case in json.loads((HERE / "tokenizer.json").read_text())["cases"]]
    pieces = {}
    for pre, patterns in PATTERNS.items():
        cuts = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
        pre_tokenizer = tokenizers.pre_tokenizers.Sequence(cuts)
        pieces[pre] = [[len(piece.encode()) for piece, _ in pre_tokenizer.pre_tokenize_str(text)] for text in texts]
        print(f"{pre}: {sum(map(len, pieces[pre]))} pieces of {len(texts)} texts")
    write_json(name, {"pieces": pieces})


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, config, seed in [("deepseek_v3", V3, 2), ("deepseek_v2_lite", V2_LITE, 10)]:
        path = HERE / f"{name}.gguf"
        write_file(path, name.replace("_", "-") + "-tiny", config, seed)
        write_all_logits(f"{name}_logits.bin", load_model(path, config))
    write_routing("deepseek_routing.json")
    write_pieces("deepseek_pieces.json")
    for module in (torch, transformers, tokenizers, np):
        print(module.__name__, module.__version__)
    print("gguf", importlib.metadata.version("gguf"), "python", sys.version.split()[0])


if __name__ == "__main__":
    main()
