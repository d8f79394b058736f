"""What the recording scripts share: texts, the writing of the files, greedy continuation.

File formats: README.md beside this file. Nothing of fovea is used.
"""
import json
import pathlib
import random
import re
import struct

import torch

HERE = pathlib.Path(__file__).resolve().parent
FORMAT_VERSION = 1
CHUNK = 256  # positions whose logits are held in double at one time


def tokenizer_texts(special_texts, mark, prompts, essay):
    """Texts where tokenizers differ: `special_texts` hold control tokens of the model, one of which is
    `mark`."""
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
    ]
    texts += special_texts
    texts += prompts
    texts += [paragraph for paragraph in essay.split("\n\n")[1:7]]
    # Mixed runs from a fixed seed: places where classes of characters meet.
    rng = random.Random(20240501)
    pieces = ["a", "Zz", " ", "  ", "\n", "\t", "1", "42", ".", ",", "!?", "'s", "'", "é", "ß", "ж", "中", "🙂", "\u00a0", "_", "-",
              mark, "²", "\u0301", "the", " the", "ing"]
    for _ in range(60):
        texts.append("".join(rng.choice(pieces) for _ in range(rng.randint(2, 24))))
    return texts


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


def logits_in_chunks(logits):
    """(first position, logits in double) for some positions at a time: a vocabulary may be large."""
    for begin in range(0, logits.shape[0], CHUNK):
        yield begin, logits[begin:begin + CHUNK].double()


def write_logits(name, model, texts, num_vocabulary, num_probes):
    """`texts`: pairs of the number of prompt tokens and all ids, prompt and continuation."""
    rng = random.Random(7)
    probes = sorted(rng.sample(range(num_vocabulary), num_probes))
    out = bytearray(b"FVLG")
    out += struct.pack("<5I", FORMAT_VERSION, len(texts), num_probes, num_vocabulary, 0)
    out += struct.pack(f"<{num_probes}i", *probes)
    for num_prompt, ids in texts:
        with torch.no_grad():
            all_logits = model(torch.tensor([ids])).logits[0]
        out += struct.pack("<2I", num_prompt, len(ids)) + struct.pack(f"<{len(ids)}i", *ids)
        for _, logits in logits_in_chunks(all_logits):
            top = torch.topk(logits, 2, dim=-1)
            normaliser = torch.logsumexp(logits, dim=-1)
            for row in range(logits.shape[0]):
                out += struct.pack("<2i", *top.indices[row].tolist())
                out += struct.pack("<3f", *top.values[row].tolist(), normaliser[row].item())
                out += struct.pack(f"<{num_probes}f", *logits[row, probes].tolist())
    (HERE / name).write_bytes(out)


def write_essay(name, model, ids):
    with torch.no_grad():
        all_logits = model(torch.tensor([ids])).logits[0]
    nll = torch.empty(len(ids) - 1, dtype=torch.double)
    for begin, logits in logits_in_chunks(all_logits[:-1]):
        targets = torch.tensor(ids[begin + 1:begin + 1 + logits.shape[0]])
        nll[begin:begin + logits.shape[0]] = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    out = b"FVNL" + struct.pack("<2I", FORMAT_VERSION, len(ids)) + struct.pack(f"<{len(ids)}i", *ids)
    out += struct.pack(f"<{len(ids) - 1}f", *nll.tolist())
    (HERE / name).write_bytes(out)
    print(f"essay: {len(ids)} tokens, perplexity {nll.mean().exp().item():.6f}")
