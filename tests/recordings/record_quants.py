#!/usr/bin/env python3
"""Records what the Python package `gguf` makes of rows of every block format that fovea reads: random
bytes with finite scales, and their values. Run by hand; file format: README.md beside this script.

Needs: gguf, numpy.
"""
import struct

import gguf
import numpy as np

from pathlib import Path

NUM_VALUES = 512
TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
SCALES_AT = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}  # fp16; else at 0


def main():
    rng = np.random.default_rng(5)
    out = b"FVQT" + struct.pack("<2I", 1, len(TYPES))
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows = rng.integers(0, 256, (NUM_VALUES // block, block_bytes), dtype=np.uint8)
        for at in SCALES_AT.get(name, [0]):
            scales = rng.normal(0.0, 0.01, (rows.shape[0], 1)).astype(np.float16)
            rows[:, at:at + 2] = scales.view(np.uint8)
        values = gguf.quants.dequantize(rows, kind).astype(np.float32).reshape(-1)
        assert values.size == NUM_VALUES and rows.size % 4 == 0 and np.isfinite(values).all()
        out += struct.pack("<3I", kind.value, NUM_VALUES, rows.size) + rows.tobytes() + values.tobytes()
    (Path(__file__).resolve().parent / "quants.bin").write_bytes(out)
    print(len(out), "bytes")


if __name__ == "__main__":
    main()
