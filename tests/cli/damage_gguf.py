"""damage_gguf.py MODEL OUT KIND: writes a copy of a GGUF file with one thing wrong. The layout is that
of the GGUF specification, version 3."""
import shutil
import struct
import sys

FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a value by type
STRING, ARRAY = 8, 9


def read(file, form):
    return struct.unpack("<" + form, file.read(struct.calcsize("<" + form)))[0]


def read_string(file):
    return file.read(read(file, "Q"))


def skip_value(file, kind):
    if kind == STRING:
        read_string(file)
    elif kind == ARRAY:
        element, count = read(file, "I"), read(file, "Q")
        if element in FIXED:
            file.seek(FIXED[element] * count, 1)
        else:
            for _ in range(count):
                skip_value(file, element)
    else:
        file.seek(FIXED[kind], 1)


def find_places(file):
    """Where things are: the bytes of the architecture's name, each tensor's first dimension, type and offset."""
    file.seek(8)
    num_tensors, num_keys = read(file, "Q"), read(file, "Q")
    architecture, tensors = None, []
    for _ in range(num_keys):
        key, kind = read_string(file), read(file, "I")
        if key == b"general.architecture":
            architecture = file.tell() + 8
        skip_value(file, kind)
    for _ in range(num_tensors):
        read_string(file)
        num_dims = read(file, "I")
        dims = file.tell()
        file.seek(8 * num_dims, 1)
        tensors.append((dims, file.tell(), file.tell() + 4))
        file.seek(12, 1)
    return architecture, tensors


def main():
    model, out, kind = sys.argv[1:]
    if kind in ("empty", "header-cut", "data-cut"):
        size = {"empty": 0, "header-cut": 5000, "data-cut": 60_000_000}[kind]
        with open(model, "rb") as source, open(out, "wb") as target:
            target.write(source.read(size))
        return
    shutil.copyfile(model, out)
    with open(out, "r+b") as file:
        architecture, tensors = find_places(file)
        file.seek(tensors[0][2])
        first_offset = read(file, "Q")
        where, what = {
            "magic": (0, b"GGML"),
            "version": (4, struct.pack("<I", 99)),
            "tensor-count": (8, struct.pack("<Q", 2**62)),
            "key-count": (16, struct.pack("<Q", 2**62)),
            "string-length": (24, struct.pack("<Q", 2**63)),
            "architecture": (architecture, b"lla\xc3\xa9"),
            "huge-offset": (tensors[3][2], struct.pack("<Q", 2**64 - 64)),
            "far-offset": (tensors[3][2], struct.pack("<Q", 2**40)),
            "overlap": (tensors[3][2], struct.pack("<Q", first_offset)),
            "huge-dimension": (tensors[3][0], struct.pack("<Q", 2**61)),
            "type": (tensors[3][1], struct.pack("<I", 77)),
        }[kind]
        file.seek(where)
        file.write(what)


main()
